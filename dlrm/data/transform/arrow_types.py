"""Types of Arrow that files and tables in memory share: text, lists, and views of them."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

NUMBERS = {b"kind": b"number"}  # metadata of a column of text that was numbers of JSON
_VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
_BYTES = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
_BYTES |= {pa.string_view(): pa.binary_view()}


def is_text(dtype: pa.DataType) -> bool:
    """Returns whether a type is text, with offsets of any size."""
    return pa.types.is_string(dtype) or pa.types.is_large_string(dtype)


def is_list(dtype: pa.DataType) -> bool:
    """Returns whether a type is a list."""
    views = pa.types.is_list_view(dtype) or pa.types.is_large_list_view(dtype)
    fixed = pa.types.is_fixed_size_list(dtype)
    return views or fixed or pa.types.is_list(dtype) or pa.types.is_large_list(dtype)


def large_lists(array: pa.Array, value_type: pa.DataType) -> pa.Array:
    """Returns lists of any kind as large ones; Arrow's cast is wrong for views."""
    absent = array.is_null()
    lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    values = array.flatten().cast(value_type)
    return pa.LargeListArray.from_arrays(pa.array(ends), values, mask=absent)


def plain_field(field: pa.Field) -> pa.Field:
    """Returns a column without views of text and runs, which few functions of Arrow take.

    Texts become indices into their distinct values: 0.8 s for 26 columns of 1 M texts on Zen 4;
    converting the texts one by one takes 2.1 s.
    """
    if pa.types.is_run_end_encoded(field.type):
        return plain_field(pa.field(field.name, field.type.value_type))
    dtype, index = field.type, pa.int32()
    if is_list(dtype):  # those of a fixed size as well, whose nulls Parquet's reader does not take
        values = _VIEWS.get(dtype.value_type, dtype.value_type)
        return pa.field(field.name, pa.large_list(values))
    if pa.types.is_dictionary(dtype):
        dtype, index = dtype.value_type, dtype.index_type
    return pa.field(field.name, pa.dictionary(index, _VIEWS[dtype])) if dtype in _VIEWS else field


def plain_array(array: pa.Array, dtype: pa.DataType) -> pa.Array:
    """Returns an array in the type that `plain_field` gives its column."""
    if pa.types.is_run_end_encoded(array.type):
        array = pc.run_end_decode(array)
    if array.type == dtype:
        return array
    if is_list(dtype):
        return large_lists(array, dtype.value_type)
    return (array if pa.types.is_dictionary(array.type) else array.dictionary_encode()).cast(dtype)


def text_as_bytes(dtype: pa.DataType) -> pa.DataType:
    """Returns the type of the same buffers in which text need not be UTF-8."""
    if dtype in _BYTES:
        return _BYTES[dtype]
    if pa.types.is_dictionary(dtype):
        return pa.dictionary(dtype.index_type, text_as_bytes(dtype.value_type), dtype.ordered)
    if pa.types.is_list(dtype):
        return pa.list_(text_as_bytes(dtype.value_type))
    if pa.types.is_large_list(dtype):
        return pa.large_list(text_as_bytes(dtype.value_type))
    return dtype
