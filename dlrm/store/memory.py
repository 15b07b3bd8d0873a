"""Memory that stores take, by their slots."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

_SLOT_BYTES = 17  # besides a row: its record and its users
_PLACE_BYTES = 12  # of the map from records to slots
_BUFFERS = 16 << 20  # buffers of reads and writes, and the threads' stacks


@dataclass(frozen=True)
class RowKind:
    """A process's tables of one width, whose rows have a store of their own.

    Attributes:
        dim: columns of the tables.
        tables: rows of each table, by number.
        row_bytes: bytes of a row and its optimizer's state.
        fields: fields of each table; empty is one each.
    """

    dim: int
    tables: Mapping[int, int]
    row_bytes: int
    fields: tuple[int, ...] = ()

    @property
    def records(self) -> int:
        """Returns the number of rows."""
        return sum(self.tables.values())

    def most_rows(self, samples: int) -> int:
        """Returns the most rows that this many samples of one id per field may need."""
        each = self.fields or (1,) * len(self.tables)
        rows = self.tables.values()
        return sum(min(count, samples * own) for count, own in zip(rows, each, strict=True))


def memory_of(slots: int, row_bytes: int, records: int) -> int:
    """Returns the bytes of memory that a store takes.

    Args:
        row_bytes: bytes of a row and its optimizer's state.
    """
    places = 1 << max((2 * slots - 1).bit_length(), 4)
    return slots * (row_bytes + _SLOT_BYTES) + places * _PLACE_BYTES + records // 8 + _BUFFERS


def slots_within(memory: int, row_bytes: int, records: int) -> int:
    """Returns the most slots whose store takes no more than `memory` bytes."""
    return greatest(records, lambda slots: memory_of(slots, row_bytes, records) <= memory)


def slots_of(kinds: Sequence[RowKind], memory: int) -> list[int]:
    """Returns the slots of each kind's store; together they take no more than `memory` bytes.

    Several kinds have room for the rows of equally many samples.
    """
    if len(kinds) < 2:
        return [slots_within(memory, kind.row_bytes, kind.records) for kind in kinds]
    samples = greatest(_most_samples(kinds), lambda one: _memory_of_samples(kinds, one) <= memory)
    return [kind.most_rows(samples) for kind in kinds]


def least_memory(kinds: Sequence[RowKind], rows: Sequence[int]) -> int:
    """Returns the fewest bytes with which `slots_of` gives each kind this many slots."""
    if len(kinds) < 2:
        pairs = zip(rows, kinds, strict=True)
        return sum(memory_of(slots, kind.row_bytes, kind.records) for slots, kind in pairs)

    def lacks(samples: int) -> bool:
        return any(k.most_rows(samples) < own for k, own in zip(kinds, rows, strict=True))

    return _memory_of_samples(kinds, greatest(_most_samples(kinds), lambda one: lacks(one - 1)))


def _most_samples(kinds: Sequence[RowKind]) -> int:
    return max((rows for kind in kinds for rows in kind.tables.values()), default=0)


def _memory_of_samples(kinds: Sequence[RowKind], samples: int) -> int:
    stores = ((kind.most_rows(samples), kind.row_bytes, kind.records) for kind in kinds)
    return sum(memory_of(*store) for store in stores)


def greatest(limit: int, holds: Callable[[int], bool]) -> int:
    """Returns the greatest number up to `limit` for which it holds, as for all smaller; or 0."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
