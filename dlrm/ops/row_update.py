"""Row updates and row decays: an optimizer's steps for rows of tables, in one pass.

Every update takes the gradient as `joint_embedding` returns it: N rows, repeats included, and a
gradient for each. Repeated rows are first summed in batch order, so that the result is bitwise the
same from run to run and for any number of threads. On a GPU, plain torch is an exception, and so is
`row_sgd_` for a float32 weight of fewer than `ORDERED_COLUMNS` columns, small tables excepted: they
add in arbitrary order unless `torch.use_deterministic_algorithms` is on. `grad` is divided by
`grad_scale` if that is given, and nothing changes if `found_inf` is not 0.

If the loss has the term l2 / 2 * (sum of the squares of a weight), a dense optimizer updates every
row at every step. The decays apply the updates that rows have missed because no batch looked them
up, whose gradient is l2 times the row. Both lead to the same values. The optimizer counts steps
from the moment when all rows were up to date. Adagrad and Adam give the same bits in however many
parts the steps are applied; SGD and row-wise Adagrad round their factors once per part.

A weight is float32, or bfloat16 with `low`, the lower halves of float32 values (`split_float32`):
these values are updated in float32, bit for bit like a float32 weight, and split again.

The functions are made of the rules of `row_rules.py`. The schemas are in csrc/schemas.h, the
kernels in csrc/{cpu,cuda}/row_update* and csrc/cpu/row_decay* and, for small tables, in
csrc/cuda/small_tables.h. Decays have no kernel for GPUs, where plain torch runs.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dlrm.ops.library import (
    follow_torch_settings,
    has_native,
    is_native_on_cpu,
    native_available,
)
from dlrm.ops.row_rules import ADAGRAD, ADAM, ROW_RULES, ROW_WISE_ADAGRAD, SGD, RowRule
from dlrm.ops.split_float32 import join_float32, split_float32

ORDERED_COLUMNS = 128  # kOrderedColumns of csrc/cuda/row_update.cu, which has the reason

Tensors = Sequence[Tensor]


def update_rows(
    rule: RowRule,
    weight: Tensor,
    states: Tensors,
    inputs: Tensors,
    *,
    l2: float = 0.0,
    low: Tensor | None = None,
    table_sizes: Sequence[int] | None = None,
    **options: Any,
) -> None:
    """Applies a rule's update; `inputs` are those of `RowRule.inputs`.

    It runs the native op if the tensors' device has one, otherwise the checks and the reference.
    """
    name = rule.operator
    if not rule.states:  # only then a GPU may add gradients in arbitrary order
        follow_torch_settings()
    options = {**rule.constants, **options}
    if _updates_natively(rule, weight, states, inputs, low, l2) and name in _OPS:
        _OPS[name](weight, *states, *inputs, l2=l2, low=low, table_sizes=table_sizes, **options)
        _mark_changed(weight)
    else:
        _check(rule, weight, states, low, inputs[0])
        _update_in_torch(rule, weight, states, inputs, l2=l2, low=low, **options)


def decay_rows(
    rule: RowRule,
    weight: Tensor,
    states: Tensors,
    inputs: Sequence[Any],
    *,
    low: Tensor | None = None,
    **constants: float,
) -> None:
    """Applies a rule's decay; `inputs` are done, steps and, unless all rows decay, rows."""
    name = f"{rule.operator}decay_"
    done, _, *rows = inputs
    tensors = dict(zip((state.argument for state in rule.states), states, strict=True))
    given = {"weight": weight, **tensors, "done": done, "rows": rows[0] if rows else None}
    constants = {**rule.decay_constants, **constants}
    if has_native(name, **given, low=low) and not weight.is_cuda and name in _OPS:
        _OPS[name](weight, *states, *inputs, low=low, **constants)
        _mark_changed(weight)
    else:
        _decay_in_torch(rule, weight, states, inputs, low=low, **constants)


def _updates_natively(
    rule: RowRule,
    weight: Tensor,
    states: Tensors,
    inputs: Tensors,
    low: Tensor | None,
    l2: float,
) -> bool:
    """Returns whether the native op has kernels for the tensors' device and the options."""
    if low is None and is_native_on_cpu(weight, *inputs, *states):
        return True
    named = dict(zip(rule.inputs, inputs, strict=True))
    for state, tensor in zip(rule.states, states, strict=True):
        named[state.argument] = tensor
    native = has_native(rule.operator, weight=weight, **named, low=low)
    return native and not (l2 and weight.is_cuda)


def _update_in_torch(
    rule: RowRule,
    weight: Tensor,
    states: Tensors,
    inputs: Tensors,
    *,
    l2: float = 0.0,
    low: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    **constants: float,
) -> None:
    """Does the same as `update_rows` in plain PyTorch."""
    constants = {**rule.constants, **constants}
    rows, grad, rate, *step = inputs
    touched, before, grad = _touched(weight, low, rows, grad, grad_scale, l2)
    if rule.rate is not None:
        rate = rule.rate(rate, *step, **constants).to(before.dtype)
    held = (state[touched] for state in states)
    updated, *kept = rule.updated(before, *held, grad=grad, rate=rate, **constants)
    _write(found_inf, touched, *zip(states, kept, strict=True), *_weight(weight, low, updated))


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


@torch.no_grad()
def _decay_in_torch(
    rule: RowRule,
    weight: Tensor,
    states: Tensors,
    inputs: Sequence[Any],
    *,
    l2: Any = None,
    low: Tensor | None = None,
    **constants: float,
) -> None:
    """Does the same as `decay_rows` in plain PyTorch, step by step for the rows that missed it."""
    constants = {**rule.decay_constants, **constants}
    done, steps, *chosen = inputs
    rows = torch.arange(len(weight), device=weight.device)
    if chosen and chosen[0] is not None:
        rows = chosen[0][(chosen[0] >= 0) & (chosen[0] < len(weight))].unique()
    numbers = [[0.0] * len(rule.per_step), *steps.tolist()]
    first = int(done[rows].min()) if len(rows) else len(steps)
    for index in range(first, len(steps)):
        late = rows[done[rows] <= index]
        values = weight[late] if low is None else join_float32(weight[late], low[late])
        if rule.decayed is not None:
            updated, *kept = rule.decayed(values, numbers[index + 1], numbers[index])
        else:
            given = dict(zip(rule.per_step, numbers[index + 1], strict=True))
            held = (state[late] for state in states)
            updated, *kept = rule.updated(values, *held, grad=l2 * values, **given, **constants)
        _write(None, late, *zip(states, kept, strict=True), *_weight(weight, low, updated))
    done[rows] = len(steps)


def _mark_changed(weight: Tensor) -> None:
    """Notifies autograd of an in-place change, in case it saved the weight for a backward pass."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(weight)


def _check(
    rule: RowRule, weight: Tensor, states: Tensors, low: Tensor | None, rows: Tensor
) -> None:
    """Raises what plain torch would accept without an error, as csrc/row_tensors.h does."""
    name = rule.operator
    if weight.dtype != (torch.float32 if low is None else torch.bfloat16):
        beside = "without low" if low is None else "with low"
        raise RuntimeError(
            f"{name}: expected a contiguous Float weight [rows, dim > 0], or a BFloat16 one with "
            f"low, got {list(weight.shape)} {weight.dtype} {beside}"
        )
    for state, tensor in zip(rule.states, states, strict=True):
        _check_beside(name, state.argument, tensor, torch.float32, state.shape(*weight.shape))
    if low is not None:
        _check_beside(name, "low", low, torch.int16, tuple(weight.shape))
    if rows.device.type != "cpu" or torch.compiler.is_compiling():
        return
    bad = ((rows < 0) | (rows >= weight.shape[0])).nonzero()
    if len(bad):
        raise RuntimeError(
            f"{name}: row {rows[bad[0, 0]]} at position {bad[0, 0]}: "
            f"expected 0 <= row < {weight.shape[0]}"
        )


def _check_beside(
    name: str, what: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    if tensor.shape != shape or tensor.dtype != dtype:
        kind = {torch.float32: "Float", torch.int16: "Short"}[dtype]
        raise RuntimeError(
            f"{name}: expected contiguous {kind} {what} {list(shape)} on the weight's device, got "
            f"{list(tensor.shape)} {tensor.dtype}"
        )


def _public(
    name: str,
    rule: RowRule,
    run: Callable[..., None],
    inputs: Iterable[str],
    options: Mapping[str, Any],
    doc: str,
) -> Callable[..., None]:
    """Returns `run` of a rule as a function with a name, whose arguments have names.

    They are the weight, the states and `inputs`, of which "rows" of a decay may be omitted, then
    by keyword `options`, where the constants beta1 and beta2 are one argument, betas.
    """
    count = 1 + len(rule.states)
    names = ("weight", *(state.argument for state in rule.states), *inputs)
    defaults = {"rows": None} if names[-1] == "rows" else {}
    either, by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    signature = inspect.Signature(
        [
            *(inspect.Parameter(n, either, default=defaults.get(n, _REQUIRED)) for n in names),
            *(inspect.Parameter(n, by_name, default=v) for n, v in _joined(options).items()),
        ]
    )

    def function(*args: Any, **options: Any) -> None:
        if len(args) != len(names):  # binding takes as long as a small update
            bound = signature.bind(*args, **options)
            args, options = bound.args, bound.kwargs
        if "betas" in options:
            options["beta1"], options["beta2"] = options.pop("betas")
        run(rule, args[0], args[1:count], args[count:], **options)

    function.__name__ = function.__qualname__ = name
    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__doc__ = doc
    return function


def _joined(options: Mapping[str, Any]) -> dict[str, Any]:
    named = {"betas" if name == "beta1" else name: value for name, value in options.items()}
    if "betas" in named:
        named["betas"] = (named["betas"], named.pop("beta2"))
    return named


def _doc(summary: str, rule: RowRule, arguments: Mapping[str, str], raises: str) -> str:
    """Returns a docstring with the meaning of all arguments."""
    shapes = {True: "`[R]`", False: "`[R, dim]`"}
    states = {
        state.argument: f"{state.meaning}, {shapes[state.of_row]} float32, contiguous; changed."
        for state in rule.states
    }
    weight = "`[R, dim]`, float32, or bfloat16 with `low`; contiguous."
    meanings = {"weight": weight, **states, **arguments}
    lines = "".join(f"    {name}: {meaning}\n" for name, meaning in meanings.items())
    return f"{summary}\n\nArgs:\n{lines}\nRaises:\n    RuntimeError: {raises}\n"


def _constants_meaning(constants: Mapping[str, float]) -> dict[str, str]:
    known = {
        "betas": "decay rates of both moments.",
        "eps": "added to the denominator.",
    }
    return {name: known[name] for name in _joined(constants)}


def _updates(rule: RowRule) -> tuple[Callable[..., None], Callable[..., None]]:
    """Returns the update of a rule and its plain-torch reference."""
    step = {
        "step": "0-dim tensor, the number of this update, 1 for the first. The caller counts, and\n"
        "        does not count a step skipped because of `found_inf`."
    }
    arguments = {
        "rows": "the row of each gradient, `[N]` int64, in any order, repeats allowed.",
        "grad": "`[N, dim]`, float32, bfloat16 or float16.",
        "lr": "0-dim tensor.",
        **(step if rule.counts_steps else {}),
        **_constants_meaning(rule.constants),
        **_UPDATE_OPTIONS,
    }
    doc = _doc(rule.summary, rule, arguments, _UPDATE_RAISES)
    kept = {"l2": 0.0, "low": None}
    scaled = {"grad_scale": None, "found_inf": None}
    options = {**rule.constants, **kept, "table_sizes": None, **scaled}
    plain = {**rule.constants, **kept, **scaled}
    same = f"Does the same as `{rule.operator}` in plain PyTorch."
    name, inputs = rule.operator, rule.inputs
    return (
        _public(name, rule, update_rows, inputs, options, doc),
        _public(f"{name}reference", rule, _update_in_torch, inputs, plain, same),
    )


def _decays(rule: RowRule) -> tuple[Callable[..., None], Callable[..., None]]:
    """Returns the decay of a rule and its plain-torch reference."""
    l2 = {} if rule.decayed else {"l2": "weight of the term; the gradient is l2 times the row."}
    arguments = {
        "done": "number of steps that each row has had, `[R]` int32; set to that of all steps.",
        "steps": f"{rule.steps}, on the CPU.",
        "rows": "the rows, `[N]` int64, repeats allowed; None is all rows. Rows outside the\n"
        "        weight are ignored; the look-up reports them.",
        **l2,
        **_constants_meaning(rule.decay_constants),
        "low": _UPDATE_OPTIONS["low"],
    }
    raises = "shapes, sizes or dtypes do not fit together; nothing has changed then."
    doc = _doc(rule.decay_summary, rule, arguments, raises)
    options = {**dict.fromkeys(l2, _REQUIRED), **rule.decay_constants, "low": None}
    same = f"Does the same as `{rule.operator}decay_` in plain PyTorch."
    name, inputs = f"{rule.operator}decay_", ("done", "steps", "rows")
    return (
        _public(name, rule, decay_rows, inputs, options, doc),
        _public(f"{name}reference", rule, _decay_in_torch, inputs, options, same),
    )


_REQUIRED = inspect.Parameter.empty
_UPDATE_OPTIONS = {
    "l2": """l2 times the row is added to its gradient after the division by `grad_scale`: the
        gradient of a loss term l2 / 2 * (sum of the squares of the rows looked up). On a GPU
        plain torch runs if it is not 0.""",
    "low": "`[R, dim]` int16, contiguous, changed with a bfloat16 weight; None for a float32 one.",
    "table_sizes": """rows of each table; the tables follow each other in the weight and add up to
        R. It states that `rows` is `[batch, tables]` flattened, so that gradient i belongs to
        table `i % tables`. A GPU then needs no sort and no atomic operations for small tables.
        On the CPU it changes nothing.""",
    "grad_scale": "0-dim tensor that the gradient was multiplied by, if it was.",
    "found_inf": "0-dim tensor; not 0 if any gradient of the step is infinite or NaN.",
}
_UPDATE_RAISES = """a row is outside the weight (the message names its value and position; on a
        GPU `raise_device_errors` raises it), or shapes, sizes or dtypes do not fit together.
        Nothing has changed then. A row inside the weight but outside its own table is detected
        on a GPU, for up to 256 tables, and not on the CPU."""

row_sgd_, row_sgd_reference = _updates(SGD)
row_adagrad_, row_adagrad_reference = _updates(ADAGRAD)
row_wise_adagrad_, row_wise_adagrad_reference = _updates(ROW_WISE_ADAGRAD)
row_adam_, row_adam_reference = _updates(ADAM)
row_sgd_decay_, row_sgd_decay_reference = _decays(SGD)
row_adagrad_decay_, row_adagrad_decay_reference = _decays(ADAGRAD)
row_wise_adagrad_decay_, row_wise_adagrad_decay_reference = _decays(ROW_WISE_ADAGRAD)
row_adam_decay_, row_adam_decay_reference = _decays(ADAM)

_OPS: dict[str, Callable[..., None]] = {}  # a rule without operators runs in plain torch
if native_available():
    for _name in (rule.operator + kind for rule in ROW_RULES.values() for kind in ("", "decay_")):
        if hasattr(torch.ops.dlrm, _name):
            _OPS[_name] = getattr(torch.ops.dlrm, _name).default
            torch.library.register_fake(f"dlrm::{_name}", lambda *args, **kwargs: None)
