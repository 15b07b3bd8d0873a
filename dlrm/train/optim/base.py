"""Base classes of optimizers, whose learning rate and loss scale are scalars on the device."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

Weights = Iterable[Tensor] | Iterable[dict[str, Any]]


class LossScaled:
    """A mixin for optimizers that divide gradients by a loss scale and skip a step on the device.

    Attributes:
        grad_scale: gradients are divided by it; None is 1.
        found_inf: if it is not 0, a step updates nothing; None is 0.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None


class DefersUpdates:
    """A mixin for optimizers whose weights are not up to date after a step."""

    def finish_updates(self) -> None:
        """Brings all weights up to date."""
        raise NotImplementedError


def finish_updates(optimizers: Iterable[Optimizer]) -> None:
    """Brings all weights up to date, so that they can be evaluated and saved."""
    for optimizer in optimizers:
        if isinstance(optimizer, DefersUpdates):
            optimizer.finish_updates()


def handles_loss_scale(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer reads `grad_scale` and `found_inf` on the device."""
    return isinstance(optimizer, LossScaled) or bool(optimizer.defaults.get("fused"))


def set_learning_rate(optimizers: Iterable[Optimizer], value: float) -> None:
    """Sets the learning rate of every parameter group, in place if it is a device scalar."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value
