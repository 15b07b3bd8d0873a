"""Fields whose values are ids already: from any file to a dataset, its transform and scores."""

import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from column_testing import transform_texts
from preproc_testing import killed_at
from tables_testing import check_bad_row, prepare, write_table

from dlrm.data import layout
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.schema.schema import Schema
from dlrm.data.sources.columns import TextColumn
from dlrm.data.sources.row_error import RowError
from dlrm.data.transform.difference import compare_transforms
from dlrm.data.transform.row_reader import RowReader
from dlrm.data.transform.transform import Transform
from dlrm.preproc.convert_to_parquet import convert_to_parquet

SCHEMA = {
    "label": "y",
    "categorical": [
        {"column": "user", "type": "id"},
        {"column": "shop", "type": "id", "cardinality": 300},
        {"column": "items", "type": "id", "max_length": 2},
    ],
}
ROWS = {
    "y": [0, 1, 0, 1],
    "user": [0, 7, 2, 0],
    "shop": [299, 0, 1, 2],
    "items": [[3, 4, 5], [], [0], None],
}
IN_ORDER = {"test_fraction": 0.0, "output_ordering": "input"}


def write(path, **columns):
    return write_table({**ROWS, **columns}, path)


def ids(dataset, table, dtype, split="train"):
    return np.fromfile(dataset / split / f"cat_{table}.bin", dtype).tolist()


def test_the_summary_counts_a_shared_table_once(tmp_path):
    fields = [{"column": "user", "type": "id"}]
    shared = {"type": "id", "table": "places", "cardinality": 300}
    fields += [{"column": "shop", **shared}, {"column": "items", "max_length": 2, **shared}]
    schema = {"label": "y", "categorical": fields}
    said = prepare(schema, [write(tmp_path / "a.parquet")], tmp_path / "d", **IN_ORDER)
    (line,) = [line for line in said if line.startswith("tables:")]
    assert line.split()[1:] == ["308", "rows", "in", "2"]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".csv"])
def test_the_value_is_the_id_in_every_file(tmp_path, suffix):
    prepare(SCHEMA, [write(tmp_path / f"a{suffix}")], tmp_path / "d", report=True, **IN_ORDER)
    convert_to_parquet(tmp_path / "d", tmp_path / "p")
    table = pq.read_table(tmp_path / "p" / "train")
    assert table["user"].to_pylist() == ROWS["user"]
    assert table["items"].to_pylist() == [[4, 5], [], [0], []]
    assert ids(tmp_path / "d", 0, "i1") == ROWS["user"]
    assert ids(tmp_path / "d", 1, "i2") == ROWS["shop"]
    spec = FeatureSpec.load(tmp_path / "d")
    assert spec.cardinalities == [8, 300, 6]  # greatest id plus 1, also of those cut off
    assert np.fromfile(spec.list_files("train", "items").values, "i1").tolist() == [4, 5, 0]
    names = {path.name for path in (tmp_path / "d" / "transform").iterdir()}
    assert names == {"transform.json"}
    report = json.loads((tmp_path / "d" / "report.json").read_text())
    assert [one["values_without_id"]["train"] for one in report["categorical"]] == [None] * 3


def test_the_greatest_id_is_that_of_all_splits_but_not_of_dropped_rows(tmp_path):
    schema = {"label": "y", "categorical": SCHEMA["categorical"][:1]}
    train, test = write(tmp_path / "a.parquet"), write(tmp_path / "b.parquet", user=[9, 1, 1, 1])
    prepare(schema, [train], tmp_path / "d", others={"test": [test]})
    assert Transform.load(tmp_path / "d" / "transform").cardinalities == [10]
    rows = 1000
    columns = {"y": [0] * rows, "shop": [0] * rows, "items": [[]] * rows, "user": range(rows)}
    many = write(tmp_path / "many.parquet", **columns)
    prepare(schema, [many, train], tmp_path / "few", keep_negatives=0.01)
    kept = max(ids(tmp_path / "few", 0, "i2"))
    assert kept < 999
    assert Transform.load(tmp_path / "few" / "transform").cardinalities == [kept + 1]


@pytest.mark.parametrize(
    ("changes", "problem", "suffix"),
    [
        ({"user": [0, -1, 0, 0]}, "user: .* id from 0 and less than 2147483646, got '-1'", ".csv"),
        ({"shop": [1, 1, 1, 300]}, "shop: .* less than its cardinality, 300", ".jsonl"),
        ({"user": [0.0, 1.5, 0.0, 0.0]}, "user: .*, got '1.5'", ".parquet"),
        ({"user": [0, None, 0, 0]}, "user: .*, got no value", ".jsonl"),
        ({"items": [[1], [2, -3], [], []]}, "items: place 1 .*, got '-3'", ".parquet"),
    ],
)
def test_other_values_are_bad_rows(tmp_path, changes, problem, suffix):
    path = write(tmp_path / f"a{suffix}", **changes)
    message = check_bad_row(SCHEMA, path, f"{path}, ", "column ", tmp_path / "d", **IN_ORDER)
    assert re.search(f"(row|line) .*column {problem}", message)


def test_crosses_take_fields_of_ids(tmp_path):
    """They are those of the same column of integers."""
    found, path = [], write(tmp_path / "a.parquet")
    crosses = [{"fields": ["user", "shop"], "buckets": 50}]
    crosses.append({"fields": ["shop", "user"], "frequency_limit": 1})
    for kind in ("id", "integer"):
        fields = [{"column": name, "type": kind} for name in ("user", "shop")]
        prepare({"label": "y", "categorical": fields, "crosses": crosses}, [path], tmp_path / kind)
        found.append([ids(tmp_path / kind, table, "i1") for table in (2, 3)])
    assert found[0] == found[1]


def test_the_fitted_transform_reads_ids_and_refuses_new_ones(tmp_path):
    prepare(SCHEMA, [write(tmp_path / "a.parquet")], tmp_path / "d", **IN_ORDER)
    fitted = Transform.load(tmp_path / "d" / "transform")
    assert (fitted.value(0, 0), fitted.value(1, 299)) == ("0", "299")
    texts = [[b"7", b"0"], [b"299", b"5.0"], [b"5|0|1", b""]]
    numbers, (user, shop, items), _ = transform_texts(
        fitted, list(map(TextColumn.from_bytes, texts))
    )
    assert (user.tolist(), shop.tolist(), items.values.tolist()) == ([7, 0], [299, 5], [0, 1])
    assert (user.dtype, shop.dtype) == (np.int8, np.int16)
    for text in (b"8", b"", b"-1", b"x"):
        texts = [[b"7", text], [b"1", b"1"], [b"", b""]]
        with pytest.raises(RowError, match="row 1, column user: .*cardinality, 8, got"):
            transform_texts(fitted, list(map(TextColumn.from_bytes, texts)))
    coded = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, 0]), pa.array([0, 8, None]))
    for user in ([0, 8, None, 0], coded):  # a dictionary may have a null
        batch = pa.record_batch({**ROWS, "user": user})
        _, bad = RowReader(fitted.schema, fitted=fitted).read(batch)
        assert [(one.row, one.column) for one in bad] == [(1, "user"), (2, "user")]


def test_tables_of_other_sizes_are_another_transform(tmp_path):
    for name, user in (("a", 7), ("b", 8)):
        path = write(tmp_path / f"{name}.parquet", user=[0, user, 2, 0])
        prepare(SCHEMA, [path], tmp_path / name, **IN_ORDER)
    assert compare_transforms(tmp_path / "a", tmp_path / "a", source_kind=layout.KIND) is None
    with pytest.raises(ValueError, match="user: id 8 is no value for the model and 8 here"):
        compare_transforms(tmp_path / "a", tmp_path / "b", source_kind=layout.KIND)


def test_entries_that_do_not_fit_are_named():
    for entry, message in (
        ({"type": "integer", "cardinality": 5}, "expected the type id, got integer"),
        ({"type": "id", "cardinality": 0}, "expected 1 or more, 2147483646 at most, got 0"),
    ):
        with pytest.raises(ValueError, match=f"categorical field c: cardinality: {message}"):
            Schema.from_dict({"label": "y", "categorical": [{"column": "c", **entry}]})


def test_rows_left_out_of_files_with_one_name_are_all_kept(tmp_path):
    paths = [tmp_path / name for name in ("1/a.parquet", "2/a.parquet", "3/0.a.parquet")]
    for path in paths:
        path.parent.mkdir()
        write(path, user=[0, -1, 0, 0])
    options = {"bad_lines": "quarantine", "max_bad_lines": 0.5}
    prepare(SCHEMA, paths, tmp_path / "d", **options, **IN_ORDER)
    left_out = [path.read_text() for path in (tmp_path / "d" / "quarantine").iterdir()]
    assert sorted(text.partition(",")[0] for text in left_out) == sorted(map(str, paths))


def test_files_that_exchange_their_splits_are_another_run(tmp_path):
    good, bad = write(tmp_path / "a.parquet"), write(tmp_path / "b.parquet", user=[0, 1, 0, 0])
    with killed_at("lookups.done"):
        prepare(SCHEMA, [good], tmp_path / "d", others={"test": [bad]})
    with pytest.raises(ValueError, match="--test_input was .*b.parquet.* and is .*a.parquet"):
        prepare(SCHEMA, [bad], tmp_path / "d", others={"test": [good]})
