"""Rows of a checkpoint's tables: read from files some at a time, also with further rows."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from torch import Tensor

from dlrm.mapped_files import map_file

BLOCK_BYTES = 1 << 24  # of the rows that are read at once


@dataclass(frozen=True)
class SavedRows:
    """Rows of float32 in a file, and state 0 or new values for rows that a table has since got.

    Attributes:
        rows: number of rows.
        dim: numbers in a row.
        stored: rows in the file; None is all.
        added: returns the rows after those, `[rows - stored, dim]`; None is zeros.

    Raises:
        ValueError: the file has another size.
    """

    path: Path
    rows: int
    dim: int
    stored: int | None = None
    added: Callable[[], Tensor] | None = None

    def __post_init__(self) -> None:
        stored = self.rows if self.stored is None else self.stored
        expected, found = 4 * stored * self.dim, self.path.stat().st_size
        if expected != found:
            raise ValueError(
                f"{self.path}: expected {expected} bytes, {stored} rows of {self.dim} float32, "
                f"got {found}"
            )

    def blocks(self, first: int = 0, end: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
        """Yields rows from `first` to `end`, some at a time, `[some, dim]`, and the first's number.

        Files of equal shape have equal blocks.
        """
        end, at_once = (
            self.rows if end is None else end,
            max(BLOCK_BYTES // max(4 * self.dim, 1), 1),
        )
        for begin in range(first, end, at_once):
            yield begin, self.part(begin, min(at_once, end - begin))

    def part(self, first: int, count: int) -> np.ndarray:
        """Returns `count` rows from `first` on, `[count, dim]`, mapped where they can be."""
        stored = self.rows if self.stored is None else self.stored
        if not count * self.dim:
            return np.empty((count, self.dim), np.float32)
        if first + count <= stored:
            place = 4 * first * self.dim
            return map_file(self.path, np.float32, (count, self.dim), place, private=True)
        rows = np.zeros((count, self.dim), np.float32)
        num_read = max(stored - first, 0)
        if num_read:
            rows[:num_read] = self.part(first, num_read)
        if self.added is not None:
            after = first + num_read - stored
            rows[num_read:] = self._added[after : after + count - num_read]
        return rows

    @cached_property
    def _added(self) -> np.ndarray:
        assert self.added is not None
        return self.added().numpy()

    def grown(self, rows: int, added: Callable[[], Tensor] | None = None) -> "SavedRows":
        """Returns these rows with further ones, see `added`."""
        if rows == self.rows:
            return self
        return SavedRows(self.path, rows, self.dim, self.rows, added)
