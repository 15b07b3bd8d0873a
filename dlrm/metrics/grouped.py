"""Grouped AUC: how well scores order the rows of each user, averaged over the users.

Rows are sorted once by (group, score, label), packed in 64 bits each, and counted some hundred
thousand at a time, so that 100 million rows need 0.9 GiB of extra memory.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dlrm.metrics.ranked import check_rows

_ROWS_AT_ONCE = 1 << 17  # rows counted at once, so that counts stay in the cache
_SCORE_BITS = 33  # of a key: a float32 and the label below it
_MOST_GROUPS = 1 << (64 - _SCORE_BITS)


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

    def of_both_classes(self) -> "Groups":
        """Returns the groups that have rows of both classes."""
        held = (self.negatives > 0) & (self.positives > 0)
        return Groups(*(array[held] for array in self))

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

    Args:
        scores: `[rows]`, float32; other types are rounded to it.
        labels: `[rows]`, 0 or 1.
        groups: `[rows]`, integers.
        weights: `[rows]`, 0 or more; None counts every row once, and takes half the memory.
    """
    check_rows(scores, labels, weights)
    if groups.shape != labels.shape or groups.dtype.kind not in "iu":
        raise ValueError(
            f"groups: expected [{len(labels)}] integers, got {list(groups.shape)} of {groups.dtype}"
        )
    first, codes = _codes(groups)
    keys = _keys(
        scores, labels, groups, int(first[0]) if codes is None and len(first) else 0, codes
    )
    if weights is None:
        keys.sort()
    else:
        order = np.argsort(keys)
        keys, weights = keys[order], weights[order].astype(np.float64)
    parts = [part.of_both_classes() for part in _counted(keys, weights)]
    number, *counts = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    number = number.astype(np.int64)
    return Groups(first[number] if codes is not None else number + first[:1], *counts)


def _codes(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the least group and None, or all groups and each row's index among them.

    It returns the latter if the range of groups is too large for a key's bits.
    """
    if not len(groups):
        return np.empty(0, np.int64), None
    least, most = groups.min(), groups.max()
    if int(most) - int(least) < _MOST_GROUPS:
        return np.array([least]), None
    return np.unique(groups, return_inverse=True)


def _keys(
    scores: np.ndarray,
    labels: np.ndarray,
    groups: np.ndarray,
    least: int,
    codes: np.ndarray | None,
) -> np.ndarray:
    """Returns numbers that sort like (group, score, label)."""
    keys = np.empty(len(scores), np.uint64)
    for begin in range(0, len(scores), _ROWS_AT_ONCE):
        part = slice(begin, begin + _ROWS_AT_ONCE)
        number = groups[part].astype(np.int64) - least if codes is None else codes[part]
        keys[part] = number.astype(np.uint64) << np.uint64(_SCORE_BITS)
        keys[part] |= _ordered_bits(scores[part]).astype(np.uint64) << np.uint64(1)
        keys[part] |= (labels[part] == 1).view(np.uint8)
    return keys


def _ordered_bits(scores: np.ndarray) -> np.ndarray:
    """Returns the bits of float32, changed to sort like the numbers; both zeros are equal."""
    bits = (scores.astype(np.float32) + np.float32(0)).view(np.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(np.uint32) ^ np.uint32(1 << 31)


def _counted(keys: np.ndarray, weights: np.ndarray | None) -> Iterator[Groups]:
    """Yields the groups of sorted keys; the counts of an unfinished group wait for its end."""
    number_type = np.int64 if weights is None else np.float64
    open_group: np.ndarray = np.zeros((4, 0), number_type)  # the last so far, as a `Groups`
    before_run = before_group = so_far = number_type(0)  # negatives before the last run, group, row
    last = None
    for begin in range(0, len(keys), _ROWS_AT_ONCE):
        part = keys[begin : begin + _ROWS_AT_ONCE]
        run, group = part >> np.uint64(1), (part >> np.uint64(_SCORE_BITS)).astype(np.int64)
        previous = (run[0] ^ np.uint64(1), group[0] - 1) if last is None else last
        last = run[-1], group[-1]
        positive = (part & np.uint64(1)).astype(number_type)
        negative = 1 - positive
        if weights is not None:
            own = weights[begin : begin + _ROWS_AT_ONCE]
            positive, negative = positive * own, negative * own
        up_to = np.cumsum(negative) + so_far
        before = np.concatenate([[so_far], up_to[:-1]])
        # Counts before the start of a run or a group never decrease, so the maximum continues them.
        new_group = np.concatenate([[group[0] != previous[1]], group[1:] != group[:-1]])
        new_run = np.concatenate([[run[0] != previous[0]], run[1:] != run[:-1]])
        of_run = np.maximum.accumulate(np.where(new_run, before, before_run))
        of_group = np.maximum.accumulate(np.where(new_group, before, before_group))
        # The negatives of a run precede its positives, so `up_to` includes all of them.
        ordered = positive * (of_run + up_to - 2 * of_group)
        before_run, before_group, so_far = of_run[-1], of_group[-1], up_to[-1]
        starts = np.flatnonzero(new_group)
        cuts = starts if new_group[0] else np.concatenate([[0], starts])
        sums = (np.add.reduceat(values, cuts) for values in (ordered, negative, positive))
        found = np.stack([group[cuts], *sums])
        if not new_group[0]:
            found[1:, 0] += open_group[1:, 0]
        elif open_group.size:
            found = np.concatenate([open_group, found], axis=1)
        yield Groups(*found[:, :-1])
        open_group = found[:, -1:]
    yield Groups(*open_group)
