"""Counts of a column's distinct values, their moments, and what they tell about the label."""

from typing import NamedTuple

import numpy as np

from dlrm.data.transform.lookup import spread

_MOST_KEPT = 1 << 16  # distinct values of a column
_BINS = 20  # of equally many rows, in which the order of numbers shows
_CLEAR = 4.0  # standard deviations beyond chance
_SURE_ROWS = 100  # in which a rate of 97 % or less would show


class Signal(NamedTuple):
    """The share of a label's variance that a column explains, beyond chance.

    Attributes:
        by_value: explained by its values, each on its own.
        by_order: explained by their order: by 20 ranges of numbers.
        chance: the share that chance alone reaches once in many columns.
        tells: whether each value has one label.
        sure: share of the rarer label's rows whose values, or ranges, have that label in all of
            their rows, which are 100 or more.
    """

    by_value: float = 0.0
    by_order: float = 0.0
    chance: float = 1.0
    tells: bool = False
    sure: float = 0.0

    @property
    def clear(self) -> bool:
        """Returns whether the values tell more about the label than chance would."""
        return self.by_value > self.chance

    @property
    def ordered(self) -> bool:
        """Returns whether the order of the values tells most of it."""
        return self.by_order >= self.by_value / 2


class Distinct:
    """Counts of distinct values: of all, or of a sample of them selected by their hashes.

    Attributes:
        most: the greatest count of a value within one addition; 1 if no value repeats.
    """

    def __init__(self) -> None:
        self.most = 0
        self._keys: np.ndarray = np.empty(0, np.uint64)
        self._counts: np.ndarray = np.empty(0, np.int64)
        self._positives: np.ndarray = np.empty(0, np.int64)
        self._numbers: np.ndarray = np.empty(0)
        self._halvings = 0

    def add(
        self,
        keys: np.ndarray,
        counts: np.ndarray,
        positives: np.ndarray | None = None,
        numbers: np.ndarray | None = None,
    ) -> None:
        """Adds occurrences of keys.

        Args:
            keys: uint64; a key may be given several times.
            counts: rows of each.
            positives: those whose label counts as 1; None is 0.
            numbers: the number of each key; None is NaN.
        """
        positives = np.zeros(len(keys), np.int64) if positives is None else positives
        numbers = np.full(len(keys), np.nan) if numbers is None else numbers
        merged = np.unique(
            np.concatenate([self._keys, keys]), return_index=True, return_inverse=True
        )
        self._keys, first, places = merged
        counts = np.concatenate([self._counts, counts])
        positives = np.concatenate([self._positives, positives])
        size = len(self._keys)
        self._counts = np.bincount(places, counts, size).astype(np.int64)
        self._positives = np.bincount(places, positives, size).astype(np.int64)
        self._numbers = np.concatenate([self._numbers, numbers])[first]
        self.most = max(self.most, int(self._counts.max(initial=0)))
        self._keep()
        while len(self._keys) > _MOST_KEPT:
            self._halvings += 1
            self._keep()

    def _keep(self) -> None:
        if self._halvings:
            kept = spread(self._keys) >> np.uint64(64 - self._halvings) == 0
            self._keys, self._counts = self._keys[kept], self._counts[kept]
            self._positives, self._numbers = self._positives[kept], self._numbers[kept]

    def __len__(self) -> int:
        return len(self._keys) << self._halvings

    @property
    def exact(self) -> bool:
        """Returns whether every value was counted."""
        return not self._halvings

    def below(self, limit: int) -> tuple[int, int]:
        """Returns the number of values with a count below `limit`, and that of their rows."""
        rare = self._counts[self._counts < limit]
        return len(rare) << self._halvings, int(rare.sum()) << self._halvings

    def quantiles(self, shares: list[float]) -> list[float]:
        """Returns the numbers below which shares of the rows are."""
        order = np.argsort(self._numbers)
        there = order[~np.isnan(self._numbers[order])]
        ends = np.cumsum(self._counts[there])
        if not len(ends):
            return [0.0] * len(shares)
        places = np.searchsorted(ends, np.array(shares) * ends[-1])
        return self._numbers[there[np.minimum(places, len(there) - 1)]].tolist()

    def signal(self, missing: int = 0, missing_positives: int = 0) -> Signal:
        """Returns the share of the label's variance that the values explain.

        Args:
            missing, missing_positives: rows without a value, which count as one more value.
        """
        extra = [counted >> self._halvings for counted in (missing, missing_positives)]
        absent = int(extra[0] > 0)
        more = np.array(extra, np.int64)
        counts = np.concatenate([self._counts, more[:absent]])
        positives = np.concatenate([self._positives, more[1 : 1 + absent]])
        rows = int(counts.sum())
        share = positives.sum() / max(rows, 1)
        spread_of_label = share * (1 - share)
        if spread_of_label <= 0 or len(counts) < 2:
            return Signal()
        pure = bool(((positives == 0) | (positives == counts)).all())
        noise = (2 + (1 / spread_of_label - 6) / counts).clip(0).sum()
        by_value = _explained(counts, positives, share)
        order = np.argsort(self._numbers, kind="stable")
        middles = np.cumsum(counts[order]) - counts[order] / 2
        ranges = (middles * _BINS / max(counts[order].sum(), 1)).astype(np.int64)
        ranges = np.concatenate([ranges, np.full(absent, _BINS)])
        ordered = np.append(order, np.arange(len(order), len(counts)))
        of_ranges = [np.bincount(ranges, counted[ordered]) for counted in (counts, positives)]
        used = of_ranges[0] > 0
        by_order = _explained(of_ranges[0][used], of_ranges[1][used], share)
        chance = _CLEAR * float(np.sqrt(noise)) / rows
        sure = max(_sure(counts, positives), _sure(*of_ranges))
        return Signal(by_value, by_order, chance, pure, sure)


def _sure(counts: np.ndarray, positives: np.ndarray) -> float:
    """Returns the share of the rarer label in groups of rows that have no other; see `Signal`."""
    of_label = positives if 2 * positives.sum() <= counts.sum() else counts - positives
    alone = (of_label == counts) & (counts >= _SURE_ROWS)
    return float(of_label[alone].sum() / max(of_label.sum(), 1))


def _explained(counts: np.ndarray, positives: np.ndarray, share: float) -> float:
    """Returns the share of variance between groups, less that which chance would have."""
    apart = ((positives - counts * share) ** 2 / counts).sum() / (share * (1 - share))
    return float((apart - (len(counts) - 1)) / counts.sum())


class Moments:
    """Number, mean, deviation and range of values."""

    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, 0.0, 0.0
        self.least, self.most = np.inf, -np.inf
        self.whole = True

    def add(self, values: np.ndarray, counts: np.ndarray) -> None:
        """Adds values, float64 and finite, by how often they occur."""
        if not len(values):
            return
        count = int(counts.sum())
        with np.errstate(over="ignore", invalid="ignore"):  # of numbers beyond 1e154
            mean = float(np.average(values, weights=counts))
            squares = float(((values - mean) ** 2 * counts).sum())
            total, apart = self.count + count, mean - self.mean
            self._squares += squares + np.float64(apart) ** 2 * self.count * count / total
            self.mean += apart * count / total
        self.count = total
        self.least = min(self.least, float(values.min()))
        self.most = max(self.most, float(values.max()))
        self.whole = self.whole and bool((values == np.floor(values)).all())

    @property
    def deviation(self) -> float:
        """Returns the standard deviation."""
        return float(np.sqrt(self._squares / self.count)) if self.count else 0.0
