"""Description of a plan: pieces, memory, traffic and time of each rank, and what would fit."""

from collections.abc import Iterator, Sequence

from dlrm.command_line import aligned
from dlrm.distributed.placement import Placement
from dlrm.store.config import shown
from dlrm.tasks.planning.costs import costs, step_seconds
from dlrm.tasks.planning.machines import Machine
from dlrm.tasks.planning.planner import Limits, changes_that_fit, shortage
from dlrm.tasks.planning.workload import Workload, least_of_batch, stored_tables

_GB = 10**9


def report(
    placement: Placement, workload: Workload, limits: Limits, machine: Machine
) -> Iterator[str]:
    """Yields the lines of a plan's description."""
    found = costs(placement, workload, machine)
    yield _of_tables(placement, workload)
    kinds = ("weights", "state", "dense", "activations", "buffers", "runtime", "total")
    rows = [
        [
            str(rank),
            str(cost.pieces),
            *(_gb(getattr(cost.memory, kind)) for kind in kinds),
            f"{cost.sent / 1e6:,.1f}",
            f"{cost.seconds.total * 1e3:,.2f}",
        ]
        for rank, cost in enumerate(found)
    ]
    yield "Predicted, in GB, MB sent a step and ms a step:"
    yield from (f"  {line}" for line in aligned(("rank", "pieces", *kinds, "sent", "step"), rows))
    tables = [cost.memory.tables for cost in found]
    mean = sum(tables) / len(tables)
    yield (
        f"tables: the largest rank holds {max(tables) / mean:.2f} times the mean"
        if mean
        else ("tables: none")
    )
    slowest = max(found, key=lambda cost: cost.seconds.total)
    parts = slowest.seconds
    yield (
        f"step: {step_seconds(found) * 1e3:,.2f} ms, "
        f"{workload.batch_size / step_seconds(found):,.0f} samples/s, bound by {parts.bound} "
        f"(look-ups and updates {parts.look_ups * 1e3:,.2f}, products {parts.products * 1e3:,.2f}, "
        f"exchange {parts.exchange * 1e3:,.2f}, other {parts.other * 1e3:,.2f} ms)"
    )
    yield from _of_store(placement, workload)
    yield f"predicted from the constants of {machine.name!r}: {machine.source}"
    yield from _verdict(placement, workload, limits, machine)


def _of_tables(placement: Placement, workload: Workload) -> str:
    by_table: dict[int, list] = {}
    for piece in placement.pieces:
        by_table.setdefault(piece.table, []).append(piece)
    kinds: dict[str, list[int]] = {"whole": [], "copied": [], "in columns": [], "in rows": []}
    for table, pieces in by_table.items():
        if all(piece.replicated for piece in pieces):
            kinds["copied"].append(table)
        elif not all(piece.has_all_rows for piece in pieces):
            kinds["in rows"].append(table)
        else:
            whole = all(piece.is_whole for piece in pieces)
            kinds["whole" if whole else "in columns"].append(table)
    rows, columns = sum(placement.table_rows), sorted({*placement.columns})
    dims = " to ".join(map(str, columns if len(columns) < 2 else (columns[0], columns[-1])))
    counted = ", ".join(f"{len(tables)} {kind}" for kind, tables in kinds.items() if tables)
    return (
        f"{len(placement.table_rows)} tables of {rows:,} rows x {dims}: {counted}; "
        f"{workload.optimizer or 'no optimizer'}, batch {workload.batch_size:,}, "
        f"{placement.num_ranks} rank{'s' * (placement.num_ranks > 1)}"
    )


def _of_store(placement: Placement, workload: Workload) -> Iterator[str]:
    if workload.table_memory is None:
        return
    least = 0
    for rank in range(placement.num_ranks):
        own = stored_tables(placement, rank, workload)
        least = max(least, least_of_batch(placement, rank, workload))
        yield (
            f"store of rank {rank}: {sum(own.slots):,} of {own.records:,} rows in memory, "
            f"{_gb(own.disk_bytes)} GB on disk and as much again, at most, for each kept checkpoint"
        )
    yield f"store: a batch's rows need --table_memory {shown(least)} at most; reads are not timed"


def _verdict(
    placement: Placement, workload: Workload, limits: Limits, machine: Machine
) -> Iterator[str]:
    if limits.memory is None:
        return
    lacking = shortage(placement, workload, limits, machine)
    if not lacking:
        yield f"fits in {_gb(limits.memory)} GB a rank"
        return
    yield f"does not fit: the fullest rank lacks {_gb(lacking)} of {_gb(limits.memory)} GB"
    changes: Sequence[str] = list(changes_that_fit(workload, limits, machine))
    yield "what would: " + ("; ".join(changes) if changes else "no change of one flag")


def _gb(size: int) -> str:
    return f"{size / _GB:,.2f}"
