"""The rules by which optimizers update the rows of tables, in one table: `ROW_RULES`.

A rule states what it keeps for each row, its constants, and one step in plain torch. The rest
follows: arguments, references, docstrings and fake kernels of the operators, such as `row_sgd_` and
`row_sgd_decay_` (`row_update.py`), an optimizer's state and the numbers of its steps
(`dlrm/train/optim/row_optimizers.py`), and the bytes that planners count.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class State(NamedTuple):
    """A float32 tensor that a rule keeps beside a weight.

    Attributes:
        argument: its name among the operators' arguments.
        key: its name in the state of an optimizer, ours or torch's.
        meaning: its content, in words.
        of_row: it has one value for each row, `[R]`; otherwise it has the weight's shape.
    """

    argument: str
    key: str
    meaning: str
    of_row: bool = False

    def shape(self, rows: int, dim: int) -> tuple[int, ...]:
        return (rows,) if self.of_row else (rows, dim)


@dataclass(frozen=True, eq=False)
class RowRule:
    """A rule of updates, for rows that a batch touched and for the L2 term of missed steps.

    Attributes:
        name: its name; see `operator`.
        summary: first sentence of the update's docstring.
        updated: one step, `updated(values, *states, grad=, rate=, **constants)`; returns the new
            values and states. `grad` is the sum of each row's gradients.
        states: the values that it keeps for each weight or row.
        constants: the operators' constants, with their defaults.
        counts_steps: the update takes `step`, the number of this update.
        rate: `rate(lr, step, **constants)`, the rate of `updated` for a `step`; None is lr.
        decay_summary: first sentence of the decay's docstring; empty for a rule without a decay.
        steps: meaning, shape and dtype of the numbers of a missed step, which the decay takes.
        per_step: arguments of `updated` that these numbers are.
        steps_dtype: dtype of these numbers.
        decayed: a missed step, `decayed(values, numbers, numbers of the step before)`, if it is
            not `updated` with l2 times the values as `grad`. The decay then takes no `l2`.
    """

    name: str
    summary: str
    updated: Callable[..., tuple[Tensor, ...]]
    states: tuple[State, ...] = ()
    constants: Mapping[str, float] = field(default_factory=dict)
    counts_steps: bool = False
    rate: Callable[..., Tensor] | None = None
    decay_summary: str = ""
    steps: str = ""
    per_step: tuple[str, ...] = ("rate",)
    steps_dtype: torch.dtype = torch.float32
    decayed: Callable[..., tuple[Tensor, ...]] | None = None

    @property
    def operator(self) -> str:
        """Returns the name of the update; that of the decay ends in "decay_"."""
        return f"{self.name}_" if self.name.startswith("row_") else f"row_{self.name}_"

    @property
    def inputs(self) -> tuple[str, ...]:
        """Returns the names of the update's arguments after the states."""
        return ("rows", "grad", "lr", *(["step"] if self.counts_steps else []))

    @property
    def decay_constants(self) -> dict[str, float]:
        """Returns the constants that the decay takes: those that are the same at every step."""
        return {name: v for name, v in self.constants.items() if name not in self.per_step}

    def initial_state(self, weight: Tensor) -> dict[str, Tensor]:
        """Returns the state of a weight `[rows, dim]` before the first step."""
        rows, dim = weight.shape
        return {
            state.key: weight.new_zeros(state.shape(rows, dim), dtype=torch.float32)
            for state in self.states
        }

    def state_bytes(self, rows: int, dim: int) -> int:
        """Returns the bytes of the state of a weight `[rows, dim]`, of any dtype."""
        return sum(4 * math.prod(state.shape(rows, dim)) for state in self.states)


def _sgd(values: Tensor, *, grad: Tensor, rate: Tensor) -> tuple[Tensor, ...]:
    return (values - rate * grad,)


def _sgd_decayed(values: Tensor, numbers: list[float], before: list[float]) -> tuple[Tensor, ...]:
    return (values * math.exp(numbers[0] - before[0]),)


def _adagrad(
    values: Tensor, total: Tensor, *, grad: Tensor, rate: Tensor, eps: float
) -> tuple[Tensor, ...]:
    total = total + grad * grad
    return values - rate * grad / (total.sqrt() + eps), total


def _row_wise_adagrad(
    values: Tensor, total: Tensor, *, grad: Tensor, rate: Tensor, eps: float
) -> tuple[Tensor, ...]:
    total = total + (grad * grad).mean(dim=1)
    return values - (rate / (total.sqrt() + eps)).unsqueeze(1) * grad, total


def _adam(
    values: Tensor,
    average: Tensor,
    square: Tensor,
    *,
    grad: Tensor,
    rate: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> tuple[Tensor, ...]:
    average = average.lerp(grad, 1 - beta1)
    square = square.lerp(grad * grad, 1 - beta2)
    return values - rate * average / (square.sqrt() + eps), average, square


def _adam_rate(lr: Tensor, step: Tensor, *, beta1: float, beta2: float, eps: float) -> Tensor:
    step = step.double()
    return lr * (1 - beta2**step).sqrt() / (1 - beta1**step)


SGD = RowRule(
    "sgd",
    "Subtracts `lr * grad` from the rows, in place.",
    _sgd,
    decay_summary="Multiplies rows by `1 - lr * l2` for each step that they have missed, in place.",
    steps="the sum of log(1 - lr * l2) over the steps up to each, `[steps, 1]` float64",
    steps_dtype=torch.float64,
    decayed=_sgd_decayed,
)
ADAGRAD = RowRule(
    "adagrad",
    "Applies Adagrad (Duchi et al., 2011) to the rows, as `torch.optim.Adagrad` does when sparse.",
    _adagrad,
    decay_summary="Applies Adagrad's updates of the steps that rows have missed; see "
    "`row_adagrad_`.",
    steps="the learning rate of each step, `[steps, 1]` float32",
    states=(State("state_sum", "sum", "running sum of squared gradients"),),
    constants={"eps": 1e-10},
)
ROW_WISE_ADAGRAD = RowRule(
    "row_wise_adagrad",
    "Applies Adagrad with one state per row, 1/dim of the memory of `row_adagrad_`.",
    _row_wise_adagrad,
    decay_summary="Does the same as `row_adagrad_decay_`, with one state per row; see "
    "`row_wise_adagrad_`.",
    steps=ADAGRAD.steps,
    states=(State("state_sum", "sum", "sum of mean squared gradients", of_row=True),),
    constants={"eps": 1e-10},
)
ADAM = RowRule(
    "adam",
    "Applies Adam (Kingma and Ba, 2015) to the touched rows only, as `torch.optim.SparseAdam`.\n\n"
    "The moments of other rows do not decay; the bias correction uses the global step.",
    _adam,
    decay_summary="Applies Adam's updates of missed steps; moments decay as in `torch.optim.Adam`.",
    steps="of each step t, `[steps, 2]` float32, `lr * c / (1 - beta1**t)` and `eps * c`, where\n"
    "        c is `sqrt(1 - beta2**t)`",
    states=(
        State("exp_avg", "exp_avg", "first moment"),
        State("exp_avg_sq", "exp_avg_sq", "second moment"),
    ),
    constants={"beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
    counts_steps=True,
    rate=_adam_rate,
    per_step=("rate", "eps"),
)
ROW_RULES = {rule.name: rule for rule in (SGD, ADAGRAD, ROW_WISE_ADAGRAD, ADAM)}
