"""The store of a process's tables: a file with all rows, slots in memory, and generations.

DIR/rank-<r>-of-<n>/store.json     the store's layout; written last, so that a store is whole
DIR/rank-<r>-of-<n>/rows.bin       a record for each row, see csrc/host/row_store.h
DIR/rank-<r>-of-<n>/undo-<g>.bin   records overwritten since checkpoint g, see `undo`
"""

import fcntl
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from dlrm.files import make_directories, write_atomically
from dlrm.locks import sync
from dlrm.manifest import read_sealed, sealed_json
from dlrm.store.config import TableStoreConfig, bytes_of, shown
from dlrm.store.layout import Block, Layout, check_layout, numpy_name
from dlrm.store.memory import memory_of, slots_within
from dlrm.store.native import (
    DamagedError,
    DiskError,
    FullError,
    NativeStore,
    library,
    record_size,
)
from dlrm.store.undo import (
    HEADER,
    Generation,
    check_whole,
    entries,
    new_undo,
    remove_undo,
    token_of,
    undo_numbers,
    undo_path,
    unfinished,
)

STORE, ROWS = "store.json", "rows.bin"
T = TypeVar("T")
_ATTEMPTS = 2  # to read rows that a training overwrites meanwhile, before the last one
_ANY_GENERATION = 2**32 - 1
THREADS = 16  # threads that read and write at the same time


class RowStore:
    """Rows of a process's tables, with as many in memory as fit.

    The model's weights and their optimizer's state have a row for each slot. `prepare` returns the
    slots of a batch's rows, and reads the rows that are not in memory.

    Args:
        directory: of the store.
        tables: rows of this process's tables, by number.
        slots: rows that are in memory.
        row_bytes: of a row and its optimizer's state.
        memory: that the slots may take, for messages.
        checkpoints: directory of the run's checkpoints, or None.

    Attributes:
        slots: rows that are in memory.
        initial: yields the initial values of rows; the model sets it.
        waited: seconds that steps have waited for rows.
        trained: records of the batch that is trained on, and their slots; None before the first.

    Raises:
        ValueError: there is no native library.
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
        library()
        self.directory, self.tables, self.slots = Path(directory).absolute(), dict(tables), slots
        self.records = sum(tables.values())
        self._row_bytes, self._memory = row_bytes, memory
        self._checkpoints = str(Path(checkpoints).absolute()) if checkpoints else None
        self.initial: Callable[[], Iterable[Block]] = lambda: iter(())
        self.waited = 0.0
        self.trained: tuple[np.ndarray, np.ndarray] | None = None
        self._native: NativeStore | None = None
        self._layout: Layout | None = None
        self._pinned: int | None = None
        self._reserve = self.slots // 2
        self._id, self._generation, self._saved = "", 0, False
        self._files: list[int] = []
        self._lock: int | None = None
        self._is_view = False

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
        found = self._open.counters()
        return {name: getattr(found, name) for name, *_ in found._fields_}

    def create(self, fields: Mapping[str, Tensor], blocks: Iterable[Block]) -> None:
        """Creates a new store, whose file has all rows.

        Args:
            fields: the tensors whose rows are stored, `[slots, ...]`, by name.
            blocks: blocks of all rows.

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
        path, size = self.directory / ROWS, record_size(layout.dtype.itemsize, self.records)
        file = self._keep(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
        try:
            if size.file:
                os.posix_fallocate(file, 0, size.file)
        except OSError as error:
            path.unlink()
            raise OSError(
                error.errno,
                f"{error.strerror}: the rows need {shown(size.file)}",
                str(path),
            ) from None
        self._started(layout, file, fields)
        names = [name for name, _, _ in layout.fields]
        with self._errors():
            for block in blocks:
                self._open.fill(block.first, block.rows, [block.fields.get(n) for n in names])
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
        layout, generation = self._laid_out(fields), _generation(entry)
        self._claim()
        check_layout(self.directory, layout, Layout.of(entry))
        self._id = check_store(self.directory, entry)
        numbers = _numbers_since(self.directory, self._id, generation)
        path = self.directory / ROWS
        file = self._keep(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        size = record_size(layout.dtype.itemsize, self.records)
        _check_size(path, file, size.file)
        self._started(layout, file, fields)
        check_whole(self.directory, self._id, numbers)
        for number in numbers:
            self._check_not_cut(number, size.record)
        self._open.look_back(_ANY_GENERATION)
        with self._errors():
            for number in reversed(numbers):
                undo = self._keep(os.open(undo_path(self.directory, number), os.O_RDONLY))
                for records, offsets, _ in self._entries(number, undo):
                    self._open.restore(undo, records, offsets)
        os.fsync(file)
        self._describe(saved=True)  # also of a run that has been moved
        remove_undo(self.directory, [n for n in numbers if n > generation.number])
        self._generation = generation.number
        self._begin(generation)

    def view(self, entry: Mapping[str, Any], fields: Mapping[str, Tensor]) -> None:
        """Reads rows as of a checkpoint of any store, and writes none from now on.

        Args:
            entry: the result of `checkpoint`.
            fields: see `create`; fields of the optimizer may be missing.

        Raises:
            ValueError: the store is damaged, or no longer has the checkpoint.
            OSError: a file cannot be read.
        """
        self.close()
        self.directory = Path(entry["path"])
        layout = Layout.of(entry)
        sizes = {name: np.dtype(kind).itemsize * width for name, kind, width in layout.fields}
        given: dict[str, Tensor | int] = {
            name: fields.get(name, size) for name, size in sizes.items()
        }
        if missing := fields.keys() - sizes.keys():
            raise ValueError(
                f"{self.directory / STORE}: expected the fields {', '.join(fields)}, got no "
                f"{', '.join(sorted(missing))}"
            )
        self._id = check_store(self.directory, entry)
        path = self.directory / ROWS
        file = self._keep(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        _check_size(path, file, record_size(layout.dtype.itemsize, layout.records).file)
        self._started(layout, file, given)
        generation = _generation(entry)
        self._open.look_back(generation.number)
        self._seen: dict[int, tuple[int, int]] = {}
        self._is_view = True
        self._since = generation
        self._add_overlays()

    def checkpoint(self) -> dict[str, Any]:
        """Writes all changes, and begins a new generation; returns the record to restore it."""
        with self._errors():
            self._open.flush()
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

    def holds(self, entry: Mapping[str, Any]) -> bool:
        """Returns whether this store's directory has a checkpoint's rows, for the same tables."""
        return str(self.directory) == entry["path"] and Layout.of(entry).tables == self.tables

    def prune(self, entries_kept: Iterable[Mapping[str, Any]]) -> None:
        """Removes undo files that no checkpoint needs.

        Args:
            entries_kept: the results of `checkpoint` for all checkpoints.
        """
        if self._is_view or not self._generation:
            return
        own = [_generation(e).number for e in entries_kept if e.get("id") == self._id]
        if own and not self._saved:
            self._describe(saved=True)
        least = min(own, default=self._generation)
        # Removes the oldest first, so that the rest has no gap.
        for number in undo_numbers(self.directory):
            if number < least:
                undo_path(self.directory, number).unlink()

    def prepare(self, records: np.ndarray, ahead: bool = False) -> tuple[np.ndarray, int]:
        """Returns the slots of a batch's rows and the batch's ticket; see `NativeStore.prepare`.

        Args:
            records: records of the batch, repeats included.
            ahead: leave half of the slots that are not pinned to earlier batches.

        Raises:
            FullError: there are too few slots.
            ValueError: a record is damaged; the message names it.
            OSError: a file cannot be read or written.
        """
        reserve = self._reserve if ahead else 0
        return self._shown(lambda: self._open.prepare(records, reserve))

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
            least = memory_of(error.needed + error.held, self._row_bytes, self.records)
            raise ValueError(
                f"--table_memory {self._memory}: {self.slots:,} rows are in memory, but a batch "
                f"needs {error.needed:,}, beside {error.held:,} that others use; expected at least "
                f"{shown(least)}, or a smaller batch"
            ) from None

    def mark(self, ticket: int) -> None:
        """Marks a batch's rows as about to change."""
        if not self._is_view:
            self._open.mark(ticket)

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
        low, high = 0, max(self.tables.values())
        while low < high:  # the most rows of every table
            middle = (low + high + 1) // 2
            fits = sum(min(rows, middle) for rows in self.tables.values()) <= self.slots // 2
            low, high = (middle, high) if fits else (low, middle - 1)
        begins = self.layout.begins
        own = [
            begins[number] + np.arange(min(rows, low), dtype=np.int64)
            for number, rows in self.tables.items()
        ]
        pinned = np.concatenate(own)
        _, self._pinned = self.prepare(pinned)
        self._reserve = (self.slots - len(pinned)) // 2

    def read(self, first: int, count: int) -> np.ndarray:
        """Returns rows of all fields, `[count]`, of `layout.dtype`.

        For a store that another process trains on, it returns the rows of the checkpoint.

        Raises:
            ValueError: a record is damaged, or no longer there; the message names it.
            OSError: a file cannot be read.
        """
        rows = np.empty(count, self.layout.dtype)
        self._shown(lambda: self._open.read(first, count, rows))
        return rows

    def close(self) -> None:
        """Closes all files; changes since the last checkpoint are lost."""
        if self._native is not None:
            self._native.close()
            self._native = None
        for file in self._files:
            os.close(file)
        self._files.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        self._pinned, self._reserve = None, self.slots // 2

    def __del__(self) -> None:
        self.close()

    @property
    def _open(self) -> NativeStore:
        assert self._native is not None, "the store is not open"
        return self._native

    def _shown(self, read: Callable[[], T]) -> T:
        """Returns the result of `read`, even if a training overwrites the rows meanwhile."""
        for _ in range(_ATTEMPTS if self._is_view else 0):
            try:
                return read()
            except DamagedError:
                self._add_overlays()
            except DiskError as error:
                raise self._of_disk(error) from None
        with self._errors():
            return read()

    def _unpin(self) -> None:
        if self._pinned is not None:
            self.release(self._pinned)
        self._pinned, self._reserve = None, self.slots // 2

    def _laid_out(self, fields: Mapping[str, Tensor]) -> Layout:
        described = tuple(
            (name, numpy_name(tensor.dtype), tensor[:1].numel()) for name, tensor in fields.items()
        )
        return Layout(self.tables, described)

    def _started(self, layout: Layout, file: int, fields: Mapping[str, Tensor | int]) -> None:
        self._layout = layout
        self._native = NativeStore(
            file, self.records, self.slots, fields, THREADS if self.slots else 1
        )

    def _keep(self, file: int) -> int:
        self._files.append(file)
        return file

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
        found = read_sealed(path)
        folder = found.get("checkpoints")
        # Where a checkpoint has been saved, an empty folder does not say that it is gone: the
        # folder may have been renamed.
        is_own = not found.get("saved", True) and folder and folder == self._checkpoints
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

    def _check_not_cut(self, number: int, record_bytes: int) -> None:
        """Refuses to restore from an undo file that has lost its end.

        A kill cuts only a chunk whose records are still those of the file's checkpoint.
        """
        path = undo_path(self.directory, number)
        with open(path, "rb") as file:
            cut = unfinished(path, file.fileno(), record_bytes, self.records)
        self._open.look_back(number)
        output = np.empty(1, self.layout.dtype)
        try:
            for record in cut:
                self._open.read(record, 1, output)
        except DamagedError as error:
            raise ValueError(
                f"{path}: truncated: expected {self.layout.row(error.record)}, which has been "
                "overwritten since"
            ) from None

    def _entries(
        self, number: int, file: int, start: int = HEADER
    ) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        path = undo_path(self.directory, number)
        record = record_size(self.layout.dtype.itemsize, 0).record
        return entries(path, file, record, self.layout.records, start)

    def _add_overlays(self) -> None:
        """Reads the new content of undo files, the oldest first."""
        for number in _numbers_since(self.directory, self._id, self._since):
            if number not in self._seen:
                path = undo_path(self.directory, number)
                self._seen[number] = self._keep(os.open(path, os.O_RDONLY)), HEADER
            file, done = self._seen[number]
            for records, offsets, end in self._entries(number, file, done):
                self._open.overlay(file, records, offsets)
                self._seen[number] = file, end

    def _errors(self) -> "_Named":
        return _Named(self)

    def _damaged(self, error: DamagedError) -> ValueError:
        file = "an undo file" if error.undo else str(self.directory / ROWS)
        where = self.directory if error.undo else file
        what = f" in {file}" if error.undo else ""
        return ValueError(
            f"{where}: {self.layout.row(error.record)}{what}: damaged: its checksum differs, or it "
            "is newer than the checkpoint"
        )

    def _of_disk(self, error: DiskError) -> OSError:
        path = self.directory / ROWS
        if error.undo and self._generation:
            path = undo_path(self.directory, self._generation)
        return OSError(error.error, os.strerror(error.error), str(path))


def limited_store(
    config: TableStoreConfig,
    tables: Mapping[int, int],
    row_bytes: int,
    rank: int = 0,
    size: int = 1,
    checkpoints: str | os.PathLike | None = None,
) -> RowStore:
    """Returns the store of a process's tables, with as many slots as its memory has room for.

    Args:
        config: directory and memory limit.
        tables, row_bytes, checkpoints: see `RowStore`.
        rank, size: rank and number of processes.

    Raises:
        ValueError: there is too little memory, or the native library is missing.
    """
    assert config.table_memory is not None
    assert config.table_store is not None
    records, memory = sum(tables.values()), str(config.table_memory)
    slots = slots_within(bytes_of(memory), row_bytes, records)
    if not slots and records:
        raise ValueError(
            f"--table_memory {memory}: expected at least {shown(memory_of(1, row_bytes, records))} "
            f"for buffers, a bit for each of {records:,} rows and one row in memory"
        )
    directory = Path(config.table_store) / f"rank-{rank}-of-{size}"
    return RowStore(directory, tables, slots, row_bytes, memory, checkpoints)


def open_view(entry: Mapping[str, Any]) -> RowStore:
    """Returns the store of a checkpoint, to `read` its rows; see `RowStore.view`."""
    try:
        store = RowStore(entry["path"], Layout.of(entry).tables, slots=0)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"expected where the checkpoint's rows are, got {error!r}") from None
    store.view(entry, {})
    return store


class _Named:
    """Translates errors of the native store into errors that name files and rows."""

    def __init__(self, store: RowStore) -> None:
        self._store = store

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, *where: object) -> None:
        if isinstance(error, DamagedError):
            raise self._store._damaged(error) from None
        if isinstance(error, DiskError):
            raise self._store._of_disk(error) from None


def check_store(directory: Path, entry: Mapping[str, Any]) -> str:
    """Returns the name of a store after checking that it is the checkpoint's.

    Raises:
        ValueError: the store is missing, or another one.
    """
    path = directory / STORE
    if not path.exists():
        raise ValueError(f"{directory}: expected the store with the checkpoint's rows, got none")
    found = read_sealed(path).get("id")
    if found != entry.get("id"):
        raise ValueError(
            f"{directory}: expected the store {entry.get('id')} with the checkpoint's rows, got "
            f"the store {found} of another run"
        )
    return str(found)


def _numbers_since(directory: Path, store: str, generation: Generation) -> list[int]:
    """Returns the generations from a given one on, all of which have undo files."""
    path = undo_path(directory, generation.number)
    numbers = [n for n in undo_numbers(directory) if n >= generation.number]
    whole = numbers == list(range(generation.number, generation.number + len(numbers)))
    if not numbers or not whole or token_of(path, store) != generation.token:
        raise ValueError(
            f"{path}: expected what undoes the changes since checkpoint {generation.number} of the "
            "store, got none: its rows are gone"
        )
    return numbers


def _generation(entry: Mapping[str, Any]) -> Generation:
    return Generation(int(entry["generation"]), str(entry["token"]))


def _check_size(path: Path, file: int, expected: int) -> None:
    found = os.fstat(file).st_size
    if found < expected:
        raise ValueError(f"{path}: expected {expected} bytes, got {found}: truncated")
