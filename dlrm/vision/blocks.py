"""Shared parts of the image networks: normalization, stages and initial weights."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import nn

NORMS = ("batch", "group")
VariantT = TypeVar("VariantT")


def norm_layers(norm: str, groups: int, eps: float, momentum: float) -> Callable[[int], nn.Module]:
    """Returns a function from a number of channels to a batch or group normalization.

    Args:
        norm: one of `NORMS`.
        groups: number of groups of group normalization.
        eps: added to the variance.
        momentum: weight of the newest batch in the running averages of batch normalization.

    Raises:
        ValueError: there is no such norm or, from the function, the groups are of unequal size.
    """
    if norm not in NORMS:
        raise ValueError(f"--norm: expected one of {', '.join(NORMS)}, got {norm!r}")

    def new_norm(channels: int) -> nn.Module:
        if norm == "batch":
            return nn.BatchNorm2d(channels, eps, momentum)
        if groups < 1 or channels % groups:
            raise ValueError(f"--groups: expected a divisor of {channels} channels, got {groups}")
        return nn.GroupNorm(groups, channels, eps)

    return new_norm


def variant_of(model: str, variants: Mapping[str, VariantT]) -> VariantT:
    """Returns the variant of a network that `--model` names."""
    if model not in variants:
        raise ValueError(f"--model: expected one of {', '.join(variants)}, got {model!r}")
    return variants[model]


def draw_weight(module: nn.Module, values: torch.Tensor, random: torch.Generator) -> None:
    """Fills `values` with initial weights of a layer.

    A convolution's are normal with variance 2 / (outputs of a group * kernel size) (He et al.,
    2015), a linear layer's uniform with Glorot's bound.
    """
    if isinstance(module, nn.Conv2d):
        fan_out = values[:, 0].numel() / module.groups
        values.normal_(0, (2 / fan_out) ** 0.5, generator=random)
    else:
        bound = (6 / sum(values.shape)) ** 0.5
        values.uniform_(-bound, bound, generator=random)


class StagedNetwork(nn.Module):
    """An image network that calls named stages in order."""

    def stages(self) -> dict[str, nn.Module]:
        """Returns name -> module of the stages that `forward` calls, in order."""
        raise NotImplementedError

    def run(
        self,
        stages: Mapping[str, nn.Module],
        hidden: torch.Tensor | None,
        images: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the output of consecutive stages.

        Args:
            hidden: the output of the previous stage; None if there is none.
        """
        values = images if hidden is None else hidden
        assert values is not None
        for stage in stages.values():
            values = stage(values)
        return values

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns logits `[batch, num_classes]` of normalized `[batch, 3, height, width]`."""
        return self.run(self.stages(), None, images)


class GlobalMean(nn.Module):
    """The mean over the pixels: `[batch, channels]` of `[batch, channels, height, width]`."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the mean."""
        return images.mean((2, 3))
