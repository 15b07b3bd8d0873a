"""Parts of the rows to evaluate separately: each has a name and its rows."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np

Slices = list[tuple[str, np.ndarray]]  # name, bool [rows]
_MOST_VALUES = 10
_MOST_DAYS = 31
_MICROSECONDS = 86_400_000_000  # of a day
_UNKNOWN = {"0": 0, "1": 1, "2": 2, "3 to 5": 3, "6 to 9": 6, "10 or more": 10}  # least of each


def by_value(values: np.ndarray, name: Callable[[int], str]) -> Slices:
    """Returns the rows of each of the commonest values, and the rest.

    Args:
        values: `[rows]`, ids.
        name: id -> its name.
    """
    found, counts = np.unique(values, return_counts=True)
    common = found[np.argsort(-counts, kind="stable")][:_MOST_VALUES]
    slices = [(name(int(value)), values == value) for value in common]
    if len(found) > len(common):
        slices.append(("all others", ~np.isin(values, common)))
    return slices


def by_decile(values: np.ndarray) -> Slices:
    """Returns the rows in tenths of about equal size; equal numbers are in one.

    Args:
        values: `[rows]`, finite numbers.
    """
    if not len(values):
        return []
    edges = np.unique(np.quantile(values, np.arange(1, 10) / 10, method="lower"))
    places = np.searchsorted(edges, values, side="left")
    slices = []
    for place in np.unique(places):
        chosen = places == place
        ends = (f"{end:.4g}" for end in (values[chosen].min(), values[chosen].max()))
        slices.append((" to ".join(dict.fromkeys(ends)), chosen))
    return slices


def by_unknown(counts: np.ndarray) -> Slices:
    """Returns the rows by how many of their values have no id, without counts that none has.

    Args:
        counts: `[rows]`.
    """
    ends = pairwise([*_UNKNOWN.values(), np.inf])
    slices = [
        (name, (counts >= least) & (counts < end))
        for name, (least, end) in zip(_UNKNOWN, ends, strict=True)
    ]
    return [(name, chosen) for name, chosen in slices if chosen.any()]


def by_day(times: np.ndarray) -> Slices:
    """Returns the rows of each of the latest days in UTC, and those before.

    Args:
        times: `[rows]`, microseconds since 1970 in UTC.
    """
    days = times // _MICROSECONDS
    found = np.unique(days)
    latest = found[-_MOST_DAYS:]
    slices = [(str(np.datetime64(int(day), "D")), days == day) for day in latest]
    if len(found) > len(latest):
        slices.insert(0, (f"before {slices[0][0]}", days < latest[0]))
    return slices
