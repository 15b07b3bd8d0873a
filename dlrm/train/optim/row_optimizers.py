"""Optimizers of embedding tables: one-pass updates of their rows.

They take the gradient of `ops.joint_embedding` as it is, (rows, values) with repeated
rows, and change in place only the rows that the batch touched. With an L2 term of all rows, every
step changes every row: a row gets the updates that it missed before it is looked up again.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dlrm.ops.row_rules import ADAGRAD, ADAM, ROW_WISE_ADAGRAD, SGD, RowRule
from dlrm.ops.row_update import row_decay_, row_update_
from dlrm.train.optim.base import LossScaled, ParameterGroups, without_wrapper


def table_optimizer(
    kind: str, parameters: Sequence[Tensor], *others: Any, **named: Any
) -> "RowOptimizer":
    """Returns the optimizer of embedding tables, one of `TABLE_OPTIMIZERS`; see `RowOptimizer`."""
    lr = torch.zeros((), device=parameters[0].device)
    return TABLE_OPTIMIZERS[kind](parameters, lr, *others, **named)


class RowOptimizer(LossScaled, Optimizer):
    """Updates in place the rows named by sparse gradients by a rule, which a subclass names.

    Args:
        parameters: weights `[rows, dim]`; each has a group of its own.
        lr: learning rate, a scalar on the weights' device.
        low: the lower halves of each bfloat16 weight, int16, which change with it; see
            `ops.split_float32`.
        table_sizes: rows of the tables of a weight, see `ops.row_update_`. They state that every
            gradient is that of one look-up of one row of each table; torch merges the rows of
            several look-ups, with repeats.
        l2: adds l2 / 2 * (the sum of the squares of the weights) to the loss; 0 or more. Its
            gradient, l2 times the row, joins the gradient of the data within the optimizer, after
            clipping, as `weight_decay` does in torch's optimizers.
        l2_mode: "all": all rows, at every step; after `catch_up` they have the values of torch's
            dense SGD, Adagrad or Adam. "looked_up": each row that a batch looks up, once, so that
            frequent rows decay more often; "Mini-batch Aware Regularization" of Zhou et al., "Deep
            Interest Network", 2018, section 5.1, without the division by the id's number of
            occurrences.
    """

    rule: RowRule

    def __init__(
        self,
        parameters: Sequence[Tensor],
        lr: Tensor,
        low: Mapping[Tensor, Tensor] | None = None,
        table_sizes: Mapping[Tensor, Sequence[int]] | None = None,
        l2: float = 0.0,
        l2_mode: str = "all",
    ):
        low, sizes = low or {}, table_sizes or {}
        groups: ParameterGroups = [
            {"params": [weight], "low": low.get(weight), "table_sizes": sizes.get(weight)}
            for weight in parameters
        ]
        super().__init__(groups, {"lr": lr, **self.rule.constants})
        self.l2 = l2
        self._missed: dict[Tensor, _MissedSteps] = {}
        for weight in parameters:
            weight.grad_dtype = None  # half-precision gradients arrive without a copy
            self.state[weight].update(self.rule.initial_state(weight))
            if self.rule.counts_steps:
                self.state[weight]["step"] = torch.zeros((), device=weight.device)
            if l2 and l2_mode == "all":
                self._missed[weight] = _MissedSteps(weight, self.rule)

    def move_state(self, zeros: Callable[[Sequence[int], torch.dtype], Tensor]) -> None:
        """Moves the initial state of rows, which is 0, to other memory before the first step.

        Args:
            zeros: makes a tensor of zeros, given its shape and dtype.
        """
        for state in self.state.values():
            state |= {k: zeros(v.shape, v.dtype) for k, v in state.items() if v.ndim}
        for missed in self._missed.values():
            missed.done = zeros(missed.done.shape, missed.done.dtype)

    @classmethod
    def state_bytes(cls, rows: int, dim: int, l2_of_all: bool = False) -> int:
        """Returns the bytes of the state of a weight `[rows, dim]`, scalars aside.

        Args:
            l2_of_all: count the missed steps of an L2 term of all rows, too.
        """
        return cls.rule.state_bytes(rows, dim) + 4 * rows * l2_of_all

    @property
    def defers(self) -> bool:
        """Returns whether rows have to `catch_up` before they are looked up."""
        return bool(self._missed)

    @torch.no_grad()
    def catch_up(self, rows: Tensor | None = None) -> None:
        """Applies to rows the updates of the steps that they have missed, if there are any.

        If a batch looks up at least as many rows as a weight has, repeats included, one pass over
        the weight replaces the search for late rows. The values are the same.

        Args:
            rows: rows of each weight, before they are looked up; all that the next `step` has
                gradients of, or more. None: all rows.
        """
        for group in self.param_groups:
            (weight,) = group["params"]
            missed = self._missed.get(weight)
            if missed is None or not len(missed.numbers):
                continue
            late = None if rows is None or len(rows) >= len(weight) else rows
            row_decay_(
                self.rule,
                weight,
                self._states(weight),
                missed.done,
                missed.numbers,
                late,
                l2=self.l2,
                low=group["low"],
                **{name: group[name] for name in self.rule.constants},
            )
            if late is None:
                missed.restart()

    @without_wrapper
    def step(self) -> None:
        for group in self.param_groups:
            (weight,) = group["params"]
            missed = self._missed.get(weight)
            if weight.grad is not None:
                rows, grad = weight.grad._indices()[0], weight.grad._values()
            elif missed is not None:
                rows = torch.zeros(0, dtype=torch.int64, device=weight.device)
                grad = weight.new_zeros(0, weight.shape[1])
            else:
                continue
            if missed is not None and not (self.found_inf is not None and self.found_inf):
                missed.add(self.numbers_of_step(weight, group), rows)
            self.update(weight, rows, grad, group)

    def update(
        self,
        weight: Tensor,
        rows: Tensor,
        grad: Tensor,
        group: dict,
        step: Tensor | None = None,
        **changed: float,
    ) -> None:
        """Applies the rule to gradients, with the group's constants but for those `changed`."""
        row_update_(
            self.rule,
            weight,
            self._states(weight),
            rows,
            grad,
            group["lr"],
            step=step,
            l2=self.l2,
            low=group["low"],
            table_sizes=group["table_sizes"],
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
            **({name: group[name] for name in self.rule.constants} | changed),
        )

    def numbers_of_step(self, weight: Tensor, group: dict) -> tuple[float, ...]:
        """Returns the numbers of the coming step that the rule's decay takes."""
        return (float(group["lr"]),)

    def _states(self, weight: Tensor) -> list[Tensor]:
        return [self.state[weight][state.key] for state in self.rule.states]


class _MissedSteps:
    """Counts the steps since all rows of a weight were up to date, and those that each row has had.

    Attributes:
        done: number of steps that each row has had, `[rows]` int32.
        numbers: of the steps, `[steps, columns]` on the CPU; see `dlrm.ops.row_rules`.
    """

    def __init__(self, weight: Tensor, rule: RowRule):
        self.done = torch.zeros(len(weight), dtype=torch.int32, device=weight.device)
        self._memory = torch.empty(64, len(rule.per_step), dtype=rule.steps_dtype)
        self.numbers = self._memory[:0]

    def add(self, numbers: tuple[float, ...], rows: Tensor) -> None:
        """Adds a step, which the rows of its batch have already had."""
        count = len(self.numbers) + 1
        if count > len(self._memory):
            self._memory = torch.cat([self._memory, torch.empty_like(self._memory)])
        self._memory[count - 1] = torch.tensor(numbers, dtype=self._memory.dtype)
        self.numbers = self._memory[:count]
        self.done[rows] = count

    def restart(self) -> None:
        self.done.zero_()
        self.numbers = self._memory[:0]


class RowSGD(RowOptimizer):
    """w -= lr * g."""

    rule = SGD

    def numbers_of_step(self, weight: Tensor, group: dict) -> tuple[float, ...]:
        lr = float(group["lr"])
        if lr * self.l2 >= 1:
            raise ValueError(
                f"--embedding_l2 {self.l2:g}: times the learning rate of sgd, {lr:g}, expected "
                "less than 1, or weights would change their signs"
            )
        before = self._missed[weight].numbers
        return ((float(before[-1]) if len(before) else 0.0) + math.log1p(-lr * self.l2),)


class RowAdagrad(RowOptimizer):
    """s += g * g; w -= lr * g / (sqrt(s) + eps), as torch.optim.Adagrad (Duchi et al., 2011)."""

    rule = ADAGRAD


class RowWiseAdagrad(RowOptimizer):
    """Adagrad with one state per row, the sum of the mean squared gradient: 1/dim of the memory."""

    rule = ROW_WISE_ADAGRAD


class RowAdam(RowOptimizer):
    """Adam (Kingma and Ba, 2015) on touched rows only, as torch.optim.SparseAdam.

    With an L2 term of all rows it is torch.optim.Adam: moments decay at every step, and eps is
    added in the same place.
    """

    rule = ADAM

    def update(
        self,
        weight: Tensor,
        rows: Tensor,
        grad: Tensor,
        group: dict,
        step: Tensor | None = None,
        **changed: float,
    ) -> None:
        step = self.state[weight]["step"]
        if weight in self._missed:
            changed["eps"] = group["eps"] * self._root_of_correction(weight, group)
        step += 1  # in place, and back after an error: a new tensor takes 5 us longer
        try:
            super().update(weight, rows, grad, group, step, **changed)
        except RuntimeError:
            step -= 1
            raise
        if self.found_inf is not None:
            step -= self.found_inf

    def numbers_of_step(self, weight: Tensor, group: dict) -> tuple[float, ...]:
        root, step = self._root_of_correction(weight, group), float(self.state[weight]["step"]) + 1
        return float(group["lr"]) * root / (1 - group["beta1"] ** step), group["eps"] * root

    def _root_of_correction(self, weight: Tensor, group: dict) -> float:
        """Returns the root of the second moment's bias correction at the next step."""
        return math.sqrt(1 - group["beta2"] ** (float(self.state[weight]["step"]) + 1))


TABLE_OPTIMIZERS: dict[str, type[RowOptimizer]] = {
    optimizer.rule.name: optimizer for optimizer in (RowSGD, RowAdagrad, RowWiseAdagrad, RowAdam)
}
