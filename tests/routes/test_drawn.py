"""Drawn tables: every route gives a model the same inputs, whatever route fitted its transform.

The oracle is the table in Python: equal values have one id, a missing value has id 0, and numbers
are themselves. Values with different texts have one id only if they mean the same.
"""

import datetime as dt
import math
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from routes_testing import FILES, FRAMES, ROUTES, fitted, ids_of, inputs_of, numbers_of, written

PIECES = [*"abT0129.-+eE:", " ", ",", '"', "'", ";", "|", "\\", "é", "１", "True", "false", "nan"]
PIECES += ["NA", "1.0", "12", "007", "2026-01-02", "08:00:00", "T", "Z", "1e5", "null", "day "]
SAFE = st.lists(st.sampled_from(PIECES), max_size=4).map("".join)
SAFE = SAFE.filter(lambda text: text.strip() != "nan")  # no value beside numbers alone
FIRST, LAST = dt.datetime(1700, 1, 1), dt.datetime(2200, 1, 1)
TIMES = st.datetimes(FIRST, LAST)
DATES = st.dates(FIRST.date(), LAST.date())
SHORT = st.integers(-(10**6), 10**6)
KINDS = {
    "booleans": st.booleans(),
    "small": st.integers(-128, 127),
    "integers": SHORT,
    "wide": st.integers(-(2**53), 2**53),
    "whole": SHORT.map(float),
    "fractions": SHORT.map(lambda number: number / 64),
    "decimals": st.decimals(-(10**6), 10**6, places=4),
    "dates": DATES,
    "seconds": TIMES.map(lambda time: time.replace(microsecond=0)),
    "times": TIMES,
    "midnights": DATES.map(lambda day: dt.datetime(day.year, day.month, day.day)),
    "in utc": TIMES.map(lambda time: time.replace(tzinfo=dt.timezone.utc)),
    "times of day": st.times(),
    "texts": SAFE,
    "words": st.sampled_from(["True", "False", "true", "TRUE", "yes", "", " no "]),
}
EXACT = {  # of 64 bits, which pandas makes floats beside missing values
    "int64": st.integers(-(2**63), 2**63 - 1),
    "floats": st.floats(allow_nan=False, allow_infinity=False).filter(
        lambda number: not 2**53 <= abs(number) < 2**64  # refused, as they may be other integers
    ),
}
NUMERIC = ("booleans", "small", "integers", "whole", "fractions", "decimals")
SHORTENED = {"floats", "decimals"}  # kinds whose values the JSON of pandas rounds
OF_PANDAS = {"pandas", "pandas csv", "pandas parquet", "nullable", "nullable csv", "records"}
OF_PANDAS |= {"pandas json", "arrays"}


@st.composite
def tables(draw):
    """Draws columns of six values at most, their kinds by name, and the route that fits."""
    rows = draw(st.integers(2, 6))
    chosen = draw(st.lists(st.sampled_from([*KINDS, *EXACT]), min_size=1, max_size=5))
    table, kinds = {}, {}
    for place, kind in enumerate(chosen):
        value = (KINDS | EXACT)[kind]
        pool = draw(st.lists(value, min_size=1, max_size=3))
        values = st.sampled_from(pool)
        values |= st.none() if draw(st.booleans()) else values
        table[name := f"{kind} {place}"] = draw(st.lists(values, min_size=rows, max_size=rows))
        kinds[name] = kind
    return table, kinds, draw(st.sampled_from([*FILES, *FRAMES]))


def routes_of(table, kinds):
    """Returns the routes that keep all values of a table."""
    without = set()
    if SHORTENED & set(kinds.values()):
        without.add("pandas json")
    for name, kind in kinds.items():
        if kind in ("int64", "wide") and None in table[name]:
            without |= OF_PANDAS
    return [route for route in ROUTES if route not in without]


def compare(table, kinds, route, folder):
    """Compares the inputs of all routes, and returns those of the fitting one by route."""
    routes = routes_of(table, kinds)
    route = route if route in routes else "parquet"
    rows = len(next(iter(table.values())))
    table = {**table, "last": ["x"] * rows}  # so that no line of CSV is blank
    labels = {"y": [place % 2 for place in range(rows)]}
    numbers = {f"number {n}": v for n, v in table.items() if kinds.get(n) in NUMERIC}
    schema = {
        "label": "y",
        "categorical": list(table),
        "numerical": [{"column": name, "transform": "log"} for name in numbers],
    }
    whole = table | numbers
    transform = fitted(schema, whole | labels, route, folder)
    paths = written(whole, folder, routes)
    parts = {other: inputs_of(transform, whole, other, paths) for other in routes}
    for name, values in table.items():
        ids = ids_of(transform, parts[route], name)
        check(ids, values, kinds.get(name))
        for other in routes:
            assert ids_of(transform, parts[other], name) == ids, (name, values, route, other)
    for name, values in numbers.items():
        logs = [math.log(max(float(value or 0) + 2, 1)) for value in values]
        for other in routes:
            found = numbers_of(transform, parts[other], name)
            np.testing.assert_allclose(found, logs, rtol=1e-3, atol=1e-6, err_msg=f"{name} {other}")
    return parts


def check(ids, values, kind):
    """Checks that equal values, and no others, have one id."""
    texts = [value.strip() if isinstance(value, str) else value for value in values]
    assert [id == 0 for id in ids] == [text in (None, "") for text in texts], values
    for id, text in zip(ids, texts, strict=True):
        for other_id, other in zip(ids, texts, strict=True):
            if text == other:
                assert id == other_id, (text, other)
            elif id == other_id:
                assert kind in ("texts", "words"), (text, other)
                assert same(text, other), (text, other)


def same(text, other):
    """Returns whether two texts may mean one value."""
    if text in (None, "") and other in (None, ""):
        return True
    for read in (float, str.lower, dt.datetime.fromisoformat, dt.time.fromisoformat):
        try:
            if read(text) == read(other):
                return True
        except (ValueError, TypeError):
            continue
    return False


@settings(max_examples=25)
@given(tables())
def test_drawn_tables_are_the_same_on_every_route(drawn):
    with TemporaryDirectory() as folder:
        compare(*drawn, Path(folder))


@pytest.mark.slow
@settings(max_examples=2000)
@given(tables())
def test_many_drawn_tables_are_the_same_on_every_route(drawn):
    with TemporaryDirectory() as folder:
        compare(*drawn, Path(folder))
