"""Rows of a checkpoint's tables, read some at a time from files or from the store of a run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlrm.mapped_files import map_file
from dlrm.ops import join_float32
from dlrm.store.layout import ROWS, Layout
from dlrm.store.row_view import RowView
from dlrm.train.checkpoints.description import CONFIG

STORES = "stores"  # in a configuration: the records that restore the rows of each rank's store
_BLOCK_BYTES = 1 << 24


@dataclass(frozen=True)
class SavedRows:
    """Rows of float32 in a file.

    Attributes:
        rows: number of rows.
        dim: numbers in a row.

    Raises:
        ValueError: the file has another size.
    """

    path: Path
    rows: int
    dim: int

    def __post_init__(self) -> None:
        expected, found = 4 * self.rows * self.dim, self.path.stat().st_size
        if expected != found:
            raise ValueError(
                f"{self.path}: expected {expected} bytes, {self.rows} rows of {self.dim} float32, "
                f"got {found}"
            )

    def blocks(self) -> Iterator[np.ndarray]:
        """Yields all rows, `[some, dim]` at a time; files of equal shape have equal blocks."""
        rows = max(_BLOCK_BYTES // max(4 * self.dim, 1), 1)
        for first in range(0, self.rows, rows):
            yield self.part(first, min(rows, self.rows - first))

    def part(self, first: int, count: int) -> np.ndarray:
        """Returns `count` rows from `first` on, `[count, dim]`, mapped where they can be."""
        if not count * self.dim:
            return np.empty((count, self.dim), np.float32)
        start, shape = 4 * first * self.dim, (count, self.dim)
        return map_file(self.path, np.float32, shape, start, private=True)

    def copy_to(self, path: Path) -> None:
        """Writes all rows to a file."""
        with open(path, "wb") as file:
            for block in self.blocks():
                file.write(block.data)


class StoreView:
    """The store of a checkpoint, opened at the first read.

    Args:
        entry: the store's record; see `RowStore.checkpoint`.

    Raises:
        ValueError: the entry is damaged.
    """

    def __init__(self, path: Path, entry: Mapping[str, Any]) -> None:
        try:
            self.directory, self.layout = Path(entry["path"]), Layout.from_dict(entry)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{path / CONFIG}: expected where the rows are, got {error!r}"
            ) from None
        self._path, self._entry = path, entry

    @cached_property
    def store(self) -> RowView:
        """Returns the opened store.

        Raises:
            ValueError: the store is missing or damaged; the message names the checkpoint.
        """
        try:
            return RowView(self._entry, {})
        except (OSError, ValueError) as error:
            raise ValueError(f"{self._path}: its rows are in a store: {error}") from None


@dataclass(frozen=True)
class StoredRows(SavedRows):
    """Rows of a field, in float32, in the store of a checkpoint.

    Attributes:
        view: the store of the rows, shared by several fields.
        begin: the first record.
        names: the field, or the upper and the lower halves of its values.
    """

    view: StoreView = field(repr=False, kw_only=True)
    begin: int = field(kw_only=True)
    names: tuple[str, ...] = field(kw_only=True)

    def __post_init__(self) -> None:
        pass

    def part(self, first: int, count: int) -> np.ndarray:
        found = self.view.store.read(self.begin + first, count)
        parts = [np.ascontiguousarray(found[name]) for name in self.names]
        if len(parts) == 1:
            return parts[0]
        high, low = map(torch.from_numpy, parts)
        return join_float32(high.view(torch.bfloat16), low).numpy()


def prefix_of(index: int) -> str:
    """Returns the prefix of a parameter's field names: none, or "1_" for the wide term."""
    return f"{index}_" if index else ""


def saved_tables(
    path: Path, config: Mapping[str, Any]
) -> tuple[list[SavedRows], list[dict[str, SavedRows]]]:
    """Returns the tables of a checkpoint, and the optimizer state of each table's rows.

    Raises:
        ValueError, OSError: a file is missing or has another size; the message names it.
    """
    if config.get(STORES):
        return _stored_tables(path, config)
    folder = path / "tables"
    tables, state = [], []
    try:
        for index, table in enumerate(config["tables"]):
            rows, files = table["rows"], {n: folder / f"{index}.{n}.bin" for n in table["state"]}
            tables.append(SavedRows(folder / f"{index}.bin", rows, table["dim"]))
            state.append({name: _rows_of_state(file, rows) for name, file in files.items()})
    except KeyError as error:
        raise ValueError(f"{path / CONFIG}: expected tables, got {error!r}") from error
    return tables, state


def _stored_tables(
    path: Path, config: Mapping[str, Any]
) -> tuple[list[SavedRows], list[dict[str, SavedRows]]]:
    """Returns tables whose rows are in stores, and the state of their rows."""
    tables = config["tables"]
    found: dict[int, tuple[SavedRows, dict[str, SavedRows]]] = {}
    for entry in config[STORES]:
        view = StoreView(path, entry)
        names = [name for name, _, _ in view.layout.fields]
        parameters = 1 + any(name.startswith(prefix_of(1)) for name in names)
        for number, begin in view.layout.begins.items():
            for index in range(parameters):
                own = number + index * (len(tables) // parameters)
                found[own] = _fields_of_table(tables[own], view, begin, prefix_of(index))
    missing = [str(number) for number in range(len(tables)) if number not in found]
    if missing:
        raise ValueError(f"{path}: expected the rows of table {missing[0]} in a store, got none")
    return [found[n][0] for n in range(len(tables))], [found[n][1] for n in range(len(tables))]


def _fields_of_table(
    table: Mapping[str, Any], view: StoreView, begin: int, prefix: str
) -> tuple[SavedRows, dict[str, SavedRows]]:
    widths = {name: width for name, _, width in view.layout.fields}

    def rows(*names: str) -> SavedRows:
        known = tuple(name for name in names if name in widths)
        path, width = view.directory / ROWS, widths[names[0]]
        return StoredRows(path, table["rows"], width, view=view, begin=begin, names=known)

    state = {name: rows(prefix + name) for name in table["state"]}
    return rows(f"{prefix}weight", f"{prefix}low"), state


def _rows_of_state(path: Path, rows: int) -> SavedRows:
    size = path.stat().st_size // 4
    return SavedRows(path, rows, size // rows if rows else 0)
