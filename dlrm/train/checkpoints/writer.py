"""Writes a checkpoint with all ranks, each its own tables, now or while training runs."""

import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dlrm.distributed import World, agreed, from_first, gather, gather_to_first
from dlrm.distributed.placement import Shard
from dlrm.documents import json_text
from dlrm.files import atomic_directory, errors_named
from dlrm.manifest import Checksum, checksum, write_manifest
from dlrm.ops import join_float32
from dlrm.train.checkpoints.state import Parameters, random_state, random_state_file, write_tensors
from dlrm.train.reports.model_card import MODEL_CARD, model_card

CONFIG, PROGRESS = "config.json", "progress.json"
_ROWS_AT_ONCE = 1 << 14  # written, and summed while they are in the cache
_WRITERS = 2  # while one waits for the disk, the other computes checksums
_Write: TypeAlias = Callable[[Path], str | None]  # returns the checksum of a file that is whole


class CheckpointWriter:
    """A checkpoint that is being written; every rank constructs one, and finishes it.

    Args:
        directory: must not exist, or be empty; it appears once it is complete, or not at all. All
            ranks see the same directory.
        parameters: the state to save.
        config, progress: of the run, JSON values.
        attached: directories to copy into the checkpoint under their names.
        in_background: copy the state in memory, and write while the training continues.

    Raises:
        OSError: the checkpoint cannot be written.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        parameters: Parameters,
        config: Mapping[str, Any],
        progress: Mapping[str, Any],
        attached: Sequence[Path] = (),
        world: World = World(),
        in_background: bool = False,
    ):
        self._world, self._described = world, (config, progress, attached)
        self._final, self._copy, self._stack = (
            Path(directory).absolute(),
            in_background,
            ExitStack(),
        )
        self._staging = Path()
        with agreed(world, OSError):
            if world.rank == 0:
                self._staging = self._stack.enter_context(atomic_directory(directory))
                (self._staging / "tables").mkdir()
        self._staging = from_first(self._staging, world)
        self._tables: dict[int, dict[str, Any]] = {}
        self._kinds = [type(optimizer).__name__ for optimizer in parameters.optimizers]
        made = [*self._files_of_tables(parameters), *self._other_files(parameters)]
        writers = ThreadPoolExecutor(_WRITERS, thread_name_prefix="dlrm-checkpoint")
        self._files_written: dict[str, Future[str | None]] = {
            name: writers.submit(_written, self._staging / name, write) for name, write in made
        }
        writers.shutdown(wait=False)

    def written(self) -> bool:
        """Returns whether this rank has nothing left to write."""
        return all(future.done() for future in self._files_written.values())

    def finish(self) -> None:
        """Waits for all ranks and publishes the checkpoint.

        Raises:
            OSError: a rank could not write; nothing is published.
        """
        with self._stack:
            with agreed(self._world, OSError):
                found = {name: future.result() for name, future in self._files_written.items()}
            everyone = gather((found, self._tables, self._kinds), self._world)
            with agreed(self._world, OSError):
                if self._world.rank == 0:
                    tables = {k: v for _, own, _ in everyone for k, v in own.items()}
                    kinds = max((own for *_, own in everyone), key=len)  # fewer without tables
                    sums = {k: v for own, *_ in everyone for k, v in own.items() if v}
                    ordered = [tables[number] for number in sorted(tables)]
                    with errors_named(self._final, self._staging):
                        describe(self._staging, *self._described, kinds, ordered)
                        write_manifest(self._staging, "checkpoint", sums)
                    self._stack.close()

    def _files_of_tables(self, parameters: Parameters) -> Iterator[tuple[str, _Write]]:
        """Yields the files of the tables of this rank, and what writes each."""
        by_row, scalars, _ = parameters.optimizer_state()
        low = parameters.lower_halves()
        for number, weight, own, shard in parameters.table_parts():
            state, (rows, dim) = by_row[id(weight)], shard.shape
            self._tables[number] = {"rows": rows, "dim": dim, "state": list(state)}
            if numbers := scalars[id(weight)]:
                self._tables[number]["scalars"] = numbers
            rest = self._snapshot(low[id(weight)][own]) if id(weight) in low else None
            yield f"tables/{number}.bin", _rows(self._snapshot(weight[own]), shard, rest)
            for name, value in state.items():
                yield f"tables/{number}.{name}.bin", _rows(self._snapshot(value[own]), shard)

    def _other_files(self, parameters: Parameters) -> Iterator[tuple[str, _Write]]:
        """Yields the files of this rank's random state and, on the first, of all other tensors."""
        random = random_state(parameters.random)
        yield random_state_file(self._world.rank), partial(_write_tensors, tensors=random)
        *_, others = parameters.optimizer_state()
        dense = {"dense": parameters.dense(), "optimizer": others, "average": parameters.average}
        if self._world.rank < parameters.parts.size:  # the first pipeline, if there are several
            for name, tensors in dense.items():
                merged = self._tensors(tensors, parameters.parts)
                if self._world.rank == 0 and (merged or name != "average"):
                    yield f"{name}.safetensors", partial(_write_tensors, tensors=merged)

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


def describe(
    directory: Path,
    config: Mapping[str, Any],
    progress: Mapping[str, Any],
    attached: Sequence[Path],
    optimizers: Sequence[str],
    tables: Sequence[Mapping[str, Any]],
) -> None:
    """Writes configuration, progress and model card of a checkpoint, and what is attached.

    Args:
        optimizers: names of their types.
        tables: rows, dim and the names of the state of each table.
    """
    for folder in attached:
        shutil.copytree(folder, directory / folder.name)
    config = {**config, "optimizers": optimizers, "tables": tables}
    for name, value in ((CONFIG, config), (PROGRESS, progress)):
        (directory / name).write_text(json_text(value, indent=2) + "\n", encoding="utf-8")
    card = model_card(config, progress, (directory / "transform").is_dir())
    (directory / MODEL_CARD).write_text(card, encoding="utf-8")


def write_blocks(path: Path, blocks: Iterator[tuple[int, np.ndarray]], place: int = 0) -> str:
    """Writes blocks of rows through to the disk, from a byte of the file; returns their checksum.

    Others may write other parts of the file at the same time.
    """
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


def _rows(rows: Tensor, shard: Shard, low: Tensor | None = None) -> _Write:
    """Returns what writes rows as float32; `low` has the lower halves of bfloat16 rows."""
    assert low is not None or rows.dtype == torch.float32, f"rows of {rows.dtype}"

    def blocks() -> Iterator[tuple[int, np.ndarray]]:
        for begin in range(0, len(rows), _ROWS_AT_ONCE):
            block = rows[begin : begin + _ROWS_AT_ONCE]
            if low is not None:
                block = join_float32(block, low[begin : begin + _ROWS_AT_ONCE])
            yield begin, block.cpu().numpy()

    def write(path: Path) -> str | None:
        sums = write_blocks(path, blocks(), 4 * shard.rows[0] * math.prod(rows.shape[1:]))
        return sums if shard.is_whole else None

    return write


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    write_tensors(tensors, path)
    return checksum(path)


def _written(path: Path, write: _Write) -> str | None:
    with errors_named(path):
        return write(path)
