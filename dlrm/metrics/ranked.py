"""Metrics of scored rows: each is a sum over the rows in the order of their scores.

The rows are sorted once; a metric under other weights, such as those of a bootstrap replicate,
takes a few passes over them. `dlrm.metrics.clicks` computes those that training reports on the
device and over ranks; both agree where they overlap.
"""

import math
from typing import NamedTuple

import numpy as np

from dlrm.metrics.auc import Side, auc, below
from dlrm.metrics.table import TOPS, at

BINS = 10  # of the reliability curve and of `ece`: deciles of the scores
SCORE_BINS = 40  # of the histogram of scores
POINTS = 200  # at most, of precision and recall
LEVEL = 0.95  # of intervals
QUANTILE = 1.959963984540054  # of the normal distribution, at (1 + LEVEL) / 2
_MOST_WEIGHT = 1e100  # of all rows, so that products of sums are finite


class RankedRows:
    """Scored rows in ascending order of their score.

    Args:
        logits: `[rows]`.
        labels: `[rows]`, 0 or 1.
        weights: `[rows]`, 0 or more; None counts every row once.

    Raises:
        ValueError: shapes differ, a score is NaN or infinite, a label is neither 0 nor 1, or the
            weights cannot be summed; the message names the first such row.
    """

    def __init__(
        self, logits: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None
    ) -> None:
        _check_rows(logits, labels, weights)
        self._order = np.argsort(logits, kind="stable")
        self._logits = logits[self._order].astype(np.float64)
        self._labels = labels[self._order].astype(np.float64)
        ones = np.ones(len(labels))
        self._weights = ones if weights is None else weights[self._order].astype(np.float64)
        self.probabilities = 1 / (1 + np.exp(-self._logits))
        self._losses = np.logaddexp(0, self._logits) - self._labels * self._logits
        self._errors = np.square(self.probabilities - self._labels)
        self._sides = [np.flatnonzero(self._labels == label) for label in (0, 1)]
        last = np.append(self._logits[1:] != self._logits[:-1], True)[: len(labels)]
        self._ends = np.flatnonzero(last)  # of runs of rows that tie

    def metrics(self, counts: np.ndarray | None = None) -> dict[str, float]:
        """Returns all metrics by name; NaN where one is undefined.

        Args:
            counts: how often each row occurs, in the order of the rows as they were given; a
                bootstrap replicate. None is once.

        Returns:
            Those of `dlrm.metrics.table` that need no groups. The normalized entropy is that of He
            et al. (2014), `ece` that of Nixon et al. (2019), over bins of equal weight. Of rows
            that tie at the boundary of a gain or lift a part counts, as on average over orders of
            the ties.
        """
        weight = self._weights if counts is None else self._weights * counts[self._order]
        curve = self._curve(weight)
        rows, clicks = curve.rows[-1], curve.clicks[-1]
        loss, predicted = float(weight @ self._losses), float(weight @ self.probabilities)
        _, of_bins, in_bins = curve.bins(self.probabilities[self._ends])
        with np.errstate(invalid="ignore"):
            found = {
                "auc": auc(*(Side(self._logits[rows], weight[rows]) for rows in self._sides)),
                **metrics_of_sums(rows, loss, clicks, predicted),
                "ece": np.abs(of_bins - in_bins).sum() / rows,
                "pr_auc": np.diff(curve.clicks) @ curve.precision() / clicks,
                "rmse": math.sqrt(float(weight @ self._errors) / rows) if rows else math.nan,
            }
            gains = curve.gains(np.array(TOPS))
        for top, gain in zip(TOPS, gains, strict=True):
            found |= {f"gain{at(top)}": gain, f"lift{at(top)}": gain / top}
        return {name: float(value) for name, value in found.items()}

    def curves(self) -> dict[str, dict[str, np.ndarray]]:
        """Returns the curves of a page by name.

        Returns:
            `reliability`, of up to `BINS` bins of about equal weight in the order of the scores:
            `weight`, `predicted` and `observed` click rates, and the bounds `low` and `high` of
            Wilson's 95 % interval, in which weighted rows count as many as would have the same
            variance. `scores`: `edges` of equally wide bins of the probabilities from 0, and the
            `rows` in each. `gain`: shares of the `rows`, highest scores first, and of the `clicks`
            among them. `precision_recall` at thresholds, `recall` ascending; empty without clicks.
        """
        curve, squares = self._curve(self._weights), self._curve(np.square(self._weights))
        squared = np.bincount(curve.places(), np.diff(squares.rows), BINS)
        bins = np.stack([*curve.bins(self.probabilities[self._ends]), squared])
        weight, predicted, clicks, squared = bins[:, bins[0] > 0]
        observed = clicks / weight
        low, high = wilson(observed, np.square(weight) / squared)
        most = float(self.probabilities.max(initial=0)) or 1.0
        counts, edges = np.histogram(
            self.probabilities, SCORE_BINS, (0, most), weights=self._weights
        )
        shares, held = np.linspace(0, 1, 101), np.linspace(0, len(self._ends) - 1, POINTS)
        if not curve.clicks[-1]:
            held = held[:0]
        chosen = -1 - np.unique(held.astype(np.int64))
        with np.errstate(invalid="ignore"):
            recall = (curve.clicks[-1] - curve.clicks[:-1]) / curve.clicks[-1]
            gains = curve.gains(shares)
        return {
            "reliability": {
                "weight": weight,
                "predicted": predicted / weight,
                "observed": observed,
                "low": low,
                "high": high,
            },
            "scores": {"edges": edges, "rows": counts},
            "gain": {"rows": shares, "clicks": gains},
            "precision_recall": {"recall": recall[chosen], "precision": curve.precision()[chosen]},
        }

    def auc_components(self) -> np.ndarray:
        """Returns each row's component of the AUC, in the order of the rows as they were given.

        That of a positive is the share of negatives below it, that of a negative the share of
        positives above it, and ties count half (DeLong et al., 1988). Rows count once.
        """
        negatives, positives = (Side(self._logits[rows]) for rows in self._sides)
        components, (negative, positive) = np.empty(len(self._order)), self._sides
        with np.errstate(invalid="ignore"):
            above = 1 - below(positives, negatives.scores) / (2 * np.float64(len(positive)))
            under = below(negatives, positives.scores) / (2 * np.float64(len(negative)))
        components[self._order[negative]], components[self._order[positive]] = above, under
        return components

    def _curve(self, weight: np.ndarray) -> "_Curve":
        """Returns the sums of given weights of the rows in their order."""
        sums = np.zeros((2, len(self._ends) + 1))
        sums[0, 1:] = np.cumsum(weight)[self._ends]
        sums[1, 1:] = np.cumsum(weight * self._labels)[self._ends]
        return _Curve(*sums)


class _Curve(NamedTuple):
    """Sums of the weights up to each distinct score, ascending, from 0; `[scores + 1]`."""

    rows: np.ndarray
    clicks: np.ndarray

    def precision(self) -> np.ndarray:
        """Returns the click rate from each distinct score up; 1 without rows."""
        rows, clicks = (of[-1] - of[:-1] for of in self)
        return np.divide(clicks, rows, out=np.ones_like(clicks), where=rows > 0)

    def gains(self, tops: np.ndarray) -> np.ndarray:
        """Returns the share of the clicks among each share of the rows, highest scores first."""
        under = np.interp((1 - tops) * self.rows[-1], self.rows, self.clicks)
        return (self.clicks[-1] - under) / self.clicks[-1]

    def places(self) -> np.ndarray:
        """Returns the bin of each distinct score; rows that tie are in one bin."""
        middle = (self.rows[1:] - np.diff(self.rows) / 2) / self.rows[-1]
        return np.minimum((middle * BINS).astype(np.int64), BINS - 1)

    def bins(self, probabilities: np.ndarray) -> list[np.ndarray]:
        """Returns weight, predicted clicks and clicks of each bin."""
        rows, clicks = np.diff(self.rows), np.diff(self.clicks)
        places = self.places()
        return [np.bincount(places, of, BINS) for of in (rows, rows * probabilities, clicks)]


def wilson(rates: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bounds of Wilson's 95 % intervals of rates among some numbers of rows.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", Journal of
    the American Statistical Association 22 (1927).
    """
    share = QUANTILE**2 / rows
    middle = (rates + share / 2) / (1 + share)
    half = np.sqrt(rates * (1 - rates) * share + np.square(share) / 4) / (1 + share)
    return np.maximum(middle - half, 0), np.minimum(middle + half, 1)


def metrics_of_sums(rows: float, loss: float, clicks: float, predicted: float) -> dict[str, float]:
    """Returns log loss, normalized entropy and calibration; NaN where one is undefined.

    Args:
        rows: number of rows. With weights it is the sum of the weights, and the sums below are
            weighted.
        loss: sum of the negative log-likelihoods, nats.
        clicks: sum of the labels.
        predicted: sum of the probabilities.
    """
    rate, log_loss = _ratio(clicks, rows), _ratio(loss, rows)
    entropy = -sum(p * math.log(p) for p in (rate, 1 - rate) if p > 0)
    return {
        "log_loss": log_loss,
        "normalized_entropy": _ratio(log_loss, entropy),
        "calibration": _ratio(predicted, clicks),
    }


def _ratio(value: float, divisor: float) -> float:
    return value / divisor if divisor else math.nan


def _check_rows(logits: np.ndarray, labels: np.ndarray, weights: np.ndarray | None) -> None:
    arrays = {"scores": logits, "labels": labels}
    arrays |= {} if weights is None else {"weights": weights}
    if any(array.shape != (len(labels),) for array in arrays.values()):
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
        raise ValueError(f"expected one score, label and weight a row, got {shapes}")
    _check("score", logits, np.isfinite(logits), "a finite number")
    _check("label", labels, (labels == 0) | (labels == 1), "0 or 1")
    if weights is not None:
        check_weights(weights)


def check_weights(weights: np.ndarray) -> None:
    """Raises ValueError for impossible weights; the message names the row."""
    _check("weight", weights, np.isfinite(weights) & (weights >= 0), "a finite number of 0 or more")
    if len(weights) and not weights.any():
        raise ValueError(f"expected a weight above 0, got {len(weights):,} zeros")
    with np.errstate(over="ignore"):
        total = float(weights.sum(dtype=np.float64))
    if total > _MOST_WEIGHT:
        raise ValueError(f"expected weights whose sum is at most {_MOST_WEIGHT:g}, got {total:g}")


def _check(what: str, values: np.ndarray, good: np.ndarray, expected: str) -> None:
    if not good.all():
        row = int(good.argmin())
        raise ValueError(f"row {row}: expected {expected} as its {what}, got {values[row]}")
