"""Writes one checkpoint with all ranks, each its own tables, now or while training runs."""

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dlrm.distributed import World, agreed, from_first, gather, gather_to_first
from dlrm.distributed.placement import Piece
from dlrm.files import StagedDirectory, errors_named
from dlrm.manifest import Checksum, checksum
from dlrm.ops import join_float32
from dlrm.train.checkpoints.description import describe
from dlrm.train.checkpoints.state import (
    Parameters,
    optimizer_state,
    random_state,
    random_state_file,
    write_tensors,
)

_ROWS_AT_ONCE = 1 << 14  # written, and summed while they are in the cache
_WRITERS = 2  # while one waits for the disk, the other computes checksums


class _Ours(NamedTuple):
    """The part of a rank.

    Attributes:
        checksums: of its files that are whole, by name.
        tables: entries of `config.json`, by table.
    """

    checksums: dict[str, str]
    tables: dict[int, dict[str, Any]]
    optimizers: list[str]


class CheckpointWriter:
    """A checkpoint that is being written; every rank constructs one, and finishes it.

    Args:
        directory: must not exist, or be empty; it appears once it is complete, or not at all. All
            ranks see the same directory.
        config: configuration of the run, JSON values.
        progress: progress of the run, JSON values.
        attached: directories to copy into the checkpoint under their names.
        in_background: copy the state in memory, and write while the training continues.

    Raises:
        OSError: the checkpoint cannot be written.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        parameters: Parameters,
        config: dict[str, Any],
        progress: dict[str, Any],
        attached: Sequence[Path] = (),
        world: World = World(),
        in_background: bool = False,
    ):
        self._world, self._config, self._progress = world, config, progress
        self._attached, self._copy = attached, in_background
        self._staged: StagedDirectory | None = None  # of the first rank
        with agreed(world, OSError):
            if world.rank == 0:
                self._staged = StagedDirectory(directory)
                (self._staged.path / "tables").mkdir()
        staging = from_first(self._staged.path if self._staged else None, world)
        assert staging is not None
        self._staging = staging
        self._tables: dict[int, dict[str, Any]] = {}
        self._kinds = [type(optimizer).__name__ for optimizer in parameters.optimizers]
        writers = ThreadPoolExecutor(_WRITERS, thread_name_prefix="dlrm-checkpoint")
        self._written: list[tuple[str, Future[str | None]]] = [
            (name, writers.submit(_write, self._staging / name, content))
            for name, content in self._files(parameters)
        ]
        writers.shutdown(wait=False)

    def written(self) -> bool:
        """Returns whether this rank has nothing left to write."""
        return all(future.done() for _, future in self._written)

    def finish(self) -> None:
        """Waits for all ranks and publishes the checkpoint.

        Raises:
            OSError: a rank could not write; nothing is published.
        """
        try:
            with agreed(self._world, OSError):
                found = {name: future.result() for name, future in self._written}
                checksums = {name: sums for name, sums in found.items() if sums}
            everyone = gather(_Ours(checksums, self._tables, self._kinds), self._world)
            with agreed(self._world, OSError):
                if self._staged is not None:
                    with errors_named(self._staged.final, self._staged.path):
                        self._describe(everyone)
                        self._staged.publish()
        except BaseException:
            if self._staged is not None:
                self._staged.remove()
            raise

    def _files(self, parameters: Parameters) -> "list[tuple[str, _Rows | dict[str, Tensor]]]":
        """Returns the files that this rank writes, with their contents."""
        by_row, scalars, others = optimizer_state(parameters)
        low = parameters.lower_halves()
        files: list[tuple[str, _Rows | dict[str, Tensor]]] = []
        for part in parameters.table_parts():
            weight, own = part.weight, slice(part.begin, part.end)
            state = by_row.get(id(weight), {})
            rows, dim = part.piece.shape
            entry = {"rows": rows, "dim": dim, "state": list(state)}
            if numbers := scalars.get(id(weight)):
                entry["scalars"] = numbers
            self._tables[part.table] = entry
            rest = low[id(weight)][own] if id(weight) in low else None
            files.append((f"tables/{part.table}.bin", self._rows(weight[own], rest, part.piece)))
            files += [
                (f"tables/{part.table}.{name}.bin", self._rows(value[own], None, part.piece))
                for name, value in state.items()
            ]
        files.append((random_state_file(self._world.rank), random_state(parameters.random)))
        dense = {"dense": parameters.dense(), "optimizer": others, "average": parameters.average}
        if self._world.rank < parameters.parts.size:  # the first pipeline, if there are several
            for name, tensors in dense.items():
                merged = self._tensors(tensors, parameters.parts)
                if self._world.rank == 0 and (merged or name != "average"):
                    files.append((f"{name}.safetensors", merged))
        return files

    def _rows(self, rows: Tensor, low: Tensor | None, piece: Piece) -> "_Rows":
        return _Rows(self._snapshot(rows), None if low is None else self._snapshot(low), piece)

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

    def _describe(self, everyone: "Sequence[_Ours]") -> None:
        tables = dict(sorted(item for ours in everyone for item in ours.tables.items()))
        kinds = max((ours.optimizers for ours in everyone), key=len)  # fewer without tables
        config = {**self._config, "optimizers": kinds, "tables": list(tables.values())}
        for folder in self._attached:
            shutil.copytree(folder, self._staging / folder.name)
        checksums = {name: crc for ours in everyone for name, crc in ours.checksums.items()}
        describe(self._staging, config, self._progress, checksums)


class _Rows:
    """Rows of a table, to be written as float32; `low` has the lower halves of bfloat16 rows.

    If they are a piece of the table, other ranks write other pieces of the file at the same time.
    """

    def __init__(self, rows: Tensor, low: Tensor | None, piece: Piece):
        assert low is not None or rows.dtype == torch.float32, f"rows of {rows.dtype}"
        self.rows, self.low, self.piece = rows, low, piece

    def write(self, path: Path) -> str | None:
        """Writes the rows; returns the checksum of the file, or None if they are a piece of it."""
        if not self.piece.is_whole:
            self._write_piece(path)
            return None
        sums = Checksum()
        with open(path, "wb", buffering=0) as file:
            for _, block in self._blocks():
                data = block.data.cast("B")
                sums.update(data)
                while len(data):
                    data = data[file.write(data) :]
            os.fsync(file.fileno())
        return str(sums)

    def _write_piece(self, path: Path) -> None:
        """Writes the rows at their place in the file, by a memory map."""
        shape = self.piece.shape[: self.rows.ndim]
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            # Reserve space first: on a full disk, writing to a memory map crashes the process.
            os.posix_fallocate(file.fileno(), 0, max(4 * math.prod(shape), 1))
            whole = np.memmap(file, np.float32, "r+", shape=shape)
            target = whole[slice(*self.piece.rows)]
            for begin, block in self._blocks():
                target[begin : begin + len(block)] = block
            whole.flush()
            os.fsync(file.fileno())

    def _blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yields rows in float32, some at a time, with the number of the first."""
        for begin in range(0, len(self.rows), _ROWS_AT_ONCE):
            block = self.rows[begin : begin + _ROWS_AT_ONCE]
            if self.low is not None:
                block = join_float32(block, self.low[begin : begin + _ROWS_AT_ONCE])
            yield begin, block.cpu().numpy()


def _write(path: Path, content: "_Rows | dict[str, Tensor]") -> str | None:
    """Writes a file through to the disk; returns its checksum, or None for a piece of one."""
    with errors_named(path):
        if isinstance(content, _Rows):
            return content.write(path)
        write_tensors(content, path)
        return checksum(path)
