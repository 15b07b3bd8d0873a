"""The compiled part of a store, the module `_row_store` of csrc/store, and its errors."""

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlrm.store._row_store import NativeStore


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
def native_store() -> "type[NativeStore]":
    """Returns the compiled class.

    Raises:
        ValueError: the module is missing.
    """
    try:
        from dlrm.store._row_store import NativeStore
    except ImportError as error:
        raise ValueError(
            "--table_store: needs the native module dlrm.store._row_store, which is not there or "
            f"is of another Python or machine ({error}); install with a C++ compiler and Python's "
            "headers (python3-dev)"
        ) from None
    return NativeStore
