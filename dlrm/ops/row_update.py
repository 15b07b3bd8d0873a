"""Row updates: an optimizer's step for the rows that a batch touched, in one pass.

Every update takes the gradient as `joint_embedding` returns it: N rows, repeats included, and a
gradient for each. Repeated rows are first summed in batch order, so that the result is bitwise the
same from run to run and for any number of threads. On a GPU, plain torch is an exception, and so is
`row_sgd_` for a float32 weight of fewer than `ORDERED_COLUMNS` columns, small tables excepted: they
add in arbitrary order unless `torch.use_deterministic_algorithms` is on. `grad` is divided by
`grad_scale` if that is given, and nothing changes if `found_inf` is not 0.

A weight is float32, or bfloat16 with `low`, the lower halves of float32 values (`split_float32`):
these values are updated in float32, bit for bit like a float32 weight, and split again.

The schemas are in csrc/schemas.h, the kernels in csrc/{cpu,cuda}/row_update* and, for small tables,
in csrc/cuda/small_tables.h.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dlrm.ops.library import (
    follow_torch_settings,
    has_native,
    is_native_on_cpu,
    native_available,
)
from dlrm.ops.split_float32 import join_float32, split_float32

ORDERED_COLUMNS = 128  # kOrderedColumns of csrc/cuda/row_update.cu, which has the reason


def row_sgd_(
    weight: Tensor,
    rows: Tensor,
    grad: Tensor,
    lr: Tensor,
    *,
    l2: float = 0.0,
    low: Tensor | None = None,
    table_sizes: Sequence[int] | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Subtracts `lr * grad` from the rows, in place.

    Args:
        weight: `[R, dim]`, float32, or bfloat16 with `low`; contiguous.
        rows: the row of each gradient, `[N]` int64, in any order, repeats allowed.
        grad: `[N, dim]`, float32, bfloat16 or float16.
        lr: 0-dim tensor.
        l2: l2 times the row is added to its gradient after the division by `grad_scale`: the
            gradient of a loss term l2 / 2 * (sum of the squares of the rows looked up). On a GPU
            plain torch runs if it is not 0.
        low: `[R, dim]` int16, contiguous, changed with a bfloat16 weight; None for a float32 one.
        table_sizes: rows of each table; the tables follow each other in the weight and add up to R.
            It states that `rows` is `[batch, tables]` flattened, so that gradient i belongs to
            table `i % tables`. A GPU then needs no sort and no atomic operations for small tables.
            On the CPU it changes nothing.
        grad_scale: 0-dim tensor that the gradient was multiplied by, if it was.
        found_inf: 0-dim tensor; not 0 if any gradient of the step is infinite or NaN.

    Raises:
        RuntimeError: a row is outside the weight (the message names its value and position; on a
            GPU `raise_device_errors` raises it), or shapes, sizes or dtypes do not fit together.
            Nothing has changed then. A row inside the weight but outside its own table is detected
            on a GPU, for up to 256 tables, and not on the CPU.
    """
    follow_torch_settings()
    _update(
        "row_sgd_",
        row_sgd_reference,
        weight,
        {},
        (rows, grad, lr),
        low,
        table_sizes,
        l2=l2,
        grad_scale=grad_scale,
        found_inf=found_inf,
    )


def row_sgd_reference(
    weight, rows, grad, lr, *, l2=0.0, low=None, grad_scale=None, found_inf=None
) -> None:
    """Does the same as `row_sgd_` in plain PyTorch."""
    touched, before, grad = _touched(weight, low, rows, grad, grad_scale, l2)
    _write(found_inf, touched, *_weight(weight, low, before - lr * grad))


def row_adagrad_(
    weight: Tensor,
    state_sum: Tensor,
    rows: Tensor,
    grad: Tensor,
    lr: Tensor,
    *,
    eps: float = 1e-10,
    l2: float = 0.0,
    low: Tensor | None = None,
    table_sizes: Sequence[int] | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Applies Adagrad (Duchi et al., 2011) to the rows, as `torch.optim.Adagrad` does when sparse.

    `state_sum` is the running sum of squared gradients, float32 and of the weight's shape; the rest
    is as in `row_sgd_`.
    """
    _update(
        "row_adagrad_",
        row_adagrad_reference,
        weight,
        {"state_sum": state_sum},
        (rows, grad, lr),
        low,
        table_sizes,
        eps=eps,
        l2=l2,
        grad_scale=grad_scale,
        found_inf=found_inf,
    )


def row_adagrad_reference(
    weight,
    state_sum,
    rows,
    grad,
    lr,
    *,
    eps=1e-10,
    l2=0.0,
    low=None,
    grad_scale=None,
    found_inf=None,
) -> None:
    """Does the same as `row_adagrad_` in plain PyTorch."""
    touched, before, grad = _touched(weight, low, rows, grad, grad_scale, l2)
    state = state_sum[touched] + grad * grad
    updated = before - lr * grad / (state.sqrt() + eps)
    _write(found_inf, touched, (state_sum, state), *_weight(weight, low, updated))


def row_wise_adagrad_(
    weight: Tensor,
    state_sum: Tensor,
    rows: Tensor,
    grad: Tensor,
    lr: Tensor,
    *,
    eps: float = 1e-10,
    l2: float = 0.0,
    low: Tensor | None = None,
    table_sizes: Sequence[int] | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Applies Adagrad with one state per row, the sum of mean squared gradients: `[R]` float32.

    It needs 1/dim of the memory of `row_adagrad_`, and otherwise works the same.
    """
    _update(
        "row_wise_adagrad_",
        row_wise_adagrad_reference,
        weight,
        {"state_sum": state_sum},
        (rows, grad, lr),
        low,
        table_sizes,
        eps=eps,
        l2=l2,
        grad_scale=grad_scale,
        found_inf=found_inf,
    )


def row_wise_adagrad_reference(
    weight,
    state_sum,
    rows,
    grad,
    lr,
    *,
    eps=1e-10,
    l2=0.0,
    low=None,
    grad_scale=None,
    found_inf=None,
) -> None:
    """Does the same as `row_wise_adagrad_` in plain PyTorch."""
    touched, before, grad = _touched(weight, low, rows, grad, grad_scale, l2)
    state = state_sum[touched] + (grad * grad).mean(dim=1)
    updated = before - (lr / (state.sqrt() + eps)).unsqueeze(1) * grad
    _write(found_inf, touched, (state_sum, state), *_weight(weight, low, updated))


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
    l2: float = 0.0,
    low: Tensor | None = None,
    table_sizes: Sequence[int] | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Applies Adam (Kingma and Ba, 2015) to the touched rows only, as `torch.optim.SparseAdam`.

    The moments of other rows do not decay; the bias correction uses the global step.

    Args:
        exp_avg, exp_avg_sq: moments, float32, of the weight's shape.
        step: 0-dim tensor, the number of this update, 1 for the first. The caller counts, and does
            not count a step skipped because of `found_inf`.
        betas, eps: as in `torch.optim.SparseAdam`. The rest is as in `row_sgd_`.
    """

    def reference(*args: Tensor, beta1: float, beta2: float, **options: Any) -> None:
        row_adam_reference(*args, betas=(beta1, beta2), **options)

    _update(
        "row_adam_",
        reference,
        weight,
        {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq},
        (rows, grad, lr, step),
        low,
        table_sizes,
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        l2=l2,
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
    l2=0.0,
    low=None,
    grad_scale=None,
    found_inf=None,
) -> None:
    """Does the same as `row_adam_` in plain PyTorch."""
    touched, before, grad = _touched(weight, low, rows, grad, grad_scale, l2)
    beta1, beta2 = betas
    average = exp_avg[touched].lerp(grad, 1 - beta1)
    square = exp_avg_sq[touched].lerp(grad * grad, 1 - beta2)
    step = step.double()
    step_size = (lr * (1 - beta2**step).sqrt() / (1 - beta1**step)).to(before.dtype)
    updated = before - step_size * average / (square.sqrt() + eps)
    states = (exp_avg, average), (exp_avg_sq, square)
    _write(found_inf, touched, *states, *_weight(weight, low, updated))


def _update(
    name: str,
    reference: Callable[..., None],
    weight: Tensor,
    states: dict[str, Tensor],
    inputs: tuple[Tensor, ...],
    low: Tensor | None,
    table_sizes: Sequence[int] | None,
    **options: Any,
) -> None:
    """Runs the native op if the tensors' device has one, otherwise the checks and the reference.

    Both take weight, states and inputs (rows, grad, lr and with Adam step) in this order.
    """
    args = (weight, *states.values(), *inputs)
    if _is_native(name, weight, dict(zip(_INPUTS, inputs, strict=False)), low, states, options):
        _OPS[name](*args, low=low, table_sizes=table_sizes, **options)
        mark_changed(weight)
    else:
        rows, grad, *_ = inputs
        _check(name, weight, low, rows, grad, table_sizes, **states)
        reference(*args, low=low, **options)


def _is_native(
    name: str,
    weight: Tensor,
    inputs: dict[str, Tensor],
    low: Tensor | None,
    states: dict[str, Tensor],
    options: dict[str, Any],
) -> bool:
    """Returns whether the native op has kernels for the tensors' device and the options."""
    if low is None and is_native_on_cpu(weight, *inputs.values(), *states.values()):
        return True
    native = has_native(name, weight=weight, **inputs, low=low, **states)
    return native and not (options["l2"] and weight.is_cuda)


def _touched(
    weight: Tensor,
    low: Tensor | None,
    rows: Tensor,
    grad: Tensor,
    grad_scale: Tensor | None,
    l2: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns each touched row once, its values, and its gradient with the L2 term's."""
    touched, index = rows.unique(return_inverse=True)
    before = weight[touched] if low is None else join_float32(weight[touched], low[touched])
    total = torch.zeros_like(before)
    total.index_add_(0, index, grad.to(before.dtype))
    if grad_scale is not None:
        total = total * (1 / grad_scale).to(before.dtype)
    return touched, before, total + l2 * before if l2 else total


def _weight(weight: Tensor, low: Tensor | None, updated: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Returns the new rows in the form of the weight, for `_write`."""
    if low is None:
        return [(weight, updated)]
    return list(zip((weight, low), split_float32(updated), strict=True))


def _write(found_inf: Tensor | None, touched: Tensor, *updates: tuple[Tensor, Tensor]) -> None:
    """Writes each tensor's new rows, or its old ones if found_inf is set."""
    with torch.no_grad():
        for tensor, updated in updates:
            if found_inf is not None:
                updated = torch.where(found_inf != 0, tensor[touched], updated)
            tensor[touched] = updated.to(tensor.dtype)


def mark_changed(weight: Tensor) -> None:
    """Notifies autograd of an in-place change, in case it saved the weight for a backward pass."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(weight)


def _check(
    name: str,
    weight: Tensor,
    low: Tensor | None,
    rows: Tensor,
    grad: Tensor,
    table_sizes: Sequence[int] | None,
    **states: Tensor,
) -> None:
    """Checks the same as csrc/row_update.h, for the fallback."""
    check = partial(_expect, name)
    check(
        weight.dim() == 2
        and weight.shape[1] > 0
        and (weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and low is not None))
        and weight.is_contiguous(),
        "expected a contiguous Float weight [rows, dim > 0], or a BFloat16 one with low, "
        f"got {list(weight.shape)} {weight.dtype}{' without low' if low is None else ''}",
    )
    if low is not None:
        check(
            weight.dtype == torch.bfloat16,
            "expected no low beside a Float weight: it is the lower half of a BFloat16 one's",
        )
        _check_contiguous(name, "Short low", low, weight.shape, torch.int16)
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
    if table_sizes is not None:
        _check_table_sizes(name, weight, rows, list(table_sizes))
    for state_name, state in states.items():
        shape = weight.shape[:1] if name == "row_wise_adagrad_" else weight.shape
        _check_contiguous(name, f"Float {state_name}", state, shape, torch.float32)
    _check_rows(name, weight, rows)


def _expect(name: str, condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(f"{name}: {message}")


def _check_contiguous(
    name: str, expected: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype
) -> None:
    _expect(
        name,
        tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous(),
        f"expected contiguous {expected} {list(shape)}, got {list(tensor.shape)} {tensor.dtype}",
    )


def _check_table_sizes(name: str, weight: Tensor, rows: Tensor, sizes: list[int]) -> None:
    _expect(
        name,
        min(sizes, default=0) >= 0 and sum(sizes) == weight.shape[0],
        f"expected table_sizes >= 0 that add up to the weight's {weight.shape[0]} rows, "
        f"got {sizes}",
    )
    _expect(
        name,
        rows.shape[0] % len(sizes) == 0 if sizes else rows.shape[0] == 0,
        f"expected as many rows of each of the {len(sizes)} tables of table_sizes, "
        f"got {rows.shape[0]} rows",
    )


def _check_rows(name: str, weight: Tensor, rows: Tensor) -> None:
    if rows.device.type != "cpu" or torch.compiler.is_compiling():
        return
    bad = ((rows < 0) | (rows >= weight.shape[0])).nonzero()
    if len(bad):
        raise RuntimeError(
            f"{name}: row {rows[bad[0, 0]]} at position {bad[0, 0]}: "
            f"expected 0 <= row < {weight.shape[0]}"
        )


_INPUTS = ("rows", "grad", "lr", "step")
_OPS: dict[str, Callable[..., None]] = {}
if native_available():
    for _name in ("row_sgd_", "row_adagrad_", "row_wise_adagrad_", "row_adam_"):
        _OPS[_name] = getattr(torch.ops.dlrm, _name).default
        torch.library.register_fake(f"dlrm::{_name}", lambda *args, **kwargs: None)
