"""Checks, before any table is made, that a model's tables fit in memory, and proposes what fits."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from dlrm.distributed import World, agreed, gather
from dlrm.distributed.placement import Placement
from dlrm.model.config import FUSED_TYPES, DLRMConfig
from dlrm.model.tables.placement import AUTO, PLACEMENTS
from dlrm.store.config import shown
from dlrm.store.memory import slots_within
from dlrm.tasks.planning.costs import Workload, piece_bytes, row_bytes, stored_row_bytes
from dlrm.tasks.planning.machines import MACHINES
from dlrm.tasks.planning.planner import Limits, plan
from dlrm.train.optim.rows import TABLE_OPTIMIZERS

GIB = 2**30
_ANY = MACHINES["cpu"]  # memory needs depend on no constant of a machine


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
    config: DLRMConfig,
    optimizer: str | None,
    world: World,
    host: Memory | None,
    fixed: Collection[str] = (),
    placement: Placement | None = None,
) -> None:
    """Checks the memory of every process's device, if known; all processes call it together.

    Args:
        config: the architecture.
        optimizer: optimizer of the tables, see `TABLE_OPTIMIZERS`; None if they are not trained.
        world: the processes, none of which has made a table yet.
        host: memory of this process's machine; None if unknown.
        fixed: settings not to propose, see `alternatives`.
        placement: placement of the tables; None follows `config`.

    Raises:
        ValueError: too little is free for the tables of a process; the message has the numbers and
            proposes what would fit.
        OtherRankError: another rank raises it.
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
        check_tables_fit(config, optimizer, devices, hosts, fixed, placement)


def check_tables_fit(
    config: DLRMConfig,
    optimizer: str | None,
    devices: Sequence[Memory],
    hosts: Sequence[Memory],
    fixed: Collection[str] = (),
    placement: Placement | None = None,
) -> None:
    """Does the same as `agree_that_tables_fit`, given the memory of all devices and machines."""
    placement = placement or config.placed(len(devices))
    short = _shortage(placement, config, optimizer, devices)
    if short is None:
        return
    memory, needed = short
    ranks = [rank for rank, other in enumerate(devices) if other.place == memory.place]
    of_weights = piece_bytes(placement, None, config.wide)
    weights = sum(of_weights[rank] for rank in ranks)
    rows = weights // (row_bytes(config.embedding_dim, None) + 4 * config.wide)
    named = (
        f" (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})" if len(devices) > 1 else ""
    )
    beside = " and a wide weight" if config.wide else ""
    parts = f"{rows:,} rows of {config.embedding_dim} values{beside}"
    if needed > weights:
        state = f"{_shown(needed - weights)} of {optimizer}'s state"
        parts = f"{_shown(weights)} of {parts} and {state}"
    if config.placement not in PLACEMENTS:  # a file for these tables and processes
        fixed = {*fixed, "embedding_dim", "max_table_size", "processes"}
    fitting = "; ".join(alternatives(config, optimizer, devices, hosts, fixed))
    raise ValueError(
        f"the embedding tables need {_shown(needed)} on {memory.name}{named}, where "
        f"{_shown(memory.free)} of {_shown(memory.total)} are free: {parts}. "
        + (f"What fits: {fitting}" if fitting else "No other value of one flag makes them fit")
    )


def table_bytes(config: DLRMConfig, optimizer: str | None, num_ranks: int) -> list[int]:
    """Returns the bytes of each rank's tables, with the optimizer's state."""
    return piece_bytes(config.placed(num_ranks), optimizer, config.wide)


def alternatives(
    config: DLRMConfig,
    optimizer: str | None,
    devices: Sequence[Memory],
    hosts: Sequence[Memory],
    fixed: Collection[str] = (),
) -> Iterator[str]:
    """Yields flags with which the tables would fit, each with the smallest change that does.

    They leave a tenth of the free memory to the rest of the model and to a batch's activations.

    Args:
        config: the architecture, which does not fit.
        optimizer: optimizer of the tables, or None.
        devices: memory of each process's device.
        hosts: memory of each process's machine.
        fixed: settings to keep, among "embedding_dim", "embedding_optimizer", "max_table_size",
            "processes", "table_store" and "base_device".
    """
    devices = [replace(memory, free=memory.free * 9 // 10) for memory in devices]
    hosts = [replace(memory, free=memory.free * 9 // 10) for memory in hosts]
    if "embedding_dim" not in fixed:
        yield from _smaller_dim(config, optimizer, devices)
    if "embedding_optimizer" not in fixed and optimizer is not None:
        yield from _smaller_optimizer(config, optimizer, devices)
    if "max_table_size" not in fixed:
        yield from _smaller_tables(config, optimizer, devices)
    if "processes" not in fixed:
        least = min(memory.free for memory in devices)
        for count in range(len(devices) + 1, len(config.table_sizes) + 1):
            if max(table_bytes(config, optimizer, count)) <= least:
                yield f"{count} processes with a GPU like this each (torchrun)"
                break
    if len(devices) > 1 and config.placement != AUTO:
        planned = plan(Workload(config, len(devices), optimizer), Limits(len(devices)), _ANY)
        if _shortage(planned, config, optimizer, devices) is None:
            yield f"--placement {AUTO}"
    on_host = [*devices] == [*hosts]  # GPUs have no store
    if "table_store" not in fixed and on_host and config.embedding_type in FUSED_TYPES:
        yield from _stored(config, optimizer, devices)
    if "base_device" not in fixed and _lacks(config, optimizer, hosts) is None:
        yield "--base_device cpu"


def _smaller_dim(
    config: DLRMConfig, optimizer: str | None, devices: Sequence[Memory]
) -> Iterator[str]:
    for dim in (2**k for k in range((config.embedding_dim - 1).bit_length() - 1, 1, -1)):
        bottom = (*config.bottom_mlp_sizes[:-1], dim)
        smaller = replace(config, embedding_dim=dim, bottom_mlp_sizes=bottom)
        if _lacks(smaller, optimizer, devices) is None:
            yield f"--embedding_dim {dim} --bottom_mlp_sizes {','.join(map(str, bottom))}"
            return


def _smaller_optimizer(
    config: DLRMConfig, optimizer: str, devices: Sequence[Memory]
) -> Iterator[str]:
    size = {kind: row_bytes(config.embedding_dim, kind) for kind in TABLE_OPTIMIZERS}
    fused = config.embedding_type in FUSED_TYPES
    for kind in sorted(size, key=lambda kind: -size[kind]):
        usable = fused or TABLE_OPTIMIZERS[kind].sparse is not None
        less = usable and size[kind] < size[optimizer]
        if less and _lacks(config, kind, devices) is None:
            yield f"--embedding_optimizer {kind}"
            return


def _smaller_tables(
    config: DLRMConfig, optimizer: str | None, devices: Sequence[Memory]
) -> Iterator[str]:
    largest = max(config.embedding_rows)
    tens = range(len(str(largest)), -1, -1)
    for size in (n * 10**k for k in tens for n in range(99, 9, -1) if n * 10**k < largest):
        smaller = replace(config, hash_indices=True, max_table_size=size)
        if _lacks(smaller, optimizer, devices) is None:
            yield f"--hash_indices --max_table_size {size}"
            return


def _stored(config: DLRMConfig, optimizer: str | None, devices: Sequence[Memory]) -> Iterator[str]:
    placement, size = config.placed(len(devices)), stored_row_bytes(config, optimizer)
    if not placement.is_whole:
        return
    sharing = Counter(memory.place for memory in devices)
    each = min(memory.free // sharing[memory.place] for memory in devices)
    most = max(
        sum(piece.num_rows for piece in placement.of_rank(rank)) for rank in range(len(devices))
    )
    if slots_within(each, size, most):
        yield f"--table_memory {shown(each, round_up=False)} --table_store DIR"


def _lacks(
    config: DLRMConfig, optimizer: str | None, devices: Sequence[Memory]
) -> tuple[Memory, int] | None:
    return _shortage(config.placed(len(devices)), config, optimizer, devices)


def _shortage(
    placement: Placement, config: DLRMConfig, optimizer: str | None, devices: Sequence[Memory]
) -> tuple[Memory, int] | None:
    """Returns the first memory with too little free, and the bytes needed there."""
    needed: dict[str, int] = {}
    sizes = piece_bytes(placement, optimizer, config.wide)
    for memory, size in zip(devices, sizes, strict=True):
        needed[memory.place] = needed.get(memory.place, 0) + size
    return next(((m, needed[m.place]) for m in devices if needed[m.place] > m.free), None)


def _shown(size: int) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.2f} MiB"
