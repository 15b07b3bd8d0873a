"""Models judged on the same rows: every metric with an interval, and how the models differ.

Intervals are by DeLong's variance of the AUC, and by a bootstrap over rows or groups.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dlrm.metrics.ranked import LEVEL, QUANTILE, RankedRows
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


class Interval(NamedTuple):
    """A value with the bounds of its interval, which are NaN without one."""

    value: float
    low: float
    high: float


class Difference(NamedTuple):
    """The first model's value minus the second's on the same rows.

    `low` and `high` are the bounds of its interval, `p` the two-sided p-value of no difference.
    """

    value: float
    low: float
    high: float
    p: float


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
    measures = [_measure(model, clusters) for model in ranked]
    values, drawn = bootstrap(measures, clusters, len(rows.labels), replicates, seed)
    models = [
        {name: percentiles(v, of[name], METRICS[name].greatest) for name, v in model.items()}
        for model, of in zip(values, drawn, strict=True)
    ]
    differences = {}
    if len(ranked) > 1:
        differences = {
            name: bootstrap_difference(v - values[1][name], drawn[0][name], drawn[1][name])
            for name, v in values[0].items()
        }
    by_delong = rows.groups is None and rows.weights is None
    if by_delong:
        for model, own in zip(models, ranked, strict=True):
            model["auc"] = delong_interval(own, rows.labels)
        if differences:
            differences["auc"] = delong_difference(ranked[0], ranked[1], rows.labels)
    methods = ["AUC by DeLong"] * by_delong
    if replicates:
        over = f"a bootstrap of {replicates} over {'rows' if clusters is None else 'groups'}"
        methods.append(f"{'all others' if by_delong else 'all'} by {over}")
    method = f"{100 * LEVEL:g} % intervals: {', '.join(methods) or 'none were asked for'}"
    clicks = int(rows.labels.sum())
    return Judgment(len(rows.labels), clicks, models, differences, method, ranked)


def judge_slices(
    rows: ScoredRows, slices: Iterable[tuple[str, np.ndarray]], replicates: int, seed: int = 0
) -> list[dict[str, Any]]:
    """Returns the metrics of each slice, of JSON values; those of one without rows are None.

    Args:
        slices: name of each, and which rows are its own, bool `[rows]`.
    """
    found = []
    for name, chosen in slices:
        if rows.weights is not None and not rows.weights[chosen].any():
            chosen = np.zeros_like(chosen)  # of weights of zero nothing is left
        found.append({"name": name, **judge(rows.of(chosen), replicates, seed).to_json()})
    return found


Measure = Callable[[np.ndarray | None, np.ndarray], dict[str, float]]


def _measure(model: RankedRows, clusters: np.ndarray | None) -> Measure:
    if clusters is None:
        return lambda counts, _: model.metrics(counts)
    groups = model.within_groups(clusters)
    return lambda counts, drawn: {**model.metrics(counts), **groups.means(drawn)}


def bootstrap(
    measures: Sequence[Measure],
    clusters: np.ndarray | None,
    rows: int,
    replicates: int,
    seed: int = 0,
) -> tuple[list[dict[str, float]], list[dict[str, np.ndarray]]]:
    """Returns metrics of rows, and of replicates that draw rows or clusters with replacement.

    Args:
        measures: of each model (how often each row occurs `[rows]`, how often each cluster) ->
            metrics; rows of None occur once. All models have the same replicates.
        clusters: number of each row's cluster, from 0; None draws single rows, each a cluster.

    Returns:
        For each model, the metrics by name, and their values `[replicates]`, of which there are
        none without rows.
    """
    random = np.random.default_rng(seed)
    number = rows if clusters is None else int(clusters.max(initial=-1)) + 1
    values = [measure(None, np.ones(number)) for measure in measures]
    found: list[list[dict[str, float]]] = [[] for _ in measures]
    for _ in range(replicates if rows else 0):
        drawn = np.bincount(random.integers(0, number, number), minlength=number)
        counts = drawn if clusters is None else drawn[clusters]
        for own, measure in zip(found, measures, strict=True):
            own.append(measure(counts, drawn))
    return values, [
        {name: np.array([one[name] for one in own]) for name in model}
        for model, own in zip(values, found, strict=True)
    ]


def percentiles(value: float, replicates: np.ndarray, most: float = math.inf) -> Interval:
    """Returns a value with the bounds that contain the share `LEVEL` of the replicates.

    Replicates are moved so that their median is the value: those of a sum of magnitudes, such as
    the calibration error, are all too great, since noise adds to it. The bounds stay within what
    the metric can be: 0 or more if all replicates are, and at most `most`.
    """
    known = replicates[np.isfinite(replicates)]
    if math.isnan(value) or len(known) < 2:
        return Interval(value, math.nan, math.nan)
    tail = (1 - LEVEL) / 2
    low, middle, high = np.quantile(known, [tail, 0.5, 1 - tail])
    least = 0.0 if known.min() >= 0 else -math.inf
    moved = max(float(value + low - middle), least), min(float(value + high - middle), most)
    return Interval(value, *moved)


def bootstrap_difference(value: float, one: np.ndarray, other: np.ndarray) -> Difference:
    """Returns a difference with bounds from replicates, and p from their deviation."""
    known = (one - other)[np.isfinite(one - other)]
    interval = percentiles(value, known)
    if math.isnan(interval.low):
        return Difference(*interval, math.nan)
    return Difference(*interval, _normal(value, float(known.std(ddof=1))).p)


def delong(models: Sequence[RankedRows], labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the AUC of each model, and their covariance `[models, models]`.

    E. R. DeLong, D. M. DeLong and D. L. Clarke-Pearson, "Comparing the areas under two or more
    correlated receiver operating characteristic curves", Biometrics 44 (1988), with components from
    ranks as of Sun and Xu (2014).

    Args:
        models: scores of the same rows, which count once.
        labels: `[rows]`, 0 or 1, those of the models.

    Returns:
        NaN if rows have one class; the covariance is also NaN if a class has one row.
    """
    parts = np.stack([model.auc_components() for model in models])
    classes = [parts[:, labels == label] for label in (0, 1)]
    areas = np.array([of.mean() if of.size else math.nan for of in classes[1]])
    if min(of.shape[1] for of in classes) < 2:
        return areas, np.full((len(models), len(models)), math.nan)
    negatives, positives = (np.atleast_2d(np.cov(of)) / of.shape[1] for of in classes)
    return areas, negatives + positives


def delong_interval(model: RankedRows, labels: np.ndarray) -> Interval:
    """Returns the AUC with an interval by `delong`."""
    (area,), covariance = delong([model], labels)
    value, low, high, _ = _normal(float(area), math.sqrt(covariance[0, 0]))
    return Interval(value, max(low, 0.0), min(high, 1.0))


def delong_difference(one: RankedRows, other: RankedRows, labels: np.ndarray) -> Difference:
    """Returns by how much one AUC is greater than another of the same rows, by `delong`."""
    (area, of_other), covariance = delong([one, other], labels)
    variance = float(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    return _normal(float(area - of_other), math.sqrt(max(variance, 0)))


def _normal(value: float, deviation: float) -> Difference:
    """Returns a value whose deviation is known; one that cannot vary has p 1 or 0."""
    reach = QUANTILE * deviation
    p = math.erfc(abs(value / deviation) / math.sqrt(2)) if deviation else float(value == 0)
    if math.isnan(reach) or math.isnan(value):
        return Difference(value, math.nan, math.nan, p)
    return Difference(value, value - reach, value + reach, p)
