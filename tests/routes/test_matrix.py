"""One value, one text: a model takes the same inputs from a table that any route brings to it.

Every route that can fit a transform does, and every route scores with it. The oracle is the table
in Python: two rows have one id if their values are equal, and a missing value has id 0.
"""

import datetime as dt
from decimal import Decimal

import numpy as np
import pandas
import pyarrow as pa
import pytest
from routes_testing import (
    FILES,
    FRAMES,
    RAW,
    ROUTES,
    fitted,
    ids_of,
    inputs_of,
    numbers_of,
    of_rows,
    weights_of,
    written,
)

import dlrm
from dlrm.serving.scoring import probability

polars = pytest.importorskip("polars")

UTC, NONE = dt.timezone.utc, None
YES, NO = True, False
day, clock, at, span = dt.date, dt.time, dt.datetime, dt.timedelta
dec = Decimal

# Columns of six values that every route can express.
NUMBERS = {
    "bool": [YES, NO, YES, YES, NO, YES],
    "bool with none": [YES, NO, NONE, YES, NO, YES],
    "true": [YES] * 6,
    "integers": [1, -5, 300, 0, 7, 1],
    "integers with none": [1, -5, NONE, 0, 7, 1],
    "ones and zeros": [1, 0, 1, 0, 0, 1],
    "int8": np.array([1, -5, 127, 0, 7, 1], np.int8),
    "uint8": np.array([1, 5, 255, 0, 7, 1], np.uint8),
    "whole": [1.0, -5.0, 300.0, 0.0, 7.0, 1.0],
    "whole with none": [1.0, -5.0, NONE, 0.0, 7.0, 1.0],
    "digits": ["12", "7", "3", "0", "5", "507"],
    "padded": ["007", "7", NONE, "0", "00507", "507"],
    "words": ["True", "False", "true", "FALSE", "TRUE", "false"],
}
FRACTIONS = {
    "fractions": [1.5, -0.25, NONE, 3.0, 0.1, 1e-7],
    "decimals": [dec("1.10"), dec("2.00"), NONE, dec("-0.50"), dec("10.00"), dec("0.00")],
}
INTEGERS = {"int64": [2**62 + 1, 2**62 + 3, 5, 2**53 + 1, -(2**62), 5]}
OTHERS = {
    "uint64": np.array([2**64 - 1, 2**63 + 5, 5, 2**53 + 1, 0, 5], np.uint64),
    "large": [1e15, 1e20, 1.5e20, 2.0**53 - 1, 1e22, 1e23],
    "large with none": [1e20, NONE, 1.5e21, 5.0, 7.0, 9.0],
    "wide": [1e-7, 1e20, 1.5e300, 3.5, -0.0, 5e-324],
    "dates": [day(2026, 11, 20), NONE, day(2026, 1, 2), day(1969, 12, 31), day(2026, 1, 2), NONE],
    "times": [
        at(2026, 1, 2, 8),
        NONE,
        at(2026, 1, 2),
        at(2026, 1, 2, 8, 0, 0, 12),
        NONE,
        at(1960, 1, 1),
    ],
    "nanoseconds": np.array(
        ["2026-01-01T00:00:00.000000001", "2026-01-01", "2026-01-01T00:00:00.5"] * 2, "M8[ns]"
    ),
    "milliseconds": np.array(["2026-01-01T00:00:00.001", "2026-01-01", "2025-01-01"] * 2, "M8[ms]"),
    "midnights": [at(2026, 1, 2), at(2026, 1, 3), NONE, at(2026, 1, 2), at(1960, 1, 1), NONE],
    "zoned": [at(2026, 1, 2, 8, tzinfo=UTC), NONE, at(2026, 1, 2, tzinfo=UTC)] * 2,
    "zoned midnights": [at(2026, 1, 2, tzinfo=UTC), NONE, at(2026, 1, 3, tzinfo=UTC)] * 2,
    "times of day": [clock(8), clock(8, 0, 0, 5000), NONE, clock(0), clock(23, 59, 59), clock(8)],
    "text": ["a", "bc", NONE, "d e", "ü", 'x,"y'],
    "like other kinds": ["True", "12.0", "1.10", "NA", "nan", " a "],
    "like nothing": ["true", "12", "1.1", "null", "None", "<NA>"],
    "like numbers": ["1e3", "+5", "１２", "1_000", "0x10", "1000"],
    "like times": [
        "2026-W47-5",
        "2026-06-30T23:59:60Z",
        "20261120",
        "2026-11-20 08:00",
        "T1",
        "8h",
    ],
    "nothing": [NONE] * 6,
}
AS_INTEGERS = {f"integer {name}": values for name, values in (NUMBERS | INTEGERS).items()}
AS_NUMBERS = {f"number {name}": values for name, values in (NUMBERS | FRACTIONS).items()}
TABLE = NUMBERS | FRACTIONS | INTEGERS | OTHERS | AS_INTEGERS | AS_NUMBERS
# Values that not every tool writes.
BYTES = {"bytes": [b"a", b"bc", NONE, b"d e", b"a", b"0"]}
SINGLES = {"float32": np.array([0.1, 1.5, 16777214.0, 2.0, 1e-7, 3.3], np.float32)}
LISTS = {
    "lists": [["a", "b"], [], NONE, ["True", "a"], ["12.0"], ["é"]],
    "of integers": [[1, 2], [], NONE, [3, 1], [2**62 + 1], [0]],
    "of fractions": [[1.5], [], NONE, [2.0, 1.5], [0.1], [1e-7]],
    "weighted": [["a", "b"], [], NONE, ["True", "a"], ["12.0"], ["é"]],
}
WEIGHTS = {"weights": [[1.5, -2.0], [], NONE, [0.5, 3.0], [0.25], [0.0]]}
NO_TEXT = {"csv", "pandas csv", "nullable csv", "json", "polars csv", "polars json"}
NO_TEXT |= {"lines", "cells", RAW}
WIDENING = {"nullable", "nullable csv", "objects", "records", "pandas json"}  # float32 to float64
TABLES = {
    "values": (TABLE, ROUTES),
    "bytes": (BYTES, [route for route in ROUTES if route not in NO_TEXT]),
    "singles": (SINGLES, [route for route in ROUTES if route not in WIDENING]),
    "lists": (
        LISTS | WEIGHTS,
        [r for r in ROUTES if r not in ("pandas csv", "nullable csv", "polars csv", "arrays")],
    ),
}
WHOLE = ("csv", "parquet")  # fitted, their models score every route
SELDOM = (
    "ipc",
    "polars ipc",
    "stream",
    "nullable csv",
    "pandas parquet",
    "polars parquet",
    "dictionaries",
    "views",
    "slices",
    "nullable",
)
FITTING = [
    pytest.param(name, route, marks=[pytest.mark.slow] if route in SELDOM else [])
    for name, (_, routes) in TABLES.items()
    for route in routes
    if route in FILES or route in FRAMES
]


def key(value):
    """Returns what equal values have in common, None for a missing one."""
    if value is None or value != value:
        return None
    if isinstance(value, str):
        value = value.strip()
        return value.lower() if value.lower() in ("true", "false") else value
    if isinstance(value, np.generic):
        return value if isinstance(value, np.datetime64) else value.item()
    return value


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Returns the paths of the files of each table."""
    found = {}
    for name, (table, routes) in TABLES.items():
        found[name] = written(table, tmp_path_factory.mktemp(name), routes)
    return found


@pytest.mark.parametrize(("name", "route"), FITTING)
def test_every_route_gives_one_model_one_table(name, route, files, tmp_path):
    table, routes = TABLES[name]
    numbers = [{"column": name, "transform": "none"} for name in table if name in AS_NUMBERS]
    read = {name: values for name, values in table.items() if name not in WEIGHTS}
    fields = [entry(name, values) for name, values in read.items() if name not in AS_NUMBERS]
    schema = {"label": "y", "categorical": fields, "numerical": numbers}
    transform = fitted(schema, table | {"y": [0, 1] * 3}, route, tmp_path)
    if route not in WHOLE:
        routes = [other for other in routes if other in (*WHOLE, "pandas", RAW)]
    own = inputs_of(transform, table, route, files[name])
    expected = {field: expected_of(transform, own, field, read[field]) for field in read}
    for other in routes:
        parts = inputs_of(transform, table, other, files[name])
        for field in read:
            found = (numbers_of if field in AS_NUMBERS else ids_of)(transform, parts, field)
            assert found == expected[field], (field, other)
        for weights in WEIGHTS.keys() & table:
            found = weights_of(transform, parts, "weighted")
            assert found == [own or [] for own in table[weights]], other


def expected_of(transform, own, field, values):
    """Returns the numbers or ids of a field's values, of which strings have those of their route.

    Those are checked: equal values, and no others, have one id.
    """
    if field in AS_NUMBERS:
        return [float(np.float16(number(value) or 0)) for value in values]
    table = transform.schema.categorical_names.index(field)
    if field in AS_INTEGERS:
        ids = {transform.value(table, id): id for id in range(1, transform.cardinalities[table])}
        return [0 if value is None else ids[str(int(number(value)))] for value in values]
    found = ids = ids_of(transform, own, field)
    if table in transform.longest:
        ids, values = sum(ids, []), sum((value or [] for value in values), [])
    keys = list(map(key, values))
    assert [id == 0 for id in ids] == [one is None for one in keys], field
    for id, one in zip(ids, keys, strict=True):
        assert [other == id for other in ids] == [other == one for other in keys], field
    return found


def entry(name, values):
    """Returns a categorical field of a schema."""
    if any(type(value) is list for value in values):
        weighted = {"weights": "weights"} if name == "weighted" else {}
        return {"column": name, "max_length": 2, **weighted}
    return {"column": name, "type": "integer" if name in AS_INTEGERS else "string"}


def number(value):
    words = {"true": 1, "false": 0}
    return float(words.get(value.lower(), value)) if isinstance(value, str) else value


DAY = at(2026, 1, 2, 8)
REFUSED = {
    "padded digits as numbers": (["007", "12", "a"] * 2, [7, 12], "such as '007'"),
    "versions as numbers": (["1.10", "1.1", "2"] * 2, [1.1], "may be either"),
    "numbers as times": ([1, 2, 3] * 2, [DAY], "got the time 2026-01-02 08:00:00"),
    "times as numbers": ([DAY] * 6, [5], "such as '2026-01-02 08:00:00'.* got the number 5"),
    "a zone": ([DAY] * 6, [DAY.replace(tzinfo=UTC)], "got the time 2026-01-02 08:00:00Z"),
    "no zone": ([DAY.replace(tzinfo=UTC)] * 6, [DAY], "such as '2026-01-02 08:00:00Z'"),
    "durations": (["a", "b"] * 3, [span(1)], "got the type duration.*number of seconds"),
    "booleans": (["yes", "no"] * 3, [YES], "got the boolean true.*true_values in the schema"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_values_of_another_kind_are_refused_by_name(kind, tmp_path):
    values, scored, message = REFUSED[kind]
    schema = {"label": "y", "categorical": ["c"]}
    transform = fitted(schema, {"y": [0, 1] * 3, "c": values}, "csv", tmp_path)
    table = {"c": scored}
    paths = written(table, tmp_path, ["parquet"])
    for route in ("parquet", "pandas", "arrow", "dicts", "columns", "polars"):
        with pytest.raises(ValueError, match=f"column 'c': .*({message})"):
            inputs_of(transform, table, route, paths)


@pytest.mark.parametrize("kind", ["string", "integer"])
def test_floats_that_need_not_be_the_known_integers_are_refused(kind, tmp_path):
    schema = {"label": "y", "categorical": [{"column": "c", "type": kind}, "last"]}
    table = {"c": [2**53 + 1, 5], "last": ["x"] * 2, "y": [0, 1]}
    transform = fitted(schema, table, "csv", tmp_path)
    table = {"c": [NONE, 2.0**60, 2.0**53, 5.0], "last": ["x"] * 4}
    paths = written(table, tmp_path)
    such_as = " such as 9007199254740993, as in the training data" if kind == "string" else ""
    message = rf"row 1, column c: expected integers{such_as}, got the float .*2\^53 read"
    for route in set(ROUTES) - {"nullable", "nullable csv"}:  # which make integers of them
        with pytest.raises(ValueError, match=message):
            inputs_of(transform, table, route, paths)


def test_a_marker_of_missing_integers_has_any_notation(tmp_path):
    marked = {"column": "c", "type": "integer", "missing_values": ["-999"]}
    schema = {"label": "y", "categorical": [marked, "last"]}
    table = {"c": [5.0, -999.0, 7.0], "last": ["x"] * 3}
    transform = fitted(schema, table | {"y": [0, 1, 1]}, "csv", tmp_path)
    paths = written(table, tmp_path)
    for route in ROUTES:
        ids = ids_of(transform, inputs_of(transform, table, route, paths), "c")
        assert ids == [1, 0, 2], route


def test_lists_in_one_text_have_markers_blanks_and_empty_values(tmp_path):
    tags, items = {"column": "tags", "max_length": 2, "weights": "w"}, {"column": "items"}
    schema = {"label": "y", "categorical": [tags, items | {"type": "integer", "max_length": 4}]}
    table = {"tags": ["b| a|b", "", "NA", "c|NA"], "w": ["1|-2|.5", "", "NA", "3|0"]}
    table["items"] = ["7", "8|7", "", "9"]
    markers = {"missing_values": ["NA"]}
    transform = fitted(schema | markers, table | {"y": [0, 1, 0, 1]}, "csv", tmp_path)
    paths = written(table, tmp_path)
    for route in ROUTES:
        if route in ("columns", "arrays"):  # in which texts of a list field are one list
            with pytest.raises(ValueError, match="column tags: expected an item of one list"):
                inputs_of(transform, table, route, paths)
            continue
        parts = inputs_of(transform, table, route, paths)
        assert ids_of(transform, parts, "tags") == [[2, 1], [], [], [3, 0]], route
        assert weights_of(transform, parts, "tags") == [[-2.0, 0.5], [], [], [3.0, 0.0]], route
        assert ids_of(transform, parts, "items") == [[1], [2, 1], [], [3]], route


MIXED = [[DAY, day(2026, 1, 2)], [day(2026, 1, 2), DAY], [DAY, DAY.replace(tzinfo=UTC)]]


@pytest.mark.parametrize("values", MIXED)
def test_dates_and_times_of_several_kinds_are_texts_in_rows_and_refused_in_pandas(values, tmp_path):
    """Arrow takes the first value's type: it would cut off the time, or the zone."""
    schema = {"label": "y", "categorical": ["c"]}
    transform = fitted(schema, {"y": [0, 1], "c": values}, "csv", tmp_path)
    ids = ids_of(transform, inputs_of(transform, {"c": values}, "dicts", {}), "c")
    assert sorted(ids) == [1, 2]
    with pytest.raises(ValueError, match="column 'c': expected values of one type"):
        inputs_of(transform, {"c": values}, "objects", {})


MISSING = [NONE, pandas.NA, pandas.NaT, np.nan, np.float32("nan"), np.datetime64("NaT"), "", " "]


@pytest.mark.parametrize("present", ["a", 5, 2.5, DAY])
def test_every_missing_value_of_rows_has_id_0(present, tmp_path):
    schema = {"label": "y", "categorical": ["c"]}
    transform = fitted(schema, {"y": [0, 1], "c": [present] * 2}, "csv", tmp_path)
    for missing in MISSING:
        table = {"c": [present, missing]}
        assert ids_of(transform, inputs_of(transform, table, "dicts", {}), "c") == [1, 0], missing


def test_rows_of_any_container_are_the_same(tmp_path):
    schema = {"label": "y", "categorical": ["c", "1"]}
    table = {"c": ["a", "b"], "1": [1, 2]}
    transform = fitted(schema, table | {"y": [0, 1]}, "csv", tmp_path)
    frame = pandas.DataFrame({"more": [[], {}], 1: [1, 2], "c": ["a", "b"]})
    polar = polars.DataFrame({"1": [1, 2], "c": ["a", "b"]})
    given = [
        frame,
        frame.set_index(pandas.Index([7, 7], name="c")),
        frame.set_index(pandas.MultiIndex.from_tuples([(1, 2), (3, 4)], names=["c", "y"])),
        frame.astype({"c": "category"}),
        frame[["c", 1]].to_numpy(),
        list(frame[["c", 1]].itertuples(index=False)),
        polar,
        polar.with_columns(polars.col("c").cast(polars.Categorical)),
        {"c": polar["c"], "1": frame[1]},
        [{"c": np.str_("a"), "1": np.array(1)}, {"c": b"b", "1": np.int8(2), "z": object()}],
        pa.table(
            {"c": pa.DictionaryArray.from_arrays([2, 1], [None, "b", "a"]), "1": pa.array([1, 2])}
        ),
    ]
    for rows in given:
        parts = of_rows(transform, rows)
        assert [ids_of(transform, parts, name) for name in table] == [[1, 2]] * 2
    for empty in ([], frame[:0], polar[:0], {"c": [], "1": []}):
        assert not sum(len(part.numerical) for part in of_rows(transform, empty))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (pandas.DataFrame({"c": ["a"]}), "no column '1'"),
        (pandas.DataFrame([["a", "b", 1]], columns=["c", "c", "1"]), "two columns are called 'c'"),
        (pa.table([["a"], ["b"], [1]], ["c", "c", "1"]), "two columns are called 'c'"),
        ([{"c": "a"}], "row 0: no column '1'"),
        ({"c": ["a", "b"], "1": [1]}, "columns of one length"),
    ],
)
def test_columns_that_are_not_there_once_are_named(rows, message, tmp_path):
    schema = {"label": "y", "categorical": ["c", "1"]}
    table = {"y": [0, 1], "c": ["a", "b"], "1": [1, 2]}
    with pytest.raises(ValueError, match=message):
        of_rows(fitted(schema, table, "csv", tmp_path), rows)


def test_trained_models_give_equal_scores(files):
    """End to end: a model of a frame scores each route."""
    table, routes = TABLES["values"]
    frame = FRAMES["pandas"](table | {"y": [0, 1] * 3})
    fields = [entry(name, values) for name, values in table.items() if name not in AS_NUMBERS]
    schema = {"label": "y", "categorical": fields, "numerical": list(AS_NUMBERS)}
    data = dlrm.Dataset.from_arrow(frame, schema, test=frame, cores=1)
    model = dlrm.fit(data, epochs=1)
    expected = model.predict(frame)
    assert len(set(expected.tolist())) == 6
    for route in routes:
        parts = inputs_of(model.transform, table, route, files["values"])
        scores = probability(np.concatenate([model.logits_of(part) for part in parts]))
        np.testing.assert_array_equal(scores, expected, err_msg=route)
