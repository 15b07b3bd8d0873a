"""Tables in a store: their rows in memory, their bytes on disk, and the memory for a batch."""

from dataclasses import dataclass

from dlrm.distributed.placement import Placement
from dlrm.model.config import FUSED_TYPES, DLRMConfig
from dlrm.store.config import bytes_of, shown
from dlrm.store.memory import memory_of, slots_within
from dlrm.store.native import native_store


@dataclass(frozen=True)
class StoredTables:
    """The tables of a process, of which `memory` has room for a part.

    Attributes:
        rows: rows of each table.
        row_bytes: bytes of a row and its optimizer's state.
        memory: the value of `--table_memory`.
        fields: fields of each table; empty is one each.
    """

    rows: tuple[int, ...]
    row_bytes: int
    memory: str
    fields: tuple[int, ...] = ()

    @property
    def records(self) -> int:
        """Returns the number of all rows."""
        return sum(self.rows)

    @property
    def slots(self) -> int:
        """Returns the number of rows in memory."""
        return slots_within(bytes_of(self.memory), self.row_bytes, self.records)

    @property
    def bytes_beside(self) -> int:
        """Returns the bytes of memory besides those of rows and states."""
        taken = memory_of(self.slots, self.row_bytes, self.records)
        return taken - self.slots * self.row_bytes

    @property
    def disk_bytes(self) -> int:
        """Returns the bytes of the file with all rows."""
        return native_store().file_bytes(self.row_bytes, self.records)

    def least(self, batch_rows: int) -> int:
        """Returns the bytes of memory that this many rows need."""
        return memory_of(batch_rows, self.row_bytes, self.records)

    def check_batch(self, flag: str, samples: int, trained: int = 0) -> None:
        """Refuses batches, of one id per field, that may need more rows than fit in memory.

        Args:
            flag: the flag that sets the batch size.
            samples: samples of the largest batch.
            trained: batch size of the training during which these batches are tested, or 0.

        Raises:
            ValueError: a batch may; the message proposes a memory size and a batch size.
        """
        held = most_rows(self.rows, trained, self.fields)

        def needed(samples: int) -> int:
            own = most_rows(self.rows, samples, self.fields)
            # The training's batch stays in memory, and those ahead where half is left to others.
            return min(own + min(max(own, held), 3 * held), self.records)

        slots, most = self.slots, needed(samples)
        if most <= slots:
            return
        smaller = 0
        for step in (1 << k for k in range(samples.bit_length(), -1, -1)):
            if needed(smaller + step) <= slots:
                smaller += step
        beside = ", beside the training's," if trained else ""
        raise ValueError(
            f"--table_memory {self.memory}: {slots:,} rows are in memory, but a batch of "
            f"{samples:,} samples{beside} may need {most:,}; expected at least "
            f"{shown(self.least(most))}" + (f", or {flag} {smaller}" if smaller else "")
        )


def most_rows(rows: tuple[int, ...], ids: float, fields: tuple[int, ...] = ()) -> int:
    """Returns the most rows that a batch with this many ids of each table's fields may need."""
    each = fields or (1,) * len(rows)
    return sum(min(count, int(ids * own)) for count, own in zip(rows, each, strict=True))


def check_storable(flag: str, config: DLRMConfig, placement: Placement) -> None:
    """Refuses tables that a store cannot hold.

    Args:
        flag: the flag that asks for the store, with its value.
        config: the architecture.
        placement: placement of the tables.

    Raises:
        ValueError: the tables are not fused, or are divided or copied.
    """
    if config.embedding_type not in FUSED_TYPES:
        raise ValueError(f"{flag} needs --embedding_type joint_fused, got {config.embedding_type}")
    if config.has_narrow_tables:
        raise ValueError(
            f"{flag}: expected tables of one width, but fields of the dataset have an "
            "embedding_dim of their own (embedding_dim in the schema), and a store has records of "
            "one size"
        )
    if not placement.is_whole:
        raise ValueError(
            f"{flag}: expected whole tables, but --placement {config.placement} divides or "
            "copies tables; use --placement balanced"
        )
