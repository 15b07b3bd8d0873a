"""Rows in the form of a schema, from logs, tables or requests, and the columns of its crosses."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dlrm.data.sources.columns import Coded, Parsed, TextColumn, hash_texts
from dlrm.data.transform.lists import Column, single
from dlrm.data.transform.schema import Schema


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
