"""Models judged on the same rows: every metric with an interval, and how the models differ."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlrm.metrics.auc import within_groups
from dlrm.metrics.intervals import (
    Difference,
    Interval,
    bootstrap,
    bootstrap_difference,
    delong_difference,
    delong_interval,
    percentiles,
)
from dlrm.metrics.ranked import LEVEL, RankedRows
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
        found = {"rows": self.rows, "clicks": self.clicks, "models": [*map(_json, self.models)]}
        return found | ({"differences": _json(self.differences)} if self.differences else {})


def _json(found: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    return {
        name: {key: float(v) if math.isfinite(v) else None for key, v in one._asdict().items()}
        for name, one in found.items()
    }


def judge(rows: ScoredRows, replicates: int, seed: int = 0) -> Judgment:
    """Measures models on the same rows.

    Intervals of the AUC are DeLong's where rows are independent and count once. All others are
    percentiles of a bootstrap, which draws groups where they are given, and rows where not.

    Args:
        rows: of one model, or of two that are compared.
        replicates: of the bootstrap; 0 is none.
    """
    ranked = [RankedRows(logits, rows.labels, rows.weights) for logits in rows.logits]
    clusters = None
    if rows.groups is not None:
        clusters = np.unique(rows.groups, return_inverse=True)[1]
    measures = [
        _measure(model, rows, logits, clusters)
        for model, logits in zip(ranked, rows.logits, strict=True)
    ]
    once = np.ones(0 if clusters is None else int(clusters.max(initial=-1)) + 1)
    values = [measure(None, once) for measure in measures]
    drawn = bootstrap(measures, clusters, len(rows.labels), replicates, seed)
    unknown = np.empty(0)
    models = [
        {n: percentiles(v, found.get(n, unknown), METRICS[n].greatest) for n, v in model.items()}
        for model, found in zip(values, drawn, strict=True)
    ]
    differences = {}
    if len(ranked) > 1:
        differences = {
            n: bootstrap_difference(v - values[1][n], *(one.get(n, unknown) for one in drawn[:2]))
            for n, v in values[0].items()
        }
    by_delong = rows.groups is None and rows.weights is None
    if by_delong:
        for model, own in zip(models, ranked, strict=True):
            model["auc"] = delong_interval(own, rows.labels)
        if differences:
            differences["auc"] = delong_difference(ranked[0], ranked[1], rows.labels)
    method = _method(replicates, rows.groups is not None, by_delong)
    clicks = int(rows.labels.sum())
    return Judgment(len(rows.labels), clicks, models, differences, method, ranked)


def _measure(
    model: RankedRows, rows: ScoredRows, logits: np.ndarray, clusters: np.ndarray | None
) -> Callable[[np.ndarray | None, np.ndarray], dict[str, float]]:
    """Returns: how often each row and each group occurs -> metrics."""
    if clusters is None:
        return lambda counts, _: model.metrics(counts)
    weights = np.ones(len(logits)) if rows.weights is None else rows.weights
    groups = within_groups(logits, rows.labels, clusters, weights)
    return lambda counts, drawn: {**model.metrics(counts), **groups.means(drawn)}


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
        if rows.weights is not None and not rows.weights[chosen].any():
            chosen = np.zeros_like(chosen)  # of weights of zero nothing is left
        found.append({"name": name, **judge(rows.of(chosen), replicates, seed).to_json()})
    return found
