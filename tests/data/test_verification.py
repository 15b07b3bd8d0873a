"""Files are compared with their checksums before their bytes are used, and only once."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from dlrm.data import layout, verification
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.writer import SplitWriter
from dlrm.data.verification import STAMP
from dlrm.locks import lock
from dlrm.manifest import BLOCK_BYTES, sealed_json

ROWS = BLOCK_BYTES // 2 + 1000  # of int32 ids: two blocks and part of a third
SMALL = 64


def write(directory, rows=SMALL):
    spec = FeatureSpec.default(directory, 3, [100_000, 50], ["train", "test"])
    random = np.random.default_rng(0)
    for split in ("train", "test"):
        with SplitWriter(spec, split) as writer:
            ids = [random.integers(0, size, rows) for size in spec.cardinalities]
            writer.write(random.integers(0, 2, rows), random.normal(size=(rows, 3)), ids)
    spec.save()
    layout.write_model_size(directory, spec.cardinalities)
    (directory / "transform").mkdir()
    (directory / "transform/transform.json").write_text('{"any": "thing"}')
    layout.write_dataset_manifest(directory, dict.fromkeys(spec.splits, rows), [100_000, 50], {})
    return directory


@pytest.fixture
def dataset(tmp_path):
    return write(tmp_path)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    return write(tmp_path_factory.mktemp("large"), ROWS)


def flip(path, place, keep_time=False):
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    if keep_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def read_all(directory, **options):
    """Reads every batch of every split, like a run."""
    options = {"batch_size": 50_000, "test_batch_size": 50_000, **options}
    datasets = open_datasets(DataConfig(dataset=str(directory), **options))
    for split in datasets.named().values():
        for index in range(len(split)):
            split.batch(index)
    return datasets


FILES = ["train/label.bin", "train/numerical.bin", "train/cat_0.bin", "test/cat_1.bin"]
FACTS = ["feature_spec.yaml", "model_size.json", "transform/transform.json", "manifest.json"]


@pytest.mark.parametrize("name", FILES + FACTS)
def test_a_flipped_bit_is_named_unless_nobody_wants_to_know(dataset, name):
    # Flipping the lowest bit of ids, numbers and labels keeps them valid.
    place = (dataset / name).stat().st_size // 2 if name in FACTS else 20
    flip(dataset / name, place)
    with pytest.raises(ValueError, match=name):
        read_all(dataset)
    if name in FILES:
        read_all(dataset, verify_data="never")


def test_a_damaged_block_of_a_large_file_is_named_before_the_first_batch(large, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(large, copy, ignore=shutil.ignore_patterns(STAMP))
    flip(copy / "train/cat_0.bin", BLOCK_BYTES + 4)
    datasets = open_datasets(DataConfig(dataset=str(copy), batch_size=1000))
    message = f"cat_0.bin: bytes {BLOCK_BYTES} to {2 * BLOCK_BYTES - 1}: expected CRC-32"
    with pytest.raises(ValueError, match=message):
        datasets.train.batch(0)
    datasets.test.batch(0)  # of intact files


def test_what_was_compared_is_remembered_and_not_compared_again(dataset):
    read_all(dataset)  # a completed run
    assert (dataset / STAMP).is_file()
    flip(dataset / "train/cat_0.bin", 20, keep_time=True)  # found only by reading
    read_all(dataset)
    with pytest.raises(ValueError, match="train/cat_0.bin"):
        read_all(dataset, verify_data="always")
    os.utime(dataset / "train/cat_0.bin")
    with pytest.raises(ValueError, match="train/cat_0.bin"):
        read_all(dataset)


def test_a_damaged_memory_is_as_none(dataset):
    read_all(dataset)
    whole = json.loads((dataset / STAMP).read_text())
    whole["train/cat_0.bin"] = 5
    damaged = ("", "[]", '{"train/cat_0.bin": 5}', "[" * 100_000)
    flip(dataset / "train/cat_0.bin", 20, keep_time=True)
    for content in (*damaged, sealed_json(whole)):
        (dataset / STAMP).write_text(content)
        with pytest.raises(ValueError, match="train/cat_0.bin"):
            read_all(dataset)


def test_a_read_only_dataset_is_remembered_in_the_cache(dataset, tmp_path, monkeypatch):
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    (dataset / STAMP).mkdir()  # a file cannot replace it
    read_all(dataset)
    (remembered,) = home.rglob("*.json")
    assert "train/label.bin" in json.loads(remembered.read_text())
    flip(dataset / "train/cat_0.bin", 20, keep_time=True)
    read_all(dataset)


def test_a_dataset_without_a_manifest_has_nothing_to_compare(dataset):
    (dataset / "manifest.json").unlink()
    before = sorted(dataset.rglob("*"))
    read_all(dataset, verify_data="always")
    assert sorted(dataset.rglob("*")) == before


def test_threads_that_read_at_once_wait_for_one_comparison(dataset, monkeypatch):
    compared = []
    check = verification.check_files
    monkeypatch.setattr(
        verification, "check_files", lambda *args: (compared.append(args[1]), check(*args))
    )
    train = open_datasets(DataConfig(dataset=str(dataset), batch_size=SMALL)).train
    compared.clear()  # those of the description
    with ThreadPoolExecutor(8) as pool:
        batches = list(pool.map(train.batch, [0] * 8))
    assert len(batches) == 8
    assert [len(files) for files in compared] == [4]


def test_a_specification_in_another_folder_is_of_the_dataset_there(dataset, tmp_path):
    flip(dataset / "train/cat_0.bin", 20)
    config = DataConfig(
        dataset=str(dataset.parent), feature_spec=f"{dataset.name}/feature_spec.yaml"
    )
    with pytest.raises(ValueError, match=r"train/cat_0\.bin: expected CRC-32"):
        open_datasets(config).train.batch(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda files: files.pop("train/cat_0.bin"), r"train/cat_0\.bin: not in .*manifest\.json"),
        (lambda files: files["train/cat_0.bin"].update(crc32=""), "eight hexadecimal digits"),
        (lambda files: files["train/cat_0.bin"].update(crc32=None), "eight hexadecimal digits"),
        (lambda files: files["train/cat_0.bin"].update(crc32="0" * 16), "eight hexadecimal digits"),
        (lambda files: files["train/cat_0.bin"].update(bytes="256"), "a number of bytes"),
    ],
)
def test_a_manifest_that_leaves_something_unchecked_is_refused(dataset, change, message):
    path = dataset / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest["files"])
    path.write_text(sealed_json(manifest))
    with pytest.raises(ValueError, match=message):
        read_all(dataset)


def test_a_process_waits_for_another_that_compares(dataset):
    with ThreadPoolExecutor(1) as pool:
        with lock((dataset / STAMP).with_suffix(".lock")):
            reading = pool.submit(read_all, dataset)
            with pytest.raises(TimeoutError):
                reading.result(0.3)
        reading.result()
    assert not list(dataset.glob("*.lock"))


def test_a_user_without_a_home_can_read(dataset, monkeypatch):
    def none(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("pathlib.Path.expanduser", none)
    read_all(dataset)
    assert (dataset / STAMP).is_file()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_none_is_named_where_it_is_read(dataset, value):
    path = dataset / "test/numerical.bin"
    numbers = np.fromfile(path, np.float16).reshape(-1, 3)
    numbers[41, 2] = value
    numbers.tofile(path)
    got = rf"test/numerical.bin: row 41, field numerical 2: expected a finite .* {value}"
    with pytest.raises(ValueError, match=got):
        read_all(dataset, verify_data="never")


def test_numbers_up_to_the_greatest_are_read(dataset):
    path = dataset / "train/numerical.bin"
    np.full((SMALL, 3), np.finfo(np.float16).max, np.float16).tofile(path)
    train = read_all(dataset, verify_data="never").train
    assert torch.equal(train.batch(0).numerical, torch.full((SMALL, 3), 65504.0).half())


def test_a_manifest_is_as_it_was_written(dataset):
    path = dataset / "manifest.json"
    manifest = json.loads(path.read_text())
    assert sealed_json(manifest) == path.read_text()
    for place in range(0, path.stat().st_size, 7):
        whole = path.read_bytes()
        flip(path, place)
        with pytest.raises(ValueError, match=r"manifest\.json"):
            read_all(dataset)
        path.write_bytes(whole)
