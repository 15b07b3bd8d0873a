"""Checkpoints that get longer tables while they are loaded.

Checkpoints hold whole float32 tables, so a changed one loads like the checkpoint that it was made
from: with every placement, any number of processes and tables of every type.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from dlrm.model.config import DLRMConfig
from dlrm.model.tables.initial import Initial
from dlrm.train.checkpoints.saved_model import SavedModel
from dlrm.train.checkpoints.saved_rows import SavedRows


def changed_rows(saved: SavedModel, table_sizes: Sequence[int]) -> SavedModel:
    """Returns a checkpoint whose tables have further rows.

    Such rows have the initial values of a new table, which depend on seed, table and row alone,
    and optimizer state 0. Nothing is written.

    Args:
        table_sizes: rows of each table, at least as many as it has.

    Raises:
        ValueError: a table would lose rows, the number of tables differs, or ids are hashed, so
            that they would select other rows of a larger table.
    """
    _check_growth(saved, table_sizes)
    tables, state = [], []
    for index, rows in enumerate(saved.tables):
        size = table_sizes[index % len(table_sizes)]
        states = saved.table_state[index] if saved.table_state else {}
        tables.append(_GrownRows.of(rows, size, _Added(saved, index, size)))
        state.append({n: _GrownRows.of(s, size) for n, s in states.items()})
    return replace(saved, tables=tables, table_state=state)


@dataclass(frozen=True)
class _Added:
    """The values of rows that are appended to a table, made once they are needed."""

    saved: SavedModel
    index: int
    size: int

    @cached_property
    def values(self) -> np.ndarray:
        before, dim = self.saved.tables[self.index].rows, self.saved.tables[self.index].dim
        if self.index >= len(_table_sizes(self.saved)):  # wide weights
            return np.zeros((self.size - before, dim), np.float32)
        flags = _architecture(self.saved)
        std = flags["embedding_init_std"] if flags["embedding_init"] == "normal" else None
        initial = Initial(flags.get("seed", 0), flags["embedding_init_scale"], std)
        return initial.added_rows(self.index, (self.size, dim), before).numpy()


@dataclass(frozen=True)
class _GrownRows(SavedRows):
    """Rows of a table, or of their state, with further ones; without `added` these are 0."""

    before: SavedRows = field(repr=False, kw_only=True)
    added: _Added | None = field(repr=False, kw_only=True)

    def __post_init__(self) -> None:
        pass

    @classmethod
    def of(cls, before: SavedRows, size: int, added: _Added | None = None) -> SavedRows:
        if size == before.rows:
            return before
        return cls(before.path, size, before.dim, before=before, added=added)

    def part(self, first: int, count: int) -> np.ndarray:
        known = max(min(count, self.before.rows - first), 0)
        rows = np.zeros((count, self.dim), np.float32)
        if known:
            rows[:known] = self.before.part(first, known)
        if self.added is not None and known < count:
            after = first + known - self.before.rows
            rows[known:] = self.added.values[after : after + count - known]
        return rows


def _check_growth(saved: SavedModel, table_sizes: Sequence[int]) -> None:
    before = _table_sizes(saved)
    if len(table_sizes) != len(before):
        raise ValueError(
            f"{saved.path}: expected the rows of {len(before)} tables, got {len(table_sizes)}"
        )
    for table, (old, new) in enumerate(zip(before, table_sizes, strict=True)):
        if new < old:
            raise ValueError(f"{saved.path}: table {table}: expected {old} rows or more, got {new}")
    if _architecture(saved)["hash_indices"] and [*table_sizes] != before:
        raise ValueError(
            f"{saved.path}: --hash_indices takes ids modulo the rows of their table, so that they "
            "would mean other rows of a larger one"
        )


def _architecture(saved: SavedModel) -> dict[str, Any]:
    """Returns the model's flags; flags newer than the checkpoint have their defaults."""
    defaults = {field.name: field.default for field in fields(DLRMConfig)}
    return defaults | saved.config["flags"]


def _table_sizes(saved: SavedModel) -> list[int]:
    """Returns rows of the tables of vectors, which those of wide weights repeat."""
    sizes = [table.rows for table in saved.tables]
    return sizes[: len(sizes) // 2] if _architecture(saved)["wide"] else sizes
