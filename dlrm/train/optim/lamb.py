"""LAMB (You et al., 2019): Adam whose step is scaled, tensor by tensor, to the weights' norm."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dlrm.train.optim.base import LossScaled, ParameterGroups, with_gradients, without_wrapper


class Lamb(LossScaled, Optimizer):
    """u = m' / (sqrt(v') + eps) + weight_decay * w; the weights w lose lr * |w| / |u| * u.

    m' and v' are Adam's moments, corrected for their start at 0. Norms are those of one tensor, and
    the ratio is 1 if one of them is 0. The flavors are those of:

    * "nvlamb", NVIDIA and Habana: gradients with a joint 2-norm above 1 are first scaled down to 1,
      and the ratio is 1 in groups without decay;
    * "popart", Graphcore: no scaling and no correction, and a ratio for every tensor.

    Args:
        groups: groups of weights, with `weight_decay`.
        lr: learning rate, a scalar on the weights' device.
    """

    def __init__(
        self, groups: ParameterGroups, lr: Tensor, flavor: str = "nvlamb", eps: float = 1e-6
    ):
        super().__init__(groups, {"lr": lr, "eps": eps, "weight_decay": 0.0})
        self._is_popart = flavor == "popart"
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight].update(
                    exp_avg=torch.zeros_like(weight, requires_grad=False),
                    exp_avg_sq=torch.zeros_like(weight, requires_grad=False),
                    step=torch.zeros((), device=weight.device),
                )

    @without_wrapper
    def step(self) -> None:
        divisor = self.grad_scale if self._is_popart else self._divisor()
        for group, weights, _ in with_gradients(self):
            # One by one on the CPU, so that each pass finds the tensors in the cache.
            together = len(weights) if weights[0].is_cuda else 1
            for begin in range(0, len(weights), together):
                self._update(weights[begin : begin + together], group, divisor)

    def _divisor(self) -> Tensor:
        """Returns the divisor of gradients, for the loss scale and for clipping to the norm 1."""
        grads = [grad for _, _, grads in with_gradients(self) for grad in grads]
        norm = torch.nn.utils.get_total_norm(grads).float()
        least = torch.ones_like(norm) if self.grad_scale is None else self.grad_scale
        return torch.maximum(least, norm)

    def _update(self, weights: list[Tensor], group: dict[str, Any], divisor: Tensor | None) -> None:
        updates = self._adam(weights, group["eps"], divisor)
        decay, rate = group["weight_decay"], group["lr"]
        if self.found_inf is not None:
            steps = [self.state[weight]["step"] for weight in weights]
            torch._foreach_sub_(steps, [self.found_inf] * len(steps))
            rate = rate * (self.found_inf == 0)
        if decay:
            torch._foreach_add_(updates, weights, alpha=decay)
        rates = [rate] * len(weights)
        if decay or self._is_popart:
            rates = list((_ratios(weights, updates) * rate).unbind())
        torch._foreach_addcmul_(weights, updates, rates, -1)

    def _adam(self, weights: list[Tensor], eps: float, divisor: Tensor | None) -> list[Tensor]:
        """Advances the moments, and returns Adam's steps as torch's fused kernel adds them to 0."""
        states = [self.state[weight] for weight in weights]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        if self._is_popart:  # the correction vanishes after infinitely many steps
            steps = [torch.full_like(step, math.inf) for step in steps]
        updates = [torch.zeros_like(state["exp_avg"]) for state in states]
        torch._fused_adam_(
            updates,
            [weight.grad for weight in weights if weight.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            steps,
            lr=-1.0,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=eps,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
            found_inf=self.found_inf,
        )
        return updates


def _ratios(weights: list[Tensor], updates: list[Tensor]) -> Tensor:
    dtype = updates[0].dtype
    sizes = torch.stack(torch._foreach_norm(weights, 2, dtype))
    steps = torch.stack(torch._foreach_norm(updates, 2, dtype))
    return torch.where((sizes > 0) & (steps > 0), sizes / steps, 1)
