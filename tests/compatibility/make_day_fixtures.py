"""Writes days whose dictionaries were extended, for later versions to read and extend.

    python tests/compatibility/make_day_fixtures.py OUTPUT

OUTPUT and OUTPUT.tar.xz are as `make_fixtures` says. `1` and `2` are datasets of the first two days
of `table_of`; the values of all dictionaries are expected of them, and of the third day.
"""

import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
from make_fixtures import build

import dlrm
from dlrm.data.transform.transform import Transform
from dlrm.preproc.increments import segments

ROWS, DAYS = 60, (1, 2, 3)
SCHEMA: dict[str, Any] = {
    "label": "clicked",
    "numerical": [{"column": "age", "transform": "standardise"}],
    "categorical": [
        {"column": "item", "frequency_limit": 2, "dictionary": "items"},
        {"column": "seen", "frequency_limit": 2, "dictionary": "items", "max_length": 3},
        {"column": "user", "type": "integer", "frequency_limit": 4, "encodings": ["count"]},
        {"column": "place", "hash_buckets": 4},
    ],
}


def table_of(day: int) -> pa.Table:
    """Returns the rows of a day."""
    rows = range(ROWS)
    items = [f"i{row * row % 23 + 5 * day}" for row in rows]
    return pa.table(
        {
            "clicked": [row % 3 == 2 for row in rows],
            "age": [float(row + day) for row in rows],
            "item": items,
            "seen": [[item, f"i{row * 7 % 19 + 5 * day}"] for row, item in enumerate(items)],
            "user": [row * row % 17 + 4 * day for row in rows],
            "place": [f"p{row % 9 + day}" for row in rows],
        }
    )


def extend(folder: Path, day: int, output: Path) -> list[list[Any]]:
    """Prepares a day in a folder of datasets; returns the values of its dictionaries."""
    chained: dict[str, Any] = {"day": "1"} if day == 1 else {"extend": folder / str(day - 1)}
    options = {"test_fraction": 0.0, "output_ordering": "input", "cores": 1}
    dlrm.Dataset.from_arrow(table_of(day), SCHEMA, output, **options, **chained)
    fitted = Transform.load(output / "transform")
    return [dictionary.values() for dictionary in fitted.dictionaries]


def make() -> dict[str, Any]:
    """Writes all files in the current folder; returns what is expected of them."""
    segments._LEAST_SEGMENT = 1  # so that there are some
    folder = Path.cwd()
    values = {str(day): extend(folder, day, folder / str(day)) for day in DAYS[:2]}
    values["3"] = extend(folder, 3, folder / "work" / "3")
    return {"values": values}


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve(), make)
