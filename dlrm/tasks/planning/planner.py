"""Chooses the placement of tables: their pieces, the pieces' ranks, and copies on all ranks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dlrm.data.clicks.batch import ClickDataset
from dlrm.distributed.placement import Piece, Placement
from dlrm.model.config import FUSED_TYPES
from dlrm.tasks.planning.changes import (
    smaller_batch,
    smaller_dim,
    smaller_optimizer,
    smaller_tables,
    stored,
)
from dlrm.tasks.planning.costs import costs, step_seconds
from dlrm.tasks.planning.machines import Machine
from dlrm.tasks.planning.workload import Workload, table_bytes

EVEN = 1.1  # the largest rank's bytes over the mean; a lower ratio is not worth slower steps
_NARROWEST = 16  # columns of a piece: a cache line of float32
_RANKS_TRIED = 20
_MOST_RANKS = 512
_PATIENCE = 6  # divisions in a row without improvement


@dataclass(frozen=True)
class Limits:
    """Constraints of a placement.

    Attributes:
        num_ranks: processes.
        memory: bytes that each may use; None is unlimited.
        fixed_shapes: no rank's transfers may depend on the ids, as in a CUDA graph.
    """

    num_ranks: int
    memory: int | None = None
    fixed_shapes: bool = False


def plan_placement(workload: Workload, limits: Limits, machine: Machine) -> Placement:
    """Returns the placement with the least predicted step time of those that fit and are even.

    It divides tables, first the heaviest on the fullest rank, as long as that makes ranks fit,
    more even or faster: by columns, and by rows if there are few columns or the optimizer needs
    whole rows. It copies small tables if that is faster.
    """
    best: tuple[tuple, Placement] | None = None
    for replicated in _copies(workload, limits):
        parts = dict.fromkeys(range(len(workload.config.embedding_rows)), 1)
        waited = 0
        while waited <= _PATIENCE:
            placement = _dealt(workload, limits, replicated, parts)
            score = _score(placement, workload, limits, machine)
            if best is None or score < best[0]:
                best, waited = (score, placement), 0
            else:
                waited += 1
            table = _heaviest(placement, workload, limits, parts)
            if table is None:
                break
            parts[table] = min(2 * parts[table], limits.num_ranks)
    assert best is not None
    return best[1]


def mean_ids(data: ClickDataset) -> tuple[float, ...] | None:
    """Returns the average number of ids of a sample in each field, in the first batch.

    None is one id in each, or no batch.
    """
    if data.one_id_each or not len(data):
        return None
    lengths = data.batch(0).lengths
    assert lengths is not None
    return tuple(lengths.double().mean(0).tolist())


def divisible(workload: Workload) -> frozenset[int]:
    """Returns the tables that may be divided and copied: none in a store, and no attended ones."""
    config = workload.config
    if config.embedding_type not in FUSED_TYPES or workload.table_memory is not None:
        return frozenset()
    attended = {config.tables[field] for field in config.attended}
    return frozenset(range(len(config.embedding_rows))) - attended


def _copies(workload: Workload, limits: Limits) -> Iterator[frozenset[int]]:
    """Yields the sets of tables to try as copies."""
    yield frozenset()
    rows = workload.config.embedding_rows
    samples = workload.batch_size // limits.num_ranks
    if limits.num_ranks > 1 and not limits.fixed_shapes:
        for limit in (samples // 64, samples // 8):
            small = frozenset(table for table in divisible(workload) if rows[table] <= limit)
            if small:
                yield small


def _score(placement: Placement, workload: Workload, limits: Limits, machine: Machine) -> tuple:
    """Returns a key to minimize: misfit, then unevenness, then time."""
    found = costs(placement, workload, machine)
    totals = [cost.memory.total for cost in found]
    tables = [cost.memory.tables for cost in found]
    mean = sum(tables) / len(tables)
    short = max(0, max(totals) - limits.memory) if limits.memory is not None else 0
    uneven = max(EVEN, max(tables) / mean) if mean else EVEN
    return short, round(uneven, 3), step_seconds(found)


class _Load(NamedTuple):
    """The load that a piece adds to a rank, as shares of the mean."""

    bytes: float
    seconds: float


def _dealt(
    workload: Workload, limits: Limits, replicated: frozenset[int], parts: dict[int, int]
) -> Placement:
    """Divides tables and deals the pieces, heaviest first, to the rank with the least load."""
    config = workload.config
    pieces = [
        piece
        for table in range(len(config.embedding_rows))
        for piece in _pieces(workload, table, 1 if table in replicated else parts[table])
    ]
    weigh = _weigh(workload, limits, [p for p in pieces if p.table not in replicated])
    ranks = range(limits.num_ranks)
    loads, tables = [_Load(0, 0)] * limits.num_ranks, [set() for _ in ranks]  # type: ignore[var-annotated]
    placed = [piece._replace(rank=None) for piece in pieces if piece.table in replicated]
    for piece in sorted(
        (p for p in pieces if p.table not in replicated), key=lambda p: (-max(weigh(p)), p[:3])
    ):
        own = weigh(piece)
        free = (rank for rank in ranks if piece.table not in tables[rank])
        rank = min(
            free,
            key=lambda r: (
                max(loads[r].bytes + own.bytes, loads[r].seconds + own.seconds),
                sum(loads[r]),
                r,
            ),
        )
        loads[rank] = _Load(loads[rank].bytes + own.bytes, loads[rank].seconds + own.seconds)
        tables[rank].add(piece.table)
        placed.append(piece._replace(rank=rank))
    shape = config.embedding_rows, config.embedding_dim, limits.num_ranks
    return Placement(*shape, tuple(placed), config.table_dims)


def _weigh(workload: Workload, limits: Limits, pieces: Sequence[Piece]) -> Callable[[Piece], _Load]:
    ids, vectors = workload.ids_of_tables, workload.vectors_of_tables

    def bytes_of(piece: Piece) -> float:
        return piece.num_bytes(workload.state_bytes)

    def seconds_of(piece: Piece) -> float:
        share = piece.num_rows / max(piece.shape[0], 1)
        looked_up = vectors[piece.table] + ids[piece.table] * share
        return looked_up * (_NARROWEST + piece.width)

    all_bytes = sum(map(bytes_of, pieces)) / limits.num_ranks or 1
    all_seconds = sum(map(seconds_of, pieces)) / limits.num_ranks or 1
    return lambda piece: _Load(bytes_of(piece) / all_bytes, seconds_of(piece) / all_seconds)


def _pieces(workload: Workload, table: int, parts: int) -> list[Piece]:
    """Divides a table into equal parts, which have no ranks yet."""
    rows, dim = workload.config.embedding_rows[table], workload.config.table_dims[table]
    by_columns = parts <= _most_columns(workload, table)
    edges = (
        [_NARROWEST * (dim // _NARROWEST * i // parts) for i in range(parts)] + [dim]
        if by_columns and parts > 1
        else [rows * i // parts for i in range(parts + 1)]
    )
    whole = Piece(table, (0, rows), (0, dim), 0, (rows, dim))
    if parts == 1:
        return [whole]
    ranges = zip(edges, edges[1:], strict=False)
    if by_columns:
        return [whole._replace(columns=columns) for columns in ranges]
    return [whole._replace(rows=own) for own in ranges]


def _most_columns(workload: Workload, table: int) -> int:
    """Returns the greatest number of column pieces of a table."""
    if workload.optimizer == "row_wise_adagrad":
        return 1
    return max(workload.config.table_dims[table] // _NARROWEST, 1)


def _heaviest(
    placement: Placement, workload: Workload, limits: Limits, parts: dict[int, int]
) -> int | None:
    """Returns the table to divide next: the heaviest on the fullest rank that can be divided."""
    able = divisible(workload)
    held = [piece for piece in placement.pieces if not piece.replicated]
    weigh = _weigh(workload, limits, held)
    fullest: dict[int, list[float]] = {rank: [0.0, 0.0] for rank in range(limits.num_ranks)}
    for piece in held:
        assert piece.rank is not None
        for i, share in enumerate(weigh(piece)):
            fullest[piece.rank][i] += share
    may = [
        piece
        for piece in held
        for by_columns in (_most_columns(workload, piece.table),)
        if piece.table in able
        and parts[piece.table] < limits.num_ranks
        and (2 * parts[piece.table] <= by_columns or not limits.fixed_shapes)
        and (parts[piece.table] < by_columns or piece.num_rows >= limits.num_ranks)
    ]
    rank = max(fullest, key=lambda r: max(fullest[r]))
    kind = int(fullest[rank][1] > fullest[rank][0])
    own = [piece for piece in may if piece.rank == rank] or may
    if not own:
        return None
    return max(own, key=lambda piece: (weigh(piece)[kind], -piece.table)).table


def shortage(placement: Placement, workload: Workload, limits: Limits, machine: Machine) -> int:
    """Returns the bytes that the fullest rank lacks, or 0."""
    if limits.memory is None:
        return 0
    return max(
        max(cost.memory.total for cost in costs(placement, workload, machine)) - limits.memory, 0
    )


def changes_that_fit(workload: Workload, limits: Limits, machine: Machine) -> Iterator[str]:
    """Yields, for each kind of change, the smallest with which the tables would fit."""

    def fits(changed: Workload, changed_limits: Limits = limits) -> bool:
        placement = plan_placement(changed, changed_limits, machine)
        return not shortage(placement, changed, changed_limits, machine)

    assert limits.memory is not None
    whole = replace(workload.config, placement="balanced").placed(1)
    cost = costs(whole, workload, machine)[0].memory
    left = limits.memory - cost.runtime - cost.dense
    if left <= 0:
        return  # no table would fit, however small
    ranks = max(limits.num_ranks + 1, -(-cost.tables // left))
    for _ in range(_RANKS_TRIED):
        if ranks <= _MOST_RANKS and fits(workload, replace(limits, num_ranks=ranks)):
            yield f"--ranks {ranks}"
            break
        ranks += -(-ranks // 16)
    for change in (smaller_optimizer, smaller_dim, smaller_tables):
        yield from change(workload, fits)
    yield from smaller_batch(workload, fits, limits.num_ranks)
    if machine.has_store:
        little = replace(workload, table_memory="1")  # no rows
        placement = plan_placement(little, limits, machine)
        tables = table_bytes(placement, little)
        used = [one.memory.total for one in costs(placement, little, machine)]
        most = max(total - own.beside for total, own in zip(used, tables, strict=True))
        yield from stored(workload, placement, limits.memory - most)
