"""LAMB (You et al., 2019): Adam whose step is scaled, tensor by tensor, to the weights' norm."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from dlrm.train.optim.base import LossScaled, Weights


class _Rule(NamedTuple):
    """The differences between flavors.

    Attributes:
        max_grad_norm: all gradients are divided by max(1, their joint 2-norm / this).
        bias_correction: correct the moments for their start at 0.
        adapt_all: adapt steps of weights without decay as well.
    """

    max_grad_norm: float | None
    bias_correction: bool
    adapt_all: bool


_NVLAMB = _Rule(max_grad_norm=1.0, bias_correction=True, adapt_all=False)
_POPART = _Rule(max_grad_norm=None, bias_correction=False, adapt_all=True)
LAMB_FLAVORS = {"nvlamb": _NVLAMB, "popart": _POPART, "paper": _NVLAMB}


class Lamb(LossScaled, Optimizer):
    """u = m' / (sqrt(v') + eps) + weight_decay * w; the weights w lose lr * |w| / |u| * u.

    m' and v' are Adam's moments, corrected for their start at 0. Norms are those of one tensor, and
    the ratio is 1 if one of them is 0. The flavors are those of:

    * "nvlamb", NVIDIA and Habana: gradients with a joint 2-norm above 1 are first scaled down to 1,
      and the ratio is 1 in groups without decay;
    * "popart", Graphcore: no scaling and no correction, and a ratio for every tensor;
    * "paper", as timm reads the paper: another name of "nvlamb".

    Args:
        groups: weights, or groups of them, with `weight_decay`.
        lr: learning rate, a scalar on the weights' device.
        flavor: one of `LAMB_FLAVORS`.
        max_weight_norm: |w| is clamped to this.
    """

    def __init__(
        self,
        groups: Weights,
        lr: Tensor,
        flavor: str = "nvlamb",
        eps: float = 1e-6,
        max_weight_norm: float = math.inf,
    ):
        super().__init__(groups, {"lr": lr, "eps": eps, "weight_decay": 0.0})
        self._rule, self._max_weight_norm = LAMB_FLAVORS[flavor], max_weight_norm
        for group in self.param_groups:
            for weight in group["params"]:
                moment = torch.zeros_like(weight, requires_grad=False)
                self.state[weight].update(
                    exp_avg=moment,
                    exp_avg_sq=moment.clone(),
                    step=torch.zeros((), device=weight.device),
                )

    @torch.no_grad()
    def step(self, closure=None) -> None:  # type: ignore[override]
        assert closure is None, "no closure"
        divisor = self._divisor()
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            # One by one on the CPU, so that each pass finds the tensors in the cache.
            together = len(weights) if weights and weights[0].is_cuda else 1
            for begin in range(0, len(weights), together):
                self._update(weights[begin : begin + together], group, divisor)

    def _divisor(self) -> Tensor | None:
        """Returns the divisor of gradients, for the loss scale and for clipping."""
        limit = self._rule.max_grad_norm
        if limit is None:
            return self.grad_scale
        weights = [weight for group in self.param_groups for weight in group["params"]]
        grads = [weight.grad for weight in weights if weight.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads).float()
        least = torch.ones_like(norm) if self.grad_scale is None else self.grad_scale
        return torch.maximum(least, norm / limit)

    def _update(self, weights: list[Tensor], group: dict[str, Any], divisor: Tensor | None) -> None:
        states = [self.state[weight] for weight in weights]
        steps = [state["step"] for state in states]
        updates = self._adam(weights, states, group, divisor)
        decay, rate = group["weight_decay"], group["lr"]
        if self.found_inf is not None:
            torch._foreach_sub_(steps, [self.found_inf] * len(steps))
            rate = rate * (self.found_inf == 0)
        if decay:
            torch._foreach_add_(updates, weights, alpha=decay)
        rates = [rate] * len(weights)
        if decay or self._rule.adapt_all:
            rates = list((self._ratios(weights, updates) * rate).unbind())
        torch._foreach_addcmul_(weights, updates, rates, -1)

    def _adam(
        self, weights: list[Tensor], states: list[dict], group: dict, divisor: Tensor | None
    ) -> list[Tensor]:
        """Advances the moments, and returns Adam's steps as torch's fused kernel adds them to 0."""
        moments = [state["exp_avg"] for state in states]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        if not self._rule.bias_correction:  # it vanishes after infinitely many steps
            steps = [torch.full_like(step, math.inf) for step in steps]
        updates = [torch.zeros_like(moment) for moment in moments]
        torch._fused_adam_(
            updates,
            [weight.grad for weight in weights if weight.grad is not None],
            moments,
            [state["exp_avg_sq"] for state in states],
            [],
            steps,
            lr=-1.0,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
            found_inf=self.found_inf,
        )
        return updates

    def _ratios(self, weights: list[Tensor], updates: list[Tensor]) -> Tensor:
        dtype = updates[0].dtype
        sizes = torch.stack(torch._foreach_norm(weights, 2, dtype))
        sizes.clamp_(max=self._max_weight_norm)
        steps = torch.stack(torch._foreach_norm(updates, 2, dtype))
        return torch.where((sizes > 0) & (steps > 0), sizes / steps, 1)
