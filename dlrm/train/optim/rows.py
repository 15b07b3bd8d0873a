"""Optimizers of embedding tables: one-pass updates of their rows, or torch's sparse ones.

The row optimizers take the gradient of `ops.joint_embedding` as it is, (rows, values) with repeated
rows, and change in place only the rows that the batch touched. With an L2 term of all rows, every
step changes every row: a row gets the updates that it missed before it is looked up again.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from dlrm import ops
from dlrm.train.optim.base import DefersUpdates, LossScaled, Weights, without_wrapper
from dlrm.train.optim.missed_steps import MissedSteps


def table_optimizer(
    kind: str,
    parameters: Iterable[Tensor],
    native: bool,
    low: Mapping[Tensor, Tensor] | None = None,
    table_sizes: Mapping[Tensor, Sequence[int]] | None = None,
    l2: float = 0.0,
    l2_mode: str = "all",
) -> Optimizer:
    """Returns the optimizer of embedding tables.

    Args:
        kind: one of `TABLE_OPTIMIZERS`.
        parameters: weights `[rows, dim]` with sparse gradients.
        native: return a row optimizer below; otherwise torch's own for sparse gradients.
        low: the lower halves (int16) of each bfloat16 weight; row optimizers change both.
        table_sizes: rows of the tables of a weight, if `RowOptimizer` may use them.
        l2: see `RowOptimizer`.
        l2_mode: see `RowOptimizer`.

    Raises:
        ValueError: torch has no such optimizer for sparse gradients, or none with `l2`.
    """
    parameters, chosen = list(parameters), TABLE_OPTIMIZERS[kind]
    if native:
        low, table_sizes = low or {}, table_sizes or {}
        groups = [
            {"params": [weight], "low": low.get(weight), "table_sizes": table_sizes.get(weight)}
            for weight in parameters
        ]
        optimizer = chosen.rows(groups, torch.zeros((), device=parameters[0].device))
        optimizer.add_l2(l2, l2_mode)
        return optimizer
    if l2:
        raise ValueError(f"--embedding_l2 {l2} needs --embedding_type joint_fused")
    if chosen.sparse is None:
        raise ValueError(f"--embedding_optimizer {kind} needs --embedding_type joint_fused")
    return chosen.sparse(parameters)


class RowOptimizer(LossScaled, DefersUpdates, Optimizer):
    """Updates in place the rows named by sparse gradients; see the subclasses.

    Args:
        parameters: weights `[rows, dim]`, or groups of them; a bfloat16 weight is in a group of its
            own, whose option "low" is its lower halves (`ops.split_float32`). A group's option
            "table_sizes", see `ops.row_sgd_`, states that every gradient is that of one look-up of
            one row of each table; torch merges the rows of several look-ups, with repeats.
        lr: learning rate, a scalar on the weights' device.
        options: options of the subclass.
    """

    def __init__(self, parameters: Weights, lr: Tensor, **options: float):
        super().__init__(parameters, {"lr": lr, "low": None, "table_sizes": None, **options})
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
                        len(weight), *self.numbers_kept, weight.device
                    )

    @property
    def defers(self) -> bool:
        """Returns whether rows have to be brought up to date by `before_look_up`."""
        return bool(self._missed)

    @staticmethod
    def initial_state(weight: Tensor) -> dict[str, Tensor]:
        """Returns the state of a weight: tensors with an entry for each row, and scalars."""
        return {}

    @classmethod
    def state_bytes(cls, dim: int) -> int:
        """Returns the bytes of the state of a row of `dim` values."""
        state = cls.initial_state(torch.empty(1, dim, device="meta"))
        return sum(value.nbytes for value in state.values() if value.ndim)

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
        raise NotImplementedError

    numbers_kept = (1, torch.float32)  # how many `numbers_of_step` returns, and their dtype

    def numbers_of_step(self, weight: Tensor, group: dict) -> tuple[float, ...]:
        """Returns the numbers of the coming step that `decay` takes."""
        return (float(group["lr"]),)

    def decay(self, weight: Tensor, missed: MissedSteps, rows: Tensor | None, group: dict) -> None:
        """Applies to rows, or all rows, the updates of the steps that they have missed."""
        raise NotImplementedError

    def _decay_all(self, weight: Tensor) -> None:
        if len(self._missed[weight]):
            self._decay(weight, None)
            self._missed[weight].forget()

    def _decay(self, weight: Tensor, rows: Tensor | None) -> None:
        for group in self.param_groups:
            if any(weight is own for own in group["params"]):
                self.decay(weight, self._missed[weight], rows, group)

    def options(self, group: dict) -> dict[str, Any]:
        """Returns the arguments that all row updates take."""
        return {
            "l2": self.l2,
            "low": group["low"],
            "table_sizes": group["table_sizes"],
            "grad_scale": self.grad_scale,
            "found_inf": self.found_inf,
        }


class RowSGD(RowOptimizer):
    """w -= lr * g."""

    numbers_kept = (1, torch.float64)

    def update(self, weight: Tensor, rows: Tensor, grad: Tensor, group: dict) -> None:
        ops.row_sgd_(weight, rows, grad, group["lr"], **self.options(group))

    def numbers_of_step(self, weight: Tensor, group: dict) -> tuple[float, ...]:
        shrinks_by = float(group["lr"]) * self.l2
        if shrinks_by >= 1:
            raise ValueError(
                f"--embedding_l2 {self.l2:g}: times the learning rate of sgd, "
                f"{float(group['lr']):g}, expected less than 1, or weights would change their signs"
            )
        before = self._missed[weight].numbers
        return ((float(before[-1]) if len(before) else 0.0) + math.log1p(-shrinks_by),)

    def decay(self, weight: Tensor, missed: MissedSteps, rows: Tensor | None, group: dict) -> None:
        ops.row_sgd_decay_(weight, missed.done, missed.numbers, rows, low=group["low"])


class RowAdagrad(RowOptimizer):
    """s += g * g; w -= lr * g / (sqrt(s) + eps), as torch.optim.Adagrad (Duchi et al., 2011)."""

    kernel = staticmethod(ops.row_adagrad_)
    decay_kernel = staticmethod(ops.row_adagrad_decay_)

    def __init__(self, parameters: Weights, lr: Tensor, eps: float = 1e-10):
        super().__init__(parameters, lr, eps=eps)

    @staticmethod
    def initial_state(weight: Tensor) -> dict[str, Tensor]:
        return {"sum": torch.zeros_like(weight, dtype=torch.float32)}

    def update(self, weight: Tensor, rows: Tensor, grad: Tensor, group: dict) -> None:
        self.kernel(
            weight,
            self.state[weight]["sum"],
            rows,
            grad,
            group["lr"],
            eps=group["eps"],
            **self.options(group),
        )

    def decay(self, weight: Tensor, missed: MissedSteps, rows: Tensor | None, group: dict) -> None:
        self.decay_kernel(
            weight,
            self.state[weight]["sum"],
            missed.done,
            missed.numbers,
            rows,
            l2=self.l2,
            eps=group["eps"],
            low=group["low"],
        )


class RowWiseAdagrad(RowAdagrad):
    """Adagrad with one state per row, the sum of the mean squared gradient: 1/dim of the memory."""

    kernel = staticmethod(ops.row_wise_adagrad_)
    decay_kernel = staticmethod(ops.row_wise_adagrad_decay_)

    @staticmethod
    def initial_state(weight: Tensor) -> dict[str, Tensor]:
        return {"sum": weight.new_zeros(len(weight), dtype=torch.float32)}


class RowAdam(RowOptimizer):
    """Adam (Kingma and Ba, 2015) on touched rows only, as torch.optim.SparseAdam.

    With an L2 term of all rows it is torch.optim.Adam: moments decay at every step, and eps is
    added in the same place.
    """

    numbers_kept = (2, torch.float32)

    def __init__(
        self,
        parameters: Weights,
        lr: Tensor,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
    ):
        super().__init__(parameters, lr, beta1=beta1, beta2=beta2, eps=eps)

    @staticmethod
    def initial_state(weight: Tensor) -> dict[str, Tensor]:
        return {
            "exp_avg": torch.zeros_like(weight, dtype=torch.float32),
            "exp_avg_sq": torch.zeros_like(weight, dtype=torch.float32),
            "step": torch.zeros((), device=weight.device),
        }

    def update(self, weight: Tensor, rows: Tensor, grad: Tensor, group: dict) -> None:
        state, eps = self.state[weight], group["eps"]
        if weight in self._missed:
            eps *= self._root_of_correction(weight, group)
        step = state["step"]
        step += 1
        try:
            ops.row_adam_(
                weight,
                state["exp_avg"],
                state["exp_avg_sq"],
                rows,
                grad,
                group["lr"],
                step,
                betas=(group["beta1"], group["beta2"]),
                eps=eps,
                **self.options(group),
            )
        except RuntimeError:
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

    def decay(self, weight: Tensor, missed: MissedSteps, rows: Tensor | None, group: dict) -> None:
        state = self.state[weight]
        ops.row_adam_decay_(
            weight,
            state["exp_avg"],
            state["exp_avg_sq"],
            missed.done,
            missed.numbers,
            rows,
            l2=self.l2,
            betas=(group["beta1"], group["beta2"]),
            low=group["low"],
        )


class TableOptimizer(NamedTuple):
    """The optimizers of tables that share a name.

    Attributes:
        rows: updates the rows of native look-ups.
        sparse: torch's own for sparse gradients, with the same state; None if torch has none.
    """

    rows: type[RowOptimizer]
    sparse: Callable[[list[Tensor]], Optimizer] | None


TABLE_OPTIMIZERS = {
    "sgd": TableOptimizer(RowSGD, partial(torch.optim.SGD, lr=0.0)),
    "adagrad": TableOptimizer(RowAdagrad, partial(torch.optim.Adagrad, lr=0.0)),
    "row_wise_adagrad": TableOptimizer(RowWiseAdagrad, None),
    "adam": TableOptimizer(RowAdam, partial(torch.optim.SparseAdam, lr=1.0)),
}
