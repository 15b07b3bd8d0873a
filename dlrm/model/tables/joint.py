"""The layout with all tables in one weight."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from dlrm import ops
from dlrm.model.layers.hooks import has_hooks, is_hooked
from dlrm.model.tables.initial import Initial
from dlrm.model.tables.layout import Bags, Held, TableParameters, Tables, Vectors, WholeTables


class JointEmbedding(WholeTables):
    """All tables in one weight `[sum of table_sizes, dim]`, one after the other.

    Args:
        held: the tables and their fields; other ranks may hold further pieces.
        native: look up with `ops.joint_embedding`, which checks ids and casts the output, instead
            of `nn.Embedding`'s kernel.
        dtype: dtype of the weight, float32 or bfloat16. With a bfloat16 weight the buffer
            `weight_low` has the lower halves of float32 values (`ops.split_float32`), which the row
            optimizers update and look-ups never read.
    """

    def __init__(
        self,
        held: Held,
        initial: Initial,
        native: bool = True,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__(held)
        self.native = native
        offsets = [0, *accumulate(self.table_sizes)]
        weight = held.empty(offsets[-1], dtype)
        self.weight = nn.Parameter(weight)
        self.weight_low: Tensor | None
        low = held.empty(offsets[-1], torch.int16) if dtype == torch.bfloat16 else None
        self.register_buffer("weight_low", low)
        own = [slice(begin, end) for begin, end in pairwise(offsets)]
        lows = [None if low is None else low[part] for part in own]
        initial.fill([weight[part] for part in own], lows, held.pieces)

    def tables(self) -> list[Tensor]:
        """Returns the tables, `[rows, dim]` float32: views of the weight, or its joined halves."""
        tables = self.weight.detach().split(self.table_sizes)
        if self.weight_low is None:
            return list(tables)
        return list(map(ops.join_float32, tables, self.weight_low.split(self.table_sizes)))

    def table_parameters(self) -> TableParameters:
        return [(self.weight, self._held)]

    def wide_twin(self) -> Tables:
        return JointEmbedding(native=self.native, **self._of_twin())

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        if self.native:
            return ops.joint_embedding(self.weight, ids, self.table_offsets, dtype=dtype)
        self.check(ids)
        rows = ids + ops.table_ranges(self.table_offsets)[0]
        return nn.functional.embedding(rows, self.weight, sparse=True).to(dtype)

    def operands(self) -> tuple[Tensor, Tensor] | None:
        replaced = getattr(self.forward, "__func__", None) is not _FORWARD
        alone = self.native and not replaced and not has_hooks(self)
        return (self.weight, self.table_offsets) if alone else None

    def look_up(self, bags: Bags, dtype: torch.dtype, graph: bool = True) -> Vectors:
        alone = not graph and bags.lengths is None and self.world.size == 1
        found = self._without_graph(bags.ids, dtype) if alone else None
        return found or super().look_up(bags, dtype)

    def _without_graph(self, ids: Tensor, dtype: torch.dtype) -> "LookUp | None":
        """Looks up ids `[batch, fields]`; None if autograd or a hook is needed."""
        weight = self.weight
        if self.operands() is None or is_hooked(weight):
            return None
        if weight.requires_grad and weight.grad_dtype not in (None, dtype):
            return None
        vectors = ops.joint_embedding(weight.detach(), ids, self.table_offsets, dtype=dtype)
        return LookUp(self, ids, vectors)

    def pool(self, bags: Bags, dtype: torch.dtype) -> Tensor:
        if not self.native:
            self.check(bags.ids, bags.lengths)
        return bags.pooled(self.weight, self.table_offsets, dtype, self.native)


_FORWARD = JointEmbedding.forward  # neither overridden nor replaced


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
