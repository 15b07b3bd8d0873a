"""The ids of a look-up in embedding tables."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm import ops


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

    def pooled(self, weight: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the vectors of bags with lengths; see `ops.joint_embedding`."""
        assert self.lengths is not None
        if self.attended is not None:
            operands = weight, self.ids, offsets, self.lengths, *self.attended
            return ops.attended_bag(*operands, sample_weights=self.weights, dtype=dtype)
        return ops.joint_embedding(
            weight,
            self.ids,
            offsets,
            self.lengths,
            sample_weights=self.weights,
            pooling=self.pooling,
            dtype=dtype,
        )
