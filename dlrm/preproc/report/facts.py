"""The report on a dataset's source, as numbers (report.json) and as a page (.html).

Both depend only on the input and the options, so that the same input has the same report.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlrm.data import layout
from dlrm.data.schema.numbers import Fitted
from dlrm.data.schema.schema import NumericalField
from dlrm.data.transform.transform import Transform
from dlrm.preproc.report.page import page
from dlrm.preproc.report.statistics import (
    HASH_BUCKETS,
    Periods,
    Statistics,
    ends_of_bin,
    length_bins,
    number_of_bin,
)

JSON, HTML = "report.json", "report.html"
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_SHARE_FLOOR = 1e-4  # share assumed for a bin that is empty on one side of a comparison
_MOST_SLICES = 31  # compared with the training rows
_TINY = 1e-300
_STATISTICS = 2048  # histograms of numbers that a process holds at once: 64 MiB
Count = Callable[[Statistics], int]


def write(output: Path, facts: dict[str, Any]) -> None:
    """Writes the two files of a report."""
    (output / JSON).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    (output / HTML).write_text(page(facts), encoding="utf-8")


def most_slices(num_numerical: int) -> int:
    """Returns the maximum number of slices of rows, whose counts must fit in memory."""
    return min(_MOST_SLICES, max(_STATISTICS // max(num_numerical, 1), 1))


def slices_of_files(num_files: int, num_numerical: int) -> list[int]:
    """Returns the slice of each file: consecutive files share one if there are many."""
    together = -(-num_files // most_slices(num_numerical))
    return [number // together for number in range(num_files)]


def periods_of(counted: Sequence[dict[str, Any]], num_numerical: int) -> Periods | None:
    """Returns the periods to compare of parts, by `count_part`; None if rows have no time."""
    times = [time for result in counted for time in result["times"]]
    return Periods.from_times(min(times), max(times), most_slices(num_numerical)) if times else None


class Files(NamedTuple):
    """The files of rows, as the report names them.

    Attributes:
        names: names of the files.
        kind: what a file is: "file", or "day" for logs.
        note: a sentence about the division of the rows.
    """

    names: Sequence[str]
    kind: str = "file"
    note: str = ""


class Report:
    """Adds up the statistics of rows as they come, and describes them.

    Args:
        files: the files of the rows.
        parts: the parts of the files that are read.
        periods: periods to compare; None compares files.
        fitted: the transform of the rows.
        splits: names of the splits.
    """

    def __init__(
        self,
        files: Files,
        parts: Sequence[Any],
        periods: Periods | None,
        fitted: Transform,
        splits: Sequence[str],
    ) -> None:
        self._files, self._parts, self._fitted, self._names = files, parts, fitted, splits
        self._sliced_by, self._slice_of = _slices(files, periods, fitted.num_numerical)
        self._splits: dict[str, Statistics] = {}
        self._slices: dict[str, Statistics] = {}

    def add(self, number: int, by_name: dict[str, Statistics]) -> None:
        """Adds the statistics of a part, by names of splits, and of periods if there are any."""
        for name, one in by_name.items():
            kinds = [(self._slices, name)]
            if name in self._names:
                kinds = [(self._splits, name)]
                if self._slice_of:
                    kinds.append((self._slices, self._slice_of[self._parts[number].file]))
            for kind, key in kinds:
                kind[key] = kind[key] + one if key in kind else one

    def facts(
        self,
        totals: dict[str, dict[str, int]],
        counted: Sequence[dict[str, Any]],
        distinct: Sequence[int],
    ) -> dict[str, Any]:
        """Returns the report after all rows are transformed.

        Args:
            totals: counts of each split.
            counted: facts of the parts, by the first reading.
            distinct: number of values of each dictionary's fields.
        """
        fitted, label = self._fitted, self._fitted.schema.label
        shape = fitted.num_numerical, fitted.num_categorical, len(fitted.lists)
        self._train = self._splits.get(layout.SPLITS[0]) or Statistics.empty(*shape)
        self._splits = {name: self._splits[name] for name in layout.SPLITS if name in self._splits}
        if not self._slice_of:
            self._slices = dict(sorted(self._slices.items()))  # periods
        quarantined = Counter(
            part.file_of(row)
            for part, facts in zip(self._parts, counted, strict=True)
            for row, *_ in facts["rejected"]
        )
        return {
            "label": {"column": label.column, "positive": label.positive},
            "division": self._files.note,
            "splits": {
                name: _rows(total.get("rows", 0), total.get("clicks", 0))
                | {"values_raised_to_1": total.get("clamped", 0)}
                for name, total in totals.items()
            },
            "negatives": {
                "kept": fitted.keep_negatives,
                "rows_left_out": sum(facts["dropped"] for facts in counted),
            },
            "sliced_by": self._sliced_by,
            "slices": [
                {"slice": name, **_rows(*part.totals[:2].tolist())}
                for name, part in self._slices.items()
            ],
            "numerical": [self._numerical(i) for i in range(fitted.num_numerical)],
            "categorical": [
                self._categorical(i, distinct[index])
                for i, index in enumerate(fitted.dictionary_of)
            ],
            "rows_quarantined": [
                {"file": self._files.names[file], "rows": quarantined[file]}
                for file in sorted(quarantined)
            ],
        }

    def _numerical(self, i: int) -> dict[str, Any]:
        schema, fitted = self._fitted.schema, self._fitted.numerical[i]
        field, numbers = schema.numerical[i], self._train.numbers[i]
        cumulated = np.cumsum(numbers)
        edges = np.searchsorted(cumulated, cumulated[-1] * np.arange(1, 10) / 10) + 1
        begins = np.r_[0, np.unique(edges)]  # of tenths of the training rows

        def tenths(part: Statistics) -> np.ndarray:
            return np.r_[part.missing[i], np.add.reduceat(np.append(part.numbers[i], 0), begins)]

        return {
            "name": schema.numerical_names[i],
            "transform": field.transform,
            "bins": max(len(fitted.edges) - 1, 0),
            "missing": self._shares(lambda part: part.missing[i]),
            "quantiles": _quantiles(numbers, lambda bins: _raw(field, fitted, bins)),
            "drift": self._drift(tenths),
        }

    def _categorical(self, i: int, distinct: int) -> dict[str, Any]:
        field, column = self._fitted.fields[i], self._fitted.num_numerical + i
        is_id = field.type == "id"
        without_id = self._shares(lambda part: part.ids[i, 0], lambda part: part.ids[i].sum())
        in_buckets = lambda part: part.ids[i, HASH_BUCKETS]  # noqa: E731
        facts = {
            "name": field.column,
            "type": field.type,
            "dictionary": field.dictionary,
            **({} if field.table is None else {"table": field.table}),
            "missing": self._shares(lambda part: part.missing[column]),
            "distinct_values": None if is_id else distinct,
            "frequency_limit": None if is_id else field.frequency_limit,
            "max_ids": field.max_ids,
            "hash_buckets": field.hash_buckets,
            "cardinality": self._fitted.cardinalities[i],
            "values_without_id": dict.fromkeys(without_id) if is_id else without_id,
            "values_in_buckets": self._shares(in_buckets, lambda part: part.ids[i].sum()),
            "drift": self._drift(lambda part: np.r_[part.missing[column], part.ids[i]]),
        }
        if i in self._fitted.lists:
            of_list = self._lists([*self._fitted.lists].index(i))
            facts["list"] = {"max_length": field.max_length} | of_list
        return facts

    def _lists(self, i: int) -> dict[str, Any]:
        train, empty = self._train, int(length_bins(np.zeros(1, int))[0])
        return {
            "mean_length": _share(train.lists[i, 0], train.totals[0]),
            "length_quantiles": _quantiles(
                train.lengths[i], lambda bins: np.rint(number_of_bin(bins)).astype(int).tolist()
            ),
            "empty": self._shares(lambda part: part.lengths[i, empty]),
            "cut": self._shares(lambda part: part.lists[i, 1]),
        }

    def _shares(
        self, some: Count, of: Count = lambda part: part.totals[0]
    ) -> dict[str, float | None]:
        return {name: _share(some(part), of(part)) for name, part in self._splits.items()}

    def _drift(self, histogram: Callable[[Statistics], np.ndarray]) -> dict[str, Any]:
        """Returns the population stability index of other rows against the training rows.

        It is the sum of (p - q) ln(p / q) over bins, with p and q their shares of both.
        """

        def shares(part: Statistics) -> np.ndarray:
            counts = histogram(part)
            return np.maximum(counts / max(counts.sum(), 1), _SHARE_FLOOR)

        def index(part: Statistics) -> float:
            p, q = shares(part), of_train
            return round(float(((p - q) * np.log(p / q)).sum()), 4)

        of_train = shares(self._train)
        others = {n: index(part) for n, part in self._splits.items() if n != layout.SPLITS[0]}
        return {"splits": others, "slices": [index(part) for part in self._slices.values()]}


def _share(part: int, whole: int) -> float | None:
    return round(float(part) / float(whole), 6) if whole else None


def _rows(rows: int, positives: int) -> dict[str, Any]:
    return {"rows": rows, "positives": positives, "positive_rate": _share(positives, rows)}


def _slices(
    files: Files, periods: Periods | None, num_numerical: int
) -> tuple[str | None, list[str]]:
    """Returns the kind of slices, and each file's slice; none if times determine the slice."""
    names, times = files.names, Counter(files.names)
    if periods is not None:
        return "day" if periods.days == 1 else f"{periods.days} days", []
    if len(names) == 1:
        return None, []
    slices = slices_of_files(len(names), num_numerical)
    together, titles = slices.count(0), []  # consecutive files
    for begin in (number * together for number in slices):
        last = min(begin + together, len(names)) - 1
        first = f"{begin}: {names[begin]}" if times[names[begin]] > 1 else names[begin]
        titles.append(first if last == begin else f"{first} to {names[last]}")
    return files.kind if together == 1 else f"{together} {files.kind}s", titles


def _quantiles(
    histogram: np.ndarray, values_of: Callable[[np.ndarray], list[float]]
) -> dict[str, float | None]:
    if not (total := histogram.sum()):
        return dict.fromkeys(map(str, QUANTILES))
    bins = np.searchsorted(np.cumsum(histogram), np.array(QUANTILES) * total)
    bins = np.minimum(bins, len(histogram) - 1)
    return dict(zip(map(str, QUANTILES), values_of(bins), strict=True))


def _raw(field: NumericalField, fitted: Fitted, bins: np.ndarray) -> list[float]:
    """Returns values of a column before its transform, for the bins of the numbers after it.

    Numbers in a bin cannot be distinguished, so the shortest one stands for all. Bins that are
    narrower than the tolerance of the transform, next to 0, are widened.
    """
    least, greatest = ends_of_bin(bins)
    middle, tolerance = (least + greatest) / 2, field.rule.tolerance
    ends = np.minimum(least, middle - tolerance), np.maximum(greatest, middle + tolerance)
    pairs = (field.rule.invert(end, fitted).tolist() for end in ends)
    return [_shortest(*pair) for pair in zip(*pairs, strict=True)]


def _shortest(least: float, greatest: float) -> float:
    """Returns the number with the fewest decimal digits between two; of several, the middle one."""
    if least <= 0 <= greatest:
        return 0
    if not greatest - least > _TINY:
        return least
    power = math.ceil(math.log10(max(abs(least), abs(greatest))))
    while (first := math.ceil(least / 10.0**power)) > (last := math.floor(greatest / 10.0**power)):
        power -= 1
    middle = min(max(round((least + greatest) / 2 / 10.0**power), first), last)
    return middle * 10**power if power >= 0 else middle / 10**-power
