"""Transformed Parquet becomes a dataset with the same rows."""

import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from nvidia_reader import read_as_nvidia

from dlrm.data.clicks import layout
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.readers import open_binary
from dlrm.data.sources.columns import TextColumn
from dlrm.data.sources.row_error import RowError
from dlrm.data.transform.transform import Transform
from dlrm.preproc import convert_to_binary


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


def run(source, output, *arguments):
    return convert_to_binary.main([f"--source={source}", f"--output={output}", *arguments])


def contents(dataset, split):
    spec = FeatureSpec.load(dataset)
    numbers = np.fromfile(spec.file(split, "num_0"), np.float16).reshape(-1, 2)
    ids = [np.fromfile(spec.file(split, n), spec.dtype(n)) for n in spec.categorical]
    return np.fromfile(spec.file(split, "label"), bool), numbers, ids


def assert_rows(dataset, split, expected):
    labels, numbers, ids = contents(dataset, split)
    frame = {name: expected[name].to_numpy() for name in expected.column_names}
    assert labels.tolist() == (frame["_c0"] == 1).tolist()
    wanted = np.stack([frame["_c1"], frame["_c2"]], axis=1, dtype=np.float32, casting="same_kind")
    np.testing.assert_array_equal(numbers, wanted.astype(np.float16))
    for column, values in zip(("_c3", "_c4"), ids, strict=True):
        assert values.tolist() == frame[column].tolist()


def test_folders_of_spark_become_splits(tmp_path):
    source = tmp_path / "out of spark"
    parts = {"train": [table(70_001, 1), table(30, 2)], "test": [table(40, 3)]}
    for name, tables in parts.items():
        (source / name).mkdir(parents=True)
        for i, part in enumerate(tables):
            pq.write_table(part, source / name / f"part-{i}.parquet", row_group_size=999)
        (source / name / "_SUCCESS").touch()
    (source / "model_size.json").write_text(json.dumps({"_c3": 999, "_c4": 4}))
    assert run(source, tmp_path / "dataset") == 0
    assert_rows(tmp_path / "dataset", "train", pa.concat_tables(parts["train"]))
    assert_rows(tmp_path / "dataset", "test", parts["test"][0])
    assert layout.read_model_size(tmp_path / "dataset") == [1000, 5]


@pytest.mark.parametrize("output_format", ["split_binary", "binary"])
def test_one_file_is_cut(tmp_path, output_format):
    whole = table(101, 4)
    pq.write_table(whole, tmp_path / "a file.parquet")
    arguments = ["--held_out=0.3", f"--output_format={output_format}"]
    assert run(tmp_path / "a file.parquet", tmp_path / "dataset", *arguments) == 0
    edges = {"train": (0, 71), "test": (71, 86), "validation": (86, 101)}
    for split, (first, last) in edges.items():
        expected = whole.slice(first, last - first)
        if output_format == "split_binary":
            assert_rows(tmp_path / "dataset", split, expected)
            if split != "validation":
                labels, _, ids = read_as_nvidia(tmp_path / "dataset")[split]
                assert labels.tolist() == expected["_c0"].to_pylist()
                assert ids[0].tolist() == expected["_c3"].to_pylist()
        else:
            batch = open_binary(tmp_path / "dataset", split, 2, 1000).batch(0)
            assert batch.labels.tolist() == expected["_c0"].to_pylist()
            assert batch.categorical[:, 0].tolist() == expected["_c3"].to_pylist()
            numbers = np.array(expected["_c1"], np.float32)
            np.testing.assert_array_equal(batch.numerical[:, 0].numpy(), numbers)
    largest = [max(whole[name].to_pylist()) for name in ("_c3", "_c4")]
    assert layout.read_model_size(tmp_path / "dataset") == [n + 1 for n in largest]


def test_real_parquet_becomes_a_dataset(tmp_path, shared_data):
    source = shared_data / "criteo_tb" / "spark_rapids_tb_preprocessed_2200.parquet"
    assert run(source, tmp_path / "dataset") == 0
    frame, spec = pq.read_table(source), FeatureSpec.load(tmp_path / "dataset")
    assert (len(spec.numerical), len(spec.categorical)) == (13, 26)
    label = np.fromfile(spec.file("train", "label"), bool)
    assert label.tolist() == [x == 1 for x in frame["clicked"].to_pylist()[: len(label)]]
    ids = np.fromfile(spec.file("validation", "cat_25.bin"), spec.dtype("cat_25.bin"))
    assert ids.tolist() == frame["c25"].to_pylist()[-len(ids) :]


STRINGS = pa.array(["a"] * 9)
HOLE = pa.array([1, None] + [1] * 7, pa.int32())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_c4": STRINGS}, "column _c4: expected floating-point or integer numbers, got string"),
        ({"_c4": HOLE}, "row 1, column _c4: expected an integer id from 0 .*, got no value"),
        ({"_c1": HOLE.cast(pa.float32())}, "row 1, column _c1: expected a number, got no value"),
        ({"_c2": pa.array([0.0] * 8 + [np.nan])}, "row 8, column _c2: expected a finite number"),
        ({"_c0": pa.array([0] * 8 + [2], pa.int32())}, "row 8, column _c0: expected a label of 0"),
        ({"_c3": pa.array([-1] * 9, pa.int32())}, "row 0, column _c3: .* id from 0 .*, got '-1'"),
        ({"_c1": pa.array([1e9] * 9)}, "row 0, column _c1: 1000000000.0 is beyond float16"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, capsys, changes, message):
    pq.write_table(table(9, **changes), tmp_path / "f.parquet")
    assert run(tmp_path / "f.parquet", tmp_path / "dataset", "--held_out=0.5") == 1
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert re.search(message, error), error
    assert not (tmp_path / "dataset").exists()


def test_other_files_are_named(tmp_path, capsys):
    assert run(tmp_path / "no", tmp_path / "dataset") == 1
    assert "no Parquet file" in capsys.readouterr().err
    (tmp_path / "text.parquet").write_text("no Parquet")
    assert run(tmp_path / "text.parquet", tmp_path / "dataset") == 1
    assert "text.parquet: no Parquet file, or damaged" in capsys.readouterr().err


def test_bad_rows_may_be_left_out(tmp_path):
    whole = table(100)
    broken = whole.set_column(3, "_c3", pa.array([-1, *whole["_c3"].to_pylist()[1:]], pa.int32()))
    pq.write_table(broken, tmp_path / "f.parquet")
    flags = ["--bad_lines=quarantine", "--max_bad_lines=0.5", "--held_out=0.5", "--no-report"]
    assert run(tmp_path / "f.parquet", tmp_path / "dataset", *flags) == 0
    assert_rows(tmp_path / "dataset", "train", whole.slice(1, 49))
    assert "column _c3: " in (tmp_path / "dataset" / "quarantine" / "f.parquet.tsv").read_text()


def test_the_fitted_transform_reads_the_same_columns(tmp_path):
    pq.write_table(table(100), tmp_path / "f.parquet")
    assert run(tmp_path / "f.parquet", tmp_path / "dataset") == 0
    fitted = Transform.load(tmp_path / "dataset" / "transform")
    assert fitted.names == ["_c1", "_c2", "_c3", "_c4"]
    assert fitted.cardinalities == layout.read_model_size(tmp_path / "dataset")
    row = [TextColumn.from_bytes([text]) for text in (b"", b"1", b"2", b"3")]
    with pytest.raises(RowError, match="row 0, column _c1: expected a number, got no value"):
        fitted.of_texts(row)
