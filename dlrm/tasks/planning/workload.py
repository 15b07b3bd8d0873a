"""A training to plan, and the bytes that its tables need on each rank."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from dlrm.distributed.placement import Piece, Placement
from dlrm.model.config import DLRMConfig
from dlrm.store.memory import RowKind, least_memory
from dlrm.tasks.planning.stored import StoredTables
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.optim.row_optimizers import TABLE_OPTIMIZERS


@dataclass(frozen=True)
class Workload:
    """A training whose costs are predicted.

    Attributes:
        config: the architecture; its placement is not used.
        batch_size: samples of all ranks.
        optimizer: optimizer of the tables; None if they are not trained.
        dense_optimizer: optimizer of the MLPs; None if they are not trained.
        lookups: average number of ids of a sample in each field; None is one in each.
        half: compute in half precision.
        table_memory: memory for the tables of each rank, such as "8GB"; other rows are in a store.
            None: all rows are in memory.
        l2_of_all: an L2 term of the tables counts the steps that each row has missed.
        ema: an EMA of all weights except the tables is kept.
    """

    config: DLRMConfig
    batch_size: int
    optimizer: str | None = "sgd"
    dense_optimizer: str | None = "sgd"
    lookups: tuple[float, ...] | None = None
    half: bool = False
    table_memory: str | None = None
    l2_of_all: bool = False
    ema: bool = False

    @classmethod
    def of_run(
        cls, config: DLRMConfig, batch_size: int, chosen: OptimizerConfig | None, **further: Any
    ) -> "Workload":
        """Returns that of a run with these optimizers; None is a run without a training."""
        tables, mlps, l2_of_all = None, None, False
        if chosen is not None:
            tables = None if chosen.freeze_embeddings else chosen.embedding_optimizer
            mlps = None if chosen.freeze_mlps else chosen.mlp_optimizer
            l2_of_all = bool(chosen.embedding_l2) and chosen.embedding_l2_mode == "all"
        return cls(config, batch_size, tables, mlps, l2_of_all=l2_of_all, **further)

    @property
    def ids_of_fields(self) -> tuple[float, ...]:
        return self.lookups or (1.0,) * len(self.config.table_sizes)

    @property
    def ids_of_tables(self) -> tuple[float, ...]:
        """Returns the average number of ids of a sample in each table, of all its fields."""
        ids = [0.0] * len(self.config.embedding_rows)
        for table, count in zip(self.config.tables, self.ids_of_fields, strict=True):
            ids[table] += count
        return tuple(ids)

    @property
    def vectors_of_tables(self) -> tuple[int, ...]:
        """Returns the number of fields of each table."""
        tables = self.config.tables
        return tuple(map(tables.count, range(len(self.config.embedding_rows))))

    @property
    def value_bytes(self) -> int:
        """Returns the bytes of a value of a vector that is looked up."""
        return 2 if self.half else 4

    @property
    def row_bytes(self) -> int:
        """Returns the bytes of a whole row, of its wide weight and of the optimizer's state.

        The row is one of a table as wide as the interaction.
        """
        return self.bytes_of_row(self.config.embedding_dim)[1]

    def bytes_of_row(self, dim: int) -> tuple[int, int]:
        """Returns the bytes of a row of `dim` columns; see `bytes_of`."""
        return self.bytes_of([Piece(0, (0, 1), (0, dim), 0, (1, dim))])

    def bytes_of(self, pieces: Iterable[Piece]) -> tuple[int, int]:
        """Returns the bytes of pieces of tables with their wide weights, without and with state."""
        held, wide = [*pieces], list[Piece]()
        if self.config.wide:
            wide = [piece.of_one_column() for piece in held if piece.columns[0] == 0]
        both = sum(piece.num_bytes(self.state_bytes) for piece in (*held, *wide))
        return sum(piece.num_bytes() for piece in (*held, *wide)), both

    def state_bytes(self, dim: int) -> int:
        """Returns the bytes of the optimizer's state of a row of `dim` values."""
        if self.optimizer is None:
            return 0
        return TABLE_OPTIMIZERS[self.optimizer].state_bytes(1, dim, self.l2_of_all)


class TableBytes(NamedTuple):
    """Bytes of memory that a rank needs for its tables.

    Attributes:
        weights: those of values.
        state: those of the optimizer's state.
        beside: those of a store, besides rows and their state.
    """

    weights: int
    state: int
    beside: int = 0


def table_bytes(placement: Placement, workload: Workload) -> list[TableBytes]:
    """Returns the memory that each rank's tables need."""
    found = []
    for rank in range(placement.num_ranks):
        values, both = workload.bytes_of(placement.of_rank(rank))
        found.append(TableBytes(values, both - values))
        if workload.table_memory is not None:
            own = stored_tables(placement, rank, workload)
            pairs = [*zip(own.slots, own.kinds, strict=True)]
            values = sum(slots * workload.bytes_of_row(kind.dim)[0] for slots, kind in pairs)
            both = sum(slots * kind.row_bytes for slots, kind in pairs)
            found[-1] = TableBytes(values, both - values, own.bytes_beside)
    return found


def stored_tables(placement: Placement, rank: int, workload: Workload) -> StoredTables:
    """Returns a rank's tables in a store; the workload has a `table_memory`."""
    assert workload.table_memory is not None
    return StoredTables(kinds_of(placement, rank, workload), workload.table_memory)


def kinds_of(placement: Placement, rank: int, workload: Workload) -> tuple[RowKind, ...]:
    """Returns the tables of each width of a rank, all of whose tables are whole."""
    pieces, fields = placement.of_rank(rank), workload.vectors_of_tables
    found = []
    widths = sorted({piece.width for piece in pieces})
    for dim in widths or ([] if placement.dims else [placement.dim]):
        own = [piece for piece in pieces if piece.width == dim]
        rows = {piece.table: piece.num_rows for piece in own}
        of_tables = tuple(fields[table] for table in rows)
        found.append(RowKind(dim, rows, workload.bytes_of_row(dim)[1], of_tables))
    return tuple(found)


def least_of_batch(placement: Placement, rank: int, workload: Workload) -> int:
    """Returns the bytes of memory that a batch with the mean number of ids may need on a rank."""
    ids, kinds = workload.ids_of_tables, kinds_of(placement, rank, workload)
    rows = [
        sum(min(rows, int(workload.batch_size * ids[table])) for table, rows in kind.tables.items())
        for kind in kinds
    ]
    return least_memory(kinds, rows)
