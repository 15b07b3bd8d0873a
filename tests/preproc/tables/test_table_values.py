"""Meaning of table values in any file and any part of the rows."""

from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tables_testing import contents, prepare

from dlrm.data.schema.logs import log_schema
from dlrm.data.transform.transform import Transform
from dlrm.preproc.errors import TaskError

SCHEMA = {"label": "y", "numerical": [{"column": "x", "transform": "none"}]}


def write(path, rows=1 << 20, **columns):
    pq.write_table(pa.table(columns), path, row_group_size=rows)
    return Path(path)


def column(dataset, name, dtype, split="train"):
    return np.fromfile(dataset / split / f"{name}.bin", dtype).tolist()


def test_decimals_are_the_nearest_numbers_and_values_of_many_digits(tmp_path):
    """As with text in CSV: Arrow's own conversion puts 0.1 one step lower."""
    texts = ["0.100000", "12345678901234.567891", "-7.300000"]
    long = ["1234567890123456789012345678901234.5", "1000000000000000000000.0"]
    long.append("1234567890123456789012345678901235.5")
    numbers = pa.array(map(Decimal, texts), pa.decimal128(38, 6))
    values = pa.array(map(Decimal, long), pa.decimal128(38, 1))
    path = write(tmp_path / "a.parquet", y=[0, 1, 1], x=numbers, c=values)
    schema = {"label": "y", "numerical": [{"column": "x", "bins": 4}], "categorical": ["c"]}
    prepare(schema, [path], tmp_path / "d")
    fitted = Transform.load(tmp_path / "d" / "transform")
    assert fitted.numerical[0].edges.tolist() == [-7.3, 0.1, 12345678901234.567891]
    assert {*fitted.dictionaries[0].values()} == {long[0], "1000000000000000000000", long[2]}


@pytest.mark.parametrize("rows", [1, 4])
def test_a_label_that_keep_negatives_drops_is_a_label_all_the_same(tmp_path, rows):
    """Otherwise, known labels would depend on the row groups."""
    schema = SCHEMA | {"label": {"column": "y", "positive": "a"}}
    write(tmp_path / "a.parquet", rows, y=["a", "b", "c", "d"], x=[1.0, 2.0, 3.0, 4.0])
    with pytest.raises(ValueError, match="expected two values, 'a' and another, got 'a', 'b', 'c'"):
        prepare(schema, [tmp_path / "a.parquet"], tmp_path / "d", keep_negatives=1e-9)


def test_a_schema_of_logs_does_not_lose_keep_negatives(tmp_path):
    """The stored form of a log's transform has no place for it."""
    schema = log_schema(1, (1,), "readme")
    rows = {"label": [0, 1] * 40, "numerical 0": range(80), "categorical 0": ["a", "b"] * 40}
    lines = ["\t".join(map(str, row)) for row in zip(*rows.values(), strict=True)]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    for kept in (0.5, 1):
        prepare(schema.to_dict(), [tmp_path / "a.csv"], tmp_path / str(kept), keep_negatives=kept)
        fitted = Transform.load(tmp_path / str(kept) / "transform")
        assert (fitted.schema, fitted.keep_negatives) == (schema, kept)


TIMED = {"label": "y", "categorical": ["y2"], "time": {"column": "t", "zone": "Europe/Zurich"}}


def test_local_times_in_text_that_clocks_pass_over_mean_one_moment(tmp_path):
    texts = ["2026-03-29 01:59:59", "2026-03-29 02:30:00", "2026-03-29 03:00:00"]
    write(tmp_path / "a.parquet", y=[0, 1, 1], y2=[0, 1, 1], t=texts)
    prepare(TIMED, [tmp_path / "a.parquet"], tmp_path / "d", output_ordering="input")
    gap = 1774746000 * 10**6
    assert column(tmp_path / "d", "time", "<i8") == [gap - 10**6, gap - 1, gap]


YEARS = "expected a time in the years 1 to 9999, got "
TIMES = [
    (pa.array([1, 10**15]), f"{YEARS}1000000000000000"),  # milliseconds taken for seconds
    (pa.array(["1", "99999999999999999999"]), f"{YEARS}'99999999999999999999'"),
    (pa.array(["1", "--5"]), "expected a time such as"),
    (pa.array(["1", "²"]), "expected a time such as"),
]


@pytest.mark.parametrize(("values", "problem"), TIMES)
def test_what_is_no_time_is_named(tmp_path, values, problem):
    schema = TIMED | {"time": {"column": "t", "unit": "s"}}
    path = write(tmp_path / "a.parquet", y=[0, 1], y2=[0, 1], t=values)
    with pytest.raises((TaskError, ValueError)) as failed:
        prepare(schema, [path], tmp_path / "d")
    assert str(failed.value).startswith(f"{path}, row group 0, row 1, column t: {problem}")


INTEGERS = [0, 7, 10**18 - 1, 10**18]


@pytest.mark.parametrize("kind", [int, Decimal])
def test_integers_of_18_digits_are_taken_by_their_exact_values(tmp_path, kind):
    schema = {"label": "y", "numerical": [{"column": "x", "type": "decimal", "transform": "log"}]}
    values = [0, 7, 10**18 - 1, 10**18]
    path = write(tmp_path / "a.parquet", y=[0, 1, 0], x=[*map(kind, values[:3])])
    prepare(schema, [path], tmp_path / "out", output_ordering="input")
    expected = [np.float16(np.log(value + 2.0)) for value in values[:3]]
    assert column(tmp_path / "out", "numerical", np.float16) == expected
    larger = write(tmp_path / "b.parquet", y=[0, 1], x=[*map(kind, values[2:])])
    with pytest.raises(TaskError, match="integer of up to 18 digits, got 1000000000000000000"):
        prepare(schema, [larger], tmp_path / "more")


@pytest.mark.parametrize("values", [[True, False], np.array([0, 1], "datetime64[s]")], ids=str)
def test_truth_values_and_times_are_no_integers(tmp_path, values):
    schema = {"label": "y", "numerical": [{"column": "x", "type": "decimal", "transform": "none"}]}
    path = write(tmp_path / "a.parquet", y=[0, 1], x=pa.array(values))
    with pytest.raises(TaskError, match="column 'x': expected integers, got the type"):
        prepare(schema, [path], tmp_path / "out")


def test_numbers_mean_missing_in_any_column_and_however_they_are_written(tmp_path):
    schema = {
        "label": "y",
        "missing_values": ["-999", "NaN"],
        "numerical": [{"column": "x", "transform": "none"}],
        "categorical": [{"column": "i", "type": "integer"}, "f"],
    }
    numbers = [5.0, -999.0, 1.0, 5.0]
    columns = {"y": [0, 1, 1, 0], "x": numbers, "i": [5, -999, 1, 5], "f": [5.0, np.nan, 1.0, 5.0]}
    write(tmp_path / "a.parquet", **columns)
    cells = zip(columns["y"], numbers, columns["i"], ["5", "NaN", "1", "5"], strict=True)
    lines = ["y,x,i,f", *(",".join(map(str, one)) for one in cells)]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    for kind in ("parquet", "csv"):
        dataset = tmp_path / kind
        prepare(schema, [tmp_path / f"a.{kind}"], dataset, output_ordering="input")
        assert column(dataset, "numerical", "<f2") == [5, 0, 1, 5]
        assert column(dataset, "cat_0", "i1") == [1, 0, 2, 1]
        assert column(dataset, "cat_1", "i1") == [1, 0, 2, 1]


def test_nan_is_missing_where_all_other_values_are_numbers_of_any_part(tmp_path):
    schema = {"label": "y", "categorical": ["f", "t", "w"]}
    schema["crosses"] = [{"fields": ["t", "f", "w"], "frequency_limit": 1}]
    columns = {
        "f": [1.5, np.nan, 2.0, np.nan, 1.5],
        "t": ["7", "5", "nan", "NaN", "7"],
        "w": ["nan", "nan", "nan", "a", "nan"],  # a word like any other
    }
    without = {"f": [1.5, None, 2.0, None, 1.5], "t": ["7", "5", None, None, "7"]}
    without["w"] = columns["w"]
    for name, values in (("nan", columns), ("none", without)):
        path = write(tmp_path / f"{name}.parquet", 1, y=[0, 1, 1, 0, 1], **values)
        prepare(schema, [path], tmp_path / name, split_bytes=1, output_ordering="input")
    for suffix in (".bin", ".npy"):
        assert contents(tmp_path / "nan", suffix) == contents(tmp_path / "none", suffix)
    assert column(tmp_path / "nan", "cat_2", "i1") == [1, 1, 1, 2, 1]
    assert column(tmp_path / "nan", "cat_3", "i1") == [1, 0, 0, 0, 1]


def test_a_column_without_any_value_has_an_empty_dictionary(tmp_path):
    schema = {"label": "y", "categorical": ["c", {"column": "i", "type": "integer"}]}
    schema["numerical"] = [{"column": "x", "transform": "quantile", "bins": 4}]
    empty = {"c": pa.nulls(4, pa.string()), "i": pa.nulls(4, pa.int64())}
    path = write(tmp_path / "a.parquet", 2, y=[0, 1, 0, 1], x=pa.nulls(4, pa.float64()), **empty)
    prepare(schema, [path], tmp_path / "d", split_bytes=1)
    assert Transform.load(tmp_path / "d" / "transform").cardinalities == [1, 1]
    assert column(tmp_path / "d", "numerical", "<f2") == [0.5] * 4
    for name in ("cat_0", "cat_1"):
        assert column(tmp_path / "d", name, "i1") == [0] * 4
