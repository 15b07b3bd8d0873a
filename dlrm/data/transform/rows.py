"""Rows in the form of a schema: columns of fields, lists of them, and those of crosses."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from dlrm.data import bags
from dlrm.data.bags import Jagged
from dlrm.data.schema.schema import CategoricalField, Schema
from dlrm.data.sources.columns import Coded, Parsed, TextColumn, hash_texts
from dlrm.data.sources.row_error import RowError

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


def in_list(position: int, problem: str) -> str:
    """Adds to a problem the position of the value in its list."""
    return f"place {position} of the list: {problem}"


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
        ranks = np.where(ids == 0, np.iinfo(np.int64).max, ids.astype(np.int64))
        keys = (ranks, rows) if weights is None else (weights, ranks, rows)
        order = np.lexsort(keys)
        ids, weights = ids[order], None if weights is None else weights[order]
    if (long := lengths > list_field.max_length).any():
        if (refused := too_long(field, lengths)).any():
            row = int(refused.argmax())
            raise RowError(row, length_problem(field, int(lengths[row])), field.column)
        kept = np.where(long, list_field.max_length, lengths)
        starts = np.cumsum(lengths, dtype=np.int64)
        starts -= kept if field.kept == "last" else lengths
        indices = np.repeat(starts - np.cumsum(kept) + kept, kept) + np.arange(kept.sum())
        ids, weights, lengths = ids[indices], None if weights is None else weights[indices], kept
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
    error.row, position = bags.row_of(lengths, error.row)
    error.problem = in_list(position, error.problem)


class FieldRows(NamedTuple):
    """Rows by the fields of a schema.

    Attributes:
        labels: bool `[rows]`; None without labels.
        numerical: a column for each numerical field.
        categorical: a column for each categorical field, of lists for a list field, and then for
            each cross.
        texts: the distinct values of each categorical field of strings, an Arrow array in
            the form of `Coded.keys`; None for integers, and with a fitted transform.
        extra: weight, groups and time by their names in a dataset; see `extra_dtypes`.
    """

    labels: np.ndarray | None
    numerical: Sequence[Parsed]
    categorical: Sequence[Column]
    texts: Sequence[Any]
    extra: dict[str, np.ndarray]

    def take(self, rows: np.ndarray) -> "FieldRows":
        """Returns the rows selected by a mask or by indices."""
        return FieldRows(
            None if self.labels is None else self.labels[rows],
            [column.take(rows) for column in self.numerical],
            [column.take(rows) for column in self.categorical],
            self.texts,
            {name: values[rows] for name, values in self.extra.items()},
        )


def extra_dtypes(schema: Schema) -> dict[str, np.dtype]:
    """Returns the columns of a dataset besides the model's inputs: name -> type.

    `weight` is float32, `group_<column>` a 64-bit hash, and `time` microseconds since 1970 in UTC.
    """
    names: dict[str, np.dtype] = {"weight": np.dtype("<f4")} if schema.weight else {}
    names |= {f"group_{name}": np.dtype("<u8") for name in schema.groups}
    return names | ({"time": np.dtype("<i8")} if schema.time else {})


def cross_columns(schema: Schema, columns: Sequence[Column]) -> list[Parsed | Coded]:
    """Returns the columns of a schema's crosses, given those of the categorical fields."""
    by_name = dict(zip((field.column for field in schema.categorical), columns, strict=True))
    return [combined([by_name[name] for name in cross.fields]) for cross in schema.crosses]


def combined(columns: Sequence[Column]) -> Parsed:
    """Returns a key for each row: the hash of the row's keys, 8 bytes each, like that of a text.

    It is missing if the row has no value in one of the columns.
    """
    parsed = [single(column).by_row() for column in columns]
    rows, width = len(parsed[0].values), len(parsed)
    keys = np.zeros(rows * width + 1, "<u8")  # with the 8 bytes that a TextColumn ends with
    keys[:-1].reshape(rows, width)[:] = np.stack([values for values, _ in parsed], axis=1)
    starts = np.arange(rows, dtype=np.int64) * (8 * width)
    hashes = hash_texts(TextColumn(keys.view(np.uint8), starts, starts + 8 * width))
    missing = np.logical_or.reduce([missing for _, missing in parsed])
    return Parsed(np.where(missing, np.uint64(0), hashes), missing)
