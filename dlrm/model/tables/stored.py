"""Embedding tables partly in memory: weights consist of slots, which a store assigns to rows."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from dlrm import ops
from dlrm.distributed.placement import Piece
from dlrm.model.tables.embedding import _Tables, initial_rows
from dlrm.store.layout import RowBlock


class StoredEmbedding(_Tables):
    """A `JointEmbedding` over the slots that a `RowStore` assigns to the rows of a batch.

    The weight is one table of slots, so operators and optimizers need not know the store.

    Args:
        tables: rows of each table, by number, as in the store.
        dim: columns of every table.
        slots: number of rows in memory.
        seed, init_scale, init_std: initialization, see `JointEmbedding`.
        dtype: dtype of the weight, float32 or bfloat16; see `JointEmbedding`.
    """

    def __init__(
        self,
        tables: Mapping[int, int],
        dim: int,
        slots: int,
        seed: int = 0,
        init_scale: float = 1.0,
        dtype: torch.dtype = torch.float32,
        init_std: float | None = None,
    ) -> None:
        super().__init__(tables, dim, "cpu")
        self._initial = (seed, init_scale, init_std)
        self.weight = nn.Parameter(torch.zeros(slots, dim, dtype=dtype))
        low = torch.zeros(slots, dim, dtype=torch.int16) if dtype == torch.bfloat16 else None
        self.weight_low: Tensor | None
        self.register_buffer("weight_low", low)
        self.slot_offsets: Tensor
        self.register_buffer("slot_offsets", torch.tensor([0, slots]), persistent=False)

    def initial(self) -> Iterator[RowBlock]:
        """Yields the initial rows of all tables."""
        begins = dict(zip(self._numbered, self.table_offsets.tolist(), strict=False))
        for number, rows in self._numbered.items():
            for first, values in initial_rows(number, (rows, self.dim), *self._initial):
                fields = {"weight": values}
                if self.weight_low is not None:
                    fields["weight"], fields["low"] = ops.split_float32(values)
                yield RowBlock(begins[number] + first, len(values), fields)

    def lower_halves(self) -> dict[Tensor, Tensor]:
        """Returns the lower halves of the weight's values, by weight, if it is bfloat16."""
        return {} if self.weight_low is None else {self.weight: self.weight_low}

    def table_parameters(self) -> list[tuple[nn.Parameter, Mapping[int, int | Piece]]]:
        """Returns the weight with the rows of each table in the store, by number, in order."""
        return [(self.weight, self._numbered)]

    def forward(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Looks up slots `[batch, tables]`; returns `[batch, tables, dim]` of `dtype`."""
        found = ops.joint_embedding(
            self.weight, slots.reshape(-1, 1), self.slot_offsets, dtype=dtype
        )
        return found.view(*slots.shape, self.dim)

    def pool(
        self,
        slots: Tensor,
        lengths: Tensor,
        pooling: str,
        dtype: torch.dtype,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Does the same as `forward` for bags of slots; see `ops.joint_embedding_bag`."""
        found = ops.joint_embedding_bag(
            self.weight,
            slots,
            lengths.reshape(-1, 1),
            self.slot_offsets,
            sample_weights=weights,
            pooling=pooling,
            dtype=dtype,
        )
        return found.view(*lengths.shape, self.dim)
