"""Columns of lists in an Arrow table: their concatenated values, and the lengths of rows."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dlrm.data.clicks import bags
from dlrm.data.clicks.bags import places_of
from dlrm.data.sources.columns import Parsed
from dlrm.data.tables.columns import Faults
from dlrm.data.tables.kinds.types import is_list
from dlrm.data.transform.lists import (
    bad_weights,
    count_problem,
    length_problem,
    too_long,
    weight_problem,
)
from dlrm.data.transform.schema import CategoricalField


def lists_of(name: str, array: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """Returns the values of lists, and the lengths, int64 `[rows]`; null lists have none.

    Raises:
        ValueError: the column is not one of lists of values.
    """
    kind = array.type
    if pa.types.is_null(kind):
        return pa.array([], pa.null()), np.zeros(len(array), np.int64)
    if pa.types.is_dictionary(kind) and is_list(kind.value_type):
        array = array.dictionary_decode()
        kind = array.type
    if not is_list(kind) or pa.types.is_nested(kind.value_type):
        raise ValueError(f"column {name!r}: expected a list of values a row, got the type {kind}")
    lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    values = array.flatten()  # excludes the values of null lists
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    return values, lengths.astype(np.int64)


def check_lengths(
    field: CategoricalField, lengths: np.ndarray, of_weights: np.ndarray | None, faults: Faults
) -> None:
    """Notes lists that are too long, and lists with unequal numbers of values and weights."""
    long = too_long(field, lengths)
    faults.add(field.column, long, lambda row: length_problem(field, int(lengths[row])))
    if of_weights is not None:
        differ = lengths != of_weights

        def problem(row: int) -> str:
            return count_problem(field, int(lengths[row]), int(of_weights[row]))

        faults.add(field.column, differ, problem)


def checked_weights(
    name: str, weights: Parsed, lengths: np.ndarray, values: np.ndarray, faults: Faults
) -> np.ndarray:
    """Returns the weights of values, or 0 in rows with another number of them; notes bad ones.

    Args:
        name: name of their column.
        weights: weights of all rows, one after another.
        lengths: number of weights in each row.
        values: number of values in each row.
        faults: receives the bad rows.
    """
    inner = Faults()
    inner.add(name, bad_weights(weights), lambda place: weight_problem(weights, place))
    faults.add_lists(inner, lengths)
    numbers = np.where(bad_weights(weights), 0.0, weights.values).astype(bags.WEIGHTS_DTYPE)
    if (same := lengths == values).all():
        return numbers
    made = np.zeros(int(values.sum()), bags.WEIGHTS_DTYPE)
    made[places_of(values, same)[0]] = numbers[places_of(lengths, same)[0]]
    return made
