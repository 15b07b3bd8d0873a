"""Writes a checkpoint with all ranks, each its own tables, now or while training runs."""

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dlrm.distributed import World, agreed, from_first, gather, gather_to_first
from dlrm.distributed.placement import Piece
from dlrm.documents import json_text
from dlrm.files import atomic_directory, errors_named, link_or_copy
from dlrm.manifest import Checksum, checksum, write_manifest
from dlrm.ops import join_float32
from dlrm.train.checkpoints.state import Parameters, random_state, random_state_file, write_tensors
from dlrm.train.checkpoints.tables import SavedRows
from dlrm.train.reports.model_card import MODEL_CARD, model_card

CONFIG, PROGRESS = "config.json", "progress.json"
_ROWS_AT_ONCE = 1 << 14  # written, and summed while they are in the cache
_WRITERS = 2  # while one waits for the disk, the other computes checksums


class CopiedFile(NamedTuple):
    """A file of another checkpoint, with its checksum; it is linked unless it is to be copied."""

    path: Path
    checksum: str
    is_copied: bool = False


Content: TypeAlias = "_Rows | SavedRows | Mapping[str, Tensor] | CopiedFile | str"


class _Written(NamedTuple):
    """The part of a rank: checksums of its whole files by name, and entries of `config.json`."""

    checksums: dict[str, str]
    tables: dict[int, dict[str, Any]]
    optimizers: list[str]


class CheckpointWriter:
    """A checkpoint that is being written; every rank constructs one, and finishes it.

    Args:
        directory: must not exist, or be empty; it appears once it is complete, or not at all. All
            ranks see the same directory.
        content: the state to save, or the contents of the files, by name.
        config, progress: of the run, JSON values; None if the files of `content` describe it.
        attached: directories to copy into the checkpoint under their names.
        in_background: copy the state in memory, and write while the training continues.
        replace: see `atomic_directory`.

    Raises:
        OSError: the checkpoint cannot be written.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        content: "Parameters | Mapping[str, Content]",
        config: Mapping[str, Any] | None = None,
        progress: Mapping[str, Any] | None = None,
        attached: Sequence[Path] = (),
        world: World = World(),
        in_background: bool = False,
        replace: bool | str = False,
    ):
        self._world, self._config, self._progress = world, config, progress
        self._attached, self._copy = attached, in_background
        self._final, self._stack = Path(directory).absolute(), ExitStack()
        self._staging = Path()
        with agreed(world, OSError):
            if world.rank == 0:
                staged = atomic_directory(directory, replace)
                self._staging = self._stack.enter_context(staged)
                (self._staging / "tables").mkdir()
        self._staging = from_first(self._staging, world)
        self._tables: dict[int, dict[str, Any]] = {}
        self._kinds: list[str] = []
        files = self._files(content) if isinstance(content, Parameters) else [*content.items()]
        for name, made in files:
            (self._staging / name).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(made, SavedRows):
                entry = {"rows": made.rows, "dim": made.dim, "state": []}
                self._tables[int(Path(name).stem)] = entry
        writers = ThreadPoolExecutor(_WRITERS, thread_name_prefix="dlrm-checkpoint")
        self._files_written: list[tuple[str, Future[str | None]]] = [
            (name, writers.submit(_write, self._staging / name, made)) for name, made in files
        ]
        writers.shutdown(wait=False)

    def written(self) -> bool:
        """Returns whether this rank has nothing left to write."""
        return all(future.done() for _, future in self._files_written)

    def finish(self) -> None:
        """Waits for all ranks and publishes the checkpoint.

        Raises:
            OSError: a rank could not write; nothing is published.
        """
        with self._stack:
            with agreed(self._world, OSError):
                found = {name: future.result() for name, future in self._files_written}
            checksums = {name: sums for name, sums in found.items() if sums}
            everyone = gather(_Written(checksums, self._tables, self._kinds), self._world)
            with agreed(self._world, OSError):
                if self._world.rank == 0:
                    with errors_named(self._final, self._staging):
                        self._describe(everyone)
                    self._stack.close()

    def _files(self, parameters: Parameters) -> "list[tuple[str, Content]]":
        """Returns the files that this rank writes, with their contents."""
        self._kinds = [type(optimizer).__name__ for optimizer in parameters.optimizers]
        by_row, scalars, others = parameters.optimizer_state()
        low = parameters.lower_halves()
        files: list[tuple[str, Content]] = []
        for number, weight, own, piece in parameters.table_parts():
            state, (rows, dim) = by_row[id(weight)], piece.shape
            self._tables[number] = {"rows": rows, "dim": dim, "state": list(state)}
            if numbers := scalars[id(weight)]:
                self._tables[number]["scalars"] = numbers
            rest = self._snapshot(low[id(weight)][own]) if id(weight) in low else None
            files.append((f"tables/{number}.bin", _Rows(self._snapshot(weight[own]), rest, piece)))
            for name, value in state.items():
                rows_of_state = _Rows(self._snapshot(value[own]), None, piece)
                files.append((f"tables/{number}.{name}.bin", rows_of_state))
        files.append((random_state_file(self._world.rank), random_state(parameters.random)))
        dense = {"dense": parameters.dense(), "optimizer": others, "average": parameters.average}
        if self._world.rank < parameters.parts.size:  # the first pipeline, if there are several
            for name, tensors in dense.items():
                merged = self._tensors(tensors, parameters.parts)
                if self._world.rank == 0 and (merged or name != "average"):
                    files.append((f"{name}.safetensors", merged))
        return files

    def _tensors(self, tensors: Mapping[str, Tensor], parts: World) -> dict[str, Tensor]:
        """Returns, on the first of the parts, the tensors of all parts; elsewhere nothing."""
        if parts.size > 1:
            own = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
            tensors = {k: v for part in gather_to_first(own, parts) for k, v in part.items()}
        return {name: self._snapshot(tensor) for name, tensor in tensors.items()}

    def _snapshot(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if self._copy:
            return torch.empty_like(tensor, device="cpu").copy_(tensor).contiguous()
        return tensor.contiguous()

    def _describe(self, everyone: Sequence[_Written]) -> None:
        """Writes configuration, progress, model card and manifest, after all other files."""
        for folder in self._attached:
            shutil.copytree(folder, self._staging / folder.name)
        if self._config is not None:
            tables = dict(sorted(item for part in everyone for item in part.tables.items()))
            kinds = max((part.optimizers for part in everyone), key=len)  # fewer without tables
            config = {**self._config, "optimizers": kinds, "tables": list(tables.values())}
            progress = self._progress or {}
            for name, value in ((CONFIG, config), (PROGRESS, progress)):
                _write(self._staging / name, json_text(value, indent=2) + "\n")
            card = model_card(config, progress, (self._staging / "transform").is_dir())
            _write(self._staging / MODEL_CARD, card)
        checksums = {name: sums for part in everyone for name, sums in part.checksums.items()}
        write_manifest(self._staging, "checkpoint", checksums)


class _Rows:
    """Rows of a table, to be written as float32; `low` has the lower halves of bfloat16 rows.

    If they are a piece of the table, other ranks write other pieces of the file at the same time.
    """

    def __init__(self, rows: Tensor, low: Tensor | None, piece: Piece):
        assert low is not None or rows.dtype == torch.float32, f"rows of {rows.dtype}"
        self.rows, self.low, self.piece = rows, low, piece

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yields rows in float32, some at a time, with the number of the first."""
        for begin in range(0, len(self.rows), _ROWS_AT_ONCE):
            block = self.rows[begin : begin + _ROWS_AT_ONCE]
            if self.low is not None:
                block = join_float32(block, self.low[begin : begin + _ROWS_AT_ONCE])
            yield begin, block.cpu().numpy()

    @property
    def place(self) -> int:
        """The byte of the file at which the rows begin."""
        return 4 * self.piece.rows[0] * math.prod(self.rows.shape[1:])


def _write(path: Path, content: Content) -> str | None:
    """Writes a file through to the disk; returns its checksum, or None for a piece of one."""
    with errors_named(path):
        if isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        elif isinstance(content, CopiedFile):
            copy = shutil.copyfile if content.is_copied else link_or_copy
            copy(str(content.path), str(path))
            return content.checksum
        elif isinstance(content, Mapping):
            write_tensors(content, path)
        elif isinstance(content, SavedRows):
            return _write_blocks(path, content.blocks())
        else:
            sums = _write_blocks(path, content.blocks(), content.place)
            return sums if content.piece.is_whole else None
        return checksum(path)


def _write_blocks(path: Path, blocks: Iterator[tuple[int, np.ndarray]], place: int = 0) -> str:
    """Writes blocks of rows from a place in the file on; returns their checksum."""
    sums = Checksum()
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0) as file:
        file.seek(place)
        for _, block in blocks:
            data = block.data.cast("B")
            sums.update(data)
            while len(data):
                data = data[file.write(data) :]
        os.fsync(file.fileno())
    return str(sums)
