"""Transformed Parquet becomes NVIDIA's binary rows."""

import json

import forked
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_scripts import PREPROC

from dlrm.data.clicks import layout
from dlrm.data.clicks.readers import open_binary


def table(rows, seed=0, **changes):
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


def convert(source, output):
    flags = [f"--src_dir={source}", f"--dst_dir={output}", "--parallel_jobs=1"]
    return forked.run(PREPROC / "parquet_to_binary.py", *flags)


def test_folders_of_spark_become_splits(tmp_path):
    source, parts = tmp_path / "out of spark", {"train": [table(7001, 1), table(30, 2)]}
    write(source, **parts, test=[table(40, 3)])
    assert convert(source, tmp_path / "auto").returncode == 0
    assert layout.read_model_size(tmp_path / "auto") == [300, 5]
    (source / "model_size.json").write_text(json.dumps({"_c3": 999, "_c4": 4}))
    assert convert(source, tmp_path / "dataset").returncode == 0
    assert layout.read_model_size(tmp_path / "dataset") == [1000, 5]
    batch = open_binary(tmp_path / "dataset", "train", 2, 10_000).batch(0)
    expected = pa.concat_tables(parts["train"])
    assert batch.labels.tolist() == expected["_c0"].to_pylist()
    for i, name in enumerate(("_c3", "_c4")):
        assert batch.categorical[:, i].tolist() == expected[name].to_pylist()
    for i, name in enumerate(("_c1", "_c2")):
        numbers = np.array(expected[name]).astype(np.float32)
        np.testing.assert_array_equal(batch.numerical[:, i].numpy(), numbers)


HOLE = pa.array([1, None] + [1] * 7, pa.int32())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_c4": HOLE}, "row 1, column _c4: expected an integer id from 0 "),
        ({"_c1": HOLE.cast(pa.float32())}, "row 1, column _c1: expected a number, got no value"),
        ({"_c4": pa.array(["a"] * 9)}, "row 0, column _c4: expected an integer id from 0 "),
        ({"_c5": HOLE}, "model_size.json: expected 3 tables, got 2"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, changes, message):
    write(tmp_path, train=[table(9, **changes)], test=[table(9)])
    (tmp_path / "model_size.json").write_text(json.dumps({"_c3": 299, "_c4": 4}))
    done = convert(tmp_path, tmp_path / "dataset")
    assert done.returncode == 1
    assert message in done.stderr
    assert not (tmp_path / "dataset").exists()


def test_missing_folders_are_named(tmp_path):
    write(tmp_path, train=[table(9)])
    done = convert(tmp_path, tmp_path / "dataset")
    assert done.returncode == 1
    assert f"{tmp_path / 'test'}: no Parquet file" in done.stderr
