"""Cross layers over the vectors of a sample (DCNv2; Wang et al., 2021, arXiv 2008.13535)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlrm.model.layers.initialize import fill_normal, generator
from dlrm.model.layers.interaction import Interaction


class CrossLayers(Interaction):
    """Layers x' = x0 * (W x + b) + x, where x0 is the concatenation of a sample's vectors.

    Each layer raises the degree of the products by one. W is `[width, width]`, or, with low rank,
    U V with U `[width, rank]` and V `[rank, width]`. It is initialized from a normal distribution
    of variance 2 / (inputs + outputs), and b as 0, as in MLPerf's DLRM-DCNv2.

    Args:
        rank: rank of W; None is full rank.
        seed: seed of the initial values, which also depend on the names of the weights.
    """

    def __init__(
        self,
        num_vectors: int,
        dim: int,
        layers: int = 3,
        rank: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(num_vectors, dim)
        self.width = num_vectors * dim
        self.layers = nn.ModuleList(
            _CrossLayer(self.width, rank, f"cross.{index}", seed) for index in range(layers)
        )

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        first = torch.cat([dense, embeddings.flatten(1)], dim=1)
        crossed = first
        for layer in self.layers:
            crossed = layer(first, crossed)
        return crossed


class _CrossLayer(nn.Module):
    """One cross layer; it multiplies in the dtype of its input."""

    def __init__(self, width: int, rank: int | None, name: str, seed: int) -> None:
        super().__init__()
        shapes = [(width, width)] if rank is None else [(rank, width), (width, rank)]
        self.weights = nn.ParameterList(
            _normal(shape, f"{name}.{index}", seed) for index, shape in enumerate(shapes)
        )
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, first: Tensor, inputs: Tensor) -> Tensor:
        products = inputs
        for weight in self.weights:
            products = F.linear(products, weight.to(inputs.dtype))
        return torch.addcmul(inputs, first, products + self.bias.to(inputs.dtype))


def _normal(shape: tuple[int, int], name: str, seed: int) -> nn.Parameter:
    std, random = (2 / sum(shape)) ** 0.5, generator(seed, name)
    return nn.Parameter(fill_normal(torch.empty(shape), std, random))
