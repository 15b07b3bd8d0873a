"""Base of optimizers, whose learning rate and loss scale are scalars on the device."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.optim import Optimizer, optimizer as torchs

ParameterGroups = list[dict[str, Any]]  # groups of parameters, with their weight decay


class LossScaled:
    """A mixin for optimizers that divide gradients by a loss scale and skip a step on the device.

    Attributes:
        grad_scale: gradients are divided by it; None is 1.
        found_inf: if it is not 0, a step updates nothing; None is 0.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def scaling(self) -> dict[str, Any]:
        """Returns both as arguments of torch's fused kernels."""
        return {"grad_scale": self.grad_scale, "found_inf": self.found_inf}


def without_wrapper(step: Callable[[Any], None]) -> Any:
    """Returns an optimizer's `step` that skips torch's wrapper unless hooks or a profiler need it.

    The wrapper opens a section of the profiler, which takes 20 us in the cold caches of a step.
    """
    wrapped = Optimizer.profile_hook_step(torch.no_grad()(step))

    def run(self: Any, closure: None = None) -> None:
        assert closure is None, "no closure"
        hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        if hooks or _GLOBAL_HOOKS[0] or _GLOBAL_HOOKS[1] or profiler._is_profiler_enabled:
            wrapped(self)
            return
        with torch.no_grad():
            step(self)

    run.hooked = True  # type: ignore[attr-defined]  # torch wraps no such function
    return run


_GLOBAL_HOOKS = torchs._global_optimizer_pre_hooks, torchs._global_optimizer_post_hooks


def with_gradients(
    optimizer: Optimizer,
) -> Iterator[tuple[dict[str, Any], list[Tensor], list[Tensor]]]:
    """Yields each group that has gradients, its weights with one, and the gradients."""
    for group in optimizer.param_groups:
        weights = [weight for weight in group["params"] if weight.grad is not None]
        if weights:
            yield group, weights, [weight.grad for weight in weights]


def finish_updates(optimizers: Iterable[Optimizer]) -> None:
    """Brings all weights up to date, so that they can be evaluated and saved."""
    for optimizer in optimizers:
        if hasattr(optimizer, "catch_up"):
            optimizer.catch_up()


def set_learning_rate(optimizers: Iterable[Optimizer], value: float) -> None:
    """Sets the learning rate of every parameter group, in place if it is a device scalar."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value
