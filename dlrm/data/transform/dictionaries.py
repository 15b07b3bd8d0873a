"""Dictionaries: the values of a column that have ids, from their counts to files."""

import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlrm.data.sources.columns import Parsed
from dlrm.documents import brief
from dlrm.files import write_array
from dlrm.mapped_files import map_npy

DEFAULT_FREQUENCY_LIMIT = 15


class Counts(NamedTuple):
    """The number of occurrences of each number in a column.

    Attributes:
        keys: ascending numbers, uint32 or uint64.
        counts: the occurrences of each.
        texts: an Arrow array of the texts that the keys are hashes of; None for plain numbers.
    """

    keys: np.ndarray
    counts: np.ndarray
    texts: Any = None

    def take(self, chosen: np.ndarray) -> "Counts":
        """Returns the counts of the values that a mask selects."""
        texts = None if self.texts is None else self.texts.take(np.flatnonzero(chosen))
        return Counts(self.keys[chosen], self.counts[chosen], texts)


def count_values(numbers: Parsed) -> Counts:
    """Counts the values of a column that are not missing."""
    present = numbers.values[~numbers.missing] if numbers.missing.any() else numbers.values
    fits = len(present) == 0 or present.max() <= np.iinfo(np.uint32).max
    keys = present.astype(np.uint32 if fits else np.uint64)
    return Counts(*np.unique(keys, return_counts=True))


def two_texts(one: bytes, other: bytes) -> str:
    """Returns the message for two texts with one key."""
    return (
        f"the texts {brief(one)} and {brief(other)} have the same 64-bit hash; expected other ones "
        "(rename one of them)"
    )


def text_array(ends: np.ndarray, content: Any) -> Any:
    """Returns texts as an Arrow array over a buffer; `ends`, int64, begin with 0."""
    import pyarrow as pa

    buffers = [None, pa.py_buffer(ends), pa.py_buffer(content)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(ends) - 1, buffers)


def bytes_of_texts(texts: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ends, int64, and the bytes of an Arrow array of texts; None has neither."""
    if texts is None or not len(texts):
        return np.empty(0, np.int64), np.empty(0, np.uint8)
    _, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    content = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return ends[1:] - ends[0], content[ends[0] : ends[-1]]


def frequency_limits(text: str, num_numerical: int, num_categorical: int) -> tuple[int, ...]:
    """Returns the minimum count of a value with an id in each categorical column.

    Columns are numbered as in a line whose label is 0, so that the first categorical one is
    1 + num_numerical: 14 in Criteo's logs.

    Args:
        text: "15", "20:3" or "15,20:3": limits of all columns, by default 15, or of one; 0 or 1
            keeps every value.

    Raises:
        ValueError: the text has another form, repeats a limit, or names another column.
    """
    first, last = 1 + num_numerical, num_numerical + num_categorical
    columns, limits = range(first, last + 1), dict[int | None, int]()
    for item in text.split(","):
        match = re.fullmatch(r"\s*(?:(\d+)\s*:\s*)?(\d+)\s*", item)
        column = int(match[1]) if match and match[1] else None
        if match is None or column in limits or column not in (None, *columns):
            raise ValueError(
                f"frequency limit {text!r}: expected N or COLUMN:N, separated by commas, once for "
                f"each categorical column, {first} to {last}, got {item!r}"
            )
        limits[column] = int(match[2])
    return tuple(limits.get(column, limits.get(None, 15)) for column in columns)


def open_dictionary(path: Path, dtype: np.dtype, size: int) -> np.ndarray:
    """Creates a file of a dictionary and returns it as a mapped array to fill.

    Raises:
        OSError: the disk is full; a write to the map would then kill the process.
    """
    if size == 0:
        write_array(path, np.empty(0, dtype))
        return np.empty(0, dtype)
    dictionary = np.lib.format.open_memmap(path, "w+", dtype, (size,))
    with open(path, "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    return dictionary


def checksum(dictionary: np.ndarray) -> str:
    """Returns the CRC-32 of a dictionary's numbers, which it reads at 0.6 s per GB."""
    return f"{zlib.crc32(np.ascontiguousarray(dictionary).data):08x}"


@dataclass(frozen=True)
class Dictionary:
    """The values with ids, of a field or of several that share it.

    Attributes:
        keys: uint64, of the values with the ids 1, 2, ...: the integers themselves, or hashes of
            texts; none if values are ids.
        texts: uint8, the concatenated texts; None for numbers.
        ends: int64, the end of each text.
        type: the type of its fields, as in `CategoricalField`.
        greatest: the greatest id, if values are ids.
    """

    keys: np.ndarray
    texts: np.ndarray | None = None
    ends: np.ndarray | None = None
    type: str = "integer"
    greatest: int = 0

    @classmethod
    def ids(cls, greatest: int) -> "Dictionary":
        """Returns the dictionary of a field of the type "id", whose values are its ids."""
        return cls(np.empty(0, np.uint32), type="id", greatest=greatest)

    def __len__(self) -> int:
        return self.greatest if self.type == "id" else len(self.keys)

    def value(self, id: int) -> str | int:
        """Returns the value that has an id."""
        if self.type == "id":
            return id
        if self.type == "hexadecimal":
            return f"{int(self.keys[id - 1]):08x}"
        if self.texts is None or self.ends is None:
            return int(self.keys[id - 1 : id].astype(np.uint64).view(np.int64)[0])
        begin = int(self.ends[id - 2]) if id > 1 else 0
        return self.texts[begin : int(self.ends[id - 1])].tobytes().decode()

    def values(self) -> list[str | int]:
        """Returns all values in the order of their ids."""
        return [self.value(id) for id in range(1, len(self) + 1)]

    @classmethod
    def load(cls, directory: Path, index: int, size: int, type: str) -> "Dictionary":
        """Maps the files of a dictionary of a transform.

        Raises:
            FileNotFoundError, ValueError: a file is missing or damaged; the message names it.
        """
        if type == "id":
            return cls.ids(size)
        keys = _mapped(directory / f"dictionary_{index}.npy", (np.uint32, np.uint64), size)
        if type != "string":
            return cls(keys, type=type)
        path = directory / f"ends_{index}.npy"
        ends = _mapped(path, (np.int64,), size)
        texts = _mapped(directory / f"texts_{index}.npy", (np.uint8,))
        if size and (ends[-1] != len(texts) or ends[0] < 0):
            raise ValueError(f"{path}: expected {len(texts)} at its end, got {ends[-1]}")
        return cls(keys, texts, ends, type)


def _mapped(path: Path, dtypes: Sequence[type], size: int | None = None) -> np.ndarray:
    """Maps an array of one dimension, of a given size unless it is None."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: missing")
    array = map_npy(path)
    if array.dtype not in dtypes or array.shape != (array.size if size is None else size,):
        raise ValueError(
            f"{path}: expected {'' if size is None else f'{size} '}numbers of type "
            f"{' or '.join(dtype.__name__ for dtype in dtypes)}, got shape {list(array.shape)} of "
            f"type {array.dtype}"
        )
    return array


def arrays_of(dictionary: Dictionary, index: int) -> dict[str, np.ndarray]:
    """Returns the arrays of a dictionary, by the names of their files."""
    if dictionary.type == "id":
        return {}
    arrays = {f"dictionary_{index}.npy": dictionary.keys}
    if dictionary.texts is not None and dictionary.ends is not None:
        arrays |= {f"texts_{index}.npy": dictionary.texts, f"ends_{index}.npy": dictionary.ends}
    return arrays
