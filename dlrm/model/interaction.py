"""How the vectors of a sample meet: pairwise dot products, or side by side."""

from collections.abc import Callable

import torch
from torch import Tensor

from dlrm import ops

INTERACTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cuda_dot": ops.dot_interaction,  # the native operator, whatever the device
    "dot": ops.dot_interaction_reference,
    "cat": lambda dense, embeddings: torch.cat([dense, embeddings.flatten(1)], dim=1),
}


def interaction_width(op: str, num_tables: int, dim: int) -> tuple[int, int]:
    """Returns the columns of the interaction's output, and how many of them always are zero."""
    if op == "cat":
        return (num_tables + 1) * dim, 0
    width = ops.interaction_width(num_tables, dim)
    return width, width - dim - num_tables * (num_tables + 1) // 2
