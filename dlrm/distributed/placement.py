"""Placement of the pieces of embedding tables on ranks, and its YAML format."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, NamedTuple

from dlrm.documents import brief, read_yaml
from dlrm.manifest import check_lines, sealed_lines

_COPIED = "all"  # instead of a rank
_KEYS = {"ranks", "embedding_dim", "tables"}
_TABLE_KEYS = {"name", "rows", "embedding_dim", "pieces"}
_PIECE_KEYS = {"rank", "rows", "columns"}


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
    def from_whole_tables(
        cls,
        table_rows: Sequence[int],
        dim: int,
        tables_by_rank: Sequence[Sequence[int]],
        dims: Sequence[int] = (),
    ) -> "Placement":
        """Returns the placement of whole tables, each on one rank."""
        columns = dims or (dim,) * len(table_rows)
        pieces = (
            Piece(table, (0, rows), (0, columns[table]), rank, (rows, columns[table]))
            for rank, tables in enumerate(tables_by_rank)
            for table in tables
            for rows in (table_rows[table],)
        )
        return cls(tuple(table_rows), dim, len(tables_by_rank), tuple(pieces), tuple(dims))

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


def read_placement(
    path: str | os.PathLike,
    table_rows: Sequence[int],
    dim: int,
    num_ranks: int,
    dims: Sequence[int] = (),
) -> Placement:
    """Reads a placement in the format of `placement_text`.

    Args:
        table_rows, dim, num_ranks, dims: the expected tables and ranks, as in `Placement`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is for other tables or ranks, has an unknown key, or is not a placement; the
            message names the file and the expectation.
    """
    check_lines(path)
    document = read_yaml(path)
    _check_keys(path, "", document, _KEYS)
    for key, expected, what in (
        ("ranks", num_ranks, "the number of processes"),
        ("embedding_dim", dim, "--embedding_dim"),
    ):
        if document[key] != expected:
            raise ValueError(
                f"{path}: {key}: expected {what}, {expected}, got {brief(document[key])}"
            )
    tables = document["tables"]
    if not isinstance(tables, list) or len(tables) != len(table_rows):
        got = len(tables) if isinstance(tables, list) else brief(tables)
        raise ValueError(f"{path}: tables: expected a list of {len(table_rows)}, got {got}")
    columns = dims or (dim,) * len(table_rows)
    pieces = [
        piece
        for table, (entry, *shape) in enumerate(zip(tables, table_rows, columns, strict=True))
        for piece in _pieces(path, table, entry, (shape[0], shape[1]), dim)
    ]
    try:
        return Placement(tuple(table_rows), dim, num_ranks, tuple(pieces), tuple(dims))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _pieces(path: Any, table: int, entry: Any, shape: tuple[int, int], dim: int) -> Iterator[Piece]:
    _check_keys(path, f"table {table}: ", entry, _TABLE_KEYS, {"name", "embedding_dim"})
    for key, expected in zip(("rows", "embedding_dim"), shape, strict=True):
        if (got := entry.get(key, dim)) != expected:
            raise ValueError(
                f"{path}: table {table}: {key}: expected {expected}, as the model has, got "
                f"{brief(got)}"
            )
    if not isinstance(entry["pieces"], list):
        raise ValueError(
            f"{path}: table {table}: pieces: expected a list, got {brief(entry['pieces'])}"
        )
    for item in entry["pieces"]:
        _check_keys(path, f"table {table}: ", item, _PIECE_KEYS, {"rows", "columns"})
        rank = item["rank"]
        if rank != _COPIED and type(rank) is not int:
            raise ValueError(
                f"{path}: table {table}: rank: expected a number or {_COPIED}, got {brief(rank)}"
            )
        ranges = {}
        for key, size in zip(("rows", "columns"), shape, strict=True):
            found = item.get(key, [0, size])
            if not isinstance(found, list) or [type(edge) for edge in found] != [int, int]:
                raise ValueError(
                    f"{path}: table {table}: {key}: expected [begin, end], got {brief(found)}"
                )
            ranges[key] = (found[0], found[1])
        held_by = None if rank == _COPIED else rank
        yield Piece(table, ranges["rows"], ranges["columns"], held_by, shape)


def _check_keys(
    path: Any,
    where: str,
    found: Any,
    keys: set[str],
    optional: set[str] = frozenset(),  # type: ignore[assignment]
) -> None:
    if not isinstance(found, Mapping):
        raise ValueError(f"{path}: {where}expected a map of {_listed(keys)}, got {brief(found)}")
    for key in found:
        if key not in keys:
            raise ValueError(f"{path}: {where}expected only {_listed(keys)}, got {brief(key)}")
    if missing := keys - optional - set(found):
        raise ValueError(f"{path}: {where}expected {_listed(missing)}, which are missing")


def _listed(keys: set[str]) -> str:
    return ", ".join(sorted(keys))


def placement_text(placement: Placement, names: Sequence[str]) -> str:
    """Returns a placement as YAML, one line per piece, with a checksum; `read_placement` reads it.

    Args:
        names: names of the tables, for readers.
    """
    lines = [
        "# Where the embedding tables are, for --placement. A piece has rows and columns",
        "# [begin, end) of its table, or all of them where none are given; rank: all is a copy on",
        "# every rank.",
        f"ranks: {placement.num_ranks}",
        f"embedding_dim: {placement.dim}",
        "tables:",
    ]
    for table, (name, rows) in enumerate(zip(names, placement.table_rows, strict=True)):
        lines += [f"- name: {_quoted(name)}", f"  rows: {rows}"]
        if placement.columns[table] != placement.dim:
            lines.append(f"  embedding_dim: {placement.columns[table]}")
        lines.append("  pieces:")
        for piece in placement.pieces:
            if piece.table == table:
                parts = [f"rank: {_COPIED if piece.replicated else piece.rank}"]
                if not piece.has_all_rows:
                    parts.append(f"rows: [{piece.rows[0]}, {piece.rows[1]}]")
                if not piece.has_all_columns:
                    parts.append(f"columns: [{piece.columns[0]}, {piece.columns[1]}]")
                lines.append(f"  - {{{', '.join(parts)}}}")
    return sealed_lines("\n".join(lines) + "\n")


def _quoted(name: str) -> str:
    return "'" + name.replace("'", "''") + "'"
