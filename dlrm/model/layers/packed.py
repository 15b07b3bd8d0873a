"""Packed ensembles: members that share a network except for a few weights each.

The form is TabM-mini (Gorishniy et al., 2024, arXiv 2410.24210). Before the interaction, each
member multiplies a sample's vectors by its own factors, as BatchEnsemble's first adapter does; at
the end, each member has its own head. Look-ups, bottom MLP and all weights between are shared.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlrm.model.layers.initialize import generator


class Adapters(nn.Module):
    """Factors of each member for the vectors of a sample, initialized as random signs, 1 or -1.

    Args:
        members: number of members.
        num_vectors: number of vectors of a sample: the dense one and the others.
        dim: columns of each vector.
        seed: seed of the initial values.
    """

    def __init__(self, members: int, num_vectors: int, dim: int, seed: int) -> None:
        super().__init__()
        self.shape = members, num_vectors, dim
        random, count = generator(seed, "adapters"), members * num_vectors * dim
        signs = torch.empty(count)
        if not signs.is_meta:  # where arithmetic makes torch import its compiler
            signs = 2.0 * torch.randint(2, (count,), generator=random) - 1
        self.factors = nn.Parameter(signs)  # one-dimensional: weight decay is for matrices

    def forward(self, dense: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Returns both for each member, `[samples * members, ...]`, sample after sample.

        Args:
            dense: `[samples, dim]`.
            embeddings: `[samples, num_vectors - 1, dim]`.
        """
        factors = self.factors.to(dense.dtype).view(self.shape)
        of_members = dense.unsqueeze(1) * factors[:, 0], embeddings.unsqueeze(1) * factors[:, 1:]
        return of_members[0].flatten(0, 1), of_members[1].flatten(0, 1)


def member_logits(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns the logits of the members, `[samples, members]`.

    Args:
        hidden: inputs of the heads, `[samples * members, inputs]`, sample after sample.
        weight: weights of the members' heads, `[members, inputs]`.
        bias: biases of the members' heads, `[members]`.
    """
    return (hidden.view(-1, weight.shape[0], weight.shape[1]) * weight).sum(2) + bias


def mean_of_members(logits: Tensor) -> Tensor:
    """Returns the logit of the mean of the members' probabilities, `[samples, 1]`.

    Args:
        logits: logits of the members, `[samples, members]`.
    """
    # -softplus(-x) is a stable logarithm of the sigmoid, which ONNX lacks.
    positive = torch.logsumexp(-F.softplus(-logits), dim=1, keepdim=True)
    return positive - torch.logsumexp(-F.softplus(logits), dim=1, keepdim=True)
