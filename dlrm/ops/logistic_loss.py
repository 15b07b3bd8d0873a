"""Logistic loss: the sum of binary cross-entropies of logits, and its gradient, in one pass.

The schema is in csrc/schemas.h, the kernel in csrc/cpu/logistic_loss.cpp.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dlrm.ops.library import native_available


def logistic_loss(logits: Tensor, labels: Tensor, divisor: float = 1.0) -> Tensor:
    """Returns the sum of the samples' binary cross-entropies, divided by `divisor`: a scalar.

    A NaN among the logits makes the loss NaN.

    Args:
        logits: `[batch]` float32.
        labels: `[batch]` float32: 0 or 1, or the share of clicks.
        divisor: a number above 0.

    Raises:
        RuntimeError: shapes or dtypes do not fit together; the message names both. Where torch's
            operators run, their own errors name the shapes.
    """
    in_graph = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if logits.device.type != "cpu" or not native_available() or in_graph:
        return logistic_loss_reference(logits, labels, divisor)
    return _LogisticLoss.apply(logits, labels, divisor)


def logistic_loss_reference(logits: Tensor, labels: Tensor, divisor: float = 1.0) -> Tensor:
    """Does the same in plain PyTorch: the fallback and the oracle of the tests."""
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="sum") / divisor


class _LogisticLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, divisor: float) -> Tensor:  # type: ignore[override]
        loss, grad = torch.ops.dlrm.logistic_loss.default(logits, labels, divisor)
        ctx.save_for_backward(grad)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        (of_loss,) = ctx.saved_tensors
        return of_loss * grad, None, None


if native_available():

    @torch.library.register_fake("dlrm::logistic_loss")
    def _(logits, labels, divisor):
        return logits.new_empty(()), torch.empty_like(logits)
