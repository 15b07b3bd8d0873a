"""Checkpoints with longer tables, or with reinitialized rows.

Both functions write a copy, in which unchanged files are hard links if the file system allows it.
Checkpoints hold whole float32 tables, so a copy loads like the checkpoint that it was made from:
with every placement, any number of processes and tables of every type.
"""

import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
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
from dlrm.train.checkpoints.saved_rows import STORES


def grow_tables(
    saved: SavedModel,
    table_sizes: Sequence[int],
    directory: str | os.PathLike,
    dataset: str | os.PathLike | None = None,
) -> str | None:
    """Writes a copy of a checkpoint with rows added at the ends of its tables.

    New rows have the initial values of a new table of that size, and optimizer state 0.

    Args:
        saved: the checkpoint, of ours.
        table_sizes: rows of each field's table, at least as many as it has.
        directory: directory of the copy.
        dataset: the dataset whose dictionaries have the ids of the new rows. The copy gets its
            transform instead of the checkpoint's.

    Returns:
        A line about a transform that is missing, so that dictionaries could not be compared, or
        None.

    Raises:
        ValueError: a table would lose rows, the number of fields differs, two fields of one table
            have other rows, ids are hashed, so that
            they would select other rows, the rows are in a store, or the transform of the dataset
            is not that of the checkpoint with further values in its dictionaries.
        OSError: the copy cannot be written.
    """
    before = _table_sizes(saved)
    of_fields = saved.config["dataset"].get("field tables") or range(len(before))
    if len(table_sizes) != len(of_fields):
        raise ValueError(
            f"{saved.path}: expected the rows of {len(of_fields)} tables, got {len(table_sizes)}"
        )
    after: dict[int, int] = {}
    for table, new in zip(of_fields, table_sizes, strict=True):
        old, least = before[table], after.setdefault(table, new)
        if new < old:
            raise ValueError(f"{saved.path}: table {table}: expected {old} rows or more, got {new}")
        if new != least:
            raise ValueError(
                f"{saved.path}: table {table}, which fields share: expected {least} rows, got {new}"
            )
    if _architecture(saved)["hash_indices"]:
        raise ValueError(
            f"{saved.path}: --hash_indices takes ids modulo the rows of their table, so that they "
            "would mean other rows of a larger one"
        )
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
            _set_initial(paths[0], saved, index, np.arange(old, new), new)
    return note


def evict_rows(
    saved: SavedModel, rows: Mapping[int, Sequence[int]], directory: str | os.PathLike
) -> None:
    """Writes a copy of a checkpoint in which some rows are reinitialized, for other ids.

    They have the initial values of a new table of the same size, and optimizer state 0.

    Args:
        saved: the checkpoint, of ours.
        rows: rows of each table, by its number.
        directory: directory of the copy.

    Raises:
        ValueError: a row or table does not exist, or the rows are in a store.
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
            _set_initial(paths[0], saved, index, evicted[index], saved.tables[index].rows)


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
    if STORES in saved.config:
        raise ValueError(
            f"{saved.path}: expected files of tables, but its rows are in a --table_store; "
            "dlrm checkpoint convert --to dlrm writes them into files"
        )
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
            shutil.copytree(transform, staging / TRANSFORM)
        yield {index: [staging / name for name in own] for index, own in names.items()}
        kept = {name: crc for name, crc in sums.items() if name not in written | DESCRIPTION}
        describe(staging, config, saved.progress, kept)


def _set_initial(
    path: Path, saved: SavedModel, index: int, chosen: np.ndarray, num_rows: int
) -> None:
    """Sets rows of a table, in ascending order, to the initial values of a new table."""
    values, flags = _mapped(path, num_rows), _architecture(saved)
    num_tables = len(_table_sizes(saved))
    if not len(chosen):
        return
    if index >= num_tables:  # wide weights
        values[chosen] = 0
        return
    std = flags["embedding_init_std"] if flags["embedding_init"] == "normal" else None
    initial = Initial(flags["seed"], flags["embedding_init_scale"], std)
    shape = num_rows, saved.tables[index].dim
    for begin, rows in initial.rows(index, shape, int(chosen[0])):
        own = slice(*np.searchsorted(chosen, (begin, begin + len(rows))))
        values[chosen[own]] = rows.numpy()[chosen[own] - begin]
        if own.stop == len(chosen):
            return


def _mapped(path: Path, num_rows: int) -> np.ndarray:
    return np.memmap(path, "<f4", "r+").reshape(num_rows, -1)
