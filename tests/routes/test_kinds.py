"""Kinds of values whose meaning once depended on the route, or on other rows, an example each.

A model takes the same inputs on every route, or a route refuses by column and value.
"""

import re
from decimal import Decimal
from typing import NamedTuple
from uuid import UUID

import numpy as np
import pytest
from routes_testing import (
    FRAMES,
    RAW,
    ROUTES,
    broken,
    fitted,
    ids_of,
    inputs_of,
    numbers_of,
    written,
)

from dlrm.preproc.errors import TaskError

NAN = float("nan")
LISTS = [r for r in ROUTES if r not in ("pandas csv", "nullable csv", "polars csv", "arrays")]
IN_TEXT = [r for r in LISTS if r != "columns"]  # in which a text of a list field is an item
BAD = (ValueError, TaskError)


def outcome(call, *given):
    """Returns the result of a function, or the message of its refusal."""
    try:
        return call(*given)
    except BAD as error:
        return str(error)


def renamed(values, seen):
    """Returns values, equal ones of which are one number, and missing ones 0."""
    if isinstance(values, list):
        return [renamed(value, seen) for value in values]
    return 0 if values in (None, 0) else seen.setdefault(values, len(seen) + 1)


class Kind(NamedTuple):
    """A column and its meaning.

    Attributes:
        field: its field, without the name; it is numerical if it has a transform.
        values: its values, in training and in scoring.
        meant: numbers; or a value each, equal ones of which have one id, and None has none.
        refused: a part of what a route may say that does not take it; "" for none.
        rest: other entries of the schema.
        trained: other values in training.
    """

    field: dict
    values: object
    meant: list
    refused: str = ""
    rest: dict = {}
    routes: list = ROUTES
    trained: object = None


NUMBER, LIST, INTEGER = {"transform": "none"}, {"max_length": 4}, {"type": "integer"}
SINGLE = np.array([0.1, 1.5, 3.3], np.float32)
WIDENED = ["nullable csv", "pandas json"]  # which make float64 of float32
IN_MEMORY = [*FRAMES, "dicts", "columns", "records", "scalars", "parquet"]
CODES = ["5E-400", "7e-999", "2E-345", "0"]
PRINTED = {"[8, 23]": ",", "['i9', 'i16']": ",", "[23  9]": " "}
NANS = ["1.5", "nan", "NaN", "2"]
IN_CSV = ["csv", "pandas csv", "polars csv", "lines", "cells", "dicts", "columns", RAW]
TYPED = "expected an integer of up to 18 digits, got '?1.0"
MARKS = {"format": {"decimal": ",", "thousands": "."}}
KINDS = {
    "NaN in a list": Kind(
        LIST, [[1.5, NAN], [2.5], [NAN]], [["a", None], ["b"], [None]], routes=LISTS
    ),
    "NaN as a number": Kind(
        NUMBER, [1.5, NAN], [1.5, 0], "finite number.*(?i:nan)", trained=[1, 2]
    ),
    "zeros": Kind({}, [0.0, -0.0, 1.5], ["0", "0", "1.5"]),
    "small codes": Kind({}, CODES, CODES),
    "a marker": Kind({"missing_values": ["-999.0"]} | INTEGER, [5, -999, 7], ["5", None, "7"]),
    "empty items": Kind(LIST, ["a|b|", "|", "||a"], [["a", "b"], [], ["a"]], routes=IN_TEXT),
    **{
        f"printed {text}": Kind(
            LIST | {"separator": mark},
            [text, "[]"],
            [["8", "23"], []],
            re.escape(text),
            routes=IN_TEXT,
        )
        for text, mark in PRINTED.items()
    },
    "float32": Kind({}, SINGLE, ["0.1", "1.5", "3.3"], routes=IN_MEMORY),
    "texts of float32": Kind({}, SINGLE, ["0.1", "1.5", "3.3"], routes=["csv", *WIDENED]),
    "small floats": Kind({}, [1e-5, 0.5, 2e-5], ["1e-5", "0.5", "2e-5"]),
    "small decimals": Kind({}, [Decimal("1E-7"), Decimal("2E-7")], ["1e-7", "2e-7"]),
    "-0 as Arrow writes it": Kind({}, ["-0", "0", "1.5"], ["0", "0", "1.5"]),
    "nan as a marker": Kind({"missing_values": ["nan"]} | NUMBER, [1.5, NAN], [1.5, 0]),
    "NaN as a marker": Kind({"missing_values": ["NaN"]} | NUMBER, [1.5, NAN], [1.5, 0]),
    "NaN of any spelling": Kind({"missing_values": ["nan"]} | NUMBER, NANS, [1.5, 0, 0, 2]),
    "decimal": Kind({"type": "decimal"} | NUMBER, [1.0, 2.0], [1, 2], TYPED, trained=[1, 2]),
    "marks of integers": Kind(INTEGER, ["1.500", "7"], ["1500", "7"], "'1[.]500'", MARKS),
    "marks of numbers": Kind(NUMBER, ["1.500", "7"], [1500, 7], "", MARKS, IN_CSV),
}
FITTING = {"float32": ["arrow", "parquet"], "texts of float32": ["arrow", "parquet"]}
FITTING |= {name: ["csv", "polars csv", "parquet"] for name in KINDS if "small" in name}
FITTING |= {"NaN as a marker": ["polars csv", "csv", "parquet"]}
CASES = [(name, route) for name in KINDS for route in FITTING.get(name, ["csv", "parquet"])]


@pytest.mark.parametrize(("name", "fitting"), CASES)
def test_a_kind_means_one_thing_on_every_route(name, fitting, tmp_path):
    kind = KINDS[name]
    is_number, field = "transform" in kind.field, {"column": "c"} | kind.field
    used = (
        {"numerical": [field], "categorical": ["d"]} if is_number else {"categorical": [field, "d"]}
    )
    rows = len(kind.values)
    table = {"c": kind.values, "d": ["x"] * rows, "y": [0, 1, 0, 1][:rows]}
    trained = table if kind.trained is None else table | {"c": kind.trained}
    transform = outcome(fitted, {"label": "y"} | used | kind.rest, trained, fitting, tmp_path)
    found = {"fitting": transform} if isinstance(transform, str) else {}
    (scored := tmp_path / "scored").mkdir()
    for route in () if found else kind.routes:
        paths = written(table, scored, [route])
        parts = outcome(inputs_of, transform, table, route, paths)
        read = numbers_of if is_number else ids_of
        found[route] = parts if isinstance(parts, str) else read(transform, parts, "c")
    for route, values in found.items():
        if isinstance(values, str):
            assert kind.refused, (route, values)
            assert re.search(rf"column '?c'?: .*{kind.refused}", values), (route, values)
        else:
            meant = kind.meant if is_number else renamed(kind.meant, {})
            assert (values if is_number else renamed(values, {})) == meant, route


FORMS = [
    "True",
    "12.0",
    "1.10",
    "007",
    "1e-7",
    "1.5E+3",
    "1e400",
    "-0.0",
    "2026-01-02T08:00",
    "nan",
]
FORMS += ["2026-01-02 00:00:00Z", "08:00:00.500", "1.2345678901234567890123450e+05", " a ", "é.0"]


@pytest.mark.parametrize("role", ["string", "list"])
def test_a_text_has_one_id_in_a_batch_of_any_size(role, tmp_path):
    field = {"column": "c"} | (LIST if role == "list" else {})
    table = {"c": [*FORMS, *(f"v{n}" for n in range(30))], "d": ["x"] * 45, "y": [0, 1, 0] * 15}
    transform = fitted({"label": "y", "categorical": [field, "d"]}, table, "csv", tmp_path)
    for route in ("dicts", "cells", RAW, "arrow"):
        together = ids_of(transform, inputs_of(transform, table, route, {}), "c")
        assert len({*map(str, together)}) == 45, route
        for text, known in zip(FORMS, together, strict=False):
            alone = inputs_of(transform, {"c": [text], "d": ["x"]}, route, {})
            assert ids_of(transform, alone, "c") == [known], (text, route)


BESIDE = {  # values in training; one that is known; a value beside it, and what it means
    "a number of codes": (["007", "008"], "007", 7, None),
    "a boolean": (["007", "008"], "007", True, None),
    "a number of words": (["no", "yes"], "no", 1, None),
    "a version": (["1.10", "1.1", "2"], "2", 1.1, None),
    "a number of another text": (["2.50", "2"], "2", 2.5, "2.50"),
    "a known number": (["a", "1"], "a", 1.0, "1"),
    "a known boolean": (["a", "True"], "a", True, "true"),
    "a uuid": ([str(UUID(int=1)), "b"], "b", UUID(int=1), str(UUID(int=1))),
    "a narrow number": (["0.5", "1"], 1, np.float16(0.5), "0.5"),
}
DECIDED = [(n, r) for n in BESIDE for r in ("dicts", "sequences", "columns")]
DECIDED += [("a known number", "json"), ("a known boolean", "json")]
DECIDED += [broken("C24: it is read as a text beside one", n, "json") for n in [*BESIDE][:5]]


@pytest.mark.parametrize(("name", "route"), DECIDED)
def test_each_cell_alone_decides(name, route, tmp_path):
    values, known, value, meant = BESIDE[name]
    table = {"c": values, "d": ["x"] * len(values), "y": [0, 1, 0][: len(values)]}
    transform = fitted({"label": "y", "categorical": ["c", "d"]}, table, "csv", tmp_path)
    for row, cells in enumerate([[value], [known, value]]):
        rows = {"c": cells, "d": ["x"] * len(cells)}
        paths = written(rows, tmp_path, [route])
        parts = outcome(inputs_of, transform, rows, route, paths)
        if meant is None:
            assert isinstance(parts, str), cells
            assert re.search("column '?c'?: .*(expected values such as|may be either)", parts)
        else:
            assert transform.value(0, ids_of(transform, parts, "c")[row]) == meant, cells
