"""Costs of a placement for each rank: memory, bytes sent, and time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from dlrm.distributed import part
from dlrm.distributed.placement import Piece, Placement
from dlrm.model.config import DLRMConfig
from dlrm.tasks.planning.machines import Machine
from dlrm.tasks.planning.stored import StoredTables, most_rows
from dlrm.train.optim.dense import DENSE_OPTIMIZERS
from dlrm.train.optim.rows import TABLE_OPTIMIZERS

_ID_BYTES = 4
_BATCHES_AHEAD = 4  # read while one batch is computed


@dataclass(frozen=True)
class Workload:
    """A training whose costs are predicted.

    Attributes:
        config: the architecture; its placement is not used.
        batch_size: samples of all ranks.
        optimizer: optimizer of the tables; None if they are not trained.
        dense_optimizer: optimizer of the MLPs.
        lookups: average number of ids of a sample in each table; None is one in each.
        half: compute in half precision.
        table_memory: memory for the tables of each rank, such as "8GB"; other rows are in a store.
            None: all rows are in memory.
    """

    config: DLRMConfig
    batch_size: int
    optimizer: str | None = "sgd"
    dense_optimizer: str = "sgd"
    lookups: tuple[float, ...] | None = None
    half: bool = False
    table_memory: str | None = None

    @property
    def ids_of_tables(self) -> tuple[float, ...]:
        return self.lookups or (1.0,) * len(self.config.table_sizes)

    @property
    def value_bytes(self) -> int:
        """Returns the bytes of a value of a vector that is looked up."""
        return 2 if self.half else 4


@dataclass(frozen=True)
class Memory:
    """Bytes that a rank needs."""

    runtime: int
    weights: int
    state: int
    dense: int
    activations: int
    buffers: int

    @property
    def tables(self) -> int:
        return self.weights + self.state

    @property
    def total(self) -> int:
        return self.runtime + self.tables + self.dense + self.activations + self.buffers


@dataclass(frozen=True)
class Seconds:
    """Seconds of a rank's part of a step; the greatest bounds it."""

    look_ups: float
    products: float
    exchange: float
    other: float

    @property
    def total(self) -> float:
        return self.look_ups + self.products + self.exchange + self.other

    @property
    def bound(self) -> str:
        named = {
            "look-ups and updates": self.look_ups,
            "matrix products": self.products,
            "the exchange": self.exchange,
            "launches": self.other,
        }
        return max(named, key=lambda name: named[name])


@dataclass(frozen=True)
class RankCost:
    """Costs of a step for a rank.

    Attributes:
        pieces: pieces that it holds.
        memory: memory that it needs.
        sent: bytes that it sends to others.
        seconds: time that it takes.
    """

    pieces: int
    memory: Memory
    sent: int
    seconds: Seconds


def row_bytes(dim: int, optimizer: str | None) -> int:
    """Returns the bytes of a table's row.

    They are the bytes of its values in float32, also when stored as two 16-bit halves, and of the
    state that an optimizer, ours or torch's, keeps for them.

    Args:
        dim: values of a row.
        optimizer: see `TABLE_OPTIMIZERS`; None if tables are not trained.
    """
    state = TABLE_OPTIMIZERS[optimizer].state_bytes(1, dim) if optimizer else 0
    return 4 * dim + state


def stored_row_bytes(config: DLRMConfig, optimizer: str | None) -> int:
    """Returns the bytes of a row in a store, with its wide weight and the optimizer's state."""
    return row_bytes(config.embedding_dim, optimizer) + config.wide * row_bytes(1, optimizer)


def stored_tables(placement: Placement, rank: int, workload: Workload) -> StoredTables:
    """Returns a rank's tables in a store; the workload has a `table_memory`."""
    assert workload.table_memory is not None
    rows = tuple(piece.num_rows for piece in placement.of_rank(rank))
    size = stored_row_bytes(workload.config, workload.optimizer)
    return StoredTables(rows, size, workload.table_memory)


def most_rows_of_batch(placement: Placement, rank: int, workload: Workload) -> int:
    """Returns the most rows of a rank that a batch with the mean number of ids may need."""
    return sum(
        most_rows((piece.num_rows,), workload.batch_size * workload.ids_of_tables[piece.table])
        for piece in placement.of_rank(rank)
    )


def piece_bytes(placement: Placement, optimizer: str | None, wide: bool = False) -> list[int]:
    """Returns the bytes of each rank's pieces, with the optimizer's state.

    Args:
        placement: placement of the tables.
        optimizer: optimizer of the tables; None if they are not trained.
        wide: whether rows have a weight of the wide term, with their first columns.
    """
    if wide:
        both = piece_bytes(placement, optimizer), piece_bytes(placement.of_one_column(), optimizer)
        return [*map(sum, zip(*both, strict=True))]
    each = {width: row_bytes(width, optimizer) for width in {p.width for p in placement.pieces}}
    return [
        sum(piece.num_rows * each[piece.width] for piece in placement.of_rank(rank))
        for rank in range(placement.num_ranks)
    ]


def costs(placement: Placement, workload: Workload, machine: Machine) -> list[RankCost]:
    """Returns the predicted costs of each rank."""
    return [_cost(placement, rank, workload, machine) for rank in range(placement.num_ranks)]


def step_seconds(found: Sequence[RankCost]) -> float:
    """Returns the seconds of a step, in which all ranks wait for the slowest of each part."""
    return sum(
        max(getattr(cost.seconds, name) for cost in found)
        for name in ("look_ups", "products", "exchange", "other")
    )


def _cost(placement: Placement, rank: int, workload: Workload, machine: Machine) -> RankCost:
    own = placement.of_rank(rank)
    wide = workload.config.wide
    weights = piece_bytes(placement, None, wide)[rank]
    state = piece_bytes(placement, workload.optimizer, wide)[rank] - weights
    beside = 0
    if workload.table_memory is not None:
        stored = stored_tables(placement, rank, workload)
        weights = stored.slots * stored_row_bytes(workload.config, None)
        state = stored.slots * stored.row_bytes - weights
        beside = stored.bytes_beside
    sent, received = _traffic(placement, rank, workload)
    copies = _copied_values(placement, rank, workload)
    sent += copies * (placement.num_ranks - 1) * 4
    received += (copies * (placement.num_ranks - 1)) * 4
    memory = _memory(placement, rank, workload, machine, weights, state)
    memory = replace(memory, buffers=memory.buffers + beside)
    samples = _samples(workload, rank, placement.num_ranks)
    flops = machine.half_flops if workload.half else machine.flops
    exchange = 0.0
    if placement.num_ranks > 1:
        dense = 2 * 4 * _dense_weights(workload.config)
        collectives = 3 + any(piece.copied for piece in own) * 2
        exchange = max(sent, received) + dense
        exchange = exchange / machine.link_bandwidth + collectives * machine.link_seconds
    seconds = Seconds(
        look_ups=_row_seconds(own, samples, workload, machine),
        products=3 * samples * _flops(workload.config) / flops,
        exchange=exchange,
        other=machine.step_seconds,
    )
    return RankCost(len(own), memory, sent, seconds)


def _samples(workload: Workload, rank: int, num_ranks: int) -> int:
    own = part(workload.batch_size, rank, num_ranks)
    return own.stop - own.start


def _row_seconds(own: Sequence[Piece], samples: int, workload: Workload, machine: Machine) -> float:
    """Returns the seconds of look-ups, which read, and of updates, which read and write."""
    total = 0.0
    for piece in own:
        batch = samples if piece.copied else workload.batch_size
        share = piece.num_rows / max(piece.shape[0], 1)
        rows = batch * workload.ids_of_tables[piece.table] * share
        moved = 4 * piece.width + workload.value_bytes * piece.width  # looked up
        if workload.optimizer:
            state = row_bytes(piece.width, workload.optimizer) - 4 * piece.width
            moved += 2 * (4 * piece.width + state) + 2 * workload.value_bytes * piece.width
        vectors = 2 * workload.value_bytes * piece.width * batch  # copied there and back
        seconds = rows * (2 * machine.row_seconds + moved / machine.row_bandwidth)
        total += seconds + vectors / machine.row_bandwidth
    return total


def _traffic(placement: Placement, rank: int, workload: Workload) -> tuple[int, int]:
    """Returns the bytes of vectors and gradients that a rank sends, and that it receives."""
    samples, value = _samples(workload, rank, placement.num_ranks), workload.value_bytes
    own = sum(p.width for p in placement.of_rank(rank) if not p.copied)
    others = sum(p.width for p in placement.pieces if not p.copied) - own
    forward = own * (workload.batch_size - samples) * value
    back = others * samples * value
    return forward + back, back + forward


def _copied_values(placement: Placement, rank: int, workload: Workload) -> int:
    """Returns the number of 4-byte values of copies' gradients that a rank sends to another."""
    samples = _samples(workload, rank, placement.num_ranks)
    return sum(
        int(min(samples * workload.ids_of_tables[p.table], p.num_rows)) * (p.width + 2)
        for p in placement.of_rank(rank)
        if p.copied
    )


def _layers(config: DLRMConfig) -> list[tuple[int, int]]:
    """Returns inputs and outputs of a sample's layers, those of the top MLP once per member."""
    bottom = (config.num_numerical_features, *config.bottom_mlp_sizes)
    top = (_features(config), *config.top_mlp_sizes)
    return [*pairwise(bottom), *[*pairwise(top)] * config.ensemble]


def _features(config: DLRMConfig) -> int:
    """Returns the columns that enter the top MLP."""
    vectors = len(config.table_sizes) + 1
    if config.interaction_op == "cat":
        return vectors * config.embedding_dim
    width = config.embedding_dim + vectors * (vectors - 1) // 2
    return width + -width % 8


def _dense_weights(config: DLRMConfig) -> int:
    layers = _layers(replace(config, ensemble=1))
    others = config.ensemble - 1
    heads = others * (layers[-1][0] + 1)
    vectors = len(config.table_sizes) + 1
    adapters = config.ensemble * vectors * config.embedding_dim if others else 0
    return sum(inputs * outputs + outputs for inputs, outputs in layers) + heads + adapters


def _flops(config: DLRMConfig) -> int:
    """Returns the operations of a sample's forward pass."""
    vectors = len(config.table_sizes) + 1
    dots = 0 if config.interaction_op == "cat" else vectors * vectors * config.embedding_dim
    products = sum(inputs * outputs for inputs, outputs in _layers(config))
    return 2 * (products + dots * config.ensemble)


def _summed_bytes(own: Sequence[Piece], samples: int, workload: Workload) -> int:
    """Returns the bytes of the sums of repeated rows' gradients, with ids spread evenly."""
    total = 0.0
    for piece in own:
        batch = samples if piece.copied else workload.batch_size
        ids = batch * workload.ids_of_tables[piece.table]
        repeated = min(1.0, ids / max(piece.shape[0], 1))
        total += 4 * piece.width * ids * repeated * piece.num_rows / max(piece.shape[0], 1)
    return int(total)


def _memory(
    placement: Placement,
    rank: int,
    workload: Workload,
    machine: Machine,
    weights: int,
    state: int,
) -> Memory:
    config, value = workload.config, workload.value_bytes
    samples, batch = _samples(workload, rank, placement.num_ranks), workload.batch_size
    dense = 2 * 4 * _dense_weights(config)  # with their gradients
    dense += DENSE_OPTIMIZERS[workload.dense_optimizer].state_bytes(_dense_weights(config))
    held = [piece for piece in placement.of_rank(rank) if not piece.copied]
    copied = [piece for piece in placement.of_rank(rank) if piece.copied]
    looked_up = value * (
        batch * sum(piece.width for piece in held) + samples * sum(p.width for p in copied)
    )
    vectors = samples * len(config.table_sizes) * config.embedding_dim * value
    layers = _layers(config)
    hidden = samples * value * sum(inputs + outputs for inputs, outputs in layers)
    members = config.ensemble
    copies = 3 if members == 1 else 3 + 3 * members
    # Vectors, their gradients and a copy of these; activations, and one layer's gradient.
    activations = copies * vectors + hidden
    activations += samples * members * value * max(out for _, out in layers)
    ids = workload.ids_of_tables
    rows = sum(batch * ids[piece.table] for piece in held)
    rows += sum(samples * ids[piece.table] for piece in copied)
    activations += int(rows * 24) + _summed_bytes([*held, *copied], samples, workload)
    if any(count != 1 for count in ids):  # each row of a bag has a gradient
        activations += int(
            sum(value * p.width * ids[p.table] * (samples if p.copied else batch) for p in held)
        )
    buffers = int(_BATCHES_AHEAD * _ID_BYTES * rows)
    buffers += _BATCHES_AHEAD * samples * 4 * (config.num_numerical_features + 1)
    if placement.num_ranks > 1:
        buffers += 2 * looked_up + vectors + 4 * _dense_weights(config)  # sent and received
    return Memory(machine.runtime_bytes, weights, state, dense, activations, buffers)
