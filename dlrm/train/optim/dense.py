"""The registry of optimizers of dense parameters, and torch's with less work for the host."""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from dlrm import ops
from dlrm.train.optim.base import LossScaled, without_wrapper
from dlrm.train.optim.lamb import Lamb
from dlrm.train.optim.rmsprop import RMSpropTF

if TYPE_CHECKING:
    from dlrm.train.optim.network_optimizers import NetworkOptimizerConfig

ParameterGroups = list[dict[str, Any]]  # groups of parameters, with their weight decay


def dense_optimizer(
    kind: str, parameters: Iterable[Tensor], weight_decay: float = 0.0
) -> Optimizer:
    """Returns an optimizer of the MLPs of a click network, with the learning rate as a scalar.

    Args:
        kind: one of `CLICK_OPTIMIZERS`.
        weight_decay: adds this times the weight to the gradient of every matrix; one-dimensional
            parameters, such as biases, do not decay.
    """
    parameters = list(parameters)
    groups: ParameterGroups = [{"params": parameters}]
    if weight_decay:
        matrices = [weight for weight in parameters if weight.ndim > 1]
        others = [weight for weight in parameters if weight.ndim < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others}]
    make = DENSE_OPTIMIZERS[kind].clicks
    assert make is not None, kind
    return make(groups, lr=torch.zeros((), device=parameters[0].device))


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


def _sgd(groups: ParameterGroups, lr: Tensor, config: "NetworkOptimizerConfig") -> Optimizer:
    return torch.optim.SGD(groups, lr=lr, fused=True)


def _momentum(groups: ParameterGroups, lr: Tensor, config: "NetworkOptimizerConfig") -> Optimizer:
    momentum = config.momentum
    nesterov = config.optimizer == "nesterov" and momentum > 0
    sgd = torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, fused=True)
    for weight in _weights(groups) if momentum else ():
        # torch leaves it uninitialized if the very first step is skipped for an overflow.
        sgd.state[weight]["momentum_buffer"] = torch.zeros_like(weight, requires_grad=False)
    return sgd


def _rmsprop_tf(groups: ParameterGroups, lr: Tensor, config: "NetworkOptimizerConfig") -> Optimizer:
    eps = config.optimizer_eps or 1e-3
    return RMSpropTF(groups, lr, config.rmsprop_decay, config.momentum, eps)


def _adam(groups: ParameterGroups, lr: Tensor, config: "NetworkOptimizerConfig") -> Optimizer:
    make = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    eps = config.optimizer_eps or 1e-8
    return make(groups, lr=lr, eps=eps, fused=True)


def _lamb(groups: ParameterGroups, lr: Tensor, config: "NetworkOptimizerConfig") -> Optimizer:
    eps, limit = config.optimizer_eps or 1e-6, config.lamb_max_weight_norm or math.inf
    return Lamb(groups, lr, config.lamb_flavor, eps, limit)


def _weights(groups: ParameterGroups) -> Iterator[Tensor]:
    return (weight for group in groups for weight in group["params"])


class DenseOptimizer(NamedTuple):
    """An optimizer of dense parameters.

    Attributes:
        states: number of values that it keeps for each weight.
        clicks: constructor for the MLPs of click networks; None if they cannot use it.
        networks: constructor for image and language networks; None if they cannot use it.
    """

    states: int
    clicks: Callable[..., Optimizer] | None = None
    networks: Callable[[ParameterGroups, Tensor, "NetworkOptimizerConfig"], Optimizer] | None = None

    def state_bytes(self, weights: int) -> int:
        """Returns the bytes of the state of so many float32 weights, scalars aside."""
        return 4 * self.states * weights


DENSE_OPTIMIZERS = {
    "sgd": DenseOptimizer(0, clicks=partial(SGD, fused=True), networks=_sgd),
    "momentum": DenseOptimizer(1, networks=_momentum),
    "nesterov": DenseOptimizer(1, networks=_momentum),
    "rmsprop_tf": DenseOptimizer(2, networks=_rmsprop_tf),
    "adagrad": DenseOptimizer(1, clicks=partial(Adagrad, fused=True)),
    "adam": DenseOptimizer(2, clicks=partial(Adam, fused=True), networks=_adam),
    "adamw": DenseOptimizer(2, networks=_adam),
    "lamb": DenseOptimizer(2, networks=_lamb),
}
CLICK_OPTIMIZERS = tuple(name for name, one in DENSE_OPTIMIZERS.items() if one.clicks)
NETWORK_OPTIMIZERS = tuple(name for name, one in DENSE_OPTIMIZERS.items() if one.networks)
