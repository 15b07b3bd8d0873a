"""Checkpoints that get longer tables, or reinitialized rows, while they are loaded.

Checkpoints hold whole float32 tables, so a changed one loads like the checkpoint that it was made
from: with every placement, any number of processes and tables of every type.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from dlrm.model.config import DLRMConfig
from dlrm.model.tables.initial import Initial
from dlrm.train.checkpoints.saved_model import SavedModel
from dlrm.train.checkpoints.saved_rows import SavedRows


def changed_rows(
    saved: SavedModel, table_sizes: Sequence[int], evicted: Mapping[int, np.ndarray] | None = None
) -> SavedModel:
    """Returns a checkpoint whose tables have further rows, and some that begin anew.

    Such rows have the initial values of a new table, which depend on seed, table and row alone,
    and optimizer state 0. Nothing is written.

    Args:
        table_sizes: rows of each table, at least as many as it has.
        evicted: rows of each table that begin anew, ascending, by the table's number.

    Raises:
        ValueError: a table would lose rows, the number of tables differs, or ids are hashed, so
            that they would select other rows of a larger table.
    """
    _check_growth(saved, table_sizes)
    tables, state = [], []
    for index, rows in enumerate(saved.tables):
        own = index % len(table_sizes)
        size, chosen = table_sizes[own], (evicted or {}).get(own, np.empty(0, np.int64))
        states = saved.table_state[index] if saved.table_state else {}
        tables.append(_ChangedRows.of(rows, size, chosen, _Values(saved, index, size, chosen)))
        state.append({n: _ChangedRows.of(s, size, chosen) for n, s in states.items()})
    return replace(saved, tables=tables, table_state=state)


@dataclass(frozen=True)
class _Values:
    """New values of a table's evicted and added rows, made once they are needed."""

    saved: SavedModel
    index: int
    size: int
    evicted: np.ndarray

    @cached_property
    def of_evicted(self) -> np.ndarray:
        return _anew(self.saved, self.index, self.evicted)

    @cached_property
    def of_added(self) -> np.ndarray:
        return _added(self.saved, self.index, self.size)


@dataclass(frozen=True)
class _ChangedRows(SavedRows):
    """Rows of a table, or of their state, of which some are new; without `values` these are 0."""

    before: SavedRows = field(repr=False, kw_only=True)
    evicted: np.ndarray = field(repr=False, kw_only=True)
    values: _Values | None = field(repr=False, kw_only=True)

    def __post_init__(self) -> None:
        pass

    @classmethod
    def of(
        cls, before: SavedRows, size: int, evicted: np.ndarray, values: _Values | None = None
    ) -> SavedRows:
        if size == before.rows and not len(evicted):
            return before
        own = {"before": before, "evicted": evicted, "values": values}
        return cls(before.path, size, before.dim, **own)  # type: ignore[arg-type]

    def part(self, first: int, count: int) -> np.ndarray:
        known = max(min(count, self.before.rows - first), 0)
        rows = np.zeros((count, self.dim), np.float32)
        if known:
            rows[:known] = self.before.part(first, known)
        begin, end = np.searchsorted(self.evicted, (first, first + count))
        places = self.evicted[begin:end] - first
        rows[places] = 0
        if self.values is not None:
            if end > begin:
                rows[places] = self.values.of_evicted[begin:end]
            if known < count:
                after = first + known - self.before.rows
                rows[known:] = self.values.of_added[after : after + count - known]
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


def _anew(saved: SavedModel, index: int, chosen: np.ndarray) -> np.ndarray:
    """Returns the values that rows of a table, in ascending order, have in a new table."""
    rows, dim = saved.tables[index].rows, saved.tables[index].dim
    values = np.zeros((len(chosen), dim), np.float32)
    if not len(chosen) or index >= len(_table_sizes(saved)):  # wide weights are 0
        return values
    for begin, drawn in _initial(saved).rows(index, (rows, dim), int(chosen[0])):
        own = slice(*np.searchsorted(chosen, (begin, begin + len(drawn))))
        values[own] = drawn.numpy()[chosen[own] - begin]
        if own.stop == len(chosen):
            break
    return values


def _added(saved: SavedModel, index: int, num_rows: int) -> np.ndarray:
    """Returns the values of rows that are appended to a table, up to `num_rows`."""
    before, dim = saved.tables[index].rows, saved.tables[index].dim
    if index >= len(_table_sizes(saved)):  # wide weights
        return np.zeros((num_rows - before, dim), np.float32)
    return _initial(saved).added_rows(index, (num_rows, dim), before).numpy()


def _initial(saved: SavedModel) -> Initial:
    flags = _architecture(saved)
    std = flags["embedding_init_std"] if flags["embedding_init"] == "normal" else None
    return Initial(flags.get("seed", 0), flags["embedding_init_scale"], std)
