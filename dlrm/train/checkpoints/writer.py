"""Writes one checkpoint with all ranks, each its own tables, now or while training runs.

Ranks that do not see the directory of the first rank write their files to a folder of their node,
and send them once all are written.
"""

import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dlrm.distributed import World, agreed, from_first, gather, gather_to_first
from dlrm.distributed.placement import Piece
from dlrm.distributed.transfers import (
    Block,
    Route,
    Sent,
    read_block,
    transfer_files,
    write_block,
)
from dlrm.files import StagedDirectory, errors_named
from dlrm.manifest import Checksum, checksum
from dlrm.ops import join_float32
from dlrm.train.checkpoints.description import describe
from dlrm.train.checkpoints.nodes import Nodes, check_room
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
        sent: the files that it sends to the first rank, and for pieces of tables their places.
    """

    checksums: dict[str, str]
    tables: dict[int, dict[str, Any]]
    optimizers: list[str]
    sent: dict[str, tuple[Sent, "_Place | None"]]


class CheckpointWriter:
    """A checkpoint that is being written; every rank constructs one, and finishes it.

    Args:
        directory: must not exist, or be empty; it appears once it is complete, or not at all. All
            ranks must see the same directory, but for those of `nodes`.
        config: configuration of the run, JSON values.
        progress: progress of the run, JSON values.
        attached: directories to copy into the checkpoint under their names.
        tensors: further files of tensors, by name, which the first rank writes.
        in_background: copy the state in memory, and write while the training continues.
        beat: called once a second while `finish` waits for files or publishes the checkpoint.
        nodes: the ranks that do not see the directory.

    Raises:
        OSError: the checkpoint cannot be written, or does not fit on the first rank's disk.
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
        nodes: Nodes = Nodes(),
        tensors: Mapping[str, Mapping[str, Tensor]] = MappingProxyType({}),
    ):
        self._beat, self._nodes = beat, nodes
        self._world, self._config, self._progress = world, config, progress
        self._attached, self._copy = attached, in_background
        self._further = tensors
        self._staged: StagedDirectory | None = None  # of the first rank
        path = None
        with agreed(world, OSError):
            if world.rank == 0:
                self._staged = StagedDirectory(directory)
                path = self._staged.path
            elif nodes.folder is not None:
                path = nodes.folder / f"rank-{world.rank}"
                shutil.rmtree(path, ignore_errors=True)  # of a checkpoint that failed
                path.mkdir()
            if path is not None:
                (path / "tables").mkdir()
        first = from_first(path, world)
        self._staging: Path = path or first  # type: ignore[assignment]
        self._tables: dict[int, dict[str, Any]] = {}
        self._kinds = [type(optimizer).__name__ for optimizer in parameters.optimizers]
        files = self._files(parameters)
        self._places = {
            name: _Place(content.piece, content.rows.ndim)
            for name, content in files
            if isinstance(content, _Rows) and not content.piece.is_whole
        }
        if nodes.senders:
            self._check_room(files)
        sends = nodes.folder is not None
        writers = ThreadPoolExecutor(_WRITERS, thread_name_prefix="dlrm-checkpoint")
        self._written: list[tuple[str, Future[str | None]]] = [
            (name, writers.submit(_write, self._staging / name, content, sends))
            for name, content in files
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
            with agreed(self._world, OSError), beating(self._beat):
                found = {name: future.result() for name, future in self._written}
                checksums = {name: sums for name, sums in found.items() if sums}
                sent = self._sent()
            ours = _Ours(checksums, self._tables, self._kinds, sent)
            everyone = gather(ours, self._world)
            self._send(everyone)
            with agreed(self._world, OSError), beating(self._beat):
                if self._staged is not None:
                    with errors_named(self._staged.final, self._staged.path):
                        self._describe(everyone)
                        self._staged.publish()
        except BaseException:
            self._remove()
            raise
        if self._nodes.folder is not None:
            self._remove()

    def _remove(self) -> None:
        """Removes what is not published, or no longer needed."""
        if self._staged is not None:
            self._staged.remove()
        if self._nodes.folder is not None:
            shutil.rmtree(self._staging, ignore_errors=True)

    def _check_room(self, files: "Sequence[tuple[str, _Rows | dict[str, Tensor]]]") -> None:
        """Compares the free space of each node with what is about to be written there."""
        own = sum(_bytes_of(content) for _, content in files)
        if self._staged is not None:
            below = (path for folder in self._attached for path in folder.rglob("*"))
            own += sum(path.stat().st_size for path in below)
        needs = gather(own, self._world)
        try:
            with agreed(self._world, OSError):
                if self._staged is not None:
                    check_room(self._staged.final.parent, sum(needs), "a checkpoint of all ranks")
                elif self._nodes.folder is not None:
                    check_room(self._nodes.folder, own, "the part of a rank")
        except BaseException:
            self._remove()
            raise

    def _sent(self) -> "dict[str, tuple[Sent, _Place | None]]":
        """Returns the files that this rank sends."""
        sent = {}
        for name, _ in self._written if self._nodes.folder is not None else ():
            place = self._places.get(name)
            size = (self._staging / name).stat().st_size
            sent[name] = Sent(size, place.row_bytes if place else 1), place
        return sent

    def _send(self, everyone: "Sequence[_Ours]") -> None:
        """Sends the files of nodes that do not see the directory to the first rank."""
        routes = [
            Route(rank, 0, {name: sent for name, (sent, _) in ours.sent.items()})
            for rank, ours in enumerate(everyone)
            if ours.sent
        ]

        def read(block: Block, data: Tensor) -> None:
            read_block(self._staging / block.name, block, data)

        def write(block: Block, data: Tensor) -> None:
            path = self._staging / block.name
            assert self._staged is not None, "the first rank"
            with errors_named(self._staged.final, self._staged.path), errors_named(path):
                _, place = everyone[block.source].sent[block.name]
                if place is None:
                    write_block(path, block, data)
                else:
                    place.write(path, block, data)

        transfer_files(routes, read, write, self._world, self._beat)

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

    def _describe(self, everyone: "Sequence[_Ours]") -> None:
        tables = dict(sorted(item for ours in everyone for item in ours.tables.items()))
        kinds = max((ours.optimizers for ours in everyone), key=len)  # fewer without tables
        config = {**self._config, "optimizers": kinds, "tables": list(tables.values())}
        for folder in self._attached:
            shutil.copytree(folder, self._staging / folder.name)
        checksums = {name: crc for ours in everyone for name, crc in ours.checksums.items()}
        describe(self._staging, config, self._progress, checksums)


@contextmanager
def beating(beat: Callable[[], object]) -> Iterator[None]:
    """Calls `beat` once a second during a block, which works on files for as long as it takes."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(1):
            beat()

    thread = threading.Thread(target=run, name="dlrm-beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class _Rows:
    """Rows of a table, to be written as float32; `low` has the lower halves of bfloat16 rows.

    If they are a piece of the table, other ranks write other pieces of the file at the same time.
    """

    def __init__(self, rows: Tensor, low: Tensor | None, piece: Piece):
        assert low is not None or rows.dtype == torch.float32, f"rows of {rows.dtype}"
        self.rows, self.low, self.piece = rows, low, piece

    def write(self, path: Path, sends: bool) -> str | None:
        """Writes the rows; returns the checksum of the file, or None if they are a piece of it.

        Args:
            path: the file, of the whole table; or of these rows alone, if they are sent.
            sends: whether they are.
        """
        if not self.piece.is_whole and not sends:
            self._write_piece(path)
            return None
        sums = Checksum()
        with open(path, "wb", buffering=0) as file:
            for _, block in self._blocks():
                data = block.data.cast("B")
                sums.update(data)
                while len(data):
                    data = data[file.write(data) :]
            if not sends:
                os.fsync(file.fileno())
        return str(sums) if self.piece.is_whole else None

    def _write_piece(self, path: Path) -> None:
        with _Place(self.piece, self.rows.ndim).open(path) as target:
            for begin, block in self._blocks():
                target[begin : begin + len(block)] = block

    def _blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yields rows in float32, some at a time, with the number of the first."""
        for begin in range(0, len(self.rows), _ROWS_AT_ONCE):
            block = self.rows[begin : begin + _ROWS_AT_ONCE]
            if self.low is not None:
                block = join_float32(block, self.low[begin : begin + _ROWS_AT_ONCE])
            yield begin, block.cpu().numpy()


class _Place(NamedTuple):
    """The place of rows in the file of their table, or of its state.

    Attributes:
        ndim: 2, or 1 for a state of one value a row.
    """

    piece: Piece
    ndim: int

    @property
    def row_bytes(self) -> int:
        return 4 * (self.piece.shape[1] if self.ndim > 1 else 1)

    @contextmanager
    def open(self, path: Path) -> Iterator[np.ndarray]:
        """Yields the rows in the file, which other ranks write as well, as a memory map."""
        shape = self.piece.shape[: self.ndim]
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            # Reserve space first: on a full disk, writing to a memory map crashes the process.
            os.posix_fallocate(file.fileno(), 0, max(4 * math.prod(shape), 1))
            whole = np.memmap(file, np.float32, "r+", shape=shape)
            yield whole[slice(*self.piece.rows)]
            whole.flush()
            os.fsync(file.fileno())

    def write(self, path: Path, block: Block, data: Tensor) -> None:
        """Writes a block of whole rows that another rank has sent."""
        if block.size:
            with self.open(path) as target:
                rows = target[block.begin // self.row_bytes :][: block.size // self.row_bytes]
                rows[:] = data.numpy().view(np.float32).reshape(rows.shape)


def _bytes_of(content: "_Rows | dict[str, Tensor]") -> int:
    if isinstance(content, _Rows):
        return 4 * content.rows.numel()
    return sum(tensor.numel() * tensor.element_size() for tensor in content.values())


def _write(path: Path, content: "_Rows | dict[str, Tensor]", sends: bool) -> str | None:
    """Writes a file through to the disk; returns its checksum, or None for a piece of one.

    A file that is sent need not be on the disk.
    """
    with errors_named(path):
        if isinstance(content, _Rows):
            return content.write(path, sends)
        write_tensors(content, path)
        return checksum(path)
