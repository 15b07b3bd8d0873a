"""What the image networks share: how they are normalised, laid out in memory and initialised."""

import torch
from torch import nn

from dlrm.model.initialize import generator

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


def materialize(network: nn.Module, device: torch.device, seed: int) -> None:
    """Gives a network that was built on the meta device memory and initial weights.

    A convolution's weights are normal with variance 2 / (outputs of a group * kernel size) (He et
    al., 2015), a linear layer's uniform with Glorot's bound, biases 0, norms 1 and 0. They depend
    on the seed and their names alone. On the meta device nothing is done.
    """
    if device.type == "meta":
        return
    network.to_empty(device=device)
    with torch.no_grad():
        for name, module in network.named_modules():
            if isinstance(module, nn.BatchNorm2d | nn.GroupNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Conv2d | nn.Linear):
                values = torch.empty(module.weight.shape, device="cpu")
                random = generator(seed, f"{name}.weight")
                if isinstance(module, nn.Conv2d):
                    fan_out = values[:, 0].numel() / module.groups
                    values.normal_(0, (2 / fan_out) ** 0.5, generator=random)
                else:
                    bound = (6 / sum(values.shape)) ** 0.5
                    values.uniform_(-bound, bound, generator=random)
                module.weight.copy_(values)
                if module.bias is not None:
                    module.bias.zero_()


class GlobalMean(nn.Module):
    """The mean over the pixels: `[batch, channels]` of `[batch, channels, height, width]`."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the mean."""
        return images.mean((2, 3))
