"""Assigns the columns of a table to fields of a schema, with the reasons."""

import re
from collections.abc import Callable, Collection
from dataclasses import replace

import numpy as np

from dlrm.data.clicks.bags import MAX_LENGTH
from dlrm.data.tables import names
from dlrm.data.tables.summaries import BOOLEANS, NUMBERS, OTHER, TEXT, TIMES, Summary
from dlrm.data.transform.fields import TIME_UNITS, CategoricalField, NumericalField, TimeField
from dlrm.data.transform.values import FLOAT64_BITS, SPELLINGS
from dlrm.documents import one_line

FEW_VALUES = 12  # integers with up to so many values are categories, such as months
MANY_VALUES = 1000  # beyond this, rare values do not need a row of a table each
RARE = 5  # times in the sample
HUGE = 100_000  # distinct values
_HUGE_LIMIT, _MAX_IDS, _MOST_BUCKETS = 15, 1_000_000, 1 << 20
_FAR = 10.0  # standard deviations from the mean to the largest value
_NEAR = 20.0  # from the mean to the largest value, below which no logarithm is needed
_FAR_OF_MOST = 1000.0  # times the range of most values from the middle to an end
_UNIQUE_ROWS = 100  # from this many rows, a distinct value in every row is no coincidence
_LEAK = 0.9  # share of the label's variance that a column explains
_SURE = 0.2  # share of the rarer label that values tell which have no other
_LONGEST_SHOWN = 24
_LARGEST_INTEGER = float(1 << 63)
# Texts that mean "missing" in columns of other kinds, and that no category has as its name.
SURE_MARKERS = {"?", "n/a", "nan", "null", "\\n"}
YES, NO = {"1", "yes", "y", "true", "t", "positive", "on"}, {"0", "-1", "no", "n", "false", "f"}
NO |= {"negative", "off"}
_EPOCHS = (946_684_800, 2_524_608_000)  # the years 2000 and 2050, in seconds
_LONG = 63_072_000  # 2 years in seconds
_MONEY = r"[+-]?[^\w\s.,+-]{0,3}\s?[+-]?(?:\d{1,3}(?:[,.' ]\d{3})+|\d+)(?:[.,]\d+)?"
_MONEY += r"\s?(?:%|[^\w\s.,]|USD|EUR|GBP)?"
_PAIRS = r"\w+:[+-]?[\d.]+(?:e[+-]?\d+)?(?:[ ,;|]+\w+:[+-]?[\d.]+(?:e[+-]?\d+)?)*"
_LISTED = ("|", ";", ",", " ")


class Drafter:
    """Assigns columns to fields, with reasons.

    Args:
        columns: the summaries of all columns, by name.
        time: the column of times; None takes the first one that is found.
    """

    def __init__(self, columns: dict[str, Summary], time: str | None) -> None:
        self.numerical: list[NumericalField] = []
        self.categorical: list[CategoricalField] = []
        self.comments: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self.in_doubt: list[str] = []
        self.disguised: dict[str, str] = {}
        self.leaks: dict[str, str] = {}
        self.partial_leaks: dict[str, str] = {}
        self.inexact: dict[str, str] = {}
        self.time: TimeField | None = None
        self._taken = set(columns)
        if time is not None:
            self.time = self._time(columns[time], chosen=True)

    def add(self, summary: Summary) -> None:
        """Makes a field of a column, or leaves it out."""
        name = summary.name
        if (why := _useless(summary)) is not None:
            self.left_out[name] = why
            return
        if summary.values is not None:
            self._add_list(summary, summary.values)
        elif summary.is_time or _has_format(summary) or _unit_of_epoch(summary):
            self._add_time(summary)
        elif summary.is_number:
            self._add_number(summary)
        else:
            note, in_disguise = _text_note(summary)
            self._add_categorical(summary, note)
            if in_disguise:
                self.disguised[name] = note
        if name not in self.left_out:
            self._note_leak(summary)

    def _note_leak(self, summary: Summary) -> None:
        signal = summary.signal
        share = max(signal.by_value, signal.by_order)
        if max(share / _LEAK, signal.sure / _SURE) < 1 or summary.rows < _UNIQUE_ROWS:
            return
        if self.time is not None and summary.name == self.time.column:
            return
        if share >= _LEAK:
            self.leaks[summary.name] = f"explains {share:.1%} of the label's variance on its own"
            note = f"nearly tells the label ({share:.1%} of its variance)"
        else:
            note = f"tells the label in {signal.sure:.1%} of the rows with the rarer one"
            self.partial_leaks[summary.name] = note
        said = self.comments.get(summary.name, "")
        self.comments[summary.name] = f"{said}; {note}: known before it?"

    def _add_list(self, summary: Summary, values: Summary) -> None:
        if values.kind == TIMES:
            self.left_out[summary.name] = f"lists of times; {_described(values)}"
            return
        if values.is_number and not _whole(values):
            why = f"a list of numbers, up to {summary.longest}; {_described(values)}"
            self.left_out[summary.name] = f"{why} (weights: {summary.name} in another list field?)"
            return
        self._add_categorical(values, "")
        longest = min(max(summary.longest, 1), MAX_LENGTH)
        self.categorical[-1] = replace(self.categorical[-1], max_length=longest)
        lists = f"lists of up to {summary.longest}, {values.rows / summary.rows:.3g} on average"
        empty = (summary.empty + summary.missing) / summary.rows
        lists += f", {empty:.2%} empty" if empty else ""
        self.comments[summary.name] = f"{lists}; {self.comments[summary.name]}"

    def _add_time(self, summary: Summary) -> None:
        described, absent = described_column(summary), _absent(summary)
        if self.time is not None:
            self.left_out[summary.name] = f"a further time beside {self.time.column}; {described}"
        elif absent or summary.infinite:
            self.left_out[summary.name] = f"a time that some rows do not have; {described}"
        else:
            self.time = self._time(summary)

    def _time(self, summary: Summary, chosen: bool = False) -> TimeField:
        """Returns the field of a time, and comments it."""
        if absent := chosen and _absent(summary):
            raise ValueError(
                f"--time: column {summary.name!r}: expected a time in every row, got none in "
                f"{absent:,} of {summary.rows:,} rows; fill it, or draft without --time"
            )
        field, note = TimeField(summary.name), ""
        if summary.is_number and not _has_format(summary):
            unit, note = _unit(summary), "; unit {} by its size"
            if unit is None:  # seconds of at most 2 years
                span = summary.numbers.most - summary.numbers.least
                unit = "s" if span <= _LONG else "ms"
                note = "; counts from another moment than 1970, in {} by its range"
            field, note = TimeField(summary.name, unit=unit), note.format(unit)
        elif not summary.is_time and _has_format(summary):
            field, note = _formatted(summary)
        elif not summary.is_time:
            example = f" such as {shown(summary.examples[0])}" * bool(summary.examples)
            raise ValueError(
                f"--time: column {summary.name!r}: expected times, got the type "
                f"{', '.join(summary.types)}{example}"
            )
        elif not summary.zoned:
            field, note = TimeField(summary.name, zone="UTC"), "; has no zone, UTC is assumed"
        self.comments[summary.name] = described_column(summary) + note
        return field

    def _add_number(self, summary: Summary) -> None:
        why, kinds = _kinds(summary)
        if kinds == _BOTH and f"{summary.name}_number" in self._taken:
            kinds = (_ID,)
        if summary.infinite and _NUMBER in kinds:
            self.left_out[summary.name] = (
                f"infinite values in {summary.infinite:,} rows, which prepare refuses: replace "
                f"them, then make it numerical; {_described(summary)}"
            )
            return
        if _NUMBER in kinds:
            self._add_numerical(summary, why)
        if _ID in kinds:
            self._add_categorical(summary, why)
        if kinds == _BOTH:
            self.in_doubt.append(summary.name)

    def _add_numerical(self, summary: Summary, why: str) -> None:
        numbers, transform = summary.numbers, "standardize"
        if _is_far(summary):
            positive = numbers.least >= 0 and numbers.most > _NEAR
            transform = "log" if positive else "quantile"
        markers = tuple(_markers(summary)) or None
        self.numerical.append(NumericalField(summary.name, transform, missing_values=markers))
        self.comments[summary.name] = f"{described_column(summary)}; {why}"

    def _add_categorical(self, summary: Summary, why: str) -> None:
        kind, distinct = "string", len(summary.distinct)
        numbers = summary.numbers
        largest = max(abs(numbers.least), abs(numbers.most))
        if summary.is_number and _whole(summary) and not summary.exponents:
            kind = "integer" if largest < _LARGEST_INTEGER else "string"
        limit, max_ids, buckets = 1, None, 0
        rare, _ = summary.distinct.below(RARE)
        if distinct >= HUGE:
            limit, max_ids = _HUGE_LIMIT, _MAX_IDS
            _, rows = summary.distinct.below(_HUGE_LIMIT)
            if rows > summary.present / 5:
                buckets = min(1 << (distinct // 10).bit_length(), _MOST_BUCKETS)
        elif distinct > MANY_VALUES and rare > distinct / 2:
            limit = RARE
        field = CategoricalField(summary.name, kind, limit, max_ids, buckets)
        true, false = _spellings(summary) if kind == "string" else ((), ())
        self.categorical.append(
            replace(
                field,
                missing_values=tuple(_markers(summary)) or None,
                true_values=true,
                false_values=false,
            )
        )
        self.comments[summary.name] = described_column(summary) + (f"; {why}" if why else "")
        if summary.inexact:
            self.inexact[summary.name] = _inexact(summary)
            self.comments[summary.name] += f"; {_inexact(summary)}"


def _inexact(summary: Summary) -> str:
    """Describes the floats of a category, which is refused when it is prepared."""
    return (
        f"floats that need not be exact: above 2^{summary.inexact} read the column as integers or "
        "text"
    )


_NUMBER, _ID = "number", "id"
_BOTH = (_NUMBER, _ID)


def _kinds(summary: Summary) -> tuple[str, tuple[str, ...]]:
    """Returns whether a column of numbers is a number, an id or both, and the reason."""
    distinct, numbers, name = len(summary.distinct), summary.numbers, summary.name
    if not _whole(summary):
        return "a number: it has fractions", (_NUMBER,)
    if names.is_numbered_number(name):
        return "a number by its name", (_NUMBER,)
    if names.is_id(name):
        return "an id by its name", (_ID,)
    if 0 < summary.inexact < FLOAT64_BITS:
        return f"a number: its floats are no exact ids above 2^{summary.inexact}", (_NUMBER,)
    if distinct <= FEW_VALUES:
        return "few values", (_ID,)
    amount = names.is_amount(name)
    if not amount and numbers.least >= 0 and numbers.most <= (names.calendar_most(name) or -1):
        return "part of a date by its name", (_ID,)
    if max(abs(numbers.least), abs(numbers.most)) > 1 << 53 and not summary.exponents:
        return "too large for an exact number", (_ID,)
    if amount:
        return "a number by its name", (_NUMBER,)
    signal = summary.signal
    if signal.clear and signal.ordered:
        return "a number: the label follows its order", (_NUMBER,)
    if _gapless(summary):
        return "an id by its values: numbers without gaps", (_ID,)
    if numbers.least < -1:
        return "a number: it has values below 0", (_NUMBER,)
    if summary.present < 2 * distinct:
        return "a number: most values occur once", (_NUMBER,)
    if signal.clear:
        return "an id by its values: the label differs between them, in no order", (_ID,)
    return "in doubt, so both a number and an id: delete the one that it is not", _BOTH


def _useless(summary: Summary) -> str | None:
    """Returns the reason why a column is no input, or None."""
    if summary.kind == OTHER:
        types = " and ".join(summary.types)
        return f"the type {types}, which is not a number, text, time or list of them"
    if not summary.present:
        return "no value"
    texts = summary.values or summary
    if texts.not_utf_8:
        return f"bytes and no text: {texts.not_utf_8}"
    if summary.values is not None:
        return None if summary.longest else "no value in any list"
    distinct = len(summary.distinct)
    if distinct < 2 and not summary.missing:
        if summary.infinite:
            return "infinite values"
        value = summary.examples[0] if summary.examples else f"{summary.numbers.least:.9g}"
        if not summary.examples and summary.markers:
            value = next(iter(summary.markers))
        why = f"; {_inexact(summary)}" if summary.inexact else ""
        return f"one value, {shown(value)}, in every row{why}"
    unique, whole = summary.distinct.most == 1, not summary.is_number or _whole(summary)
    unnamed = not summary.name or summary.name.startswith("Unnamed:")
    every = summary.numbers.most - summary.numbers.least < 1.05 * distinct  # of them occurs
    if unnamed and summary.is_number and whole and (unique or every):
        return "row numbers, by the name that pandas gives its index"
    is_id = not summary.is_number or names.is_id(summary.name) or _gapless(summary)
    timely = summary.is_time or _has_format(summary)
    if unique and summary.present >= _UNIQUE_ROWS and is_id and whole and not timely:
        return f"a value of its own in every row; {_described(summary)}{_disguise(summary)}"
    if _tells_all(summary):
        return "tells the label in every row, as another form of it would"
    return None


def _tells_all(summary: Summary) -> bool:
    """Returns whether a column has two values, each of which has one label."""
    two = summary.rows >= _UNIQUE_ROWS and len(summary.distinct) == 2
    return two and summary.signal.tells and (summary.is_number or summary.kind == BOOLEANS)


def _absent(summary: Summary) -> int:
    """Returns the number of rows without a value, those of markers included."""
    return summary.missing + sum(summary.markers.values())


def _whole(summary: Summary) -> bool:
    return summary.numbers.whole and not summary.infinite


def _gapless(summary: Summary) -> bool:
    numbers, distinct = summary.numbers, len(summary.distinct)
    return distinct > MANY_VALUES and numbers.most - numbers.least < 1.25 * distinct


def _is_far(summary: Summary) -> bool:
    """Returns whether a value is so far from the others that it needs another transform.

    Standardized with other rows' mean and deviation, it could be too large for float16.
    """
    numbers = summary.numbers
    farthest = max(numbers.most - numbers.mean, numbers.mean - numbers.least)
    if not np.isfinite(numbers.deviation) or farthest > max(_FAR * numbers.deviation, _NEAR):
        return True
    low, middle, high = summary.distinct.quantiles([0.1, 0.5, 0.9])
    farthest = max(numbers.most - middle, middle - numbers.least)
    return farthest > (_FAR_OF_MOST * (high - low) or _NEAR)


def _markers(summary: Summary) -> list[str]:
    """Returns the texts that mean "missing" in a column, as far as they are sure."""
    known = [text for text in summary.markers if summary.is_number or text.lower() in SURE_MARKERS]
    return known + ["nan"] * (summary.not_a_number > 0 and "nan" not in known)


def _spellings(summary: Summary) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the texts of true and false if a column has several of one of them."""
    texts = [text for text in summary.few or () if text not in _markers(summary)]
    if not texts or any(text.lower() not in YES | NO for text in texts):
        return (), ()
    true = tuple(t for t in texts if t.lower() in YES and SPELLINGS.get(t) != "true")
    false = tuple(t for t in texts if t.lower() in NO and SPELLINGS.get(t) != "false")
    plain = {text.lower() for text in texts} <= {"true", "false"}
    if plain or len(texts) - len({text.lower() in YES for text in texts}) == 0:
        return (), ()
    return true, false


def _text_note(summary: Summary) -> tuple[str, bool]:
    """Returns a note, or "", and whether it says that the column may not be categorical."""
    if summary.kind != TEXT:
        return "", False
    strays, numbers = summary.strays, summary.numbers.count
    named = names.is_id(summary.name)
    if strays and not named and numbers > 0.9 * summary.present:
        few = ", ".join(shown(text) for text in list(strays)[:3])
        return f"numbers but for {few}: numerical once missing_values has them", True
    if summary.padded and numbers and not strays:
        return "codes, as numbers begin with 0", False
    if named and numbers:
        return "an id by its name", False
    if true := _spellings(summary)[0]:
        return f"spellings of true and false: {', '.join(map(shown, true))} are true", False
    note = _disguise(summary).removeprefix("; ")
    return note, bool(note)


def _disguise(summary: Summary) -> str:
    """Returns a hint for text that has numbers or lists in another form, or ""."""
    texts = list(summary.sample)
    if summary.kind != TEXT or not texts:
        return ""

    def mostly(test: Callable[[str], object]) -> bool:
        return sum(1 for text in texts if test(text)) >= 0.9 * len(texts)

    example = shown(texts[0])
    if mostly(re.compile(_PAIRS, re.ASCII | re.IGNORECASE).fullmatch):
        return f"; pairs such as {example}: a list field and a column of weights (max_length)"
    if mostly(re.compile(_MONEY).fullmatch) and not names.is_id(summary.name):
        marks = "--decimal and --thousands say what its marks mean"
        hint = marks if re.fullmatch(r"[\d.,' ]+", texts[0]) else "written as 1234.5 it is a number"
        return f"; numbers in disguise, such as {example}: {hint}"
    for mark in _LISTED:
        listed = [text for text in texts if mark in text]
        parts = {part for text in listed for part in text.split(mark)}
        repeated = mark == "|" or 2 * len(parts) < len(listed) + 2
        if len(listed) > len(texts) / 4 and repeated:
            longest = max(len(text.split(mark)) for text in listed)
            such_as = f"such as {shown(listed[0])}"
            return f"; lists in disguise, {such_as}: max_length: {longest}, separator: {mark!r}"
    return ""


def _unit(summary: Summary) -> str | None:
    """Returns the unit in which numbers may count from 1970, or None."""
    numbers = summary.numbers
    for unit, nanoseconds in TIME_UNITS.items():
        first, last = (edge * TIME_UNITS["s"] // nanoseconds for edge in _EPOCHS)
        if numbers.count and first <= numbers.least and numbers.most <= last:
            return unit
    return None


def _unit_of_epoch(summary: Summary) -> bool:
    """Returns whether numbers are times that count from 1970, or from a moment of their own."""
    if not summary.is_number or not names.is_time(summary.name) or summary.exponents:
        return False
    if _unit(summary) is not None:
        return True
    counts = names.is_time_stamp(summary.name) and _whole(summary) and summary.numbers.least >= 0
    return counts and len(summary.distinct) > FEW_VALUES and summary.numbers.most > 1000


def _has_format(summary: Summary) -> bool:
    """Returns whether all values are times of one of `TIME_FORMATS`; numbers by their name too."""
    seen = summary.sample if summary.kind == TEXT else summary.numbers.count
    if not summary.formats or summary.kind not in (TEXT, NUMBERS) or not seen:
        return False
    named = names.is_time(summary.name) or names.calendar_most(summary.name) is not None
    return named or not summary.is_number


def _formatted(summary: Summary) -> tuple[TimeField, str]:
    """Returns a time of a format, and a note about others that fit all values as well."""
    form, *others = summary.formats
    zone = None if "%z" in form else "UTC"
    note = f"; of the form {form}" + ("; has no zone, UTC is assumed" if zone else "")
    if others:
        note += f"; in doubt, as {others[0]} fits all values too"
    return TimeField(summary.name, zone, format=form), note


def described_column(summary: Summary) -> str:
    """Returns a line that describes a column."""
    return one_line(_described(summary))


def _described(summary: Summary) -> str:
    distinct = len(summary.distinct)
    parts = [f"{'' if summary.distinct.exact else 'about '}{distinct:,} distinct"]
    if summary.kind == TIMES:
        ends = (summary.numbers.least, summary.numbers.most)
        parts += [" .. ".join(str(np.datetime64(int(e), "us"))[:19] for e in ends)]
    elif summary.is_number and summary.numbers.count:
        parts += [f"{summary.numbers.least:.9g} .. {summary.numbers.most:.9g}"]
    elif summary.kind in (TEXT, BOOLEANS):
        parts += [", ".join(map(shown, summary.examples))]
    if summary.missing:
        parts += [f"{summary.missing / summary.rows:.2%} missing"]
    if markers := summary.markers:
        parts += [f"{text!r} in {n:,} rows" for text, n in markers.items()]
    return ", ".join(parts)


def shown(text: str) -> str:
    """Returns a value in quotes, shortened."""
    return repr(text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "...")


def listed(columns: Collection[str]) -> str:
    """Returns names of columns for a message."""
    return ", ".join(map(shown_name, columns))


def shown_name(name: str) -> str:
    """Returns the name of a column, in quotes if it has other characters than letters."""
    return name if re.fullmatch(r"[\w.-]+", name) else shown(name)
