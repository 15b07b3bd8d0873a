"""Columns with a list per row: reading, and the sorting and truncation of their ids."""

from collections.abc import Collection, Sequence

import numpy as np

from dlrm.data import bags
from dlrm.data.bags import Jagged
from dlrm.data.sources.columns import Coded, Parsed
from dlrm.data.sources.row_error import RowError
from dlrm.data.transform.schema import CategoricalField

Column = Parsed | Coded | Jagged


def single(column: Column) -> Parsed | Coded:
    """Returns a column that has one value per row, as schemas demand of crosses."""
    assert not isinstance(column, Jagged)
    return column


def list_column(column: Column) -> Jagged:
    """Returns the column of a list field."""
    assert isinstance(column, Jagged)
    return column


def missing_features(numerical: Sequence[Parsed], categorical: Sequence[Column]) -> np.ndarray:
    """Returns a mask of features with no value, or an empty list, bool `[features, rows]`."""
    return np.array([column.missing for column in (*numerical, *categorical)])


def in_list(place: int, problem: str) -> str:
    """Adds to a problem the position of the value in its list."""
    return f"place {place} of the list: {problem}"


def length_problem(field: CategoricalField, length: int) -> str:
    """Returns the problem of a list that is too long."""
    return (
        f"expected a list of up to {field.max_length} values, got {length} (keep: first or "
        "keep: last in the schema cuts longer lists)"
    )


def too_long(field: CategoricalField, lengths: np.ndarray) -> np.ndarray:
    """Returns a mask of rows that are refused because of their length."""
    assert field.max_length is not None
    return (lengths > field.max_length) & (field.keep == "all")


def bags_of(field: CategoricalField, ids: np.ndarray, column: Jagged) -> Jagged:
    """Returns the ids of the values of lists as a dataset stores them: sorted, and truncated.

    Raises:
        RowError: a list is too long and may not be truncated.
    """
    list_field, weights = field.list_field, column.weights
    assert list_field is not None
    lengths = column.lengths
    if not field.ordered:
        rows = np.repeat(np.arange(len(lengths)), lengths)
        places = np.where(ids == 0, np.iinfo(np.int64).max, ids.astype(np.int64))
        keys = (places, rows) if weights is None else (weights, places, rows)
        order = np.lexsort(keys)
        ids, weights = ids[order], None if weights is None else weights[order]
    if (long := lengths > list_field.max_length).any():
        if (refused := too_long(field, lengths)).any():
            row = int(refused.argmax())
            raise RowError(row, length_problem(field, int(lengths[row])), field.column)
        kept = np.where(long, list_field.max_length, lengths)
        starts = np.cumsum(lengths, dtype=np.int64)
        starts -= kept if field.kept == "last" else lengths
        places = np.repeat(starts - np.cumsum(kept) + kept, kept) + np.arange(kept.sum())
        ids, weights, lengths = ids[places], None if weights is None else weights[places], kept
    if weights is not None:
        weights = weights.astype(bags.WEIGHTS_DTYPE, copy=False)
    return Jagged(ids, lengths.astype(list_field.lengths_dtype), weights)


def split_text(text: str, separator: str, missing: Collection[str]) -> list[str]:
    """Returns the values of a list in a text; none if the text is empty or means "missing".

    Nothing between two separators is no value. Brackets, and quotes around values, are no part of
    them, as of lists that Python, pandas and NumPy print.
    """
    text = text.strip()
    if text in missing:
        return []
    printed = text.startswith("[") and text.endswith("]")
    items = (item.strip() for item in (text[1:-1] if printed else text).split(separator))
    return [_unquoted(item) if printed else item for item in items if item]


def _unquoted(item: str) -> str:
    quoted = len(item) > 1 and item[0] == item[-1] and item[0] in "'\""
    return item[1:-1] if quoted else item


def move_to_row(error: RowError, lengths: np.ndarray) -> None:
    """Makes the row of an error that of the list; it was the index of the value among all."""
    error.row, place = bags.row_of(lengths, error.row)
    error.problem = in_list(place, error.problem)
