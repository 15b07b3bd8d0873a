"""Whether a model's tables fit in the memory there is, asked before any is made, and what would."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from dlrm.distributed import World, agreed, gather
from dlrm.model.dlrm import FUSED_TYPES, DLRMConfig

GIB = 2**30


@dataclass(frozen=True)
class Room:
    """Memory that processes put their tables in.

    Attributes:
        name: for messages.
        place: tells it from other memory; processes that share it name the same.
        free: bytes that are left.
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
    host: Room | None,
    fixed: Collection[str] = (),
) -> None:
    """Checks the memory of every process's device, all processes together.

    Args:
        config: the architecture.
        optimizer: of the tables, see `TABLE_OPTIMIZERS`; None where they are not trained.
        world: the processes, none of which has made a table yet.
        host: memory of this process's machine; None where that is unknown.
        fixed: what is not to be proposed, see `alternatives`.

    Raises:
        ValueError: too little is free for the tables of a process; how much, and what would fit.
        OtherRankError: another rank raises it.
    """
    room = host
    if world.device != "cpu":
        room = Room(world.device, f"rank {world.rank}", *torch.cuda.mem_get_info(world.device))
    everyone = gather((room, host), world)
    rooms = [theirs for theirs, _ in everyone if theirs is not None]
    hosts = [theirs for _, theirs in everyone if theirs is not None]
    if len(rooms) < world.size:
        return
    if world.device == "cpu":
        fixed = {*fixed, "processes", "base_device"}
    elif len(hosts) < world.size:
        fixed = {*fixed, "base_device"}
    with agreed(world, ValueError):
        check_tables_fit(config, optimizer, rooms, hosts, fixed)


def check_tables_fit(
    config: DLRMConfig,
    optimizer: str | None,
    rooms: Sequence[Room],
    hosts: Sequence[Room],
    fixed: Collection[str] = (),
) -> None:
    """As `agree_that_tables_fit`, with the memory of every process's device and machine at hand."""
    short = _shortage(config, optimizer, rooms)
    if short is None:
        return
    room, needed = short
    ranks = [rank for rank, other in enumerate(rooms) if other.place == room.place]
    rows = needed // row_bytes(config.embedding_dim, optimizer)
    weights = rows * row_bytes(config.embedding_dim, None)
    named = (
        f" (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})" if len(rooms) > 1 else ""
    )
    parts = f"{rows:,} rows of {config.embedding_dim} values"
    if needed > weights:
        state = f"{_shown(needed - weights)} of {optimizer}'s state"
        parts = f"{_shown(weights)} of {parts} and {state}"
    fitting = "; ".join(alternatives(config, optimizer, rooms, hosts, fixed))
    raise ValueError(
        f"the embedding tables need {_shown(needed)} on {room.name}{named}, where "
        f"{_shown(room.free)} of {_shown(room.total)} are free: {parts}. "
        + (f"What fits: {fitting}" if fitting else "No other value of one flag makes them fit")
    )


def row_bytes(dim: int, optimizer: str | None) -> int:
    """Returns the bytes of a table's row.

    They are those of its values in float32, be they in two halves, and of the state that an
    optimizer keeps for them, ours or torch's.

    Args:
        dim: values of a row.
        optimizer: see `TABLE_OPTIMIZERS`; None where tables are not trained.
    """
    state = {None: 0, "sgd": 0, "adagrad": 4 * dim, "row_wise_adagrad": 4, "adam": 8 * dim}
    return 4 * dim + state[optimizer]


def table_bytes(config: DLRMConfig, optimizer: str | None, num_ranks: int) -> list[int]:
    """Returns the bytes of each rank's tables, with the optimizer's state."""
    rows, each = config.embedding_rows, row_bytes(config.embedding_dim, optimizer)
    return [each * sum(rows[t] for t in tables) for tables in config.tables_by_rank(num_ranks)]


def alternatives(
    config: DLRMConfig,
    optimizer: str | None,
    rooms: Sequence[Room],
    hosts: Sequence[Room],
    fixed: Collection[str] = (),
) -> Iterator[str]:
    """Yields flags with which the tables would fit, the greatest of each that do.

    They would leave a tenth of what is free to the rest of the model and to a batch's activations.

    Args:
        config: the architecture, which does not fit.
        optimizer: of the tables, or None.
        rooms: memory of each process's device.
        hosts: memory of each process's machine.
        fixed: of "embedding_dim", "embedding_optimizer", "max_table_size", "processes" and
            "base_device", what is not to be changed.
    """
    rooms = [replace(room, free=room.free * 9 // 10) for room in rooms]
    hosts = [replace(host, free=host.free * 9 // 10) for host in hosts]
    dim, largest = config.embedding_dim, max(config.embedding_rows)
    if "embedding_dim" not in fixed:
        for size in (2**k for k in range((dim - 1).bit_length() - 1, 1, -1)):
            bottom = (*config.bottom_mlp_sizes[:-1], size)
            smaller = replace(config, embedding_dim=size, bottom_mlp_sizes=bottom)
            if _shortage(smaller, optimizer, rooms) is None:
                yield f"--embedding_dim {size} --bottom_mlp_sizes {','.join(map(str, bottom))}"
                break
    if "embedding_optimizer" not in fixed and optimizer is not None:
        row_wise = ["row_wise_adagrad"] if config.embedding_type in FUSED_TYPES else []
        for other in ("adagrad", *row_wise, "sgd"):
            less = row_bytes(dim, other) < row_bytes(dim, optimizer)
            if less and _shortage(config, other, rooms) is None:
                yield f"--embedding_optimizer {other}"
                break
    if "max_table_size" not in fixed:
        tens = range(len(str(largest)), -1, -1)
        for size in (n * 10**k for k in tens for n in range(99, 9, -1) if n * 10**k < largest):
            smaller = replace(config, hash_indices=True, max_table_size=size)
            if _shortage(smaller, optimizer, rooms) is None:
                yield f"--hash_indices --max_table_size {size}"
                break
    if "processes" not in fixed:
        least = min(rooms, key=lambda room: room.free)
        for count in range(len(rooms) + 1, len(config.table_sizes) + 1):
            if max(table_bytes(config, optimizer, count)) <= least.free:
                yield f"{count} processes with a GPU like this each (torchrun)"
                break
    if "base_device" not in fixed and _shortage(config, optimizer, hosts) is None:
        yield "--base_device cpu"


def _shortage(
    config: DLRMConfig, optimizer: str | None, rooms: Sequence[Room]
) -> tuple[Room, int] | None:
    """The first room in which too little is free, with the bytes needed there."""
    needed: dict[str, int] = {}
    for room, size in zip(rooms, table_bytes(config, optimizer, len(rooms)), strict=True):
        needed[room.place] = needed.get(room.place, 0) + size
    return next(((r, needed[r.place]) for r in rooms if needed[r.place] > r.free), None)


def _shown(size: int) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.2f} MiB"
