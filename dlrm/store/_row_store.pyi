"""The native part of a store, see csrc/store/row_store.h; its errors are those of `native`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

class NativeStore:
    """Records in a file and rows in slots.

    Arrays are contiguous: numbers of int64, memory of uint8.

    Args:
        file: the file's descriptor.
        records: records in the file.
        slots: rows of each field in memory.
        fields: memory of each field's slots, or None where it is not read, and bytes of a row.
        threads: threads that read and write at the same time.
    """

    def __init__(
        self,
        file: int,
        records: int,
        slots: int,
        fields: Sequence[tuple[np.ndarray[Any, Any] | None, int]],
        threads: int,
    ) -> None: ...
    @staticmethod
    def record_bytes(payload: int) -> int: ...
    @staticmethod
    def file_bytes(payload: int, records: int) -> int: ...
    def prepare(
        self, records: np.ndarray[Any, Any], reserve: int
    ) -> tuple[np.ndarray[Any, Any], int]: ...
    def mark(self, ticket: int) -> None: ...
    def release(self, ticket: int) -> None: ...
    def flush(self) -> None: ...
    def begin(self, undo: int, size: int, generation: int) -> None: ...
    def fill(self, first: int, count: int, data: Sequence[np.ndarray[Any, Any] | None]) -> None: ...
    def read(self, first: int, output: np.ndarray[Any, Any]) -> None: ...
    def look_back(self, generation: int) -> None: ...
    def overlay(
        self, undo: int, records: np.ndarray[Any, Any], offsets: np.ndarray[Any, Any]
    ) -> None: ...
    def restore(
        self, undo: int, records: np.ndarray[Any, Any], offsets: np.ndarray[Any, Any]
    ) -> None: ...
    def counters(self) -> dict[str, int]: ...
