"""Chooses the fields that columns of a table become, and says why."""

import re
from collections.abc import Collection

import numpy as np
import pyarrow as pa

from dlrm.data.tables import names
from dlrm.data.tables.columns import plain_texts
from dlrm.data.tables.summary import OTHER, TEXT, TIMES, Summary, all_match
from dlrm.data.transform.fields import TIME_UNITS, CategoricalField, NumericalField, TimeField
from dlrm.data.transform.values import FLOAT64_BITS
from dlrm.documents import one_line

NUMBER, ID = "number", "id"
SURE_MARKERS = {"?", "n/a", "nan", "null", "\\n"}  # that no category has as its name
UNIQUE_ROWS = 100  # from this many rows, a distinct value in every row is no coincidence
_FEW_VALUES = 12  # integers with up to so many values are categories, such as months
_MANY_VALUES, _RARE = 1000, 5  # beyond so many values, rare ones need no row of a table each
_HUGE, _HUGE_LIMIT, _MAX_IDS, _MOST_BUCKETS = 100_000, 15, 1_000_000, 1 << 20
_FAR, _NEAR = 10.0, 20.0  # deviations from the mean, and a distance that needs no logarithm
_DAY, _HOUR = "(0[1-9]|1[0-2])(0[1-9]|[12][0-9]|3[01])", "([01][0-9]|2[0-3])"
_FORMS = {"%Y%m%d": f"^(199.|20[0-4].){_DAY}$", "%Y%m%d%H": f"^(199.|20[0-4].){_DAY}{_HOUR}$"}
_FORMS["%y%m%d%H"] = f"^[0-9]{{2}}{_DAY}{_HOUR}$"
_EPOCHS, _TWO_YEARS = (946_684_800, 2_524_608_000), 63_072_000  # 2000 and 2050, in seconds
_SEPARATORS = ("|", "\x1d", "\x02", ";", ",", " ")
_LONGEST_SHOWN = 24


def numerical_field(summary: Summary) -> NumericalField:
    """Returns the numerical field of a column; numbers far from the others need a transform."""
    numbers, transform = summary.numbers[~np.isnan(summary.numbers)], "standardize"
    counts, (least, most) = summary.counts[~np.isnan(summary.numbers)], summary.range
    with np.errstate(over="ignore", invalid="ignore"):  # of numbers beyond 1e154
        mean = np.average(numbers, weights=counts)
        deviation = np.sqrt(np.average((numbers - mean) ** 2, weights=counts))
        near = max(most - mean, mean - least) <= max(_FAR * deviation, _NEAR)
    if not near or not np.isfinite(deviation):
        transform = "log" if least >= 0 and most > _NEAR else "quantile"
    return NumericalField(summary.name, transform, missing_values=_markers(summary) or None)


def categorical_field(summary: Summary, max_length: int | None = None) -> CategoricalField:
    """Returns the categorical field of a column; rare values of many need no row of a table."""
    counts, distinct = summary.counts, len(summary.counts)
    limit, max_ids, buckets = 1, None, 0
    if distinct >= _HUGE:
        limit, max_ids = _HUGE_LIMIT, _MAX_IDS
        if counts[counts < _HUGE_LIMIT].sum() > counts.sum() / 5:
            buckets = min(1 << (distinct // 10).bit_length(), _MOST_BUCKETS)
    elif distinct > _MANY_VALUES and np.count_nonzero(counts < _RARE) > distinct / 2:
        limit = _RARE
    integers = summary.is_number and summary.whole and not summary.exponents
    integers = integers and _largest(summary) < 1 << 63
    return CategoricalField(
        summary.name,
        "integer" if integers else "string",
        limit,
        max_ids,
        buckets,
        max_length=max_length,
        missing_values=_markers(summary) or None,
    )


def time_of(summary: Summary, chosen: bool = False) -> tuple[TimeField, str] | None:
    """Returns the field of a column of times and a comment; None for another column.

    Args:
        chosen: whether the user says that numbers are times, whatever their name and values.
    """
    name, (least, most), unit = summary.name, summary.range, _unit(summary)
    counts = names.is_time_stamp(name) and summary.whole and least >= 0 and most > 1000
    if form := _form(summary):
        field, note = TimeField(name, "UTC", format=form), f"; of the form {form}"
    elif summary.is_time:
        field, note = TimeField(name, None if summary.zoned else "UTC"), ""
    elif not summary.is_number or not (chosen or (names.is_time(name) and not summary.inexact)):
        return None
    elif unit is not None:
        field, note = TimeField(name, unit=unit), f"; unit {unit} by its size"
    elif chosen or (counts and len(summary.counts) > _FEW_VALUES):
        unit = "s" if most - least <= _TWO_YEARS else "ms"
        note = f"; counts from another moment than 1970, in {unit} by its range"
        field = TimeField(name, unit=unit)
    else:
        return None
    return field, described(summary) + note + "; has no zone, UTC is assumed" * bool(field.zone)


def _unit(summary: Summary) -> str | None:
    """Returns the unit in which numbers may count from 1970, or None."""
    for unit, nanoseconds in TIME_UNITS.items():
        seconds = [end * nanoseconds / TIME_UNITS["s"] for end in summary.range]
        if _EPOCHS[0] <= seconds[0] and seconds[1] <= _EPOCHS[1]:
            return unit
    return None


def _form(summary: Summary) -> str | None:
    """Returns the form of times that all numbers have, if the name says that they are times."""
    named = names.is_time(summary.name) or names.calendar_most(summary.name)
    if not named or not summary.is_number or not summary.whole:
        return None
    texts = pa.array([f"{number:.0f}" for number in summary.numbers if not np.isnan(number)])
    return next((form for form, digits in _FORMS.items() if all_match(texts, digits)), None)


def useless(summary: Summary) -> str | None:
    """Returns the reason why a column is no input, or None."""
    items, distinct = summary.items, len(summary.counts)
    if summary.kind == OTHER:
        return f"the type {summary.type}, which is not a number, text, time or list of them"
    if summary.missing.all():
        return "no value"
    if problem := (items or summary).not_utf_8:
        return f"bytes and no text: {problem}"
    if items is not None:
        if items.kind == TIMES or (items.is_number and not items.whole):
            what = "times" if items.kind == TIMES else "numbers"
            why = f"a list of {what}, up to {summary.lengths.max()}; {described(items)}"
            return f"{why} (weights: {summary.name} in another list field?)"
        return None if summary.lengths.any() else "no value in any list"
    if summary.infinite:
        what = "which prepare refuses: replace them, then make it numerical"
        return f"infinite values in {summary.infinite:,} rows, {what}; {described(summary)}"
    if distinct < 2 and not summary.missing.any():
        why = f"; {inexact(summary)}" * bool(summary.inexact)
        return f"one value, {shown(plain_texts(summary.values)[0])}, in every row{why}"
    if printed := _mostly(summary, r"\[.*\]"):
        what = "write lists of Parquet or JSON lines, or text with | between the items"
        return f"lists printed as text, such as {shown(printed)}: {what}"
    unique, whole = summary.counts.max(initial=0) == 1, not summary.is_number or summary.whole
    unnamed = not summary.name or summary.name.startswith("Unnamed:")
    if unnamed and summary.is_number and whole and (unique or _span(summary) < 1.05 * distinct):
        return "row numbers, by the name that pandas gives its index"
    is_id = not summary.is_number or names.is_id(summary.name) or _gapless(summary)
    if unique and distinct >= UNIQUE_ROWS and is_id and whole and time_of(summary) is None:
        why = f"a value of its own in every row; {described(summary)}"
        return "; ".join(filter(None, [why, in_disguise(summary)]))
    binary = distinct == 2 and (summary.is_number or pa.types.is_boolean(summary.type))
    if binary and len(summary.missing) >= UNIQUE_ROWS and summary.signal.pure:
        return "tells the label in every row, as another form of it would"
    return None


def uses(summary: Summary) -> tuple[str, set[str]]:
    """Returns whether a column is a number, an id or both, and the reason, or "" without one."""
    name, distinct, (least, most) = summary.name, len(summary.counts), summary.range
    if not summary.is_number:
        codes = summary.padded and not len(summary.others)
        return "codes, as numbers begin with 0" * codes, {ID}
    if not summary.whole:
        return "a number: it has fractions", {NUMBER}
    if names.is_numbered_number(name):
        return "a number by its name", {NUMBER}
    if names.is_id(name):
        return "an id by its name", {ID}
    if 0 < summary.inexact < FLOAT64_BITS:
        return f"a number: its floats are no exact ids above 2^{summary.inexact}", {NUMBER}
    if distinct <= _FEW_VALUES:
        return "few values", {ID}
    amount = names.is_amount(name)
    if not amount and least >= 0 and most <= (names.calendar_most(name) or -1):
        return "part of a date by its name", {ID}
    if _largest(summary) > 1 << FLOAT64_BITS and not summary.inexact:
        return "too large for an exact number", {ID}
    if amount:
        return "a number by its name", {NUMBER}
    signal = summary.signal
    if signal.clear and signal.ordered:
        return "a number: the label follows its order", {NUMBER}
    if _gapless(summary):
        return "an id by its values: numbers without gaps", {ID}
    if least < -1:
        return "a number: it has values below 0", {NUMBER}
    if summary.counts.sum() < 2 * distinct:
        return "a number: most values occur once", {NUMBER}
    if signal.clear:
        return "an id by its values: the label differs between them, in no order", {ID}
    return "in doubt, so both a number and an id: delete the one that it is not", {NUMBER, ID}


def in_disguise(summary: Summary) -> str:
    """Returns what text may be besides categories, or ""."""
    others, named = summary.others, names.is_id(summary.name)
    numbers = summary.counts[~np.isnan(summary.numbers)].sum()
    if 0 < len(others) <= _FEW_VALUES and numbers > 0.9 * summary.counts.sum() and not named:
        few = ", ".join(map(shown, others[:3].to_pylist()))
        return f"numbers but for {few}: numerical once missing_values has them"
    if example := _mostly(summary, r"(\d{1,4}([/.-])\d\d?\2\d{1,4}|.*\d\d:\d\d).*"):
        hint = "time: {format: ...} in a schema says which"
        return f"times of another form than ISO 8601, such as {shown(example)}: {hint}"
    number = r"[+-]?\d{1,3}([,.' ]\d{3})+([,.]\d+)?|[+-]?\d+,\d+"
    if not named and (example := _mostly(summary, number)):
        hint = "--decimal and --thousands say what its marks mean"
        return f"numbers in disguise, such as {shown(example)}: {hint}"
    texts = _some_texts(summary)
    for mark in _SEPARATORS:
        lists = [text for text in texts if mark in text]
        items = {item for text in lists for item in text.split(mark)}
        repeated = mark in "|\x1d\x02" or 2 * len(items) < len(lists) + 2
        if len(lists) > len(texts) / 4 and repeated:
            longest = max(text.count(mark) for text in lists) + 1
            separator = repr(mark) if mark.isprintable() else f'"\\x{ord(mark):02x}"'
            hint = f"max_length: {longest}, separator: {separator}"
            return f"lists in disguise, such as {shown(lists[0])}: {hint}"
    return ""


def _some_texts(summary: Summary) -> list[str]:
    some = summary.values[:_MANY_VALUES].to_pylist() if summary.kind == TEXT else []
    return [text for text in some if text not in summary.markers]


def _mostly(summary: Summary, pattern: str) -> str | None:
    """Returns a text of a column in which nine of ten are of a pattern; None for another column."""
    texts = _some_texts(summary)
    found = [text for text in texts if re.fullmatch(pattern, text, re.ASCII | re.DOTALL)]
    return found[0] if found and len(found) >= 0.9 * len(texts) else None


def _markers(summary: Summary) -> tuple[str, ...]:
    """Returns the texts that mean "missing" in a column, as far as they are sure."""
    known = [text for text in summary.markers if summary.is_number or text.lower() in SURE_MARKERS]
    return (*known, *["nan"] * (summary.not_a_number > 0 and "nan" not in known))


def absent(summary: Summary) -> int:
    """Returns the number of rows without a value, those of markers included."""
    return int(np.count_nonzero(summary.missing)) + sum(summary.markers.values())


def inexact(summary: Summary) -> str:
    """Describes floats that need not be exact ids."""
    bits = f"2^{summary.inexact}"
    return f"floats that need not be exact: above {bits} read the column as integers or text"


def _largest(summary: Summary) -> float:
    return max(map(abs, summary.range))


def _span(summary: Summary) -> float:
    return summary.range[1] - summary.range[0]


def _gapless(summary: Summary) -> bool:
    return len(summary.counts) > _MANY_VALUES and _span(summary) < 1.25 * len(summary.counts)


def described(summary: Summary) -> str:
    """Returns a line that describes a column."""
    parts, ends = [f"{len(summary.counts):,} distinct"], summary.range
    if summary.kind == TIMES:
        parts += [" .. ".join(str(np.datetime64(int(end), "us"))[:19] for end in ends)]
    elif summary.is_number:
        parts += [" .. ".join(f"{end:.9g}" for end in ends)]
    else:
        parts += [examples(summary)]
    if missing := summary.missing.mean():
        parts += [f"{missing:.2%} missing"]
    parts += [f"{text!r} in {rows:,} rows" for text, rows in summary.markers.items()]
    return one_line(", ".join(filter(None, parts)))


def examples(summary: Summary) -> str:
    """Returns the most frequent texts of a column."""
    order = np.argsort(-summary.counts, kind="stable")[: 3 + len(summary.markers)]
    texts = plain_texts(summary.values.take(pa.array(order)))
    return ", ".join([shown(text) for text in texts if text not in summary.markers][:3])


def shown(text: str) -> str:
    """Returns a value in quotes, shortened."""
    return repr(text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "...")


def listed(columns: Collection[str]) -> str:
    """Returns names of columns for a message."""
    return ", ".join(map(shown_name, columns))


def shown_name(name: str) -> str:
    """Returns the name of a column, in quotes if it has other characters than letters."""
    return name if re.fullmatch(r"[\w.-]+", name) else shown(name)
