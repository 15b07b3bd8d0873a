"""What the image networks share: how they are normalised, laid out in memory and initialised."""

import torch
from torch import nn

NORMS = ("batch", "group")


def norm_layer(norm: str, channels: int, groups: int, eps: float, momentum: float) -> nn.Module:
    """Returns batch or group normalisation of `channels`.

    Args:
        norm: one of `NORMS`.
        channels: of the images.
        groups: of group normalisation.
        eps: added to the variance.
        momentum: weight of the newest batch in the running averages of batch normalisation.

    Raises:
        ValueError: there is no such norm, or the groups are not of equal size.
    """
    if norm == "batch":
        return nn.BatchNorm2d(channels, eps, momentum)
    if norm != "group":
        raise ValueError(f"--norm: expected one of {', '.join(NORMS)}, got {norm!r}")
    if groups < 1 or channels % groups:
        raise ValueError(f"--groups: expected a divisor of {channels} channels, got {groups}")
    return nn.GroupNorm(groups, channels, eps)


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


class GlobalMean(nn.Module):
    """The mean over the pixels: `[batch, channels]` of `[batch, channels, height, width]`."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the mean."""
        return images.mean((2, 3))
