"""Dictionaries: the values of a column that have ids, from their counts to a file."""

import os
import zlib
from dataclasses import dataclass, field
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
    places = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    content = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return places[1:] - places[0], content[places[0] : places[-1]]


@dataclass(frozen=True)
class FrequencyLimit:
    """The minimum count of a value with an id of its own, which may differ between columns.

    Attributes:
        default: limit of the columns that are not in `by_column`; 0 or 1 keeps everything.
        by_column: categorical index, from 0 -> limit.
    """

    default: int = DEFAULT_FREQUENCY_LIMIT
    by_column: dict[int, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, num_numerical: int, num_categorical: int) -> "FrequencyLimit":
        """Parses "15", "20:3" or "15,20:3": limits of all columns or of one.

        Columns are numbered as in a line whose label is 0, so that the first categorical one is
        1 + num_numerical: 14 in Criteo's logs.

        Raises:
            ValueError: the text has another form, repeats a limit, or names another column.
        """
        first = 1 + num_numerical
        default: int | None = None
        by_column: dict[int, int] = {}
        for item in text.split(","):
            numbers = item.split(":")
            if len(numbers) > 2 or not all(n.strip().isdecimal() for n in numbers):
                raise ValueError(
                    f"frequency limit {text!r}: expected N or COLUMN:N, separated by commas, "
                    f"got {item!r}"
                )
            limit = int(numbers[-1])
            if len(numbers) == 1 and default is None:
                default = limit
                continue
            column = int(numbers[0])
            if len(numbers) == 1 or column - first in by_column:
                raise ValueError(f"frequency limit {text!r}: {item!r} is the second of its kind")
            if not first <= column < first + num_categorical:
                raise ValueError(
                    f"frequency limit {text!r}: column {column}: expected a categorical one, "
                    f"{first} to {first + num_categorical - 1}"
                )
            by_column[column - first] = limit
        return cls(DEFAULT_FREQUENCY_LIMIT if default is None else default, by_column)

    def each(self, num_categorical: int) -> tuple[int, ...]:
        """Returns the limit of every categorical column."""
        return tuple(map(self.of, range(num_categorical)))

    def of(self, index: int) -> int:
        """Returns the limit of the categorical column with this index, from 0."""
        return self.by_column.get(index, self.default)


def open_dictionary(path: Path, dtype: np.dtype, size: int) -> np.ndarray:
    """Creates a file of a dictionary and returns it as a mapped array to fill."""
    if size == 0:
        write_array(path, np.empty(0, dtype))
        return np.empty(0, dtype)
    dictionary = np.lib.format.open_memmap(path, "w+", dtype, (size,))
    reserve(path)
    return dictionary


def reserve(path: Path) -> None:
    """Reserves the space of a mapped file: a write to a full disk would kill the process.

    Raises:
        OSError: the disk is full.
    """
    with open(path, "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)


def _mapped(path: Path) -> np.ndarray:
    try:
        return map_npy(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path}: missing") from error


def load_dictionary(path: Path, size: int) -> np.ndarray:
    dictionary = _mapped(path)
    if dictionary.shape != (size,) or dictionary.dtype not in (np.uint32, np.uint64):
        raise ValueError(
            f"{path}: expected {size} numbers of type uint32 or uint64, got shape "
            f"{list(dictionary.shape)} of type {dictionary.dtype}"
        )
    return dictionary


def checksum(dictionary: np.ndarray) -> str:
    """Returns the CRC-32 of a dictionary's numbers, which it reads at 0.6 s per GB."""
    return f"{zlib.crc32(np.ascontiguousarray(dictionary).data):08x}"


@dataclass(frozen=True)
class Dictionary:
    """The values with ids, of a field or of several that share it.

    Attributes:
        keys: uint64, of the values with the ids 1, 2, ...: the integers themselves, or hashes of
            texts.
        texts: uint8, the concatenated texts; None for numbers.
        ends: int64, the end of each text.
        kind: the type of its fields, as in `CategoricalField`.
    """

    keys: np.ndarray
    texts: np.ndarray | None = None
    ends: np.ndarray | None = None
    kind: str = "integer"

    def __len__(self) -> int:
        return len(self.keys)

    def value(self, id: int) -> str | int:
        """Returns the value that has an id."""
        if self.kind == "hexadecimal":
            return f"{int(self.keys[id - 1]):08x}"
        if self.texts is None or self.ends is None:
            return int(self.keys[id - 1 : id].astype(np.uint64).view(np.int64)[0])
        begin = int(self.ends[id - 2]) if id > 1 else 0
        return self.texts[begin : int(self.ends[id - 1])].tobytes().decode()

    def values(self) -> list[str | int]:
        """Returns all values in the order of their ids."""
        return [self.value(id) for id in range(1, len(self) + 1)]

    @classmethod
    def load(cls, directory: Path, place: int, size: int, kind: str) -> "Dictionary":
        """Maps the files of dictionary `place` of a transform.

        Raises:
            FileNotFoundError, ValueError: a file is missing or damaged; the message names it.
        """
        if kind == "id":
            return Identity(size)
        keys = load_dictionary(directory / f"dictionary_{place}.npy", size)
        if kind != "string":
            return cls(keys, kind=kind)
        path = directory / f"ends_{place}.npy"
        ends = load_array(path, np.dtype(np.int64))
        texts = load_array(directory / f"texts_{place}.npy", np.dtype(np.uint8))
        if len(ends) != size or (size and (ends[-1] != len(texts) or ends[0] < 0)):
            raise ValueError(
                f"{path}: expected {size} ends, the last {len(texts)}, got {len(ends)}"
            )
        return cls(keys, texts, ends, kind)


class Identity(Dictionary):
    """The ids of a field of the type "id", which are its values; it has no files.

    Args:
        size: the greatest id.
    """

    def __init__(self, size: int) -> None:
        super().__init__(np.empty(0, np.uint32), kind="id")
        object.__setattr__(self, "_size", size)

    def __len__(self) -> int:
        return self._size  # type: ignore[attr-defined]

    def value(self, id: int) -> int:
        """Returns the id."""
        return id


def load_array(path: Path, dtype: np.dtype) -> np.ndarray:
    """Maps an array of a transform, of one dimension.

    Raises:
        FileNotFoundError, ValueError: the file is missing or damaged; the message names it.
    """
    array = _mapped(path)
    if array.ndim != 1 or array.dtype != dtype:
        raise ValueError(
            f"{path}: expected one dimension of type {dtype}, got shape {list(array.shape)} of "
            f"type {array.dtype}"
        )
    return array


def arrays_of(dictionary: Dictionary, index: int) -> dict[str, np.ndarray]:
    """Returns the arrays of a dictionary, by the names of their files."""
    if isinstance(dictionary, Identity):
        return {}
    arrays = {f"dictionary_{index}.npy": dictionary.keys}
    if dictionary.texts is not None and dictionary.ends is not None:
        arrays |= {f"texts_{index}.npy": dictionary.texts, f"ends_{index}.npy": dictionary.ends}
    return arrays
