"""Statistics of columns of numbers: sums and quantiles that do not depend on order.

Sums over parts of the rows are exact, so that the same rows give the same bytes however they were
divided.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np

_LOWEST = -1130  # no float64 has a smaller exponent less its 53 bits
_ROUNDING = 8 * np.finfo(np.float64).eps  # spread of a constant column, relative to its values
_SPLITTER = float((1 << 27) + 1)  # Veltkamp's, for halves of 26 bits
_LARGEST = 1e150  # whose square is finite, and that of its inverse exact


class Fitted(NamedTuple):
    """The fitted statistics of a column of numbers.

    Attributes:
        mean, deviation: those of the training values; 0 and 1 unless the column is standardized.
        edges: ascending float64 edges of the bins; empty if none were fitted.
        shares: for each edge, the share of training values below it, plus half of those equal.
    """

    mean: float = 0.0
    deviation: float = 1.0
    edges: np.ndarray = np.empty(0)
    shares: np.ndarray = np.empty(0)


@dataclass
class Sums:
    """Exact sums of numbers and of their squares, JSON values all; adding is associative.

    Attributes:
        count, least, greatest: number and extremes of the summands.
        values, squares: exact sums, in units of 2**_LOWEST, unless numbers are too large.
    """

    count: int = 0
    least: float = float("inf")
    greatest: float = float("-inf")
    values: int = 0
    squares: int = 0

    @classmethod
    def from_values(cls, values: np.ndarray) -> "Sums":
        """Sums finite float64 numbers."""
        if not len(values):
            return cls()
        least, greatest = float(values.min()), float(values.max())
        if max(abs(least), abs(greatest)) > _LARGEST:
            return cls(len(values), least, greatest)
        squares = values * values
        halves = _SPLITTER * values
        high = halves - (halves - values)
        low = values - high
        rest = ((high * high - squares) + 2 * high * low) + low * low  # Dekker's product
        total = _exact_sum(squares) + _exact_sum(rest)
        return cls(len(values), least, greatest, _exact_sum(values), total)

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(
            self.count + other.count,
            min(self.least, other.least),
            max(self.greatest, other.greatest),
            self.values + other.values,
            self.squares + other.squares,
        )

    def scale(self) -> tuple[float, float]:
        """Returns mean and standard deviation, rounded once.

        Raises:
            OverflowError: they are beyond float64.
        """
        if not self.count:
            return 0.0, 1.0
        size = max(abs(self.least), abs(self.greatest))
        if self.greatest - self.least <= _ROUNDING * size:
            return self.least, max(size, 1.0)  # rounding errors are no deviation to divide by
        if not 1 / _LARGEST <= size <= _LARGEST:
            raise OverflowError(
                f"its standard deviation is beyond float64 (values up to {size:g}); choose "
                "the transform log, or scale the column"
            )
        unit = Fraction(2) ** _LOWEST
        mean = self.values * unit / self.count
        deviation = _square_root(self.squares * unit / self.count - mean * mean)
        return (float(mean), deviation) if deviation > 0 else (self.least, max(size, 1.0))


def _exact_sum(values: np.ndarray) -> int:
    """Returns the exact sum of finite float64 numbers in units of 2**_LOWEST."""
    mantissas, exponents = np.frexp(values)
    whole = np.ldexp(mantissas, 53).astype(np.int64)  # value = whole * 2**(exponent - 53)
    shifts = exponents.astype(np.int64) - 53 - _LOWEST
    total = 0
    for begin in range(0, len(values), 1 << 25):  # so that float64 sums of 27 bits are exact
        part = slice(begin, begin + (1 << 25))
        for bits, halves in ((27, whole[part] >> 27), (0, whole[part] & ((1 << 27) - 1))):
            sums = np.bincount(shifts[part], halves)
            total += sum(int(sums[n]) << (n + bits) for n in np.flatnonzero(sums).tolist())
    return total


def _square_root(value: Fraction) -> float:
    """Returns the square root of a fraction, of which 64 bits are exact; 0 below it."""
    numerator, denominator = max(value, Fraction(0)).as_integer_ratio()
    shift = 64 + (denominator.bit_length() - numerator.bit_length()) // 2
    scaled = (numerator << max(2 * shift, 0)) // (denominator << max(-2 * shift, 0))
    return math.ldexp(math.isqrt(scaled), -shift)


def ordered(values: np.ndarray) -> np.ndarray:
    """Returns uint64 keys of float64 numbers, in the same order; 0.0 and -0.0 have one."""
    bits = (np.asarray(values, np.float64) + 0.0).view(np.uint64)
    negative = (bits >> np.uint64(63)).astype(bool)
    return np.where(negative, ~bits, bits | np.uint64(1 << 63))


def unordered(keys: np.ndarray) -> np.ndarray:
    """Returns the float64 numbers of `ordered` keys."""
    positive = (keys >> np.uint64(63)).astype(bool)
    bits = np.where(positive, keys & np.uint64((1 << 63) - 1), ~keys)
    return bits.view(np.float64)


def bin_edges(keys: np.ndarray, counts: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Fits the edges of bins to the distinct values of a column.

    Half of the inner edges are at quantiles of the values and the others at quantiles of the
    distinct values; by the former alone, a column that is mostly 0 would have one bin.

    Args:
        keys, counts: ascending `ordered` keys of the distinct values, and their occurrences.
        bins: maximum number of bins.

    Returns:
        At most `bins + 1` edges, ascending, including the least and the greatest value, and for
        each edge the share of values below it, plus half of those equal.
    """
    if not len(keys):
        return np.empty(0), np.empty(0)
    below = np.cumsum(counts) - counts
    total = int(counts.sum())
    inner = bins - 1
    by_value = np.searchsorted(np.cumsum(counts), _quantiles(-(-inner // 2)) * total, "left")
    by_distinct = (_quantiles(inner // 2) * len(keys)).astype(np.int64)
    chosen = np.concatenate([[0], by_value, by_distinct, [len(keys) - 1]])
    chosen = np.unique(np.minimum(chosen, len(keys) - 1))
    return unordered(keys[chosen]), (below[chosen] + counts[chosen] / 2) / total


def _quantiles(count: int) -> np.ndarray:
    return np.arange(1, count + 1) / (count + 1)
