"""Placement of the pieces of embedding tables on ranks."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import NamedTuple

_COPIED = "all"  # instead of a rank


class Piece(NamedTuple):
    """A rectangle of a table that one rank holds, or of which every rank holds a copy.

    Attributes:
        rows: the first row, and the row after the last.
        columns: the first column, and the column after the last.
        rank: the rank that holds it; None is every rank.
        shape: rows and columns of the whole table.
    """

    table: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    rank: int | None
    shape: tuple[int, int]

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def width(self) -> int:
        return self.columns[1] - self.columns[0]

    @property
    def replicated(self) -> bool:
        return self.rank is None

    @property
    def has_all_rows(self) -> bool:
        return self.rows == (0, self.shape[0])

    @property
    def has_all_columns(self) -> bool:
        return self.columns == (0, self.shape[1])

    @property
    def is_whole(self) -> bool:
        return self.has_all_rows and self.has_all_columns and not self.replicated

    def num_bytes(self, state_bytes: Callable[[int], int] = lambda dim: 0) -> int:
        """Returns the bytes of the float32 values of its rows, and of an optimizer's state of them.

        Args:
            state_bytes: returns the bytes of the state of a row of some values; by default tables
                are not trained.
        """
        return self.num_rows * (4 * self.width + state_bytes(self.width))

    def of_one_column(self) -> "Piece":
        """Returns the piece of a one-column table that has the same rows."""
        return self._replace(columns=(0, 1), shape=(self.shape[0], 1))


@dataclass(frozen=True)
class Placement:
    """A placement: the pieces of all tables, and their ranks.

    Attributes:
        table_rows: rows of each table.
        dim: columns of every table, unless `dims` has others.
        num_ranks: processes.
        pieces: pieces of all tables, which cover every table exactly once.
        dims: columns of each table if some have fewer than `dim`; empty if none has.

    Raises:
        ValueError: a piece is outside its table, on no rank, or overlaps another, or pieces do not
            cover a table; the message has the table's number.
    """

    table_rows: tuple[int, ...]
    dim: int
    num_ranks: int
    pieces: tuple[Piece, ...]
    dims: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if {*self.dims} <= {self.dim}:
            object.__setattr__(self, "dims", ())
        alone = self.num_ranks == 1
        pieces = (p._replace(rank=0) if alone and p.replicated else p for p in self.pieces)
        object.__setattr__(self, "pieces", tuple(sorted(pieces, key=lambda p: p[:3])))
        for table in range(len(self.table_rows)):
            self._check(table, [piece for piece in self.pieces if piece.table == table])

    @classmethod
    def of_tables(
        cls,
        table_rows: Sequence[int],
        dim: int,
        tables_by_rank: Sequence[Sequence[int]],
        divided: Iterable[int] = (),
        dims: Sequence[int] = (),
    ) -> "Placement":
        """Returns the placement of whole tables, each on one rank, and of divided ones.

        Args:
            divided: tables of whose rows every rank has an equal part.
        """
        columns, num_ranks = dims or (dim,) * len(table_rows), len(tables_by_rank)
        pieces = [
            Piece(table, (0, rows), (0, columns[table]), rank, (rows, columns[table]))
            for rank, tables in enumerate(tables_by_rank)
            for table in tables
            for rows in (table_rows[table],)
        ]
        for table in divided:
            rows, width = shape = table_rows[table], columns[table]
            edges = [rank * rows // num_ranks for rank in range(num_ranks + 1)]
            pieces += [
                Piece(table, edge, (0, width), rank, shape)
                for rank, edge in enumerate(pairwise(edges))
                if edge[0] < edge[1]
            ]
        return cls(tuple(table_rows), dim, num_ranks, tuple(pieces), tuple(dims))

    @property
    def columns(self) -> tuple[int, ...]:
        """Returns the columns of each table."""
        return self.dims or (self.dim,) * len(self.table_rows)

    @property
    def is_whole(self) -> bool:
        """Returns whether every table is whole on one rank."""
        return all(piece.is_whole for piece in self.pieces)

    def of_rank(self, rank: int) -> list[Piece]:
        """Returns the pieces that a rank holds, copies included, in the order of the tables."""
        return [piece for piece in self.pieces if piece.rank in (None, rank)]

    def tables_by_rank(self) -> list[list[int]]:
        """Returns the tables of which each rank holds a piece, in ascending order."""
        return [
            sorted({piece.table for piece in self.of_rank(rank)}) for rank in range(self.num_ranks)
        ]

    def replicated_alone(self, rank: int) -> tuple[int, ...]:
        """Returns the tables of which a rank has a copy and no piece that others look up."""
        own = self.of_rank(rank)
        looked_up = {piece.table for piece in own if not piece.replicated}
        return tuple(sorted({piece.table for piece in own} - looked_up))

    def of_fields(self, tables: Sequence[int]) -> "Placement":
        """Returns the placement with a table for each field, whose pieces are those of its own.

        Args:
            tables: number of each field's table.
        """
        if list(tables) == list(range(len(self.table_rows))):
            return self
        own: dict[int, list[Piece]] = {}
        for piece in self.pieces:
            own.setdefault(piece.table, []).append(piece)
        rows = tuple(self.table_rows[table] for table in tables)
        pieces = (p._replace(table=i) for i, table in enumerate(tables) for p in own[table])
        dims = tuple(self.columns[table] for table in tables)
        return Placement(rows, self.dim, self.num_ranks, tuple(pieces), dims)

    def of_one_column(self) -> "Placement":
        """Returns the placement of one-column tables whose rows are where the first columns are."""
        pieces = (piece.of_one_column() for piece in self.pieces if piece.columns[0] == 0)
        return Placement(self.table_rows, 1, self.num_ranks, tuple(pieces))

    def _check(self, table: int, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            for what, (begin, end), size in (
                ("rows", piece.rows, self.table_rows[table]),
                ("columns", piece.columns, self.columns[table]),
            ):
                if not 0 <= begin <= end <= size or (begin == end and size):
                    raise ValueError(
                        f"table {table}: expected {what} [begin, end] with 0 <= begin < end <= "
                        f"{size}, got [{begin}, {end}]"
                    )
            if piece.rank is not None and not 0 <= piece.rank < self.num_ranks:
                raise ValueError(
                    f"table {table}: expected a rank from 0 to {self.num_ranks - 1}, or all, got "
                    f"{piece.rank}"
                )
        ranks = [piece.rank for piece in pieces]
        for rank in ranks:
            if ranks.count(rank) > 1:
                raise ValueError(
                    f"table {table}: rank {_COPIED if rank is None else rank} has "
                    f"{ranks.count(rank)} pieces: expected one, beside one for {_COPIED}"
                )
        self._check_cover(table, pieces)

    def _check_cover(self, table: int, pieces: Sequence[Piece]) -> None:
        """Checks each cell of the grid that the edges of all pieces form."""
        edges = (
            sorted({0, size, *(edge for piece in pieces for edge in getattr(piece, name))})
            for name, size in (
                ("rows", self.table_rows[table]),
                ("columns", self.columns[table]),
            )
        )
        if not pieces:
            raise ValueError(f"table {table}: expected one piece or more, got none")
        for rows, columns in product(*map(pairwise, edges)):
            holders = [
                piece
                for piece in pieces
                if piece.rows[0] <= rows[0] < piece.rows[1]
                and piece.columns[0] <= columns[0] < piece.columns[1]
            ]
            if len(holders) != 1:
                what = f"are in {len(holders)} pieces" if holders else "are in no piece"
                raise ValueError(
                    f"table {table}: rows [{rows[0]}, {rows[1]}] of columns [{columns[0]}, "
                    f"{columns[1]}] {what}: expected every value in one"
                )
