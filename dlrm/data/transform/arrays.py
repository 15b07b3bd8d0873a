"""Columns of an Arrow table, each as its distinct values, and problems of its values."""

from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dlrm.data.sources import native
from dlrm.data.sources.column_names import check_columns
from dlrm.data.sources.columns import TextColumn
from dlrm.data.sources.row_error import RowError, shown_text
from dlrm.data.transform.arrow_types import NUMBERS, is_text
from dlrm.data.transform.dictionaries import text_array
from dlrm.data.transform.rows import move_to_row
from dlrm.data.transform.values import (
    BOOLEAN,
    FLOAT64_BITS,
    MOST_EXACT,
    NUMBER,
    TEXT,
    TIME,
    number_text,
)

_FEW = 16  # texts that are read one by one, faster than the distinct ones are found


class Faults:
    """The first bad value of each bad row of a batch."""

    def __init__(self) -> None:
        self._by_row: dict[int, RowError] = {}

    def add(self, column: str, bad: np.ndarray, problem: Callable[[int], str]) -> None:
        """Adds the rows of a mask; `problem` describes the problem of a row."""
        for row in np.flatnonzero(bad).tolist():
            if row not in self._by_row:
                self._by_row[row] = RowError(row, problem(row), column)

    def add_distinct(
        self, column: str, codes: np.ndarray, problems: dict[int, str], missing: int
    ) -> None:
        """Adds rows whose distinct value is bad, by its index; `missing` is that of -1."""
        if problems:
            wrong = np.zeros(missing + 1, bool)
            wrong[list(problems)] = True
            self.add(column, wrong[codes], lambda row: problems[int(codes[row]) % (missing + 1)])

    def add_lists(self, inner: "Faults", lengths: np.ndarray) -> None:
        """Adds the problems of lists' values, whose rows are indices among all values."""
        for bad in inner.in_order():
            move_to_row(bad, lengths)
            self._by_row.setdefault(bad.row, bad)

    def in_order(self) -> list[RowError]:
        """Returns the bad values by row."""
        return [self._by_row[row] for row in sorted(self._by_row)]


def numbers_of_json(batch: pa.RecordBatch, name: str) -> bool:
    """Returns whether a column of text was numbers in JSON."""
    return batch.schema.field(name).metadata == NUMBERS


def column_of(batch: pa.RecordBatch, name: str) -> pa.Array:
    """Returns a column.

    Raises:
        ValueError: no column has that name, or two have.
    """
    index = batch.schema.get_field_index(name)
    if index < 0:  # no column has the name, or several have it
        check_columns("", batch.schema.names, [name])
    array = batch.column(index)
    if isinstance(array, pa.ExtensionArray):
        if array.type.extension_name != "arrow.uuid":
            return array.storage
        return pa.array([u if u is None else str(u) for u in array.to_pylist()], pa.string())
    return array


def array_of_values(values: Sequence[Any]) -> pa.Array:
    """Returns Python values, of which None, NaN and NaT are missing, as an array of their type.

    Raises:
        pyarrow.ArrowException, TypeError, ValueError, OverflowError: they are of several types.
    """
    try:
        array = pa.array(values, from_pandas=True)
    except OverflowError:
        array = pa.array(values, pa.uint64(), from_pandas=True)
    dtype = array.type
    if pa.types.is_integer(dtype) and any(isinstance(v, np.floating | UUID) for v in values):
        raise ValueError("integers beside narrow floats or UUIDs, which Arrow takes for integers")
    if pa.types.is_floating(dtype):  # of which Arrow keeps the NaN of numpy
        has_nan = np.isnan(array.to_numpy(zero_copy_only=False)).any()
        return _without_nan(array).cast(dtype) if has_nan else array
    if pa.types.is_temporal(dtype):
        # Arrow takes the first value's type for all, cutting times off and zones.
        there = [
            time for time, valid in zip(values, array.is_valid().to_pylist(), strict=True) if valid
        ]
        forms = {(hasattr(time, "hour"), getattr(time, "tzinfo", None) is None) for time in there}
        if len(forms) > 1:
            raise ValueError("dates and times, or times with a zone and without one")
        if pa.types.is_timestamp(dtype) and any(getattr(time, "nanosecond", 0) for time in there):
            return pa.array(values, pa.timestamp("ns", dtype.tz), from_pandas=True)
    return array


def _without_nan(array: pa.Array) -> pa.Array:
    """Returns floats with nulls for NaN, of a type that Arrow can compare."""
    if pa.types.is_float16(array.type):
        array = array.cast(pa.float32())
    return pc.if_else(pc.is_nan(array), pa.scalar(None, array.type), array)


def texts_of(name: str, array: pa.Array) -> tuple[Sequence[str], np.ndarray]:
    """Returns the distinct values of any column as text, and the index of each row's, or -1."""
    distinct, codes = distinct_of(name, array)
    return plain_texts(distinct), codes


def distinct_of(
    name: str, array: pa.Array, faults: Faults | None = None
) -> tuple[pa.Array, np.ndarray]:
    """Returns the distinct values, and the index of each row's value, or -1 for null.

    Text that is not UTF-8 is noted, and escaped in the values.
    """
    raw, codes = dictionary_encoded(name, array)
    distinct, problems = utf_8(raw)
    if faults is not None:
        faults.add_distinct(name, codes, problems, len(distinct))
    return distinct, codes


def dictionary_encoded(name: str, array: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """Returns the distinct values, whose text may be any bytes, and the index of each row's, or -1.

    NaN is no value: it has the index of null.
    """
    dtype = array.type
    if pa.types.is_null(dtype):
        return pa.array([], pa.string()), np.full(len(array), -1, np.int32)
    if pa.types.is_nested(dtype):
        hint = " (max_length in the schema makes a field one of lists)"
        raise ValueError(
            f"column {name!r}: expected a value a row, got the type {dtype}"
            + hint * (not pa.types.is_struct(dtype))
        )
    if isinstance(dtype, pa.ExtensionType):
        array, dtype = array.storage, array.storage.type
    if is_text(dtype) and len(array) <= _FEW and not array.null_count:
        return array, np.arange(len(array), dtype=np.int32)
    if pa.types.is_dictionary(dtype) and pa.types.is_floating(dtype.value_type):
        array, dtype = array.dictionary_decode(), dtype.value_type
    if pa.types.is_floating(dtype):
        array = _without_nan(array)
    if not pa.types.is_dictionary(dtype):
        array = array.dictionary_encode()
    elif array.dictionary.null_count:
        array = array.dictionary_decode().dictionary_encode()
    indices = array.indices
    codes = stored_values(indices)
    codes = codes.astype(np.int64 if codes.itemsize > 4 else np.int32, copy=False)
    if indices.null_count:
        codes = codes | -are_null(indices).view(np.int8)  # -1 for null
    return array.dictionary, codes


def stored_values(array: pa.Array) -> np.ndarray:
    """Returns integers or float64 without a copy; those of nulls have no meaning."""
    name = "float64" if pa.types.is_float64(array.type) else str(array.type)
    buffer, dtype = array.buffers()[1], np.dtype(name)
    if buffer is None:
        return np.zeros(len(array), dtype)
    return np.frombuffer(buffer, dtype, len(array), array.offset * dtype.itemsize)


def are_null(array: pa.Array) -> np.ndarray:
    """Returns a mask of the nulls of an array whose type is neither null nor a union."""
    if not array.null_count:
        return np.zeros(len(array), bool)
    bits, end = np.frombuffer(array.buffers()[0], np.uint8), array.offset + len(array)
    valid = np.unpackbits(bits, count=end, bitorder="little")
    return (valid[array.offset :] ^ 1).view(bool)


def utf_8(distinct: pa.Array) -> tuple[pa.Array, dict[int, str]]:
    """Returns values with bytes as text, escaped if not UTF-8, and the escaped ones by index."""
    try:
        if is_text(distinct.type):
            distinct.validate(full=True)
        elif _is_binary(distinct.type):
            distinct = distinct.cast(pa.large_binary()).cast(pa.large_string())
        return distinct, {}
    except pa.ArrowInvalid:
        texts, problems = [], {}
        for index, raw in enumerate(distinct.cast(pa.large_binary()).to_pylist()):
            texts.append(raw.decode("utf-8", "backslashreplace"))
            if texts[-1].encode() != raw:
                problems[index] = f"expected UTF-8, got {shown_text(raw)}"
        return pa.array(texts, pa.large_string()), problems


def floats_of(array: pa.Array) -> pa.Array | None:
    """Returns texts of numbers as float64, or None if there are others; empty ones are missing."""
    if pa.types.is_null(array.type) or pa.types.is_float64(array.type):
        return array.cast(pa.float64())
    if native.host is None:
        return None
    column = text_column(array.fill_null(""))
    values, missing = native.host.numbers_of(*column), column.starts == column.ends
    return None if (np.isnan(values) & ~missing).any() else pa.array(values, mask=missing)


def _is_binary(dtype: pa.DataType) -> bool:
    fixed = pa.types.is_fixed_size_binary(dtype)
    return fixed or pa.types.is_binary(dtype) or pa.types.is_large_binary(dtype)


def bits_of(dtype: pa.DataType) -> int:
    """Returns the bits of the integers that a type has all of, if it is one of floats."""
    return {pa.float16(): 11, pa.float32(): 24}.get(value_type(dtype), FLOAT64_BITS)


def value_type(dtype: pa.DataType) -> pa.DataType:
    """Returns the type of values, of which an array may have indices."""
    return dtype.value_type if pa.types.is_dictionary(dtype) else dtype


def value_class(dtype: pa.DataType) -> str:
    """Returns the class of typed values, or `TEXT`; see `dlrm.data.transform.values`."""
    dtype = value_type(dtype)
    if pa.types.is_boolean(dtype):
        return BOOLEAN
    if pa.types.is_integer(dtype) or pa.types.is_floating(dtype) or pa.types.is_decimal(dtype):
        return NUMBER
    of_time = pa.types.is_timestamp(dtype) or pa.types.is_date(dtype) or pa.types.is_time(dtype)
    return TIME if of_time else TEXT


def canonical_texts(name: str, array: pa.Array) -> pa.Array:
    """Returns values as text, of which `canonical` makes that of the same values elsewhere.

    Raises:
        ValueError: the values have no such text.
    """
    dtype = array.type
    if pa.types.is_interval(dtype) or pa.types.is_duration(dtype):
        raise ValueError(
            f"column {name!r}: expected values such as text, numbers or times, got the type "
            f"{dtype}; convert it to a number of seconds"
        )
    if pa.types.is_float32(dtype):  # the shortest text, as in CSV: 0.1, which float64 says longer
        texts = map(str, array.to_numpy(zero_copy_only=False))
        return pa.array([*texts], pa.large_string(), mask=are_null(array))
    return as_text(array)


def as_text(array: pa.Array) -> pa.Array:
    """Returns values as text: whole numbers without a point, booleans as true and false."""
    dtype = array.type
    if pa.types.is_string(dtype) or pa.types.is_large_string(dtype):
        return array
    if pa.types.is_floating(dtype):
        values = array.cast(pa.float64()).fill_null(0.0).to_numpy()
        whole = (np.floor(values) == values) & (np.abs(values) < MOST_EXACT)
        integers = np.where(whole, values, 0.0).astype(np.int64)
        if whole.all():
            return pa.array(integers, mask=are_null(array)).cast(pa.large_string())
        rows = zip(whole.tolist(), integers.tolist(), values.tolist(), strict=True)
        texts = [str(integer) if is_whole else repr(value) for is_whole, integer, value in rows]
        return pa.array(texts, pa.large_string(), mask=are_null(array))
    if pa.types.is_decimal(dtype):
        decimals = array.to_pylist()
        of_decimals = [None if d is None else number_text(format(d, "f")) for d in decimals]
        return pa.array(of_decimals, pa.large_string())
    return array.cast(pa.large_string())


def plain_texts(array: pa.Array) -> list[str]:
    """Returns values as text without surrounding blanks; that of null is empty."""
    return [(text or "").strip() for text in as_text(array).to_pylist()]


def text_column(array: pa.Array) -> TextColumn:
    """Returns the text of an array without nulls, without copying it."""
    wide = pa.types.is_large_string(array.type)
    _, offsets, data = array.buffers()
    if offsets is None:
        bounds = np.zeros(1, np.int64)
    else:
        every = np.frombuffer(offsets, np.int64 if wide else np.int32).astype(np.int64)
        bounds = every[array.offset : array.offset + len(array) + 1]  # type: ignore[assignment]
    content = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return TextColumn(content, bounds[:-1], bounds[1:])


def array_of(column: TextColumn) -> pa.Array:
    """Returns texts as an array, one after another."""
    lengths = column.ends - column.starts
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    if len(lengths) and (column.starts[1:] == column.ends[:-1]).all():
        data = column.data[column.starts[0] : column.ends[-1]]
    else:
        indices = np.repeat(column.starts - ends[:-1], lengths) + np.arange(ends[-1])
        data = column.data[indices] if len(indices) else np.empty(0, np.uint8)
    return text_array(ends, data.tobytes())
