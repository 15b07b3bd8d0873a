"""Confidence intervals: DeLong's variance of AUC, and a bootstrap over rows or groups."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dlrm.metrics.ranked import LEVEL, QUANTILE, RankedRows


class Interval(NamedTuple):
    """A value with the bounds of its interval, which are NaN without one."""

    value: float
    low: float
    high: float


class Difference(NamedTuple):
    """Difference of two models in a metric on the same rows.

    Attributes:
        value: the first minus the second.
        low, high: bounds of its interval.
        p: two-sided p-value of no difference.
    """

    value: float
    low: float
    high: float
    p: float


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
    (value,), covariance = delong([model], labels)
    interval = _normal_interval(float(value), math.sqrt(covariance[0, 0]))
    return Interval(interval.value, max(interval.low, 0.0), min(interval.high, 1.0))


def delong_difference(one: RankedRows, other: RankedRows, labels: np.ndarray) -> Difference:
    """Returns by how much one AUC is greater than another of the same rows, by `delong`."""
    aucs, covariance = delong([one, other], labels)
    contrast = np.array([1, -1])
    variance = float(contrast @ covariance @ contrast)
    return _normal_difference(float(aucs[0] - aucs[1]), math.sqrt(max(variance, 0)))


def _normal_difference(value: float, deviation: float) -> Difference:
    """Returns a difference whose deviation is known; one that cannot vary has p 1 or 0."""
    p = math.erfc(abs(value / deviation) / math.sqrt(2)) if deviation else float(value == 0)
    return Difference(*_normal_interval(value, deviation), p)


def _normal_interval(value: float, deviation: float) -> Interval:
    reach = QUANTILE * deviation
    if math.isnan(reach) or math.isnan(value):
        return Interval(value, math.nan, math.nan)
    return Interval(value, value - reach, value + reach)


def bootstrap(
    measures: Sequence[Callable[[np.ndarray, np.ndarray], dict[str, float]]],
    clusters: np.ndarray | None,
    rows: int,
    replicates: int,
    seed: int = 0,
) -> list[dict[str, np.ndarray]]:
    """Returns metrics of replicates, in each of which rows or clusters are drawn with replacement.

    Args:
        measures: of each model (how often each row occurs `[rows]`, how often each cluster) ->
            metrics. All models have the same replicates.
        clusters: number of each row's cluster, from 0; None draws single rows, each a cluster.

    Returns:
        For each model, the metrics' values `[replicates]` by name; none without replicates or rows.
    """
    random = np.random.default_rng(seed)
    number = rows if clusters is None else int(clusters.max(initial=-1)) + 1
    found: list[list[dict[str, float]]] = [[] for _ in measures]
    for _ in range(replicates if rows else 0):
        drawn = np.bincount(random.integers(0, number, number), minlength=number)
        counts = drawn if clusters is None else drawn[clusters]
        for values, measure in zip(found, measures, strict=True):
            values.append(measure(counts, drawn))
    return [
        {name: np.array([one[name] for one in values]) for name in values[0]} if values else {}
        for values in found
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
    return Difference(*interval, _normal_difference(value, float(known.std(ddof=1))).p)


def decimals(low: float | None, high: float | None) -> int:
    """Returns the digits after the point that an interval supports: 3 for a reach of 0.005.

    One digit of the reach is kept, or two if they are less than 36; without an interval 4 are kept.
    """
    if low is None or high is None or not 0 < high - low < math.inf:
        return 4
    return min(max(math.ceil(-math.log10((high - low) / 7.1)), 0), 6)
