"""A training to plan, and the bytes that its tables need on each rank."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dlrm.distributed.placement import Piece, Placement
from dlrm.model.config import FUSED_TYPES, DLRMConfig
from dlrm.tasks.planning.stored import StoredTables, most_rows
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.optim.row_optimizers import TABLE_OPTIMIZERS, WIDE_OPTIMIZERS


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
        wide_optimizer: optimizer of the wide term; None is that of the tables.
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
    wide_optimizer: str | None = None

    @classmethod
    def of_run(
        cls, config: DLRMConfig, batch_size: int, chosen: OptimizerConfig | None, **further: Any
    ) -> "Workload":
        """Returns that of a run with these optimizers; None is a run without a training.

        Raises:
            ValueError: an optimizer is for another architecture; the message names it.
        """
        tables, mlps, l2_of_all = None, None, False
        if chosen is not None:
            further = {**further, "wide_optimizer": chosen.wide_optimizer}
            _check_wide(config, chosen.wide_optimizer)
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
        shape = 1, self.config.embedding_dim
        return self.bytes_of([Piece(0, (0, 1), (0, shape[1]), 0, shape)])[1]

    def bytes_of(self, pieces: Iterable[Piece]) -> tuple[int, int]:
        """Returns the bytes of pieces of tables with their wide weights, without and with state."""
        held, wide = [*pieces], list[Piece]()
        if self.config.wide:
            wide = [piece.of_one_column() for piece in held if piece.columns[0] == 0]
        both = sum(piece.num_bytes(self.state_bytes) for piece in held)
        both += sum(piece.num_bytes(lambda dim: self.state_bytes(dim, wide=True)) for piece in wide)
        return sum(piece.num_bytes() for piece in (*held, *wide)), both

    def state_bytes(self, dim: int, wide: bool = False) -> int:
        """Returns the bytes of the optimizer's state of a row of `dim` values.

        Args:
            dim: columns of the table.
            wide: it is one of the wide term.
        """
        if self.optimizer is None:
            return 0
        if wide and self.wide_optimizer is not None:
            return WIDE_OPTIMIZERS[self.wide_optimizer].state_bytes(1, dim)
        return TABLE_OPTIMIZERS[self.optimizer].state_bytes(1, dim, self.l2_of_all)


def _check_wide(config: DLRMConfig, optimizer: str | None) -> None:
    if optimizer is None:
        return
    if not config.wide:
        raise ValueError(f"--wide_optimizer {optimizer} needs --wide, whose weights it updates")
    if config.embedding_type not in FUSED_TYPES:
        raise ValueError(
            f"--wide_optimizer {optimizer} needs --embedding_type joint_fused, got "
            f"{config.embedding_type}"
        )


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
    """Returns what the tables of each rank need."""
    found = []
    for rank in range(placement.num_ranks):
        values, both = workload.bytes_of(placement.of_rank(rank))
        found.append(TableBytes(values, both - values))
        if workload.table_memory is not None:
            own = stored_tables(placement, rank, workload)
            values = own.slots * replace(workload, optimizer=None).row_bytes
            found[-1] = TableBytes(values, own.slots * own.row_bytes - values, own.bytes_beside)
    return found


def stored_tables(placement: Placement, rank: int, workload: Workload) -> StoredTables:
    """Returns a rank's tables in a store; the workload has a `table_memory`."""
    assert workload.table_memory is not None
    rows = tuple(piece.num_rows for piece in placement.of_rank(rank))
    fields = tuple(workload.vectors_of_tables[piece.table] for piece in placement.of_rank(rank))
    return StoredTables(rows, workload.row_bytes, workload.table_memory, fields)


def most_rows_of_batch(placement: Placement, rank: int, workload: Workload) -> int:
    """Returns the most rows of a rank that a batch with the mean number of ids may need."""
    return sum(
        most_rows((piece.num_rows,), workload.batch_size * workload.ids_of_tables[piece.table])
        for piece in placement.of_rank(rank)
    )
