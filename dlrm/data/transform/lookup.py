"""Lookups: the ids of a dictionary's numbers, found by a hash."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dlrm.data import layout
from dlrm.data.sources import native
from dlrm.data.sources.columns import Parsed
from dlrm.mapped_files import map_file

_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # as in csrc/host/id_lookup.h
_INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 1 << 64))
_ENTRIES_PER_PREFIX = 2
_ENTRIES_AT_ONCE = 1 << 20
_SORTED_AT_ONCE = 1 << 21  # numbers of a dictionary, of 60 bytes each while they are sorted


def hash_u64(keys: np.ndarray) -> np.ndarray:
    """Returns evenly distributed 64-bit hashes of numbers; the mapping is one-to-one."""
    return keys.astype(np.uint64) * _HASH_FACTOR


def unhash_u64(hashes: np.ndarray) -> np.ndarray:
    """Returns the numbers that have these hashes."""
    return hashes * _INVERSE


class _Arrays(NamedTuple):
    hashes: np.ndarray
    ids: np.ndarray
    directory: np.ndarray


class IdLookup(_Arrays):
    """Ids of a dictionary's numbers, sorted by a hash of the numbers.

    Attributes:
        hashes: `hash_u64` of the numbers, ascending.
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
        hashes = hash_u64(np.asarray(dictionary))
        order = np.argsort(hashes)
        hashes = hashes[order]
        ids = (order + 1).astype(layout.id_dtype(len(dictionary) + 1))
        return cls(hashes, ids, np.concatenate([*_directory_parts(hashes)]))

    @classmethod
    def load(cls, directory: str | os.PathLike, index: int, id_dtype: np.dtype) -> "IdLookup":
        """Maps what `write` wrote."""
        dtypes = (np.uint64, id_dtype, np.int64)
        return cls(*map(map_file, cls.paths(directory, index), dtypes))

    @classmethod
    def write(cls, dictionary: np.ndarray, directory: str | os.PathLike, index: int) -> None:
        """Writes the lookup of a dictionary in bounded memory; see `from_dictionary`."""
        hashes_path, ids_path, directory_path = cls.paths(directory, index)
        dtype = layout.id_dtype(len(dictionary) + 1)
        with open(hashes_path, "wb") as hashes_file, open(ids_path, "wb") as ids_file:
            for hashes, ids in _sorted_parts(dictionary):
                hashes_file.write(hashes.data)
                ids_file.write(ids.astype(dtype).data)
        with open(directory_path, "wb") as file:
            for part in _directory_parts(map_file(hashes_path, np.uint64)):
                file.write(part.data)

    @staticmethod
    def paths(directory: str | os.PathLike, index: int) -> list[Path]:
        """Returns the files of a column: hashes, ids and directory, without headers."""
        return [Path(directory, f"{name}_{index}") for name in _Arrays._fields]

    def __call__(self, numbers: Parsed) -> np.ndarray:
        """Returns the ids of a column; 0 for a number that is missing or has no id."""
        values, missing = numbers
        if native.host is not None:
            return native.host.look_up(np.ascontiguousarray(values, np.uint64), missing, *self)
        if not len(self.hashes):
            return np.zeros(len(values), self.ids.dtype)
        hashes = hash_u64(values)
        rows = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        known = (self.hashes[rows] == hashes) & ~missing
        return np.where(known, self.ids[rows], self.ids.dtype.type(0))


def _sorted_parts(dictionary: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields ascending hashes of a dictionary and their ids, those within a range at a time."""
    parts = -(-len(dictionary) // _SORTED_AT_ONCE)
    for part in range(parts):
        first, last = (((part + end) << 64) // parts - end for end in (0, 1))
        hashes, ids = [], []
        for begin in range(0, len(dictionary), _ENTRIES_AT_ONCE):
            every = hash_u64(dictionary[begin : begin + _ENTRIES_AT_ONCE])
            chosen = np.flatnonzero((every >= np.uint64(first)) & (every <= np.uint64(last)))
            hashes.append(every[chosen])
            ids.append(chosen + (begin + 1))
        joined = np.concatenate(hashes)
        order = np.argsort(joined)
        yield joined[order], np.concatenate(ids)[order]


def _directory_parts(hashes: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the directory of `IdLookup` for ascending hashes, some entries at a time."""
    bits = max(len(hashes) // _ENTRIES_PER_PREFIX, 1).bit_length() - 1
    yield np.zeros(1, np.int64)
    for begin in range(1, 1 << bits, _ENTRIES_AT_ONCE):
        prefixes = np.arange(begin, min(begin + _ENTRIES_AT_ONCE, 1 << bits), dtype=np.uint64)
        yield np.searchsorted(hashes, prefixes << np.uint64(64 - bits)).astype(np.int64)
    yield np.array([len(hashes)], np.int64)
