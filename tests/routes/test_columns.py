"""A column means one thing on every route: missing values, texts of numbers, and ids in floats.

The oracle is the row in Python with None for a missing value, or what a message must name.
"""

import datetime as dt
import re
import uuid
from decimal import Decimal
from functools import partial

import forked
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import routes_testing
from routes_testing import (
    FILES,
    FRAMES,
    RAW,
    fitted,
    ids_of,
    inputs_of,
    numbers_of,
    of_rows,
)
from tables_testing import prepare

import dlrm
from dlrm.data.schema.schema import Schema
from dlrm.data.transform.transform import Transform
from dlrm.preproc.errors import TaskError
from dlrm.preproc.options import IncrementConfig

NAN = float("nan")
TABLES = ("arrow", "pandas", "objects", "polars")
WRITTEN = ("csv", "polars csv", "json", "parquet", "polars parquet", "ipc")


def brought(schema, table, route, folder):
    """Makes a dataset of a table that a route brings to preprocessing."""
    if route in FRAMES:
        return dlrm.Dataset.from_arrow(FRAMES[route](table), schema, folder / "data", cores=1)
    try:
        prepare(schema, [written(table, route, folder)], folder / "data", test_fraction=0.2)
    except TaskError as error:
        raise ValueError(str(error)) from error
    return dlrm.Dataset(folder / "data")


def refused(call, *given):
    """Returns the result of a function and "", or None and the message of its refusal."""
    try:
        return call(*given), ""
    except ValueError as error:
        return None, str(error)


def written(table, route, folder):
    write, suffix = FILES[route]
    write(table, path := folder / f"{route.replace(' ', '_')}{suffix}")
    return path


RATING = {"column": "click", "positive": ["5"], "any_negative": True}


@pytest.mark.parametrize("route", [*TABLES, *WRITTEN])
def test_nan_is_a_missing_label(route, tmp_path):
    table = {"click": np.array([5, 4, NAN, 4, 5] * 4), "n": list(range(20))}
    message = r"(row 2|line [34]), column click: expected a label that is not missing"
    for label in (RATING, {"column": "click", "positive": "5"}):
        (folder := tmp_path / str(len(label))).mkdir()
        with pytest.raises(ValueError, match=message):
            brought({"label": label, "numerical": ["n"]}, table, route, folder)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("positive", [1, None])
def test_nan_is_no_label_of_a_draft(positive, dtype):
    table = {"click": np.array([1, 0, NAN] * 20, dtype), "n": list(range(60))}
    for route in ("arrow", "pandas", "polars")[: 2 + (dtype != np.float16)]:
        with pytest.raises(ValueError, match="column click, row 2: expected a label that is not"):
            dlrm.fit(FRAMES[route](table), label="click", positive=positive)


@pytest.mark.parametrize("label", ["nan", "NaN", "inf", "abc"])
def test_texts_that_are_no_numbers_are_no_ratings(label, tmp_path):
    table = {"click": ["5", "4", label, "3"] * 9, "n": list(range(36))}
    with pytest.raises(ValueError, match=f"line 4, column click: expected a .*, got '{label}'"):
        brought({"label": RATING, "numerical": ["n"]}, table, "csv", tmp_path)


def test_a_draft_takes_no_missing_text_among_numbers_for_a_negative_label(tmp_path):
    written({"click": ["5", "4", "nan", "3"] * 9, "n": list(range(36))}, "csv", tmp_path)
    words = ["--input=csv.csv", "--label=click", "--positive=5"]
    done = forked.run("dlrm.scripts.schema", *words, cwd=tmp_path)
    assert done.returncode
    assert "column click: expected labels that are not missing, got 'nan' in 9 rows" in done.stderr


BESIDE = [("csv", str), ("json", str), ("parquet", str), ("pandas", str)]
BESIDE += [(route, float) for route in ("csv", "polars csv", "json", "parquet", "pandas", "arrow")]


@pytest.mark.parametrize(("route", "kind"), BESIDE)
def test_nan_beside_numbers_alone_gets_no_id(route, kind, tmp_path):
    numbers = [1.5, NAN, 2.5, NAN, 1.5, NAN, NAN, 1.5] * 5
    table = {"c": [*map(kind, numbers)], "d": ["a", "nan", "a", "nan", "a"] * 8, "y": [0, 1] * 20}
    crosses = [{"fields": names, "frequency_limit": 1} for names in (["c", "d"], ["d", "c"])]
    schema = {"label": "y", "categorical": ["c", "d"], "crosses": crosses}
    transform = fitted(schema, table, route, tmp_path)
    both = [pair for pair in zip(numbers, table["d"], strict=True) if pair[0] == pair[0]]
    made = {f"{c} & {d}": both.count((c, d)) for c, d in both}
    in_order = sorted(made, key=lambda text: (-made[text], text))
    found = [dictionary.values() for dictionary in transform.dictionaries]
    assert found[:3] == [["1.5", "2.5"], ["a", "nan"], in_order]
    assert sorted(found[3]) == sorted(" & ".join(t.split(" & ")[::-1]) for t in in_order)
    ids = np.fromfile(tmp_path / f"dataset of {route}" / "train" / "cat_0.bin", np.int8)
    assert np.bincount(ids).tolist() == [20, 15, 5]
    rows = {"c": [NAN, 1.5, 2.5, NAN], "d": ["a"] * 4}
    scored = ("dicts", "lines", "cells", "pandas", "csv", "polars csv", "json", "parquet", RAW)
    paths = routes_testing.written(rows, tmp_path, scored)
    for other in scored:
        parts = inputs_of(transform, rows, other, paths)
        assert ids_of(transform, parts, "c") == [0, 1, 2, 0], other


def test_nan_of_a_later_day_is_a_value_beside_texts_alone(tmp_path):
    schema, before = {"label": "y", "categorical": ["c", "d"]}, {}
    days = [([1.5, NAN], ["a", "b"]), ([2.5, NAN], [2.5, NAN])]
    for day, (c, d) in enumerate(days):
        path = written({"c": c * 10, "d": d * 10, "y": [0, 1] * 10}, "csv", tmp_path)
        prepare(schema, [path], tmp_path / str(day), increment=IncrementConfig(**before))
        before = {"extend": tmp_path / str(day)}
    transform = Transform.load(tmp_path / "1" / "transform")
    found = [dictionary.values() for dictionary in transform.dictionaries]
    assert found == [["1.5", "2.5"], ["a", "b", "2.5", "nan"]]


def test_integers_that_extend_booleans_are_scored_as_they_were_prepared(tmp_path):
    schema, before = {"label": "y", "categorical": ["c"]}, {}
    for day, values in enumerate(([True, False], [0, 1, 2, 3])):
        path = written({"c": values * 8, "y": [0, 1] * (4 * len(values))}, "parquet", tmp_path)
        options = {"increment": IncrementConfig(**before), "output_ordering": "input"}
        prepare(schema, [path], tmp_path / str(day), **options)
        before = {"extend": tmp_path / str(day)}
    ids = np.fromfile(tmp_path / "1" / "train" / "cat_0.bin", np.int8)[:4].tolist()
    transform = Transform.load(tmp_path / "1" / "transform")
    assert sorted(ids) == [1, 2, 3, 4]
    for route in ("dicts", "arrow", "cells"):
        rows = {"c": [0, 1, 2, 3]}
        assert ids_of(transform, inputs_of(transform, rows, route, {}), "c") == ids, route


@pytest.mark.parametrize("value", [np.float16(0.5), uuid.UUID(int=1)], ids=repr)
def test_objects_that_arrow_takes_for_integers_are_refused_beside_some(value, tmp_path):
    table = {"c": [1, value] * 9, "y": [0, 1] * 9}
    with pytest.raises(ValueError, match="column 'c': expected values of one type"):
        brought({"label": "y", "categorical": ["c"]}, table, "objects", tmp_path)


def test_bytes_that_are_no_text_are_named_in_lists_and_lines(tmp_path):
    field = {"column": "c", "max_length": 3, "weights": "w"}
    table = {"c": [["a"], ["b"]], "w": [[1.0], [2.0]], "y": [0, 1]}
    transform = fitted({"label": "y", "categorical": [field]}, table, "parquet", tmp_path)
    texts = pa.array([b"1", b"\xff"], pa.binary()).view(pa.string())
    for rows in (
        pa.table({"c": texts, "w": ["1", "1"]}),
        pa.table({"c": ["a", "b"], "w": texts}),
        pa.table({"c": texts.dictionary_encode(), "w": ["1", "1"]}),
    ):
        with pytest.raises(ValueError, match="row 1, column [cw]: expected UTF-8"):
            of_rows(transform, rows)
    with pytest.raises(ValueError, match="row 1: expected UTF-8"):
        of_rows(transform, [b"a\t1", b"\xff\t1"])


def test_a_row_that_is_left_out_may_have_any_values(tmp_path):
    moments = np.array(["2026-01-01T00:00:00.123456789"] * 40, "M8[ns]")
    lists = [["a"], ["b", "c"], None, []] * 10
    rest = {"t": moments, "c": lists, "y": [0, 1] * 20, "i": [uuid.UUID(int=1).bytes] * 40}
    table = pa.table(rest | {"n": ["1", "2", "many", "4"] * 10}).set_column(
        3, "i", pa.array(rest["i"], pa.uuid())
    )
    pq.write_table(table, path := tmp_path / "a.parquet")
    fields = ["t", {"column": "c", "max_length": 3}, "i"]
    schema = {"label": "y", "numerical": ["n"], "categorical": fields}
    limits = {"bad_lines": "quarantine", "max_bad_lines": 0.5}
    prepare(schema, [path], tmp_path / "data", **limits)
    assert sum(dlrm.Dataset(tmp_path / "data").rows.values()) == 30


@pytest.mark.parametrize("route", [*TABLES, "parquet", "ipc"])
def test_nan_is_no_group(route, tmp_path):
    table = {"g": np.array([1.0, 2.5, NAN] * 9), "n": list(range(27)), "y": [0, 1, 0] * 9}
    schema = {"label": "y", "numerical": ["n"], "groups": ["g"]}
    with pytest.raises(ValueError, match="row 2, column g: expected a group, got no value"):
        brought(schema, table, route, tmp_path)


def test_a_text_scores_the_same_alone_and_among_others(tmp_path):
    longest = ["1.2345678901234567890123450e+05", "1.000000000000000000000000000e+02"]
    texts = [*longest, "123456.78901234567", "1E+5", "100000", *(f"v{i}" for i in range(20))]
    table = {"c": texts * 8, "y": [int(text in longest) for text in texts] * 8}
    schema = {"label": "y", "categorical": ["c"]}
    frame = FRAMES["arrow"](table)
    model = dlrm.fit(dlrm.Dataset.from_arrow(frame, schema, test=frame), epochs=1, batch_size=9)
    rows = [{"c": text} for text in texts]
    together = model.predict(rows)
    assert len({*together[:2], model.predict([{"c": "unknown"}])[0]}) == 3
    np.testing.assert_array_equal([model.predict([row])[0] for row in rows], together)


IDS = np.array([1234567890123456789 + 300 * k for k in range(40)])
FLOATS = {
    "floats": IDS.astype(np.float64),
    "one": np.array([*range(39), IDS[0]], np.float64),
    "below 1e16": np.full(40, 2.0**53),
    "single": IDS.astype(np.float32),
    "texts": [repr(number) for number in IDS.astype(float).tolist()],
}


@pytest.mark.parametrize(
    ("kind", "route"),
    [(kind, route) for kind in FLOATS for route in ("arrow", "csv")]
    + [(kind, route) for kind in ("floats", "single") for route in ("pandas", "polars", "json")]
    + [("single", "parquet")],
)
def test_ids_in_floats_that_need_not_be_exact_are_refused(kind, route, tmp_path):
    table = {"user_id": FLOATS[kind], "n": list(range(40)), "y": [0, 1] * 20}
    bits = 24 if kind == "single" and route in (*TABLES, "parquet") else 53
    message = rf"column user_id: expected integers, got the float .*above 2\^{bits} read the column"
    schema = {"label": "y", "numerical": ["n"]}
    for place, made in enumerate([{"categorical": ["user_id"]}, {"groups": ["user_id"]}]):
        (folder := tmp_path / str(place)).mkdir()
        with pytest.raises(ValueError, match=message):
            brought(schema | made, table, route, folder)
    if route in FRAMES and len(set(FLOATS[kind])) > 1:  # others are left out of a draft
        with pytest.raises(ValueError, match=message):
            dlrm.fit(FRAMES[route](table), label="y")


AS = [("arrow", role) for role in ("string", "integer", "id", "list", "group")]
AS += [(route, "string") for route in ("coded", "pandas", "polars", "parquet")]


@pytest.mark.parametrize(
    ("route", "role", "bits", "kind"),
    [(*one, 24, pa.float32()) for one in AS] + [(*one, 11, pa.float16()) for one in AS[::5]],
)
def test_ids_in_narrow_floats_are_refused_by_their_width(route, bits, kind, role, tmp_path):
    field = {"column": "u", "max_length": 2} if role == "list" else {"column": "u", "type": role}
    used = {"groups": ["u"]} if role == "group" else {"categorical": ["last", field]}
    schema = {"label": "y", "categorical": ["last"]} | used

    def prepared(first, name):
        array = pa.array(np.arange(first, first + 40).astype(kind.to_pandas_dtype()))
        if route == "coded":
            array = pa.DictionaryArray.from_arrays(pa.array(range(40), pa.int32()), array)
        if role == "list":
            array = pa.ListArray.from_arrays(pa.array(range(41), pa.int32()), array)
        table = pa.table({"u": array, "last": ["x"] * 40, "y": [0, 1] * 20})
        if route == "parquet":
            pq.write_table(table, path := tmp_path / f"{name}.parquet")
            return prepare(schema, [path], tmp_path / name)
        made = {"pandas": pa.Table.to_pandas, "polars": routes_testing.polars.from_arrow}
        frame = made.get(route, pa.table)(table)
        return dlrm.Dataset.from_arrow(frame, schema, tmp_path / name, cores=1)

    prepared((1 << bits) - 40, "exact")
    message = (
        rf"column u: .*expected integers, got the float .*: above 2\^{bits} read the column as"
    )
    with pytest.raises((ValueError, TaskError), match=message):
        prepared((1 << bits) - 39, "inexact")


@pytest.mark.parametrize(("bits", "dtype"), [(24, np.float32), (11, np.float16)])
def test_narrow_floats_that_need_not_be_the_known_integers_are_refused(bits, dtype, tmp_path):
    schema, most = {"label": "y", "categorical": ["u", "last"]}, 1 << bits
    rest = {"last": ["x"] * 2, "y": [0, 1]}
    known, exact = (
        fitted(schema, {"u": [most + odd, 5]} | rest, "csv", made)
        for odd in (1, 0)
        if (made := tmp_path / str(odd)).mkdir() is None
    )
    rows = {"u": np.array([5, most], dtype), "last": ["x"] * 2}
    message = rf"column u: expected integers such as {most + 1}, .* got the float .*2\^{bits} read"
    for route in ("arrow", "pandas", "columns", "scalars", "parquet"):
        paths = routes_testing.written(rows, tmp_path, [route])
        with pytest.raises(ValueError, match=message):
            inputs_of(known, rows, route, paths)
        assert ids_of(exact, inputs_of(exact, rows, route, paths), "u") == [2, 1], route


def test_a_draft_takes_narrow_floats_that_are_no_exact_ids_for_numbers(tmp_path):
    floats = np.array([2.0**24 + 2 * (k % 5) for k in range(40)], np.float32)
    table = {"user_id": floats, "v": floats, "n": list(range(40)), "y": [0, 1] * 20}
    path = written(table, "parquet", tmp_path)
    done = forked.succeed("dlrm.scripts.schema", f"--input={path}", "--label=y", cwd=tmp_path)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("warning:")]
    assert line.startswith("warning:     user_id has floats that need not be exact: above 2^24")
    schema = Schema.load(tmp_path / "schema.yaml")
    assert [field.column for field in schema.numerical] == ["v", "n"]


@pytest.mark.parametrize("beside", [int, str])
def test_a_float_beside_exact_ids_is_refused_as_alone(beside):
    frame = pa.table({"user_id": IDS.repeat(2), "y": [0, 1] * 40})
    schema = {"label": "y", "categorical": ["user_id"]}
    model = dlrm.fit(dlrm.Dataset.from_arrow(frame, schema, test=frame), epochs=1, batch_size=9)
    for given in ([float(IDS[1])], [beside(IDS[0]), float(IDS[1])]):
        with pytest.raises(ValueError, match="user_id: expected integers.* got the float 1.23"):
            model.predict([{"user_id": value} for value in given])


@pytest.mark.parametrize("route", ["csv", "json", "parquet"])
def test_a_draft_warns_of_ids_in_floats(route, tmp_path):
    table = {"user_id": [None, *IDS[1:].astype(float).tolist()], "n": list(range(40))}
    table["n"][7] = 2.0**60  # no id
    path = written(table | {"y": [0, 1] * 20}, route, tmp_path)
    done = forked.succeed("dlrm.scripts.schema", f"--input={path}", "--label=y", cwd=tmp_path)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("warning:")]
    assert line.startswith("warning:     user_id has floats that need not be exact: above 2^53")
    text = (tmp_path / "schema.yaml").read_text()
    assert text.count("above 2^53 read the column as integers or text") == 1


SPELLED = {"column": "f", "transform": "none", "true_values": ["yes"], "false_values": ["no"]}


@pytest.mark.parametrize("route", [*TABLES, *WRITTEN])
def test_null_is_a_missing_number_beside_spellings_of_true(route, tmp_path):
    table = {"f": ["yes", None, "no", "2.5"] * 5, "y": [0, 1] * 10}
    transform = fitted({"label": "y", "numerical": [SPELLED]}, table, route, tmp_path)
    rows = {"f": [None, "yes", "no", "2.5"]}
    for other in ("dicts", "columns", "cells", "arrow", "pandas", "polars"):
        parts = inputs_of(transform, rows, other, {})
        assert numbers_of(transform, parts, "f") == [0, 1, 0, 2.5], other


HALVES = np.array([1.5, 1.5], np.float16)
NULLS = {
    "float": pa.array([None, 1.5], pa.float32()),
    "halffloat": pa.array(HALVES, mask=np.array([True, False])),
    "decimal": pa.array([None, Decimal("2.50")], pa.decimal128(9, 2)),
    "bool": pa.array([None, True]),
    "int8": pa.array([None, 1], pa.int8()),
}


@pytest.mark.parametrize("name", NULLS)
def test_nulls_of_every_type_are_missing_beside_spellings_of_true(name, tmp_path):
    table = {"f": ["yes", None, "no", "2.5"] * 5, "y": [0, 1] * 10}
    transform = fitted({"label": "y", "numerical": [SPELLED]}, table, "csv", tmp_path)
    frame = pa.table({"f": NULLS[name]})
    for rows in (frame, frame.to_pandas(), routes_testing.polars.from_arrow(frame)):
        found = numbers_of(transform, of_rows(transform, rows), "f")
        assert found == [0, float(NULLS[name][1].as_py())], type(rows)
    scalars = [{"f": value} for value in frame.to_pandas()["f"]]  # as float32 in numpy
    assert numbers_of(transform, of_rows(transform, scalars), "f") == found


TIMES = {
    "times": [dt.datetime(2026, 1, 2, 8), dt.datetime(2026, 1, 3)],
    "days": [dt.date(2026, 1, 2), dt.date(2026, 1, 3)],
    "times of day": [dt.time(8), dt.time(9)],
}
TYPED = ("arrow", "pandas", "polars", "parquet")
TIMED = [(name, route) for name in TIMES for route in ("csv", "json", *TYPED)]


@pytest.mark.parametrize("role", ["numerical", "weight"])
@pytest.mark.parametrize(("name", "route"), TIMED)
def test_times_are_no_numbers(name, route, role, tmp_path):
    table = {"t": TIMES[name] * 20, "n": list(range(40)), "y": [0, 1] * 20}
    schema = {"label": "y", "numerical": ["n"]} | ({"weight": "t"} if role == "weight" else {})
    schema["numerical"] += ["t"] * (role == "numerical")
    with pytest.raises(ValueError, match="column '?t'?: expected (a number|numbers), got"):
        brought(schema, table, route, tmp_path)


SCORED = ["csv", "json", "cells", RAW, *TYPED, "dicts", "columns"]


@pytest.mark.parametrize("route", SCORED)
@pytest.mark.parametrize("name", ["times", "days"])
def test_times_are_no_numbers_to_score(name, route, tmp_path):
    table = {"t": list(range(40)), "d": ["x"] * 40, "y": [0, 1] * 20}
    schema = {"label": "y", "numerical": ["t"], "categorical": ["d"]}
    transform = fitted(schema, table, "csv", tmp_path)
    rows = {"t": TIMES[name], "d": ["x"] * 2}
    paths = routes_testing.written(rows, tmp_path, [route])
    with pytest.raises(ValueError, match="column '?t'?: expected (a number|numbers), got"):
        inputs_of(transform, rows, route, paths)


@pytest.mark.parametrize("route", ["csv", "json", "parquet", "pandas"])
def test_numbers_in_the_column_of_times_are_refused_with_the_remedy(route, tmp_path):
    table = {"t": [1767225600 + n for n in range(40)], "n": [1, 2] * 20, "y": [0, 1] * 20}
    schema = {"label": "y", "numerical": ["n"], "time": "t"}
    with pytest.raises(ValueError, match="column '?t'?: expected .* time: {unit: s} in the schema"):
        brought(schema, table, route, tmp_path)


def test_what_was_refused_is_prepared_once_it_is_corrected(tmp_path):
    table = {"n": [1, "many", 3, 4] * 5, "m": [5, 6] * 10, "y": [0, 1] * 10}
    for place, (fields, cell) in enumerate([(["n", "m"], 2), (["m"], "many")]):
        (folder := tmp_path / str(place)).mkdir()
        with pytest.raises(ValueError, match="line 3, column n: expected a number, got 'many'"):
            brought({"label": "y", "numerical": ["n", "m"]}, table, "csv", folder)
        corrected = table | {"n": [1, cell, 3, 4] * 5}
        made = brought({"label": "y", "numerical": fields}, corrected, "csv", folder)
        assert sum(made.rows.values()) == 20
        assert {path.name for path in folder.iterdir()} == {"csv.csv", "data"}


@pytest.mark.parametrize("route", ["csv", "parquet", "arrow"])
def test_a_row_of_weight_0_is_as_if_it_were_not_there(route, tmp_path):
    rows = {"c": ["a", "b"] * 20, "d": ["e"] * 40, "n": list(range(40)), "y": [0, 1] * 20}
    rows, ignored = rows | {"w": [1.5] * 40}, {"c": ["z"], "d": ["e"], "n": [1e3], "y": [0]}
    both = {name: [*rows[name], *(ignored | {"w": [0.0]})[name] * 20] for name in rows}
    crosses = [{"fields": ["c", "d"], "frequency_limit": 1}]
    schema = {"label": "y", "numerical": [{"column": "n", "bins": 4}], "categorical": ["c", "d"]}
    schema |= {"weight": "w", "crosses": crosses}
    found = []
    for table in (rows, both):
        (folder := tmp_path / str(len(found))).mkdir()
        transform = fitted(schema, table, route, folder)
        texts = [dictionary.values() for dictionary in transform.dictionaries]
        found.append((texts, str(transform.numerical)))
    assert found[0] == found[1]


FIVES = {"5.0": RATING, "5.00": RATING, "05": RATING, "+5": RATING, "5e0": RATING, "-0.0": "click"}


@pytest.mark.parametrize("text", FIVES)
@pytest.mark.parametrize("route", ["csv", "json", "parquet", "pandas"])
def test_labels_are_compared_as_numbers_or_refused(text, route, tmp_path):
    labels = ["5", "4", text, "3"] if text != "-0.0" else [1.0, 0.0, 1.0, -0.0]
    table = {"click": labels * 5, "n": list(range(20))}
    schema = {"label": FIVES[text], "numerical": ["n"]}
    made, message = refused(brought, schema, table, route, tmp_path)
    if made is None:
        assert re.search(f"column click: expected .*, got {re.escape(repr(text))}", message)
    else:
        assert sum(sum(path.read_bytes()) for path in made.path.glob("*/label.bin")) == 10


VALUES = {
    "an array": np.array(["a"]),
    "a list": ["a"],
    "a series": pandas.Series(["a"]),
    "a series of Polars": routes_testing.polars.Series(["a"]),
    "an array of Arrow": pa.array(["a"]),
    "a function": len,
    "an object": object(),
    "bytes": b"\xff",
    "a mapping": {"a": 1},
}


@pytest.mark.parametrize("name", VALUES)
def test_an_object_without_a_text_is_refused_by_name(name, tmp_path):
    table = {"c": ["a", "b"], "d": ["x"] * 2, "y": [0, 1]}
    transform = fitted({"label": "y", "categorical": ["c", "d"]}, table, "csv", tmp_path)
    for given in ([{"c": VALUES[name], "d": "x"}], [(VALUES[name], "x")]):
        with pytest.raises(ValueError, match="column '?c'?: expected"):
            of_rows(transform, given)


def test_uuids_are_one_text_and_their_bytes_are_refused(tmp_path):
    ids = [uuid.UUID("c9bf9e57-1685-4c89-bafb-ff5af830be8a"), uuid.UUID(int=255)]
    table = {"c": [*map(str, ids)], "d": ["x"] * 2, "y": [0, 1]}
    transform = fitted({"label": "y", "categorical": ["c", "d"]}, table, "csv", tmp_path)
    typed = pa.table({"c": pa.array([one.bytes for one in ids], pa.uuid()), "d": ["x"] * 2})
    for rows in (
        [{"c": one, "d": "x"} for one in ids],
        pandas.DataFrame({"c": ids, "d": "x"}),
        typed,
    ):
        assert sorted(ids_of(transform, of_rows(transform, rows), "c")) == [1, 2]
    with pytest.raises(ValueError, match="row 0, column c: expected UTF-8"):
        of_rows(transform, typed.to_pandas())


MONTHS = pandas.Series(pandas.period_range("2026-01", periods=4, freq="M"))
PANDAS = {"periods": MONTHS, "intervals": pandas.cut(pandas.Series([1.0, 2, 3, 4]), 2)}
PANDAS |= {f"objects of {name}": column.astype(object) for name, column in PANDAS.items()}


@pytest.mark.parametrize("name", PANDAS)
def test_types_of_pandas_are_texts_or_refused_by_name(name, tmp_path):
    frame = pandas.DataFrame({"c": PANDAS[name], "d": "x", "y": [0, 1] * 2})
    table = {"c": [*map(str, PANDAS[name])], "d": ["x"] * 4, "y": [0, 1] * 2}
    schema = {"label": "y", "categorical": ["c", "d"]}
    transform = fitted(schema, table, "csv", tmp_path)
    known = transform.dictionaries[0].values()
    options = {"test_fraction": 0.0, "cores": 1}
    made, message = refused(partial(dlrm.Dataset.from_arrow, frame, schema, **options))
    if made is None:
        assert "column 'c': expected" in message
    else:
        made = Transform.load(made.path / "transform")
        assert made.dictionaries[0].values() == known
    parts, message = refused(of_rows, transform, frame[["c", "d"]])
    if parts is None:
        assert "column 'c': expected" in message
    else:
        assert 0 not in ids_of(transform, parts, "c")


def test_the_label_is_no_weight():
    with pytest.raises(ValueError, match="y"):
        Schema.from_dict({"label": "y", "categorical": ["c"], "weight": "y"})


@pytest.mark.slow
def test_the_number_of_ids_changes_no_match(tmp_path):
    """Many other values are more frequent than a number that is written with zeros."""
    others = [f"v{n}" for n in range(1 << 20)]
    values = ["5"] * 4 + others * 2 + ["1.50"]
    frame = pa.table(
        {"c": values, "d": ["x"] * len(values), "y": [0, 1] * (len(values) // 2) + [0]}
    )
    schema, output = {"label": "y", "categorical": ["c", "d"]}, tmp_path / "data"
    dlrm.Dataset.from_arrow(frame, schema, output, test_fraction=0.0, cores=1)
    transform = Transform.load(output / "transform")
    for value in ("1.50", 1.5):
        (id,) = ids_of(transform, of_rows(transform, [{"c": value, "d": "x"}]), "c")
        assert transform.value(0, id) == "1.50", value
