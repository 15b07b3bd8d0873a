"""The interface of the layouts of embedding tables.

A layout decides which tensors of a process hold the rows of its tables. The model, the checkpoints,
the optimizers of rows and the exporter ask it by this interface and never for its kind.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dlrm import ops
from dlrm.distributed import World, exchange
from dlrm.distributed.placement import Piece
from dlrm.model.tables.files import mapped_zeros
from dlrm.model.tables.initial import Initial

TableParameters = list[tuple[nn.Parameter, Mapping[int, Piece]]]
Vectors = Callable[[], Tensor]  # waits, and returns them


class Attended(NamedTuple):
    """Lists that are weighted by target attention; see `ops.attended_bag`.

    Attributes:
        lists: column of each list among the fields looked up, and that of its candidate.
    """

    lists: Sequence[tuple[int, int]]
    units: ops.ActivationUnits


class Bags(NamedTuple):
    """The ids of a look-up.

    Attributes:
        ids: `[batch, fields]` or, with `lengths`, `[total]`, bag after bag.
        lengths: number of ids of each bag, `[batch, fields]`; None is one id each.
        weights: with `lengths`, a factor for the row of each id, `[total]`; None is 1.
        pooling: "sum" or "mean".
        attended: with `lengths` and "sum", the lists that are weighted by target attention.
        samples_by_rank: number of samples of each process in the batch; None is `World.part`.
    """

    ids: Tensor
    lengths: Tensor | None = None
    weights: Tensor | None = None
    pooling: str = "sum"
    samples_by_rank: Sequence[int] | None = None
    attended: "Attended | None" = None

    def pooled(
        self, weight: Tensor, offsets: Tensor, dtype: torch.dtype, native: bool = True
    ) -> Tensor:
        """Returns the vectors of bags with lengths; see `ops.joint_embedding_bag`."""
        assert self.lengths is not None
        if self.attended is not None:
            attend = ops.attended_bag if native else ops.attended_bag_reference
            operands = weight, self.ids, self.lengths, offsets, *self.attended
            return attend(*operands, sample_weights=self.weights, dtype=dtype)
        look_up = ops.joint_embedding_bag if native else ops.joint_embedding_bag_reference
        return look_up(
            weight,
            self.ids,
            self.lengths,
            offsets,
            sample_weights=self.weights,
            pooling=self.pooling,
            dtype=dtype,
        )


class Tables(nn.Module):
    """Base of the layouts: the tables, or the pieces of tables, that a process holds."""

    def look_up(self, bags: Bags, dtype: torch.dtype, graph: bool = True) -> Vectors:
        """Looks up, and starts to send every process the vectors of its samples.

        Args:
            bags: bags of the fields that this process reads, for the batch of all processes.
            graph: False returns a `LookUp`, if the layout has one for these bags.

        Returns:
            A function that waits and returns the vectors of all fields, `[own samples, fields,
            dim]`, or, of several widths, concatenated in the order of `by_width`, `[own samples,
            sum of the fields' columns]`.
        """
        raise NotImplementedError

    def rows(self, bags: Bags) -> Tensor:
        """Returns the rows of a joint table that a batch looks up, `[look-ups]` int64.

        An id outside its table may give any row. Divided tables have no such rows.
        """
        raise NotImplementedError

    def rows_by_weight(self, bags: Bags) -> dict[Tensor, Tensor]:
        """Returns the rows of each weight that a batch looks up; see `rows`."""
        rows = self.rows(bags)
        return {weight: rows for weight, _ in self.table_parameters()}

    def table_parameters(self) -> TableParameters:
        """Returns the parameters that hold tables, each with its pieces by table, in order."""
        raise NotImplementedError

    def wide_twin(self) -> "Tables":
        """Returns the wide term of these tables: float32 tables of one column, initially 0.

        The same ids look it up, its rows are where the tables' rows are (or, of divided tables,
        their first columns), and the same row optimizer updates it. Fields that share a table share
        its weights. The weights of table i are table `number of all tables + i`.
        """
        raise NotImplementedError

    def operands(self) -> tuple[Tensor, Tensor] | None:
        """Returns weight and offsets if a look-up is `ops.joint_embedding` and nothing else."""
        return None

    def lower_halves(self) -> dict[Tensor, Tensor]:
        """Returns the lower halves of the values of each bfloat16 weight, by weight."""
        low = dict(self.named_buffers())
        named = ((weight, f"{name}_low") for name, weight in self.named_parameters())
        return {weight: low[name] for weight, name in named if name in low}

    def one_row_each(self) -> dict[Tensor, list[int]]:
        """Returns the rows of the tables of each weight that `ops.row_sgd_` may rely on.

        A sample with one id per field looks up one row of each of them.
        """
        return {
            weight: [piece.num_rows for piece in own.values()]
            for weight, own in self.table_parameters()
            if all(piece.has_all_rows and not piece.replicated for piece in own.values())
        }


@dataclass(frozen=True)
class Held:
    """The whole tables of a process, and the fields that look them up.

    Attributes:
        pieces: the tables, as pieces, by table number; initial values depend on it.
        dim: columns of every table.
        world: the processes; tables are made on its device, without a full copy elsewhere.
        tables: table number of each field of all processes; None is a field for each held table.
        fields_by_rank: fields of each process's tables; None is one process.
        files: directory for the tables' files, on the CPU; None keeps tables in memory.
    """

    pieces: Mapping[int, Piece]
    dim: int
    world: World = World()
    tables: Sequence[int] | None = None
    fields_by_rank: Sequence[Sequence[int]] | None = None
    files: str | None = None

    def empty(self, rows: int, dtype: torch.dtype) -> Tensor:
        """Returns memory for rows, or a file."""
        if self.files is not None:
            return mapped_zeros(self.files, (rows, self.dim), dtype)
        return torch.empty(rows, self.dim, dtype=dtype, device=self.world.device)


class WholeTables(Tables):
    """Base of the layouts of whole tables: looks up a process's own, and exchanges vectors."""

    def __init__(self, held: Held) -> None:
        super().__init__()
        self.dim, self.world, self._held = held.dim, held.world, held.pieces
        self._files = held.files
        self.table_sizes = [piece.num_rows for piece in held.pieces.values()]
        self._tables = [*held.pieces] if held.tables is None else list(held.tables)
        self.fields_by_rank = held.fields_by_rank or [[*range(len(self._tables))]]
        own, numbers = self.fields_by_rank[held.world.rank], list(held.pieces)
        # The place among the held tables of each own field's.
        self._places = [numbers.index(self._tables[field]) for field in own]
        self.table_offsets: Tensor
        offsets = [0, *accumulate(self.table_sizes)]
        if self._shares:
            offsets = [[offsets[place + i] for place in self._places] for i in (0, 1)]  # type: ignore[misc]
        self.register_buffer(
            "table_offsets", torch.tensor(offsets, device=held.world.device), persistent=False
        )

    @property
    def _shares(self) -> bool:
        """Returns whether own fields share tables."""
        return self._places != [*range(len(self._held))]

    def one_row_each(self) -> dict[Tensor, list[int]]:
        return {} if self._shares else super().one_row_each()

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Looks up ids `[batch, fields]`; returns `[batch, fields, dim]` of `dtype`."""
        raise NotImplementedError

    def pool(self, bags: Bags, dtype: torch.dtype) -> Tensor:
        """Does the same as `forward` for bags with lengths; see `ops.joint_embedding_bag`."""
        raise NotImplementedError

    def look_up(self, bags: Bags, dtype: torch.dtype, graph: bool = True) -> Vectors:
        own = self(bags.ids, dtype=dtype) if bags.lengths is None else self.pool(bags, dtype)
        return exchange(own, self.fields_by_rank, self.world, bags.samples_by_rank)

    def rows(self, bags: Bags) -> Tensor:
        begins, _ = ops.table_ranges(self.table_offsets)
        if bags.lengths is None:
            return (bags.ids + begins).flatten()
        fields = ops.bags_of_ids(bags.ids, bags.lengths) % max(bags.lengths.shape[1], 1)
        return bags.ids + begins[fields]

    def check(self, ids: Tensor, lengths: Tensor | None = None, name: str = "embedding") -> None:
        """Raises RuntimeError for the first id outside its table, naming table, row and value.

        Without `lengths` it checks nothing on CUDA, since every step would then wait for the
        device.

        Args:
            ids, lengths: see `Bags`.
            name: name of the operator, for the message.
        """
        if lengths is not None:
            ops.check_bags(name, ids, lengths, self.table_offsets)
            return
        sizes = [self.table_sizes[place] for place in self._places]
        if ids.shape[1] != len(sizes):
            raise ValueError(f"{name}: expected ids of {len(sizes)} tables, got {ids.shape}")
        if ids.is_cuda or not ids.numel():
            return
        wrong = (ids < 0) | (ids >= torch.tensor(sizes))
        if wrong.any():
            row, table = wrong.nonzero()[0].tolist()
            raise RuntimeError(
                f"{name}: id {ids[row, table].item()} of table {table} in batch row {row}: "
                f"expected 0 <= id < {sizes[table]}"
            )

    def _of_twin(self) -> dict[str, Any]:
        """Returns the arguments of the wide term."""
        number = len({*self._tables})
        pieces = {number + table: piece.of_one_column() for table, piece in self._held.items()}
        tables = [number + table for table in self._tables]
        held = Held(pieces, 1, self.world, tables, self.fields_by_rank, self._files)
        return {"held": held, "initial": Initial(scale=0.0)}
