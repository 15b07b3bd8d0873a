"""Times of an Arrow table as microseconds since 1970 in UTC."""

import re
from datetime import datetime, timedelta, timezone

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dlrm.data.schema.fields import TIME_UNITS, TimeField
from dlrm.data.sources.row_error import shown_text
from dlrm.data.transform.arrays import Faults, as_text, distinct_of, plain_texts
from dlrm.data.transform.arrow_types import is_text
from dlrm.data.transform.values import canonical_text

_YEARS = (-62_135_596_800_000_000, 253_402_300_799_999_999)  # 1 to 9999, in microseconds
_EXPECTED_YEAR = "expected a time in the years 1 to 9999"
_NUMBER = re.compile(r"([+-]?[0-9]{1,4000})(?:\.([0-9]{0,4000}))?")
_MICROSECOND = 1000  # nanoseconds


def times(field: TimeField, array: pa.Array, faults: Faults) -> np.ndarray:
    """Returns microseconds since 1970 in UTC, int64 `[rows]`; missing ones are bad."""
    name, dtype = field.column, array.type
    if pa.types.is_dictionary(dtype):
        array, dtype = array.dictionary_decode(), dtype.value_type
    if pa.types.is_timestamp(dtype) or pa.types.is_date(dtype):
        zone = getattr(dtype, "tz", None)
        if zone is None and field.zone is None:
            raise ValueError(
                f"column {name!r}: expected timestamps with a time zone, got the type {dtype}; "
                "time: {zone: UTC} in the schema says which it is"
            )
        if pa.types.is_date(dtype):
            array = array.cast(pa.timestamp("s" if pa.types.is_date32(dtype) else "ms"))
        local = field.zone if zone is None else None
        unit = TIME_UNITS[array.type.unit]
        return _of_counts(name, array.cast(pa.int64()), unit, local, faults)
    digits = pa.types.is_integer(dtype) and field.format is not None  # such as 20261120
    if digits or pa.types.is_floating(dtype) or pa.types.is_decimal(dtype):
        array, dtype = as_text(array), pa.large_string()  # of which the fraction is exact
    if pa.types.is_integer(dtype):
        if field.unit is None:
            raise ValueError(
                f"column {name!r}: expected timestamps, got the type {dtype}; time: {{unit: s}} in "
                "the schema says that they are seconds since 1970"
            )
        return _of_counts(name, array, TIME_UNITS[field.unit], None, faults)
    if is_text(dtype):
        return _times_of_text(field, array, faults)
    raise ValueError(f"column {name!r}: expected timestamps, got the type {dtype}")


def _of_counts(
    name: str, array: pa.Array, unit: int, local: str | None, faults: Faults
) -> np.ndarray:
    """Returns microseconds from counts of units of some nanoseconds, in UTC or in a local zone."""
    missing = array.is_null().to_numpy(zero_copy_only=False)
    faults.add(name, missing, lambda row: "expected a time, got no value")
    counts = array.fill_null(0).to_numpy(zero_copy_only=False)
    if counts.dtype == np.uint64:
        counts = np.minimum(counts, np.uint64(1 << 62))
    counts = counts.astype(np.int64)
    many = max(unit // _MICROSECOND, 1)
    first, last = (limit // many for limit in _YEARS)
    beyond = ((counts < first) | (counts > last)) & (unit >= _MICROSECOND)  # never nanoseconds
    faults.add(name, beyond, lambda row: f"{_EXPECTED_YEAR}, got {array[row]}")
    times = np.where(beyond, 0, counts) * many
    if unit < _MICROSECOND:
        times = times // (_MICROSECOND // unit)
    return _in_utc(times, local) if local else times


def _in_utc(times: np.ndarray, zone: str) -> np.ndarray:
    """Returns local times in UTC: the first if there are two, the last before if there is none."""
    array = pc.assume_timezone(
        pa.array(times).cast(pa.timestamp("us")), zone, ambiguous="earliest", nonexistent="earliest"
    )
    return array.cast(pa.int64()).to_numpy(zero_copy_only=False)


def _times_of_text(field: TimeField, array: pa.Array, faults: Faults) -> np.ndarray:
    distinct, codes = distinct_of(field.column, array, faults)
    cells = [*plain_texts(distinct), ""]
    values, problems = np.zeros(len(cells), np.int64), dict[int, str]()
    for index, cell in enumerate(cells):
        try:
            values[index] = microseconds(cell, field)
        except ValueError as error:
            problems[index] = str(error)
    faults.add_distinct(field.column, codes, problems, len(distinct))
    return values[codes]


def microseconds(text: str, field: TimeField) -> int:
    """Returns a time in ISO 8601, `field.format` or `field.unit` as microseconds since 1970 in UTC.

    Raises:
        ValueError: the text is not a time, or neither it nor the field has a zone.
    """
    if field.unit is not None and (number := _NUMBER.fullmatch(canonical_text(text))):
        count = _count(number[1], number[2] or "", TIME_UNITS[field.unit])
        if not _YEARS[0] <= count <= _YEARS[1]:
            raise ValueError(f"{_EXPECTED_YEAR}, got {shown_text(text)}")
        return count
    time = _parsed(text, field)
    if time.tzinfo is None:
        if field.zone is None:
            raise ValueError(
                f"expected a time with a zone, got {shown_text(text)}; time: {{zone: UTC}} in the "
                "schema says which it is"
            )
        since = time - datetime(1970, 1, 1)
        return int(_in_utc(np.array([since // timedelta(microseconds=1)]), field.zone)[0])
    return (time - datetime(1970, 1, 1, tzinfo=timezone.utc)) // timedelta(microseconds=1)


def _count(whole: str, fraction: str, unit: int) -> int:
    """Returns the microseconds, rounded down, of a number of units of so many nanoseconds."""
    digits = fraction[:9].ljust(9, "0")
    nanoseconds = int(whole) * unit
    part = int(digits) * unit // 10**9
    return (nanoseconds + (-part if whole.startswith("-") else part)) // _MICROSECOND


def _parsed(text: str, field: TimeField) -> datetime:
    try:
        if field.format is not None:
            return datetime.strptime(text, field.format)
        return datetime.fromisoformat(_MORE_DIGITS.sub(r"\1", text.replace("Z", "+00:00")))
    except ValueError:
        if field.format is None and field.unit is None and text.isdecimal():
            raise ValueError(
                f"expected timestamps, got the number {shown_text(text)}; time: {{unit: s}} in the "
                "schema says that they are seconds since 1970"
            ) from None
        example = "2026-11-20T08:00:00+00:00"
        expected = f"such as {example}" if field.format is None else f"of the form {field.format}"
        raise ValueError(f"expected a time {expected}, got {shown_text(text)}") from None


_MORE_DIGITS = re.compile(r"(\.\d{6})\d+")  # of nanoseconds
