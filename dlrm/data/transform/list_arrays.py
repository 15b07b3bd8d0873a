"""Columns of lists in an Arrow table: their values, the lengths of rows, and weights."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dlrm.data import bags
from dlrm.data.schema.schema import CategoricalField, NumericalField, Schema
from dlrm.data.sources.columns import Parsed
from dlrm.data.transform.arrays import Faults, utf_8, value_type
from dlrm.data.transform.arrow_types import is_list, is_text
from dlrm.data.transform.rows import length_problem, split_text, too_long


def lists_of(name: str, array: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """Returns the values of lists, and the lengths, int64 `[rows]`; null lists have none.

    Raises:
        ValueError: the column is not one of lists of values.
    """
    dtype = array.type
    if pa.types.is_null(dtype):
        return pa.array([], pa.null()), np.zeros(len(array), np.int64)
    if is_list(value_type(dtype)) and dtype != value_type(dtype):
        array = array.dictionary_decode()
        dtype = array.type
    if not is_list(dtype) or pa.types.is_nested(dtype.value_type):
        raise ValueError(f"column {name!r}: expected a list of values a row, got the type {dtype}")
    lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    values = array.flatten()  # excludes the values of null lists
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    return values, lengths.astype(np.int64)


def field_lists(
    schema: Schema, field: CategoricalField, name: str, array: pa.Array, faults: Faults
) -> tuple[pa.Array, np.ndarray]:
    """Returns the lists of a field or of its weights, which may be texts as in CSV."""
    if is_text(value_type(array.type)):
        missing, separator = schema.missing_of(field), field.separator
        array, problems = utf_8(array.cast(value_type(array.type)))
        faults.add_distinct(name, np.arange(len(array)), problems, len(array))
        texts = array.to_pylist()
        split = [None if text is None else split_text(text, separator, missing) for text in texts]
        array = pa.array(split, pa.list_(pa.string()))
    return lists_of(name, array)


def check_lengths(
    field: CategoricalField, lengths: np.ndarray, of_weights: np.ndarray | None, faults: Faults
) -> None:
    """Notes lists that are too long, and lists with unequal numbers of values and weights."""
    long = too_long(field, lengths)
    faults.add(field.column, long, lambda row: length_problem(field, int(lengths[row])))
    if of_weights is not None:

        def problem(row: int) -> str:
            return (
                f"expected as many weights in {field.weights} as there are values, {lengths[row]}, "
                f"got {of_weights[row]}"
            )

        faults.add(field.column, lengths != of_weights, problem)


def weight_field(field: CategoricalField) -> NumericalField:
    """Returns the field of a list's weights, in which NaN may be marked as missing."""
    assert field.weights is not None
    return NumericalField(field.weights, "none", missing_values=field.missing_values, required=True)


def checked_weights(
    name: str, weights: Parsed, of_weights: np.ndarray, lengths: np.ndarray, faults: Faults
) -> np.ndarray:
    """Returns the weights of values, or 0 in rows with another number of them; notes bad ones.

    Args:
        name: name of their column.
        weights: weights of all rows, one after another.
        of_weights: number of weights in each row.
        lengths: number of values in each row.
        faults: receives the bad rows.
    """
    with np.errstate(over="ignore"):
        numbers = weights.values.astype(bags.WEIGHTS_DTYPE)
    bad = weights.missing | ~np.isfinite(numbers)

    def problem(index: int) -> str:
        if weights.missing[index]:
            return "expected a weight, got no value"
        return f"expected a weight that float32 has, got {weights.values[index]}"

    inner = Faults()
    inner.add(name, bad, problem)
    faults.add_lists(inner, of_weights)
    numbers = np.where(bad, bags.WEIGHTS_DTYPE.type(0), numbers)
    if (same := of_weights == lengths).all():
        return numbers
    made = np.zeros(int(lengths.sum()), bags.WEIGHTS_DTYPE)
    made[bags.indices_of(lengths, same)[0]] = numbers[bags.indices_of(of_weights, same)[0]]
    return made
