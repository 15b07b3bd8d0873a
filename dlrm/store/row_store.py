"""The store of a process's tables: a file with all rows, slots in memory, and generations.

DIR/rank-<r>-of-<n>/store.json     the store's layout; written last, so that a store is whole
DIR/rank-<r>-of-<n>/rows.bin       a record for each row, see csrc/store/row_store.h
DIR/rank-<r>-of-<n>/undo-<g>.bin   records overwritten since checkpoint g, see `undo`
"""

import fcntl
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dlrm.files import make_directories, write_atomically
from dlrm.locks import sync
from dlrm.manifest import read_sealed, sealed_json
from dlrm.store.config import shown
from dlrm.store.layout import ROWS, STORE, Layout, RowBlock, check_layout, check_store, numpy_name
from dlrm.store.native import DamagedError, native_store
from dlrm.store.row_slots import RowSlots, as_bytes
from dlrm.store.undo import (
    HEADER,
    Generation,
    check_whole,
    new_undo,
    remove_undo,
    undo_numbers,
    undo_path,
    undo_since,
    unfinished,
)

_ANY_GENERATION = 2**32 - 1


class RowStore(RowSlots):
    """Rows of a process's tables that a training changes.

    Args:
        directory: of the store.
        tables, slots, row_bytes, memory: see `RowSlots`.
        checkpoints: directory of the run's checkpoints, or None.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        tables: Mapping[int, int],
        slots: int,
        row_bytes: int = 0,
        memory: str = "",
        checkpoints: str | os.PathLike | None = None,
    ) -> None:
        self._lock: int | None = None
        super().__init__(Path(directory).absolute(), tables, slots, row_bytes, memory)
        self._checkpoints = str(Path(checkpoints).absolute()) if checkpoints else None
        self._saved = False

    def create(self, fields: Mapping[str, Tensor], blocks: Iterable[RowBlock]) -> None:
        """Creates a new store, whose file has all rows.

        Args:
            fields: the tensors whose rows are stored, `[slots, ...]`, by name.

        Raises:
            ValueError: the directory has a store of another run.
            OSError: the disk is full or read-only, or another process has the store open.
        """
        layout = self._laid_out(fields)
        self._claim()
        self._check_replaceable()
        for name in (STORE, ROWS):
            (self.directory / name).unlink(missing_ok=True)
        remove_undo(self.directory, undo_numbers(self.directory))
        file = self._open_rows(os.O_RDWR | os.O_CREAT)
        self._take_room(file, native_store().file_bytes(layout.dtype.itemsize, self.records))
        self._start(layout, file, fields)
        self._named(lambda: self._fill(blocks))
        os.fsync(file)
        self._id, self._generation = secrets.token_hex(8), 0
        self._describe(saved=False)
        self._open.begin(-1, 0, 1)

    def restore(self, entry: Mapping[str, Any], fields: Mapping[str, Tensor]) -> None:
        """Opens the store in the state of one of its checkpoints, and continues from there.

        Args:
            entry: the result of `checkpoint`.
            fields: see `create`.

        Raises:
            ValueError: the store is damaged, or no longer has the checkpoint.
            OSError: a file cannot be read or written.
        """
        layout, generation = self._laid_out(fields), Generation.from_dict(entry)
        self._claim()
        check_layout(self.directory, layout, Layout.from_dict(entry))
        self._id = check_store(self.directory, entry)
        numbers = undo_since(self.directory, self._id, generation)
        file = self._open_rows(os.O_RDWR)
        self._start(layout, file, fields)
        check_whole(self.directory, self._id, numbers)
        for number in numbers:
            self._check_not_cut(number)
        self._open.look_back(_ANY_GENERATION)
        self._named(lambda: self._undo(numbers))
        os.fsync(file)
        self._describe(saved=True)  # also of a run that has been moved
        remove_undo(self.directory, [n for n in numbers if n > generation.number])
        self._generation = generation.number
        self._begin(generation)

    def checkpoint(self) -> dict[str, Any]:
        """Writes all changes, and begins a new generation; returns the record to restore it."""
        self._named(self._open.flush)
        generation = Generation(self._generation + 1, secrets.token_hex(8))
        self._generation = generation.number
        self._begin(generation)
        return {
            "path": str(self.directory),
            "id": self._id,
            "generation": generation.number,
            "token": generation.token,
            **self.layout.as_json(),
        }

    def prune(self, entries_kept: Iterable[Mapping[str, Any]]) -> None:
        """Removes undo files that no checkpoint needs.

        Args:
            entries_kept: the results of `checkpoint` for all checkpoints.
        """
        if not self.is_open or not self._generation:
            return
        kept = [Generation.from_dict(e).number for e in entries_kept if e.get("id") == self._id]
        if kept and not self._saved:
            self._describe(saved=True)
        least = min(kept, default=self._generation)
        # Removes the oldest first, so that the rest has no gap.
        for number in undo_numbers(self.directory):
            if number < least:
                undo_path(self.directory, number).unlink()

    def mark(self, ticket: int) -> None:
        """Marks a batch's rows as about to change."""
        self._open.mark(ticket)

    def close(self) -> None:
        """Closes all files; changes since the last checkpoint are lost."""
        super().close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _laid_out(self, fields: Mapping[str, Tensor]) -> Layout:
        described = tuple(
            (name, numpy_name(tensor.dtype), tensor[:1].numel()) for name, tensor in fields.items()
        )
        return Layout(self.tables, described)

    def _take_room(self, file: int, size: int) -> None:
        """Allocates the file's blocks, so that a full disk shows before any work."""
        path = self.directory / ROWS
        try:
            if size:
                os.posix_fallocate(file, 0, size)
        except OSError as error:
            path.unlink()
            what = f"{error.strerror}: the rows need {shown(size)}"
            raise OSError(error.errno, what, str(path)) from None

    def _fill(self, blocks: Iterable[RowBlock]) -> None:
        names = self.layout.field_bytes
        for block in blocks:
            data = [as_bytes(block.fields.get(name)) for name in names]
            self._open.fill(block.first, block.rows, data)

    def _undo(self, numbers: list[int]) -> None:
        """Writes the content of undo files back, the newest first."""
        for number in reversed(numbers):
            undo = self._keep(os.open(undo_path(self.directory, number), os.O_RDONLY))
            for records, offsets, _ in self._entries(number, undo):
                self._open.restore(undo, records, offsets)

    def _claim(self) -> None:
        """Locks the store against other processes."""
        make_directories(self.directory)
        if self._lock is None:
            lock = os.open(self.directory, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                raise BlockingIOError(f"{self.directory}: another run uses this store") from None
            except OSError:  # a file system without locks
                pass
            self._lock = lock

    def _check_replaceable(self) -> None:
        """Refuses to replace a store that checkpoints need."""
        path = self.directory / STORE
        if not path.exists() or not undo_numbers(self.directory):
            return  # of a run without a checkpoint
        facts = read_sealed(path)
        folder = facts.get("checkpoints")
        # Where a checkpoint has been saved, an empty folder does not say that it is gone: the
        # folder may have been renamed.
        is_own = not facts.get("saved", True) and folder and folder == self._checkpoints
        if not is_own or any(Path(str(folder)).glob("step-*")):
            raise ValueError(
                f"{self.directory}: has the rows of the checkpoints that were saved in {folder}; "
                "resume that run, name another --table_store, or remove the directory"
            )

    def _describe(self, saved: bool) -> None:
        """Writes the store's description, with `saved` once it has a checkpoint."""
        described = {"version": 1, "id": self._id, "checkpoints": self._checkpoints}
        described |= {"saved": saved} | self.layout.as_json()
        write_atomically(self.directory / STORE, sealed_json(described))
        sync(self.directory)
        self._saved = saved

    def _begin(self, generation: Generation) -> None:
        undo = self._keep(new_undo(self.directory, self._id, generation))
        sync(self.directory)
        self._open.begin(undo, HEADER, generation.number + 1)

    def _check_not_cut(self, number: int) -> None:
        """Refuses to restore from an undo file that has lost its end.

        A kill cuts only a chunk whose records are still those of the file's checkpoint.
        """
        path = undo_path(self.directory, number)
        with open(path, "rb") as file:
            cut = unfinished(path, file.fileno(), self._record_bytes, self.records)
        self._open.look_back(number)
        output = np.empty(1, self.layout.dtype)
        try:
            for record in cut:
                self._open.read(record, output)
        except DamagedError as error:
            raise ValueError(
                f"{path}: truncated: expected {self.layout.row(error.record)}, which has been "
                "overwritten since"
            ) from None
