"""Lookups: the ids of a dictionary's numbers, found by a hash."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.sources import native
from dlrm.data.sources.columns import Parsed
from dlrm.mapped_files import map_file

_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # as in csrc/host/id_lookup.h
_ENTRIES_PER_PLACE = 2
_ENTRIES_AT_ONCE = 1 << 20


def spread(keys: np.ndarray) -> np.ndarray:
    """Returns evenly distributed 64-bit hashes of numbers; the mapping is one-to-one."""
    return keys.astype(np.uint64) * _HASH_FACTOR


class _Arrays(NamedTuple):
    hashes: np.ndarray
    ids: np.ndarray
    directory: np.ndarray


class IdLookup(_Arrays):
    """Ids of a dictionary's numbers, sorted by a hash of the numbers.

    Attributes:
        hashes: `spread` of the numbers, ascending.
        ids: ids of these numbers, in `layout.id_dtype` of the table.
        directory: int64 `[2**k + 1]`: the first index of hashes whose first k bits are 0, 1, ...

    Raises:
        ValueError: the sizes of the arrays do not fit together.
    """

    def __new__(cls, hashes: np.ndarray, ids: np.ndarray, directory: np.ndarray) -> "IdLookup":
        """Checks the sizes, on which the compiled code relies."""
        prefixes = directory.size - 1  # of a hash, 2**k
        power_of_2 = prefixes > 0 and not prefixes & (prefixes - 1)
        if ids.size != hashes.size or not power_of_2 or directory[-1] != hashes.size:
            raise ValueError(
                f"sizes do not fit: expected {hashes.size} ids and a directory of 2**k + 1 places "
                f"that ends with {hashes.size}, got {ids.size} and {directory.size}, which ends "
                f"with {directory[-1:]}"
            )
        return super().__new__(cls, hashes, ids, directory)

    @classmethod
    def from_dictionary(cls, dictionary: np.ndarray) -> "IdLookup":
        """Makes the lookup of a dictionary whose number k has the id 1 + k."""
        hashes = spread(np.asarray(dictionary))
        order = np.argsort(hashes)
        hashes = hashes[order]
        ids = (order + 1).astype(layout.id_dtype(len(dictionary) + 1))
        return cls(hashes, ids, lookup_directory(hashes))

    @classmethod
    def load(cls, directory: str | os.PathLike, index: int, id_dtype: np.dtype) -> "IdLookup":
        """Maps the three arrays of a column from a directory; see `paths`."""
        dtypes = (np.dtype(np.uint64), id_dtype, np.dtype(np.int64))
        return cls(
            *(
                map_file(path, dtype)
                for path, dtype in zip(cls.paths(directory, index), dtypes, strict=True)
            )
        )

    @staticmethod
    def paths(directory: str | os.PathLike, index: int) -> list[Path]:
        """Returns the files of a column: hashes, ids and directory, without headers."""
        return [Path(directory, f"{name}_{index}") for name in ("hashes", "ids", "directory")]

    def __call__(self, numbers: Parsed) -> np.ndarray:
        """Returns the ids of a column; 0 for a number that is missing or has no id."""
        values, missing = numbers
        if native.host is not None:
            return native.host.look_up(np.ascontiguousarray(values, np.uint64), missing, *self)
        if not len(self.hashes):
            return np.zeros(len(values), self.ids.dtype)
        hashes = spread(values)
        places = np.searchsorted(self.hashes, hashes)
        np.minimum(places, len(self.hashes) - 1, out=places)
        known = (self.hashes[places] == hashes) & ~missing
        return np.where(known, self.ids[places], self.ids.dtype.type(0))


def lookup_directory(hashes: np.ndarray) -> np.ndarray:
    """Returns the directory of `IdLookup` for ascending hashes."""
    return np.concatenate(list(directory_parts(hashes)))


def directory_parts(hashes: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the directory of `IdLookup` for ascending hashes, some entries at a time."""
    bits = max(len(hashes) // _ENTRIES_PER_PLACE, 1).bit_length() - 1
    yield np.zeros(1, np.int64)
    for begin in range(1, 1 << bits, _ENTRIES_AT_ONCE):
        end = min(begin + _ENTRIES_AT_ONCE, 1 << bits)
        edges = np.arange(begin, end, dtype=np.uint64) << np.uint64(64 - bits)
        yield np.searchsorted(hashes, edges).astype(np.int64)
    yield np.array([len(hashes)], np.int64)
