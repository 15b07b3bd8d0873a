"""Rows of a checkpoint's tables, read some at a time from files."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.mapped_files import map_file

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


def saved_tables(
    path: Path, config: Mapping[str, Any]
) -> tuple[list[SavedRows], list[dict[str, SavedRows]]]:
    """Returns the tables of a checkpoint, and the optimizer state of each table's rows.

    Raises:
        ValueError, OSError: a file is missing or has another size; the message names it.
    """
    folder = path / "tables"
    tables, state = [], []
    for index, table in enumerate(config["tables"]):
        rows, files = table["rows"], {n: folder / f"{index}.{n}.bin" for n in table["state"]}
        tables.append(SavedRows(folder / f"{index}.bin", rows, table["dim"]))
        state.append({name: _rows_of_state(file, rows) for name, file in files.items()})
    return tables, state


def _rows_of_state(path: Path, rows: int) -> SavedRows:
    size = path.stat().st_size // 4
    return SavedRows(path, rows, size // rows if rows else 0)
