"""Row updates: an optimizer's step for the rows that a batch touched, in one pass.

Every update takes the gradient as `joint_embedding` leaves it: N rows, repeats included, and a
gradient for each. Repeated rows are summed first, in batch order, so that the result is bitwise the
same from run to run and for any number of threads. `grad` is divided by `grad_scale` where that is
given, and nothing at all is changed where `found_inf` is not 0.

The schemas are in csrc/library.cpp, the kernels in csrc/cpu/row_update*.
"""

import torch
from torch import Tensor

from dlrm.ops.library import has_native, native_available


def row_sgd_(
    weight: Tensor,
    rows: Tensor,
    grad: Tensor,
    lr: Tensor,
    *,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Subtracts `lr * grad` from the rows, in place.

    Args:
        weight: `[R, dim]`, float32, contiguous.
        rows: the row of each gradient, `[N]` int64, in any order, repeats allowed.
        grad: `[N, dim]`, float32, bfloat16 or float16.
        lr: 0-dim tensor.
        grad_scale: 0-dim tensor that the gradient was multiplied by, if it was.
        found_inf: 0-dim tensor; not 0 where any gradient of the step is infinite or NaN.

    Raises:
        RuntimeError: a row is outside the weight (its value and position are named), or shapes or
            dtypes do not fit together. Nothing is changed then.
    """
    if has_native(weight):
        torch.ops.dlrm.row_sgd_(weight, rows, grad, lr, grad_scale=grad_scale, found_inf=found_inf)
    else:
        _check("row_sgd_", weight, rows, grad)
        row_sgd_reference(weight, rows, grad, lr, grad_scale=grad_scale, found_inf=found_inf)


def row_sgd_reference(weight, rows, grad, lr, *, grad_scale=None, found_inf=None) -> None:
    """`row_sgd_` in plain PyTorch."""
    touched, grad = _summed(rows, grad, weight, grad_scale)
    _write(found_inf, touched, (weight, weight[touched] - lr * grad))


def row_adagrad_(
    weight: Tensor,
    state_sum: Tensor,
    rows: Tensor,
    grad: Tensor,
    lr: Tensor,
    *,
    eps: float = 1e-10,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Adagrad (Duchi et al., 2011) on the rows, as `torch.optim.Adagrad` on a sparse gradient.

    `state_sum` is the running sum of squared gradients, float32 and of the weight's shape; the rest
    is as in `row_sgd_`.
    """
    if has_native(weight):
        torch.ops.dlrm.row_adagrad_(
            weight, state_sum, rows, grad, lr, eps=eps, grad_scale=grad_scale, found_inf=found_inf
        )
    else:
        _check("row_adagrad_", weight, rows, grad, state_sum=state_sum)
        row_adagrad_reference(
            weight, state_sum, rows, grad, lr, eps=eps, grad_scale=grad_scale, found_inf=found_inf
        )


def row_adagrad_reference(
    weight, state_sum, rows, grad, lr, *, eps=1e-10, grad_scale=None, found_inf=None
) -> None:
    """`row_adagrad_` in plain PyTorch."""
    touched, grad = _summed(rows, grad, weight, grad_scale)
    state = state_sum[touched] + grad * grad
    updated = weight[touched] - lr * grad / (state.sqrt() + eps)
    _write(found_inf, touched, (state_sum, state), (weight, updated))


def row_wise_adagrad_(
    weight: Tensor,
    state_sum: Tensor,
    rows: Tensor,
    grad: Tensor,
    lr: Tensor,
    *,
    eps: float = 1e-10,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Adagrad with one state a row, the running sum of the mean squared gradient: `[R]` float32.

    It needs 1/dim of the memory of `row_adagrad_`; the rest is as there.
    """
    if has_native(weight):
        torch.ops.dlrm.row_wise_adagrad_(
            weight, state_sum, rows, grad, lr, eps=eps, grad_scale=grad_scale, found_inf=found_inf
        )
    else:
        _check("row_wise_adagrad_", weight, rows, grad, state_sum=state_sum)
        row_wise_adagrad_reference(
            weight, state_sum, rows, grad, lr, eps=eps, grad_scale=grad_scale, found_inf=found_inf
        )


def row_wise_adagrad_reference(
    weight, state_sum, rows, grad, lr, *, eps=1e-10, grad_scale=None, found_inf=None
) -> None:
    """`row_wise_adagrad_` in plain PyTorch."""
    touched, grad = _summed(rows, grad, weight, grad_scale)
    state = state_sum[touched] + (grad * grad).mean(dim=1)
    updated = weight[touched] - (lr / (state.sqrt() + eps)).unsqueeze(1) * grad
    _write(found_inf, touched, (state_sum, state), (weight, updated))


def row_adam_(
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rows: Tensor,
    grad: Tensor,
    lr: Tensor,
    step: Tensor,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Adam (Kingma and Ba, 2015) on the touched rows only, as `torch.optim.SparseAdam`.

    The moments of other rows do not decay meanwhile; the bias correction goes by the global step.

    Args:
        exp_avg, exp_avg_sq: moments, float32, of the weight's shape.
        step: 0-dim tensor, the number of this update, 1 for the first. The caller counts, and a
            step skipped for `found_inf` is none.
        betas, eps: as in `torch.optim.SparseAdam`. The rest is as in `row_sgd_`.
    """
    if has_native(weight):
        torch.ops.dlrm.row_adam_(
            weight,
            exp_avg,
            exp_avg_sq,
            rows,
            grad,
            lr,
            step,
            beta1=betas[0],
            beta2=betas[1],
            eps=eps,
            grad_scale=grad_scale,
            found_inf=found_inf,
        )
    else:
        _check("row_adam_", weight, rows, grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
        row_adam_reference(
            weight,
            exp_avg,
            exp_avg_sq,
            rows,
            grad,
            lr,
            step,
            betas=betas,
            eps=eps,
            grad_scale=grad_scale,
            found_inf=found_inf,
        )


def row_adam_reference(
    weight,
    exp_avg,
    exp_avg_sq,
    rows,
    grad,
    lr,
    step,
    *,
    betas=(0.9, 0.999),
    eps=1e-8,
    grad_scale=None,
    found_inf=None,
) -> None:
    """`row_adam_` in plain PyTorch."""
    touched, grad = _summed(rows, grad, weight, grad_scale)
    beta1, beta2 = betas
    average = exp_avg[touched].lerp(grad, 1 - beta1)
    square = exp_avg_sq[touched].lerp(grad * grad, 1 - beta2)
    step = step.double()
    step_size = (lr * (1 - beta2**step).sqrt() / (1 - beta1**step)).to(weight.dtype)
    updated = weight[touched] - step_size * average / (square.sqrt() + eps)
    _write(found_inf, touched, (exp_avg, average), (exp_avg_sq, square), (weight, updated))


def _summed(
    rows: Tensor, grad: Tensor, weight: Tensor, grad_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The rows touched, once each, and the sum of each one's gradients in the weight's dtype."""
    touched, index = rows.unique(return_inverse=True)
    total = weight.new_zeros(len(touched), weight.shape[1])
    total.index_add_(0, index, grad.to(weight.dtype))
    return touched, total if grad_scale is None else total * (1 / grad_scale).to(weight.dtype)


def _write(found_inf: Tensor | None, touched: Tensor, *updates: tuple[Tensor, Tensor]) -> None:
    """Writes each tensor's new rows, or its old ones where found_inf is set."""
    with torch.no_grad():
        for tensor, updated in updates:
            if found_inf is not None:
                updated = torch.where(found_inf != 0, tensor[touched], updated)
            tensor[touched] = updated.to(tensor.dtype)


def _check(name: str, weight: Tensor, rows: Tensor, grad: Tensor, **states: Tensor) -> None:
    """What csrc/row_update.h checks, for the fallback."""

    def check(condition: bool, message: str) -> None:
        if not condition:
            raise RuntimeError(f"{name}: {message}")

    check(
        weight.dim() == 2
        and weight.shape[1] > 0
        and weight.dtype == torch.float32
        and weight.is_contiguous(),
        "expected a contiguous Float weight [rows, dim > 0], "
        f"got {list(weight.shape)} {weight.dtype}",
    )
    check(
        rows.dim() == 1 and rows.dtype == torch.int64,
        f"expected rows [count] Long, got {list(rows.shape)} {rows.dtype}",
    )
    check(
        grad.shape == (rows.shape[0], weight.shape[1])
        and grad.dtype in (torch.float32, torch.bfloat16, torch.float16),
        f"expected grad {[rows.shape[0], weight.shape[1]]} of Float, BFloat16 or Half, "
        f"got {list(grad.shape)} {grad.dtype}",
    )
    for state_name, state in states.items():
        shape = weight.shape[:1] if name == "row_wise_adagrad_" else weight.shape
        check(
            state.shape == shape and state.dtype == torch.float32 and state.is_contiguous(),
            f"expected contiguous Float {state_name} {list(shape)}, "
            f"got {list(state.shape)} {state.dtype}",
        )
    if rows.device.type == "cpu" and not torch.compiler.is_compiling():
        bad = ((rows < 0) | (rows >= weight.shape[0])).nonzero()
        check(
            len(bad) == 0,
            ""
            if len(bad) == 0
            else f"row {rows[bad[0, 0]]} at position {bad[0, 0]}: "
            f"expected 0 <= row < {weight.shape[0]}",
        )


if native_available():
    for _name in ("row_sgd_", "row_adagrad_", "row_wise_adagrad_", "row_adam_"):
        torch.library.register_fake(f"dlrm::{_name}", lambda *args, **kwargs: None)
