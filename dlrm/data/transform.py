"""From the text of a log's fields to a model's inputs: one definition, from Spark to serving.

Preprocessing fits a `Transform` on the logs, applies it and stores it in the dataset as
`transform/`; serving loads that directory and applies the same. Everything here is a function of
whole columns. Only numpy and the standard library are imported, and nothing is pickled.

    numerical    missing -> 0, add 2, natural logarithm (or NVIDIA's rule, see `log_numerical`)
    categorical  hexadecimal digits -> a number -> its id; 0 for missing, rare and unseen ones
"""

import importlib
import json
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlrm.data import layout
from dlrm.files import write_atomically

host: Any
try:
    host = importlib.import_module("dlrm._host")
except ImportError:  # the package was installed without a compiler
    host = None

NUMERIC_TRANSFORMS = ("readme", "nvidia")
DEFAULT_FREQUENCY_LIMIT = 15
MAX_HEXADECIMAL_DIGITS = 16
MAX_DECIMAL_DIGITS = 18  # so that every number fits int64
_FILE = "transform.json"
_VERSION = 1


class TextColumn(NamedTuple):
    """The text of one field in every row: field k is `data[starts[k]:ends[k]]`, empty if missing.

    `data` is uint8 with 8 bytes or more after the last field, which are read but mean nothing.
    """

    data: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    @classmethod
    def from_strings(cls, fields: Iterable[str | None]) -> "TextColumn":
        """Makes a column of strings, of which None and "" are missing."""
        return cls.from_bytes([(text or "").encode() for text in fields])

    @classmethod
    def from_bytes(cls, texts: Sequence[bytes]) -> "TextColumn":
        """Makes a column of encoded strings."""
        lengths = np.array([len(text) for text in texts], np.int64)
        ends = np.cumsum(lengths)
        return cls(np.frombuffer(b"".join(texts) + bytes(8), np.uint8), ends - lengths, ends)

    def text(self, row: int) -> str:
        """Returns one field, shortened if it is very long, and with any byte shown."""
        raw = self.data[self.starts[row] : self.ends[row]].tobytes()
        shown = raw[:64] + (b"..." if len(raw) > 64 else b"")
        return shown.decode("utf-8", "backslashreplace")


class Parsed(NamedTuple):
    """The numbers of a column; where `missing`, the value is 0."""

    values: np.ndarray
    missing: np.ndarray


class BadValueError(ValueError):
    """A field that cannot be read.

    Attributes:
        row: the first such row of the column.
        column: the index of the column, label excluded; None before a `Transform` knows it.
        expected, got: what the message says.
    """

    def __init__(self, row: int, expected: str, got: str, column: int | None = None) -> None:
        self.row, self.expected, self.got, self.column = row, expected, got, column
        where = "" if column is None else f"column {column}, "
        super().__init__(f"{where}row {row}: expected {expected}, got {got!r}")


EXPECTED_HEXADECIMAL = f"up to {MAX_HEXADECIMAL_DIGITS} hexadecimal digits"
EXPECTED_INTEGER = f"an integer of up to {MAX_DECIMAL_DIGITS} digits"


def parse_hexadecimal(column: TextColumn) -> Parsed:
    """Reads up to 16 hexadecimal digits of either case as uint64; "1f" and "0000001f" are equal.

    Raises:
        BadValueError: other characters or more digits.
    """
    numbers, bad = read_hexadecimal(column)
    _refuse(column, bad, EXPECTED_HEXADECIMAL)
    return numbers


def read_hexadecimal(column: TextColumn) -> tuple[Parsed, np.ndarray]:
    """Reads as `parse_hexadecimal` does, and returns which rows cannot be read."""
    lengths = column.ends - column.starts
    values, bad = _hexadecimal_words(column, np.minimum(lengths, 8))
    long = np.flatnonzero(lengths > 8)
    if len(long):
        low = TextColumn(column.data, column.ends[long] - 8, column.ends[long])
        low_values, low_bad = _hexadecimal_words(low, np.full(len(long), 8))
        high = TextColumn(column.data, column.starts[long], low.starts)
        high_values, high_bad = _hexadecimal_words(high, np.minimum(lengths[long] - 8, 8))
        values[long] = (high_values << np.uint64(32)) | low_values
        bad[long] = low_bad | high_bad | (lengths[long] > MAX_HEXADECIMAL_DIGITS)
    return Parsed(values, lengths == 0), bad


def parse_integer(column: TextColumn) -> Parsed:
    """Reads decimal integers of up to 18 digits, with "-" before negative ones, as int64.

    Raises:
        BadValueError: anything else.
    """
    numbers, bad = read_integer(column)
    _refuse(column, bad, EXPECTED_INTEGER)
    return numbers


def read_integer(column: TextColumn) -> tuple[Parsed, np.ndarray]:
    """Reads as `parse_integer` does, and returns which rows cannot be read."""
    missing = column.ends == column.starts
    negative = column.data[column.starts] == ord("-")
    negative &= ~missing
    starts = column.starts + negative
    lengths = column.ends - starts
    values, bad = _decimal_words(column.data, starts, np.minimum(lengths, 8))
    bad |= negative & (lengths == 0)
    long = np.flatnonzero(lengths > 8)
    if len(long):
        ends = column.ends[long]
        values[long], bad[long] = 0, lengths[long] > MAX_DECIMAL_DIGITS
        for skipped, factor in ((0, 1), (8, 10**8), (16, 10**16)):
            length = np.clip(lengths[long] - skipped, 0, 8)
            part, part_bad = _decimal_words(column.data, ends - skipped - length, length)
            values[long] += part * np.uint64(factor)
            bad[long] |= part_bad & (length > 0)
    signed = values.astype(np.int64)
    np.negative(signed, out=signed, where=negative)
    return Parsed(signed, missing), bad


def _refuse(column: TextColumn, bad: np.ndarray, expected: str) -> None:
    if bad.any():
        row = int(bad.argmax())
        raise BadValueError(row, expected, column.text(row))


# Eight characters at a time, as the bytes of one 64-bit number. Every constant is a byte repeated.


def _bytes(byte: int) -> np.uint64:
    return np.uint64(byte * 0x0101010101010101)


def _words(data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Reads 0 to 8 characters of each field as a word, the last one highest, with "0" in front."""
    if len(starts) == 0:
        return np.empty(0, np.uint64)
    anywhere: np.ndarray = np.ndarray((len(data) - 7,), "<u8", data, 0, (1,))
    words = anywhere[starts]
    if (lengths == 8).all():
        return words
    bits = (8 * lengths).astype(np.uint64)
    return (words << (np.uint64(64) - bits)) | (_bytes(ord("0")) >> bits)


def _hexadecimal_words(column: TextColumn, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the values of up to 8 digits, and which are none."""
    words = _words(column.data, column.starts, lengths)
    letters = (words >> np.uint64(6)) & _bytes(1)
    nibbles = (words & _bytes(0x0F)) + letters * np.uint64(9)
    # A digit is what these nibbles would be written as, in lower case; else it was no digit.
    above_nine = ((nibbles + _bytes(6)) >> np.uint64(4)) & _bytes(1)
    written = nibbles + _bytes(ord("0")) + above_nine * np.uint64(ord("a") - ord("0") - 10)
    lower_case = words | (letters << np.uint64(5))
    bad = ((written ^ lower_case) | (nibbles & _bytes(0x10))) != 0
    x = nibbles.byteswap() if np.little_endian else nibbles
    x = (x | (x >> np.uint64(4))) & np.uint64(0x00FF00FF00FF00FF)
    x = (x | (x >> np.uint64(8))) & np.uint64(0x0000FFFF0000FFFF)
    return (x | (x >> np.uint64(16))) & np.uint64(0xFFFFFFFF), bad


def _decimal_words(
    data: np.ndarray, starts: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the values of up to 8 digits, and which are none."""
    digits = _words(data, starts, lengths) ^ _bytes(ord("0"))
    bad = ((digits | (digits + _bytes(6))) & _bytes(0xF0)) != 0
    # Neighbours are joined: 8 digits, 4 numbers to 99, 2 to 9999, 1 to 99999999.
    x = ((digits & _bytes(0x0F)) * np.uint64(10 * 2**8 + 1)) >> np.uint64(8)
    x = ((x & np.uint64(0x00FF00FF00FF00FF)) * np.uint64(100 * 2**16 + 1)) >> np.uint64(16)
    x = ((x & np.uint64(0x0000FFFF0000FFFF)) * np.uint64(10_000 * 2**32 + 1)) >> np.uint64(32)
    return x, bad


def log_numerical(
    numbers: Parsed, rule: str = "readme", dtype: np.dtype = layout.NUMERICAL_DTYPE
) -> tuple[np.ndarray, int]:
    """Returns the logarithms, of a column, and how many arguments were raised to 1.

    Args:
        numbers: a column as `parse_integer` gives it.
        rule: "readme": ln(x + 2), a missing x being 0. "nvidia": ln(x + 3), and 0 where x is
            missing, as NVIDIA's code does. The logarithm is taken in float64 and rounded to
            float32, then to `dtype`; an argument under 1 is raised to 1.
        dtype: float16 as in split-binary datasets, or float32 as in binary ones.
    """
    if rule == "readme":
        arguments = np.where(numbers.missing, 2.0, numbers.values + 2.0)
    elif rule == "nvidia":
        arguments = np.where(numbers.missing, 1.0, numbers.values + 3.0)
    else:
        raise ValueError(f"numeric transform {rule!r}: expected one of {NUMERIC_TRANSFORMS}")
    clamped = int(np.count_nonzero(arguments < 1.0))
    logarithms = np.log(np.maximum(arguments, 1.0))
    return logarithms.astype(np.float32).astype(dtype, copy=False), clamped


class Counts(NamedTuple):
    """How often each number occurs in a column: ascending keys (uint32 or uint64), and counts."""

    keys: np.ndarray
    counts: np.ndarray


def count_values(numbers: Parsed) -> Counts:
    """Counts the values of a column that are not missing."""
    present = numbers.values[~numbers.missing] if numbers.missing.any() else numbers.values
    return Counts(*np.unique(_narrow(present), return_counts=True))


def merge_counts(parts: Sequence[Counts]) -> Counts:
    """Adds up counts of parts of a column."""
    keys = np.concatenate([np.empty(0, np.uint32), *(part.keys for part in parts)])
    counts = np.concatenate([np.empty(0, np.int64), *(part.counts for part in parts)])
    order = np.argsort(keys, kind="stable")
    keys, counts = keys[order], counts[order]
    first = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]]) if len(keys) else order
    return Counts(keys[first], np.add.reduceat(counts, first) if len(keys) else counts)


def frequent(counts: Counts, limit: int) -> Counts:
    """Keeps the values that occur `limit` times or more."""
    kept = counts.counts >= limit
    return Counts(counts.keys[kept], counts.counts[kept])


def fit_dictionary(counts: Counts) -> np.ndarray:
    """Returns the numbers that get the ids 1, 2, ...: the most frequent first, ties by the number.

    The array is uint32 where every number fits, else uint64.
    """
    return _narrow(counts.keys[np.lexsort((counts.keys, -counts.counts))])


def _narrow(keys: np.ndarray) -> np.ndarray:
    fits = len(keys) == 0 or keys.max() <= np.iinfo(np.uint32).max
    return keys.astype(np.uint32 if fits else np.uint64)


@dataclass(frozen=True)
class FrequencyLimit:
    """How often a value must occur to get an id of its own; each column may have its limit.

    Attributes:
        default: of the columns that are not in `by_column`; 0 or 1 keeps everything.
        by_column: categorical index, from 0 -> limit.
    """

    default: int = DEFAULT_FREQUENCY_LIMIT
    by_column: dict[int, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, num_numerical: int, num_categorical: int) -> "FrequencyLimit":
        """Reads "15", "20:3" or "15,20:3": limits, of all columns or of one.

        Columns are numbered as in a line whose label is 0, so that the first categorical one is
        1 + num_numerical: 14 in Criteo's logs.

        Raises:
            ValueError: not of this form, given twice, or of a column that is not categorical.
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

    def of(self, index: int) -> int:
        """Returns the limit of the categorical column of that index, from 0."""
        return self.by_column.get(index, self.default)


class Transformed(NamedTuple):
    """Inputs of a model: numbers `[rows, num_numerical]`, and ids `[rows]` of each table."""

    numerical: np.ndarray
    ids: list[np.ndarray]
    clamped: int


class Transform:
    """A fitted transform: everything that turns a row of a log into inputs of a model.

    Attributes:
        num_numerical: columns of integers, which come first.
        dictionaries: of each categorical column, the numbers that have the ids 1, 2, ...
        numeric_transform: "readme" or "nvidia".
        frequency_limit: what the dictionaries were fitted with.
    """

    def __init__(
        self,
        num_numerical: int,
        dictionaries: Sequence[np.ndarray],
        numeric_transform: str = "readme",
        frequency_limit: FrequencyLimit | None = None,
    ) -> None:
        if numeric_transform not in NUMERIC_TRANSFORMS:
            raise ValueError(
                f"numeric transform {numeric_transform!r}: expected one of {NUMERIC_TRANSFORMS}"
            )
        self.num_numerical = num_numerical
        self.dictionaries = list(dictionaries)
        self.numeric_transform = numeric_transform
        self.frequency_limit = frequency_limit or FrequencyLimit()
        self._lookups: list[IdLookup | None] = [None] * len(self.dictionaries)
        self._checksums: list[tuple[Path, str]] = []  # of dictionaries that come from files

    @property
    def num_categorical(self) -> int:
        """Categorical columns, a dictionary each."""
        return len(self.dictionaries)

    @property
    def cardinalities(self) -> list[int]:
        """Rows of each table: the ids of the dictionary, and id 0."""
        return [len(dictionary) + 1 for dictionary in self.dictionaries]

    def __call__(self, columns: Sequence[TextColumn]) -> Transformed:
        """Transforms rows, given as the text of each column: numerical ones first, no label.

        Raises:
            BadValueError: the first row, and the first column in it, that cannot be read.
            ValueError: another number of columns.
        """
        if len(columns) != self.num_numerical + self.num_categorical:
            raise ValueError(
                f"expected {self.num_numerical} numerical and {self.num_categorical} categorical "
                f"columns, got {len(columns)} in all"
            )
        parsed: list[Parsed] = []
        first_error: BadValueError | None = None
        for i, column in enumerate(columns):
            parse = parse_integer if i < self.num_numerical else parse_hexadecimal
            try:
                parsed.append(parse(column))
            except BadValueError as error:
                if first_error is None or error.row < first_error.row:
                    first_error = BadValueError(error.row, error.expected, error.got, i)
        if first_error is not None:
            raise first_error
        return self.apply(parsed[: self.num_numerical], parsed[self.num_numerical :])

    def apply(
        self,
        integers: Sequence[Parsed],
        hashes: Sequence[Parsed],
        dtype: np.dtype = layout.NUMERICAL_DTYPE,
    ) -> Transformed:
        """Transforms rows whose fields are numbers already, as `log_lines` reads them.

        Args:
            integers, hashes: the columns; as many as the transform was made for.
            dtype: of the logarithms.
        """
        rows = len((*integers, *hashes)[0].values)
        numerical = np.empty((rows, self.num_numerical), dtype)
        clamped = 0
        for i, column in enumerate(integers):
            numerical[:, i], raised = log_numerical(column, self.numeric_transform, dtype)
            clamped += raised
        ids = [self.encode(i, column) for i, column in enumerate(hashes)]
        return Transformed(numerical, ids, clamped)

    def encode(self, index: int, numbers: Parsed) -> np.ndarray:
        """Returns the ids of a categorical column, in `layout.id_dtype` of its cardinality."""
        lookup = self._lookups[index]
        if lookup is None:
            self.check(index)
            lookup = self._lookups[index] = IdLookup.of(self.dictionaries[index])
        return lookup(numbers)

    def check(self, index: int) -> None:
        """Reads a dictionary and compares it with its checksum, as is done before its first use.

        Raises:
            ValueError: it is not what was saved; its file is named.
        """
        if self._checksums:
            path, expected = self._checksums[index]
            if (found := _checksum(self.dictionaries[index])) != expected:
                raise ValueError(f"{path}: expected CRC-32 {expected}, got {found}: damaged")

    def use_lookups(self, directory: str | os.PathLike) -> None:
        """Takes lookups from where `IdLookup.save` wrote them, so that processes share them."""
        self._lookups = [
            IdLookup.load(directory, i, layout.id_dtype(n))
            for i, n in enumerate(self.cardinalities)
        ]

    def save(self, directory: str | os.PathLike) -> None:
        """Writes `transform.json` and `dictionary_<i>.npy` into a directory, created if need be."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        for i, dictionary in enumerate(self.dictionaries):
            save_dictionary(directory, i, dictionary)
        sizes = [len(dictionary) for dictionary in self.dictionaries]
        save_facts(
            directory, self.num_numerical, sizes, self.numeric_transform, self.frequency_limit
        )

    @classmethod
    def load(cls, directory: str | os.PathLike) -> "Transform":
        """Reads what `save` wrote; the dictionaries are mapped, not read.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is not what `save` writes; it is named.
        """
        path = Path(directory) / _FILE
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file, so {directory} is no fitted transform")
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            version, sizes = facts["version"], facts["dictionary_sizes"]
            limits = facts["frequency_limit"]
            limit = FrequencyLimit(
                limits["default"], {int(k): v for k, v in limits["by_column"].items()}
            )
            num_numerical, rule = facts["num_numerical"], facts["numeric_transform"]
            checksums = facts.get("dictionary_crc32", [])  # early ones have none
            if checksums and len(checksums) != len(sizes):
                raise ValueError(f"{len(checksums)} checksums of {len(sizes)} dictionaries")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: not a fitted transform ({error!r})") from error
        if version != _VERSION:
            raise ValueError(f"{path}: expected version {_VERSION}, got {version!r}")
        paths = [path.with_name(_dictionary_name(i)) for i in range(len(sizes))]
        dictionaries = [_load_dictionary(*item) for item in zip(paths, sizes, strict=True)]
        transform = cls(num_numerical, dictionaries, rule, limit)
        transform._checksums = list(zip(paths, checksums, strict=False))
        return transform


def save_dictionary(directory: str | os.PathLike, index: int, dictionary: np.ndarray) -> None:
    """Writes one dictionary of a transform, so that many processes can write one transform."""
    np.save(Path(directory) / _dictionary_name(index), dictionary, allow_pickle=False)


def dictionary_path(directory: str | os.PathLike, index: int) -> Path:
    """Returns the file of a dictionary of a transform."""
    return Path(directory, _dictionary_name(index))


def open_dictionary(path: Path, dtype: np.dtype, size: int) -> np.ndarray:
    """Creates a file of a dictionary and returns it as an array to be filled, mapped."""
    if size == 0:
        with open(path, "wb") as file:
            np.save(file, np.empty(0, dtype), allow_pickle=False)
        return np.empty(0, dtype)
    dictionary = np.lib.format.open_memmap(path, "w+", dtype, (size,))
    reserve(path)
    return dictionary


def reserve(path: Path) -> None:
    """Takes the space of a mapped file: a write that finds the disk full would end the process.

    Raises:
        OSError: the disk is full.
    """
    with open(path, "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)


def save_facts(
    directory: str | os.PathLike,
    num_numerical: int,
    dictionary_sizes: Sequence[int],
    numeric_transform: str,
    frequency_limit: FrequencyLimit,
) -> None:
    """Writes `transform.json`, after the dictionaries: without it there is no transform."""
    paths = [dictionary_path(directory, i) for i in range(len(dictionary_sizes))]
    dictionaries = [_load_dictionary(*item) for item in zip(paths, dictionary_sizes, strict=True)]
    facts = {
        "version": _VERSION,
        "num_numerical": num_numerical,
        "numeric_transform": numeric_transform,
        "frequency_limit": {
            "default": frequency_limit.default,
            "by_column": {str(k): v for k, v in frequency_limit.by_column.items()},
        },
        "dictionary_sizes": list(dictionary_sizes),
        "dictionary_crc32": [_checksum(dictionary) for dictionary in dictionaries],
    }
    write_atomically(Path(directory) / _FILE, json.dumps(facts, indent=2) + "\n")


def _dictionary_name(index: int) -> str:
    return f"dictionary_{index}.npy"


def _load_dictionary(path: Path, size: int) -> np.ndarray:
    try:
        dictionary = np.load(path, mmap_mode="r" if size else None, allow_pickle=False)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path}: missing") from error
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path}: not a dictionary ({error})") from error
    if dictionary.shape != (size,) or dictionary.dtype not in (np.uint32, np.uint64):
        raise ValueError(
            f"{path}: expected {size} numbers of type uint32 or uint64, got shape "
            f"{list(dictionary.shape)} of type {dictionary.dtype}"
        )
    return dictionary


def _checksum(dictionary: np.ndarray) -> str:
    """Returns the CRC-32 of a dictionary's numbers, for which it is read: 0.6 s a GB."""
    return f"{zlib.crc32(np.ascontiguousarray(dictionary).data):08x}"


_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # as in csrc/host/id_lookup.h
_ENTRIES_PER_PLACE = 2


def spread(keys: np.ndarray) -> np.ndarray:
    """Returns evenly spread 64-bit hashes of numbers; different numbers have different hashes."""
    return keys.astype(np.uint64) * _HASH_FACTOR


class IdLookup(NamedTuple):
    """Ids of a dictionary's numbers, sorted by a hash of the numbers.

    Attributes:
        hashes: `spread` of the numbers, ascending.
        ids: theirs, in `layout.id_dtype` of the table.
        directory: int64 `[2**k + 1]`: where the hashes begin whose first k bits are 0, 1, ...
    """

    hashes: np.ndarray
    ids: np.ndarray
    directory: np.ndarray

    @classmethod
    def of(cls, dictionary: np.ndarray) -> "IdLookup":
        """Makes the lookup of a dictionary whose number k has the id 1 + k."""
        hashes = spread(np.asarray(dictionary))
        order = np.argsort(hashes)
        hashes = hashes[order]
        ids = (order + 1).astype(layout.id_dtype(len(dictionary) + 1))
        return cls(hashes, ids, lookup_directory(hashes))

    @classmethod
    def load(cls, directory: str | os.PathLike, index: int, id_dtype: np.dtype) -> "IdLookup":
        """Maps the three arrays of a column that lie in a directory; see `paths`."""
        dtypes = (np.dtype(np.uint64), id_dtype, np.dtype(np.int64))
        return cls(
            *(
                np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)
                for path, dtype in zip(cls.paths(directory, index), dtypes, strict=True)
            )
        )

    @staticmethod
    def paths(directory: str | os.PathLike, index: int) -> list[Path]:
        """The files of a column: hashes, ids and directory, without headers."""
        return [Path(directory, f"{name}_{index}") for name in ("hashes", "ids", "directory")]

    def __call__(self, numbers: Parsed) -> np.ndarray:
        """Returns the ids of a column; 0 where a number is missing or has none."""
        values, missing = numbers
        if host is not None:
            found = np.empty(len(values), self.ids.dtype)
            values = np.ascontiguousarray(values, np.uint64)
            host.look_up(values, missing, self.hashes, self.directory, self.ids, found)
            return found
        if not len(self.hashes):
            return np.zeros(len(values), self.ids.dtype)
        hashes = spread(values)
        places = np.searchsorted(self.hashes, hashes)
        np.minimum(places, len(self.hashes) - 1, out=places)
        known = (self.hashes[places] == hashes) & ~missing
        return np.where(known, self.ids[places], self.ids.dtype.type(0))


def lookup_directory(hashes: np.ndarray) -> np.ndarray:
    """Returns the directory of `IdLookup` for ascending hashes."""
    bits = max(len(hashes) // _ENTRIES_PER_PLACE, 1).bit_length() - 1
    places = np.zeros((1 << bits) + 1, np.int64)
    if bits:
        edges = np.arange(1, 1 << bits, dtype=np.uint64) << np.uint64(64 - bits)
        places[1:-1] = np.searchsorted(hashes, edges)
    places[-1] = len(hashes)
    return places
