"""The tables of a process, in one weight."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from dlrm import ops
from dlrm.distributed import World, exchange
from dlrm.distributed.placement import Placement, Shard
from dlrm.model.config import DLRMConfig
from dlrm.model.tables.files import mapped_zeros
from dlrm.model.tables.initial import Initial
from dlrm.model.tables.layout import Bags

TableParameters = list[tuple[nn.Parameter, Mapping[int, Shard]]]
_ZEROS = Initial(scale=0.0)
Vectors = Callable[[], Tensor]  # waits, and returns them


class JointEmbedding(nn.Module):
    """The rows of a process in one weight `[rows, dim]`, table after table.

    A process looks its rows up for the batch of all processes, which exchange the vectors. Every
    process has a shard of a table that is not whole, sends a vector of the rows that are in its
    shard, which is 0 without any, and adds up those that it receives.

    Args:
        placement: the tables of all processes.
        tables: number of each field's table.
        world: the processes; the weight is made on its device, without a full copy elsewhere.
        dtype: dtype of the weight, float32 or bfloat16. With a bfloat16 weight the buffer
            `weight_low` has the lower halves of float32 values (`ops.split_float32`), which the row
            optimizers update and look-ups never read.
        files: directory for the tables' files, on the CPU; None keeps tables in memory.
    """

    def __init__(
        self,
        placement: Placement,
        tables: Sequence[int],
        world: World = World(),
        initial: Initial = _ZEROS,
        dtype: torch.dtype = torch.float32,
        files: str | None = None,
    ):
        super().__init__()
        self.placement, self.world = placement, world
        self._tables, self._files = list(tables), files
        self.shards = {shard.table: shard for shard in placement.of_rank(world.rank)}
        self.table_sizes = [shard.num_rows for shard in self.shards.values()]
        offsets = [0, *accumulate(self.table_sizes)]
        weight = self._empty(offsets[-1], dtype)
        self.weight = nn.Parameter(weight)
        self.weight_low: Tensor | None
        low = self._empty(offsets[-1], torch.int16) if dtype == torch.bfloat16 else None
        self.register_buffer("weight_low", low)
        own = [slice(begin, end) for begin, end in pairwise(offsets)]
        lows = [None if low is None else low[part] for part in own]
        initial.fill([weight[part] for part in own], lows, self.shards)
        self._make_buffers(offsets)

    def _make_buffers(self, offsets: list[int]) -> None:
        """Makes what depends on the fields that this process looks up."""
        by_rank = self.placement.fields_by_rank(self._tables)
        own, numbers = by_rank[self.world.rank], list(self.shards)
        places = [numbers.index(self._tables[field]) for field in own]
        self._shares = places != [*range(len(numbers))]  # own fields have the same table
        if self._shares:
            offsets = [[offsets[place + i] for place in places] for i in (0, 1)]  # type: ignore[misc]
        self.table_offsets: Tensor
        self._register("table_offsets", offsets)
        split = {shard.table for shard in self.placement.shards if not shard.is_whole}
        self._sharded = [field for field, table in enumerate(self._tables) if table in split]
        self._sent_by_rank = [self._numbers_of_vectors(*rank) for rank in enumerate(by_rank)]
        if not self._sharded:
            return
        lowest, greatest = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
        shards = [self.shards[self._tables[field]] for field in own]
        rows = [shard.shape[0] for shard in shards]
        # A bad id belongs to the first or last shard, whose look-up reports it.
        ranges = [
            [shard.rows[0] or lowest for shard in shards],
            [shard.rows[1] if shard.rows[1] < shard.shape[0] else greatest for shard in shards],
        ]
        self._first: Tensor
        self._ranges: Tensor
        self._rows: Tensor
        self._whole_offsets: Tensor
        self._added_to: Tensor
        buffers: dict[str, Sequence[int] | list[list[int]]] = {
            "_first": [shard.rows[0] for shard in shards],
            "_ranges": ranges,
            "_rows": rows,
            "_whole_offsets": [0, *accumulate(rows)],
            "_added_to": self._sharded,
        }
        for name, values in buffers.items():
            self._register(name, values)

    def _register(self, name: str, values: Sequence[int] | list[list[int]]) -> None:
        numbers = torch.tensor(values, dtype=torch.int64, device=self.world.device)
        self.register_buffer(name, numbers, persistent=False)

    def _empty(self, rows: int, dtype: torch.dtype) -> Tensor:
        """Returns memory for rows, or a file."""
        shape = rows, self.placement.dim
        if self._files is not None:
            return mapped_zeros(self._files, shape, dtype)
        return torch.empty(*shape, dtype=dtype, device=self.world.device)

    def _numbers_of_vectors(self, rank: int, fields: Sequence[int]) -> list[int]:
        """Returns the places at which the vectors of a rank arrive: fields, then further shards."""
        begin = len(self._tables) + (rank - 1) * len(self._sharded)
        further = self._sharded if rank else []
        return [begin + further.index(f) if f in further else f for f in fields]

    def tables(self) -> list[Tensor]:
        """Returns the tables, `[rows, dim]` float32: views of the weight, or its joined halves."""
        tables = self.weight.detach().split(self.table_sizes)
        if self.weight_low is None:
            return list(tables)
        return list(map(ops.join_float32, tables, self.weight_low.split(self.table_sizes)))

    def table_parameters(self) -> TableParameters:
        """Returns the parameters that hold tables, each with its shards by table, in order."""
        return [(self.weight, self.shards)]

    def lower_halves(self) -> dict[Tensor, Tensor]:
        """Returns the lower halves of the values of a bfloat16 weight, by weight."""
        return {} if self.weight_low is None else {self.weight: self.weight_low}

    def single_hot_table_sizes(self) -> dict[Tensor, list[int]]:
        """Returns the rows of the tables of the weight, if `ops.row_update_` may rely on them.

        A sample with one id per field then looks up one row of each of them.
        """
        return {} if self._shares or self._sharded else {self.weight: self.table_sizes}

    def wide_twin(self) -> "JointEmbedding":
        """Returns the wide term of these tables: float32 tables of one column, initially 0.

        The same ids look it up, its rows are where the tables' rows are, and the same row optimizer
        updates it. Fields that share a table share its weights. The weights of table i are table
        `number of all tables + i`.
        """
        twin = self.placement.of_one_column()
        tables = [len({*self._tables}) + table for table in self._tables]
        return JointEmbedding(twin, tables, self.world, files=self._files)

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Looks up ids `[batch, fields]`; returns `[batch, fields, dim]` of `dtype`."""
        return ops.joint_embedding(self.weight, ids, self.table_offsets, dtype=dtype)

    def look_up(self, bags: Bags, dtype: torch.dtype, graph: bool = True) -> Vectors:
        """Looks up, and starts to send every process the vectors of its samples.

        Args:
            bags: bags of the fields that this process reads, for the batch of all processes.
            graph: False returns a `LookUp`, if these bags can have one.

        Returns:
            A function that waits and returns the vectors of all fields, `[own samples, fields,
            dim]`.
        """
        weight = self.weight
        narrowed = weight.requires_grad and weight.grad_dtype not in (None, dtype)
        if not graph and bags.lengths is None and self.world.size == 1 and not narrowed:
            offsets = self.table_offsets
            vectors = ops.joint_embedding(weight.detach(), bags.ids, offsets, dtype=dtype)
            return LookUp(self, bags.ids, vectors)
        own = self._of_shards(bags) if self._sharded else bags
        if own.lengths is None:
            vectors = self(own.ids, dtype=dtype)
        else:
            vectors = own.pooled(self.weight, self.table_offsets, dtype)
        received = exchange(vectors, self._sent_by_rank, self.world, bags.samples_by_rank)
        return (lambda: self._added(received())) if self._sharded else received

    def _of_shards(self, bags: Bags) -> Bags:
        """Returns bags without the ids whose rows other processes have.

        Raises:
            RuntimeError: an id is outside its table, on the CPU; the message names it.
        """
        ids, lengths, weights, pooling, *_ = bags
        first, (begins, ends), rows = self._first, self._ranges, self._rows
        if lengths is not None:
            bag_of = ops.bags_of_ids(ids, lengths)
            fields = bag_of % max(lengths.shape[1], 1)
            first, begins, ends, rows = (of[fields] for of in (first, begins, ends, rows))
        if ids.is_cpu and ((ids < 0) | (ids >= rows)).any():
            ops.check_ids(ids, self._whole_offsets, lengths)
        here = (ids >= begins) & (ids < ends)
        ids = (ids - first)[here]
        if lengths is None:
            return bags._replace(ids=ids, lengths=here.to(torch.int8))
        if pooling == "mean":  # over all ids of the bag
            share = lengths.flatten().clamp(min=1).float().reciprocal()[bag_of]
            pooling, weights = "sum", share if weights is None else share * weights
        lengths = bag_of[here].bincount(minlength=lengths.numel()).view(lengths.shape)
        weights = None if weights is None else weights[here]
        return bags._replace(ids=ids, lengths=lengths, weights=weights, pooling=pooling)

    def _added(self, vectors: Tensor) -> Tensor:
        """Adds the vectors of further shards to those of the first, always in the same order."""
        further = [len(self._sharded)] * (self.world.size - 1)
        first, *others = vectors.split([len(self._tables), *further], 1)
        total = first.clone(memory_format=torch.contiguous_format)
        for other in others:
            total.index_add_(1, self._added_to, other)
        return total

    def rows(self, bags: Bags) -> Tensor:
        """Returns the rows of the weight that a batch looks up, `[look-ups]` int64.

        An id outside its table may give any row. Sharded tables have no such rows.
        """
        assert not self._sharded, "sharded tables have no such rows"
        begins, _ = ops.table_ranges(self.table_offsets)
        if bags.lengths is None:
            return (bags.ids + begins).flatten()
        fields = ops.bags_of_ids(bags.ids, bags.lengths) % max(bags.lengths.shape[1], 1)
        return bags.ids + begins[fields]


@dataclass
class LookUp:
    """Vectors without a graph; a call returns them.

    Attributes:
        tables: the tables that they are from.
        ids: `[batch, fields]`.
        vectors: `[batch, fields, dim]`.
    """

    tables: JointEmbedding
    ids: Tensor
    vectors: Tensor

    def __call__(self) -> Tensor:
        return self.vectors

    def add_gradient(self, grad: Tensor) -> None:
        """Adds a gradient of the vectors to that of the weight, as autograd would."""
        weight = self.tables.weight
        if not weight.requires_grad:
            return
        offsets = self.tables.table_offsets
        sparse = ops.joint_embedding_gradient(weight.shape, self.ids, offsets, grad)
        if weight.grad is None:
            weight.grad = sparse
        else:
            weight.grad += sparse


def make_tables(
    config: DLRMConfig,
    placement: Placement,
    world: World = World(),
    seed: int = 0,
    files: str | None = None,
) -> JointEmbedding:
    """Returns the tables of vectors, or shards of them, that a process holds.

    Args:
        world: the processes; the tables are made on its device.
        files: directory for the tables' files, see `mapped_zeros`; None keeps them in memory.
    """
    std = config.embedding_init_std if config.embedding_init == "normal" else None
    initial = Initial(seed, config.embedding_init_scale, std)
    dtype = torch.bfloat16 if config.embedding_dtype == "bf16" else torch.float32
    return JointEmbedding(placement, config.tables, world, initial, dtype, files)
