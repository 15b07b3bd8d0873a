"""The report on a dataset: what was in its source, as numbers (report.json) and to look at (.html).

Both depend on the input and the options alone, so that the same input has the same report. What
follows is counted the same way for every source; `log_facts` is of raw logs, and
`dlrm.preproc.tables.report` of tables.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.transform.transform import Transform
from dlrm.preproc.logs.column_statistics import Statistics, number_of_bin
from dlrm.preproc.logs.counted_splits import QUARANTINE
from dlrm.preproc.logs.raw_log import Split
from dlrm.preproc.logs.report_page import page
from dlrm.preproc.logs.stage import Run

JSON, HTML = "report.json", "report.html"
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_SHARE_FLOOR = 1e-4  # of a bin that is empty on one side of a comparison
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
        num_numerical, num_categorical: fields of a row.
        splits: of each split, by its name.
        slices: of each part of the rows that is compared with the training rows, such as a day.
    """

    num_numerical: int
    num_categorical: int
    splits: dict[str, Statistics] = field(default_factory=dict)
    slices: dict[Any, Statistics] = field(default_factory=dict)

    def add(self, kind: dict[Any, Statistics], name: Any, part: Statistics) -> None:
        """Adds counts to those of a split or a slice."""
        kind[name] = kind[name] + part if name in kind else part

    def split(self, name: str) -> Statistics:
        """Returns the counts of a split, which may have no rows."""
        return self.splits.get(name) or Statistics.empty(self.num_numerical, self.num_categorical)

    @property
    def train(self) -> Statistics:
        """Counts of the training rows."""
        return self.split(_TRAIN)

    def missing(self, column: int, names: Sequence[str]) -> dict[str, float | None]:
        """Returns the share of rows without a value in a column, numerical ones first."""
        parts = {name: self.split(name) for name in names}
        return {name: share(part.missing[column], part.totals[0]) for name, part in parts.items()}

    def without_id(self, table: int, names: Sequence[str]) -> dict[str, float | None]:
        """Returns the share of values that have id 0, of those that are there."""
        ids = {name: self.split(name).ids[table] for name in names}
        return {name: share(found[0], found.sum()) for name, found in ids.items()}

    def drift(self, part: Statistics, histogram: Histogram) -> float:
        """Returns the population stability index of some rows against the training rows."""
        found, usual = _shares(histogram(part)), _shares(histogram(self.train))
        return round(float(((found - usual) * np.log(found / usual)).sum()), 4)

    def tenths(self, i: int) -> Histogram:
        """Returns what counts rows in the tenths of the training rows, and those without a value.

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
        """Returns what counts rows by the digits of their ids, and those without a value."""
        column = self.num_numerical + table
        return lambda part: np.r_[part.missing[column], part.ids[table]]

    def quantile_bins(self, i: int) -> np.ndarray | None:
        """Returns the bins in which the `QUANTILES` of a numerical field are, of training rows."""
        histogram = self.train.numbers[i]
        if not histogram.sum():
            return None
        places = np.searchsorted(
            np.cumsum(histogram), np.array(QUANTILES) * histogram.sum(), side="left"
        )
        return np.minimum(places, len(histogram) - 1)


def share(part: Any, whole: Any) -> float | None:
    """Returns a share with six digits; None of nothing."""
    return round(float(part) / float(whole), 6) if whole else None


def _shares(histogram: np.ndarray) -> np.ndarray:
    return np.maximum(histogram / max(histogram.sum(), 1), _SHARE_FLOOR)


def log_facts(
    run: Run, splits: Sequence[Split], fitted: Transform, totals: dict[str, dict[str, int]]
) -> dict[str, Any]:
    """Returns the report on raw logs, all rows of which are transformed."""
    folder = run.work.folder("transform.statistics")
    counted = Counted(fitted.num_numerical, fitted.num_categorical)
    for number, split in enumerate(splits):
        for name, part in Statistics.load(folder / str(number)).items():
            counted.add(counted.splits, name, part)
            counted.add(counted.slices, split.day, part)
    counted.slices = {day: counted.slices[day] for day in sorted(counted.slices)}
    return {
        "days": [
            {"day": day, **_row_facts(*part.totals[:2].tolist())}
            for day, part in counted.slices.items()
        ],
        "splits": {
            name: {
                **_row_facts(total.get("rows", 0), total.get("clicks", 0)),
                "values_raised_to_1": total.get("clamped", 0),
            }
            for name, total in totals.items()
        },
        "numerical": _numerical(counted, fitted),
        "categorical": _categorical(counted, fitted, run.work.result("merged")),
        "lines_rejected": _rejected(run),
    }


def _row_facts(rows: int, clicks: int) -> dict[str, Any]:
    return {"rows": rows, "clicks": clicks, "click_through_rate": share(clicks, rows)}


def _numerical(counted: Counted, fitted: Transform) -> list[dict[str, Any]]:
    shift, features = 2 if fitted.numeric_transform == "readme" else 3, []
    for i in range(fitted.num_numerical):
        quantiles: dict[str, float | None] = dict.fromkeys(map(str, QUANTILES))
        if (bins := counted.quantile_bins(i)) is not None:
            values = np.exp(number_of_bin(bins)) - shift
            quantiles = {
                str(q): float(f"{round(float(value)):.3g}")
                for q, value in zip(QUANTILES, values, strict=True)
            }
        features.append(
            {
                "name": layout.numerical_name(i),
                "missing": counted.missing(i, layout.SPLITS),
                "quantiles": quantiles,
                "drift": _drift_by_day(counted, counted.tenths(i)),
            }
        )
    return features


def _categorical(
    counted: Counted, fitted: Transform, merged: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    return [
        {
            "name": layout.categorical_name(i),
            "missing": counted.missing(fitted.num_numerical + i, layout.SPLITS),
            "distinct_values": sum(bucket["distinct"][i] for bucket in merged),
            "cardinality": fitted.cardinalities[i],
            "frequency_limit": fitted.frequency_limit.of(i),
            "values_without_id": counted.without_id(i, layout.SPLITS),
            "drift": _drift_by_day(counted, counted.id_groups(i)),
        }
        for i in range(fitted.num_categorical)
    ]


def _drift_by_day(counted: Counted, histogram: Histogram) -> list[float]:
    return [counted.drift(part, histogram) for part in counted.slices.values()]


def _rejected(run: Run) -> dict[str, int]:
    folder = run.work.output / QUARANTINE
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return {path.name: path.read_text(encoding="utf-8").count("\n") for path in files}
