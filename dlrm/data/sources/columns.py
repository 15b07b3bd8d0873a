"""Columns of a log's fields as text, and their parsed numbers."""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dlrm.data.sources import native
from dlrm.data.sources.row_error import RowError

MAX_HEXADECIMAL_DIGITS = 16
MAX_DECIMAL_DIGITS = 18  # so that every number fits int64
MOST_DECIMAL = 10**MAX_DECIMAL_DIGITS  # greater than all such numbers
_TAB, _RETURN = b"\t\r"
INTEGER = re.compile(rb"-?[0-9]{1,%d}" % MAX_DECIMAL_DIGITS)
HEXADECIMAL = re.compile(rb"[0-9a-fA-F]{1,%d}" % MAX_HEXADECIMAL_DIGITS)


class TextColumn(NamedTuple):
    """The text of one field in every row: field k is `data[starts[k]:ends[k]]`, empty if missing.

    `data` is uint8, with at least 8 bytes after the last field, which are read but have no meaning.
    """

    data: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    @classmethod
    def from_bytes(cls, texts: Sequence[bytes]) -> "TextColumn":
        """Makes a column of encoded strings."""
        lengths = np.array([len(text) for text in texts], np.int64)
        ends = np.cumsum(lengths)
        return cls(np.frombuffer(b"".join(texts) + bytes(8), np.uint8), ends - lengths, ends)

    def text(self, row: int) -> str:
        """Returns one field for a message: shortened if very long, with every byte visible."""
        raw = self.data[self.starts[row] : self.ends[row]].tobytes()
        shown = raw[:64] + (b"..." if len(raw) > 64 else b"")
        return shown.decode("utf-8", "backslashreplace")


class Parsed(NamedTuple):
    """A column of numbers or keys, one per row; a missing value is 0.

    All columns of inputs have `rows`, `missing` and `take`: `Parsed`, `Coded` and `Jagged`.
    """

    values: np.ndarray
    missing: np.ndarray

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.values)

    def take(self, rows: np.ndarray | slice) -> "Parsed":
        """Returns the rows selected by a mask, indices or a slice."""
        return Parsed(self.values[rows], self.missing[rows])

    @classmethod
    def present(cls, values: np.ndarray) -> "Parsed":
        """Returns a column without missing values."""
        return cls(values, np.zeros(len(values), bool))

    def flatten(self, rows: np.ndarray) -> tuple["Parsed", np.ndarray]:
        """Returns the values of all rows, and the indices of those of some rows."""
        return self, rows

    def by_row(self) -> "Parsed":
        """Returns the key of each row."""
        return self

    def distinct(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns keys of the rows, and the index of each row's; that of missing ones is last."""
        keys, codes = np.unique(self.values[rows], return_inverse=True)
        return keys, np.where(self.missing[rows], len(keys), codes)


class Coded(NamedTuple):
    """A categorical column as indices into its values, which may repeat.

    Attributes:
        keys: uint64, a number for each distinct value.
        codes: int32 or int64 `[rows]`, indices into `keys`; -1 for missing values.
    """

    keys: np.ndarray
    codes: np.ndarray

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.codes)

    @property
    def missing(self) -> np.ndarray:
        """Mask of the rows without a value."""
        return self.codes < 0

    def take(self, rows: np.ndarray | slice) -> "Coded":
        """Returns the rows selected by a mask, indices or a slice."""
        return Coded(self.keys, self.codes[rows])

    def flatten(self, rows: np.ndarray) -> tuple["Coded", np.ndarray]:
        """Returns the values of all rows, and the indices of those of some rows."""
        return self, rows

    def by_row(self) -> Parsed:
        """Returns the key of each row."""
        keys = np.append(self.keys, np.uint64(0))  # of -1
        return Parsed(keys[self.codes], self.missing)

    def distinct(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns keys of the rows, and the index of each row's; that of missing ones is last."""
        used, codes = np.unique(self.codes[rows], return_inverse=True)
        absent = len(used) > 0 and used[0] < 0  # a code of -1 comes first, and is moved last
        keys = self.keys[used[int(absent) :]]
        return keys, np.where(codes < absent, len(keys), codes - absent)

    def occurrences(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Counts the occurrences of each index, in chosen rows or in all."""
        codes = self.codes if rows is None else self.codes[rows]
        return np.bincount(codes + 1, minlength=len(self.keys) + 1)[1:]


class CachedByKey:
    """A function of keys, applied to columns.

    It remembers the results for the keys of the last `Coded` column, which batches mostly share.

    Args:
        function: takes a column of keys, and returns an array `[rows]`.
        of_missing: result for a missing value of a `Coded` column.
    """

    def __init__(self, function: Callable[[Parsed], np.ndarray], of_missing: int = 0) -> None:
        self._function, self._of_missing = function, of_missing
        self._earlier: tuple[np.ndarray, np.ndarray] | None = None  # keys, and their results

    def __call__(self, column: Parsed | Coded) -> np.ndarray:
        if isinstance(column, Parsed):
            return self._function(column)
        earlier = self._earlier  # which another thread may replace
        if earlier is None or earlier[0] is not column.keys:
            results = self._function(Parsed.present(column.keys))
            earlier = column.keys, np.append(results, results.dtype.type(self._of_missing))
            self._earlier = earlier
        return earlier[1].take(column.codes, mode="wrap")  # twice as fast as with checks


def cut_lines(
    data: np.ndarray, starts: np.ndarray, ends: np.ndarray, num_columns: int
) -> TextColumn:
    """Splits lines `[start, end)` at their tabs; fields missing at a line's end are empty.

    Args:
        data: uint8, consecutive lines, without tabs between them.
        starts, ends: bounds of the lines; a carriage return before the end is not part of the line.
        num_columns: fields of a line.

    Returns:
        Fields as `[columns, rows]`, of the lines before the first with too many fields.
    """
    is_tab = data[: ends[-1] if len(ends) else 0] == _TAB
    if np.count_nonzero(is_tab) > len(starts) * (num_columns - 1):  # positions take 8 bytes per tab
        lines = enumerate(zip(starts, ends, strict=True))
        row = next(i for i, (a, b) in lines if np.count_nonzero(is_tab[a:b]) >= num_columns)
        return cut_lines(data, starts[:row], ends[:row], num_columns)
    tabs = np.flatnonzero(is_tab).astype(starts.dtype, copy=False)
    tabs_before = np.searchsorted(tabs, starts)
    tabs_of_row = np.diff(tabs_before, append=len(tabs))
    if (tabs_of_row >= num_columns).any():
        row = int((tabs_of_row >= num_columns).argmax())
        return cut_lines(data, starts[:row], ends[:row], num_columns)
    ends = ends - ((ends > starts) & (data[ends - 1] == _RETURN))
    field_ends = np.repeat(ends[None], num_columns, axis=0)
    if (tabs_of_row == num_columns - 1).all():
        field_ends[:-1] = tabs.reshape(len(starts), num_columns - 1).T
    else:
        row_of_tab = np.repeat(np.arange(len(starts)), tabs_of_row)
        field_ends[np.arange(len(tabs)) - tabs_before[row_of_tab], row_of_tab] = tabs
    field_starts = np.empty_like(field_ends)
    field_starts[0] = starts
    np.minimum(field_ends[:-1] + 1, field_ends[1:], out=field_starts[1:])
    return TextColumn(data, field_starts, field_ends)


EXPECTED_HEXADECIMAL = f"up to {MAX_HEXADECIMAL_DIGITS} hexadecimal digits"
EXPECTED_INTEGER = f"an integer of up to {MAX_DECIMAL_DIGITS} digits"


def parse_fields(fields: TextColumn, num_numerical: int) -> tuple[Parsed, Parsed, int | None]:
    """Parses integers and hexadecimal hashes, without the compiled library.

    Args:
        fields: `starts` and `ends` are int64 `[columns, rows]`; columns of integers come first.
        num_numerical: columns of integers.

    Returns:
        The integers and the hashes, `[columns, rows]` each, and `row * columns + column` of the
        first unreadable field, or None.
    """
    shape, data = fields.starts.shape, fields.data.tobytes()
    integers, hashes = np.zeros(shape, np.int64), np.zeros(shape, np.uint64)
    bad = np.zeros(shape, bool)
    bounds = zip(fields.starts.ravel().tolist(), fields.ends.ravel().tolist(), strict=True)
    for (column, row), (start, end) in zip(np.ndindex(shape), bounds, strict=True):
        text = data[start:end]
        if column < num_numerical and INTEGER.fullmatch(text):
            integers[column, row] = int(text)
        elif column >= num_numerical and HEXADECIMAL.fullmatch(text):
            hashes[column, row] = int(text, 16)
        else:
            bad[column, row] = bool(text)
    missing = fields.starts == fields.ends
    first = int(bad.T.argmax()) if bad.any() else None
    begin = slice(num_numerical)
    rest = slice(num_numerical, None)
    numbers = Parsed(integers[begin], missing[begin]), Parsed(hashes[rest], missing[rest])
    return *numbers, first


def field_error(
    fields: TextColumn, index: int, num_numerical: int, names: Sequence[str]
) -> RowError:
    """Returns the error of an unreadable field, given its `row * columns + column`."""
    row, column = divmod(index, len(names))
    expected = EXPECTED_INTEGER if column < num_numerical else EXPECTED_HEXADECIMAL
    got = TextColumn(fields.data, fields.starts[column], fields.ends[column]).text(row)
    return RowError(row, f"expected {expected}, got {got!r}", names[column])


def hash_texts(column: TextColumn) -> np.ndarray:
    """Returns a 64-bit number for each text, the same on every machine; see `text_hash.h`."""
    data = np.ascontiguousarray(column.data)
    starts, ends = (np.ascontiguousarray(a, np.int64) for a in (column.starts, column.ends))
    if native.host is not None:
        return native.host.hash_texts(data, starts, ends)
    texts = (data[a:b].tobytes() for a, b in zip(starts.tolist(), ends.tolist(), strict=True))
    return np.array(list(map(_hash, texts)), np.uint64)


def _hash(text: bytes) -> int:
    state = len(text) * _LENGTH_FACTOR & _WORD
    for begin in range(0, len(text), 8):
        state ^= int.from_bytes(text[begin : begin + 8], "little")
        for _ in range(2):
            state = (state ^ state >> 32) * _MIX_FACTOR & _WORD
        state ^= state >> 32
    return state


_LENGTH_FACTOR, _MIX_FACTOR, _WORD = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, (1 << 64) - 1


def read_hexadecimal(column: TextColumn) -> tuple[Parsed, np.ndarray]:
    """Reads up to 16 hexadecimal digits of either case as uint64; "1f" and "0000001f" are equal.

    Returns:
        The numbers, and a mask of rows that have other characters, or more digits.
    """
    starts, ends = (np.ascontiguousarray(a, np.int64) for a in (column.starts, column.ends))
    if native.host is not None:
        numbers, bad = native.host.hexadecimals_of(column.data, starts, ends)
        return Parsed(numbers, starts == ends), bad
    _, hashes, _ = parse_fields(TextColumn(column.data, starts[None], ends[None]), 0)
    lengths = zip(starts.tolist(), ends.tolist(), strict=True)
    bad = [a < b and not HEXADECIMAL.fullmatch(column.data[a:b].tobytes()) for a, b in lengths]
    return Parsed(hashes.values[0], hashes.missing[0]), np.array(bad, bool)


def stripped(column: TextColumn) -> TextColumn:
    """Strips blanks around texts, like `str.strip` for UTF-8."""
    if not len(column.data) or not _has_blank_ends(column):
        return column
    data, starts, ends = column.data, column.starts.copy(), column.ends.copy()
    last = len(data) - 1
    for bounds, step in ((starts, 1), (ends, -1)):
        while True:
            edge = np.minimum(bounds, last) if step > 0 else np.maximum(bounds - 1, 0)
            blank = _BLANK[data[edge]] & (starts < ends)
            if not blank.any():
                break
            bounds += np.where(blank, step, 0)
    wide = (starts < ends) & (
        (data[np.minimum(starts, last)] >= 0x80) | (data[np.maximum(ends - 1, 0)] >= 0x80)
    )
    for row in np.flatnonzero(wide).tolist():
        text = data[starts[row] : ends[row]].tobytes().decode("utf-8", "surrogateescape")
        left = text.lstrip()
        starts[row] += len(text.encode("utf-8", "surrogateescape")) - len(
            left.encode("utf-8", "surrogateescape")
        )
        ends[row] = starts[row] + len(left.rstrip().encode("utf-8", "surrogateescape"))
    return TextColumn(data, starts, ends)


def _has_blank_ends(column: TextColumn) -> bool:
    """Returns whether the first or last byte of a text may be a blank, or a part of one."""
    last = len(column.data) - 1
    first, end = column.data[np.minimum(column.starts, last)], column.data[column.ends - 1]
    return bool((_EDGE[first] | _EDGE[end]).any())


_BLANK = np.zeros(256, bool)
_BLANK[[*range(9, 14), *range(28, 33)]] = True  # the ASCII blanks of `str.strip`
_EDGE = _BLANK | (np.arange(256) >= 0x80)
