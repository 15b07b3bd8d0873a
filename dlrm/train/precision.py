"""Mixed precision: the dtype of products, the static loss scale, clipping."""

import math
from collections.abc import Container, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dlrm.distributed import World, all_sum
from dlrm.train.config import PrecisionConfig
from dlrm.train.optim.base import LossScaled


def autocast(config: PrecisionConfig, device: str) -> AbstractContextManager:
    """Returns the context in which layers compute in the dtype, and norms and losses in float32.

    It keeps no copies of weights, so enter it once for each pass.
    """
    dtype = config.dtype(device)
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.split(":")[0], dtype, cache_enabled=False)


def loss_scaler(config: PrecisionConfig, device: str, *others: Any) -> "LossScaler":
    """Returns the loss scaler of a device, with the static scale under fp16, else without.

    The other arguments are those of `LossScaler`.
    """
    half = config.dtype(device) == torch.float16
    scale = torch.tensor(config.loss_scale, device=device) if half else None
    return LossScaler(scale, *others)


class LossScaler:
    """Backward pass and update under a static loss scale, and with clipped gradients.

    If a scaled gradient is infinite or NaN on any rank, no rank updates any parameter. The decision
    stays on the device for optimizers that read `grad_scale` and `found_inf` there.

    Args:
        scale: a scalar on the device, or None for none.
        max_grad_norm: all gradients are divided by max(1, their joint 2-norm / this).
        parts: the processes that each hold a part of the dense weights.
        counted_elsewhere: weights of this part whose norm another part counts.
    """

    def __init__(
        self,
        scale: Tensor | None = None,
        max_grad_norm: float | None = None,
        parts: World = World(),
        counted_elsewhere: Iterable[Tensor] = (),
    ):
        self.scale, self.max_grad_norm, self._parts = scale, max_grad_norm, parts
        self._counted_elsewhere = {id(weight) for weight in counted_elsewhere}
        self._skipped = torch.zeros(()) if scale is None else torch.zeros_like(scale)
        self._one = torch.ones_like(self._skipped)

    def num_skipped(self) -> int:
        """Returns the number of skipped steps so far; waits for the device."""
        return int(self._skipped.item())

    def report(self) -> str:
        """Returns a line about the skipped steps so far, or ""; waits for the device."""
        skipped = self.num_skipped()
        return f"  skipped: {skipped}" if skipped else ""

    def scaled(self, loss: Tensor) -> Tensor:
        """Returns the loss whose gradients `step` expects."""
        return loss if self.scale is None else loss * self.scale

    def backward(self, loss: Tensor) -> None:
        """Computes the gradients of the scaled loss."""
        loss.backward(None if self.scale is None else self.scale.expand_as(loss))

    def of_tables(self, optimizers: Iterable[Optimizer], device: str) -> Tensor | None:
        """Returns numbers about this rank's sparse gradients, which ranks sum before `step`.

        They are whether a gradient is infinite or NaN, as 0 or 1, and the squared 2-norm, float32
        `[2]`, on the device; or None on all ranks if `step` needs neither.
        """
        if self.scale is None and self.max_grad_norm is None:
            return None
        rows = [grad for grad in _gradients(optimizers) if grad.is_sparse]
        numbers = torch.zeros(2, device=device)
        found_inf, squares = numbers.unbind()
        if self.scale is not None:
            values = [value for grad in rows if (value := grad._values()).numel()]
            # Check only their maximum: they are many, and the check writes what it reads.
            self._mark(torch._foreach_norm(values, math.inf) if values else [], found_inf)
        if rows and self.max_grad_norm is not None:
            summed = [_summed_rows(grad) for grad in rows]
            squares.copy_(torch.nn.utils.get_total_norm(summed).square())
        return numbers

    def step(self, optimizers: Iterable[Optimizer], tables: Tensor | None = None) -> None:
        """Lets the optimizers update, unless a scaled gradient is infinite or NaN on any rank.

        Args:
            optimizers: the optimizers; their dense gradients are the same on all ranks.
            tables: the sum of `of_tables` over the ranks, which is overwritten; None computes this
                rank's.
        """
        optimizers = list(optimizers)
        if not optimizers:  # all is frozen
            return
        if tables is None:
            device = optimizers[0].param_groups[0]["params"][0].device
            tables = self.of_tables(optimizers, str(device))
        if tables is None:
            for optimizer in optimizers:
                optimizer.step()
            return
        found_inf, squares = tables.unbind()
        scale = torch.ones_like(squares) if self.scale is None else self.scale
        if self.scale is not None:
            dense = [grad for grad in _gradients(optimizers) if not grad.is_sparse]
            self._mark(dense, found_inf)
            all_sum(found_inf, self._parts).clamp_(max=1)
            self._skipped += found_inf
        if self.max_grad_norm is not None:
            norm = self._norm(optimizers, squares)
            scale = torch.maximum(scale, norm / self.max_grad_norm)
        for optimizer in optimizers:
            if isinstance(optimizer, LossScaled) or optimizer.defaults.get("fused"):
                optimizer.grad_scale, optimizer.found_inf = scale, found_inf  # type: ignore[attr-defined]
                optimizer.step()
            elif not found_inf.item():  # an optimizer that cannot skip on the device
                for grad in _gradients([optimizer]):
                    (grad._values() if grad.is_sparse else grad).div_(scale)
                optimizer.step()

    def _mark(self, values: tuple[Tensor, ...] | list[Tensor], found_inf: Tensor) -> None:
        # One launch on a GPU.
        torch._amp_foreach_non_finite_check_and_unscale_(values, found_inf, self._one)

    def _norm(self, optimizers: list[Optimizer], squares: Tensor) -> Tensor:
        found = _gradients(optimizers, self._counted_elsewhere)
        grads = [grad.float() for grad in found if not grad.is_sparse]
        dense = torch.zeros_like(squares)  # torch's norm of no tensors is on the CPU
        if grads:
            dense = torch.nn.utils.get_total_norm(grads).square()
        return (all_sum(dense, self._parts) + squares).sqrt()


def _summed_rows(grad: Tensor) -> Tensor:
    """Returns the sum of each row's gradients, and zeros; torch's `coalesce` would synchronize."""
    rows, order = grad._indices()[0].sort()
    place = torch.zeros_like(rows)
    place[1:] = (rows[1:] != rows[:-1]).cumsum(0)
    of_row, values = torch.empty_like(place).index_copy_(0, order, place), grad._values().float()
    return torch.zeros_like(values).index_add_(0, of_row, values)


def _gradients(optimizers: Iterable[Optimizer], without: Container[int] = ()) -> list[Tensor]:
    return [
        weight.grad
        for optimizer in optimizers
        for group in optimizer.param_groups
        for weight in group["params"]
        if weight.grad is not None and id(weight) not in without
    ]
