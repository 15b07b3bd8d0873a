"""Checks, before any table is made, that a model's tables fit in memory."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dlrm.distributed import World, agreed, gather
from dlrm.distributed.placement import Placement, Shard
from dlrm.machine import host_memory, machine
from dlrm.model.config import DLRMConfig
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.optim.row_optimizers import TABLE_OPTIMIZERS

_GIB = 2**30


class Memory(NamedTuple):
    """Memory of a device or a machine: its name, and its free and total bytes.

    Processes that share it have the same `place`.
    """

    name: str
    place: str
    free: int
    total: int


@dataclass(frozen=True)
class Footprint:
    """The bytes of a model's tables.

    Attributes:
        optimizers: the optimizers of a training; None without one.
        samples: samples that are computed at a time, all processes together.
    """

    config: DLRMConfig
    optimizers: OptimizerConfig | None = None
    samples: int = 0

    @property
    def batch(self) -> int:
        """Returns a lower bound on the bytes of a batch: its looked-up rows, in 16 bits or more."""
        return self.samples * len(self.config.table_sizes) * 2 * self.config.embedding_dim

    def of(self, shards: Iterable[Shard]) -> tuple[int, int]:
        """Returns the bytes of values, with wide weights, and those of the optimizer's state."""
        rows, chosen = sum(shard.num_rows for shard in shards), self.optimizers
        dims = [self.config.embedding_dim] + [1] * self.config.wide
        values = rows * 4 * sum(dims)
        if chosen is None or chosen.freeze_embeddings:
            return values, 0
        l2_of_all = bool(chosen.embedding_l2) and chosen.embedding_l2_mode == "all"
        state_bytes = TABLE_OPTIMIZERS[chosen.embedding_optimizer].state_bytes
        return values, sum(state_bytes(rows, dim, l2_of_all) for dim in dims)


def agree_that_tables_fit(footprint: Footprint, placement: Placement, world: World) -> None:
    """Checks the memory of every process's device, if known; all processes call it together.

    Args:
        placement: placement of the tables, none of which is made yet.

    Raises:
        ValueError: too little is free for the tables of a process; the message has the numbers.
    """
    everyone = gather(_memory(world), world)
    devices = [memory for memory in everyone if memory is not None]
    if len(devices) == world.size:
        with agreed(world, ValueError):
            check_tables_fit(footprint, placement, devices)


def _memory(world: World) -> Memory | None:
    """Returns the memory of this process's device, or None if it is unknown."""
    if world.device != "cpu":
        found = torch.cuda.mem_get_info(world.device)
        return Memory(world.device, f"rank {world.rank}", *found)
    return Memory("the host", machine(), *memory) if (memory := host_memory()) else None


def check_tables_fit(footprint: Footprint, placement: Placement, devices: Sequence[Memory]) -> None:
    """Does the same as `agree_that_tables_fit`, given the memory of every process's device."""
    held = [footprint.of(placement.of_rank(rank)) for rank in range(placement.num_ranks)]
    for memory in {device.place: device for device in devices}.values():
        ranks = [rank for rank, device in enumerate(devices) if device.place == memory.place]
        values, state = (sum(held[rank][i] for rank in ranks) for i in (0, 1))
        batch = footprint.batch * len(ranks) // len(devices)
        tables_fit = values + state <= memory.free
        if values + state + batch <= memory.free:
            continue
        of_ranks = f" (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})"
        of_state = f", {_shown(state)} of it the optimizer's state" if state else ""
        of_batch = f" and a batch {_shown(batch)} or more" if tables_fit else ""
        raise ValueError(
            f"the embedding tables need {_shown(values + state)} on {memory.name}"
            f"{of_ranks if len(devices) > 1 else ''}{of_state}{of_batch}, and "
            f"{_shown(memory.free)} of {_shown(memory.total)} are free. Smaller: "
            f"{'--batch_size, ' if tables_fit else ''}--embedding_dim, --embedding_optimizer sgd, "
            "--hash_indices with --max_table_size, more processes"
            f"{', or --table_files DIR' if memory.name == 'the host' else ''}"
        )


def _shown(size: int) -> str:
    return f"{size / _GIB:,.2f} GiB" if size >= _GIB / 10 else f"{size / 2**20:,.2f} MiB"
