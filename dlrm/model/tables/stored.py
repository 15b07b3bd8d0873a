"""Embedding tables partly in memory: weights consist of slots, which a store assigns to rows."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from dlrm import ops
from dlrm.model.tables.initial import Initial
from dlrm.model.tables.layout import Bags, Held, TableParameters, Tables, WholeTables
from dlrm.store.layout import RowBlock


class Records(WholeTables):
    """The numbers of tables' rows in a store, one table after the other; see `WholeTables`."""

    def rows(self, bags: Bags) -> Tensor:
        """Returns the records in the store of the rows that a batch looks up, `[look-ups]` int64.

        Raises:
            RuntimeError: an id is outside its table.
        """
        name = "joint_embedding" if bags.lengths is None else "joint_embedding_bag"
        self.check(bags.ids, bags.lengths, name)
        return super().rows(bags)


class StoredEmbedding(Records):
    """A `JointEmbedding` over the slots that a `RowStore` assigns to the rows of a batch.

    The weight is one table of slots, so operators and optimizers need not know the store. Look-ups
    take slots instead of ids; `rows` gives the records of ids in the store.

    Args:
        held: the tables of the store and their fields.
        initial: initial values, which the store gets.
        slots: number of rows in memory.
        dtype: dtype of the weight, float32 or bfloat16; see `JointEmbedding`.
    """

    def __init__(
        self,
        held: Held,
        initial: Initial,
        slots: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(held)
        self._initial, self.slots = initial, slots
        device = held.world.device
        weight = torch.zeros(slots, held.dim, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight)
        self.weight_low: Tensor | None
        low = torch.zeros_like(weight, dtype=torch.int16) if dtype == torch.bfloat16 else None
        self.register_buffer("weight_low", low)
        self.slot_offsets: Tensor
        each = torch.ones(len(self._places), dtype=torch.int64, device=device)
        offsets = torch.stack([0 * each, slots * each])  # any field may have any slot
        self.register_buffer("slot_offsets", offsets, persistent=False)

    def initial(self) -> Iterator[RowBlock]:
        """Yields the initial rows of all tables."""
        begin = 0
        for number, piece in self._held.items():
            for first, values in self._initial.rows(number, piece.shape):
                fields = {"weight": values}
                if self.weight_low is not None:
                    fields["weight"], fields["low"] = ops.split_float32(values)
                yield RowBlock(begin + first, len(values), fields)
            begin += piece.num_rows

    def table_parameters(self) -> TableParameters:
        """Returns the weight with the rows of each table in the store, by number, in order."""
        return [(self.weight, self._held)]

    def one_row_each(self) -> dict[Tensor, list[int]]:
        """Returns an empty dict: any slot may have a row of any table."""
        return {}

    def wide_twin(self) -> Tables:
        return StoredEmbedding(slots=self.slots, **self._of_twin())

    def forward(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Looks up slots `[batch, fields]`; returns `[batch, fields, dim]` of `dtype`."""
        return ops.joint_embedding(self.weight, slots, self.slot_offsets, dtype=dtype)

    def pool(self, bags: Bags, dtype: torch.dtype) -> Tensor:
        return bags.pooled(self.weight, self.slot_offsets, dtype)
