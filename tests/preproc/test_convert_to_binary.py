"""Transformed Parquet becomes NVIDIA's binary rows."""

import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlrm.data.clicks import layout
from dlrm.data.clicks.readers import open_binary
from dlrm.preproc.convert_to_binary import convert


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


def test_folders_of_spark_become_splits(tmp_path):
    source, parts = tmp_path / "out of spark", {"train": [table(7001, 1), table(30, 2)]}
    write(source, **parts, test=[table(40, 3)])
    convert(source, tmp_path / "auto", 1)
    assert layout.read_model_size(tmp_path / "auto") == [300, 5]
    (source / "model_size.json").write_text(json.dumps({"_c3": 999, "_c4": 4}))
    convert(source, tmp_path / "dataset", 1)
    assert layout.read_model_size(tmp_path / "dataset") == [1000, 5]
    batch = open_binary(tmp_path / "dataset", "train", 2, 10_000).batch(0)
    expected = pa.concat_tables(parts["train"])
    assert batch.labels.tolist() == expected["_c0"].to_pylist()
    for i, name in enumerate(("_c3", "_c4")):
        assert batch.categorical[:, i].tolist() == expected[name].to_pylist()
    for i, name in enumerate(("_c1", "_c2")):
        numbers = np.array(expected[name]).astype(np.float32)
        np.testing.assert_array_equal(batch.numerical[:, i].numpy(), numbers)


STRINGS = pa.array(["a"] * 9)
HOLE = pa.array([1, None] + [1] * 7, pa.int32())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_c4": STRINGS}, "column _c4: expected floating-point numbers or ids"),
        ({"_c4": HOLE}, "row 1, column _c4: expected an integer id from 0 .*, got no value"),
        ({"_c2": pa.array([0.0] * 8 + [np.nan])}, "row 8, column _c2: expected a finite number"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, changes, message):
    write(tmp_path, train=[table(9, **changes)], test=[table(9)])
    with pytest.raises(ValueError, match=message):
        convert(tmp_path, tmp_path / "dataset", 1)
    assert not (tmp_path / "dataset").exists()


def test_missing_folders_and_other_files_are_named(tmp_path):
    write(tmp_path, train=[table(9)])
    with pytest.raises(FileNotFoundError, match=re.escape(f"{tmp_path / 'test'}: no Parquet")):
        convert(tmp_path, tmp_path / "dataset", 1)
    (tmp_path / "train/part-0.parquet").write_text("no Parquet")
    write(tmp_path, test=[table(9)])
    with pytest.raises(ValueError, match=r"part-0\.parquet: no Parquet file, or damaged"):
        convert(tmp_path, tmp_path / "dataset", 1)
