"""Optimizers of embedding tables: one-pass updates of their rows, or torch's sparse ones.

The row optimizers take the gradient of `ops.joint_embedding` as it comes, (rows, values) with rows
repeated, and change in place only the rows that the batch touched.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from dlrm import ops
from dlrm.train.optim.base import LossScaled, Weights


def table_optimizer(
    kind: str,
    parameters: Iterable[Tensor],
    native: bool,
    low: Mapping[Tensor, Tensor] | None = None,
    table_sizes: Mapping[Tensor, Sequence[int]] | None = None,
) -> Optimizer:
    """Returns the optimizer of embedding tables.

    Args:
        kind: one of `TABLE_OPTIMIZERS`.
        parameters: weights `[rows, dim]` with sparse gradients.
        native: one of the row optimizers below; else torch's own for sparse gradients.
        low: the lower halves (int16) of each bfloat16 weight; row optimizers change both.
        table_sizes: rows of the tables of a weight, where `RowOptimizer` may know them.

    Raises:
        ValueError: torch has no such optimizer for sparse gradients.
    """
    parameters, chosen = list(parameters), TABLE_OPTIMIZERS[kind]
    if native:
        low, table_sizes = low or {}, table_sizes or {}
        groups = [
            {"params": [weight], "low": low.get(weight), "table_sizes": table_sizes.get(weight)}
            for weight in parameters
        ]
        return chosen.rows(groups, torch.zeros((), device=parameters[0].device))
    if chosen.sparse is None:
        raise ValueError(f"--embedding_optimizer {kind} needs --embedding_type joint_fused")
    return chosen.sparse(parameters)


class RowOptimizer(LossScaled, Optimizer):
    """Updates in place the rows named by sparse gradients; see the subclasses.

    Args:
        parameters: weights `[rows, dim]`, or groups of them; a bfloat16 weight is in a group of its
            own, whose option "low" is its lower halves (`ops.split_float32`). A group's option
            "table_sizes", see `ops.row_sgd_`, says that every gradient is that of one look-up of
            one row of each table; torch merges the rows of several, even where it leaves repeats.
        lr: learning rate, a scalar on the weights' device.
        options: the subclass's own.
    """

    def __init__(self, parameters: Weights, lr: Tensor, **options: float):
        super().__init__(parameters, {"lr": lr, "low": None, "table_sizes": None, **options})
        for group in self.param_groups:
            for weight in group["params"]:
                weight.grad_dtype = None  # half-precision gradients come as they are, uncopied
                self.state[weight].update(self.initial_state(weight))

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
    def step(self, closure=None) -> None:  # type: ignore[override]
        assert closure is None, "row optimizers take no closure"
        for group in self.param_groups:
            for weight in group["params"]:
                if (grad := weight.grad) is not None:
                    self.update(weight, grad._indices()[0], grad._values(), group)

    def update(self, weight: Tensor, rows: Tensor, grad: Tensor, group: dict) -> None:
        raise NotImplementedError

    def options(self, group: dict) -> dict[str, Any]:
        """What every row update takes."""
        return {
            "low": group["low"],
            "table_sizes": group["table_sizes"],
            "grad_scale": self.grad_scale,
            "found_inf": self.found_inf,
        }


class RowSGD(RowOptimizer):
    """w -= lr * g."""

    def update(self, weight: Tensor, rows: Tensor, grad: Tensor, group: dict) -> None:
        ops.row_sgd_(weight, rows, grad, group["lr"], **self.options(group))


class RowAdagrad(RowOptimizer):
    """s += g * g; w -= lr * g / (sqrt(s) + eps), as torch.optim.Adagrad (Duchi et al., 2011)."""

    kernel = staticmethod(ops.row_adagrad_)

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


class RowWiseAdagrad(RowAdagrad):
    """Adagrad with one state a row, the sum of the mean squared gradient: 1/dim of the memory."""

    kernel = staticmethod(ops.row_wise_adagrad_)

    @staticmethod
    def initial_state(weight: Tensor) -> dict[str, Tensor]:
        return {"sum": weight.new_zeros(len(weight), dtype=torch.float32)}


class RowAdam(RowOptimizer):
    """Adam (Kingma and Ba, 2015) on touched rows alone, as torch.optim.SparseAdam."""

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
        state = self.state[weight]
        ops.row_adam_(
            weight,
            state["exp_avg"],
            state["exp_avg_sq"],
            rows,
            grad,
            group["lr"],
            state["step"] + 1,
            betas=(group["beta1"], group["beta2"]),
            eps=group["eps"],
            **self.options(group),
        )
        state["step"] += 1 if self.found_inf is None else self.found_inf == 0


class TableOptimizer(NamedTuple):
    """The optimizers of tables that have one name.

    Attributes:
        rows: updates the rows of native look-ups.
        sparse: torch's own for sparse gradients, with the same state; None where it has none.
    """

    rows: type[RowOptimizer]
    sparse: Callable[[list[Tensor]], Optimizer] | None


TABLE_OPTIMIZERS = {
    "sgd": TableOptimizer(RowSGD, partial(torch.optim.SGD, lr=0.0)),
    "adagrad": TableOptimizer(RowAdagrad, partial(torch.optim.Adagrad, lr=0.0)),
    "row_wise_adagrad": TableOptimizer(RowWiseAdagrad, None),
    "adam": TableOptimizer(RowAdam, partial(torch.optim.SparseAdam, lr=1.0)),
}
