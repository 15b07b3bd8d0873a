"""The contents of a checkpoint, for programs that have no model to load it into.

Large files are read in parts. `dlrm.train.checkpoints.nvidia` reads NVIDIA's directories into the
same form.
"""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from dlrm.files import atomic_directory
from dlrm.manifest import read_manifest
from dlrm.train.checkpoints.description import describe, described_progress
from dlrm.train.checkpoints.saved_rows import SavedRows, saved_tables
from dlrm.train.checkpoints.state import (
    checked_config,
    read_tensors,
    write_tensors,
)

AVERAGE = "average.safetensors"


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint; names and the order of weights are those of `dlrm.model.dlrm.DLRM`.

    Attributes:
        format: "dlrm" or "nvidia".
        config: configuration of the training: "flags", "dataset", "optimizers".
        progress: state of the run: "step", "best", "history".
        dense: parameters other than tables.
        table_state: for each table, the optimizer state of its rows.
        optimizer: other state of the optimizers.
        average: EMA of `dense`, which is scored with instead; empty for none.
        attached: further directories in it, such as the dataset's transform.
        notes: remarks about another format, by name.
    """

    path: Path
    format: str
    config: dict[str, Any]
    progress: dict[str, Any]
    dense: dict[str, Tensor]
    tables: list[SavedRows]
    table_state: list[dict[str, SavedRows]] = field(default_factory=list)
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    average: dict[str, Tensor] = field(default_factory=dict)
    attached: list[Path] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)


def read_saved(path: str | os.PathLike, check_crc: bool = False) -> SavedModel:
    """Opens a checkpoint of ours.

    Args:
        check_crc: also compare the checksums of the tables, which are not read here; the checksums
            of all other files are always compared.

    Raises:
        FileNotFoundError: the checkpoint, or one of its files, is missing.
        ValueError: a file is damaged, or the checkpoint is not of a DLRM.
    """
    path = Path(path)
    read_manifest(path, "checkpoint", True, lambda n: check_crc or not n.startswith("tables/"))
    config, progress = checked_config(path), described_progress(path)
    tables, state = saved_tables(path, config)
    dense, optimizer = (read_tensors(path / f"{n}.safetensors") for n in ("dense", "optimizer"))
    average = read_tensors(path / AVERAGE) if (path / AVERAGE).exists() else {}
    state_of_all = (tables, state, optimizer, average, attached_to(path))
    return SavedModel(path, "dlrm", config, progress, dense, *state_of_all)


def write_saved(saved: SavedModel, directory: str | os.PathLike) -> None:
    """Writes a checkpoint of ours, without optimizer state; it appears whole, or not at all.

    Raises:
        OSError: the checkpoint cannot be written, or something is already there.
    """
    tables = [{"rows": table.rows, "dim": table.dim, "state": []} for table in saved.tables]
    config = {**saved.config, "optimizers": [], "tables": tables}
    with atomic_directory(directory) as staging:
        (staging / "tables").mkdir()
        for index, table in enumerate(saved.tables):
            table.copy_to(staging / "tables" / f"{index}.bin")
        write_tensors(saved.dense, staging / "dense.safetensors")
        if saved.average:
            write_tensors(saved.average, staging / AVERAGE)
        for name in ("optimizer.safetensors", "rng.safetensors"):
            write_tensors({}, staging / name)
        for folder in saved.attached:
            shutil.copytree(folder, staging / folder.name)
        describe(staging, config, saved.progress)


def attached_to(path: Path) -> list[Path]:
    """Returns the directories in a checkpoint other than that of tables."""
    return sorted(p for p in path.iterdir() if p.is_dir() and p.name != "tables")
