"""Exact ROC AUC, of all rows and within groups: pairs of a negative and a positive in order.

A positive is in order with the negatives below it; ties count half, as in scikit-learn.
"""

import math
from typing import NamedTuple

import numpy as np


class Side(NamedTuple):
    """Rows of one class.

    Attributes:
        scores: `[rows]`, ascending.
        weights: `[rows]`; None counts every row once.
    """

    scores: np.ndarray
    weights: np.ndarray | None = None

    @property
    def total(self) -> float:
        """Returns the number of rows, or the sum of their weights."""
        return len(self.scores) if self.weights is None else float(self.weights.sum())


def below(negatives: Side, scores: np.ndarray) -> np.ndarray:
    """Returns twice the negatives below each score, plus once those that tie with it.

    Args:
        scores: `[scores]`; searched fastest if they ascend.
    """
    left, right = (np.searchsorted(negatives.scores, scores, side) for side in ("left", "right"))
    if negatives.weights is None:
        return left + right
    sums = np.concatenate([[0.0], np.cumsum(negatives.weights)])
    return sums[left] + sums[right]


def ordered_pairs(negatives: Side, positives: Side) -> float:
    """Returns twice the pairs with the positive above, plus once those that tie, by weight."""
    if len(positives.scores) > len(negatives.scores):  # fewer are searched in more
        return 2 * negatives.total * positives.total - ordered_pairs(positives, negatives)
    found = below(negatives, positives.scores)
    return int(found.sum()) if positives.weights is None else float(found @ positives.weights)


def auc(negatives: Side, positives: Side) -> float:
    """Returns the area under the ROC curve; NaN if a class has no rows or no weight."""
    pairs = negatives.total * positives.total
    return ordered_pairs(negatives, positives) / (2 * pairs) if pairs else math.nan


class Groups(NamedTuple):
    """Groups of rows that have both classes, `[groups]` each.

    Attributes:
        number: numbers of the groups, ascending.
        auc: the AUC within each.
        rows, positives: their numbers, or the sums of their weights.
    """

    number: np.ndarray
    auc: np.ndarray
    rows: np.ndarray
    positives: np.ndarray

    def means(self, times: np.ndarray) -> dict[str, float]:
        """Returns the mean AUC, weighted with rows (Zhu et al., 2017) and with clicks.

        Args:
            times: how often each group counts, by number.

        Returns:
            The metrics by name; NaN without groups.
        """
        sizes = {"gauc_by_impressions": self.rows, "gauc_by_clicks": self.positives}
        weights = {name: times[self.number] * size for name, size in sizes.items()}
        return {
            name: float(self.auc @ own) / float(own.sum()) if own.any() else math.nan
            for name, own in weights.items()
        }


def within_groups(
    scores: np.ndarray, labels: np.ndarray, numbers: np.ndarray, weights: np.ndarray
) -> Groups:
    """Returns the groups with both classes; groups of one class, such as single rows, are left out.

    Args:
        scores: `[rows]`, without NaN.
        labels: `[rows]`, 0 or 1.
        numbers: `[rows]`, of the rows' groups, from 0.
        weights: `[rows]`, 0 or more.
    """
    starts = numbers.astype(np.int64) * (len(scores) + 1)  # of the keys of each group
    keys = starts + 1 + np.unique(scores, return_inverse=True)[1]
    order = np.argsort(keys)
    negative, positive = (order[labels[order] == label] for label in (0, 1))
    negatives = Side(keys[negative], weights[negative])
    own = below(negatives, keys[positive]) - below(negatives, starts[positive])
    below_all, above_all, ordered = (
        np.bincount(numbers[rows], weights[rows] * factor, int(numbers.max(initial=-1)) + 1)
        for rows, factor in ((negative, 1.0), (positive, 1.0), (positive, own))
    )
    both = np.flatnonzero((below_all > 0) & (above_all > 0))
    below_all, above_all, ordered = below_all[both], above_all[both], ordered[both]
    return Groups(both, ordered / (2 * below_all * above_all), below_all + above_all, above_all)
