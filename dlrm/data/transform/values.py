"""One value, one text: the text by which a value is known, whatever it was read from.

A table has the same values as Parquet, CSV, JSON lines or a data frame, and as a mapping in Python,
but each writes them in its own way: true and True, 12 and 12.0, 2026-11-20 and 2026-11-20T00:00:00.
`canonical` gives such texts one form, and `KnownTexts` compares values of another class, such as
the number 1, with the texts that a field had in training, such as true.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from functools import cached_property
from typing import Any

import numpy as np

from dlrm.data.choices import BITS, SPELLINGS
from dlrm.data.sources.columns import TextColumn, hash_texts
from dlrm.data.transform.dictionaries import Dictionary

TEXT, NUMBER, BOOLEAN, TIME = "text", "number", "boolean", "time"
NUMBERS_IN_TEXT = "string of numbers"  # type of a field that had no other texts
_NUMBER_TYPES = ("int", "uint", "float", "halffloat", "double", "decimal")  # names in Arrow
_WHOLE = re.compile(r"(-?(?:0|[1-9]\d*))\.0+", re.ASCII)
_TIME = re.compile(
    r"(\d{4}-\d\d-\d\d)"
    r"(?:[ T](\d\d:\d\d)(?::(\d\d)(?:[.,](\d{1,9}))?)? ?(Z|[+-]\d\d(?::?\d\d)?)?)?",
    re.ASCII,
)
_TIME_OF_DAY = re.compile(r"(\d\d:\d\d:\d\d)\.(\d+)", re.ASCII)
_ANY_TIME = re.compile(r"(?:\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d)[^Z]*(Z?)", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+)(\.\d*)?([eE][+-]?\d+)?", re.ASCII)
NAN = ("nan", "NaN", "NAN")
KEYS_OF_NAN = hash_texts(TextColumn.from_bytes([text.encode() for text in NAN]))
NUMBER_OR_NAN = re.compile(rf"(?:{_NUMBER.pattern}|(?i:nan))", re.ASCII)
_FEW = 16  # texts of a column that are compared one by one, without a search for candidates
_EXPONENT = re.compile(r"-?\d+(\.\d+[eE][+-]?|[eE][+-])\d+", re.ASCII)
_SMALL = re.compile(r"-?0\.0000\d*[1-9]", re.ASCII)
_LONGEST_NUMBER = 25  # characters of a number with an exponent
_MOST_WHOLE = 1 << 64  # whole numbers below it are written without an exponent
FLOAT64_BITS = 53  # beyond 2^53 float64 has not every whole number
MOST_EXACT = 1 << FLOAT64_BITS


def canonical_text(text: str) -> str:
    """Returns the canonical form of a text.

    * `True`, `TRUE`, `False` and `FALSE` are written in lower case.
    * A whole number has no fraction of zeros: 12 for 12.0, but 1.10 and 007 stay as they are.
    * A number with an exponent that has a sign, or a fraction before it, is written as Python does,
      and in digits if it is whole and below 2^64: 12345678 for 1.2345678E7, 1e-07 for 1e-7. So is
      a small one, such as 0.00001. Other texts, such as 12e5 and those of more than 25 characters,
      may be codes, and stay as they are.
    * A date with a time, in ISO 8601, is `2026-11-20 08:00:00`, with a fraction of seconds that
      does not end in 0; midnight is the date alone. With a zone it is in UTC, and ends in Z.
    * A time of day has a fraction of seconds only if it is not 0.

    Args:
        text: a text without surrounding blanks.
    """
    if len(text) < 3 or text.isdecimal():
        return "0" if text == "-0" else text
    if text in SPELLINGS:
        return SPELLINGS[text]
    if not text.isascii():
        return text
    if (whole := _WHOLE.fullmatch(text)) is not None:
        return "0" if whole[1] == "-0" else whole[1]
    if len(text) <= _LONGEST_NUMBER and _EXPONENT.fullmatch(text) is not None:
        return number_text(text)
    if _SMALL.fullmatch(text) is not None:
        return number_text(text)
    if (time := _TIME.fullmatch(text)) is not None:
        return _canonical_time(text, *time.groups())
    if (clock := _TIME_OF_DAY.fullmatch(text)) is not None:
        fraction = clock[2].rstrip("0")
        return f"{clock[1]}.{fraction}" if fraction else clock[1]
    return text


def _canonical_time(
    text: str, day: str, minutes: str | None, second: str | None, part: str | None, zone: str | None
) -> str:
    if minutes is None:
        return text
    clock, fraction = f"{minutes}:{second or '00'}", (part or "").rstrip("0")
    if zone not in (None, "Z"):
        from datetime import datetime

        colon = zone if ":" in zone else f"{zone[:3]}:{zone[3:] or '00'}"
        try:
            utc = datetime.fromisoformat(f"{day}T{clock}{colon}")
            offset = utc.utcoffset()
            assert offset is not None
            day, clock = str(utc.replace(tzinfo=None) - offset).split(" ")
        except (ValueError, OverflowError):
            return text
    rest = "" if clock == "00:00:00" and not fraction else f" {clock}"
    return f"{day}{rest}{'.' * bool(fraction)}{fraction}{'Z' * (zone is not None)}"


def canonical(column: TextColumn) -> TextColumn:
    """Returns texts, without surrounding blanks, in their canonical form."""
    return replaced(column, _candidates(column), canonical_text)


def _candidates(column: TextColumn) -> np.ndarray:
    """Returns the rows whose texts may have another canonical form."""
    data, starts, ends = column
    if len(starts) <= _FEW:
        return np.arange(len(starts))
    lengths = ends - starts
    if not lengths.max():
        return np.empty(0, np.int64)
    last = len(data) - 1
    first, end = data[np.minimum(starts, last)], data[np.maximum(ends - 1, 0)]
    words = (lengths == 2) & (first == ord("-")) & (end == ord("0"))
    words |= ((lengths == 4) & np.isin(first, _T)) | ((lengths == 5) & np.isin(first, _F))
    zeros = (end == ord("0")) & (lengths > 2) & _has(column, _POINT)
    fifth, third = data[np.minimum(starts + 4, last)], data[np.minimum(starts + 2, last)]
    times = (lengths > 10) & (fifth == ord("-")) & (data[np.minimum(starts + 7, last)] == ord("-"))
    times |= (lengths > 9) & (third == ord(":"))
    numbers = (lengths > 3) & (lengths <= _LONGEST_NUMBER) & _DIGIT[end]
    numbers &= _DIGIT[first] | (first == ord("-"))
    numbers &= _has(column, ord("e")) | _has(column, ord("E"))
    begins = starts + (first == ord("-"))
    small = lengths > 6
    for offset, character in enumerate(b"0.0000"):
        small &= data[np.minimum(begins + offset, last)] == character
    return np.flatnonzero(words | zeros | times | numbers | small)


_DIGIT = np.isin(np.arange(256), np.frombuffer(b"0123456789", np.uint8))
_T, _F = (np.frombuffer(letters, np.uint8) for letters in (b"Tt", b"Ff"))


def replaced(
    column: TextColumn, rows: np.ndarray, replace: Callable[[str], str] | Mapping[str, str]
) -> TextColumn:
    """Returns texts of which those of some rows are replaced; a mapping has those that change."""
    data, starts, ends = column
    first, of_distinct = rows, np.arange(len(rows))
    if len(rows) > _FEW:  # each text once, as values mostly repeat
        hashes = hash_texts(TextColumn(data, starts[rows], ends[rows]))
        _, indices, of_distinct = np.unique(hashes, return_index=True, return_inverse=True)
        first = rows[indices]
    changed: dict[int, bytes] = {}
    whole = data.data
    for index, (begin, end) in enumerate(
        zip(starts[first].tolist(), ends[first].tolist(), strict=True)
    ):
        text = str(whole[begin:end], "utf-8", "surrogateescape")
        new = replace.get(text, text) if isinstance(replace, Mapping) else replace(text)
        if new != text:
            changed[index] = new.encode("utf-8", "surrogateescape")
    if not changed:
        return column
    new_starts, new_ends = starts[first], ends[first]
    indices = np.fromiter(changed, np.int64, len(changed))
    lengths = np.fromiter(map(len, changed.values()), np.int64, len(changed))
    added = b"".join(changed.values())
    new_ends[indices] = len(data) + np.cumsum(lengths)
    new_starts[indices] = new_ends[indices] - lengths
    starts, ends = starts.copy(), ends.copy()
    starts[rows], ends[rows] = new_starts[of_distinct], new_ends[of_distinct]
    every = np.concatenate([data, np.frombuffer(added + bytes(8), np.uint8)])
    return TextColumn(every, starts, ends)


def number_text(text: str) -> str:
    """Returns a number's text as that of a typed value: 12.5 for 12.50; other texts as they are."""
    if (number := _NUMBER.fullmatch(text)) is None:
        return text
    if number[3]:
        value = float(text)
        if math.isinf(value) or (not value and (number[1] + (number[2] or "")).strip("0.")):
            return text  # beyond float64
        whole = value.is_integer() and abs(value) < _MOST_WHOLE
        return str(int(value)) if whole else repr(value)
    sign = "-" if text[0] == "-" else ""
    digits, fraction = number[1].lstrip("0") or "0", (number[2] or "").rstrip("0").rstrip(".")
    plain = f"{sign * (f'{digits}{fraction}' != '0')}{digits}{fraction}"
    if digits == "0" and fraction.startswith(".0000"):  # which Python writes with an exponent
        short = repr(float(plain))
        return short if Decimal(short) == Decimal(plain) else plain
    return plain


def is_number_type(type: str) -> bool:
    """Returns whether a type in Arrow, by its name, has numbers."""
    return type.startswith(_NUMBER_TYPES)


def are_inexact(values: np.ndarray, bits: int) -> np.ndarray:
    """Returns a mask of floats that may stand for other integers: from 2^bits to 2^64."""
    return (np.abs(values) >= 1 << bits) & (np.abs(values) < _MOST_WHOLE)


def is_inexact(text: str, bits: int = FLOAT64_BITS) -> bool:
    """Returns whether a text is that of a float in `are_inexact`, which canonical text hides."""
    if _WHOLE.fullmatch(text) is None and _EXPONENT.fullmatch(text) is None:
        return False
    return 1 << bits <= abs(float(text)) < _MOST_WHOLE


def _zone_of(text: str) -> str | None:
    """Returns "Z" for a time with a zone, "" for one without, and None for other texts."""
    time = _ANY_TIME.fullmatch(text)
    return None if time is None else time[1]


class KnownTexts:
    """The texts that a field had in training, and values of other types that mean them.

    Args:
        column: name of the field's column.
        dictionary: its texts, in canonical form.
        type: the type of the training values in Arrow.
    """

    def __init__(self, column: str, dictionary: Dictionary, type: str) -> None:
        self.column, self._dictionary, self._type = column, dictionary, type
        self._typed = is_number_type(type)
        self._narrow: Any = {"float": np.float32, "halffloat": np.float16}.get(type)
        self._inexact: dict[int, str | None] = {}
        self._had: dict[tuple[str, str | None], bool] = {}  # by class, and zone of times

    def match(self, column: TextColumn, present: np.ndarray, value_class: str) -> TextColumn:
        """Returns texts of values as the texts that the field had for them.

        Args:
            column: the values' texts, in canonical form.
            present: mask of the values that are not missing.
            value_class: `NUMBER`, `BOOLEAN` or `TIME` of typed values; `TEXT` of others.

        Raises:
            ValueError: the field never had values of a class; the message names both.
        """
        rows = np.flatnonzero(present)
        if not len(rows) or (value_class == TEXT and not self._typed and self._words is None):
            return column
        if self._words is not None:
            column = replaced(column, rows, self._words)
            value_class = TEXT if value_class in (BOOLEAN, NUMBER) else value_class
        if value_class != TEXT:
            self._check(value_class, column.text(int(rows[0])))
        if self._typed:
            if value_class == NUMBER and self._narrow is None:
                return column
            return replaced(column, rows, self._typed_number)
        if value_class == NUMBER and self._spellings:
            return replaced(column, rows, self._spelling)
        return column

    def _typed_number(self, text: str) -> str:
        plain = number_text(BITS.get(text, text))
        if self._narrow is not None and _NUMBER.fullmatch(plain):
            with np.errstate(over="ignore"):
                return canonical_text(str(np.float32(self._narrow(plain))))
        return plain

    @cached_property
    def _words(self) -> dict[str, str] | None:
        """Returns the texts that mean true and false, if the field had no other values."""
        if self._type == "bool":  # to which later rows may have added integers
            return {"1": "true", "0": "false"}
        if len(self._dictionary) > 2:
            return None
        texts = set(self._texts())
        if texts and texts <= {"true", "false"}:
            return {"1": "true", "0": "false"}
        return {"true": "1", "false": "0"} if texts and texts <= {"0", "1"} else None

    def _texts(self) -> Iterator[str]:
        """Yields all texts in the order of their ids."""
        return (str(self._dictionary.value(id)) for id in range(1, len(self._dictionary) + 1))

    def _texts_where(self, chosen: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Iterator[str]:
        """Yields the texts that a function of the first bytes and lengths selects."""
        dictionary = self._dictionary
        if dictionary.texts is None or dictionary.ends is None or not len(dictionary.texts):
            return iter(())
        starts = np.concatenate([[0], dictionary.ends[:-1]])
        first = dictionary.texts[np.minimum(starts, len(dictionary.texts) - 1)]
        rows = np.flatnonzero(chosen(first, dictionary.ends - starts)).tolist()
        return (str(dictionary.value(row + 1)) for row in rows)

    @cached_property
    def _padded(self) -> str | None:
        """Returns the first text of digits that begin with 0, as those of codes do."""
        texts = self._texts_where(lambda first, lengths: (first == ord("0")) & (lengths > 1))
        return next(filter(str.isdecimal, texts), None)

    def inexact(self, bits: int) -> str | None:
        """Returns the first text of an integer that floats with so many bits do not have."""
        if bits not in self._inexact:
            least = len(str(1 << bits))
            texts = self._texts_where(lambda first, lengths: (lengths >= least) & (lengths < 21))
            integers = filter(re.compile(r"-?\d+", re.ASCII).fullmatch, texts)
            rest = (text for text in integers if _is_rounded(int(text), bits))
            self._inexact[bits] = next(rest, None)
        return self._inexact[bits]

    @cached_property
    def _spellings(self) -> dict[str, list[str]]:
        """Returns the texts of numbers, by those of the same typed numbers, where they differ."""
        dictionary, spellings = self._dictionary, dict[str, list[str]]()
        if dictionary.texts is None or not np.isin(dictionary.texts, _MARKS).any():
            return {}
        for text in self._texts():
            spellings.setdefault(number_text(text), []).append(text)
        return {plain: texts for plain, texts in spellings.items() if texts != [plain]}

    def _spelling(self, text: str) -> str:
        first, *others = self._spellings.get(text, [text])
        if others:
            raise ValueError(
                f"column {self.column!r}: {first!r} and {others[0]!r} differ in the training data, "
                f"and the number {text} may be either: read the column as text"
            )
        return first

    def _check(self, value_class: str, got: str) -> None:
        """Raises ValueError if the field never had values of a class."""
        tests: dict[str, Callable[[str], object]] = {  # of a text
            NUMBER: _NUMBER.fullmatch,
            BOOLEAN: {"true", "false", "0", "1"}.__contains__,
            TIME: lambda text: _zone_of(text) == _zone_of(got),
        }
        key = value_class, _zone_of(got) if value_class == TIME else None
        if key not in self._had:
            self._had[key] = any(map(tests[value_class], self._texts()))
        padded = self._padded if value_class == NUMBER and not self._typed else None
        first = next(self._texts(), None)
        if first is None or (padded is None and self._had[key]):
            return
        hint = "; true_values in the schema names a text that means true" * (value_class == BOOLEAN)
        hint += "; a number has no zeros at its beginning: read the column as text" * bool(padded)
        raise ValueError(
            f"column {self.column!r}: expected values such as {padded or first!r}, as in the "
            f"training data, got the {value_class} {got}{hint}"
        )


def _is_rounded(integer: int, bits: int) -> bool:
    return integer % (1 << max(integer.bit_length() - bits, 0)) != 0


_POINT = ord(".")
_MARKS = np.frombuffer(b".eE+", np.uint8)  # numbers without these have one text


def _has(column: TextColumn, character: int) -> np.ndarray:
    """Returns a mask of texts with a character of ASCII."""
    positions = np.flatnonzero(column.data == character)
    if not len(positions):
        return np.zeros(len(column.starts), bool)
    return np.searchsorted(positions, column.starts) < np.searchsorted(positions, column.ends)
