"""Optimizers of dense parameters: torch's, fused, with less work for the host."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dlrm import ops
from dlrm.train.optim.base import LossScaled, without_wrapper


def dense_optimizer(
    kind: str, parameters: Iterable[Tensor], weight_decay: float = 0.0
) -> Optimizer:
    """Returns one of `DENSE_OPTIMIZERS`, with the learning rate as a device scalar.

    Args:
        kind: its name.
        parameters: the parameters to update.
        weight_decay: adds this times the weight to the gradient of every matrix; one-dimensional
            parameters, such as biases, do not decay.
    """
    parameters = list(parameters)
    groups: list[dict] = [{"params": parameters}]
    if weight_decay:
        matrices = [weight for weight in parameters if weight.ndim > 1]
        others = [weight for weight in parameters if weight.ndim < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others}]
    return DENSE_OPTIMIZERS[kind](groups, lr=torch.zeros((), device=parameters[0].device))


def _with_gradients(
    optimizer: Optimizer,
) -> Iterator[tuple[dict[str, Any], list[Tensor], list[Tensor]]]:
    """Yields each group that has gradients, its weights with one, and the gradients."""
    for group in optimizer.param_groups:
        weights = [weight for weight in group["params"] if weight.grad is not None]
        if weights:
            yield group, weights, [weight.grad for weight in weights]


class SGD(LossScaled, torch.optim.SGD):
    """torch's fused SGD without momentum, launched in half the host's time.

    Checkpoints store it under the name of torch's class.
    """

    @without_wrapper
    def step(self) -> None:
        for group, weights, grads in _with_gradients(self):
            torch._fused_sgd_(
                weights,
                grads,
                [],
                weight_decay=group["weight_decay"],
                momentum=0.0,
                lr=group["lr"],
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
            )


class Adagrad(LossScaled, torch.optim.Adagrad):
    """torch's fused Adagrad of dense gradients, without a wait for the device.

    torch 2.11 has the CUDA kernel, but its class refuses to use it. Checkpoints store it under the
    name of torch's class, with the same state.
    """

    @without_wrapper
    def step(self) -> None:
        for group, weights, grads in _with_gradients(self):
            steps = [self.state[weight]["step"] for weight in weights]
            torch._foreach_add_(steps, 1)
            torch._fused_adagrad_(
                weights,
                grads,
                [self.state[weight]["sum"] for weight in weights],
                steps,
                lr=group["lr"],
                lr_decay=group["lr_decay"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
            )
            if self.found_inf is not None:
                torch._foreach_sub_(steps, [self.found_inf] * len(steps))


class Adam(LossScaled, torch.optim.Adam):
    """torch's fused Adam; on the CPU one pass of a native operator over all weights.

    Checkpoints store it under the name of torch's class, with the same state.
    """

    @without_wrapper
    def step(self) -> None:
        for group, weights, grads in _with_gradients(self):
            states = [self.state[weight] or self._initial_state(weight) for weight in weights]
            ops.dense_adam_(
                weights,
                grads,
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [state["step"] for state in states],
                group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
            )

    def _initial_state(self, weight: Tensor) -> dict[str, Tensor]:
        state = self.state[weight]
        state["step"] = torch.zeros((), device=weight.device)
        state["exp_avg"] = torch.zeros_like(weight)
        state["exp_avg_sq"] = torch.zeros_like(weight)
        return state


DENSE_OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, fused=True),
    "adagrad": partial(Adagrad, fused=True),
    "adam": partial(Adam, fused=True),
}
