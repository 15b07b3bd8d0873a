"""Target attention over ordered lists (DIN; Zhou et al., 2018, arXiv 1706.06978)."""

from collections.abc import Iterable
from typing import cast

import torch
from torch import nn

from dlrm import ops
from dlrm.model.layers.initialize import fill_normal, generator


class ActivationUnit(nn.Module):
    """Weighs an item of a list by the sample's candidate.

    A layer of `hidden` neurons with ReLU takes item, candidate, their difference and their product;
    a linear layer makes the weight of its output. No softmax follows: a list of many items like the
    candidate has a long vector. Weights begin near 1, so that a list begins as its items' sum.

    Args:
        dim: columns of items and candidates.
        name: name of the unit, on which initial values depend.
    """

    def __init__(self, dim: int, hidden: int, name: str, seed: int = 0) -> None:
        super().__init__()
        self.dim = dim
        self.weight = nn.Parameter(torch.empty(hidden, 4 * dim))
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.output = nn.Parameter(torch.empty(hidden))
        self.output_bias = nn.Parameter(torch.ones(()))
        with torch.no_grad():
            random = generator(seed, f"{name}.weight")
            fill_normal(self.weight, (2 / (hidden + 4 * dim)) ** 0.5, random)
            fill_normal(self.output, (2 / (hidden + 1)) ** 0.5, generator(seed, f"{name}.output"))

    def operands(self) -> ops.ActivationUnits:
        """Returns the weights in the form of `ops.attended_bag`, without a dimension of lists."""
        items, candidates, differences, products = self.weight.split(self.dim, 1)
        folded = items + differences, products, candidates - differences
        return ops.ActivationUnits(*folded, self.bias, self.output, self.output_bias)


class TargetAttention(nn.ModuleDict):
    """The activation units of the attended lists of a model, by number of their field.

    Args:
        fields: the lists' fields.
        dim, hidden, seed: see `ActivationUnit`.
    """

    def __init__(self, fields: Iterable[int], dim: int, hidden: int, seed: int = 0) -> None:
        units = {str(i): ActivationUnit(dim, hidden, f"attention.{i}", seed) for i in fields}
        super().__init__(units)

    def operands(self, fields: Iterable[int]) -> ops.ActivationUnits:
        """Returns the weights of the units of some fields."""
        units = cast("list[ActivationUnit]", [self[str(field)] for field in fields])
        parts = zip(*(unit.operands() for unit in units), strict=True)
        return ops.ActivationUnits(*(torch.stack(part) for part in parts))
