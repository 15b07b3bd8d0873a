"""Rows of a file, as many of which are in memory as fit, in slots of a model's tensors."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from dlrm.store.config import shown
from dlrm.store.layout import ROWS, Layout, RowBlock
from dlrm.store.memory import greatest, memory_of
from dlrm.store.native import DamagedError, DiskError, FullError, native_store
from dlrm.store.undo import HEADER, entries, undo_path

if TYPE_CHECKING:
    from dlrm.store._row_store import NativeStore

THREADS = 16  # threads that read and write at the same time
T = TypeVar("T")


class RowSlots:
    """Rows of tables in a file, with as many in memory as fit.

    A model's weights and their optimizer's state have a row for each slot. `prepare` returns the
    slots of a batch's rows, and reads the rows that are not in memory. `RowStore` changes the rows,
    and `RowView` shows those of a checkpoint.

    Args:
        directory: of the file.
        tables: rows of each table, by number.
        slots: rows that are in memory.
        row_bytes: of a row and its optimizer's state.
        memory: that the slots may take, for messages.

    Attributes:
        slots: rows that are in memory.
        beside: bytes of the memory that other stores take, for messages.
        initial: yields the initial values of rows; the model sets it.

    Raises:
        ValueError: there is no native module.
    """

    def __init__(
        self,
        directory: Path,
        tables: Mapping[int, int],
        slots: int,
        row_bytes: int = 0,
        memory: str = "",
    ) -> None:
        self.initial: Callable[[], Iterable[RowBlock]] = lambda: iter(())
        self._native: NativeStore | None = None
        self._files: list[int] = []
        self.directory, self.tables, self.slots = directory, dict(tables), slots
        self.records = sum(tables.values())
        self.row_bytes, self.memory = row_bytes, memory
        self.beside = 0
        self._layout: Layout | None = None
        self._pinned: int | None = None
        self._reserve = self.slots // 2
        self._id, self._generation = "", 0
        native_store()

    @property
    def is_open(self) -> bool:
        """Returns whether the rows can be used."""
        return self._native is not None

    @property
    def layout(self) -> Layout:
        """Returns the layout of the store, once it is open."""
        assert self._layout is not None, "the store is not open"
        return self._layout

    def counters(self) -> dict[str, int]:
        """Returns numbers of rows read, written, saved for undoing, found in memory, changed."""
        return self._open.counters()

    def holds(self, entry: Mapping[str, Any]) -> bool:
        """Returns whether the directory has a checkpoint's rows, for the same tables."""
        return (
            str(self.directory) == entry["path"] and Layout.from_dict(entry).tables == self.tables
        )

    def prepare(self, records: np.ndarray, ahead: bool = False) -> tuple[np.ndarray, int]:
        """Returns the slots of a batch's rows and the batch's ticket.

        Args:
            records: records of the batch, repeats included.
            ahead: leave half of the slots that are not pinned to earlier batches.

        Raises:
            FullError: there are too few slots.
            ValueError: a record is damaged; the message names it.
            OSError: a file cannot be read or written.
        """
        reserve = self._reserve if ahead else 0
        return self._named(lambda: self._open.prepare(records, reserve))

    def prepare_anyhow(self, records: np.ndarray) -> tuple[np.ndarray, int]:
        """Does the same as `prepare` when no slots will be returned: pinned rows are evicted.

        Raises:
            ValueError: there are still too few slots; the message has the bytes needed.
        """
        try:
            try:
                return self.prepare(records)
            except FullError:
                if self._pinned is None:
                    raise
                self._unpin()
                return self.prepare(records)
        except FullError as error:
            least = memory_of(error.needed + error.held, self.row_bytes, self.records) + self.beside
            raise ValueError(
                f"--table_memory {self.memory}: {self.slots:,} rows are in memory, but a batch "
                f"needs {error.needed:,}, beside {error.held:,} that others use; expected at least "
                f"{shown(least)}, or a smaller batch"
            ) from None

    def mark(self, ticket: int) -> None:
        """Marks a batch's rows as about to change, unless they are shown only."""

    def release(self, ticket: int) -> None:
        """Returns the slots of a batch to the store."""
        if self._native is not None:
            self._native.release(ticket)

    def pin(self) -> None:
        """Keeps the first rows of each table in memory, in half of the slots.

        Ids descend by their counts, so these are the rows that most batches need.
        """
        if self._pinned is not None or self.slots == self.records or not self.slots:
            return

        def fit(most: int) -> bool:
            return sum(min(rows, most) for rows in self.tables.values()) <= self.slots // 2

        most, begins = greatest(max(self.tables.values()), fit), self.layout.begins
        places = [
            begins[number] + np.arange(min(rows, most), dtype=np.int64)
            for number, rows in self.tables.items()
        ]
        pinned = np.concatenate(places)
        _, self._pinned = self.prepare(pinned)
        self._reserve = (self.slots - len(pinned)) // 2

    def read(self, first: int, count: int) -> np.ndarray:
        """Returns rows of all fields, `[count]`, of `layout.dtype`.

        Raises:
            ValueError: a record is damaged, or no longer there; the message names it.
            OSError: a file cannot be read.
        """
        rows = np.empty(count, self.layout.dtype)
        self._named(lambda: self._open.read(first, rows))
        return rows

    def close(self) -> None:
        """Closes all files; changes since the last checkpoint are lost."""
        self._native = None  # which ends its threads
        for file in self._files:
            os.close(file)
        self._files.clear()
        self._pinned, self._reserve = None, self.slots // 2

    def __del__(self) -> None:
        self.close()

    @property
    def _open(self) -> "NativeStore":
        assert self._native is not None, "the store is not open"
        return self._native

    @property
    def _record_bytes(self) -> int:
        return native_store().record_bytes(self.layout.dtype.itemsize)

    def _open_rows(self, flags: int) -> int:
        return self._keep(os.open(self.directory / ROWS, flags | os.O_CLOEXEC, 0o666))

    def _start(self, layout: Layout, file: int, fields: Mapping[str, Tensor]) -> None:
        """Uses the rows of an open file, all of which must be there."""
        expected = native_store().file_bytes(layout.dtype.itemsize, layout.records)
        if (actual := os.fstat(file).st_size) < expected:
            raise ValueError(
                f"{self.directory / ROWS}: expected {expected} bytes, got {actual}: truncated"
            )
        self._layout = layout
        memory = [(as_bytes(fields.get(name)), size) for name, size in layout.field_bytes.items()]
        threads = THREADS if self.slots else 1
        self._native = native_store()(file, self.records, self.slots, memory, threads)

    def _named(self, work: Callable[[], T]) -> T:
        """Returns the result of `work`, whose errors name file and row."""
        try:
            return work()
        except DamagedError as error:
            row, file = self.layout.row(error.record), self.directory / ROWS
            place = f"{self.directory}: {row} in an undo file" if error.undo else f"{file}: {row}"
            raise ValueError(
                f"{place}: damaged: its checksum differs, or it is newer than the checkpoint"
            ) from None
        except DiskError as error:
            path = self.directory / ROWS
            if error.undo and self._generation:
                path = undo_path(self.directory, self._generation)
            raise OSError(error.error, os.strerror(error.error), str(path)) from None

    def _unpin(self) -> None:
        if self._pinned is not None:
            self.release(self._pinned)
        self._pinned, self._reserve = None, self.slots // 2

    def _keep(self, file: int) -> int:
        self._files.append(file)
        return file

    def _entries(
        self, number: int, file: int, start: int = HEADER
    ) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        path = undo_path(self.directory, number)
        return entries(path, file, self._record_bytes, self.records, start)


def as_bytes(tensor: Tensor | None) -> np.ndarray | None:
    """Returns the memory of a contiguous tensor as bytes."""
    return None if tensor is None else tensor.detach().view(-1).view(torch.uint8).numpy()
