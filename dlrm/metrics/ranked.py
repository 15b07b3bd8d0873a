"""Metrics of scored rows: each is a sum over the rows in the order of their scores.

The rows are sorted once; a metric under other weights, such as those of a bootstrap replicate,
takes a few passes over them. `dlrm.metrics.clicks` computes those that training reports on the
device and over ranks; both agree where they overlap.
"""

import math
from typing import NamedTuple

import numpy as np

from dlrm.metrics.table import TOPS, at

BINS = 10  # of the reliability curve and of `ece`: deciles of the scores
SCORE_BINS = 40  # of the histogram of scores
_MOST_WEIGHT = 1e100  # of all rows, so that products of sums are finite


class Reliability(NamedTuple):
    """Bins of about equal weight in the order of the scores, `[bins]` each.

    Attributes:
        weight: rows, or the sum of their weights.
        predicted: mean probability.
        observed: click rate.
        rows: number of rows that count once and have the same variance.
    """

    weight: np.ndarray
    predicted: np.ndarray
    observed: np.ndarray
    rows: np.ndarray


class RankedRows:
    """Scored rows in ascending order of their score.

    Args:
        logits: `[rows]`.
        labels: `[rows]`, 0 or 1.
        weights: `[rows]`, 0 or more; None counts every row once.

    Attributes:
        order: place in the order -> row.

    Raises:
        ValueError: shapes differ, a score is NaN or infinite, a label is neither 0 nor 1, or the
            weights cannot be summed; the message names the first such row.
    """

    def __init__(
        self, logits: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None
    ) -> None:
        check_rows(logits, labels, weights)
        self.order = np.argsort(logits, kind="stable")
        self.logits = logits[self.order].astype(np.float64)
        self.labels = labels[self.order].astype(np.float64)
        self.weights = None if weights is None else weights[self.order].astype(np.float64)
        self.probabilities = 1 / (1 + np.exp(-self.logits))
        self._losses = np.logaddexp(0, self.logits) - self.labels * self.logits
        self._errors = np.square(self.probabilities - self.labels)
        changes = np.flatnonzero(self.logits[1:] != self.logits[:-1])
        self._ends = np.append(changes, len(logits) - 1) if len(logits) else changes
        self._has_ties = len(self._ends) < len(logits)

    def __len__(self) -> int:
        return len(self.order)

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
        weight = self._weights(counts)
        curve = self._curve(weight)
        loss, predicted = float(weight @ self._losses), float(weight @ self.probabilities)
        found = {
            "auc": curve.auc(),
            **metrics_of_sums(curve.rows, loss, curve.clicks, predicted),
            "ece": curve.calibration_error(self.probabilities[self._ends]),
            "pr_auc": curve.average_precision(),
            "rmse": math.sqrt(_ratio(float(weight @ self._errors), curve.rows)),
        }
        for top in TOPS:
            gain = curve.gain(top)
            found |= {f"gain{at(top)}": gain, f"lift{at(top)}": gain / top}
        return found

    def reliability(self) -> Reliability:
        """Returns predicted and observed click rates over the range of scores."""
        weights = self._weights(None)
        curve, squares = self._curve(weights), self._curve(np.square(weights))
        weight, predicted, clicks = curve.bins(self.probabilities[self._ends])
        held, squared = weight > 0, np.bincount(curve.places(), squares.own, BINS)
        weight, predicted, clicks = weight[held], predicted[held], clicks[held]
        rows = np.square(weight) / squared[held]
        return Reliability(weight, predicted / weight, clicks / weight, rows)

    def score_counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns ends of equally wide bins of the probabilities from 0, and rows in each."""
        most = float(self.probabilities.max(initial=0)) or 1.0
        counts, edges = np.histogram(
            self.probabilities, SCORE_BINS, (0, most), weights=self.weights
        )
        return edges, counts

    def gains(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns shares of the rows, highest scores first, and of the clicks among them."""
        shares = np.linspace(0, 1, 101)
        curve = self._curve(self._weights(None))
        return shares, np.array([curve.gain(share) for share in shares])

    def precision_recall(self, points: int = 200) -> tuple[np.ndarray, np.ndarray]:
        """Returns recall and precision at thresholds, recall ascending."""
        curve = self._curve(self._weights(None))
        if not curve.clicks:
            return np.empty(0), np.empty(0)
        recall, precision = curve.precision_recall()
        held = np.unique(np.linspace(0, len(recall) - 1, points).astype(int))
        return recall[held], precision[held]

    def auc_components(self) -> tuple[float, np.ndarray]:
        """Returns the AUC and each row's component of it, in the order of the rows as given.

        That of a positive is the share of negatives below it, that of a negative the share of
        positives above it, and ties count half (DeLong et al., 1988). Weights must be None.
        """
        assert self.weights is None
        curve = self._curve(np.ones(len(self)))
        of_positives, of_negatives = curve.components()
        lengths = np.diff(self._ends, prepend=-1)
        chosen = np.where(
            self.labels > 0, np.repeat(of_positives, lengths), np.repeat(of_negatives, lengths)
        )
        components = np.empty(len(self))
        components[self.order] = chosen
        return curve.auc(), components

    def _weights(self, counts: np.ndarray | None) -> np.ndarray:
        if counts is None:
            return np.ones(len(self)) if self.weights is None else self.weights
        chosen = counts[self.order].astype(np.float64)
        return chosen if self.weights is None else chosen * self.weights

    def _curve(self, weight: np.ndarray) -> "Curve":
        total, clicks = np.cumsum(weight), np.cumsum(weight * self.labels)
        if self._has_ties:
            total, clicks = total[self._ends], clicks[self._ends]
        return Curve(total, clicks)


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


class Curve:
    """Rows and clicks up to each distinct score, ascending.

    Args:
        total: weight of the rows up to a score, that included, `[scores]`.
        clicked: weight of the clicks among them.
    """

    def __init__(self, total: np.ndarray, clicked: np.ndarray) -> None:
        self._total, self._clicked = total, clicked
        self.rows = float(total[-1]) if len(total) else 0.0
        self.clicks = float(clicked[-1]) if len(clicked) else 0.0
        self.own = np.diff(total, prepend=0)  # of each distinct score
        self._own_clicks = np.diff(clicked, prepend=0)

    def components(self) -> tuple[np.ndarray, np.ndarray]:
        """The share of negatives below each score, and of positives above; ties count half."""
        above = self.clicks - self._clicked + self._own_clicks / 2
        with np.errstate(invalid="ignore", divide="ignore"):
            return self._below() / (self.rows - self.clicks), above / self.clicks

    def auc(self) -> float:
        """The share of the pairs of a negative and a positive in which the latter is higher."""
        if not 0 < self.clicks < self.rows:
            return math.nan
        pairs = (self.rows - self.clicks) * self.clicks
        return float(self._own_clicks @ self._below()) / pairs

    def _below(self) -> np.ndarray:
        """Negatives below each score, of which ties count half."""
        negatives, own = self._total - self._clicked, self.own - self._own_clicks
        return negatives - own / 2

    def precision_recall(self) -> tuple[np.ndarray, np.ndarray]:
        """Recall and precision from the highest score down."""
        above = self.rows - (self._total - self.own)
        clicks = self.clicks - (self._clicked - self._own_clicks)
        precision = np.divide(clicks, above, out=np.ones_like(clicks), where=above > 0)
        return clicks[::-1] / self.clicks, precision[::-1]

    def average_precision(self) -> float:
        if not self.clicks:
            return math.nan
        _, precision = self.precision_recall()
        return float(self._own_clicks @ precision[::-1]) / self.clicks

    def gain(self, top: float) -> float:
        if not self.clicks:
            return math.nan
        rows = np.concatenate([[0.0], self._total])
        clicks = np.concatenate([[0.0], self._clicked])
        below = np.interp((1 - top) * self.rows, rows, clicks)
        return float((self.clicks - below) / self.clicks)

    def places(self) -> np.ndarray:
        """The bin of each distinct score; rows that tie are in one bin."""
        middle = (self._total - self.own / 2) / self.rows
        return np.minimum((middle * BINS).astype(np.int64), BINS - 1)

    def bins(self, probabilities: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Weight, predicted clicks and clicks of each bin."""
        places, sums = self.places(), (self.own, self.own * probabilities, self._own_clicks)
        weight, predicted, clicks = (np.bincount(places, of, BINS) for of in sums)
        return weight, predicted, clicks

    def calibration_error(self, probabilities: np.ndarray) -> float:
        if not self.rows:
            return math.nan
        _, predicted, clicks = self.bins(probabilities)
        return float(np.abs(predicted - clicks).sum()) / self.rows


def check_rows(logits: np.ndarray, labels: np.ndarray, weights: np.ndarray | None) -> None:
    """Raises ValueError where rows cannot be judged; see `RankedRows`."""
    arrays = {"scores": logits, "labels": labels}
    if weights is not None:
        arrays["weights"] = weights
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
