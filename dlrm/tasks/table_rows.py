"""Checkpoints with longer tables, or with reinitialized rows.

`grow_tables` and `evict_rows` write a copy, in which unchanged files are hard links if the file
system allows it; `changed_rows` changes a checkpoint while it is loaded. Checkpoints hold whole
float32 tables, so either loads like the checkpoint that it was made from: with every placement, any
number of processes and tables of every type.
"""

import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data.clicks.layout import TRANSFORM
from dlrm.data.transform.difference import check_extends
from dlrm.files import link_or_copy, staged_directory
from dlrm.manifest import read_manifest
from dlrm.model.config import DLRMConfig
from dlrm.model.tables.initial import Initial
from dlrm.train.checkpoints.description import DESCRIPTION, describe
from dlrm.train.checkpoints.saved_model import SavedModel
from dlrm.train.checkpoints.saved_rows import SavedRows


def grow_tables(
    saved: SavedModel,
    table_sizes: Sequence[int],
    directory: str | os.PathLike,
    dataset: str | os.PathLike | None = None,
) -> str | None:
    """Writes a copy of a checkpoint with rows added at the ends of its tables.

    New rows have initial values that depend on seed, table and row alone, and optimizer state 0.

    Args:
        table_sizes: rows of each field's table, at least as many as it has.
        dataset: the dataset whose dictionaries have the ids of the new rows. The copy gets its
            transform instead of the checkpoint's.

    Returns:
        A line about a transform that is missing, so that dictionaries could not be compared, or
        None.

    Raises:
        ValueError: a table would lose rows, the number of fields differs, two fields of one table
            have other rows, ids are hashed, so that they would select other rows, or the transform
            of the dataset is not that of the checkpoint with further values in its dictionaries.
        OSError: the copy cannot be written.
    """
    before = _table_sizes(saved)
    after = _sizes_by_table(saved, table_sizes)
    _check_growth(saved, after)
    note = None if dataset is None else check_extends(saved.path, dataset)
    tables = [
        entry | {"rows": after[index % len(before)]}
        for index, entry in enumerate(saved.config["tables"])
    ]
    grown = {i: new["rows"] for i, new in enumerate(tables) if new["rows"] > saved.tables[i].rows}
    data = saved.config["dataset"] | {"table sizes": [*table_sizes]}
    config = saved.config | {"tables": tables, "dataset": data}
    transform = None if dataset is None or note else Path(dataset, TRANSFORM)
    with _copy_of(saved, directory, grown, config, transform) as files:
        for index, paths in files.items():
            old, new = saved.tables[index].rows, grown[index]
            for path in paths:
                os.truncate(path, path.stat().st_size // old * new)  # the added bytes are 0
            _mapped(paths[0], new)[old:] = _added(saved, index, new)
    return note


def evict_rows(
    saved: SavedModel, rows: Mapping[int, Sequence[int]], directory: str | os.PathLike
) -> None:
    """Writes a copy of a checkpoint in which some rows are reinitialized, for other ids.

    They have the initial values of a new table of the same size, and optimizer state 0.

    Args:
        rows: rows of each table, by its number.

    Raises:
        ValueError: a row or table does not exist.
        OSError: the copy cannot be written.
    """
    sizes = _table_sizes(saved)
    evicted: dict[int, np.ndarray] = {}
    for table, own in rows.items():
        if not 0 <= table < len(sizes):
            raise ValueError(
                f"{saved.path}: expected a table from 0 to {len(sizes) - 1}, got {table}"
            )
        chosen = np.unique(np.asarray(own, np.int64))
        if len(chosen) and not 0 <= chosen[0] <= chosen[-1] < sizes[table]:
            wrong = chosen[0] if chosen[0] < 0 else chosen[-1]
            raise ValueError(
                f"{saved.path}: table {table}: expected rows from 0 to {sizes[table] - 1}, got "
                f"{wrong}"
            )
        for index in range(table, len(saved.tables), len(sizes)):  # and its wide weights
            evicted[index] = chosen
    with _copy_of(saved, directory, evicted, saved.config) as files:
        for index, paths in files.items():
            for path in paths:
                _mapped(path, saved.tables[index].rows)[evicted[index]] = 0
            values = _mapped(paths[0], saved.tables[index].rows)
            values[evicted[index]] = _anew(saved, index, evicted[index])


def changed_rows(
    saved: SavedModel, table_sizes: Sequence[int], evicted: Mapping[int, np.ndarray] | None = None
) -> SavedModel:
    """Returns a checkpoint whose tables have further rows, and some that begin anew.

    Values and optimizer state are those of `grow_tables` and `evict_rows`; nothing is written.

    Args:
        table_sizes: rows of each table, at least as many as it has.
        evicted: rows of each table that begin anew, ascending, by the table's number.
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


def _sizes_by_table(saved: SavedModel, field_sizes: Sequence[int]) -> list[int]:
    """Returns the rows of each table, given those of each field; fields may share a table."""
    of_fields = saved.config["dataset"].get("field tables") or range(len(_table_sizes(saved)))
    if len(field_sizes) != len(of_fields):
        raise ValueError(
            f"{saved.path}: expected the rows of {len(of_fields)} tables, got {len(field_sizes)}"
        )
    sizes: dict[int, int] = {}
    for table, size in zip(of_fields, field_sizes, strict=True):
        if size != (first := sizes.setdefault(table, size)):
            raise ValueError(
                f"{saved.path}: table {table}, which fields share: expected {first} rows, got "
                f"{size}"
            )
    return [sizes[table] for table in range(len(sizes))]


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


@contextmanager
def _copy_of(
    saved: SavedModel,
    directory: str | os.PathLike,
    changed: Collection[int],
    config: dict[str, Any],
    transform: Path | None = None,
) -> Iterator[dict[int, list[Path]]]:
    """Yields the files of the changed tables in a copy, which appears when the block ends.

    Each table has a file of its rows and files of their optimizer state. A directory of a
    transform, if it is given and exists, takes the place of the checkpoint's.
    """
    manifest = read_manifest(saved.path, "checkpoint")
    sums = {name: facts["crc32"] for name, facts in manifest["files"].items()}
    if transform is not None and transform.is_dir():
        sums = {name: crc for name, crc in sums.items() if not name.startswith(f"{TRANSFORM}/")}
    names = {
        index: [
            f"tables/{index}.bin",
            *(f"tables/{index}.{k}.bin" for k in saved.table_state[index]),
        ]
        for index in changed
    }
    written = {name for own in names.values() for name in own}
    with staged_directory(directory) as staging:
        for name in sums.keys() - DESCRIPTION:
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copyfile if name in written else link_or_copy
            copy(str(saved.path / name), str(staging / name))
        if transform is not None and transform.is_dir():
            shutil.copytree(transform, staging / TRANSFORM, copy_function=link_or_copy)
        yield {index: [staging / name for name in own] for index, own in names.items()}
        kept = {name: crc for name, crc in sums.items() if name not in written | DESCRIPTION}
        describe(staging, config, saved.progress, kept)


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


def _mapped(path: Path, num_rows: int) -> np.ndarray:
    return np.memmap(path, "<f4", "r+").reshape(num_rows, -1)
