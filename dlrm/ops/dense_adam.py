"""Adam of dense weights: one pass over all weights, gradients and states.

The schema is in csrc/schemas.h, the kernel in csrc/cpu/dense_adam*; elsewhere torch's fused Adam
runs.
"""

import torch
from torch import Tensor

from dlrm.ops.library import native_available


def dense_adam_(
    weights: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    lr: Tensor,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Updates weights in place as torch.optim.Adam (Kingma and Ba, 2015), and counts the step.

    Args:
        weights: any shapes, float32.
        grads, exp_avgs, exp_avg_sqs: gradient and moments of each weight, of its shape.
        steps: number of updates of each weight so far, float32 scalars.
        lr: learning rate, a scalar.
        betas, eps, weight_decay: see torch.optim.Adam.
        grad_scale: gradients are divided by it; None is 1.
        found_inf: if it is not 0, nothing changes; None is 0.

    Raises:
        RuntimeError: shapes or dtypes do not fit together; the message names the tensor.
    """
    if _is_native(weights) and _is_native(grads):
        torch.ops.dlrm.dense_adam_.default(
            weights,
            grads,
            exp_avgs,
            exp_avg_sqs,
            steps,
            lr,
            *betas,
            eps,
            weight_decay,
            grad_scale,
            found_inf,
        )
        return
    torch._foreach_add_(steps, 1)
    torch._fused_adam_(
        weights,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=grad_scale,
        found_inf=found_inf,
    )
    if found_inf is not None:
        torch._foreach_sub_(steps, [found_inf] * len(steps))


def _is_native(tensors: list[Tensor]) -> bool:
    """Returns whether the operator takes such weights or gradients; it checks the other tensors."""
    return native_available() and all(
        one.is_cpu and one.dtype is torch.float32 and one.is_contiguous() for one in tensors
    )


if native_available():

    @torch.library.register_fake("dlrm::dense_adam_")
    def _(*_arguments, **_options):
        return None
