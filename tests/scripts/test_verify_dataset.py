"""`dlrm.scripts.verify_dataset` finds what is wrong with a dataset, and nothing in a good one."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import yaml
from small_dataset import write_dataset

from dlrm.data.clicks import layout
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.data.transform.transform import Transform
from dlrm.language.data import layout as text_layout
from dlrm.manifest import sealed_json, write_manifest
from dlrm.preproc.transcode import CsvConfig, transcode_csv
from dlrm.scripts.verify_dataset.command import verify
from dlrm.vision import layout as image_layout


@pytest.fixture
def copy(dataset, tmp_path):
    return shutil.copytree(dataset, tmp_path / "a copy")


def new_manifest(directory):
    (directory / "manifest.json").unlink()
    write_manifest(directory, "dataset", rows={}, cardinalities=[], transform={})


def test_a_good_dataset_has_no_problems(dataset):
    assert list(verify(dataset)) == []
    command = [sys.executable, "-m", "dlrm.scripts.verify_dataset"]
    done = subprocess.run([*command, dataset], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{dataset}: nothing wrong"
    done = subprocess.run([*command, dataset / "no"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no such directory" in done.stderr


def test_a_flipped_bit_is_found(copy):
    path = copy / "train" / "numerical.bin"
    content = bytearray(path.read_bytes())
    content[77] ^= 1
    path.write_bytes(content)
    (problem,) = verify(copy)
    assert f"{path}: expected CRC-32" in problem


def test_a_sample_weight_that_is_none_is_found(copy):
    rows = (copy / "train" / "label.bin").stat().st_size
    weights = np.ones(rows, np.float32)
    weights[[7, 11]] = np.nan, -1
    weights.tofile(copy / "train" / "weight.bin")
    new_manifest(copy)
    (problem,) = verify(copy)
    assert problem.endswith("weight.bin: row 7: expected a weight of 0 or more, got nan")


def test_all_problems_are_said(copy):
    table = copy / "test" / "cat_0.bin"
    size = layout.read_model_size(copy)[0]
    ids = np.fromfile(table, layout.id_dtype(size))
    ids[[5, 9]] = size, -1
    ids.tofile(table)
    labels = copy / "train" / "label.bin"
    content = bytearray(labels.read_bytes())
    content[3] = 2
    labels.write_bytes(content)
    numbers = np.fromfile(copy / "validation" / "numerical.bin", np.float16)
    numbers[-1] = np.inf
    numbers.tofile(copy / "validation" / "numerical.bin")
    new_manifest(copy)
    problems = list(verify(copy))
    assert len(problems) == 3
    assert f"{labels}: row 3: expected a label of 0 or 1, got 2" in problems
    expected = f"expected an id in [0, {size}), got {size} (and 1 more in this part of the file)"
    assert f"{table}: row 5: {expected}" in problems
    assert any("expected a finite one, got inf" in problem for problem in problems)


@pytest.mark.parametrize("listed", [True, False])
def test_the_validation_of_other_software_is_checked(copy, capsys, listed):
    (copy / "manifest.json").unlink()
    path = copy / "feature_spec.yaml"
    sections = yaml.safe_load(path.read_text())
    assert sections["source_spec"].keys() == {"train", "test"}
    if listed:
        test = json.dumps(sections["source_spec"]["test"])
        sections["source_spec"]["validation"] = json.loads(test.replace("test/", "validation/"))
        path.write_text(yaml.safe_dump(sections))
    assert list(verify(copy)) == []
    assert "validation: 1,501 rows" in capsys.readouterr().out
    labels = copy / "validation" / "label.bin"
    labels.write_bytes(b"\7" + labels.read_bytes()[1:])
    (problem,) = verify(copy)
    assert problem == f"{labels}: row 0: expected a label of 0 or 1, got 7"


def test_a_validation_folder_that_the_manifest_has_not_is_wrong(dataset, tmp_path):
    directory = write_dataset(tmp_path / "dataset", {"train": 9, "test": 9})
    shutil.copytree(dataset / "validation", directory / "validation")
    problems = list(verify(directory))
    assert len(problems) == 6
    assert all("not in manifest.json, though readers would take it" in one for one in problems)
    with pytest.raises(ValueError, match="expected the rows of the manifest"):
        open_datasets(DataConfig(dataset=str(directory)))


def test_a_missing_file_and_a_short_one_are_named(copy):
    (copy / "test" / "cat_1.bin").unlink()
    with open(copy / "train" / "cat_0.bin", "r+b") as file:
        file.truncate(1)
    problems = "\n".join(verify(copy))
    assert f"{copy / 'test' / 'cat_1.bin'}: missing" in problems
    assert f"{copy / 'train' / 'cat_0.bin'}: expected" in problems


def test_a_dictionary_of_another_dataset_is_found(copy):
    Transform.from_logs(2, [np.array([7, 8, 9], np.uint32)]).save(copy / "transform")
    new_manifest(copy)
    (problem,) = verify(copy)
    assert "expected the transform of this dataset" in problem


def test_the_transform_of_a_csv_is_checked(tmp_path):
    csv, directory = tmp_path / "rows.csv", tmp_path / "dataset"
    csv.write_text("y,price,city\n" + "0,1.5,x\n1,2,y\n" * 9)
    transcode_csv(CsvConfig(str(csv), str(directory), "y", ("price",), ("city",)))
    assert list(verify(directory)) == []
    path = directory / "transform" / "table.json"
    whole = path.read_text()
    path.write_text(whole.replace('"city"', '{"column": "city", "hash_buckets": 1}', 1))
    new_manifest(directory)
    (problem,) = verify(directory)
    expected = "expected the transform of this dataset, with tables of [3] rows, got one with [4]"
    assert problem == f"{directory / 'transform'}: {expected}"
    path.write_text(whole[:-9])
    new_manifest(directory)
    (problem,) = verify(directory)
    assert f"{path}: line " in problem
    path.unlink()
    new_manifest(directory)
    (problem,) = verify(directory)
    assert "transform.json: no such file" in problem


def test_an_extra_file_is_said_and_one_that_readers_would_take_is_wrong(copy, capsys):
    (copy / "train" / "notes.txt").write_text("mine")
    assert list(verify(copy)) == []
    assert f"{copy / 'train' / 'notes.txt'}: an extra file" in capsys.readouterr().out
    (copy / "transform").mkdir()
    (copy / "transform" / "dictionary_0.npy").write_bytes(b"")
    first, _ = verify(copy)  # the second: it is no transform
    assert "dictionary_0.npy: not in manifest.json, though readers would take it" in first
    shutil.rmtree(copy / "transform")
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["files"]["test/cat_0.bin"]
    (copy / "manifest.json").write_text(sealed_json(manifest))
    (problem,) = verify(copy)
    assert f"{copy / 'test' / 'cat_0.bin'}: not in manifest.json" in problem


def test_a_flipped_bit_of_a_dictionary_is_found_without_a_manifest(tmp_path):
    directory = write_dataset(tmp_path / "foreign")
    sizes = layout.read_model_size(directory)
    (directory / "manifest.json").unlink()
    Transform.from_logs(2, [np.arange(1, size, dtype=np.uint32) for size in sizes]).save(
        directory / "transform"
    )
    assert list(verify(directory)) == []
    path = directory / "transform" / "dictionary_0.npy"
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    path.write_bytes(content)
    (problem,) = verify(directory)
    assert f"{path}: expected CRC-32" in problem


def test_a_foreign_dataset_is_checked_without_a_manifest(tmp_path, capsys):
    directory = write_dataset(tmp_path / "foreign")
    (directory / "manifest.json").unlink()
    assert list(verify(directory)) == []
    assert "sizes and checksums are not checked" in capsys.readouterr().out


def test_binary_rows_are_checked(tmp_path):
    rows = np.array([[0, 0, 3], [1, 0, 4], [5, 0, 0]], "<i4")
    (tmp_path / "model_size.json").write_text(json.dumps({"_c14": 3}))
    rows.tofile(tmp_path / "train_data.bin")
    rows[:1].tofile(tmp_path / "test_data.bin")
    first, second = verify(tmp_path, num_numerical=1)
    assert "train_data.bin: row 2: expected a label of 0 or 1, got 5" in first
    assert "train_data.bin: row 1: expected an id in [0, 4) of table 0, got 4" in second
    assert "expected a multiple of 16 bytes" in next(verify(tmp_path, num_numerical=2))


@pytest.fixture
def images(tmp_path):
    """Two shards of three 2 x 2 images of two classes."""
    (tmp_path / "train").mkdir()
    for shard in range(2):
        images_file, labels_file = image_layout.shard_files(tmp_path, "train", shard)
        images_file.write_bytes(bytes(range(3 * 3 * 2 * 2)))
        np.array([0, 1, 1], image_layout.LABEL_DTYPE).tofile(labels_file)
    write_image_manifest(tmp_path)
    return tmp_path


def write_image_manifest(directory):
    (directory / "manifest.json").unlink(missing_ok=True)
    facts = {"size": 2, "classes": ["cat", "dog"], "splits": {"train": [3, 3]}}
    write_manifest(directory, image_layout.KIND, **facts)


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)


def test_images_are_checked(images, capsys):
    assert list(verify(images)) == []
    assert "train: 6 rows" in capsys.readouterr().out
    first, second = (image_layout.shard_files(images, "train", shard) for shard in range(2))
    for path in (first[0], second[0]):
        flip_a_bit(path)
    problems = list(verify(images))
    assert [problem.partition(":")[0] for problem in problems] == [str(first[0]), str(second[0])]
    assert all("expected CRC-32" in problem for problem in problems)
    for files in (first, second):
        np.array([0, -1, 2], image_layout.LABEL_DTYPE).tofile(files[1])
    write_image_manifest(images)
    assert list(verify(images)) == [
        f"{files[1]}: row 1: expected a label in [0, 2), got -1" for files in (first, second)
    ]
    second[0].write_bytes(b"short")
    assert list(verify(images)) == [f"{second[0]}: expected 36 bytes, got 5"]
    manifest = json.loads((images / "manifest.json").read_text())
    del manifest["size"]
    second[0].write_bytes(first[0].read_bytes())
    (images / "manifest.json").write_text(sealed_json(manifest))
    (problem,) = verify(images)
    assert "manifest.json: size: expected a number of 1 or more, got None" in problem


def test_texts_are_checked(tmp_path, capsys):
    facts = {"max_seq_length": 8, "max_predictions": 2, "vocab_size": 99}
    tokens_file, facts_file = text_layout.shard_files(tmp_path, 0)
    tokens_file.write_bytes(bytes(3 * (8 + 2 * 2) * 2))
    facts_file.write_bytes(bytes(3 * 4 * 2))
    text_layout.write_text_manifest(tmp_path, [3], **facts)
    assert list(verify(tmp_path)) == []
    assert "3 rows" in capsys.readouterr().out
    flip_a_bit(tokens_file)
    (problem,) = verify(tmp_path)
    assert f"{tokens_file}: expected CRC-32" in problem
    (tmp_path / "manifest.json").unlink()
    text_layout.write_text_manifest(tmp_path, [2], **facts)
    (problem,) = verify(tmp_path)
    assert f"{facts_file}: truncated or too long: expected 16 bytes for 2 rows, got 24" in problem
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    del manifest["vocab_size"]
    (tmp_path / "manifest.json").write_text(sealed_json(manifest))
    (problem,) = verify(tmp_path)
    assert "manifest.json: vocab_size: expected a number in [1, 2147483647], got None" in problem


def test_texts_in_hdf5_are_checked_by_their_checksums(tmp_path):
    facts = {"max_seq_length": 8, "max_predictions": 2, "vocab_size": 99}
    (tmp_path / "part_00000.hdf5").write_bytes(bytes(100))
    text_layout.write_text_manifest(tmp_path, [3], output_format="hdf5", **facts)
    assert list(verify(tmp_path)) == []
    flip_a_bit(tmp_path / "part_00000.hdf5")
    (problem,) = verify(tmp_path)
    assert f"{tmp_path / 'part_00000.hdf5'}: expected CRC-32" in problem
