"""Row updates and row decays: an optimizer's steps for rows of tables, in one pass.

If the loss has the term l2 / 2 * (sum of the squares of a weight), a dense optimizer updates every
row at every step. `row_decay_` applies the updates that rows have missed because no batch looked
them up, whose gradient is l2 times the row. Both lead to the same values. The optimizer counts
steps from the moment when all rows were up to date. Adagrad and Adam give the same bits in however
many parts the steps are applied; SGD and row-wise Adagrad round their factors once per part.

A weight is float32, or bfloat16 with `low`, the lower halves of float32 values (`split_float32`):
these values are updated in float32, bit for bit like a float32 weight, and split again.

The rules are in `row_rules.py` and csrc/row_update.h, the schemas in csrc/schemas.h, the kernels in
csrc/{cpu,cuda}/row_update*, csrc/cpu/row_decay* and, for small tables, csrc/cuda/small_tables.h.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dlrm.ops.library import (
    follow_torch_settings,
    has_native,
    is_native_on_cpu,
    native_available,
)
from dlrm.ops.row_rules import RowRule
from dlrm.ops.split_float32 import join_float32, split_float32

ORDERED_COLUMNS = 128  # kOrderedColumns of csrc/cuda/row_update.cu, which has the reason


def row_update_(
    rule: RowRule,
    weight: Tensor,
    states: Sequence[Tensor],
    rows: Tensor,
    grad: Tensor,
    lr: Tensor,
    *,
    step: Tensor | None = None,
    l2: float = 0.0,
    low: Tensor | None = None,
    table_sizes: Sequence[int] | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    **constants: float,
) -> None:
    """Applies one step of a rule to the rows that a batch touched, in place.

    It takes the gradient as `joint_embedding` returns it. Repeated rows are first summed in batch
    order, so that the result is bitwise the same from run to run and for any number of threads. On
    a GPU, plain torch is an exception, and so is SGD for a float32 weight of fewer than
    `ORDERED_COLUMNS` columns, small tables excepted: they add in arbitrary order unless
    `torch.use_deterministic_algorithms` is on.

    Args:
        rule: one of `ROW_RULES`.
        weight: `[R, dim]`, float32, or bfloat16 with `low`; contiguous.
        states: those of the rule, each `[R, dim]` or `[R]` float32, contiguous; changed.
        rows: the row of each gradient, `[N]` int64, in any order, repeats allowed.
        grad: `[N, dim]`, float32, bfloat16 or float16.
        lr: 0-dim tensor.
        step: 0-dim tensor, the number of this update, 1 for the first, if the rule counts steps.
            The caller counts, and does not count a step skipped because of `found_inf`.
        l2: l2 times the row is added to its gradient after the division by `grad_scale`: the
            gradient of a loss term l2 / 2 * (sum of the squares of the rows looked up). On a GPU
            plain torch runs if it is not 0.
        low: `[R, dim]` int16, contiguous, changed with a bfloat16 weight; None for a float32 one.
        table_sizes: rows of each table; the tables follow each other in the weight and add up to
            R. It states that `rows` is `[batch, tables]` flattened, so that gradient i belongs to
            table `i % tables`. A GPU then needs no sort and no atomic operations for small tables.
            On the CPU it changes nothing.
        grad_scale: 0-dim tensor that the gradient was multiplied by, if it was.
        found_inf: 0-dim tensor; not 0 if any gradient of the step is infinite or NaN. Nothing
            changes then.
        constants: those of the rule that differ from its defaults.

    Raises:
        RuntimeError: a row is outside the weight (the message names its value and position; on a
            GPU `raise_device_errors` raises it), or shapes, sizes or dtypes do not fit together.
            Nothing has changed then. A row inside the weight but outside its own table is detected
            on a GPU, for up to 256 tables, and not on the CPU.
        TypeError: a constant that the rule does not have.
    """
    if not rule.states:  # only then a GPU may add gradients in arbitrary order
        follow_torch_settings()
    used = _constants(rule, constants)
    if _updates_natively(rule, weight, states, rows, grad, lr, low, l2):
        torch.ops.dlrm.row_update_.default(
            rule.number,
            weight,
            states,
            rows,
            grad,
            lr,
            step,
            [*used.values()],
            l2,
            low,
            table_sizes,
            grad_scale,
            found_inf,
        )
        _mark_changed(weight)
        return
    _check(rule, weight, states, low, rows)
    row_update_reference(
        rule,
        weight,
        states,
        rows,
        grad,
        lr,
        step=step,
        l2=l2,
        low=low,
        grad_scale=grad_scale,
        found_inf=found_inf,
        **used,
    )


def row_decay_(
    rule: RowRule,
    weight: Tensor,
    states: Sequence[Tensor],
    done: Tensor,
    steps: Tensor,
    rows: Tensor | None = None,
    *,
    l2: float = 0.0,
    low: Tensor | None = None,
    **constants: float,
) -> None:
    """Applies to rows a rule's updates of the steps that they have missed, in place.

    The gradient of a missed step is l2 times the row. Moments decay as in `torch.optim.Adam`. There
    is no kernel for GPUs, where plain torch runs.

    Args:
        rule, weight, states, low: see `row_update_`.
        done: number of steps that each row has had, `[R]` int32; set to that of all steps.
        steps: the numbers of each step, `[steps, columns]` on the CPU; see `dlrm.ops.row_rules`.
        rows: the rows, `[N]` int64, repeats allowed; None is all rows. Rows outside the weight are
            ignored; the look-up reports them.
        l2: weight of the term. SGD has it in `steps`.
        constants: those of the rule that differ from its defaults.

    Raises:
        RuntimeError: shapes, sizes or dtypes do not fit together; nothing has changed then.
        TypeError: a constant that the rule does not have.
    """
    used = _constants(rule, constants)
    tensors = {"weight": weight, **_named(rule, states), "done": done, "rows": rows, "low": low}
    if has_native("row_decay_", **tensors) and not weight.is_cuda and rule.number is not None:
        torch.ops.dlrm.row_decay_.default(
            rule.number, weight, states, done, steps, rows, [*used.values()], l2, low
        )
        _mark_changed(weight)
        return
    row_decay_reference(rule, weight, states, done, steps, rows, l2=l2, low=low, **used)


def row_update_reference(
    rule: RowRule,
    weight: Tensor,
    states: Sequence[Tensor],
    rows: Tensor,
    grad: Tensor,
    lr: Tensor,
    *,
    step: Tensor | None = None,
    l2: float = 0.0,
    low: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    **constants: float,
) -> None:
    """Does the same as `row_update_` in plain PyTorch."""
    constants = _constants(rule, constants)
    touched, index = rows.unique(return_inverse=True)
    before = _values(weight, low, touched)
    total = torch.zeros_like(before)
    total.index_add_(0, index, grad.to(before.dtype))
    if grad_scale is not None:
        total = total * (1 / grad_scale).to(before.dtype)
    if l2:
        total = total + l2 * before
    rate = lr if rule.rate is None else rule.rate(lr, step, **constants).to(before.dtype)
    held = (state[touched] for state in states)
    updated, *kept = rule.updated(before, *held, grad=total, rate=rate, **constants)
    _write(found_inf, touched, *zip(states, kept, strict=True), *_parts(weight, low, updated))


@torch.no_grad()
def row_decay_reference(
    rule: RowRule,
    weight: Tensor,
    states: Sequence[Tensor],
    done: Tensor,
    steps: Tensor,
    rows: Tensor | None = None,
    *,
    l2: float = 0.0,
    low: Tensor | None = None,
    **constants: float,
) -> None:
    """Does the same as `row_decay_` in plain PyTorch, step by step for the rows that missed it."""
    constants = _constants(rule, constants)
    if rows is None:
        rows = torch.arange(len(weight), device=weight.device)
    else:
        rows = rows[(rows >= 0) & (rows < len(weight))].unique()
    numbers = [[0.0] * len(rule.per_step), *steps.tolist()]
    first = int(done[rows].min()) if len(rows) else len(steps)
    for index in range(first, len(steps)):
        late = rows[done[rows] <= index]
        values = _values(weight, low, late)
        if rule.decayed is not None:
            updated, *kept = rule.decayed(values, numbers[index + 1], numbers[index])
        else:
            given = constants | dict(zip(rule.per_step, numbers[index + 1], strict=True))
            held = (state[late] for state in states)
            updated, *kept = rule.updated(values, *held, grad=l2 * values, **given)
        _write(None, late, *zip(states, kept, strict=True), *_parts(weight, low, updated))
    done[rows] = len(steps)


def _constants(rule: RowRule, given: dict[str, float]) -> dict[str, float]:
    """Returns all constants in the order of the rule."""
    constants = {**rule.constants, **given}
    if len(constants) != len(rule.constants):
        wrong = ", ".join(given.keys() - rule.constants.keys())
        raise TypeError(f"{rule.name} has no constant {wrong}, only {', '.join(rule.constants)}")
    return constants


def _named(rule: RowRule, states: Sequence[Tensor]) -> dict[str, Tensor]:
    return {state.argument: tensor for state, tensor in zip(rule.states, states, strict=True)}


def _updates_natively(
    rule: RowRule,
    weight: Tensor,
    states: Sequence[Tensor],
    rows: Tensor,
    grad: Tensor,
    lr: Tensor,
    low: Tensor | None,
    l2: float,
) -> bool:
    """Returns whether there are kernels for the rule, the tensors' device and the options."""
    if rule.number is None:
        return False
    if low is None and is_native_on_cpu(weight, rows, grad, lr, *states):
        return True
    tensors = {"rows": rows, "grad": grad, "lr": lr, **_named(rule, states), "low": low}
    return has_native("row_update_", weight=weight, **tensors) and not (l2 and weight.is_cuda)


def _values(weight: Tensor, low: Tensor | None, rows: Tensor) -> Tensor:
    return weight[rows] if low is None else join_float32(weight[rows], low[rows])


def _parts(weight: Tensor, low: Tensor | None, updated: Tensor) -> list[tuple[Tensor, Tensor]]:
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


def _mark_changed(weight: Tensor) -> None:
    """Notifies autograd of an in-place change, in case it saved the weight for a backward pass."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(weight)


def _check(
    rule: RowRule, weight: Tensor, states: Sequence[Tensor], low: Tensor | None, rows: Tensor
) -> None:
    """Raises what plain torch would accept without an error, as csrc/row_update.h does."""
    if weight.dtype != (torch.float32 if low is None else torch.bfloat16):
        beside = "without low" if low is None else "with low"
        raise RuntimeError(
            "row_update_: expected a contiguous Float weight [rows, dim > 0], or a BFloat16 one "
            f"with low, got {list(weight.shape)} {weight.dtype} {beside}"
        )
    for state, tensor in zip(rule.states, states, strict=True):
        shape = state.shape(*weight.shape)
        _check_beside(f"Float {state.argument}", tensor, torch.float32, shape)
    if low is not None:
        _check_beside("Short low", low, torch.int16, tuple(weight.shape))
    if rows.device.type != "cpu" or torch.compiler.is_compiling():
        return
    bad = ((rows < 0) | (rows >= weight.shape[0])).nonzero()
    if len(bad):
        raise RuntimeError(
            f"row_update_: row {rows[bad[0, 0]]} at position {bad[0, 0]}: "
            f"expected 0 <= row < {weight.shape[0]}"
        )


def _check_beside(what: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape or tensor.dtype != dtype:
        raise RuntimeError(
            f"row_update_: expected contiguous {what} {list(shape)} on the weight's device, got "
            f"{list(tensor.shape)} {tensor.dtype}"
        )


if native_available():
    for _name in ("row_update_", "row_decay_"):
        torch.library.register_fake(f"dlrm::{_name}", lambda *args, **kwargs: None)
