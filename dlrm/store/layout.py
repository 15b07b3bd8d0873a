"""Layout of a store: the tables whose rows it has, and the fields of a row's record."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dlrm.manifest import read_sealed

STORE, ROWS = "store.json", "rows.bin"


class RowBlock(NamedTuple):
    """Consecutive rows of all fields.

    Attributes:
        first: the first record.
        rows: number of rows.
        fields: by name, `[rows, ...]`; others are zeros.
    """

    first: int
    rows: int
    fields: Mapping[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """The layout of a store.

    Attributes:
        tables: rows of each table, by number, in the order of their records.
        fields: name, dtype and numbers of a row of each field, in the order of a record.
    """

    tables: dict[int, int]
    fields: tuple[tuple[str, str, int], ...]

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> "Layout":
        """Returns the layout in a map of JSON values.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: the map has no layout.
        """
        tables = {int(number): int(rows) for number, rows in entry["tables"].items()}
        return cls(tables, tuple((str(n), str(t), int(w)) for n, t, w in entry["fields"]))

    def as_json(self) -> dict[str, Any]:
        """Returns the layout as JSON values."""
        return {
            "tables": {str(number): rows for number, rows in self.tables.items()},
            "fields": [list(field) for field in self.fields],
        }

    @property
    def records(self) -> int:
        """Returns the number of rows."""
        return sum(self.tables.values())

    @property
    def begins(self) -> dict[int, int]:
        """Returns the first record of each table."""
        return dict(zip(self.tables, accumulate(self.tables.values(), initial=0), strict=False))

    @property
    def dtype(self) -> np.dtype:
        """Returns the dtype of a record's rows."""
        return np.dtype(
            [(name, np.dtype(kind).newbyteorder("<"), (w,)) for name, kind, w in self.fields]
        )

    @property
    def field_bytes(self) -> dict[str, int]:
        """Returns the bytes of a row of each field."""
        return {name: np.dtype(kind).itemsize * width for name, kind, width in self.fields}

    def row(self, record: int) -> str:
        """Names a record's row, for messages."""
        for number, begin in reversed(self.begins.items()):
            if begin <= record:
                return f"table {number}, row {record - begin}"
        return f"record {record}"


def check_layout(directory: Path, expected: Layout, actual: Layout) -> None:
    """Raises ValueError if a store has other tables, dimensions or optimizers."""
    if expected != actual:
        raise ValueError(
            f"{directory}: expected a store of {_shown(expected)}, got one of {_shown(actual)}"
        )


def check_store(directory: Path, entry: Mapping[str, Any]) -> str:
    """Returns the name of a store after checking that it is the checkpoint's.

    Raises:
        ValueError: the store is missing, or another one.
    """
    path = directory / STORE
    if not path.exists():
        raise ValueError(f"{directory}: expected the store with the checkpoint's rows, got none")
    id = read_sealed(path).get("id")
    if id != entry.get("id"):
        raise ValueError(
            f"{directory}: expected the store {entry.get('id')} with the checkpoint's rows, got "
            f"the store {id} of another run"
        )
    return str(id)


def _shown(layout: Layout) -> str:
    fields = ", ".join(f"{name} {kind}[{width}]" for name, kind, width in layout.fields)
    return f"tables {layout.tables} with {fields}"


def numpy_name(dtype: torch.dtype) -> str:
    """Returns the name of the NumPy dtype that stores values of a dtype of torch."""
    return "int16" if dtype == torch.bfloat16 else str(dtype).removeprefix("torch.")
