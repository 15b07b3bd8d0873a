"""Chooses the fields that columns of a table become, and says why."""

import re

import numpy as np
import pyarrow as pa

from dlrm.data.bags import MAX_LENGTH
from dlrm.data.schema.fields import TIME_UNITS, CategoricalField, NumericalField, TimeField
from dlrm.data.tables import names
from dlrm.data.tables.summary import LISTS, NUMBERS, OTHER, SURE_MARKERS, TEXT, TIMES, Summary
from dlrm.documents import one_line

NUMBER, ID = "a number", "an id"
UNIQUE_ROWS = 100  # from this many rows, a distinct value in every row is no coincidence
_FEW_VALUES = 12  # integers with up to so many values are categories, such as months
_MANY_VALUES, _RARE = 1000, 5  # beyond so many values, rare ones need no row of a table each
_HUGE, _HUGE_LIMIT, _MAX_IDS, _MOST_BUCKETS = 100_000, 15, 1_000_000, 1 << 20
_FAR, _NEAR = 10.0, 20.0  # deviations from the mean, and a distance that needs no logarithm
_YEAR, _DAY = "(199|20[0-4])[0-9]", "(0[1-9]|1[0-2])(0[1-9]|[12][0-9]|3[01])"
_HOUR = "([01][0-9]|2[0-3])"
_FORMS = {"%Y%m%d": _YEAR + _DAY, "%Y%m%d%H": _YEAR + _DAY + _HOUR}
_FORMS["%y%m%d%H"] = "[0-9]{2}" + _DAY + _HOUR
_EPOCHS, _TWO_YEARS = (946_684_800, 2_524_608_000), 63_072_000  # 2000 and 2050, in seconds
_DATES = r"(\d{1,4}([/.-])\d\d?\2\d{1,4}|.*\d\d:\d\d).*"
_MARKED_NUMBERS = r"[+-]?\d{1,3}([,.' ]\d{3})+([,.]\d+)?|[+-]?\d+,\d+"
_SEPARATORS, _SURE_SEPARATORS = "|\x1d\x02;, ", "|\x1d\x02"
_LONGEST_SHOWN = 24


def numerical_field(column: Summary) -> NumericalField:
    """Returns the numerical field of a column; numbers far from the others need a transform."""
    numbers, (least, most), transform = column.numbers, column.range, "standardize"
    with np.errstate(over="ignore", invalid="ignore"):  # of numbers beyond 1e154
        mean = np.average(numbers, weights=column.counts)
        deviation = np.sqrt(np.average((numbers - mean) ** 2, weights=column.counts))
        near = max(most - mean, mean - least) <= max(_FAR * deviation, _NEAR)
    if not near or not np.isfinite(deviation):
        transform = "log" if least >= 0 and most > _NEAR else "quantile"
    return NumericalField(column.name, transform, missing_values=_missing_values(column))


def categorical_field(column: Summary) -> CategoricalField:
    """Returns the categorical field of a column; rare values of many need no row of a table."""
    limit, max_ids, buckets, max_length = 1, None, 0, None
    if column.items is not None:
        column, max_length = column.items, min(int(column.lengths.max()), MAX_LENGTH)
    counts, distinct = column.counts, len(column.counts)
    if distinct >= _HUGE:
        limit, max_ids = _HUGE_LIMIT, _MAX_IDS
        if counts[counts < _HUGE_LIMIT].sum() > counts.sum() / 5:
            buckets = min(1 << (distinct // 10).bit_length(), _MOST_BUCKETS)
    elif distinct > _MANY_VALUES and np.count_nonzero(counts < _RARE) > distinct / 2:
        limit = _RARE
    integers = column.whole and column.plain and max(map(abs, column.range)) < 1 << 63
    type, markers = "integer" if integers else "string", _missing_values(column)
    limits = limit, max_ids, buckets
    return CategoricalField(
        column.name, type, *limits, max_length=max_length, missing_values=markers
    )


def _missing_values(column: Summary) -> tuple[str, ...] | None:
    sure = column.content != TEXT
    return tuple(text for text in column.markers if sure or text.lower() in SURE_MARKERS) or None


def time_of(column: Summary, chosen: bool = False) -> tuple[TimeField, str] | None:
    """Returns the field of a column of times and a comment; None of another column.

    Args:
        chosen: whether the user says that numbers are times, whatever their name and values.
    """
    name, (least, most) = column.name, column.range
    last, note = names.last_word(name), "; has no zone, UTC is assumed"
    if column.content == TIMES:
        zoned = getattr(column.values.type, "tz", None) is not None
        return TimeField(name, None if zoned else "UTC"), described(column) + note * (not zoned)
    if column.content != NUMBERS:
        return None
    if last in (*names.TIMES, *names.CALENDAR) and (form := _form(column)):
        return TimeField(name, "UTC", format=form), f"{described(column)}; of the form {form}{note}"
    if not chosen and (last not in names.TIMES or column.inexact):
        return None
    for unit, nanoseconds in TIME_UNITS.items():
        second = TIME_UNITS["s"] / nanoseconds
        if _EPOCHS[0] * second <= least and most <= _EPOCHS[1] * second:
            return TimeField(name, unit=unit), f"{described(column)}; unit {unit} by its size"
    counts = column.whole and least >= 0 and most > 1000 and len(column.counts) > _FEW_VALUES
    if not chosen and not (counts and last in names.STAMPS):
        return None
    unit = "s" if most - least <= _TWO_YEARS else "ms"
    note = f"; counts from another moment than 1970, in {unit} by its range"
    return TimeField(name, unit=unit), described(column) + note


def _form(column: Summary) -> str | None:
    """Returns the form of times that all numbers have, or None."""
    texts = [f"{number:.0f}" for number in column.numbers] if column.whole else [""]
    forms = (form for form, digits in _FORMS.items() if all(re.fullmatch(digits, t) for t in texts))
    return next(forms, None)


def left_out(column: Summary) -> str | None:
    """Returns the reason why a column is no input, or None."""
    name, items, distinct = column.name, column.items, len(column.counts)
    number = column.content == NUMBERS
    if OTHER in (column.content, items and items.content):
        return f"the type {column.type}, which is not a number, text (UTF-8), time or list of them"
    if column.missing == column.rows:
        return "no value"
    if items is not None:
        if items.content == TIMES or (items.content == NUMBERS and not items.whole):
            why = f"a list of {items.content}, up to {column.lengths.max()}; {described(items)}"
            return f"{why} (weights: {name} in another list field?)"
        return None if column.lengths.any() else "no value in any list"
    if infinite := int(column.counts[np.isinf(column.numbers)].sum()):
        what = "which prepare refuses: replace them, then make it numerical"
        return f"infinite values in {infinite:,} rows, {what}; {described(column)}"
    if distinct < 2 and not column.missing:
        return joined(f"one value, {examples(column)}, in every row", inexact(column))
    if printed := _mostly(column, r"\[.*\]"):
        what = "write lists of Parquet or JSON lines, or text with | between the items"
        return f"lists printed as text, such as {printed}: {what}"
    if (not name or name.startswith("Unnamed:")) and column.whole:
        return "row numbers, by the name that pandas gives its index"
    unique = column.counts.max() == 1
    is_id = not number or (column.whole and (names.is_id(name) or _gapless(column)))
    if unique and distinct >= UNIQUE_ROWS and is_id and time_of(column) is None:
        return joined(f"a value of its own in every row; {described(column)}", disguise(column))
    binary = distinct == 2 and (number or pa.types.is_boolean(column.type))
    if binary and column.rows >= UNIQUE_ROWS and column.signal.pure:
        return "tells the label in every row, as another form of it would"
    return None


def uses(column: Summary) -> tuple[set[str], str]:
    """Returns whether a column is a number, an id or both, and the reason, or "" without one."""
    if column.content == LISTS:
        return {ID}, ""
    if column.content == TEXT:
        padded = len(column.numbers) > 0 and not np.isnan(column.numbers).any()
        return {ID}, "codes, as numbers begin with 0" * padded
    name, distinct, (least, most) = column.name, len(column.counts), column.range
    amount, signal, bits = names.is_amount(name), column.signal, column.inexact
    of_date = not amount and least >= 0 and most <= names.CALENDAR.get(names.last_word(name), -1)
    for holds, use, why in (
        (not column.whole, NUMBER, ": it has fractions"),
        (names.is_numbered_number(name), NUMBER, " by its name"),
        (names.is_id(name), ID, " by its name"),
        (0 < bits < 53, NUMBER, f": its floats are no exact ids above 2^{bits}"),
        (distinct <= _FEW_VALUES, ID, ": few values"),
        (of_date, ID, ": part of a date by its name"),
        (max(-least, most) > 1 << 53 and not bits, ID, ": too large for an exact number"),
        (amount, NUMBER, " by its name"),
        (signal.clear and signal.ordered, NUMBER, ": the label follows its order"),
        (_gapless(column), ID, " by its values: numbers without gaps"),
        (least < -1, NUMBER, ": it has values below 0"),
        (column.counts.sum() < 2 * distinct, NUMBER, ": most values occur once"),
        (signal.clear, ID, " by its values: the label differs between them, in no order"),
    ):
        if holds:
            return {use}, use + why
    return {NUMBER, ID}, "in doubt, so both a number and an id: delete the one that it is not"


def disguise(column: Summary) -> str:
    """Returns what text may be besides categories, or ""."""
    if column.content != TEXT:
        return ""
    is_id, is_number = names.is_id(column.name), ~np.isnan(column.numbers)
    others = column.values.filter(pa.array(~is_number)).to_pylist()
    rows = column.counts[is_number].sum()
    if 0 < len(others) <= _FEW_VALUES and rows > 0.9 * column.counts.sum() and not is_id:
        few = ", ".join(map(shown, others[:3]))
        return f"numbers but for {few}: numerical once missing_values has them"
    if example := _mostly(column, _DATES):
        return f"may be times, such as {example}: time: {{format: ...}} in a schema says which"
    if not is_id and (example := _mostly(column, _MARKED_NUMBERS)):
        return f"may be numbers, such as {example}: --decimal and --thousands say what marks mean"
    texts = column.values[:_MANY_VALUES].to_pylist()
    for mark in _SEPARATORS:
        lists = [text for text in texts if mark in text]
        items = {item for text in lists for item in text.split(mark)}
        repeated = mark in _SURE_SEPARATORS or 2 * len(items) < len(lists) + 2
        if len(lists) > len(texts) / 4 and repeated:
            longest = max(text.count(mark) for text in lists) + 1
            separator = repr(mark) if mark.isprintable() else f'"\\x{ord(mark):02x}"'
            hint = f"max_length: {longest}, separator: {separator}"
            return f"may be lists, such as {shown(lists[0])}: {hint}"
    return ""


def _mostly(column: Summary, pattern: str) -> str:
    """Returns a text of a column in which nine of ten are of a pattern; "" of another column."""
    texts = column.values[:_MANY_VALUES].to_pylist() if column.content == TEXT else []
    found = [text for text in texts if re.fullmatch(pattern, text, re.ASCII | re.DOTALL)]
    return shown(found[0]) if found and len(found) >= 0.9 * len(texts) else ""


def inexact(column: Summary) -> str:
    """Returns that floats need not be exact ids; "" if they are."""
    what = f"above 2^{column.inexact} read the column as integers or text"
    return f"has floats that need not be exact: {what}" * bool(column.inexact)


def _gapless(column: Summary) -> bool:
    (least, most), distinct = column.range, len(column.counts)
    return distinct > _MANY_VALUES and most - least < 1.25 * distinct


def described(column: Summary) -> str:
    """Returns a line that describes a column."""
    if column.items is not None:
        lengths = column.lengths
        size = f"lists of up to {lengths.max()}, {lengths.mean():.3g} on average"
        empty = "" if lengths.all() else f", {(lengths == 0).mean():.2%} empty"
        return f"{size}{empty}; {described(column.items)}"
    parts = [f"{len(column.counts):,} distinct", examples(column)]
    if column.content in (NUMBERS, TIMES) and len(column.counts):
        parts[1] = " .. ".join(_text_of(column, end) for end in column.range)
    parts += [f"{column.missing / max(column.rows, 1):.2%} missing"] * (column.missing > 0)
    parts += [f"{text!r} in {rows:,} rows" for text, rows in column.markers.items()]
    return one_line(", ".join(filter(None, parts)))


def examples(column: Summary) -> str:
    """Returns the most frequent values of a column."""
    order = np.argsort(-column.counts, kind="stable")[:3]
    if column.content == TEXT:
        return ", ".join(map(shown, column.values.take(pa.array(order)).to_pylist()))
    return ", ".join(shown(_text_of(column, number)) for number in column.numbers[order])


def _text_of(column: Summary, number: float) -> str:
    if column.content == TIMES:
        return str(np.datetime64(int(number), "us"))[:19]
    return f"{number:.9g}"


def joined(*notes: str) -> str:
    """Returns notes without empty ones as a line."""
    return "; ".join(filter(None, notes))


def shown(text: str) -> str:
    """Returns a value in quotes, shortened."""
    return repr(text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "...")


def shown_name(name: str) -> str:
    """Returns the name of a column, in quotes if it has other characters than letters."""
    return name if re.fullmatch(r"[\w.-]+", name) else shown(name)
