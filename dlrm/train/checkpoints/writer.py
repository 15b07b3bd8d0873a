"""Writes one checkpoint with all ranks, each its own tables, now or while training runs."""

import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlrm.distributed import World, agreed, from_first, gather, gather_to_first
from dlrm.distributed.placement import Piece
from dlrm.files import StagedDirectory, errors_named
from dlrm.manifest import Checksum, checksum
from dlrm.ops import join_float32
from dlrm.store.row_store import RowStore
from dlrm.train.checkpoints.description import describe
from dlrm.train.checkpoints.saved_rows import STORES
from dlrm.train.checkpoints.state import (
    Parameters,
    optimizer_state,
    random_state,
    random_state_file,
    write_tensors,
)

_ROWS_AT_ONCE = 1 << 14  # written, and summed while they are in the cache
_WRITERS = 2  # while one waits for the disk, the other computes checksums


class CheckpointWriter:
    """A checkpoint that is being written; every rank constructs one, and finishes it.

    Args:
        directory: must not exist, or be empty; it appears when it is whole, or not at all. All
            ranks must see the same directory.
        parameters: the state to save.
        config: configuration of the run, JSON values.
        progress: progress of the run, JSON values.
        attached: directories to copy into the checkpoint under their names.
        tensors: further files of tensors, by name, which the first rank writes.
        world: the ranks.
        in_background: copy the state in memory, and write while the training continues.
        beat: called about once a second while `finish` waits for files.

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
        beat: Callable[[], object] = lambda: None,
        tensors: Mapping[str, Mapping[str, Tensor]] = MappingProxyType({}),
    ):
        self._beat = beat
        self._world, self._config, self._progress = world, config, progress
        self._store: dict[str, Any] | None = None
        with agreed(world, OSError, ValueError):
            if parameters.store is not None:
                assert isinstance(parameters.store, RowStore), "a view has nothing to save"
                self._store = parameters.store.checkpoint()
        self._attached, self._copy = attached, in_background
        self._further = tensors
        self._staged: StagedDirectory | None = None  # of the first rank
        path = None
        with agreed(world, OSError):
            if world.rank == 0:
                self._staged = StagedDirectory(directory)
                path = self._staged.path
                (path / "tables").mkdir()
        self._staging: Path = from_first(path, world)  # type: ignore[assignment]
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
                while not self.written():
                    wait([future for _, future in self._written], timeout=1)
                    self._beat()
                found = {name: future.result() for name, future in self._written}
                checksums = {name: sums for name, sums in found.items() if sums}
            ours = gather((checksums, self._tables, self._kinds, self._store), self._world)
            with agreed(self._world, OSError):
                if self._staged is not None:
                    with errors_named(self._staged.final, self._staged.path):
                        self._describe(ours)
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
            if self._store is not None:
                continue  # the rows are there
            if part.piece.replicated and self._world.rank:
                continue  # the first rank writes it
            rest = low[id(weight)][own] if id(weight) in low else None
            files.append((f"tables/{part.table}.bin", self._rows(weight[own], rest, part.piece)))
            files += [
                (f"tables/{part.table}.{name}.bin", self._rows(value[own], None, part.piece))
                for name, value in state.items()
            ]
        files.append((random_state_file(self._world.rank), random_state(parameters.random)))
        if self._world.rank == 0:
            files += [(name, dict(tensors)) for name, tensors in self._further.items()]
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

    def _describe(self, ours: list[tuple[dict, dict, list[str], dict | None]]) -> None:
        tables = dict(sorted(item for _, own, _, _ in ours for item in own.items()))
        kinds = max((kinds for _, _, kinds, _ in ours), key=len)  # a rank without tables has fewer
        config = {**self._config, "optimizers": kinds, "tables": list(tables.values())}
        if stores := [store for _, _, _, store in ours if store is not None]:
            config[STORES] = stores
        for folder in self._attached:
            shutil.copytree(folder, self._staging / folder.name)
        checksums = {name: crc for own, _, _, _ in ours for name, crc in own.items()}
        describe(self._staging, config, self._progress, checksums)


class _Rows:
    """Rows of a table, to be written as float32; `low` has the lower halves of bfloat16 rows.

    If they are a piece of the table, other ranks write other pieces of the file at the same time.
    """

    def __init__(self, rows: Tensor, low: Tensor | None, piece: Piece):
        assert low is not None or rows.dtype == torch.float32, f"rows of {rows.dtype}"
        self.rows, self.low, self.piece = rows, low, piece

    def write(self, path: Path) -> str | None:
        """Writes the rows; returns the checksum of the file, or None if it has other pieces."""
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
        piece = self.piece
        shape = piece.shape[: self.rows.ndim]
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            # Reserve space first: on a full disk, writing to a memory map crashes the process.
            os.posix_fallocate(file.fileno(), 0, max(4 * math.prod(shape), 1))
            whole = np.memmap(file, np.float32, "r+", shape=shape)
            for begin, block in self._blocks():
                first = piece.rows[0] + begin
                target = whole[first : first + len(block)]
                if block.ndim > 1:
                    target = target[:, slice(*piece.columns)]
                target[:] = block
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
    """Writes a file through to the disk; returns its checksum, or None for a file in pieces."""
    with errors_named(path):
        if isinstance(content, _Rows):
            return content.write(path)
        write_tensors(content, path)
        return checksum(path)
