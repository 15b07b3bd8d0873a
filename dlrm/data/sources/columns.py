"""Columns of a log's fields as text, and their parsed numbers."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dlrm.data.sources import native
from dlrm.data.sources.row_error import RowError

MAX_HEXADECIMAL_DIGITS = 16
MAX_DECIMAL_DIGITS = 18  # so that every number fits int64
MOST_DECIMAL = 10**MAX_DECIMAL_DIGITS  # greater than all such numbers
_TAB, _RETURN = b"\t\r"


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

    def each(self, rows: np.ndarray) -> tuple["Parsed", np.ndarray]:
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

    def each(self, rows: np.ndarray) -> tuple["Coded", np.ndarray]:
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


class OfKeys:
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
    """Parses integers and hexadecimal hashes, all columns at once, by NumPy.

    Args:
        fields: `starts` and `ends` are int64 `[columns, rows]`; columns of integers come first.
        num_numerical: columns of integers.

    Returns:
        The integers and the hashes, `[columns, rows]` each, and `row * columns + column` of the
        first unreadable field, or None.
    """
    integers, bad_integers = _read_all(read_integer, fields, slice(num_numerical))
    hashes, bad_hashes = _read_all(read_hexadecimal, fields, slice(num_numerical, None))
    bad = np.concatenate([bad_integers, bad_hashes]).T
    return integers, hashes, int(bad.argmax()) if bad.any() else None


def field_error(
    fields: TextColumn, place: int, num_numerical: int, names: Sequence[str]
) -> RowError:
    """Returns the error of an unreadable field, given its `row * columns + column`."""
    row, column = divmod(place, len(names))
    expected = EXPECTED_INTEGER if column < num_numerical else EXPECTED_HEXADECIMAL
    got = TextColumn(fields.data, fields.starts[column], fields.ends[column]).text(row)
    return RowError(row, f"expected {expected}, got {got!r}", names[column])


def _read_all(
    read: Callable[[TextColumn], tuple[Parsed, np.ndarray]], fields: TextColumn, columns: slice
) -> tuple[Parsed, np.ndarray]:
    starts, ends = fields.starts[columns], fields.ends[columns]
    numbers, bad = read(TextColumn(fields.data, starts.reshape(-1), ends.reshape(-1)))
    values, missing, bad = (array.reshape(starts.shape) for array in (*numbers, bad))
    return Parsed(values, missing), bad


def hash_texts(column: TextColumn) -> np.ndarray:
    """Returns a 64-bit number for each text, the same on every machine; see `text_hash.h`."""
    data = np.ascontiguousarray(column.data)
    starts, ends = (np.ascontiguousarray(a, np.int64) for a in (column.starts, column.ends))
    if native.host is not None:
        return native.host.hash_texts(data, starts, ends)
    lengths = ends - starts
    states = lengths.astype(np.uint64) * _LENGTH_FACTOR
    padded = np.concatenate([data, np.zeros(8, np.uint8)])
    for begin in range(0, int(lengths.max(initial=0)), 8):
        rows = np.flatnonzero(lengths > begin)
        left = np.minimum(lengths[rows] - begin, 8)
        anywhere: np.ndarray = np.ndarray((len(padded) - 7,), "<u8", padded, 0, (1,))
        beyond = (8 * (8 - left)).astype(np.uint64)
        words = (anywhere[starts[rows] + begin] << beyond) >> beyond
        states[rows] = _mixed(states[rows] ^ words)
    return states


_LENGTH_FACTOR, _MIX_FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


def _mixed(x: np.ndarray) -> np.ndarray:
    for _ in range(2):
        x = (x ^ (x >> np.uint64(32))) * _MIX_FACTOR
    return x ^ (x >> np.uint64(32))


def read_hexadecimal(column: TextColumn) -> tuple[Parsed, np.ndarray]:
    """Reads up to 16 hexadecimal digits of either case as uint64; "1f" and "0000001f" are equal.

    Returns:
        The numbers, and a mask of rows that have other characters, or more digits.
    """
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


def read_integer(column: TextColumn) -> tuple[Parsed, np.ndarray]:
    """Reads decimal integers of up to 18 digits, with "-" before negative ones, as int64.

    Returns:
        The numbers, and a mask of rows that have another form.
    """
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


# Eight characters at a time, as the bytes of one 64-bit number. Constants repeat one byte.


def _bytes(byte: int) -> np.uint64:
    return np.uint64(byte * 0x0101010101010101)


def _words(data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns 0 to 8 characters of each field as a word, the last one highest, padded with "0"."""
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
    # Writing these nibbles in lower case must give the digits again.
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
    # Joins neighbors: 8 digits, 4 numbers up to 99, 2 up to 9999, 1 up to 99999999.
    x = ((digits & _bytes(0x0F)) * np.uint64(10 * 2**8 + 1)) >> np.uint64(8)
    x = ((x & np.uint64(0x00FF00FF00FF00FF)) * np.uint64(100 * 2**16 + 1)) >> np.uint64(16)
    x = ((x & np.uint64(0x0000FFFF0000FFFF)) * np.uint64(10_000 * 2**32 + 1)) >> np.uint64(32)
    return x, bad


def stripped(column: TextColumn) -> TextColumn:
    """Strips blanks around texts, like `str.strip` for UTF-8."""
    if not len(column.data) or not _has_blank_ends(column):
        return column
    data, starts, ends = column.data, column.starts.copy(), column.ends.copy()
    last = len(data) - 1
    for places, step in ((starts, 1), (ends, -1)):
        while True:
            edge = np.minimum(places, last) if step > 0 else np.maximum(places - 1, 0)
            blank = _BLANK[data[edge]] & (starts < ends)
            if not blank.any():
                break
            places += np.where(blank, step, 0)
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
