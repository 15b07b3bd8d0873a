"""Rows of a checkpoint in a store, which are only read, also while a training changes the store."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dlrm.store.layout import STORE, Layout, check_store
from dlrm.store.native import DamagedError, DiskError
from dlrm.store.row_slots import RowSlots, T
from dlrm.store.undo import HEADER, Generation, undo_path, undo_since

_ATTEMPTS = 2  # to read rows that a training overwrites meanwhile, before the last one


class RowView(RowSlots):
    """Rows as of a checkpoint of any store.

    Args:
        entry: the result of `RowStore.checkpoint`.
        fields: the tensors that rows are read into, `[slots, ...]`, by name; fields may be missing.
        slots, row_bytes, memory: see `RowSlots`; without slots, rows can only be `read`.

    Raises:
        ValueError: the store is damaged, or no longer has the checkpoint.
        OSError: a file cannot be read.
    """

    def __init__(
        self,
        entry: Mapping[str, Any],
        fields: Mapping[str, Tensor],
        slots: int = 0,
        row_bytes: int = 0,
        memory: str = "",
    ) -> None:
        layout = Layout.from_dict(entry)
        super().__init__(Path(entry["path"]), layout.tables, slots, row_bytes, memory)
        if missing := fields.keys() - layout.field_bytes.keys():
            raise ValueError(
                f"{self.directory / STORE}: expected the fields {', '.join(fields)}, got no "
                f"{', '.join(sorted(missing))}"
            )
        self._id = check_store(self.directory, entry)
        self._start(layout, self._open_rows(os.O_RDONLY), fields)
        self._since = Generation.from_dict(entry)
        self._open.look_back(self._since.number)
        self._seen: dict[int, tuple[int, int]] = {}
        self._add_overlays()

    def _named(self, work: Callable[[], T]) -> T:
        """Does the same as that of `RowSlots`, even if a training overwrites the rows meanwhile."""
        for _ in range(_ATTEMPTS):
            try:
                return work()
            except DamagedError:
                self._add_overlays()
            except DiskError:
                break
        return super()._named(work)

    def _add_overlays(self) -> None:
        """Reads the new content of undo files, the oldest first."""
        for number in undo_since(self.directory, self._id, self._since):
            if number not in self._seen:
                path = undo_path(self.directory, number)
                self._seen[number] = self._keep(os.open(path, os.O_RDONLY)), HEADER
            file, done = self._seen[number]
            for records, offsets, end in self._entries(number, file, done):
                self._open.overlay(file, records, offsets)
                self._seen[number] = file, end
