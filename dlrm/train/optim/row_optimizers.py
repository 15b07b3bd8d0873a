"""Optimizers of embedding tables: one-pass updates of their rows.

They take the gradient of `ops.joint_embedding` as it is, (rows, values) with repeated
rows, and change in place only the rows that the batch touched. With an L2 term of all rows, every
step changes every row: a row gets the updates that it missed before it is looked up again.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from dlrm.ops.row_rules import ADAGRAD, ADAM, ROW_WISE_ADAGRAD, SGD, RowRule
from dlrm.ops.row_update import decay_rows, update_rows
from dlrm.train.optim.base import DefersUpdates, LossScaled, Weights, without_wrapper
from dlrm.train.optim.missed_steps import MissedSteps


def table_optimizer(
    kind: str,
    parameters: Iterable[Tensor],
    low: Mapping[Tensor, Tensor] | None = None,
    table_sizes: Mapping[Tensor, Sequence[int]] | None = None,
    l2: float = 0.0,
    l2_mode: str = "all",
) -> "RowOptimizer":
    """Returns the optimizer of embedding tables.

    Args:
        kind: one of `TABLE_OPTIMIZERS`.
        parameters: weights `[rows, dim]` with sparse gradients.
        low: the lower halves (int16) of each bfloat16 weight; the optimizer changes both.
        table_sizes: rows of the tables of a weight, if `RowOptimizer` may use them.
        l2, l2_mode: see `RowOptimizer.add_l2`.
    """
    parameters, low, sizes = list(parameters), low or {}, table_sizes or {}
    groups = [
        {"params": [weight], "low": low.get(weight), "table_sizes": sizes.get(weight)}
        for weight in parameters
    ]
    optimizer = TABLE_OPTIMIZERS[kind](groups, torch.zeros((), device=parameters[0].device))
    optimizer.add_l2(l2, l2_mode)
    return optimizer


class RowOptimizer(LossScaled, DefersUpdates, Optimizer):
    """Updates in place the rows named by sparse gradients by a rule, which a subclass names.

    Args:
        parameters: weights `[rows, dim]`, or groups of them; a bfloat16 weight is in a group of its
            own, whose option "low" is its lower halves (`ops.split_float32`). A group's option
            "table_sizes", see `ops.row_sgd_`, states that every gradient is that of one look-up of
            one row of each table; torch merges the rows of several look-ups, with repeats.
        lr: learning rate, a scalar on the weights' device.
        constants: the rule's, if not its defaults.
    """

    rule: RowRule

    def __init__(self, parameters: Weights, lr: Tensor, **constants: float):
        defaults = {"lr": lr, "low": None, "table_sizes": None, **self.rule.constants}
        super().__init__(parameters, {**defaults, **constants})
        self.l2 = 0.0
        self._missed: dict[Tensor, MissedSteps] = {}
        for group in self.param_groups:
            for weight in group["params"]:
                weight.grad_dtype = None  # half-precision gradients arrive without a copy
                self.state[weight].update(self.initial_state(weight))

    def add_l2(self, l2: float, mode: str = "all") -> None:
        """Adds l2 / 2 * (the sum of the squares of the weights) to the loss, from the next step on.

        Its gradient, l2 times the row, joins the gradient of the data within the optimizer, after
        clipping, as `weight_decay` does in torch's optimizers.

        Args:
            l2: 0 or more.
            mode: "all": all rows, at every step. After `before_look_up` and `finish_updates`, rows
                have the values of torch's dense SGD, Adagrad or Adam. "looked_up": each row that a
                batch looks up, once, so that frequent rows decay more often; "Mini-batch Aware
                Regularization" of Zhou et al., "Deep Interest Network", 2018, section 5.1, without
                the division by the id's number of occurrences.
        """
        self.l2 = l2
        if l2 and mode == "all":
            for group in self.param_groups:
                for weight in group["params"]:
                    self._missed[weight] = MissedSteps(
                        len(weight), len(self.rule.per_step), self.rule.steps_dtype, weight.device
                    )

    def move_state(self, zeros: Callable[[Sequence[int], torch.dtype], Tensor]) -> None:
        """Moves the initial state of rows, which is 0, to other memory before the first step.

        Args:
            zeros: makes a tensor of zeros, given its shape and dtype.
        """
        for weight, state in self.state.items():
            state |= {k: zeros(v.shape, v.dtype) for k, v in state.items() if v.ndim}
            if weight in self._missed:
                done = self._missed[weight].done
                self._missed[weight].done = zeros(done.shape, done.dtype)

    @classmethod
    def state_bytes(cls, rows: int, dim: int, l2_of_all: bool = False) -> int:
        """Returns the bytes of the state of a weight `[rows, dim]`, scalars aside.

        Args:
            rows, dim: shape of the weight.
            l2_of_all: count the missed steps of an L2 term of all rows, too.
        """
        missed = MissedSteps.bytes_of_row * rows if l2_of_all else 0
        return cls.rule.state_bytes(rows, dim) + missed

    @property
    def defers(self) -> bool:
        """Returns whether rows have to be brought up to date by `before_look_up`."""
        return bool(self._missed)

    def initial_state(self, weight: Tensor) -> dict[str, Tensor]:
        """Returns the state of a weight: tensors with an entry for each row, and scalars."""
        return self.rule.initial_state(weight)

    @torch.no_grad()
    def before_look_up(self, rows: Tensor) -> None:
        """Applies to rows the updates of the steps that they have missed, if there are any.

        If a batch looks up at least as many rows as a weight has, repeats included, one pass over
        the weight replaces the search for late rows. The values are the same.

        Args:
            rows: rows of each weight; all that the next `step` has gradients of, or more.
        """
        for weight, missed in self._missed.items():
            if len(rows) >= len(weight):
                self._decay_all(weight)
            elif len(missed):
                self._decay(weight, rows)

    @torch.no_grad()
    def finish_updates(self) -> None:
        """Applies to all rows the updates of the steps that they have missed."""
        for weight in self._missed:
            self._decay_all(weight)

    @without_wrapper
    def step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
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

    def update(self, weight: Tensor, rows: Tensor, grad: Tensor, group: dict) -> None:
        """Applies the rule to rows, by their gradients."""
        self._update(weight, (rows, grad, group["lr"]), group)

    def _update(
        self, weight: Tensor, inputs: tuple[Tensor, ...], group: dict, **changed: float
    ) -> None:
        update_rows(
            self.rule,
            weight,
            self._states(weight),
            inputs,
            l2=self.l2,
            low=group["low"],
            table_sizes=group["table_sizes"],
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
            **{**{name: group[name] for name in self.rule.constants}, **changed},
        )

    def _states(self, weight: Tensor) -> list[Tensor]:
        return [self.state[weight][state.key] for state in self.rule.states]

    def numbers_of_step(self, weight: Tensor, group: dict) -> tuple[float, ...]:
        """Returns the numbers of the coming step that the rule's decay takes."""
        return (float(group["lr"]),)

    def decay(self, weight: Tensor, missed: MissedSteps, rows: Tensor | None, group: dict) -> None:
        """Applies to rows, or all rows, the updates of the steps that they have missed."""
        constants = {name: group[name] for name in self.rule.decay_constants}
        if self.rule.decayed is None:
            constants["l2"] = self.l2
        inputs = (missed.done, missed.numbers, rows)
        decay_rows(self.rule, weight, self._states(weight), inputs, low=group["low"], **constants)

    def _decay_all(self, weight: Tensor) -> None:
        if len(self._missed[weight]):
            self._decay(weight, None)
            self._missed[weight].forget()

    def _decay(self, weight: Tensor, rows: Tensor | None) -> None:
        for group in self.param_groups:
            if any(weight is own for own in group["params"]):
                self.decay(weight, self._missed[weight], rows, group)


class RowSGD(RowOptimizer):
    """w -= lr * g."""

    rule = SGD

    def numbers_of_step(self, weight: Tensor, group: dict) -> tuple[float, ...]:
        shrinks_by = float(group["lr"]) * self.l2
        if shrinks_by >= 1:
            raise ValueError(
                f"--embedding_l2 {self.l2:g}: times the learning rate of sgd, "
                f"{float(group['lr']):g}, expected less than 1, or weights would change their signs"
            )
        before = self._missed[weight].numbers
        return ((float(before[-1]) if len(before) else 0.0) + math.log1p(-shrinks_by),)


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

    def initial_state(self, weight: Tensor) -> dict[str, Tensor]:
        return {**super().initial_state(weight), "step": torch.zeros((), device=weight.device)}

    def update(self, weight: Tensor, rows: Tensor, grad: Tensor, group: dict) -> None:
        root = self._root_of_correction(weight, group) if weight in self._missed else 1.0
        step = self.state[weight]["step"]
        step += 1
        try:
            self._update(weight, (rows, grad, group["lr"], step), group, eps=group["eps"] * root)
        except Exception:
            step -= 1
            raise
        if self.found_inf is not None:
            step -= (self.found_inf != 0).to(step.dtype)

    def numbers_of_step(self, weight: Tensor, group: dict) -> tuple[float, ...]:
        root, step = self._root_of_correction(weight, group), float(self.state[weight]["step"]) + 1
        return float(group["lr"]) * root / (1 - group["beta1"] ** step), group["eps"] * root

    def _root_of_correction(self, weight: Tensor, group: dict) -> float:
        """Returns the root of the second moment's bias correction at the next step."""
        return math.sqrt(1 - group["beta2"] ** (float(self.state[weight]["step"]) + 1))


TABLE_OPTIMIZERS: dict[str, type[RowOptimizer]] = {
    optimizer.rule.name: optimizer for optimizer in (RowSGD, RowAdagrad, RowWiseAdagrad, RowAdam)
}
