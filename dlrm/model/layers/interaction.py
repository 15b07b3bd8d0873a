"""Interactions of a sample's vectors: pairwise dot products, or concatenation.

To add an interaction, subclass `Interaction` and enter it in `INTERACTIONS`.
"""

import torch
from torch import Tensor, nn

from dlrm import ops

_STRIP = 6  # number of vectors whose products are extracted together; see `_StripWiseDot`


class Interaction(nn.Module):
    """Base of the interactions, which turn the vectors of a sample into one row.

    Args:
        num_vectors: number of vectors of a sample: the dense one and those of the tables.
        dim: columns of each vector.

    Attributes:
        width: columns of the output.
        padding: number of columns at the end that are always zero.
    """

    width: int
    padding: int = 0

    def __init__(self, num_vectors: int, dim: int) -> None:
        super().__init__()
        self.num_vectors, self.dim = num_vectors, dim

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """Returns `[batch, width]` from `[batch, dim]` and `[batch, num_vectors - 1, dim]`."""
        raise NotImplementedError

    def exportable(self) -> tuple[nn.Module, list[int] | None]:
        """Returns the module that is exported instead of this one, and the meaning of its columns.

        The module consists of operators that TorchScript and ONNX have. For each column of its
        output the list has the equal column of this module's output, or -1 for a column that the
        next layer must ignore. None means that the columns are the same.
        """
        return self, None


class Dot(Interaction):
    """`[dense | dots | zeros]` in plain PyTorch; see `ops.dot_interaction`."""

    def __init__(self, num_vectors: int, dim: int) -> None:
        super().__init__(num_vectors, dim)
        self.width = ops.interaction_width(num_vectors - 1, dim)
        self.padding = self.width - dim - num_vectors * (num_vectors - 1) // 2

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        return ops.dot_interaction_reference(dense, embeddings)

    def exportable(self) -> tuple[nn.Module, list[int] | None]:
        module = _StripWiseDot(self.num_vectors)
        return module, module.columns(self.dim)


class NativeDot(Dot):
    """The dot interaction with the native operator, on any device."""

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        return ops.dot_interaction(dense, embeddings)


class Concatenation(Interaction):
    """The concatenation of the vectors."""

    def __init__(self, num_vectors: int, dim: int) -> None:
        super().__init__(num_vectors, dim)
        self.width = num_vectors * dim

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        return torch.cat([dense, embeddings.flatten(1)], dim=1)


INTERACTIONS: dict[str, type[Interaction]] = {  # by their names on the command line
    "cuda_dot": NativeDot,
    "dot": Dot,
    "cat": Concatenation,
}


class _StripWiseDot(nn.Module):
    """The dot interaction as strips of the matrix of all products.

    Extracting the triangle below the diagonal product by product costs ONNX Runtime 9 ns a product,
    as much as a layer. Copying strips of whole rows is fast; the surplus products meet zero weights
    in the first layer of the top MLP.
    """

    def __init__(self, num_vectors: int) -> None:
        super().__init__()
        starts = range(0, num_vectors, _STRIP)
        self.strips = [(start, min(start + _STRIP, num_vectors)) for start in starts]

    def columns(self, dim: int) -> list[int]:
        """Returns the list that `Interaction.exportable` describes."""
        columns = list(range(dim))
        for start, end in self.strips:
            for i in range(start, end):
                columns += [dim + i * (i - 1) // 2 + j if j < i else -1 for j in range(end)]
        return columns

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        vectors = torch.cat([dense.unsqueeze(1), embeddings], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        parts = [dense]
        for start, end in self.strips:
            parts.append(products[:, start:end, :end].reshape(-1, (end - start) * end))
        return torch.cat(parts, dim=1)
