"""Rows in the form of a schema, from logs, tables or requests."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dlrm.data.sources.columns import Parsed
from dlrm.data.transform.lists import Column
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
