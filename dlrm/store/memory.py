"""Memory that a store takes, by its slots."""

_SLOT_BYTES = 17  # besides a row: its record and its users
_PLACE_BYTES = 12  # of the map from records to slots
_BUFFERS = 16 << 20  # buffers of reads and writes, and the threads' stacks


def memory_of(slots: int, row_bytes: int, records: int) -> int:
    """Returns the bytes of memory that a store takes.

    Args:
        slots: rows in memory.
        row_bytes: bytes of a row and its optimizer's state.
        records: rows in all.
    """
    places = 1 << max((2 * slots - 1).bit_length(), 4)
    return slots * (row_bytes + _SLOT_BYTES) + places * _PLACE_BYTES + records // 8 + _BUFFERS


def slots_within(memory: int, row_bytes: int, records: int) -> int:
    """Returns the most slots whose store takes no more than `memory` bytes."""
    low, high = 0, records
    while low < high:
        middle = (low + high + 1) // 2
        fits = memory_of(middle, row_bytes, records) <= memory
        low, high = (middle, high) if fits else (low, middle - 1)
    return low
