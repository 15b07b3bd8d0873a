"""Metrics of scored rows: each is a sum over the rows in the order of their scores.

The rows are sorted once; a metric under other weights, such as those of a bootstrap replicate,
takes a few passes over them. `dlrm.metrics.clicks` computes those that training reports on the
device and over ranks; both agree where they overlap.
"""

import math

import numpy as np

from dlrm.metrics.auc import Groups, auc, below
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
        ordered = logits[self._order].astype(np.float64)
        self._labels = labels[self._order].astype(np.float64)
        ones = np.ones(len(labels))
        self._weights = ones if weights is None else weights[self._order].astype(np.float64)
        self._starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: len(labels)])
        self._logits = ordered[self._starts]  # the distinct ones, ascending
        ties = np.diff(self._starts, append=len(labels))
        self._of_score = np.repeat(np.arange(len(ties)), ties)  # of each row
        self.probabilities = 1 / (1 + np.exp(-self._logits))
        self._losses = np.logaddexp(0, self._logits)  # of rows without a click

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
        weights = self._weights if counts is None else self._weights * counts[self._order]
        rows, clicks = self._sums(weights)
        others, likely = rows - clicks, self.probabilities
        total, clicked, predicted = rows.sum(), clicks.sum(), float(rows @ likely)
        losses = float(rows @ self._losses - clicks @ self._logits)
        squares = others @ np.square(likely) + clicks @ np.square(1 - likely)
        with np.errstate(invalid="ignore"):
            gaps = np.bincount(_bins(rows), rows * likely - clicks, BINS)
            found = {
                "auc": auc(others, clicks),
                **metrics_of_sums(total, losses, clicked, predicted),
                "ece": np.abs(gaps).sum() / total,
                "pr_auc": clicks @ _precision(rows, clicks) / clicked,
                "rmse": np.sqrt(squares / total),
            }
            gains = _gains(rows, clicks, np.array(TOPS))
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
        (rows, clicks), likely = self._sums(self._weights), self.probabilities
        columns = rows, rows * likely, clicks, self._sums(np.square(self._weights))[0]
        bins = np.stack([np.bincount(_bins(rows), of, BINS) for of in columns])
        weight, predicted, clicked, squared = bins[:, bins[0] > 0]
        bounds = wilson(clicked / weight, np.square(weight) / squared)
        reliability = weight, predicted / weight, clicked / weight, *bounds
        names = ("weight", "predicted", "observed", "low", "high")
        most = float(likely.max(initial=0)) or 1.0
        counts, edges = np.histogram(likely, SCORE_BINS, (0, most), weights=rows)
        shares, held = np.linspace(0, 1, 101), np.linspace(0, len(rows) - 1, POINTS)
        if not clicks.any():
            held = held[:0]
        chosen = -1 - np.unique(held.astype(np.int64))
        with np.errstate(invalid="ignore"):
            recall = np.cumsum(clicks[::-1])[::-1] / clicks.sum()
            gains = _gains(rows, clicks, shares)
        precision = _precision(rows, clicks)
        return {
            "reliability": dict(zip(names, reliability, strict=True)),
            "scores": {"edges": edges, "rows": counts},
            "gain": {"rows": shares, "clicks": gains},
            "precision_recall": {"recall": recall[chosen], "precision": precision[chosen]},
        }

    def auc_components(self) -> np.ndarray:
        """Returns each row's component of the AUC, in the order of the rows as they were given.

        That of a positive is the share of negatives below it, that of a negative the share of
        positives above it, and ties count half (DeLong et al., 1988). Rows count once.
        """
        rows, clicks = self._sums(np.ones(len(self._labels)))
        with np.errstate(invalid="ignore"):
            under, over = (below(of) / of.sum() for of in (rows - clicks, clicks))
        own = np.where(self._labels == 1, under[self._of_score], 1 - over[self._of_score])
        components = np.empty(len(own))
        components[self._order] = own
        return components

    def within_groups(self, numbers: np.ndarray) -> Groups:
        """Returns the groups with both classes; those of one class, such as single rows, are not.

        Args:
            numbers: `[rows]`, of the groups from 0, in the order of the rows as they were given.
        """
        numbers = numbers[self._order]
        order = np.argsort(numbers, kind="stable")  # by group, and in each by score
        numbers, scores = numbers[order], self._of_score[order]
        starts = np.flatnonzero(np.diff(numbers, prepend=-1) | np.diff(scores, prepend=-1))
        weights, group = self._weights[order], numbers[starts]
        rows, clicks = (
            np.add.reduceat(of, starts) for of in (weights, weights * self._labels[order])
        )
        others, clicked, all_rows = (np.bincount(group, of) for of in (rows - clicks, clicks, rows))
        under = below(rows - clicks) - (np.cumsum(others) - others)[group]
        both = np.flatnonzero((others > 0) & (clicked > 0))
        ordered = np.bincount(group, clicks * under)[both]
        areas = ordered / (others[both] * clicked[both])
        return Groups(both, areas, all_rows[both], clicked[both])

    def _sums(self, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns rows and clicks of each distinct score, by given weights of the sorted rows."""
        clicks = np.add.reduceat(weights * self._labels, self._starts)
        return np.add.reduceat(weights, self._starts), clicks


def _bins(rows: np.ndarray) -> np.ndarray:
    """Returns the bin of each distinct score; rows that tie are in one bin."""
    middle = (np.cumsum(rows) - rows / 2) / rows.sum()
    return np.clip((middle * BINS).astype(np.int64), 0, BINS - 1)


def _precision(rows: np.ndarray, clicks: np.ndarray) -> np.ndarray:
    """Returns the click rate from each distinct score up; 1 without rows."""
    above, clicked = (np.cumsum(of[::-1])[::-1] for of in (rows, clicks))
    return np.divide(clicked, above, out=np.ones(len(rows)), where=above > 0)


def _gains(rows: np.ndarray, clicks: np.ndarray, tops: np.ndarray) -> np.ndarray:
    """Returns the share of the clicks among each share of the rows, highest scores first."""
    under, clicked = (np.append(0.0, np.cumsum(of)) for of in (rows, clicks))
    return (clicked[-1] - np.interp((1 - tops) * under[-1], under, clicked)) / clicked[-1]


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
