"""Shared parts of the image networks: normalization, stages and initial weights."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from dlrm.vision.config import NetworkConfig

NewNorm = Callable[[int], nn.Module]  # number of channels -> normalization


def norm_layers(config: "NetworkConfig", groups: int, eps: float) -> NewNorm:
    """Returns a function from a number of channels to a batch or group normalization.

    Args:
        groups: the network's default.
        eps: the network's default of what is added to the variance.
    """
    eps = eps if config.norm_eps is None else config.norm_eps
    groups = config.groups or groups

    def new_norm(channels: int) -> nn.Module:
        if config.norm == "batch":
            return nn.BatchNorm2d(channels, eps, config.norm_momentum)
        if channels % groups:
            raise ValueError(f"--groups: expected a divisor of {channels} channels, got {groups}")
        return nn.GroupNorm(groups, channels, eps)

    return new_norm


def draw_weight(module: nn.Module, values: Tensor, random: torch.Generator) -> None:
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
        self, stages: Mapping[str, nn.Module], hidden: Tensor | None, images: Tensor | None = None
    ) -> Tensor:
        """Returns the output of consecutive stages, from `hidden` or, without it, from `images`."""
        values: Any = images if hidden is None else hidden
        for stage in stages.values():
            values = stage(values)
        return values

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits `[batch, num_classes]` of normalized `[batch, 3, height, width]`."""
        return self.run(self.stages(), None, images)


class GlobalMean(nn.Module):
    """The mean over the pixels: `[batch, channels]` of `[batch, channels, height, width]`."""

    def forward(self, images: Tensor) -> Tensor:
        """Returns the mean."""
        return images.mean((2, 3))
