"""One value, one text: the text by which a value is known, whatever it was read from.

A table has the same values as Parquet, CSV, JSON lines or a data frame, and as a mapping in Python,
but each writes them in its own way: true and True, 12 and 12.0, 2026-11-20 and 2026-11-20T00:00:00.
`canonical` gives such texts one form, and `KnownTexts` compares values of another kind, such as the
number 1, with the texts that a field had in training, such as true.
"""

import re
from collections.abc import Callable, Mapping
from functools import cached_property

import numpy as np

from dlrm.data.sources.columns import TextColumn
from dlrm.data.transform.dictionaries import Dictionary

TEXT, NUMBER, BOOLEAN, TIME, DURATION = "text", "number", "boolean", "time", "duration"
SPELLINGS = {**dict.fromkeys(("true", "True", "TRUE"), "true")}
SPELLINGS |= dict.fromkeys(("false", "False", "FALSE"), "false")
_WHOLE = re.compile(r"(-?(?:0|[1-9]\d*))\.0+", re.ASCII)
_TIME = re.compile(
    r"(\d{4}-\d\d-\d\d)"
    r"(?:[ T](\d\d:\d\d)(?::(\d\d)(?:[.,](\d{1,9}))?)? ?(Z|[+-]\d\d(?::?\d\d)?)?)?",
    re.ASCII,
)
_TIME_OF_DAY = re.compile(r"(\d\d:\d\d:\d\d)\.(\d+)", re.ASCII)
_DAYS = re.compile(r"([+-]?)(\d+) days?,? ([+-]?)(\d\d?):(\d\d):(\d\d)(?:\.(\d{1,9}))?", re.ASCII)
_PERIOD = re.compile(
    r"(-?)P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+)(?:\.(\d{1,9}))?S)?)?", re.ASCII
)
_DURATION = re.compile(r"-?\d+(\.\d+)?s", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+)(\.\d*)?([eE][+-]?\d+)?", re.ASCII)
_FEW = 16  # texts of a column that are compared one by one, without a search for candidates
_MOST_SEEN = 1000  # texts of a dictionary whose kinds are compared
_MOST_WRITTEN = 1 << 20  # texts of a dictionary that are compared as numbers


def canonical_text(text: str) -> str:
    """Returns the canonical form of a text.

    * `True`, `TRUE`, `False` and `FALSE` are written in lower case.
    * A whole number has no fraction of zeros: 12 for 12.0, but 1.10 and 007 stay as they are.
    * A date with a time, in ISO 8601, is `2026-11-20 08:00:00`, with a fraction of seconds that
      does not end in 0; midnight is the date alone. With a zone it is in UTC, and ends in Z.
    * A time of day has a fraction of seconds only if it is not 0.
    * A duration, as `1 days 02:00:00` or in ISO 8601, is its seconds: 93600s.

    Args:
        text: a text without surrounding blanks.
    """
    if len(text) < 3 or text.isdecimal():
        return text
    if text in SPELLINGS:
        return SPELLINGS[text]
    if not text.isascii():
        return text
    if (whole := _WHOLE.fullmatch(text)) is not None:
        return "0" if whole[1] == "-0" else whole[1]
    if (time := _TIME.fullmatch(text)) is not None:
        return _canonical_time(text, *time.groups())
    if (clock := _TIME_OF_DAY.fullmatch(text)) is not None:
        fraction = clock[2].rstrip("0")
        return f"{clock[1]}.{fraction}" if fraction else clock[1]
    if (days := _DAYS.fullmatch(text)) is not None:
        sign, count, of_clock, *parts = days.groups()
        part = _nanoseconds("0", *parts)
        total = int(f"{sign}{count}") * 86_400 * 10**9
        return seconds_text(total - part if of_clock == "-" else total + part)
    if len(text) > 2 and (period := _PERIOD.fullmatch(text)) is not None:
        nanoseconds = _nanoseconds(*(part or "0" for part in period.groups()[1:]))
        return seconds_text(-nanoseconds if period[1] else nanoseconds)
    return text


def _nanoseconds(days: str, hours: str, minutes: str, seconds: str, part: str | None) -> int:
    whole = ((int(days) * 24 + int(hours)) * 60 + int(minutes)) * 60 + int(seconds)
    return whole * 10**9 + int((part or "").ljust(9, "0"))


def seconds_text(nanoseconds: int) -> str:
    """Returns the canonical text of a duration."""
    whole, part = divmod(abs(nanoseconds), 10**9)
    fraction = f".{part:09}".rstrip("0") if part else ""
    return f"{'-' * (nanoseconds < 0)}{whole}{fraction}s"


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
    words = ((lengths == 4) & np.isin(first, _T)) | ((lengths == 5) & np.isin(first, _F))
    zeros = (end == ord("0")) & (lengths > 2) & _has(column, _POINT)
    fifth, third = data[np.minimum(starts + 4, last)], data[np.minimum(starts + 2, last)]
    times = (lengths > 10) & (fifth == ord("-")) & (data[np.minimum(starts + 7, last)] == ord("-"))
    times |= (lengths > 9) & (third == ord(":"))
    durations = (first == ord("P")) | (
        (first == ord("-")) & (data[np.minimum(starts + 1, last)] == ord("P"))
    )
    durations |= _has(column, ord("y")) & _has(column, ord(":"))
    return np.flatnonzero(words | zeros | times | durations)


_T, _F = (np.frombuffer(letters, np.uint8) for letters in (b"Tt", b"Ff"))


def replaced(
    column: TextColumn, rows: np.ndarray, replace: Callable[[str], str] | Mapping[str, str]
) -> TextColumn:
    """Returns texts of which those of some rows are replaced.

    Args:
        column: the texts, encoded in UTF-8.
        rows: indices of the rows.
        replace: function of a text, or a mapping of those that change.
    """
    data, starts, ends = column
    changed: dict[int, bytes] = {}
    for row in rows.tolist():
        raw = data[starts[row] : ends[row]].tobytes()
        text = raw.decode("utf-8", "surrogateescape")
        new = replace.get(text, text) if isinstance(replace, Mapping) else replace(text)
        if new != text:
            changed[row] = new.encode("utf-8", "surrogateescape")
    if not changed:
        return column
    places = np.fromiter(changed, np.int64, len(changed))
    lengths = np.fromiter(map(len, changed.values()), np.int64, len(changed))
    added = b"".join(changed.values())
    starts, ends = starts.copy(), ends.copy()
    ends[places] = len(data) + np.cumsum(lengths)
    starts[places] = ends[places] - lengths
    return TextColumn(
        np.concatenate([data, np.frombuffer(added + bytes(8), np.uint8)]), starts, ends
    )


def number_text(text: str) -> str:
    """Returns a number's text as that of a typed value: 12.5 for 12.50; other texts as they are."""
    if (number := _NUMBER.fullmatch(text)) is None:
        return text
    if number[3]:
        value = float(text)
        return str(int(value)) if value.is_integer() and abs(value) < 1 << 53 else repr(value)
    sign = "-" if text[0] == "-" else ""
    whole, fraction = number[1].lstrip("0") or "0", (number[2] or "").rstrip("0").rstrip(".")
    return f"{sign * (f'{whole}{fraction}' != '0')}{whole}{fraction}"


def _is_time(text: str) -> bool:
    return _TIME.fullmatch(text) is not None or re.match(r"\d\d:\d\d:\d\d", text) is not None


class KnownTexts:
    """The texts that a field had in training, and values of other kinds that mean them.

    Args:
        column: name of the column, for messages.
        dictionary: its texts, in canonical form.
        typed: whether the training data had numbers, and not texts of them.
    """

    def __init__(self, column: str, dictionary: Dictionary, typed: bool) -> None:
        self.column, self._dictionary, self._typed = column, dictionary, typed

    def match(self, column: TextColumn, present: np.ndarray, kind: str) -> TextColumn:
        """Returns texts of values as the texts that the field had for them.

        Args:
            column: the values' texts, in canonical form.
            present: mask of the values that are not missing.
            kind: `NUMBER`, `BOOLEAN` or `TIME` of typed values; `TEXT` of others.

        Raises:
            ValueError: typed values are of a kind that the field never had; the message names both.
        """
        rows = np.flatnonzero(present)
        if not len(rows):
            return column
        if self._words is not None:
            column = replaced(column, rows, self._words)
            kind = TEXT if kind in (BOOLEAN, NUMBER) else kind
        if kind != TEXT:
            self._check(kind, column.text(int(rows[0])))
        if self._typed:
            return column if kind == NUMBER else replaced(column, rows, self._number)
        if kind == NUMBER and len(pointed := rows[_has(column, _POINT)[rows]]):
            return replaced(column, pointed, self._written)
        return column

    @staticmethod
    def _number(text: str) -> str:
        return number_text({"true": "1", "false": "0"}.get(text, text))

    @cached_property
    def _words(self) -> dict[str, str] | None:
        """Returns the texts that mean true and false, if the field had no other values."""
        texts = set(self._seen)
        if not texts or len(self._dictionary) > 2:
            return None
        if texts <= {"true", "false"}:
            return {"1": "true", "0": "false"}
        return {"true": "1", "false": "0"} if texts <= {"0", "1"} else None

    @cached_property
    def _seen(self) -> list[str]:
        most = min(len(self._dictionary), _MOST_SEEN)
        return [str(self._dictionary.value(id)) for id in range(1, most + 1)]

    @cached_property
    def _padded(self) -> str | None:
        """Returns the first text of digits that begin with 0, as those of codes do."""
        dictionary = self._dictionary
        if dictionary.texts is None or dictionary.ends is None or not len(dictionary):
            return None
        starts = np.concatenate([[0], dictionary.ends[:-1]])
        long = np.flatnonzero(dictionary.ends - starts > 1)
        for place in long[dictionary.texts[starts[long]] == ord("0")].tolist():
            if (text := str(dictionary.value(place + 1))).isdecimal():
                return text
        return None

    @cached_property
    def _written(self) -> dict[str, str]:
        """Returns the texts of numbers that end in zeros, by those of the same typed numbers."""
        found: dict[str, list[str]] = {}
        for id in range(1, min(len(self._dictionary), _MOST_WRITTEN) + 1):
            text = str(self._dictionary.value(id))
            found.setdefault(number_text(text), []).append(text)
        return {plain: texts[0] for plain, texts in found.items() if texts not in ([plain],)}

    def _check(self, kind: str, got: str) -> None:
        """Raises ValueError if the field never had values of a kind."""
        seen = self._seen
        tests: dict[str, Callable[[str], object]] = {
            NUMBER: _NUMBER.fullmatch,
            BOOLEAN: {"true", "false", "0", "1"}.__contains__,
            TIME: _is_time,
            DURATION: _DURATION.fullmatch,
        }
        padded = self._padded if kind == NUMBER and not self._typed else None
        if not seen or (padded is None and any(map(tests[kind], seen))):
            return
        hint = {BOOLEAN: "; true_values in the schema names a text that means true"}.get(kind, "")
        hint = (
            "; a number has no zeros at its beginning: read the column as text" if padded else hint
        )
        raise ValueError(
            f"column {self.column!r}: expected values such as {padded or seen[0]!r}, as in the "
            f"training data, got the {kind} {got}{hint}"
        )


_POINT = ord(".")


def _has(column: TextColumn, character: int) -> np.ndarray:
    """Returns a mask of texts with a character of ASCII."""
    places = np.flatnonzero(column.data == character)
    if not len(places):
        return np.zeros(len(column.starts), bool)
    return np.searchsorted(places, column.starts) < np.searchsorted(places, column.ends)
