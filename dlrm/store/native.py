"""The compiled part of a store, in `dlrm/_host.so` from `csrc/host`: slots, records, their file."""

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

LIBRARY = Path(__file__).resolve().parents[1] / "_host.so"
_OK, _FULL, _DAMAGED = 0, 1, 2
_Number, _Pointer = ctypes.c_int64, ctypes.c_void_p
_FUNCTIONS = {
    "open": (_Pointer, _Number, _Number, _Number, _Pointer, _Number, _Number),
    "close": (None, _Pointer),
    "file_bytes": (_Number, _Number, _Number, _Pointer),
    "prepare": (_Number, _Pointer, _Pointer, _Number, _Number, _Pointer, _Pointer),
    "mark": (None, _Pointer, _Number),
    "release": (None, _Pointer, _Number),
    "flush": (_Number, _Pointer),
    "begin": (None, _Pointer, _Number, _Number, _Number),
    "fill": (_Number, _Pointer, _Number, _Number, _Pointer),
    "read": (_Number, _Pointer, _Number, _Number, _Pointer),
    "look_back": (None, _Pointer, _Number),
    "overlay": (None, _Pointer, _Number, _Number, _Pointer, _Pointer),
    "forget": (None, _Pointer),
    "restore": (_Number, _Pointer, _Number, _Number, _Pointer, _Pointer),
    "problem": (None, _Pointer, _Pointer),
    "counters": (None, _Pointer, _Pointer),
}


class _Field(ctypes.Structure):
    _fields_ = [("data", _Pointer), ("bytes", _Number)]


class Counters(ctypes.Structure):
    """Counters of a store: rows read, written, and saved for undoing, hits, and dirty rows."""

    _fields_ = [(name, _Number) for name in ("reads", "writes", "undone", "hits", "dirty")]


class _Problem(ctypes.Structure):
    _fields_ = [(name, _Number) for name in ("status", "error", "record", "undo", "needed", "held")]


class FullError(Exception):
    """Raised when there are too few slots for a batch, besides those that others use.

    Attributes:
        needed: slots that the batch needs.
        held: slots that others use.
    """

    def __init__(self, needed: int, held: int) -> None:
        super().__init__(needed, held)
        self.needed, self.held = needed, held


class DamagedError(Exception):
    """Raised for a damaged record, in the rows or in an undo file."""

    def __init__(self, record: int, undo: bool) -> None:
        super().__init__(record, undo)
        self.record, self.undo = record, undo


class DiskError(Exception):
    """Raised when the kernel refuses to read or write the rows or an undo file."""

    def __init__(self, error: int, undo: bool) -> None:
        super().__init__(error, undo)
        self.error, self.undo = error, undo


@cache
def library() -> Any:
    """Returns the functions of the library.

    Raises:
        ValueError: the library is missing.
    """
    try:
        loaded = ctypes.CDLL(str(LIBRARY))
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(loaded, f"dlrm_store_{name}")
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError):
        raise ValueError(
            f"--table_store: needs the native library {LIBRARY}, which is not there or is older; "
            "install with a C++ compiler"
        ) from None
    return loaded


class RecordSize(NamedTuple):
    """Bytes of a record, and of a file of all of them."""

    record: int
    file: int


def record_size(payload: int, records: int) -> RecordSize:
    """Returns the sizes of records with `payload` bytes of rows."""
    record = _Number()
    file = library().dlrm_store_file_bytes(payload, records, ctypes.byref(record))
    return RecordSize(record.value, file)


class NativeStore:
    """Records in a file and rows in slots; see csrc/host/row_store.h.

    Args:
        file: the file's descriptor.
        records: records in the file.
        slots: rows of each tensor.
        fields: tensors `[slots, ...]` by name, or the bytes of a row if there is no tensor.
        threads: threads that read and write at the same time.
    """

    def __init__(
        self,
        file: int,
        records: int,
        slots: int,
        fields: Mapping[str, Tensor | int],
        threads: int,
    ) -> None:
        self._library = library()
        self._kept = list(fields.values())  # the tensors live as long as the store
        views = (_Field * len(fields))(*map(_view, self._kept))
        self._handle = self._library.dlrm_store_open(
            file, records, slots, views, len(fields), threads
        )

    def close(self) -> None:
        """Ends the threads; nothing else may be called afterwards."""
        handle, self._handle = self._handle, None
        if handle:
            self._library.dlrm_store_close(handle)

    def __del__(self) -> None:
        self.close()

    def prepare(self, records: np.ndarray, reserve: int = 0) -> tuple[np.ndarray, int]:
        """Returns the slots of records `[count]`, after reading them, and the batch's ticket.

        Args:
            records: records of the batch, repeats included.
            reserve: slots to leave to others.

        Raises:
            FullError, DamagedError, DiskError: it cannot be done.
        """
        slots, ticket = np.empty(len(records), np.int64), _Number()
        assert records.dtype == np.int64
        assert records.flags.c_contiguous
        self._check(
            self._library.dlrm_store_prepare(
                self._handle,
                records.ctypes.data,
                len(records),
                reserve,
                slots.ctypes.data,
                ctypes.byref(ticket),
            )
        )
        return slots, ticket.value

    def mark(self, ticket: int) -> None:
        """Marks a batch's rows as about to change."""
        self._library.dlrm_store_mark(self._handle, ticket)

    def release(self, ticket: int) -> None:
        """Returns the slots of a batch to the store."""
        self._library.dlrm_store_release(self._handle, ticket)

    def flush(self) -> None:
        """Writes all changes."""
        self._check(self._library.dlrm_store_flush(self._handle))

    def begin(self, undo: int, size: int, generation: int) -> None:
        """Starts a generation, whose undo file has `size` bytes already; -1 is no file."""
        self._library.dlrm_store_begin(self._handle, undo, size, generation)

    def fill(self, first: int, count: int, data: Sequence[Tensor | None]) -> None:
        """Writes records, whose fields are `data`; None is zeros."""
        pointers = [None if one is None else one.data_ptr() for one in data]
        array = (_Pointer * len(pointers))(*pointers)
        self._check(self._library.dlrm_store_fill(self._handle, first, count, array))

    def read(self, first: int, count: int, output: np.ndarray) -> None:
        """Reads the fields of records into `output`, `[count, payload]` bytes."""
        self._check(self._library.dlrm_store_read(self._handle, first, count, output.ctypes.data))

    def look_back(self, generation: int) -> None:
        """Refuses records that are newer than a generation."""
        self._library.dlrm_store_look_back(self._handle, generation)

    def overlay(self, undo: int, records: np.ndarray, offsets: np.ndarray) -> None:
        """Reads records from an undo file, unless an earlier one was given for them."""
        self._library.dlrm_store_overlay(
            self._handle, undo, len(records), records.ctypes.data, offsets.ctypes.data
        )

    def forget(self) -> None:
        """Forgets the rows in memory."""
        self._library.dlrm_store_forget(self._handle)

    def restore(self, undo: int, records: np.ndarray, offsets: np.ndarray) -> None:
        """Writes records of an undo file back."""
        self._check(
            self._library.dlrm_store_restore(
                self._handle, undo, len(records), records.ctypes.data, offsets.ctypes.data
            )
        )

    def counters(self) -> Counters:
        """Returns the current counters."""
        found = Counters()
        self._library.dlrm_store_counters(self._handle, ctypes.byref(found))
        return found

    def _check(self, status: int) -> None:
        if status == _OK:
            return
        found = _Problem()
        self._library.dlrm_store_problem(self._handle, ctypes.byref(found))
        if status == _FULL:
            raise FullError(found.needed, found.held)
        if status == _DAMAGED:
            raise DamagedError(found.record, bool(found.undo))
        raise DiskError(found.error, bool(found.undo))


def _view(field: Tensor | int) -> _Field:
    if isinstance(field, int):
        return _Field(None, field)
    assert field.is_contiguous()
    assert field.device.type == "cpu"
    return _Field(field.data_ptr(), field[:1].nbytes)
