"""RMSprop in TensorFlow's form."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dlrm.train.optim.base import LossScaled, Weights


class RMSpropTF(LossScaled, Optimizer):
    """RMSprop in TensorFlow's form: s = d*s + (1-d)*g^2 from s = 1; m = mu*m + lr*g/sqrt(s+eps).

    Each step subtracts m from the weights. torch's RMSprop adds eps to the root, starts s at 0 and
    keeps the rate out of m.

    Args:
        groups: weights, or groups of them; g grows by `weight_decay` times the weight.
        lr: learning rate, a scalar on the weights' device.
        decay: d.
        momentum: mu.
    """

    def __init__(self, groups: Weights, lr: Tensor, decay: float, momentum: float, eps: float):
        defaults = {"lr": lr, "decay": decay, "momentum": momentum, "eps": eps, "weight_decay": 0.0}
        super().__init__(groups, defaults)
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["square"] = torch.ones_like(weight, requires_grad=False)
                self.state[weight]["momentum"] = torch.zeros_like(weight, requires_grad=False)

    @torch.no_grad()
    def step(self, closure=None) -> None:  # type: ignore[override]
        assert closure is None, "no closure"
        found_inf = self.found_inf
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            kept = self._kept(weights)
            self._update(weights, [w.grad for w in weights if w.grad is not None], group)
            for tensor, old in kept:
                assert found_inf is not None
                tensor.copy_(torch.where(torch.eq(found_inf, 0), tensor, old))

    def _update(self, weights: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        if not weights:
            return
        squares = [self.state[weight]["square"] for weight in weights]
        moments = [self.state[weight]["momentum"] for weight in weights]
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

    def _kept(self, weights: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Returns, under a loss scale, each tensor that a step changes and a copy of it."""
        if self.found_inf is None:
            return []
        states = (state for weight in weights for state in self.state[weight].values())
        return [(tensor, tensor.clone()) for tensor in (*weights, *states)]
