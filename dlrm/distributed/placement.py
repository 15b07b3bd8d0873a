"""Placement of embedding tables on ranks: whole tables, and shards of rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


class Shard(NamedTuple):
    """The rows of a table that one rank holds: all of them, or some.

    Attributes:
        rows: the first row, and the row after the last.
        rank: the rank that holds it.
        shape: rows and columns of the whole table.
    """

    table: int
    rows: tuple[int, int]
    rank: int
    shape: tuple[int, int]

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def is_whole(self) -> bool:
        return self.rows == (0, self.shape[0])


@dataclass(frozen=True)
class Placement:
    """The tables that each rank holds, whole or as shards.

    Attributes:
        dim: columns of every table.
        num_ranks: processes.
        shards: those of all tables, table by table.
    """

    dim: int
    num_ranks: int
    shards: tuple[Shard, ...]

    @classmethod
    def of_tables(
        cls,
        table_rows: Sequence[int],
        dim: int,
        tables_by_rank: Sequence[Sequence[int]],
        sharded: Iterable[int] = (),
    ) -> "Placement":
        """Returns the placement of whole tables, each on one rank, and of sharded ones.

        Args:
            sharded: tables of whose rows every rank has an equal part.
        """
        num_ranks = len(tables_by_rank)
        shards = [
            Shard(table, (0, table_rows[table]), rank, (table_rows[table], dim))
            for rank, tables in enumerate(tables_by_rank)
            for table in tables
        ]
        for table in sharded:
            rows = table_rows[table]
            edges = [rank * rows // num_ranks for rank in range(num_ranks + 1)]
            parts = enumerate(pairwise(edges))
            shards += [Shard(table, edge, rank, (rows, dim)) for rank, edge in parts]
        return cls(dim, num_ranks, tuple(sorted(shards)))

    @property
    def is_whole(self) -> bool:
        """Returns whether every table is whole on one rank."""
        return all(shard.is_whole for shard in self.shards)

    def of_rank(self, rank: int) -> list[Shard]:
        """Returns the shards that a rank holds, in the order of the tables."""
        return [shard for shard in self.shards if shard.rank == rank]

    def tables_by_rank(self) -> list[list[int]]:
        """Returns the tables of which each rank holds rows, in ascending order."""
        return [[shard.table for shard in self.of_rank(rank)] for rank in range(self.num_ranks)]

    def fields_by_rank(self, tables: Sequence[int]) -> list[list[int]]:
        """Returns the fields that each rank looks up, in ascending order.

        Args:
            tables: number of each field's table.
        """
        return [
            [field for field, table in enumerate(tables) if table in own]
            for own in self.tables_by_rank()
        ]

    def of_one_column(self) -> "Placement":
        """Returns the placement of one-column tables whose rows are where the tables' rows are.

        Their numbers follow those of the tables.
        """
        count = len({shard.table for shard in self.shards})
        shards = (
            shard._replace(table=count + shard.table, shape=(shard.shape[0], 1))
            for shard in self.shards
        )
        return Placement(1, self.num_ranks, tuple(shards))
