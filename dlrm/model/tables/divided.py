"""Embedding tables in pieces: ranges of rows or columns on several ranks, and copies on all ranks.

Tables of several widths are pieces, too, on any number of ranks.

A rank looks its pieces up for the batch of all ranks and exchanges the vectors, as it does for
whole tables; it looks copies up only for its own samples. The exchange moves *atoms*: equal parts
of vectors, sized so that every piece is a whole number of atoms. If a table is divided by rows,
each piece sends a vector, which is zero where the sample has no id of the piece, and the receiver
adds these vectors.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn

from dlrm import ops
from dlrm.distributed import World, exchange, gather_rows, part
from dlrm.distributed.placement import Piece, Placement
from dlrm.model.layers.projection import by_width
from dlrm.model.tables.initial import Initial
from dlrm.model.tables.joint import JointEmbedding
from dlrm.model.tables.layout import Bags, Held, TableParameters, Tables, Vectors


class DividedEmbedding(Tables):
    """The pieces of all tables that a rank holds.

    Args:
        placement: the ranks of all pieces.
        initial, dtype: as in `JointEmbedding`.
        first_number: number of the first table; initial values depend on table numbers, and tables
            are saved under them.
        read: the fields whose ids this rank takes; None are those of whose tables it holds a piece.
        tables: table number of each field; None is one each.
        files: directory for the pieces' files; None keeps them in memory.
    """

    def __init__(
        self,
        placement: Placement,
        world: World,
        initial: Initial,
        dtype: torch.dtype = torch.float32,
        first_number: int = 0,
        read: Sequence[int] | None = None,
        tables: Sequence[int] | None = None,
        files: str | None = None,
    ):
        super().__init__()
        self.placement, self.world, self._files = placement, world, files
        self._tables = list(range(len(placement.table_rows)) if tables is None else tables)
        self._of_fields = placement.of_fields(self._tables)
        read = read or self._of_fields.tables_by_rank()[world.rank]
        held = _by_kind(placement.of_rank(world.rank))
        looked_up = _by_kind(self._of_fields.of_rank(world.rank))
        self.groups = nn.ModuleList(
            _Group(
                held[kind],
                looked_up[kind],
                self._tables,
                read,
                first_number,
                initial,
                dtype,
                world,
                files,
            )
            for kind in sorted(held)
        )
        self._held = [group for group in self._own() if not group.replicated]
        places = [place for i, group in enumerate(self._held) for place in group.places(i, read)]
        self._places = torch.tensor(places, dtype=torch.int64, device="cpu").view(-1, 6)
        self._layout = _Layout(self._of_fields, world.device)
        self._no_atoms = torch.zeros(1, 0, dtype=dtype, device=world.device, requires_grad=True)

    def table_parameters(self) -> TableParameters:
        return [one for group in self._own() for one in group.tables.table_parameters()]

    def wide_twin(self) -> Tables:
        return DividedEmbedding(
            self.placement.of_one_column(),
            self.world,
            Initial(scale=0.0),
            first_number=len(self.placement.table_rows),
            read=self._of_fields.tables_by_rank()[self.world.rank],
            tables=self._tables,
            files=self._files,
        )

    def look_up(self, bags: Bags, dtype: torch.dtype, graph: bool = True) -> Vectors:
        """See `Tables`; tables that are only replicated are looked up for own samples alone."""
        batch = len(bags.ids if bags.lengths is None else bags.lengths)
        samples_by_rank = bags.samples_by_rank
        own = part(batch, self.world.rank, self.world.size)
        if samples_by_rank is not None:
            begin = sum(samples_by_rank[: self.world.rank])
            own = slice(begin, begin + samples_by_rank[self.world.rank])
        replicated = [
            group(bags, own, dtype, self.world).unflatten(2, (-1, self._layout.atom)).flatten(1, 2)
            for group in self._own()
            if group.replicated
        ]
        looked_up = self._looked_up(bags, batch, dtype)
        sent = looked_up.view(batch, looked_up.shape[1] // self._layout.atom, self._layout.atom)
        received = exchange(sent, self._layout.atoms_by_rank, self.world, samples_by_rank)
        return lambda: self._layout.assembled(received(), replicated)

    def rows_by_weight(self, bags: Bags) -> dict[Tensor, Tensor]:
        assert self.placement.is_whole, "divided tables have no such rows"
        return {group.tables.weight: group.rows(bags) for group in self._own()}

    def _own(self) -> "list[_Group]":
        return cast("list[_Group]", list(self.groups))

    def _looked_up(self, bags: Bags, batch: int, dtype: torch.dtype) -> Tensor:
        """Returns the vectors of all pieces except copies, concatenated, `[batch, columns]`."""
        if not self._held:
            return self._no_atoms.to(dtype).expand(batch, 0)
        weights = [group.tables.weight for group in self._held]
        if bags.lengths is None and ops.pieces_are_native(weights):
            return ops.joint_embedding_pieces(weights, bags.ids, self._places, dtype=dtype)
        whole = slice(0, batch)
        found = [group(bags, whole, dtype, self.world).flatten(1) for group in self._held]
        return found[0] if len(found) == 1 else torch.cat(found, 1)


_Kind = tuple[bool, bool, int]  # equal for pieces that are looked up together


def _kind(piece: Piece) -> _Kind:
    return piece.replicated, not piece.has_all_rows, piece.width


def _by_kind(pieces: Sequence[Piece]) -> dict[_Kind, list[Piece]]:
    groups: dict[_Kind, list[Piece]] = {}
    for piece in pieces:
        groups.setdefault(_kind(piece), []).append(piece)
    return groups


class _Group(nn.Module):
    """Pieces of one rank that are looked up together, in one weight of one width.

    Args:
        held: the pieces of tables.
        pieces: the same for each field, whose number is that of the piece's table.
        of_fields: table number of each field.
        read, first_number, initial, dtype, world, files: see `DividedEmbedding`.
    """

    def __init__(
        self,
        held: Sequence[Piece],
        pieces: Sequence[Piece],
        of_fields: Sequence[int],
        read: Sequence[int],
        first_number: int,
        initial: Initial,
        dtype: torch.dtype,
        world: World,
        files: str | None,
    ):
        super().__init__()
        self.pieces = pieces
        self.replicated, self.bounded, width = _kind(pieces[0])
        numbered = {first_number + piece.table: piece for piece in held}
        fields = [first_number + of_fields[piece.table] for piece in pieces]
        places, ends = list(numbered), list(accumulate(piece.num_rows for piece in held))
        self._offsets = [([0, *ends])[places.index(number)] for number in fields]
        alone = Held(numbered, width, replace(world, rank=0, size=1), fields, files=files)
        self.tables = JointEmbedding(alone, initial, dtype=dtype)
        columns = self._read = [read.index(piece.table) for piece in pieces]
        self._all = columns == list(range(len(read)))
        lowest, greatest = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
        # A bad id is mapped to the first or last piece, whose look-up reports it.
        begins = [p.rows[0] if p.rows[0] else lowest for p in pieces]
        ends = [p.rows[1] if p.rows[1] < p.shape[0] else greatest for p in pieces]
        self._columns: Tensor
        self._wanted: Tensor
        self._first: Tensor
        self._begins: Tensor
        self._ends: Tensor
        for name, values in {
            "_columns": columns,
            "_wanted": [column in columns for column in range(len(read))],
            "_first": [piece.rows[0] for piece in pieces],
            "_begins": begins,
            "_ends": ends,
        }.items():
            self.register_buffer(name, torch.tensor(values, device=world.device), persistent=False)

    def places(self, number: int, read: Sequence[int]) -> list[list[int]]:
        """Returns the `pieces` of `ops.joint_embedding_pieces` for the weight of this number."""
        columns = [read.index(piece.table) for piece in self.pieces]
        return [
            [number, column, *piece.rows, piece.shape[0], offset]
            for column, piece, offset in zip(columns, self.pieces, self._offsets, strict=True)
        ]

    def rows(self, bags: Bags) -> Tensor:
        """Returns the weight's rows that a batch looks up; all pieces are whole tables."""
        batch = len(bags.ids if bags.lengths is None else bags.lengths)
        return self.tables.rows(self._looked_up(bags, slice(0, batch)))

    def forward(self, bags: Bags, samples: slice, dtype: torch.dtype, world: World) -> Tensor:
        """Returns the vectors of some samples, `[samples, pieces, width]`."""
        own = self._looked_up(bags, samples)
        weight, offsets = self.tables.weight, self.tables.table_offsets

        def look_up(weight: Tensor) -> Tensor:
            if own.lengths is None:
                return ops.joint_embedding(weight, own.ids, offsets, dtype=dtype)
            return own.pooled(weight, offsets, dtype)

        if self.replicated and torch.is_grad_enabled():
            return _OfCopies.apply(weight, look_up, world)
        return look_up(weight)

    def _looked_up(self, bags: Bags, samples: slice) -> Bags:
        """Returns the bags of its pieces, of some samples."""
        return (
            self._one_each(bags, samples) if bags.lengths is None else self._several(bags, samples)
        )

    def _one_each(self, bags: Bags, samples: slice) -> Bags:
        ids = bags.ids[samples]
        if not self._all:
            ids = ids.index_select(1, self._columns)
        if not self.bounded:
            return Bags(ids)
        ids = ids.long()
        here = (ids >= self._begins) & (ids < self._ends)
        return Bags((ids - self._first)[here], here.to(torch.int8))

    def _several(self, bags: Bags, samples: slice) -> Bags:
        ids, lengths, weights, pooling, _, attended = bags
        assert lengths is not None
        if self._all and not self.bounded and samples == slice(0, len(lengths)):
            return bags
        wanted = torch.zeros_like(lengths, dtype=torch.bool)
        wanted[samples] = self._wanted
        here = wanted.flatten().repeat_interleave(lengths.flatten().long(), output_size=len(ids))
        ids, weights = ids[here], None if weights is None else weights[here]
        own = Bags(ids, lengths[samples].index_select(1, self._columns), weights, pooling)
        if attended is not None and attended.lists[0][0] in self._read:
            place = self._read.index
            lists = [(place(field), place(target)) for field, target in attended.lists]
            own = own._replace(attended=attended._replace(lists=lists))
        return self._within_bounds(own) if self.bounded else own

    def _within_bounds(self, bags: Bags) -> Bags:
        """Drops the ids of rows that other pieces hold."""
        ids, lengths, weights, pooling, *_ = bags
        assert lengths is not None
        bag_of = ops.bags_of_ids(ids, lengths)
        piece, ids = bag_of % lengths.shape[1], ids.long()
        if pooling == "mean":  # over all ids of the bag
            share = lengths.flatten().clamp(min=1).float().reciprocal()[bag_of]
            pooling, weights = "sum", share if weights is None else share * weights
        here = (ids >= self._begins[piece]) & (ids < self._ends[piece])
        lengths = bag_of[here].bincount(minlength=lengths.numel()).view(lengths.shape)
        ids = (ids - self._first[piece])[here]
        return Bags(ids, lengths, None if weights is None else weights[here], pooling)


class _OfCopies(torch.autograd.Function):
    """Looks up a copy; sums the gradient of its weight over the samples of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, look_up: Callable[[Tensor], Tensor], world: World
    ) -> Tensor:
        with torch.enable_grad():
            ctx.weight = weight.detach().requires_grad_()
            ctx.weight.grad_dtype = None  # as for the weights of row optimizers
            ctx.vectors, ctx.world = look_up(ctx.weight), world
        return ctx.vectors.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (own,) = torch.autograd.grad(ctx.vectors, ctx.weight, grads[0])
        return _sum_over_ranks(own, ctx.world), None, None


def _sum_over_ranks(grad: Tensor, world: World) -> Tensor:
    """Returns the gradient rows of all ranks, each rank's own rows summed, in rank order."""
    wide = torch.sparse_coo_tensor(
        grad._indices(), grad._values().float(), grad.shape, check_invariants=False
    ).coalesce()
    rows, values = (gather_rows(t, world) for t in (wide.indices()[0], wide.values()))
    return torch.sparse_coo_tensor(
        rows[None], values, grad.shape, check_invariants=False, is_coalesced=False
    )


class _Layout:
    """The atoms that each rank sends, and their places in the vectors of a sample.

    A place is the position of an atom in the concatenated vectors of all fields, in the order of
    `by_width`. Each place has one source, or several if the rows of its table are divided.

    Attributes:
        atom: columns of an atom, a divisor of the columns of all pieces.
        atoms_by_rank: numbers of the atoms that each rank sends, in its order; atoms arrive sorted
            by number.
    """

    def __init__(self, placement: Placement, device: str):
        self._dim = None if placement.dims else placement.dim
        edges = (edge for piece in placement.pieces for edge in piece.columns)
        self.atom = reduce(math.gcd, edges, placement.dim)
        columns, order = placement.columns, by_width(placement.columns)
        ends = accumulate((columns[field] // self.atom for field in order), initial=0)
        self._begins = dict(zip(order, ends, strict=False))
        ranks = range(placement.num_ranks)
        sent = [(rank, place) for rank in ranks for place in self._places(placement, rank)]
        rounds = _rounds([place for _, place in sent])
        arrival = [sent[source] for one in rounds for _, source in sorted(one.items())]
        if placement.num_ranks == 1:  # nothing is exchanged
            arrival = sent
        # A rank sends each place at most once: it holds one piece of each table that it sends.
        numbers = {atom: number for number, atom in enumerate(arrival)}
        self.atoms_by_rank = [
            [numbers[rank, place] for place in self._places(placement, rank)] for rank in ranks
        ]
        places = [place for _, place in arrival] + self._places(placement, None)
        self._plain = places == list(range(sum(columns) // self.atom))
        self.places = torch.tensor(places, device=device)
        self.rounds = [
            tuple(torch.tensor(list(one), device=device) for one in (found.values(), found.keys()))
            for found in (dict(sorted(one.items())) for one in _rounds(places))
        ]

    def _places(self, placement: Placement, rank: int | None) -> list[int]:
        """Returns the places of the atoms that a rank sends, in order, or, for None, of copies."""
        return [
            self._begins[piece.table] + column // self.atom
            for piece in sorted(placement.pieces, key=lambda piece: (_kind(piece), piece.table))
            if piece.rank == rank
            for column in range(*piece.columns, self.atom)
        ]

    def assembled(self, received: Tensor, replicated: Sequence[Tensor]) -> Tensor:
        """Returns the vectors from atoms `[samples, n, atom]`; see `Tables.look_up`."""
        source = torch.cat([received, *replicated], 1) if replicated else received
        if not self._plain:
            source = _Assembled.apply(source, self)
        shape = (-1,) if self._dim is None else (-1, self._dim)
        return source.flatten(1).unflatten(1, shape)


def _rounds(places: Sequence[int]) -> list[dict[int, int]]:
    """Deals sources to rounds, place -> source; a round has at most one source for each place."""
    rounds: list[dict[int, int]] = []
    for source, place in enumerate(places):
        found = next((one for one in rounds if place not in one), None)
        if found is None:
            rounds.append(found := {})
        found[place] = source
    return rounds


class _Assembled(torch.autograd.Function):
    """Adds up the atoms of each place, always in the same order."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, layout: _Layout) -> Tensor:
        ctx.places = layout.places
        (first, _), *others = layout.rounds
        result = source.index_select(1, first)
        for sources, places in others:
            result.index_add_(1, places, source.index_select(1, sources))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(1, ctx.places), None
