"""The report on a dataset's source, as numbers (report.json) and as a page (.html).

Both depend only on the input and the options, so that the same input has the same report.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.transform.numbers import Fitted
from dlrm.data.transform.schema import NumericalField
from dlrm.data.transform.transform import Transform
from dlrm.preproc.stages.column_statistics import (
    HASH_BUCKETS,
    QUANTILES,
    Counted,
    Histogram,
    Periods,
    Statistics,
    ends_of_bin,
    share,
)
from dlrm.preproc.stages.division import Divided
from dlrm.preproc.stages.report_page import page
from dlrm.preproc.stages.stage import PreparationRun

JSON, HTML = "report.json", "report.html"
_MOST_SLICES = 31  # compared with the training rows
_TINY = 1e-300
_STATISTICS = 2048  # histograms of numbers that a process holds at once: 64 MiB


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


class Collected:
    """The statistics of rows as they come, by their split and their slice.

    Attributes:
        files, divided, fitted: the rows, and their transform.
        by_period, sliced_by: whether periods are slices, and the kind of slices.
        counts: the statistics of all parts.
    """

    def __init__(
        self,
        files: Files,
        divided: Divided,
        periods: Periods | None,
        fitted: Transform,
        splits: Sequence[str],
    ) -> None:
        self.files, self.divided, self.fitted, self._splits = files, divided, fitted, splits
        self.by_period = periods is not None
        self.sliced_by, self._slice_of = _slices(files, periods, fitted.num_numerical)
        self.counts = Counted(fitted.num_numerical, fitted.num_categorical, len(fitted.lists))

    def add(self, number: int, by_name: dict[str, Statistics]) -> None:
        """Adds the statistics of a part, by names of splits, and of periods if there are any."""
        counts = self.counts
        for name, statistics in by_name.items():
            if name not in self._splits:
                counts.add(counts.slices, name, statistics)
                continue
            counts.add(counts.splits, name, statistics)
            if of_file := self._slice_of[self.divided.parts[number].file]:
                counts.add(counts.slices, of_file, statistics)


def facts(
    run: PreparationRun, collected: Collected, totals: dict[str, dict[str, int]]
) -> dict[str, Any]:
    """Returns the report after all rows are transformed."""
    divided, fitted, counts = collected.divided, collected.fitted, collected.counts
    schema, names = fitted.schema, collected.files.names
    if collected.by_period:
        counts.slices = {name: counts.slices[name] for name in sorted(counts.slices)}
    quarantined = Counter(
        part.file_of(row)
        for part, part_facts in zip(divided.parts, divided.counted.facts, strict=True)
        for row, *_ in part_facts["rejected"]
    )
    return {
        "label": {"column": schema.label.column, "positive": schema.label.positive},
        "division": collected.files.note,
        "splits": {
            name: {
                **_row_facts(total.get("rows", 0), total.get("clicks", 0)),
                "values_raised_to_1": total.get("clamped", 0),
            }
            for name, total in totals.items()
            if name in layout.SPLITS
        },
        "negatives": {
            "kept": run.options.division.keep_negatives,
            "rows_left_out": sum(part_facts["dropped"] for part_facts in divided.counted.facts),
        },
        "sliced_by": collected.sliced_by,
        "slices": [
            {"slice": name, **_row_facts(*part.totals[:2].tolist())}
            for name, part in counts.slices.items()
        ],
        "numerical": _numerical(counts, fitted),
        "categorical": _categorical(counts, fitted, divided.counted.distinct),
        "rows_quarantined": [
            {"file": names[file], "rows": quarantined[file]} for file in sorted(quarantined)
        ],
    }


def _row_facts(rows: int, positives: int) -> dict[str, Any]:
    return {"rows": rows, "positives": positives, "positive_rate": share(positives, rows)}


def _slices(
    files: Files, periods: Periods | None, num_numerical: int
) -> tuple[str | None, list[str]]:
    """Returns the kind of slices, and each file's slice; "" if times determine the slice."""
    names = files.names
    if periods is not None:
        return "day" if periods.days == 1 else f"{periods.days} days", [""] * len(names)
    if len(names) == 1:
        return None, [""]
    together = -(-len(names) // most_slices(num_numerical))  # consecutive files
    slices, times = [], Counter(names)
    for begin in (place * together for place in slices_of_files(len(names), num_numerical)):
        last = min(begin + together, len(names)) - 1
        first = f"{begin}: {names[begin]}" if times[names[begin]] > 1 else names[begin]
        slices.append(first if last == begin else f"{first} to {names[last]}")
    return files.kind if together == 1 else f"{together} {files.kind}s", slices


def _drift(counts: Counted, histogram: Histogram) -> dict[str, Any]:
    others = [name for name in layout.SPLITS[1:] if name in counts.splits]
    return {
        "splits": {name: counts.drift(counts.split(name), histogram) for name in others},
        "slices": [counts.drift(part, histogram) for part in counts.slices.values()],
    }


def _numerical(counts: Counted, fitted: Transform) -> list[dict[str, Any]]:
    features = []
    splits = [name for name in layout.SPLITS if name in counts.splits]
    rules, names = fitted.schema.numerical, fitted.schema.numerical_names
    for i, (field, statistics) in enumerate(zip(rules, fitted.numerical, strict=True)):
        quantiles: dict[str, float | None] = dict.fromkeys(map(str, QUANTILES))
        if (bins := counts.quantile_bins(i)) is not None:
            quantiles = dict(zip(quantiles, _raw(field, statistics, bins), strict=True))
        features.append(
            {
                "name": names[i],
                "transform": field.transform,
                "bins": max(len(statistics.edges) - 1, 0),
                "missing": counts.missing(i, splits),
                "quantiles": quantiles,
                "drift": _drift(counts, counts.tenths(i)),
            }
        )
    return features


def _raw(field: NumericalField, fitted: Fitted, bins: np.ndarray) -> list[float]:
    """Returns values of a column before its transform, for the bins of the numbers after it.

    Numbers in a bin cannot be distinguished, so the shortest one stands for all. Bins that are
    narrower than the tolerance of the transform, next to 0, are widened.
    """
    least, greatest = ends_of_bin(bins)
    middle, tolerance = (least + greatest) / 2, field.rule.tolerance
    ends = np.minimum(least, middle - tolerance), np.maximum(greatest, middle + tolerance)
    pairs = (field.rule.invert(end, fitted).tolist() for end in ends)
    return [shortest(*pair) for pair in zip(*pairs, strict=True)]


def shortest(least: float, greatest: float) -> float:
    """Returns the number with the fewest decimal digits between two; of several, the middle one."""
    if least <= 0 <= greatest:
        return 0
    if not greatest - least > _TINY:
        return least
    place = math.ceil(math.log10(max(abs(least), abs(greatest))))
    while True:
        unit = 10.0**place
        first, last = math.ceil(least / unit), math.floor(greatest / unit)
        if first <= last:
            middle = min(max(round((least + greatest) / 2 / unit), first), last)
            return middle * 10**place if place >= 0 else middle / 10**-place
        place -= 1


def _categorical(
    counts: Counted, fitted: Transform, distinct: Sequence[int]
) -> list[dict[str, Any]]:
    features = []
    splits = [name for name in layout.SPLITS if name in counts.splits]
    lists = list(fitted.lists)
    for i, field in enumerate(fitted.fields):
        place = fitted.dictionary_of[i]
        is_id = field.type == "id"
        in_buckets = {name: counts.split(name).ids[i] for name in splits}
        features.append(
            {
                "name": field.column,
                "type": field.type,
                "dictionary": field.dictionary,
                **({} if field.table is None else {"table": field.table}),
                "missing": counts.missing(fitted.num_numerical + i, splits),
                "distinct_values": None if is_id else distinct[place],
                "frequency_limit": None if is_id else field.frequency_limit,
                "max_ids": field.max_ids,
                "hash_buckets": field.hash_buckets,
                "cardinality": fitted.cardinalities[i],
                "values_without_id": (
                    dict.fromkeys(splits) if is_id else counts.without_id(i, splits)
                ),
                "values_in_buckets": {
                    name: share(ids[HASH_BUCKETS], ids.sum()) for name, ids in in_buckets.items()
                },
                "drift": _drift(counts, counts.id_groups(i)),
            }
        )
        if i in lists:
            of_lists = {"max_length": field.max_length}
            features[-1]["list"] = of_lists | counts.lists(lists.index(i), splits)
    return features
