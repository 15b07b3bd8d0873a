"""The stores of a process, one for the tables of each width."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dlrm.store.config import TableStoreConfig, bytes_of, shown
from dlrm.store.memory import RowKind, least_memory, memory_of, slots_of
from dlrm.store.row_slots import RowSlots
from dlrm.store.row_store import RowStore

Tickets = tuple[int, ...]
T = TypeVar("T")


class RowStores:
    """The stores of a process's tables, whose records and slots are numbered one after the other.

    Args:
        parts: the store of the tables of each width, by width, in ascending order.

    Attributes:
        parts: `parts` of the arguments; a view may replace a store.
        waited: seconds that steps have waited for rows.
        trained: records of the batch that is trained on, and their slots; None before the first.
    """

    def __init__(self, parts: Mapping[int, RowSlots], directory: Path) -> None:
        self.parts, self.directory = dict(parts), directory
        self.waited = 0.0
        self.trained: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def slots(self) -> int:
        """Returns the number of rows in memory."""
        return sum(part.slots for part in self.parts.values())

    @property
    def first_slots(self) -> dict[int, int]:
        """Returns the number of the first slot of each width."""
        return self._begins(part.slots for part in self.parts.values())

    @property
    def first_records(self) -> dict[int, int]:
        """Returns the number of the first record of each width."""
        return self._begins(part.records for part in self.parts.values())

    def slots_of(self, width: int) -> tuple[int, int]:
        """Returns the first slot of a width, and the slot after the last."""
        first = self.first_slots[width]
        return first, first + self.parts[width].slots

    def prepare(self, records: np.ndarray, ahead: bool = False) -> tuple[np.ndarray, Tickets]:
        """Returns the slots of a batch's rows and the batch's tickets; see `RowSlots.prepare`."""
        return self._prepared(records, lambda part, own: part.prepare(own, ahead))

    def prepare_anyhow(self, records: np.ndarray) -> tuple[np.ndarray, Tickets]:
        """Does the same when no slots will be returned; see `RowSlots.prepare_anyhow`."""
        return self._prepared(records, lambda part, own: part.prepare_anyhow(own))

    def mark(self, tickets: Tickets) -> None:
        """Marks a batch's rows as about to change, unless they are shown only."""
        for part, ticket in zip(self.parts.values(), tickets, strict=True):
            part.mark(ticket)

    def release(self, tickets: Sequence[int]) -> None:
        """Returns the slots of a batch to the stores."""
        for part, ticket in zip(self.parts.values(), tickets, strict=False):
            part.release(ticket)

    def checkpoint(self) -> list[dict[str, Any]]:
        """Writes all changes; returns the records to restore the rows, see `RowStore`."""
        stores = [*self.changed()]
        assert len(stores) == len(self.parts), "a view has nothing to save"
        return [store.checkpoint() for store in stores]

    def prune(self, entries_kept: Sequence[Mapping[str, Any]]) -> None:
        """Removes what no checkpoint needs; see `RowStore.prune`."""
        for store in self.changed():
            store.prune(entries_kept)

    def changed(self) -> Iterator[RowStore]:
        """Yields the stores that a training changes: all but views."""
        yield from (part for part in self.parts.values() if isinstance(part, RowStore))

    def widths_of(self, weights: Iterable[T]) -> Iterator[tuple[T, int]]:
        """Yields the weights of tables, and then those of the wide term, each with its width."""
        yield from zip(weights, cycle(self.parts), strict=False)

    def close(self) -> None:
        """Closes all files; changes since the last checkpoint are lost."""
        for part in self.parts.values():
            part.close()

    def _begins(self, sizes: Iterable[int]) -> dict[int, int]:
        return dict(zip(self.parts, accumulate(sizes, initial=0), strict=False))

    def _prepared(
        self,
        records: np.ndarray,
        prepare: Callable[[RowSlots, np.ndarray], tuple[np.ndarray, int]],
    ) -> tuple[np.ndarray, Tickets]:
        if len(self.parts) == 1:
            (part,) = self.parts.values()
            slots, ticket = prepare(part, records)
            return slots, (ticket,)
        tickets: list[int] = []
        slots = np.empty(len(records), np.int64)
        firsts = zip(self.first_records.values(), self.first_slots.values(), strict=True)
        try:
            for part, (record, slot) in zip(self.parts.values(), firsts, strict=True):
                own = records - record
                here = (own >= 0) & (own < part.records)
                found, ticket = prepare(part, own[here])
                tickets.append(ticket)
                slots[here] = found + slot
        except BaseException:
            self.release(tickets)
            raise
        return slots, tuple(tickets)


def limited_stores(
    config: TableStoreConfig,
    kinds: Sequence[RowKind],
    rank: int = 0,
    size: int = 1,
    checkpoints: str | os.PathLike | None = None,
) -> RowStores:
    """Returns the stores of a process's tables, with as many slots as its memory has room for.

    Args:
        kinds: the tables of each width, in ascending order.
        checkpoints: see `RowStore`.

    Raises:
        ValueError: there is too little memory, or the native library is missing.
    """
    assert config.table_memory is not None
    assert config.table_store is not None
    memory, of_rank = str(config.table_memory), f"rank-{rank}-of-{size}"
    slots = slots_of(kinds, bytes_of(memory))
    records = sum(kind.records for kind in kinds)
    if records and not any(slots):
        least = least_memory(kinds, [min(kind.records, 1) for kind in kinds])
        raise ValueError(
            f"--table_memory {memory}: expected at least {shown(least)} for buffers, a bit for "
            f"each of {records:,} rows and one row in memory"
        )
    taken = [memory_of(n, k.row_bytes, k.records) for n, k in zip(slots, kinds, strict=True)]
    parts = {}
    for kind, own, bytes_ in zip(kinds, slots, taken, strict=True):
        name = of_rank if len(kinds) == 1 else f"{of_rank}-width-{kind.dim}"
        where = Path(config.table_store, name)
        store = RowStore(where, kind.tables, own, kind.row_bytes, memory, checkpoints)
        store.beside = sum(taken) - bytes_
        parts[kind.dim] = store
    directory = Path(config.table_store).absolute()
    one = next(iter(parts.values())).directory if len(parts) == 1 else directory
    return RowStores(parts, one)
