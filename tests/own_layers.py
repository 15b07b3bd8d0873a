"""Layers as a user writes them, registered by name for the tests of every route."""

import torch
from torch import Tensor, nn

import dlrm

OWN = {
    **{"interaction_op": "bilinear", "numerical_embedding": "scaled_fields"},
    "top_mlp": "residual",
}


@dlrm.register_interaction("bilinear")
class Bilinear(nn.Module):
    """x_i W x_j of all pairs of vectors, and the dense vector."""

    def __init__(self, num_vectors: int, dim: int):
        super().__init__()
        self.linear = nn.Linear(dim, dim, bias=False)
        self.pairs: Tensor
        pairs = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.register_buffer("pairs", pairs[0] * num_vectors + pairs[1])

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        vectors = torch.cat([dense.unsqueeze(1), embeddings], dim=1)
        products = torch.bmm(self.linear(vectors), vectors.transpose(1, 2))
        return torch.cat([dense, products.flatten(1).index_select(1, self.pairs)], dim=1)


@dlrm.register_numerical_embedding("scaled_fields")
class ScaledFields(nn.Module):
    """A vector for each field, times its value, plus another."""

    def __init__(self, num_fields: int, dim: int):
        super().__init__()
        self.scales = nn.Parameter(torch.randn(num_fields, dim))
        self.bias = nn.Parameter(torch.zeros(num_fields, dim))

    def forward(self, numerical: Tensor) -> Tensor:
        return numerical.unsqueeze(2) * self.scales + self.bias


@dlrm.register_top_mlp("residual")
class Residual(nn.Module):
    """Two layers of the first size, the second beside a shortcut."""

    def __init__(self, num_inputs: int, sizes: tuple[int, ...]):
        super().__init__()
        size = sizes[0] if sizes else 8
        self.first, self.second = nn.Linear(num_inputs, size), nn.Linear(size, size)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.first(inputs))
        return hidden + torch.relu(self.second(hidden))
