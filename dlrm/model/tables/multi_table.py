"""The layout with a weight for each table."""

from functools import partial

import torch
from torch import Tensor, nn

from dlrm import ops
from dlrm.model.tables.initial import Initial
from dlrm.model.tables.joint import JointEmbedding
from dlrm.model.tables.layout import Bags, Held, TableParameters, Tables, WholeTables


class MultiTableEmbedding(WholeTables):
    """One `nn.Embedding` per table, in float32; for the arguments see `JointEmbedding`."""

    def __init__(self, held: Held, initial: Initial):
        super().__init__(held)
        dim, device = held.dim, held.world.device
        self.embeddings = nn.ModuleList(
            nn.Embedding(size, dim, sparse=True, _weight=torch.empty(size, dim, device=device))
            for size in self.table_sizes
        )
        initial.fill(self.tables(), [None] * len(held.pieces), held.pieces)

    def tables(self) -> list[Tensor]:
        """Returns the weights, one per table, `[rows, dim]`."""
        return [weight.detach() for weight, _ in self.table_parameters()]

    def table_parameters(self) -> TableParameters:
        held = zip(self.embeddings.parameters(), self._held.items(), strict=True)
        return [(weight, {number: piece}) for weight, (number, piece) in held]

    def wide_twin(self) -> Tables:
        return JointEmbedding(native=False, **self._of_twin())

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        self.check(ids)
        wide = ids.long()
        vectors = [self.embeddings[place](wide[:, i]) for i, place in enumerate(self._places)]
        return self._stack(vectors, len(ids), dtype)

    def pool(self, bags: Bags, dtype: torch.dtype) -> Tensor:
        ids, lengths, weights, pooling, *_ = bags
        assert lengths is not None
        self.check(ids, lengths)
        if bags.attended is not None:
            return self._attended(bags, dtype)
        bag_of = ops.bags_of_ids(ids, lengths)
        fields, wide, vectors = bag_of % max(lengths.shape[1], 1), ids.long(), []
        if weights is not None and pooling == "mean":  # torch supports weights for sums only
            pooling, weights = "sum", weights / lengths.flatten()[bag_of]
        pool = partial(nn.functional.embedding_bag, mode=pooling, sparse=True)
        of_tables = list(self.embeddings.parameters())
        for i, place in enumerate(self._places):
            weight, own, chosen = of_tables[place], lengths[:, i].long(), fields == i
            begins = own.cumsum(0) - own
            factors = None if weights is None else weights[chosen]
            vectors.append(pool(wide[chosen], weight, begins, per_sample_weights=factors))
        return self._stack(vectors, len(lengths), dtype)

    def _attended(self, bags: Bags, dtype: torch.dtype) -> Tensor:
        """Returns the vectors of bags of which some are weighted by target attention."""
        assert bags.lengths is not None
        assert bags.attended is not None
        bag_of = ops.bags_of_ids(bags.ids, bags.lengths)
        fields, wide = bag_of % bags.lengths.shape[1], bags.ids.long()
        of_tables, parts = list(self.embeddings), []
        by_field = [(fields == i).nonzero().squeeze(1) for i in range(len(self._places))]
        for place, chosen in zip(self._places, by_field, strict=True):
            parts.append(of_tables[place](wide[chosen]))
        vectors = torch.cat(parts)[torch.cat(by_field).argsort()]
        shape = bags.lengths.shape[0], bags.lengths.shape[1]
        return ops.attended_sum(vectors, bag_of, shape, *bags.attended, bags.weights).to(dtype)

    def _stack(self, vectors: list[Tensor], batch: int, dtype: torch.dtype) -> Tensor:
        if vectors:
            return torch.stack(vectors, dim=1).to(dtype)
        device = self.table_offsets.device
        return torch.zeros(batch, 0, self.dim, dtype=dtype, device=device, requires_grad=True)
