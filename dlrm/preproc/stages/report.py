"""The report on a dataset's source, as numbers (report.json) and as a page (.html).

Both depend only on the input and the options, so that the same input has the same report.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data.clicks import layout
from dlrm.preproc.stages.column_statistics import Statistics, length_bins, number_of_bin
from dlrm.preproc.stages.report_page import page

JSON, HTML = "report.json", "report.html"
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_SHARE_FLOOR = 1e-4  # share assumed for a bin that is empty on one side of a comparison
_TRAIN = layout.SPLITS[0]
Histogram = Callable[[Statistics], np.ndarray]


def write(output: Path, facts: dict[str, Any]) -> None:
    """Writes the two files of a report."""
    (output / JSON).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    (output / HTML).write_text(page(facts), encoding="utf-8")


@dataclass
class Counted:
    """Counts of the rows of a dataset.

    Attributes:
        num_numerical, num_categorical, num_lists: fields of a row; list fields are categorical.
        splits: counts of each split, by its name.
        slices: counts of each part of the rows that is compared with the training rows, such as a
            day.
    """

    num_numerical: int
    num_categorical: int
    num_lists: int = 0
    splits: dict[str, Statistics] = field(default_factory=dict)
    slices: dict[Any, Statistics] = field(default_factory=dict)

    def add(self, kind: dict[Any, Statistics], name: Any, part: Statistics) -> None:
        """Adds counts to those of a split or a slice."""
        kind[name] = kind[name] + part if name in kind else part

    def split(self, name: str) -> Statistics:
        """Returns the counts of a split, which may have no rows."""
        shape = self.num_numerical, self.num_categorical, self.num_lists
        return self.splits.get(name) or Statistics.empty(*shape)

    @property
    def train(self) -> Statistics:
        """Returns the counts of the training rows."""
        return self.split(_TRAIN)

    def missing(self, column: int, names: Sequence[str]) -> dict[str, float | None]:
        """Returns the share of rows without a value in a column, numerical ones first."""
        parts = {name: self.split(name) for name in names}
        return {name: share(part.missing[column], part.totals[0]) for name, part in parts.items()}

    def without_id(self, table: int, names: Sequence[str]) -> dict[str, float | None]:
        """Returns the share of values with id 0 among those that are not missing."""
        ids = {name: self.split(name).ids[table] for name in names}
        return {name: share(found[0], found.sum()) for name, found in ids.items()}

    def drift(self, part: Statistics, histogram: Histogram) -> float:
        """Returns the population stability index of some rows against the training rows."""
        found, usual = _shares(histogram(part)), _shares(histogram(self.train))
        return round(float(((found - usual) * np.log(found / usual)).sum()), 4)

    def tenths(self, i: int) -> Histogram:
        """Returns a function that counts rows by tenths of the training rows, and missing ones.

        Args:
            i: the numerical field.
        """
        cumulated = np.cumsum(self.train.numbers[i])
        edges = np.searchsorted(cumulated, cumulated[-1] * np.arange(1, 10) / 10) + 1
        begins = np.r_[0, np.unique(edges)]
        return lambda part: np.r_[
            part.missing[i], np.add.reduceat(np.append(part.numbers[i], 0), begins)
        ]

    def id_groups(self, table: int) -> Histogram:
        """Returns a function that counts rows by the digits of their ids, and missing ones."""
        column = self.num_numerical + table
        return lambda part: np.r_[part.missing[column], part.ids[table]]

    def quantile_bins(self, i: int) -> np.ndarray | None:
        """Returns the bins of a numerical field's `QUANTILES` in training rows."""
        return _quantile_bins(self.train.numbers[i])

    def lists(self, i: int, names: Sequence[str]) -> dict[str, Any]:
        """Describes the lists of a list field: lengths in training rows, and shares.

        Args:
            i: the number of the list field.
            names: names of the splits.
        """
        parts, train = {name: self.split(name) for name in names}, self.train
        lengths: dict[str, Any] = dict.fromkeys(map(str, QUANTILES))
        if (bins := _quantile_bins(train.lengths[i])) is not None:
            found = np.rint(number_of_bin(bins)).astype(int).tolist()
            lengths = dict(zip(lengths, found, strict=True))
        empty = int(length_bins(np.zeros(1, int))[0])
        return {
            "mean_length": share(train.lists[i, 0], train.totals[0]),
            "length_quantiles": lengths,
            "empty": {n: share(one.lengths[i, empty], one.totals[0]) for n, one in parts.items()},
            "cut": {n: share(one.lists[i, 1], one.totals[0]) for n, one in parts.items()},
        }


def _quantile_bins(histogram: np.ndarray) -> np.ndarray | None:
    if not histogram.sum():
        return None
    places = np.searchsorted(
        np.cumsum(histogram), np.array(QUANTILES) * histogram.sum(), side="left"
    )
    return np.minimum(places, len(histogram) - 1)


def share(part: Any, whole: Any) -> float | None:
    """Returns a share with six digits; None if the whole is 0."""
    return round(float(part) / float(whole), 6) if whole else None


def _shares(histogram: np.ndarray) -> np.ndarray:
    return np.maximum(histogram / max(histogram.sum(), 1), _SHARE_FLOOR)
