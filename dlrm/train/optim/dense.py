"""Optimizers of dense parameters, and torch's with less work for the host.

Checkpoints store these under the names of torch's classes, with the same state.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dlrm import ops
from dlrm.train.optim.base import LossScaled, ParameterGroups, with_gradients, without_wrapper
from dlrm.train.optim.config import NetworkOptimizerConfig
from dlrm.train.optim.lamb import Lamb


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
        groups = _groups(parameters, weight_decay, decay_all=False)
    lr = torch.zeros((), device=parameters[0].device)
    return CLICK_OPTIMIZERS[kind](groups, lr=lr, fused=True)


def network_optimizer(config: NetworkOptimizerConfig, model: nn.Module) -> Optimizer:
    """Returns the optimizer of all trainable parameters of a model without tables.

    Weights of two or more dimensions decay. Biases and weights of norms do not, unless the
    configuration says so.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = _groups(trained, config.weight_decay, config.decay_norm_and_bias)
    lr, kind, eps = (
        torch.zeros((), device=trained[0].device),
        config.optimizer,
        config.optimizer_eps,
    )
    if kind == "lamb":
        return Lamb(groups, lr, config.lamb_flavor, eps or 1e-6)
    if kind == "rmsprop_tf":
        return RMSpropTF(groups, lr, config.rmsprop_decay, config.momentum, eps or 1e-3)
    if kind in ("adam", "adamw"):
        make = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
        return make(groups, lr=lr, eps=eps or 1e-8, fused=True)
    momentum = 0.0 if kind == "sgd" else config.momentum
    nesterov = kind == "nesterov" and momentum > 0
    sgd = torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, fused=True)
    # torch leaves momentum uninitialized if the very first step is skipped for an overflow.
    for weight in [weight for group in groups for weight in group["params"]] if momentum else []:
        sgd.state[weight]["momentum_buffer"] = torch.zeros_like(weight, requires_grad=False)
    return sgd


def _groups(parameters: Sequence[Tensor], weight_decay: float, decay_all: bool) -> ParameterGroups:
    decayed = [weight for weight in parameters if decay_all or weight.ndim > 1]
    others = [weight for weight in parameters if not decay_all and weight.ndim < 2]
    groups = (
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    )
    return [group for group in groups if group["params"]]


class SGD(LossScaled, torch.optim.SGD):
    """torch's fused SGD without momentum, launched in half the host's time."""

    @without_wrapper
    def step(self) -> None:
        for group, weights, grads in with_gradients(self):
            names = ("lr", "weight_decay", "momentum", "dampening", "nesterov", "maximize")
            options = {name: group[name] for name in names}
            torch._fused_sgd_(weights, grads, [], **options, is_first_step=False, **self.scaling())


class Adagrad(LossScaled, torch.optim.Adagrad):
    """torch's fused Adagrad of dense gradients, without a wait for the device.

    torch 2.11 has the CUDA kernel, but its class refuses to use it.
    """

    @without_wrapper
    def step(self) -> None:
        for group, weights, grads in with_gradients(self):
            steps = [self.state[weight]["step"] for weight in weights]
            sums = [self.state[weight]["sum"] for weight in weights]
            options = {name: group[name] for name in ("lr", "lr_decay", "weight_decay", "eps")}
            torch._foreach_add_(steps, 1)
            torch._fused_adagrad_(
                weights, grads, sums, steps, **options, maximize=False, **self.scaling()
            )
            if self.found_inf is not None:
                torch._foreach_sub_(steps, [self.found_inf] * len(steps))


class Adam(LossScaled, torch.optim.Adam):
    """torch's fused Adam; on the CPU one pass of a native operator over all weights."""

    @without_wrapper
    def step(self) -> None:
        for group, weights, grads in with_gradients(self):
            states = [self.state[weight] or self._initial_state(weight) for weight in weights]
            averages = [state["exp_avg"] for state in states]
            squares = [state["exp_avg_sq"] for state in states]
            steps = [state["step"] for state in states]
            options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
            ops.dense_adam_(weights, grads, averages, squares, steps, **options, **self.scaling())

    def _initial_state(self, weight: Tensor) -> dict[str, Tensor]:
        state = self.state[weight]
        state["step"] = torch.zeros((), device=weight.device)
        state["exp_avg"] = torch.zeros_like(weight)
        state["exp_avg_sq"] = torch.zeros_like(weight)
        return state


class RMSpropTF(LossScaled, Optimizer):
    """RMSprop in TensorFlow's form: s = d*s + (1-d)*g^2 from s = 1; m = mu*m + lr*g/sqrt(s+eps).

    Each step subtracts m from the weights. torch's RMSprop adds eps to the root, starts s at 0 and
    keeps the rate out of m.

    Args:
        groups: groups of weights; g grows by `weight_decay` times the weight.
        lr: learning rate, a scalar on the weights' device.
        decay: d.
        momentum: mu.
    """

    def __init__(
        self, groups: ParameterGroups, lr: Tensor, decay: float, momentum: float, eps: float
    ):
        defaults = {"lr": lr, "decay": decay, "momentum": momentum, "eps": eps, "weight_decay": 0.0}
        super().__init__(groups, defaults)
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["square"] = torch.ones_like(weight, requires_grad=False)
                self.state[weight]["momentum"] = torch.zeros_like(weight, requires_grad=False)

    @without_wrapper
    def step(self) -> None:
        for group, weights, grads in with_gradients(self):
            squares = [self.state[weight]["square"] for weight in weights]
            moments = [self.state[weight]["momentum"] for weight in weights]
            changed = [] if self.found_inf is None else [*weights, *squares, *moments]
            kept = [tensor.clone() for tensor in changed]
            if self.grad_scale is not None:
                grads = list(torch._foreach_div(grads, self.grad_scale))
            if group["weight_decay"]:
                grads = list(torch._foreach_add(grads, weights, alpha=group["weight_decay"]))
            torch._foreach_mul_(squares, group["decay"])
            torch._foreach_addcmul_(squares, grads, grads, 1 - group["decay"])
            roots = torch._foreach_add(squares, group["eps"])
            torch._foreach_sqrt_(roots)
            steps = torch._foreach_div(grads, roots)
            torch._foreach_mul_(steps, group["lr"])
            torch._foreach_mul_(moments, group["momentum"])
            torch._foreach_add_(moments, steps)
            torch._foreach_sub_(weights, moments)
            if self.found_inf is not None:
                for tensor, old in zip(changed, kept, strict=True):
                    tensor.copy_(torch.where(torch.eq(self.found_inf, 0), tensor, old))


CLICK_OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": SGD,
    "adagrad": Adagrad,
    "adam": Adam,
}
