"""Row decays: the L2 updates of all steps in which a row was not looked up, applied at once.

If the loss has the term l2 / 2 * (sum of the squares of a weight), a dense optimizer updates every
row at every step. A row optimizer updates only the rows of a batch. The functions here apply the
updates that rows have missed, whose gradient is l2 times the row. Both lead to the same values.

The optimizer counts steps from the moment when all rows were up to date. `steps` has the numbers of
each step, `[steps, columns]` on the CPU, and `done`, `[R]` int32, the number of steps that each row
has had. Adagrad and Adam give the same bits in however many parts the steps are applied; SGD and
row-wise Adagrad round their factors once per part.

The schemas are in csrc/schemas.h, the kernels in csrc/cpu/row_decay*. There is no kernel for GPUs,
where plain torch runs.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dlrm.ops.library import has_native, native_available
from dlrm.ops.row_update import mark_changed
from dlrm.ops.split_float32 import join_float32, split_float32


def row_sgd_decay_(
    weight: Tensor,
    done: Tensor,
    steps: Tensor,
    rows: Tensor | None = None,
    *,
    low: Tensor | None = None,
) -> None:
    """Multiplies rows by `1 - lr * l2` for each step that they have missed, in place.

    Args:
        weight: `[R, dim]`, float32, or bfloat16 with `low`; contiguous.
        done: number of steps that each row has had, `[R]` int32; set to the number of all steps.
        steps: the sum of log(1 - lr * l2) over the steps up to each, `[steps, 1]` float64.
        rows: the rows, `[N]` int64, repeats allowed; None is all rows. Rows outside the weight are
            ignored; the look-up reports them.
        low: `[R, dim]` int16, contiguous, changed with a bfloat16 weight.

    Raises:
        RuntimeError: shapes, sizes or dtypes do not fit together; nothing has changed then.
    """
    _decay("row_sgd_decay_", row_sgd_decay_reference, weight, {}, done, steps, rows, low=low)


def row_sgd_decay_reference(weight, done, steps, rows=None, *, low=None) -> None:
    """Does the same as `row_sgd_decay_` in plain PyTorch."""
    logs = [0.0, *steps[:, 0].tolist()]

    def step(index: int, values: Tensor) -> tuple[Tensor]:
        return (values * math.exp(logs[index + 1] - logs[index]),)

    _step_by_step(step, weight, (), done, steps, rows, low)


def row_adagrad_decay_(
    weight: Tensor,
    state_sum: Tensor,
    done: Tensor,
    steps: Tensor,
    rows: Tensor | None = None,
    *,
    l2: float,
    eps: float = 1e-10,
    low: Tensor | None = None,
) -> None:
    """Applies Adagrad's updates of the steps that rows have missed; see `row_adagrad_`.

    `steps` has the learning rate of each, `[steps, 1]` float32; the rest is as in `row_sgd_decay_`.
    """
    _decay(
        "row_adagrad_decay_",
        row_adagrad_decay_reference,
        weight,
        {"state_sum": state_sum},
        done,
        steps,
        rows,
        l2=l2,
        eps=eps,
        low=low,
    )


def row_adagrad_decay_reference(
    weight, state_sum, done, steps, rows=None, *, l2, eps=1e-10, low=None
) -> None:
    """Does the same as `row_adagrad_decay_` in plain PyTorch."""

    def step(index: int, values: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        grad = l2 * values
        state = state + grad * grad
        return values - steps[index, 0].item() * grad / (state.sqrt() + eps), state

    _step_by_step(step, weight, (state_sum,), done, steps, rows, low)


def row_wise_adagrad_decay_(
    weight: Tensor,
    state_sum: Tensor,
    done: Tensor,
    steps: Tensor,
    rows: Tensor | None = None,
    *,
    l2: float,
    eps: float = 1e-10,
    low: Tensor | None = None,
) -> None:
    """Does the same as `row_adagrad_decay_`, with one state per row; see `row_wise_adagrad_`."""
    _decay(
        "row_wise_adagrad_decay_",
        row_wise_adagrad_decay_reference,
        weight,
        {"state_sum": state_sum},
        done,
        steps,
        rows,
        l2=l2,
        eps=eps,
        low=low,
    )


def row_wise_adagrad_decay_reference(
    weight, state_sum, done, steps, rows=None, *, l2, eps=1e-10, low=None
) -> None:
    """Does the same as `row_wise_adagrad_decay_` in plain PyTorch."""

    def step(index: int, values: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        grad = l2 * values
        state = state + (grad * grad).mean(dim=1)
        rate = steps[index, 0].item() / (state.sqrt() + eps)
        return values - rate.unsqueeze(1) * grad, state

    _step_by_step(step, weight, (state_sum,), done, steps, rows, low)


def row_adam_decay_(
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    done: Tensor,
    steps: Tensor,
    rows: Tensor | None = None,
    *,
    l2: float,
    betas: tuple[float, float] = (0.9, 0.999),
    low: Tensor | None = None,
) -> None:
    """Applies Adam's updates of missed steps; moments decay as in `torch.optim.Adam`.

    Args:
        exp_avg, exp_avg_sq: moments, float32, of the weight's shape.
        steps: of each step t, `[steps, 2]` float32, `lr * c / (1 - beta1**t)` and `eps * c`, where
            c is `sqrt(1 - beta2**t)`.
        betas: as in `torch.optim.Adam`. The rest is as in `row_sgd_decay_`.
    """

    def reference(*args: Any, beta1: float, beta2: float, **options: Any) -> None:
        row_adam_decay_reference(*args, betas=(beta1, beta2), **options)

    _decay(
        "row_adam_decay_",
        reference,
        weight,
        {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq},
        done,
        steps,
        rows,
        l2=l2,
        beta1=betas[0],
        beta2=betas[1],
        low=low,
    )


def row_adam_decay_reference(
    weight, exp_avg, exp_avg_sq, done, steps, rows=None, *, l2, betas=(0.9, 0.999), low=None
) -> None:
    """Does the same as `row_adam_decay_` in plain PyTorch."""
    beta1, beta2 = betas

    def step(index: int, values: Tensor, average: Tensor, square: Tensor) -> tuple[Tensor, ...]:
        step_size, eps = steps[index].tolist()
        grad = l2 * values
        average = average.lerp(grad, 1 - beta1)
        square = square.lerp(grad * grad, 1 - beta2)
        return values - step_size * average / (square.sqrt() + eps), average, square

    _step_by_step(step, weight, (exp_avg, exp_avg_sq), done, steps, rows, low)


def _decay(
    name: str,
    reference: Callable[..., None],
    weight: Tensor,
    states: dict[str, Tensor],
    done: Tensor,
    steps: Tensor,
    rows: Tensor | None,
    **options: Any,
) -> None:
    """Runs the native op if there is one for the tensors' device, otherwise the reference."""
    tensors = (weight, *states.values(), done, steps, rows)
    given = {"weight": weight, **states, "done": done, "rows": rows, "low": options["low"]}
    if has_native(name, **given) and not weight.is_cuda:
        getattr(torch.ops.dlrm, name)(*tensors, **options)
        mark_changed(weight)
    else:
        reference(*tensors, **options)


@torch.no_grad()
def _step_by_step(
    step: Callable[..., tuple[Tensor, ...]],
    weight: Tensor,
    states: tuple[Tensor, ...],
    done: Tensor,
    steps: Tensor,
    rows: Tensor | None,
    low: Tensor | None,
) -> None:
    """Updates rows step by step: `step(index, values, *states)` for the rows that missed it."""
    if rows is None:
        rows = torch.arange(len(weight), device=weight.device)
    else:
        rows = rows[(rows >= 0) & (rows < len(weight))].unique()
    first = int(done[rows].min()) if len(rows) else len(steps)
    for index in range(first, len(steps)):
        late = rows[done[rows] <= index]
        values = weight[late] if low is None else join_float32(weight[late], low[late])
        updated, *others = step(index, values, *(state[late] for state in states))
        if low is None:
            weight[late] = updated
        else:
            weight[late], low[late] = split_float32(updated)
        for state, value in zip(states, others, strict=True):
            state[late] = value
    done[rows] = len(steps)


if native_available():
    for _name in (
        "row_sgd_decay_",
        "row_adagrad_decay_",
        "row_wise_adagrad_decay_",
        "row_adam_decay_",
    ):
        torch.library.register_fake(f"dlrm::{_name}", lambda *args, **kwargs: None)
