"""Statistics for the report, counted while rows are transformed, in memory of fixed size."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import NamedTuple

import numpy as np

from dlrm.data import layout
from dlrm.data.bags import Jagged
from dlrm.data.transform.transform import Transformed

_SHIFT = 4  # low bits of a float16 that a bin ignores: bins are 0.8 % wide
_SIGN = np.uint16(1 << 15)
_LARGEST_HALF = 65504
NUMBER_BINS = 1 << (16 - _SHIFT)
_PLACES = np.arange(1 << 16, dtype=np.uint16)  # of float16s in their order
_HALVES = np.where(_PLACES & _SIGN, _PLACES ^ _SIGN, ~_PLACES).view(np.float16).astype(np.float64)
_LEAST, _GREATEST = _HALVES[:: 1 << _SHIFT], _HALVES[(1 << _SHIFT) - 1 :: 1 << _SHIFT]  # of bins
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
    def from_times(cls, begin: int, end: int, most: int) -> "Periods":
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
        periods, begins = np.unique(numbers[order], return_index=True)
        for number, rows in zip(periods.tolist(), np.split(order, begins[1:]), strict=True):
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
        shapes = [(3,), (num_numerical + num_categorical,), (num_numerical, NUMBER_BINS)]
        shapes += [(num_categorical, ID_BINS), (num_lists, NUMBER_BINS), (num_lists, 2)]
        return cls(*(np.zeros(shape, np.int64) for shape in shapes))

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
        self.totals += [len(labels), np.count_nonzero(labels), rows.clamped]
        self.missing += np.count_nonzero(missing, axis=1)
        num_numerical = rows.numerical.shape[1]
        bins = _bins(rows.numerical.astype(layout.NUMERICAL_DTYPE, copy=False))
        for i, counts in enumerate(self.numbers):
            counts += np.bincount(bins[:, i], minlength=NUMBER_BINS)
            if absent := np.count_nonzero(missing[i]):  # all of them have the same value
                counts[bins[missing[i].argmax(), i]] -= absent
        lists = 0
        for i, (column, own_id) in enumerate(zip(rows.ids, own_ids, strict=True)):
            absent = np.count_nonzero(missing[num_numerical + i])
            if isinstance(column, Jagged):
                assert cut is not None
                bins_of = length_bins(column.lengths)
                self.lengths[lists] += np.bincount(bins_of, minlength=NUMBER_BINS)
                self.lists[lists] += [len(column.values), np.count_nonzero(cut[lists])]
                column, absent, lists = column.values, 0, lists + 1
            digits = np.frexp(column.astype(np.float32 if column.itemsize < 4 else np.float64))[1]
            digits[column > own_id] = HASH_BUCKETS
            self.ids[i] += np.bincount(digits, minlength=ID_BINS)
            self.ids[i, 0] -= absent

    def __add__(self, other: "Statistics") -> "Statistics":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Statistics(*(own + more for own, more in pairs))

    @staticmethod
    def to_bytes(by_name: dict[str, "Statistics"]) -> bytes:
        """Returns counts, by name, in NumPy's compressed form, since most bins are empty."""
        named = {f"{n}/{kind}": a for n, one in by_name.items() for kind, a in vars(one).items()}
        np.savez_compressed(content := BytesIO(), **named)
        return content.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> dict[str, "Statistics"]:
        """Reads what `to_bytes` returns; nothing of no bytes."""
        found: dict[str, dict[str, np.ndarray]] = {}
        if content:
            with np.load(BytesIO(content), allow_pickle=False) as arrays:
                for (name, kind), array in ((k.split("/"), arrays[k]) for k in arrays):
                    found.setdefault(name, {})[kind] = array
        return {name: cls(**of_name) for name, of_name in found.items()}


def _bins(numbers: np.ndarray) -> np.ndarray:
    """Returns the bins of float16 numbers, which ascend with them."""
    bits = numbers.view(np.uint16)
    return np.where(bits & _SIGN, ~bits, bits | _SIGN) >> _SHIFT


def length_bins(lengths: np.ndarray) -> np.ndarray:
    """Returns the bins of lengths, one for each up to 128."""
    return _bins(np.minimum(lengths.astype(np.int64), _LARGEST_HALF).astype(np.float16))


def number_of_bin(index: np.ndarray) -> np.ndarray:
    """Returns the middle of bins of numbers."""
    return (_LEAST[index] + _GREATEST[index]) / 2


def ends_of_bin(index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ends between which numbers are rounded to float16s of a bin."""
    least, greatest = _LEAST[index], _GREATEST[index]
    lower = (_GREATEST[index - 1] + least) / 2
    upper = (greatest + _LEAST[(index + 1) % NUMBER_BINS]) / 2
    return np.where(np.isfinite(lower), lower, least), np.where(np.isfinite(upper), upper, greatest)
