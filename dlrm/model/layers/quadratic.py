"""Quadratic layers over the vectors of a sample (QNN-alpha; Li et al., 2025, arXiv 2505.17999)."""

import copy

import torch
from torch import Tensor, nn

from dlrm.model.layers.interaction import Interaction
from dlrm.model.layers.mlp import MLP


class QuadraticLayers(Interaction):
    """Layers x' = x + sum over r of x * dropout(relu(norm(W_r x + b_r))).

    x is at first the concatenation of a sample's vectors. Each layer multiplies it by a factor that
    depends on it, so the degree of the products grows with each layer. The W_r of a layer are one
    matrix, `[rows * width, width]`, the hidden layer of an `MLP` with the initial values of one.

    Args:
        rows: number of products r that a layer adds up.
        batch_norm: normalize each W_r x + b_r.
        dropout: share of the factors that training sets to 0.
        seed: seed of the initial values, which also depend on the names of the weights.
        dtype: see `MLP`.
    """

    def __init__(
        self,
        num_vectors: int,
        dim: int,
        layers: int = 2,
        rows: int = 2,
        batch_norm: bool = False,
        dropout: float = 0.0,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(num_vectors, dim)
        self.width = num_vectors * dim
        sizes, options = [rows * self.width], (dtype, batch_norm, dropout)
        self.layers = nn.ModuleList(
            MLP(self.width, sizes, seed, f"quadratic.{index}", *options) for index in range(layers)
        )

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        values = torch.cat([dense, embeddings.flatten(1)], dim=1)
        for layer in self.layers:
            factors = layer(values)
            factors = factors.view(factors.shape[0], -1, values.shape[1]).sum(1)
            values = torch.addcmul(values, values, factors)
        return values

    def exportable(self) -> tuple[nn.Module, list[int] | None]:
        plain = [layer.exportable() for layer in self.layers if isinstance(layer, MLP)]
        exported = copy.copy(self)
        exported._modules = {"layers": nn.ModuleList(plain)}
        return exported, None
