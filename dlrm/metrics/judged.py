"""Models judged on the same rows: every metric with an interval, and how the models differ."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlrm.metrics.grouped import Groups, all_groups
from dlrm.metrics.intervals import (
    LEVEL,
    Difference,
    Interval,
    bootstrap,
    bootstrap_difference,
    check_same_rows,
    delong_difference,
    delong_interval,
    percentiles,
)
from dlrm.metrics.ranked import RankedRows
from dlrm.metrics.slices import Slices
from dlrm.metrics.table import METRICS


@dataclass(frozen=True)
class ScoredRows:
    """Rows that one model or several have scored.

    Attributes:
        logits: `[rows]`, of each model.
        labels: `[rows]`, 0 or 1.
        weights: `[rows]`; None counts every row once.
        groups: `[rows]`, integers, such as users; None is none.
    """

    logits: tuple[np.ndarray, ...]
    labels: np.ndarray
    weights: np.ndarray | None = None
    groups: np.ndarray | None = None

    def of(self, chosen: np.ndarray) -> "ScoredRows":
        """Returns some of the rows."""
        weights, groups = (None if a is None else a[chosen] for a in (self.weights, self.groups))
        logits = tuple(array[chosen] for array in self.logits)
        return ScoredRows(logits, self.labels[chosen], weights, groups)


@dataclass(frozen=True)
class Judgment:
    """Metrics of models on the same rows.

    Attributes:
        rows, clicks: their numbers, without weights.
        models: of each model, metric -> interval.
        differences: metric -> how the first model differs from the second; empty with one model.
        method: how the intervals were made.
        ranked: of each model, the rows by score.
    """

    rows: int
    clicks: int
    models: list[dict[str, Interval]]
    differences: dict[str, Difference]
    method: str
    ranked: list[RankedRows]

    def to_json(self) -> dict[str, Any]:
        """Returns rows, clicks, and of each model the metrics, of JSON values."""
        found = {
            "rows": self.rows,
            "clicks": self.clicks,
            "models": [
                {name: _json(one._asdict()) for name, one in model.items()} for model in self.models
            ],
        }
        if self.differences:
            differences = self.differences.items()
            found["differences"] = {name: _json(one._asdict()) for name, one in differences}
        return found


def judge(rows: ScoredRows, replicates: int, seed: int = 0) -> Judgment:
    """Measures models on the same rows.

    Intervals of the AUC are DeLong's where rows are independent and count once. All others are
    percentiles of a bootstrap, which draws groups where they are given, and rows where not.

    Args:
        rows: of one model, or of two that are compared.
        replicates: of the bootstrap; 0 is none.
    """
    ranked = [RankedRows(logits, rows.labels, rows.weights) for logits in rows.logits]
    check_same_rows(ranked)
    clusters = None
    groups: list[Groups | None] = [None] * len(ranked)
    if rows.groups is not None:
        _, clusters = np.unique(rows.groups, return_inverse=True)
        groups = [all_groups(x, rows.labels, clusters, rows.weights) for x in rows.logits]
    measures = [_measure(*one) for one in zip(ranked, groups, strict=True)]
    numbers = None if clusters is None else int(clusters.max(initial=-1)) + 1
    values = [measure(None, None if numbers is None else np.ones(numbers)) for measure in measures]
    drawn = bootstrap(measures, clusters, len(rows.labels), replicates, seed)
    by_delong = rows.groups is None and rows.weights is None
    models = [
        {n: percentiles(value, found.get(n), METRICS[n].greatest) for n, value in model.items()}
        for model, found in zip(values, drawn, strict=True)
    ]
    if by_delong:
        for model, own in zip(models, ranked, strict=True):
            model["auc"] = delong_interval(own)
    return Judgment(
        len(rows.labels),
        int(rows.labels.sum()),
        models,
        _differences(ranked, values, drawn, by_delong) if len(ranked) > 1 else {},
        _method(replicates, rows.groups is not None, by_delong),
        ranked,
    )


def _measure(
    model: RankedRows, groups: Groups | None
) -> Callable[[np.ndarray | None, np.ndarray | None], dict[str, float]]:
    """Returns: how often each row and each group occurs -> metrics."""
    if groups is None:
        return lambda counts, _: model.metrics(counts)
    place = groups.group

    def measure(counts: np.ndarray | None, drawn: np.ndarray | None) -> dict[str, float]:
        assert drawn is not None
        return {**model.metrics(counts), **groups.means(drawn[place])}

    return measure


def _differences(
    ranked: Sequence[RankedRows],
    values: Sequence[dict[str, float]],
    drawn: Sequence[dict[str, np.ndarray]],
    by_delong: bool,
) -> dict[str, Difference]:
    nothing = np.empty(0)
    found = {
        name: bootstrap_difference(
            value - values[1][name], drawn[0].get(name, nothing), drawn[1].get(name, nothing)
        )
        for name, value in values[0].items()
    }
    if by_delong:
        found["auc"] = delong_difference(*ranked[:2])
    return found


def _method(replicates: int, grouped: bool, by_delong: bool) -> str:
    drawn = f"a bootstrap of {replicates} over {'groups' if grouped else 'rows'}"
    parts = ["AUC by DeLong"] if by_delong else []
    parts += [f"{'all others' if parts else 'all'} by {drawn}"] if replicates else []
    return f"{100 * LEVEL:g} % intervals: {', '.join(parts) or 'none were asked for'}"


def judge_slices(
    rows: ScoredRows, slices: Slices, replicates: int, seed: int = 0
) -> list[dict[str, Any]]:
    """Returns the metrics of each slice, of JSON values; those of one without rows are None."""
    found = []
    for name, chosen in slices:
        part = rows.of(chosen)
        if part.weights is not None and not part.weights.any():
            part = part.of(np.zeros(len(part.labels), bool))  # of weights of zero nothing is left
        found.append({"name": name, **judge(part, replicates, seed).to_json()})
    return found


def _json(values: dict[str, float]) -> dict[str, float | None]:
    return {name: float(v) if math.isfinite(v) else None for name, v in values.items()}
