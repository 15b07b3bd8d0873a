"""Statistics for the report, counted while rows are transformed, in memory of fixed size."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.clicks.bags import Jagged
from dlrm.data.transform.transform import Transform, Transformed

_SHIFT = 4  # low bits of a float16 that a bin ignores: bins are 0.8 % wide
_SIGN = np.uint16(1 << 15)
_LARGEST_HALF = 65504
NUMBER_BINS = 1 << (16 - _SHIFT)
ID_BINS = 33  # 0 for no id, then one per number of binary digits, the last for hash buckets
HASH_BUCKETS = ID_BINS - 1


QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_SHARE_FLOOR = 1e-4  # share assumed for a bin that is empty on one side of a comparison
_TRAIN = layout.SPLITS[0]
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
        for i, (column, own_id) in enumerate(zip(rows.ids, own_ids, strict=True)):
            absent = int(np.count_nonzero(missing[num_numerical + i]))
            if isinstance(column, Jagged):
                assert cut is not None
                in_bins = np.bincount(length_bins(column.lengths), minlength=NUMBER_BINS)
                self.lengths[lists] += in_bins
                self.lists[lists] += [len(column.values), int(np.count_nonzero(cut[lists]))]
                column, absent, lists = column.values, 0, lists + 1
            digits = np.frexp(column.astype(np.float32 if column.itemsize < 4 else np.float64))[1]
            digits[column > own_id] = HASH_BUCKETS
            counts = np.bincount(digits, minlength=ID_BINS)
            counts[0] -= absent
            self.ids[i] += counts

    def __add__(self, other: "Statistics") -> "Statistics":
        return Statistics(*(a + b for a, b in zip(self._arrays(), other._arrays(), strict=True)))

    def _arrays(self) -> tuple[np.ndarray, ...]:
        return self.totals, self.missing, self.numbers, self.ids, self.lengths, self.lists

    @staticmethod
    def to_bytes(by_name: dict[str, "Statistics"]) -> bytes:
        """Returns counts, by name, in NumPy's compressed form, since most bins are empty."""
        arrays: dict[str, Any] = {
            f"{name}/{i}": array
            for name, counts in by_name.items()
            for i, array in enumerate(counts._arrays())
        }
        content = BytesIO()
        np.savez_compressed(content, **arrays)
        return content.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> dict[str, "Statistics"]:
        """Reads what `to_bytes` returns; nothing of no bytes."""
        if not content:
            return {}
        with np.load(BytesIO(content), allow_pickle=False) as arrays:
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


Histogram = Callable[[Statistics], np.ndarray]


@dataclass
class Counted:
    """Counts of the rows of a dataset.

    Attributes:
        num_numerical, num_categorical, num_lists: fields of a row; list fields are categorical.
        splits: counts of each split, by its name.
        slices: counts of each part of the rows that is compared with the training rows, such as a
            day.
    """

    num_numerical: int
    num_categorical: int
    num_lists: int = 0
    splits: dict[str, Statistics] = field(default_factory=dict)
    slices: dict[Any, Statistics] = field(default_factory=dict)

    def add(self, kind: dict[Any, Statistics], name: Any, part: Statistics) -> None:
        """Adds counts to those of a split or a slice."""
        kind[name] = kind[name] + part if name in kind else part

    def split(self, name: str) -> Statistics:
        """Returns the counts of a split, which may have no rows."""
        shape = self.num_numerical, self.num_categorical, self.num_lists
        return self.splits.get(name) or Statistics.empty(*shape)

    @property
    def train(self) -> Statistics:
        """Returns the counts of the training rows."""
        return self.split(_TRAIN)

    def missing(self, column: int, names: Sequence[str]) -> dict[str, float | None]:
        """Returns the share of rows without a value in a column, numerical ones first."""
        parts = {name: self.split(name) for name in names}
        return {name: share(part.missing[column], part.totals[0]) for name, part in parts.items()}

    def without_id(self, table: int, names: Sequence[str]) -> dict[str, float | None]:
        """Returns the share of values with id 0 among those that are not missing."""
        ids = {name: self.split(name).ids[table] for name in names}
        return {name: share(counts[0], counts.sum()) for name, counts in ids.items()}

    def drift(self, part: Statistics, histogram: Histogram) -> float:
        """Returns the population stability index of some rows against the training rows.

        It is the sum of (p - q) ln(p / q) over bins, with p and q their shares of both.
        """
        p, q = _shares(histogram(part)), _shares(histogram(self.train))
        return round(float(((p - q) * np.log(p / q)).sum()), 4)

    def tenths(self, i: int) -> Histogram:
        """Returns a function that counts rows by tenths of the training rows, and missing ones."""
        cumulated = np.cumsum(self.train.numbers[i])
        edges = np.searchsorted(cumulated, cumulated[-1] * np.arange(1, 10) / 10) + 1
        begins = np.r_[0, np.unique(edges)]
        return lambda part: np.r_[
            part.missing[i], np.add.reduceat(np.append(part.numbers[i], 0), begins)
        ]

    def id_groups(self, table: int) -> Histogram:
        """Returns a function that counts rows by the digits of their ids, and missing ones."""
        column = self.num_numerical + table
        return lambda part: np.r_[part.missing[column], part.ids[table]]

    def quantile_bins(self, i: int) -> np.ndarray | None:
        """Returns the bins of a numerical field's `QUANTILES` in training rows."""
        return _quantile_bins(self.train.numbers[i])

    def lists(self, i: int, names: Sequence[str]) -> dict[str, Any]:
        """Describes the lists of a list field: lengths in training rows, and shares in splits."""
        parts, train = {name: self.split(name) for name in names}, self.train
        lengths: dict[str, Any] = dict.fromkeys(map(str, QUANTILES))
        if (bins := _quantile_bins(train.lengths[i])) is not None:
            quantiles = np.rint(number_of_bin(bins)).astype(int).tolist()
            lengths = dict(zip(lengths, quantiles, strict=True))
        empty = int(length_bins(np.zeros(1, int))[0])
        return {
            "mean_length": share(train.lists[i, 0], train.totals[0]),
            "length_quantiles": lengths,
            "empty": {n: share(p.lengths[i, empty], p.totals[0]) for n, p in parts.items()},
            "cut": {n: share(part.lists[i, 1], part.totals[0]) for n, part in parts.items()},
        }


def _quantile_bins(histogram: np.ndarray) -> np.ndarray | None:
    if not histogram.sum():
        return None
    places = np.searchsorted(
        np.cumsum(histogram), np.array(QUANTILES) * histogram.sum(), side="left"
    )
    return np.minimum(places, len(histogram) - 1)


def share(part: Any, whole: Any) -> float | None:
    """Returns a share with six digits; None if the whole is 0."""
    return round(float(part) / float(whole), 6) if whole else None


def _shares(histogram: np.ndarray) -> np.ndarray:
    return np.maximum(histogram / max(histogram.sum(), 1), _SHARE_FLOOR)
