"""Division of rows into splits by chance, by time, by a column or by file, and its hashes."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dlrm.data import layout
from dlrm.data.schema.schema import Schema
from dlrm.data.sources.columns import TextColumn, hash_texts
from dlrm.data.sources.row_error import LEAVES_OUT, RowError, shown_text
from dlrm.data.transform.rows import FieldRows
from dlrm.preproc.options import SplitConfig
from dlrm.preproc.source import Part, Read, Rejected, Source, Target

if TYPE_CHECKING:
    from dlrm.preproc.fitting import Counted

TRAIN, TEST, VALIDATION = range(3)  # indices in layout.SPLITS
DROPPED = -1
# Added to the seed, so that choices are independent.
_DIVIDE, _KEEP = 0x5EED_0001, 0x5EED_0002
_STEP = np.uint64(0x9E3779B97F4A7C15)
_WHOLE = 1 << 64
_ROWS_AT_ONCE = 1 << 15  # whose hashes stay in the cache


class Splitter:
    """Assigns rows to splits.

    Args:
        num_rows: number of rows in the files.
        file_splits: for each file, the split of all its rows; empty if files do not determine it.
    """

    def __init__(
        self, division: SplitConfig, schema: Schema, num_rows: int, file_splits: Sequence[int] = ()
    ) -> None:
        self.division, self._file_splits = division, list(file_splits)
        self._times = division.times(schema)
        fractions = (division.test_fraction, division.validation_fraction)
        self._limits = (0, 0)
        if any(fractions):
            ends = fractions[0], sum(fractions)
            if division.split_key:
                self._limits = (int(ends[0] * _WHOLE), int(ends[1] * _WHOLE))
            else:
                seed = division.seed + _DIVIDE
                counts = [round(num_rows * fraction) for fraction in fractions]
                first = smallest_hashes(seed, num_rows, counts[0])
                last = smallest_hashes(seed, num_rows, sum(counts)) if counts[1] else first
                self._limits = (first, last)

    @property
    def columns(self) -> list[str]:
        """Returns the columns that it reads besides those of the schema."""
        named = (self.division.split_key, self.division.split_column)
        return [name for name in named if name]

    @property
    def splits(self) -> list[int]:
        """Returns the splits of the dataset, which must have rows."""
        division = self.division
        splits = {TRAIN, *self._file_splits}
        if division.test_fraction or division.test_from:
            splits.add(TEST)
        if division.validation_fraction or division.validation_from:
            splits.add(VALIDATION)
        return sorted(splits | ({TEST} if division.split_column else set()))

    def __call__(self, read: Read, file: int) -> tuple[np.ndarray, list[RowError]]:
        """Returns the split of each row, int8 `[rows]`, and rows whose split is unknown."""
        rows, numbers = read.rows, read.numbers
        splits: np.ndarray = np.zeros(len(numbers), np.int8)
        bad: list[RowError] = []
        if self._file_splits:
            splits[:] = self._file_splits[file]
        elif self._times is not None:
            times = rows.extra["time"]
            splits += (times >= self._times[0]).astype(np.int8)
            splits += (times >= self._times[1]).astype(np.int8)
        elif self.division.split_column:
            splits, bad = _named_splits(self.division.split_column, read)
        elif self._limits[1]:
            hashes = self._hashes(read)
            below = [
                np.ones(len(hashes), bool) if limit >= _WHOLE else hashes < np.uint64(limit)
                for limit in self._limits
            ]
            splits = np.where(below[0], TEST, np.where(below[1], VALIDATION, TRAIN))
        return self._thinned(splits.astype(np.int8), rows, numbers), bad

    def _hashes(self, read: Read) -> np.ndarray:
        seed, key = self.division.seed + _DIVIDE, self.division.split_key
        if key is None:
            return splitmix64(seed, read.numbers)
        texts, codes = read.texts_of(key)
        column = TextColumn.from_bytes([text.encode() for text in texts])
        hashes = np.append(hash_texts(column), np.uint64(0))  # missing values also stay together
        return splitmix64(seed, hashes)[codes]

    def _thinned(self, splits: np.ndarray, rows: FieldRows, numbers: np.ndarray) -> np.ndarray:
        if self.division.keep_negatives == 1:
            return splits
        hashes = splitmix64(self.division.seed + _KEEP, numbers)
        kept = hashes < np.uint64(int(self.division.keep_negatives * _WHOLE))
        dropped = (splits == TRAIN) & ~kept & (rows.labels == 0)
        return np.where(dropped, np.int8(DROPPED), splits)


class Ranges:
    """Assigns rows to splits by their numbers; a split may have no rows.

    Args:
        edges: ascending numbers of rows, the first one and that after the last included.
        splits: splits of the rows between each two edges.
    """

    columns: list[str] = []

    def __init__(self, edges: Sequence[int], splits: Sequence[int]) -> None:
        self.edges, self.splits = list(edges), list(splits)

    def __call__(self, read: Read, file: int) -> tuple[np.ndarray, list[RowError]]:
        """Returns the split of each row, as `Splitter` does."""
        indices = np.searchsorted(self.edges[1:-1], read.numbers, side="right")
        return np.array(self.splits, np.int8)[indices], []

    def count(self, parts: Sequence[Part]) -> np.ndarray:
        """Returns the number of rows of each part in each split, int64 `[parts, 3]`."""
        counts = np.zeros((len(parts), 3), np.int64)
        begins = np.array([part.first_row for part in parts])
        ends = begins + [part.rows for part in parts]
        for begin, end, split in zip(self.edges, self.edges[1:], self.splits, strict=False):
            if split != DROPPED:
                counts[:, split] += np.maximum(np.minimum(ends, end) - np.maximum(begins, begin), 0)
        return counts


class SplitRows(NamedTuple):
    """Rows that are divided into splits.

    Attributes:
        source: reads the parts.
        splitter: assigns rows to splits.
        parts: the parts, with the checksums of the first reading.
        rows: rows of each part in each split, int `[parts, 3]`.
        ids: ids of each part, split and list field, int `[parts, 3, lists]`.
        counted: the result of the first reading.
    """

    source: Source
    splitter: Splitter | Ranges
    parts: Sequence[Any]
    rows: np.ndarray
    ids: np.ndarray
    counted: "Counted"

    @property
    def splits(self) -> list[int]:
        """Returns the splits of the dataset: train, test, and those wanted or with rows."""
        return sorted({0, 1, *self.splitter.splits, *np.flatnonzero(self.rows.sum(0)).tolist()})

    def target(self, split: int, shuffled: bool) -> Target:
        """Returns a split as a part of the dataset."""
        num_ids = tuple(self.ids[:, split].sum(axis=0).tolist())
        rows = int(self.rows[:, split].sum())
        return Target(layout.SPLITS[split], rows, split, shuffled, num_ids=num_ids)


def readable(
    source: Source,
    splitter: Splitter | Ranges,
    part: Part,
    rejected: list[Rejected] | None,
    facts: dict[str, Any] | None = None,
    most: float = math.inf,
) -> Iterator[tuple[Read, np.ndarray]]:
    """Yields the rows of a part that can be read, with their splits.

    Args:
        source, part, facts: see `Source.read`.
        splitter: assigns rows to splits.
        rejected: receives the other rows, which are left out; None raises the first.
        most: number of other rows that all parts may have.

    Raises:
        RowError: a row cannot be read.
        ValueError: more rows cannot be read.
    """
    for read in source.read(part, rejected, facts):
        try:
            splits, unknown = splitter(read, part.file)
        except ValueError as error:
            raise ValueError(f"{part.source}: {error}") from None
        if not read.bad and not unknown:
            yield read, splits
            continue
        first = {problem.row: problem for problem in reversed([*read.bad, *unknown])}
        begin = int(read.numbers[0]) - part.first_row
        bad = [first[row] for row in sorted(first)]
        if rejected is None:
            bad[0].where = part.where(begin + bad[0].row)
            bad[0].problem += LEAVES_OUT
            raise bad[0]
        if len(rejected) + len(bad) > most:
            row, reason = rejected[0][:2] if rejected else (begin + bad[0].row, bad[0].reason)
            raise ValueError(
                f"more than {most:.0f} rows cannot be read, a share above --max_bad_lines; the "
                f"first of a part: {part.where(row)}, {reason}"
            )
        rejected += [Rejected(begin + e.row, e.reason, read.text(e.row)) for e in bad]
        good = np.ones(len(read.numbers), bool)
        good[list(first)] = False
        kept = np.flatnonzero(good)
        yield read.take(kept), splits[kept]  # even if none is left: their labels count


def _named_splits(name: str, read: Read) -> tuple[np.ndarray, list[RowError]]:
    texts, codes = read.texts_of(name)
    index_of = {split: index for index, split in enumerate(layout.SPLITS)}
    known = np.array([index_of.get(text.lower(), DROPPED) for text in texts] + [DROPPED], np.int8)
    splits = known[codes]
    bad = [
        RowError(row, f"expected train, test or validation, got {_shown(texts, codes[row])}", name)
        for row in np.flatnonzero(splits == DROPPED).tolist()
    ]
    return splits, bad


def _shown(texts: Sequence[str], code: int) -> str:
    return "no value" if code < 0 else shown_text(texts[code])


def smallest_hashes(seed: int, num_rows: int, count: int) -> int:
    """Returns the limit below which exactly the wanted number of rows have their hash.

    Hashes of different numbers differ, so there is such a limit. They are spread evenly, so the
    search covers some standard deviations around its expected value, then a wider range.
    """
    if count <= 0:
        return 0
    if count >= num_rows:
        return _WHOLE
    expected = _WHOLE * count // num_rows
    deviation = _WHOLE * math.isqrt(count * (num_rows - count) // num_rows + 1) // num_rows
    reach = 8
    while True:
        lowest, highest = (expected + side * reach * deviation for side in (-1, 1))
        first, last = np.uint64(max(lowest, 0)), np.uint64(min(highest, _WHOLE - 1))
        below, near = 0, []
        for begin in range(0, num_rows, _ROWS_AT_ONCE):
            hashes = splitmix64(seed, np.arange(begin, min(begin + _ROWS_AT_ONCE, num_rows)))
            below += int(np.count_nonzero(hashes < first))
            near.append(hashes[(first <= hashes) & (hashes <= last)])
        nearest = np.sort(np.concatenate(near))
        if 0 < count - below <= len(nearest):
            return int(nearest[count - below - 1]) + 1
        reach *= reach


def splitmix64(seed: int, counters: np.ndarray) -> np.ndarray:
    """Returns a 64-bit hash of each counter: output `counter` of the splitmix64 generator.

    With one seed, different counters have different hashes (Steele, Lea and Flood, 2014, with the
    constants of Vigna's splitmix64.c).
    """
    state = counters.astype(np.uint64)
    state += np.uint64(1)
    state *= _STEP
    state += np.uint64(seed & 0xFFFFFFFFFFFFFFFF)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state ^= state >> np.uint64(shift)
        state *= np.uint64(factor)
    state ^= state >> np.uint64(31)
    return state


def facts(division: SplitConfig) -> dict[str, Any]:
    """Returns the manifest's entries about the division of rows."""
    defaults = SplitConfig()
    return {
        name: value
        for name, value in vars(division).items()
        if value != getattr(defaults, name) or name in ("seed", "keep_negatives")
    }
