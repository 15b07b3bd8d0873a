"""The bottom MLP, which turns a sample's numerical fields into a vector of the interaction."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dlrm.model.layers.mlp import MLP, mlp_layers


class BottomMLP(MLP):
    """The bottom MLP over all numerical fields; its weights are those of an `MLP`.

    Attributes:
        num_vectors: number of vectors of a sample that enter the interaction.
    """

    num_vectors = 1

    def forward(self, numerical: Tensor) -> Tensor:
        """Returns `[samples, dim]` from `[samples, fields]` of any floating dtype."""
        return super().forward(numerical.float())

    def exportable(self) -> nn.Module:
        """Returns the same network in plain operators, with shared weights."""
        return _PlainLayers(*self)


def bottom_mlp(
    num_fields: int, sizes: Sequence[int], seed: int, dtype: torch.dtype, optimized: bool
) -> BottomMLP:
    """Returns a new bottom MLP; see `dlrm.model.layers.mlp.mlp`."""
    layers = mlp_layers(num_fields, sizes, seed, "bottom_mlp")
    return BottomMLP(*layers, dtype=dtype, optimized=optimized)


class _PlainLayers(nn.Sequential):
    def forward(self, numerical: Tensor) -> Tensor:
        vectors = numerical.float()
        for layer in self:
            vectors = layer(vectors)
        return vectors
