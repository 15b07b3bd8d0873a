"""Tables in a store: their rows in memory, their bytes on disk, and the memory for a batch."""

from dataclasses import dataclass
from operator import le

from dlrm.distributed.placement import Placement
from dlrm.model.config import FUSED_TYPES, DLRMConfig
from dlrm.store.config import bytes_of, shown
from dlrm.store.memory import RowKind, least_memory, memory_of, slots_of
from dlrm.store.native import native_store


@dataclass(frozen=True)
class StoredTables:
    """The tables of a process, of which `memory` has room for a part.

    Attributes:
        kinds: the tables of each width, which have stores of their own.
        memory: the value of `--table_memory`.
    """

    kinds: tuple[RowKind, ...]
    memory: str

    @property
    def records(self) -> int:
        """Returns the number of all rows."""
        return sum(kind.records for kind in self.kinds)

    @property
    def slots(self) -> list[int]:
        """Returns the number of rows of each kind in memory."""
        return slots_of(self.kinds, bytes_of(self.memory))

    @property
    def bytes_beside(self) -> int:
        """Returns the bytes of memory besides those of rows and states."""
        pairs = zip(self.slots, self.kinds, strict=True)
        return sum(
            memory_of(slots, kind.row_bytes, kind.records) - slots * kind.row_bytes
            for slots, kind in pairs
        )

    @property
    def disk_bytes(self) -> int:
        """Returns the bytes of the files with all rows."""
        return sum(native_store().file_bytes(kind.row_bytes, kind.records) for kind in self.kinds)

    def check_batch(self, flag: str, samples: int, trained: int = 0) -> None:
        """Refuses batches, of one id per field, that may need more rows than fit in memory.

        Args:
            trained: batch size of the training during which these batches are tested, or 0.

        Raises:
            ValueError: a batch may; the message proposes a memory size and a batch size.
        """

        def needed(samples: int) -> list[int]:
            found = []
            for kind in self.kinds:
                own, held = kind.most_rows(samples), kind.most_rows(trained)
                # The training's batch stays in memory, and those ahead where half is left to
                # others.
                found.append(min(own + min(max(own, held), 3 * held), kind.records))
            return found

        def fits(samples: int) -> bool:
            return all(map(le, needed(samples), slots))

        slots, most = self.slots, needed(samples)
        if fits(samples):
            return
        smaller = 0
        for step in (1 << k for k in range(samples.bit_length(), -1, -1)):
            if fits(smaller + step):
                smaller += step
        beside = ", beside the training's," if trained else ""
        lacking = next(i for i, own in enumerate(slots) if own < most[i])
        of_width = f" of width {self.kinds[lacking].dim}" if len(slots) > 1 else ""
        least = shown(least_memory(self.kinds, most))
        raise ValueError(
            f"--table_memory {self.memory}: {slots[lacking]:,} rows{of_width} are in memory, but a "
            f"batch of {samples:,} samples{beside} may need {most[lacking]:,}; expected at least "
            f"{least}" + (f", or {flag} {smaller}" if smaller else "")
        )


def check_storable(flag: str, config: DLRMConfig, placement: Placement) -> None:
    """Refuses tables that a store cannot hold.

    Args:
        flag: the flag that asks for the store, with its value.

    Raises:
        ValueError: the tables are not fused, or are divided or copied.
    """
    if config.embedding_type not in FUSED_TYPES:
        raise ValueError(f"{flag} needs --embedding_type joint_fused, got {config.embedding_type}")
    if not placement.is_whole:
        raise ValueError(
            f"{flag}: expected whole tables, but --placement {config.placement} divides or "
            "copies tables; use --placement balanced"
        )
