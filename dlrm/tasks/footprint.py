"""Checks, before any table is made, that a model's tables fit in memory, and proposes what fits."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from dlrm.distributed import World, agreed, gather
from dlrm.distributed.placement import Placement
from dlrm.model.tables.placement import AUTO, PLACEMENTS
from dlrm.tasks.planning.changes import smaller_dim, smaller_optimizer, smaller_tables, stored
from dlrm.tasks.planning.machines import MACHINES
from dlrm.tasks.planning.planner import Limits, plan_placement
from dlrm.tasks.planning.workload import Workload, table_bytes

GIB = 2**30
_ANY = MACHINES["cpu"]  # bytes depend on no constant of a machine


@dataclass(frozen=True)
class Memory:
    """Memory of a device or a machine, in which processes keep their tables.

    Attributes:
        name: name for messages.
        place: identifies the memory; processes that share it have the same value.
        free: free bytes.
        total: bytes in all.
    """

    name: str
    place: str
    free: int
    total: int


def agree_that_tables_fit(
    workload: Workload,
    world: World,
    host: Memory | None,
    fixed: Collection[str] = (),
    placement: Placement | None = None,
) -> None:
    """Checks the memory of every process's device, if known; all processes call it together.

    Args:
        world: the processes, none of which has made a table yet.
        host: memory of this process's machine; None if unknown.
        fixed: settings not to propose, see `alternatives`.
        placement: placement of the tables; None follows the configuration.

    Raises:
        ValueError: too little is free for the tables of a process; the message has the numbers and
            proposes what would fit.
    """
    device = host
    if world.device != "cpu":
        device = Memory(world.device, f"rank {world.rank}", *torch.cuda.mem_get_info(world.device))
    everyone = gather((device, host), world)
    devices = [theirs for theirs, _ in everyone if theirs is not None]
    hosts = [theirs for _, theirs in everyone if theirs is not None]
    if len(devices) < world.size:
        return
    if world.device == "cpu":
        fixed = {*fixed, "processes", "base_device"}
    elif len(hosts) < world.size:
        fixed = {*fixed, "base_device"}
    with agreed(world, ValueError):
        check_tables_fit(workload, devices, hosts, fixed, placement)


def check_tables_fit(
    workload: Workload,
    devices: Sequence[Memory],
    hosts: Sequence[Memory],
    fixed: Collection[str] = (),
    placement: Placement | None = None,
) -> None:
    """Does the same as `agree_that_tables_fit`, given the memory of all devices and machines."""
    config, optimizer = workload.config, workload.optimizer
    placement = placement or config.placed(len(devices))
    short = _shortage(placement, workload, devices)
    if short is None:
        return
    memory, needed = short
    ranks = [rank for rank, other in enumerate(devices) if other.place == memory.place]
    held = table_bytes(placement, workload)
    weights = sum(held[rank].weights for rank in ranks)
    rows = weights // replace(workload, optimizer=None).row_bytes
    named = (
        f" (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})" if len(devices) > 1 else ""
    )
    beside = " and a wide weight" if config.wide else ""
    parts = f"{rows:,} rows of {config.embedding_dim} values{beside}"
    if config.has_narrow_tables:
        parts = f"{weights // 4:,} values of tables of {min(config.table_dims)} columns and more"
    if needed > weights:
        state = f"{_shown(needed - weights)} of {optimizer}'s state"
        parts = f"{_shown(weights)} of {parts} and {state}"
    if config.placement not in PLACEMENTS:  # a file for these tables and processes
        fixed = {*fixed, "embedding_dim", "max_table_size", "processes"}
    fitting = "; ".join(alternatives(workload, devices, hosts, fixed))
    raise ValueError(
        f"the embedding tables need {_shown(needed)} on {memory.name}{named}, where "
        f"{_shown(memory.free)} of {_shown(memory.total)} are free: {parts}. "
        + (f"What fits: {fitting}" if fitting else "No other value of one flag makes them fit")
    )


def alternatives(
    workload: Workload,
    devices: Sequence[Memory],
    hosts: Sequence[Memory],
    fixed: Collection[str] = (),
) -> Iterator[str]:
    """Yields flags with which the tables would fit, each with the smallest change that does.

    They leave a tenth of the free memory to the rest of the model and to a batch's activations.

    Args:
        devices: memory of each process's device.
        hosts: memory of each process's machine.
        fixed: settings to keep, among "embedding_dim", "embedding_optimizer", "max_table_size",
            "processes", "table_store" and "base_device".
    """
    devices = [replace(memory, free=memory.free * 9 // 10) for memory in devices]
    hosts = [replace(memory, free=memory.free * 9 // 10) for memory in hosts]
    config, num_ranks = workload.config, len(devices)

    def fit(changed: Workload, on: Sequence[Memory] = devices) -> bool:
        return _shortage(changed.config.placed(num_ranks), changed, on) is None

    for name, change in _CHANGES.items():
        if name not in fixed:
            yield from change(workload, fit)
    if "processes" not in fixed:
        least = min(memory.free for memory in devices)
        for count in range(num_ranks + 1, len(config.embedding_rows) + 1):
            if max(map(sum, table_bytes(config.placed(count), workload))) <= least:
                yield f"{count} processes with a GPU like this each (torchrun)"
                break
    if num_ranks > 1 and config.placement != AUTO:
        planned = plan_placement(workload, Limits(num_ranks), _ANY)
        if _shortage(planned, workload, devices) is None:
            yield f"--placement {AUTO}"
    if "table_store" not in fixed and [*devices] == [*hosts]:  # GPUs have no store
        sharing = Counter(memory.place for memory in devices)
        each = min(memory.free // sharing[memory.place] for memory in devices)
        yield from stored(workload, config.placed(num_ranks), each)
    if "base_device" not in fixed and fit(workload, hosts):
        yield "--base_device cpu"


_CHANGES = {
    "embedding_dim": smaller_dim,
    "embedding_optimizer": smaller_optimizer,
    "max_table_size": smaller_tables,
}


def _shortage(
    placement: Placement, workload: Workload, devices: Sequence[Memory]
) -> tuple[Memory, int] | None:
    """Returns the first memory with too little free, and the bytes needed there."""
    needed: dict[str, int] = {}
    for memory, held in zip(devices, table_bytes(placement, workload), strict=True):
        needed[memory.place] = needed.get(memory.place, 0) + sum(held)
    return next(((m, needed[m.place]) for m in devices if needed[m.place] > m.free), None)


def _shown(size: int) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.2f} MiB"
