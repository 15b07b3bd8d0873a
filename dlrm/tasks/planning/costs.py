"""Costs of a placement for each rank: memory, bytes sent, and time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dlrm.distributed import part
from dlrm.distributed.placement import Piece, Placement
from dlrm.tasks.planning.dense_part import DensePart, dense_part_of
from dlrm.tasks.planning.machines import Machine
from dlrm.tasks.planning.workload import TableBytes, Workload, table_bytes
from dlrm.train.optim.dense import DENSE_OPTIMIZERS

_ID_BYTES = 4
_BATCHES_AHEAD = 4  # read while one batch is computed


@dataclass(frozen=True)
class RankMemory:
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
    memory: RankMemory
    sent: int
    seconds: Seconds


def costs(placement: Placement, workload: Workload, machine: Machine) -> list[RankCost]:
    """Returns the predicted costs of each rank."""
    found = _look_ups(placement, workload)
    return [
        _Share(placement, rank, workload, found, machine).cost(tables)
        for rank, tables in enumerate(table_bytes(placement, workload))
    ]


def step_seconds(found: Sequence[RankCost]) -> float:
    """Returns the seconds of a step, in which all ranks wait for the slowest of each part."""
    return sum(
        max(getattr(cost.seconds, name) for cost in found)
        for name in ("look_ups", "products", "exchange", "other")
    )


class _LookUp(NamedTuple):
    """The look-up of a piece of a table, or of its wide weights, for one field.

    Attributes:
        piece: the piece; of the wide term it has one column. Its table's number is the field's.
        ids: average number of ids of a sample in the whole field.
        read: bytes of a value that is read.
        value: bytes of a value of the vector.
        wide: the piece is one of the wide term.
    """

    piece: Piece
    ids: float
    read: int
    value: int
    wide: bool = False


def _look_ups(placement: Placement, workload: Workload) -> list[_LookUp]:
    ids, value = workload.ids_of_fields, workload.value_bytes
    placement = placement.of_fields(workload.config.tables)
    read = 2 if workload.config.embedding_dtype == "bf16" else 4
    found = [_LookUp(piece, ids[piece.table], read, value) for piece in placement.pieces]
    if workload.config.wide:
        wide = placement.of_one_column().pieces
        found += [_LookUp(piece, ids[piece.table], 4, 4, wide=True) for piece in wide]
    return found


class _Share:
    """The work of a rank in a step.

    Attributes:
        batch: samples of all ranks.
        samples: samples of this rank.
        pieces: number of pieces that it holds.
        held: look-ups for the batch of all ranks.
        replicated: look-ups of replicated tables, for own samples.
        all: both, each with its number of samples.
        elsewhere: look-ups of other ranks.
    """

    def __init__(
        self,
        placement: Placement,
        rank: int,
        workload: Workload,
        found: Sequence[_LookUp],
        machine: Machine,
    ) -> None:
        self.workload, self.machine, self.num_ranks = workload, machine, placement.num_ranks
        self.dense_part: DensePart = dense_part_of(workload.config)
        self.trained = self.dense_part.parameters if workload.dense_optimizer else 0
        self.pieces = len(placement.of_rank(rank))
        own = part(workload.batch_size, rank, self.num_ranks)
        self.batch, self.samples = workload.batch_size, own.stop - own.start
        self.held = [one for one in found if one.piece.rank == rank]
        self.replicated = [one for one in found if one.piece.replicated]
        self.elsewhere = [one for one in found if one.piece.rank not in (None, rank)]
        self.all = [
            (one, self.samples if one.piece.replicated else self.batch)
            for one in found
            if one.piece.rank in (None, rank)
        ]

    def cost(self, tables: TableBytes) -> RankCost:
        """Returns the costs of the rank, given the bytes of its tables."""
        workload, machine, sent = self.workload, self.machine, self._sent()
        exchange = 0.0
        if self.num_ranks > 1:
            collectives = 3 + 2 * bool(self.replicated) + 2 * workload.config.wide
            exchange = (sent + 2 * 4 * self.trained) / machine.link_bandwidth
            exchange += collectives * machine.link_seconds
        passes = 1 + bool(workload.optimizer or workload.dense_optimizer)
        passes += bool(workload.dense_optimizer)  # gradients of weights, besides those of values
        flops = machine.half_flops if workload.half else machine.flops
        seconds = Seconds(
            look_ups=self._row_seconds(),
            products=passes * (self.samples * self.dense_part.flops + self._attention()) / flops,
            exchange=exchange,
            other=machine.step_seconds,
        )
        return RankCost(self.pieces, self._memory(tables), sent, seconds)

    def _attention(self) -> float:
        """Returns the operations by which this rank weighs the items of its attended lists."""
        config = self.workload.config
        each = 2 * config.embedding_dim * config.attention_hidden  # and twice for the candidate
        attended = [one for one in self.held if one.piece.table in config.attended and not one.wide]
        return sum(self.batch * (one.ids + 2) * each for one in attended)

    def _row_seconds(self) -> float:
        """Returns the seconds of look-ups, which read, and of updates, which read and write."""
        total, machine, workload = 0.0, self.machine, self.workload
        for (piece, ids, read, value, _), batch in self.all:
            rows = batch * ids * piece.num_rows / max(piece.shape[0], 1)
            moved = (read + value) * piece.width
            if workload.optimizer:
                state = workload.state_bytes(piece.width)
                moved += 2 * (4 * piece.width + state) + 2 * value * piece.width
            vectors = 2 * value * piece.width * batch  # copied there and back
            seconds = rows * (2 * machine.row_seconds + moved / machine.row_bandwidth)
            total += seconds + vectors / machine.row_bandwidth
        return total

    def _sent(self) -> int:
        """Returns the bytes of vectors and gradients that it sends, which it receives as well."""
        others = self.batch - self.samples
        vectors = sum(one.value * one.piece.width for one in self.held) * others
        back = sum(one.value * one.piece.width for one in self.elsewhere) * self.samples
        copies = sum(
            int(min(self.samples * one.ids, one.piece.num_rows)) * (one.piece.width + 2)
            for one in self.replicated
        )
        return vectors + back + 4 * copies * (self.num_ranks - 1)

    def _memory(self, tables: TableBytes) -> RankMemory:
        workload, counted, dense = self.workload, self.dense_part, self.dense_part.state_bytes
        if workload.dense_optimizer:
            dense += 4 * self.trained  # gradients
            dense += DENSE_OPTIMIZERS[workload.dense_optimizer].state_bytes(self.trained)
        if workload.ema:
            dense += counted.state_bytes
        runtime, buffers = self.machine.runtime_bytes, self._buffers() + tables.beside
        activations = self._activations()
        return RankMemory(runtime, tables.weights, tables.state, dense, activations, buffers)

    def _activations(self) -> int:
        config, counted, value = self.workload.config, self.dense_part, self.workload.value_bytes
        members = len(config.kinds) or config.packed
        copies = 3 if members == 1 else 3 + 3 * members
        # Vectors, their gradients and a copy of these; activations, and one layer's gradient.
        total = copies * counted.vectors * value + 3 * 4 * len(config.table_sizes) * config.wide
        if config.has_narrow_tables:  # their vectors before the projection, and gradients
            total += 2 * sum(config.table_dims[table] for table in config.tables) * value
        total = self.samples * (total + (counted.values + counted.widest) * value)
        total += int(sum(24 * batch * one.ids for one, batch in self.all)) + self._summed_bytes()
        if any(count != 1 for count in self.workload.ids_of_fields):  # each row has a gradient
            rows = (one.value * one.piece.width * one.ids for one in self.held)
            total += int(sum(rows) * self.batch)
        return total

    def _summed_bytes(self) -> int:
        """Returns the bytes of the sums of repeated rows' gradients, with ids spread evenly."""
        total = 0.0
        for one, batch in self.all:
            ids, rows = batch * one.ids, max(one.piece.shape[0], 1)
            share = one.piece.num_rows / rows
            total += 4 * one.piece.width * ids * min(1.0, ids / rows) * share
        return int(total)

    def _buffers(self) -> int:
        config = self.workload.config
        ids = sum(batch * one.ids for one, batch in self.all if not one.wide)
        total = int(_BATCHES_AHEAD * _ID_BYTES * ids)
        total += _BATCHES_AHEAD * self.samples * 4 * (config.num_numerical_features + 1)
        if self.num_ranks > 1:  # sent and received
            columns = sum(config.table_dims[table] for table in config.tables)
            row = columns * self.workload.value_bytes + 4 * config.wide * len(config.tables)
            total += 2 * sum(one.value * one.piece.width * batch for one, batch in self.all)
            total += self.samples * row + 4 * self.trained
        return total
