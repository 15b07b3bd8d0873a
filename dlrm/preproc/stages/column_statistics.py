"""Statistics for the report, counted while rows are transformed, in memory of fixed size."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.clicks.bags import Bags
from dlrm.data.transform.transform import Transform, Transformed
from dlrm.files import staged_file

_SHIFT = 4  # low bits of a float16 that a bin ignores: bins are 0.8 % wide
_SIGN = np.uint16(1 << 15)
_LARGEST_HALF = 65504
NUMBER_BINS = 1 << (16 - _SHIFT)
ID_BINS = 33  # 0 for no id, then one per number of binary digits, the last for hash buckets
HASH_BUCKETS = ID_BINS - 1


_DAY = 86_400_000_000  # microseconds


class Periods(NamedTuple):
    """Spans of equally many days, in UTC, that are counted separately.

    Attributes:
        first: the first day of the first period, counted from 1970-01-01.
        days: length of each period.
    """

    first: int
    days: int

    @classmethod
    def of(cls, begin: int, end: int, most: int) -> "Periods":
        """Divides the time from `begin` to `end`, in microseconds, into `most` periods or fewer.

        They are days, or whole weeks if there are more days.
        """
        first, last = begin // _DAY, end // _DAY
        days = -(-(last - first + 1) // most)
        return cls(first, days if days == 1 else -(-days // 7) * 7)

    def name(self, number: int) -> str:
        """Returns the first day of a period in ISO 8601."""
        return str(np.datetime64(self.first + number * self.days, "D"))

    def divide(self, times: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the name of each period, and the indices of the times in it."""
        numbers = (times // _DAY - self.first) // self.days
        order = np.argsort(numbers, kind="stable")
        found, begins = np.unique(numbers[order], return_index=True)
        for number, rows in zip(found.tolist(), np.split(order, begins[1:]), strict=True):
            yield self.name(number), rows


@dataclass
class Statistics:
    """Counts over some rows.

    Attributes:
        totals: rows, clicks, values clamped to 1.
        missing: `[columns]`, fields without a value.
        numbers: `[num_numerical, NUMBER_BINS]`, of the transformed fields with a value.
        ids: `[num_categorical, ID_BINS]`, of the fields with a value; for lists, of all values.
        lengths: `[lists, NUMBER_BINS]`, of the lists of each list field.
        lists: `[lists, 2]`, number of their ids, and number of truncated lists.
    """

    totals: np.ndarray
    missing: np.ndarray
    numbers: np.ndarray
    ids: np.ndarray
    lengths: np.ndarray
    lists: np.ndarray

    @classmethod
    def empty(cls, num_numerical: int, num_categorical: int, num_lists: int = 0) -> "Statistics":
        """Returns counts of no rows."""
        return cls(
            np.zeros(3, np.int64),
            np.zeros(num_numerical + num_categorical, np.int64),
            np.zeros((num_numerical, NUMBER_BINS), np.int64),
            np.zeros((num_categorical, ID_BINS), np.int64),
            np.zeros((num_lists, NUMBER_BINS), np.int64),
            np.zeros((num_lists, 2), np.int64),
        )

    @classmethod
    def empty_by_name(cls, transform: Transform) -> dict[str, "Statistics"]:
        """Returns counts of no rows for any name."""
        shape = transform.num_numerical, transform.num_categorical, len(transform.lists)
        return defaultdict(lambda: cls.empty(*shape))

    def add(
        self,
        labels: np.ndarray,
        rows: Transformed,
        missing: np.ndarray,
        own_ids: Sequence[int],
        cut: np.ndarray | None = None,
    ) -> None:
        """Counts more rows.

        Args:
            labels: bool `[rows]`.
            rows: their inputs of the model.
            missing: mask of fields without a value, bool `[columns, rows]`.
            own_ids: for each table, the greatest id that is not that of a hash bucket.
            cut: mask of truncated lists, bool `[lists, rows]`; None without list fields.
        """
        self.totals += [len(labels), int(np.count_nonzero(labels)), rows.clamped]
        self.missing += np.count_nonzero(missing, axis=1)
        num_numerical = rows.numerical.shape[1]
        bins = _bins(rows.numerical.astype(layout.NUMERICAL_DTYPE, copy=False))
        for i in range(num_numerical):
            counts = np.bincount(bins[:, i], minlength=NUMBER_BINS)
            absent = int(np.count_nonzero(missing[i]))
            if absent:  # all of them have the same value
                counts[bins[missing[i].argmax(), i]] -= absent
            self.numbers[i] += counts
        lists = 0
        for i, (column, own) in enumerate(zip(rows.ids, own_ids, strict=True)):
            absent = int(np.count_nonzero(missing[num_numerical + i]))
            if isinstance(column, Bags):
                assert cut is not None
                in_bins = np.bincount(length_bins(column.lengths), minlength=NUMBER_BINS)
                self.lengths[lists] += in_bins
                self.lists[lists] += [len(column.values), int(np.count_nonzero(cut[lists]))]
                column, absent, lists = column.values, 0, lists + 1
            digits = np.frexp(column.astype(np.float32 if column.itemsize < 4 else np.float64))[1]
            digits[column > own] = HASH_BUCKETS
            counts = np.bincount(digits, minlength=ID_BINS)
            counts[0] -= absent
            self.ids[i] += counts

    def __add__(self, other: "Statistics") -> "Statistics":
        return Statistics(*(a + b for a, b in zip(self._arrays(), other._arrays(), strict=True)))

    def _arrays(self) -> tuple[np.ndarray, ...]:
        return self.totals, self.missing, self.numbers, self.ids, self.lengths, self.lists

    @staticmethod
    def save(path: Path, by_name: dict[str, "Statistics"]) -> None:
        """Writes counts to a file, by name."""
        arrays: dict[str, Any] = {
            f"{name}/{i}": array
            for name, counts in by_name.items()
            for i, array in enumerate(counts._arrays())
        }
        with staged_file(path) as partial, open(partial, "wb") as file:
            np.savez_compressed(file, **arrays)  # most bins are empty

    @classmethod
    def load(cls, path: Path) -> dict[str, "Statistics"]:
        """Reads what `save` wrote."""
        with np.load(path, allow_pickle=False) as arrays:
            names = dict.fromkeys(name.partition("/")[0] for name in arrays)
            return {name: cls(*(arrays[f"{name}/{i}"] for i in range(6))) for name in names}


def _bins(numbers: np.ndarray) -> np.ndarray:
    """Returns the bins of float16 numbers, which ascend with them."""
    bits = numbers.view(np.uint16)
    return np.where(bits & _SIGN, ~bits, bits | _SIGN) >> _SHIFT


def length_bins(lengths: np.ndarray) -> np.ndarray:
    """Returns the bins of lengths, one for each up to 128."""
    return _bins(np.minimum(lengths.astype(np.int64), _LARGEST_HALF).astype(np.float16))


def number_of_bin(index: np.ndarray) -> np.ndarray:
    """Returns the middle of bins of numbers."""
    least, greatest = _numbers_of_bin(index)
    return (least + greatest) / 2


def ends_of_bin(index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ends between which numbers are rounded to float16s of a bin."""
    least, greatest = _numbers_of_bin(index)
    below, above = _numbers_of_bin(index - 1)[1], _numbers_of_bin(index + 1)[0]
    ends = (below + least) / 2, (greatest + above) / 2
    finite = [np.isfinite(end) for end in ends]
    return np.where(finite[0], ends[0], least), np.where(finite[1], ends[1], greatest)


def _numbers_of_bin(index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the least and the greatest float16 of bins."""
    first = (np.asarray(index) << _SHIFT).astype(np.uint16)
    ends = []
    for bits in (first, first + np.uint16((1 << _SHIFT) - 1)):
        number = np.where(bits & _SIGN, bits ^ _SIGN, ~bits).view(np.float16)
        ends.append(number.astype(np.float64))
    return ends[0], ends[1]
