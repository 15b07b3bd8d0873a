"""Candidates: values below their frequency limit, whose counts are kept for later days.

A count is in units of 1/256. It halves with every half-life since the last day with the value, and
is computed anew only on a day that has it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlrm.data.transform.dictionaries import Counts, bytes_of_texts, merge_counts, text_array
from dlrm.data.transform.lookup import spread, unspread
from dlrm.files import staged_file, write_array
from dlrm.mapped_files import map_npy
from dlrm.preproc.stages.division import splitmix64

UNIT = 256
_VALUE_BYTES = 8 + 8 + 4  # of a hash, a count and a day
_END_BYTES = 8  # of a text
_CHANCE_SHIFT = 11  # so that a chance is a whole number of 2**-53
_PARTS = 1 << 32  # of a factor, so that it has the same bits everywhere


class Admission(NamedTuple):
    """The values that get ids on a day: frequent ones, and some of the others by chance.

    Attributes:
        limit: minimum count of a frequent value.
        probability: chance of another one.
        seed: number from which, and from a value, its chance follows; another one for each field
            and day.
    """

    limit: int
    probability: float
    seed: int

    def of(self, total: Counts) -> np.ndarray:
        """Returns the mask of the values that get ids, given counts in units of 1/256."""
        frequent = total.counts >= self.limit * UNIT
        if not self.probability:
            return frequent
        drawn = splitmix64(self.seed, total.keys) >> np.uint64(_CHANCE_SHIFT)
        return frequent | (drawn < round(self.probability * (1 << 64 - _CHANCE_SHIFT)))


@dataclass(frozen=True)
class Candidates:
    """Values of a dictionary without an id, in the order of their hashes.

    Attributes:
        hashes: `spread` of the keys, ascending.
        counts: int64, in units of 1/256, as of the last day.
        days: int32, the last day with the value.
        texts: an Arrow array; None for numbers.
    """

    hashes: np.ndarray
    counts: np.ndarray
    days: np.ndarray
    texts: Any = None

    @classmethod
    def none(cls, texts: bool) -> "Candidates":
        """Returns no candidates."""
        none = None
        if texts:
            import pyarrow as pa

            none = pa.array([], pa.large_binary())
        return cls(np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int32), none)

    def __len__(self) -> int:
        return len(self.hashes)

    def take(self, chosen: np.ndarray) -> "Candidates":
        """Returns those of a mask or of indices."""
        places = np.flatnonzero(chosen) if chosen.dtype == bool else chosen
        texts = None if self.texts is None else self.texts.take(places)
        return Candidates(self.hashes[places], self.counts[places], self.days[places], texts)

    def on(self, day: int, half_life: float | None) -> np.ndarray:
        """Returns the counts on a later day."""
        if half_life is None or not len(self):
            return self.counts
        gaps, places = np.unique(day - self.days, return_inverse=True)
        factors = [round(2.0 ** (-gap / half_life) * _PARTS) / _PARTS for gap in gaps.tolist()]
        return np.floor(self.counts * np.array(factors)[places]).astype(np.int64)

    def divide(
        self, counts: Counts, admission: Admission, day: int, half_life: float | None
    ) -> tuple[Counts, "Candidates"]:
        """Adds a day's counts of values without an id.

        Returns:
            The values that get ids, with counts in units of 1/256, and the other candidates.
        """
        touched = np.isin(self.hashes, spread(counts.keys))
        before, rest = self.take(touched), self.take(~touched)
        keys = unspread(before.hashes)
        own = counts._replace(counts=counts.counts * UNIT)
        total = merge_counts([own, Counts(keys, before.on(day, half_life), before.texts)])
        enough = admission.of(total)
        made, left = total.take(enough), total.take(~enough)
        days = np.full(len(left.keys), day, np.int32)
        return made, joined([rest, Candidates(spread(left.keys), left.counts, days, left.texts)])

    def kept(self, room: int, day: int, half_life: float | None) -> "Candidates":
        """Returns those that fit in `room` bytes by `bytes_of`, of the greatest counts on a day.

        Then the latest come first, and then the order is that of ids, by key or by text.
        """
        sizes = np.full(len(self), _VALUE_BYTES, np.int64)
        if self.texts is not None:
            import pyarrow.compute as pc

            sizes += _END_BYTES + pc.binary_length(self.texts).to_numpy(zero_copy_only=False)
        if sizes.sum() <= room:
            return self
        ranks = -self.days, -self.on(day, half_life)
        if self.texts is None:
            order = np.lexsort((unspread(self.hashes), *ranks))
        else:
            import pyarrow as pa

            table = pa.table({"count": ranks[1], "day": ranks[0], "text": self.texts})
            names = [(name, "ascending") for name in table.column_names]
            order = pc.sort_indices(table, names).to_numpy()
        fit = np.searchsorted(np.cumsum(sizes[order]), room, side="right")
        return self.take(np.sort(order[:fit]))

    def save(self, directory: Path, index: int) -> None:
        """Writes the files of a dictionary's candidates."""
        arrays = {"hashes": self.hashes, "counts": self.counts, "days": self.days}
        if self.texts is not None:
            ends, content = bytes_of_texts(self.texts)
            arrays |= {"texts": content, "ends": ends}
        for name, array in arrays.items():
            with staged_file(_path(directory, name, index), one_of_many=True) as partial:
                write_array(partial, array)

    @classmethod
    def load(
        cls, directory: Path, index: int, texts: bool, first: int = 0, last: int = 1 << 64
    ) -> "Candidates":
        """Reads candidates whose hashes are within `[first, last)`; none if there are no files."""
        if not _path(directory, "hashes", index).exists():
            return cls.none(texts)
        hashes, counts, days = (
            map_npy(_path(directory, name, index)) for name in ("hashes", "counts", "days")
        )
        begin, end = int(np.searchsorted(hashes, np.uint64(first))), len(hashes)
        if last < 1 << 64:
            end = int(np.searchsorted(hashes, np.uint64(last)))
        chosen = None
        if texts:
            ends, content = (map_npy(_path(directory, name, index)) for name in ("ends", "texts"))
            places = np.r_[ends[begin - 1] if begin else 0, ends[begin:end]].astype(np.int64)
            content = np.array(content[places[0] : places[-1]])
            chosen = text_array(places - places[0], content)
        own = slice(begin, end)
        return cls(np.array(hashes[own]), np.array(counts[own]), np.array(days[own]), chosen)


def _path(directory: Path, name: str, index: int) -> Path:
    return directory / f"candidate_{name}_{index}.npy"


def bytes_of(values: int, text_bytes: int | None) -> int:
    """Returns the bytes of candidates; of numbers, `text_bytes` is None."""
    return values * _VALUE_BYTES + (0 if text_bytes is None else values * _END_BYTES + text_bytes)


def joined(parts: list[Candidates]) -> Candidates:
    """Returns candidates of several parts, in the order of their hashes."""
    hashes = np.concatenate([part.hashes for part in parts])
    counts = np.concatenate([part.counts for part in parts])
    days = np.concatenate([part.days for part in parts])
    order = np.argsort(hashes)
    texts = None
    if parts[0].texts is not None:
        import pyarrow as pa

        texts = pa.concat_arrays([part.texts for part in parts]).take(pa.array(order))
    return Candidates(hashes[order], counts[order], days[order], texts)


def quotas(needs: list[int], room: int) -> list[int]:
    """Divides room among dictionaries: none gets more than it needs, and the others equally much.

    What is left after a division by whole numbers goes to the first.
    """
    given, left = [0] * len(needs), room
    order = sorted(range(len(needs)), key=lambda i: (needs[i], i))
    for done, i in enumerate(order):
        given[i] = min(needs[i], left // (len(needs) - done))
        left -= given[i]
    return given
