"""NVIDIA's rows, CSV and Parquet of Spark become datasets, and errors in them have their place."""

import json
import re

import forked
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from nvidia_reader import read_as_nvidia
from test_scripts import PREPROC

from dlrm.data import layout
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.readers import open_binary
from dlrm.data.transform.transform import Transform

ROWS = {"train": 70_001, "test": 9, "val": 40}  # of two numbers and three ids
SIZES = [5, 127, 40_000]
ASIDE = ("--bad_lines=quarantine", "--max_bad_lines=0.5", "--noreport")


def refused(done, output, *messages):
    """Checks that a command has ended with a line, and without an output."""
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    for message in messages:
        assert message in line
    assert not output.exists()


def binary(folder, changes=()):
    """Writes rows as NVIDIA does; `changes` are (file, row, word, value)."""
    folder.mkdir()
    draw, made = np.random.default_rng(0), {}
    for split, rows in ROWS.items():
        words = np.empty((rows, 6), "<i4")
        words[:, 0] = draw.integers(0, 2, rows)
        words[:, 1:3] = draw.normal(0, 9, (rows, 2)).astype("<f4").view("<i4")
        words[:, 3:] = draw.integers(0, SIZES, (rows, 3))
        for file, row, word, value in changes:
            if file == split:
                words[row, word] = value
        words.tofile(folder / f"{split}_data.bin")
        made[split] = words
    layout.write_model_size(folder, SIZES)
    return made


def split(folder, *flags, numerical=2):
    paths = [f"--dataset={folder / 'binary'}", f"--output={folder / 'split'}"]
    numbers = f"--numerical_features={numerical}"
    return forked.run("dlrm.scripts.split_dataset", *paths, numbers, *flags)


def test_every_word_goes_to_the_file_of_its_feature(tmp_path):
    made = binary(tmp_path / "binary")
    done = split(tmp_path, "--noreport")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^train: +70,001 rows, ", done.stdout, re.MULTILINE)
    spec = FeatureSpec.load(tmp_path / "split")
    assert (spec.numerical, spec.label) == (["num_0", "num_1"], "label")
    assert spec.cardinalities == SIZES
    for name, words in zip(spec.splits, made.values(), strict=True):
        label, numbers = (
            np.fromfile(spec.file(name, one), dtype)
            for one, dtype in (("label", bool), ("num_0", np.float16))
        )
        np.testing.assert_array_equal(label, words[:, 0] == 1)
        expected = words[:, 1:3].copy().view("<f4").astype(np.float16)
        np.testing.assert_array_equal(numbers.reshape(-1, 2), expected)
        for place, table in enumerate(spec.categorical):
            ids = np.fromfile(spec.file(name, table), spec.dtype(table))
            np.testing.assert_array_equal(ids, words[:, 3 + place])
    assert Transform.load(tmp_path / "split" / "transform").cardinalities == SIZES
    again = split(tmp_path)
    assert again.stderr.startswith(f"error: {tmp_path / 'split'}: exists and is not empty")


def test_bad_rows_of_words_are_named_or_left_out(tmp_path):
    binary(tmp_path / "binary", [("train", 70_000, 0, 2), ("test", 3, 3, 5)])
    where = "train_data.bin, row 70000, column label: expected a"
    refused(split(tmp_path, "--noreport"), tmp_path / "split", where)
    done = split(tmp_path, *ASIDE)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "split" / "manifest.json").read_text())["rows"]
    assert rows == {"train": 70_000, "test": 8, "validation": 40}
    left_out = (tmp_path / "split" / "quarantine" / "test_data.bin.tsv").read_text()
    assert "test_data.bin, row 3\tcolumn cat_0.bin: expected an integer" in left_out


def test_a_file_with_another_number_of_features_is_named(tmp_path):
    binary(tmp_path / "binary")
    message = "expected a multiple of 20 bytes (a label, 1 numerical and 3 categ"
    refused(split(tmp_path, numerical=1), tmp_path / "split", message)
    (tmp_path / "binary" / "test_data.bin").unlink()
    refused(split(tmp_path), tmp_path / "split", "test_data.bin: missing")


def of_spark(rows, seed=0, **changes):
    random = np.random.default_rng(seed)
    columns = {
        "_c0": random.integers(0, 2, rows, np.int32),
        "_c1": random.random(rows).astype(np.float32) * 9,
        "_c2": random.random(rows),
        "_c3": random.integers(0, 300, rows, np.int32),
        "_c4": random.integers(0, 5, rows, np.int64),
    }
    return pa.table(columns | changes)


def write(source, **parts):
    for name, tables in parts.items():
        (source / name).mkdir(parents=True)
        for i, part in enumerate(tables):
            pq.write_table(part, source / name / f"part-{i}.parquet", row_group_size=999)
        (source / name / "_SUCCESS").touch()


def to_binary(source, output):
    others = ["--intermediate_dir=/nowhere", "--parallel_jobs=40"]
    paths = [f"--src_dir={source}", f"--dst_dir={output}"]
    return forked.run(PREPROC / "parquet_to_binary.py", *paths, *others)


def test_folders_of_spark_become_splits(tmp_path):
    source, output = tmp_path / "out of spark", tmp_path / "dataset"
    parts = {"train": [of_spark(7001, 1), of_spark(30, 2)]}
    write(source, **parts)
    refused(to_binary(source, output), output, f"{source / 'test'}: no Parquet file; run_spark.sh")
    write(source, test=[of_spark(40, 3)], validation=[of_spark(9, 4)])
    assert to_binary(source, output).returncode == 0
    assert layout.read_model_size(output) == [300, 5]
    (source / "model_size.json").write_text(json.dumps({"_c3": 999, "_c4": 4}))
    assert to_binary(source, output).returncode == 0
    assert layout.read_model_size(output) == [1000, 5]
    names = sorted(path.name for path in output.glob("*.bin"))
    assert names == ["test_data.bin", "train_data.bin", "val_data.bin"]  # as NVIDIA's reader wants
    batch = open_binary(output, "train", 2, 10_000).batch(0)
    expected = pa.concat_tables(parts["train"])
    assert batch.labels.tolist() == expected["_c0"].to_pylist()
    for i, name in enumerate(("_c3", "_c4")):
        assert batch.categorical[:, i].tolist() == expected[name].to_pylist()
    for i, name in enumerate(("_c1", "_c2")):
        numbers = np.array(expected[name]).astype(np.float32)
        np.testing.assert_array_equal(batch.numerical[:, i].numpy(), numbers)


def test_what_does_not_fit_is_named(tmp_path):
    hole = pa.array([1, None] + [1] * 7, pa.float32())
    write(tmp_path, train=[of_spark(9, _c1=hole)], test=[of_spark(9)])
    message = "row 1, column _c1: expected a number, got no value"
    refused(to_binary(tmp_path, tmp_path / "dataset"), tmp_path / "dataset", message)
    (tmp_path / "model_size.json").write_text(json.dumps({"_c3": 299}))
    message = "model_size.json: expected 2 tables, got 1"
    refused(to_binary(tmp_path, tmp_path / "dataset"), tmp_path / "dataset", message)


def transcode(folder, *flags):
    paths = [f"--input={folder}", f"--output={folder / 'out'}"]
    return forked.run("dlrm.scripts.transcode", *paths, *flags)


def read_back(directory, **config):
    """Returns numericals, ids and labels of each split, all rows at once."""
    datasets = open_datasets(DataConfig(dataset=str(directory), **config))
    train, test, validation = datasets.train, datasets.test, datasets.validation
    found = {"train": train, "test": test, "validation": validation}
    return {name: [part.tolist() for part in data.batch(0)[:3]] for name, data in found.items()}


def write_spec(directory, *, cardinality="auto", test_user=4):
    """Writes a specification whose first chunk has two files, and its CSV; returns its content."""
    sections = {
        "feature_spec": {
            "user": {"dtype": "int32", "cardinality": cardinality},
            "shop": {"dtype": "int32", "cardinality": 300},
            **{name: {"dtype": "float32"} for name in ("price", "age")},
            **{"comment": {"dtype": "str"}, "clicked": {"dtype": "bool"}},
        },
        "source_spec": {
            split: [
                {"type": "csv", "features": ["clicked", "price", "user", "comment"]}
                | {"files": [f"{split}_0.csv", f"{split}_1.csv"]},
                {"type": "csv", "features": ["age", "shop"], "files": [f"{split}_more.csv"]},
            ]
            for split in ("train", "test", "validation")
        },
        "channel_spec": {
            **{"categorical": ["user", "shop"], "numerical": ["age", "price"]},
            "label": ["clicked"],
        },
        "metadata": {},
    }
    (directory / "feature_spec.yaml").write_text(yaml.safe_dump(sections))
    for split, last in (("train", 2), ("test", test_user), ("validation", 3)):
        (directory / f"{split}_0.csv").write_text("1,0.5,0,hello\n0,1.5,1,\n")
        (directory / f"{split}_1.csv").write_text(f'1,,{last},"a,b"\n')
        (directory / f"{split}_more.csv").write_text("20,299\n30,0\n40,7\n")
    return sections


def test_a_specification_keeps_ids_and_the_order_of_rows(tmp_path):
    write_spec(tmp_path)
    done = transcode(tmp_path, "--chunk_size=1", "--feature_spec_out=other.yaml")
    assert done.returncode == 0, done.stderr
    sections = yaml.safe_load((tmp_path / "out" / "other.yaml").read_text())["feature_spec"]
    sizes = [sections[name]["cardinality"] for name in ("user", "shop")]
    assert sizes == [5, 300]  # the largest id of all splits, plus 1
    data = read_back(tmp_path / "out", feature_spec="other.yaml")
    for split, last in (("train", 2), ("test", 4), ("validation", 3)):
        ids = [[0, 299], [1, 0], [last, 7]]
        assert data[split] == [[[20, 0.5], [30, 1.5], [40, 0]], ids, [1, 0, 1]]


def test_bad_rows_of_a_specification_may_be_left_out(tmp_path):
    write_spec(tmp_path)
    (tmp_path / "test_more.csv").write_text("20,299\n30,-1\n40,7\n")
    where = f"{tmp_path / 'feature_spec.yaml'}, test, row 1, column shop: "
    refused(transcode(tmp_path), tmp_path / "out", where)
    assert transcode(tmp_path, *ASIDE).returncode == 0
    data = read_back(tmp_path / "out")
    assert data["train"][1] == [[0, 299], [1, 0], [2, 7]]
    assert data["test"][1] == [[0, 299], [4, 7]]


def test_what_breaks_a_specification_is_named(tmp_path):
    def fails(message, sections=None):
        if sections is not None:
            (tmp_path / "feature_spec.yaml").write_text(yaml.safe_dump(sections))
        refused(transcode(tmp_path), tmp_path / "out", message)

    write_spec(tmp_path, cardinality=4)
    fails("test, row 2, column user: ")
    write_spec(tmp_path, cardinality=0)
    fails('feature user: expected a cardinality of 1 or more, or "auto", got 0')
    sections = write_spec(tmp_path)
    (tmp_path / "train_more.csv").write_text("20,299\n")
    fails("expected chunks with the same number of rows")
    sections["source_spec"]["test"][1]["type"] = "split_binary"
    fails("source_spec test: expected chunks of type csv", sections)
    sections = write_spec(tmp_path)
    del sections["source_spec"]["train"][1]
    fails("source_spec train: expected feature shop once", sections)
    sections = write_spec(tmp_path)
    sections["source_spec"]["test"][1]["files"] = ["../test_more.csv"]
    fails("../test_more.csv", sections)


def test_random_csv_files_are_transcoded_for_nvidias_reader(tmp_path):
    sections = write_spec(tmp_path)
    del sections["source_spec"]["validation"]
    sections["channel_spec"]["numerical"] = ["price"]
    sections["feature_spec"]["shop"]["cardinality"] = 7
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(sections))
    words = [f"--feature_spec_in={tmp_path / 'spec.yaml'}", f"--output={tmp_path / 'csv'}"]
    forked.succeed("dlrm.scripts.gen_csv", *words, "--size=2001")
    assert len((tmp_path / "csv" / "train_0.csv").read_text().splitlines()) == 1001
    assert transcode(tmp_path / "csv").returncode == 0
    for labels, numbers, (user, shop) in read_as_nvidia(tmp_path / "csv" / "out").values():
        assert len(labels) == 2001
        assert 0.4 < labels.mean() < 0.6
        assert numbers.std() > 0.2
        assert (set(user), set(shop)) == (set(range(10)), set(range(7)))
