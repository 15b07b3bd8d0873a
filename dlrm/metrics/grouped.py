"""Grouped AUC: how well scores order the rows of each user, averaged over the users."""

import math
from typing import NamedTuple

import numpy as np

from dlrm.metrics.ranked import check_rows

_SCORE_BITS = 33  # of a key: a float32 and the label below it


class Groups(NamedTuple):
    """Groups of rows, ascending; `[groups]` each.

    Attributes:
        group: its number.
        ordered: twice the pairs with the positive above the negative, and once those that tie.
        negatives, positives: rows, or the sums of their weights, of which `ordered` has products.
    """

    group: np.ndarray
    ordered: np.ndarray
    negatives: np.ndarray
    positives: np.ndarray

    @property
    def auc(self) -> np.ndarray:
        """Returns the AUC of each group."""
        return self.ordered / (2.0 * self.negatives * self.positives)

    def means(self, times: np.ndarray) -> dict[str, float]:
        """Returns the mean AUC, weighted with rows (Zhu et al., 2017) and with clicks.

        Args:
            times: how often each group counts, `[groups]`.

        Returns:
            The metrics by name; NaN without groups.
        """
        auc, rows = self.auc, self.negatives + self.positives
        return {
            "gauc_by_impressions": _mean(auc, times * rows),
            "gauc_by_clicks": _mean(auc, times * self.positives),
        }


def _mean(values: np.ndarray, weights: np.ndarray) -> float:
    total = float(weights.sum())
    return float(values @ weights) / total if total else math.nan


def all_groups(
    scores: np.ndarray, labels: np.ndarray, groups: np.ndarray, weights: np.ndarray | None = None
) -> Groups:
    """Returns all groups with both classes; groups of one class, such as single rows, are left out.

    Rows are sorted once by (group, score, label), packed in 64 bits each.

    Args:
        scores: `[rows]`, float32; other types are rounded to it.
        labels: `[rows]`, 0 or 1.
        groups: `[rows]`, integers from 0 to 2^31 - 1.
        weights: `[rows]`, 0 or more; None counts every row once.
    """
    check_rows(scores, labels, weights)
    if groups.shape != labels.shape or groups.dtype.kind not in "iu":
        raise ValueError(
            f"groups: expected [{len(labels)}] integers, got {list(groups.shape)} of {groups.dtype}"
        )
    keys = groups.astype(np.uint64) << np.uint64(_SCORE_BITS)
    keys |= _ordered_bits(scores).astype(np.uint64) << np.uint64(1)
    keys |= (labels == 1).view(np.uint8)
    if weights is None:
        keys.sort()
    else:
        order = np.argsort(keys)
        keys, weights = keys[order], weights[order].astype(np.float64)
    positive = (keys & np.uint64(1)).astype(np.int64 if weights is None else np.float64)
    negative = 1 - positive
    if weights is not None:
        positive, negative = positive * weights, negative * weights
    up_to = np.cumsum(negative)
    starts, before_group = _runs(keys >> np.uint64(_SCORE_BITS), up_to - negative)
    _, before_score = _runs(keys >> np.uint64(1), up_to - negative)
    # The negatives of a score precede its positives, so `up_to` includes all of them.
    ordered = positive * (before_score + up_to - 2 * before_group)
    sums = [np.add.reduceat(part, starts) for part in (ordered, negative, positive)]
    both = (sums[1] > 0) & (sums[2] > 0)
    numbers = (keys[starts] >> np.uint64(_SCORE_BITS)).astype(np.int64)
    return Groups(*(array[both] for array in (numbers, *sums)))


def _ordered_bits(scores: np.ndarray) -> np.ndarray:
    """Returns the bits of float32, changed to sort like the numbers; both zeros are equal."""
    bits = (scores.astype(np.float32) + np.float32(0)).view(np.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(np.uint32) ^ np.uint32(1 << 31)


def _runs(values: np.ndarray, sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the starts of runs of equal values, and for each row the sum at its run's start."""
    changes = np.ones(len(values), bool)
    changes[1:] = values[1:] != values[:-1]
    starts = np.flatnonzero(changes)
    return starts, np.repeat(sums[starts], np.diff(starts, append=len(values)))
