"""The rules by which optimizers update the rows of tables, in one table: `ROW_RULES`.

A rule states what it keeps for each row, its constants, and one step in plain torch. The operators
`row_update_` and `row_decay_` (`row_update.py`), an optimizer's state, the numbers of its steps
(`dlrm/train/optim/row_optimizers.py`) and the bytes that planners count follow from it.
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
        argument: its name in messages of the operators.
        key: its name in the state of an optimizer, ours or torch's.
        of_row: it has one value for each row, `[R]`; otherwise it has the weight's shape.
    """

    argument: str
    key: str
    of_row: bool = False

    def shape(self, rows: int, dim: int) -> tuple[int, ...]:
        return (rows,) if self.of_row else (rows, dim)


@dataclass(frozen=True, eq=False)
class RowRule:
    """A rule of updates, for rows that a batch touched and for the L2 term of missed steps.

    Attributes:
        name: its name.
        updated: one step, `updated(values, *states, grad=, rate=, **constants)`; returns the new
            values and states. `grad` is the sum of each row's gradients.
        states: the values that it keeps for each weight or row.
        constants: its constants, with their defaults.
        counts_steps: the update takes `step`, the number of this update.
        rate: `rate(lr, step, **constants)`, the rate of `updated` for a `step`; None is lr.
        per_step: arguments of `updated` that the numbers of a missed step are, `[steps, columns]`.
        steps_dtype: dtype of these numbers.
        decayed: a missed step, `decayed(values, numbers, numbers of the step before)`, if it is
            not `updated` with l2 times the values as `grad`.
        number: its place among the rules of csrc/row_update.h; without one it runs in plain torch.
    """

    name: str
    updated: Callable[..., tuple[Tensor, ...]]
    states: tuple[State, ...] = ()
    constants: Mapping[str, float] = field(default_factory=dict)
    counts_steps: bool = False
    rate: Callable[..., Tensor] | None = None
    per_step: tuple[str, ...] = ("rate",)
    steps_dtype: torch.dtype = torch.float32
    decayed: Callable[..., tuple[Tensor, ...]] | None = None
    number: int | None = None

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


# Numbers of a missed step: for SGD the sum of log(1 - lr * l2) over the steps up to it; for others
# the learning rate, which for Adam is lr * c / (1 - beta1**t), followed by eps * c, where c is
# sqrt(1 - beta2**t) at step t.
SGD = RowRule("sgd", _sgd, steps_dtype=torch.float64, decayed=_sgd_decayed, number=0)
ADAGRAD = RowRule(  # Duchi et al., 2011; as `torch.optim.Adagrad` when sparse
    "adagrad",
    _adagrad,
    states=(State("state_sum", "sum"),),
    constants={"eps": 1e-10},
    number=1,
)
ROW_WISE_ADAGRAD = RowRule(  # with the sum of mean squared gradients: 1/dim of the memory
    "row_wise_adagrad",
    _row_wise_adagrad,
    states=(State("state_sum", "sum", of_row=True),),
    constants={"eps": 1e-10},
    number=2,
)
ADAM = RowRule(  # Kingma and Ba, 2015; as `torch.optim.SparseAdam`, with the global step
    "adam",
    _adam,
    states=(State("exp_avg", "exp_avg"), State("exp_avg_sq", "exp_avg_sq")),
    constants={"beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
    counts_steps=True,
    rate=_adam_rate,
    per_step=("rate", "eps"),
    number=3,
)
ROW_RULES = {rule.name: rule for rule in (SGD, ADAGRAD, ROW_WISE_ADAGRAD, ADAM)}
