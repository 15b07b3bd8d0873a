"""A transform that was extended over days gives the same ids on every route."""

import pytest
from routes_testing import ROUTES, ids_of, inputs_of, written
from tables_testing import prepare, write_table

from dlrm.data.transform.transform import Transform
from dlrm.preproc.stages.options import IncrementConfig

SCHEMA = {
    "label": "y",
    "numerical": ["n"],
    "categorical": [
        {"column": "word", "dictionary": "words"},
        {"column": "words", "dictionary": "words", "max_length": 3, "separator": ";"},
        {"column": "number", "type": "integer"},
        {"column": "price", "frequency_limit": 2},
    ],
}
ROWS = 12


def table_of(day):
    """Returns a table whose values overlap with those of the day before."""
    return {
        "y": [row % 2 for row in range(ROWS)],
        "n": [float(row) for row in range(ROWS)],
        "word": [f"w{row // 2 + 3 * day}" for row in range(ROWS)],
        "words": [f"w{row // 2 + 3 * day};x{day}" for row in range(ROWS)],
        "number": [row // 3 + 2 * day for row in range(ROWS)],
        "price": [1.5 + row // 3 + 2 * day for row in range(ROWS)],
    }


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    """Returns the transform after three days, and the values of each dictionary in order."""
    folder, before = tmp_path_factory.mktemp("days"), None
    for day in (1, 2, 3):
        file = write_table(table_of(day), folder / f"{day}.parquet")
        prepare(SCHEMA, [file], folder / str(day), increment=IncrementConfig(before))
        before = folder / str(day)
    return Transform.load(folder / "3" / "transform")


def test_new_values_follow_those_of_days_before(days):
    prices = [*(f"{price}.5" for price in range(3, 7)), "7.5", "8.5", "10.5", "9.5"]
    assert days.dictionaries[2].values() == prices


@pytest.mark.parametrize("route", ROUTES)
def test_a_route_gives_the_ids_of_all_days(route, days, tmp_path):
    words, numbers, prices = (dictionary.values() for dictionary in days.dictionaries)
    for day in (1, 3):
        table = {name: values for name, values in table_of(day).items() if name != "y"}
        folder = tmp_path / str(day)
        folder.mkdir()
        given, paths = table, written(table, folder, (route,))
        if route in ("columns", "arrays"):  # in which texts of a list field are one list
            given = table | {"words": [text.split(";") for text in table["words"]]}
        parts = inputs_of(days, given, route, paths)
        expected = {
            "word": [words.index(value) + 1 for value in table["word"]],
            "words": [[words.index(v) + 1 for v in t.split(";")] for t in table["words"]],
            "number": [numbers.index(value) + 1 for value in table["number"]],
            "price": [prices.index(str(value)) + 1 for value in table["price"]],
        }
        assert {name: ids_of(days, parts, name) for name in expected} == expected
