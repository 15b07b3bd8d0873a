"""Numbers and labels: arrays of any type in Arrow as float64, texts as labels."""

import math
import re
from collections.abc import Callable, Collection
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dlrm.data.choices import BITS
from dlrm.data.schema.schema import NumericalField, Schema
from dlrm.data.sources import native
from dlrm.data.sources.columns import EXPECTED_INTEGER, MOST_DECIMAL, Parsed
from dlrm.data.sources.row_error import shown_text
from dlrm.data.transform.arrays import (
    Faults,
    are_null,
    canonical_texts,
    distinct_of,
    stored_values,
    text_column,
    utf_8,
    value_type,
)
from dlrm.data.transform.arrow_types import is_text
from dlrm.data.transform.values import canonical_text, number_text

NO_NUMBER = "expected a number, got no value"
_MOST_LABELS = 4  # labels that an error names
_DECIMAL = re.compile(r"-?[0-9]{1,18}(?:\.0+)?")


def numbers(
    field: NumericalField, array: pa.Array, markers: Collection[str], faults: Faults
) -> Parsed:
    """Returns the numbers of a column, float64; nulls, empty texts and markers are missing.

    Args:
        array: numbers, texts of them, booleans, or indices into these.
        markers: texts that mean "missing", as do the numbers that they write.
        faults: receives the rows with another value.

    Raises:
        ValueError: values of the array's type are no numbers.
    """
    name, dtype = field.column, value_type(array.type)
    if dtype != array.type and not is_text(dtype):
        array = array.dictionary_decode()
    if (field.true_values or field.false_values) and not is_text(dtype):
        array = canonical_texts(name, array)
    if is_text(value_type(array.type)):
        values, missing = _of_texts(field, array, markers, faults)
    else:
        values, missing = _of_type(field, array)
    if markers:
        missing = missing | np.isin(values, missing_numbers(markers))
        missing |= np.isnan(values) & _takes_nan(markers)
    if not (finite := np.isfinite(values) | missing).all():
        hint = "" if field.required else "; missing_values: [nan] takes NaN as missing"

        def problem(row: int) -> str:
            return f"expected a finite number, got {values[row]}{hint * math.isnan(values[row])}"

        faults.add(name, ~finite, problem)
        values = np.where(finite, values, 0.0)
    if field.type == "decimal" and not is_text(value_type(array.type)):
        bad = ~missing & finite & ~_are_decimals(array, values)
        faults.add(name, bad, lambda row: f"expected {EXPECTED_INTEGER}, got {array[row]}")
    return Parsed(np.where(missing, 0.0, values) if missing.any() else values, missing)


def _of_type(field: NumericalField, array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Returns typed numbers, and a mask of nulls."""
    dtype = array.type
    if array.null_count == len(array):  # of any type, such as times of pandas
        return np.zeros(len(array)), np.ones(len(array), bool)
    missing = are_null(array)
    if pa.types.is_boolean(dtype) and field.type != "decimal":
        array = array.cast(pa.uint8())
    elif pa.types.is_decimal(dtype):
        array = array.cast(pa.string())  # read as text is, to the nearest float64
    elif not (pa.types.is_integer(dtype) or pa.types.is_floating(dtype)):
        raise _no_numbers(field, dtype)
    values = stored_values(array.cast(pa.float64(), safe=False))
    return np.where(missing, 0.0, values) if array.null_count else values, missing


def _no_numbers(field: NumericalField, dtype: pa.DataType) -> ValueError:
    expected = "integers" if field.type == "decimal" else "numbers"
    hint = "; convert it to a number of seconds" * pa.types.is_temporal(dtype)
    return ValueError(f"column {field.column!r}: expected {expected}, got the type {dtype}{hint}")


def _are_decimals(array: pa.Array, values: np.ndarray) -> np.ndarray:
    """Returns which numbers are integers of up to 18 digits, by their exact values."""
    if pa.types.is_integer(array.type):
        exact = stored_values(array)
        return (exact < MOST_DECIMAL) & (exact > -MOST_DECIMAL)
    if pa.types.is_decimal(array.type):
        numbers = array.to_pylist()
        return np.array([n is None or (n % 1 == 0 and abs(n) < MOST_DECIMAL) for n in numbers])
    return (np.floor(values) == values) & (np.abs(values) < MOST_DECIMAL)


def _of_texts(
    field: NumericalField, array: pa.Array, markers: Collection[str], faults: Faults
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of texts, and a mask of missing ones; notes other texts."""
    coded = pa.types.is_dictionary(array.type)
    distinct, codes = distinct_of(field.column, array, faults) if coded else (array, None)
    if not coded:
        distinct, problems = utf_8(array)
        faults.add_distinct(field.column, np.arange(len(array)), problems, len(array))
    column = text_column(distinct)
    values = np.full(len(distinct), np.nan)
    if native.host is not None and not (field.true_values or field.false_values):
        values = native.host.numbers_of(*column)
        if field.type == "decimal":  # of which other ones are read by their digits
            plain = pc.fill_null(pc.match_substring_regex(distinct, "^-?[0-9]{1,15}$"), True)
            values[~plain.to_numpy(zero_copy_only=False)] = np.nan
    missing = column.starts == column.ends
    read: dict[bytes, float | str] = {b"": np.nan}
    problems = {}
    for row in np.flatnonzero(np.isnan(values) & ~missing).tolist():
        raw = column.data[column.starts[row] : column.ends[row]].tobytes()
        if raw not in read:
            read[raw] = _read(field, raw.decode("utf-8", "replace").strip(), markers)
        if isinstance(value := read[raw], str):
            problems[row], value = value, 0.0
        values[row], missing[row] = value, value != value
    values[missing] = 0.0
    if codes is None:
        codes = np.where(are_null(distinct), -1, np.arange(len(distinct)))
    faults.add_distinct(field.column, codes, problems, len(distinct))
    return np.append(values, 0.0)[codes], np.append(missing, True)[codes]


def _read(field: NumericalField, text: str, markers: Collection[str]) -> float | str:
    """Returns the number of a text, NaN for a missing one, or the problem with it."""
    if not text or text in markers or (text.lower() == "nan" and _takes_nan(markers)):
        return math.nan
    words = {} if field.type == "decimal" else BITS
    if field.true_values or field.false_values:
        words = words | dict.fromkeys(map(canonical_text, field.true_values), "1")
        words |= dict.fromkeys(map(canonical_text, field.false_values), "0")
    plain = words.get(canonical_text(text), words.get(text, text))
    if field.type == "decimal" and _DECIMAL.fullmatch(plain) is None:
        return f"expected {EXPECTED_INTEGER}, got {shown_text(text)}"
    with suppress(ValueError):
        if plain.isascii() and "_" not in plain:  # Python reads 1_000 and digits of other scripts
            if math.isfinite(value := float(plain)):
                return value
            hint = f" (--missing_values {','.join([*markers, text])} counts it as missing)"
            return f"expected a finite number{hint * bool(markers)}, got {shown_text(text)}"
    return f"expected a number, got {shown_text(text)}"


def missing_numbers(markers: Collection[str]) -> np.ndarray:
    """Returns the numbers that mean "missing": -999 in any notation."""
    read = (_read(NumericalField("", "none"), marker, ()) for marker in markers)
    return np.array([value for value in read if isinstance(value, float) and value == value])


def _takes_nan(markers: Collection[str]) -> bool:
    return any(marker.lower() == "nan" for marker in markers)


def label_reader(schema: Schema, known: Collection[str] | None) -> Callable[[str], bool]:
    """Returns a function from the text of a label to whether it is positive.

    The function raises ValueError for any other text.

    Args:
        known: all labels that are expected; None accepts any.
    """
    label, missing = schema.label, {"", *schema.missing_values}
    given = [*label.positives, *(label.negative or ())]
    of_numbers = bool(given) and all(map(_is_number, given))
    form = _number_form if of_numbers else canonical_text
    positives = set(map(form, label.positives))
    forms = set(map(form, known or ()))
    rated = label.any_negative and known is not None and all(map(_is_number, known))

    def read(text: str) -> bool:
        if not label.positives:
            number = _number_form(BITS.get(text, text))
            if number not in ("0", "1"):
                hint = "label: {positive: VALUE} in the schema names one that counts as 1"
                raise ValueError(f"expected a label of 0 or 1 ({hint}), got {shown_text(text)}")
            return number == "1"
        if text in missing or (of_numbers and text.lower() == "nan"):
            raise ValueError(f"expected a label that is not missing, got {shown_text(text)}")
        if of_numbers and label.any_negative and not _is_number(text):
            shown = " or ".join(map(repr, label.positives[:_MOST_LABELS]))
            raise ValueError(f"expected a number such as {shown}, got {shown_text(text)}")
        one_more_rating = rated and _is_number(text)  # counts as 0
        if known is not None and not one_more_rating and form(text) not in forms:
            shown = " or ".join(map(repr, list(known)[:_MOST_LABELS]))
            shown += ", ..." * (len(known) > _MOST_LABELS)
            raise ValueError(f"expected {shown}, got {shown_text(text)}")
        return form(text) in positives

    return read


def _number_form(text: str) -> str:
    return number_text(canonical_text(text))


def _is_number(text: str) -> bool:
    value = _read(NumericalField("", "none"), text, ())
    return isinstance(value, float) and value == value
