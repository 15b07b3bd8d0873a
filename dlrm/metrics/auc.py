"""Exact ROC AUC, of all rows and within groups: pairs of a negative and a positive in order.

A positive is in order with the negatives below it; ties count half, as in scikit-learn.
"""

import math
from typing import NamedTuple

import numpy as np


def auc(negatives: np.ndarray, positives: np.ndarray) -> float:
    """Returns the area under the ROC curve; NaN if a class has no rows or no weight.

    Args:
        negatives, positives: `[scores]`, how many rows of the class have each of the same distinct
            scores, which ascend; or the sums of their weights.
    """
    pairs = float(negatives.sum()) * float(positives.sum())
    return float(below(negatives) @ positives) / pairs if pairs else math.nan


def below(rows: np.ndarray) -> np.ndarray:
    """Returns the rows below each of ascending scores, and half of those that have it.

    Args:
        rows: `[scores]`, the rows of each score.
    """
    return np.cumsum(rows) - rows / 2


class Side(NamedTuple):
    """Rows of one class on one rank.

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


def ordered_pairs(negatives: Side, positives: Side) -> float:
    """Returns twice the pairs with the positive above, plus once those that tie, by weight."""
    if len(positives.scores) > len(negatives.scores):  # fewer are searched in more
        return 2 * negatives.total * positives.total - ordered_pairs(positives, negatives)
    ends = [np.searchsorted(negatives.scores, positives.scores, side) for side in ("left", "right")]
    if negatives.weights is not None:
        sums = np.concatenate([[0.0], np.cumsum(negatives.weights)])
        ends = [sums[end] for end in ends]
    found = ends[0] + ends[1]
    return int(found.sum()) if positives.weights is None else float(found @ positives.weights)


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
