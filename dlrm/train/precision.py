"""Mixed precision: which dtype the network computes in, and the static loss scale of fp16."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from dlrm.distributed import World, all_sum
from dlrm.train.optim import handles_loss_scale

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class PrecisionConfig:
    """Field names are those of the command line's flags.

    Attributes:
        amp: compute MLPs and interaction in half precision.
        amp_dtype: "fp16" or "bf16"; None is fp16 on CUDA and bf16 on the CPU.
        loss_scale: the loss is multiplied by it under fp16, and gradients divided again; bf16 has
            the exponent range of float32 and needs none.
        tf32: allow TensorFloat-32 in float32 matrix products on CUDA.

    Raises:
        ValueError: values that do not fit together; flag and value are named.
    """

    amp: bool = False
    amp_dtype: str | None = None
    loss_scale: float = 1024.0
    tf32: bool = True

    def __post_init__(self) -> None:
        if self.amp_dtype is not None and self.amp_dtype not in _DTYPES:
            raise ValueError(f"--amp_dtype {self.amp_dtype}: expected one of {list(_DTYPES)}")
        if self.amp_dtype is not None and not self.amp:
            raise ValueError(f"--amp_dtype {self.amp_dtype} needs --amp")
        if not 0 < self.loss_scale < math.inf:
            raise ValueError(f"--loss_scale {self.loss_scale}: expected a number above 0")

    def dtype(self, device: str) -> torch.dtype:
        """Returns the dtype to compute in on a device."""
        if not self.amp:
            return torch.float32
        return _DTYPES[self.amp_dtype or ("fp16" if device.startswith("cuda") else "bf16")]

    def scaler(self, device: str) -> "LossScaler":
        """Returns the loss scaler for a device: the static scale under fp16, else none."""
        half = self.dtype(device) == torch.float16
        return LossScaler(torch.tensor(self.loss_scale, device=device) if half else None)


class LossScaler:
    """Backward pass and update under a static loss scale.

    Where a gradient is infinite or NaN on any rank, no parameter is updated on any. The decision
    stays on the device for optimizers that read `grad_scale` and `found_inf` there.

    Args:
        scale: a scalar on the device, or None for none.
    """

    def __init__(self, scale: Tensor | None = None):
        self.scale = scale
        self._skipped = torch.zeros(()) if scale is None else torch.zeros_like(scale)

    def report(self) -> str:
        """Says how many steps were skipped so far, if any; waits for the device."""
        skipped = int(self._skipped.item())
        return f"  skipped: {skipped}" if skipped else ""

    def backward(self, loss: Tensor) -> None:
        """Computes the gradients of the scaled loss."""
        (loss if self.scale is None else loss * self.scale).backward()

    def step(self, optimizers: Iterable[Optimizer], world: World = World()) -> None:
        """Lets the optimizers update, unless a gradient is infinite or NaN on any rank."""
        if self.scale is None:
            for optimizer in optimizers:
                optimizer.step()
        else:
            self._scaled_step(list(optimizers), self.scale, world)

    def _scaled_step(self, optimizers: list[Optimizer], scale: Tensor, world: World) -> None:
        grads = [grad for optimizer in optimizers for grad in _gradients(optimizer)]
        greatest = torch.nn.utils.get_total_norm(grads, norm_type=math.inf)
        found_inf = all_sum((~greatest.isfinite()).float(), world).clamp_(max=1)
        self._skipped += found_inf
        for optimizer in optimizers:
            if handles_loss_scale(optimizer):
                optimizer.grad_scale, optimizer.found_inf = scale, found_inf  # type: ignore[attr-defined]
                optimizer.step()
            elif not found_inf.item():  # torch's sparse optimizers cannot skip by themselves
                for grad in _gradients(optimizer):
                    grad.div_(scale)
                optimizer.step()


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    """Gradients as plain tensors: the values of sparse ones."""
    return [
        weight.grad._values() if weight.grad.is_sparse else weight.grad
        for group in optimizer.param_groups
        for weight in group["params"]
        if weight.grad is not None
    ]
