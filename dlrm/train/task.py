"""The input of a trainer: the task, and the length of its training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dlrm.distributed.placement import Piece
from dlrm.train.log import Loader
from dlrm.train.precision import LossScaler


class Task(Protocol):
    """A training task: a network, its loss and its evaluation.

    Attributes:
        model: the network.
        metric: the entry of `evaluate` that selects the best checkpoint; greater is better, unless
            it is the loss.
        loss_metric: the entry that is the test loss.
    """

    metric: str
    loss_metric: str

    @property
    def model(self) -> nn.Module: ...

    def loss(self, batch: Any) -> Tensor:
        """Returns the sum of the process's losses over the size of the global batch, a scalar."""
        ...

    def split(self, batch: Any, parts: int) -> Sequence[Any]:
        """Splits a batch into up to `parts` micro-batches, the same number on every rank."""
        ...

    def num_samples(self, batch: Any) -> int:
        """Returns the samples of a batch on all ranks."""
        ...

    def evaluate(self, loader: Loader) -> dict[str, float]:
        """Returns the metrics of a data set, the same on every rank.

        It runs the network in evaluation mode (`dlrm.train.evaluation.evaluation_mode`).
        """
        ...

    def table_parameters(self) -> Sequence[tuple[nn.Parameter, Mapping[int, Piece]]]:
        """Returns the parameters that hold tables, with their contents; see `Parameters`."""
        ...


# Micro-batches, the loss's scaler, what to call before the last gradients arrive -> the loss.
Accumulate = Callable[[Sequence[Any], LossScaler, Callable[[], object]], Tensor]


def one_after_another(
    loss: Callable[[Any], Tensor],
    batches: Sequence[Any],
    scaler: LossScaler,
    before_last: Callable[[], object],
) -> Tensor:
    """Accumulates the gradients of micro-batches one by one; returns the sum of their losses.

    Args:
        loss: the loss of a micro-batch.
        batches: the micro-batches of a batch.
        scaler: scaler of the loss.
        before_last: called before the last backward pass, which completes the gradients.
    """

    def gradients(batch: Any) -> Tensor:
        value = loss(batch)
        scaler.backward(value)
        return value.detach()

    return sum_of_losses(gradients, batches, before_last)


def sum_of_losses(
    gradients: Callable[[Any], Tensor],
    batches: Sequence[Any],
    before_last: Callable[[], object],
) -> Tensor:
    """Does the same with a function that adds the gradients of a micro-batch.

    Args:
        gradients: adds the gradients of a micro-batch, and returns its loss without a graph.
        batches, before_last: see `one_after_another`.
    """
    losses = []
    for batch in batches:
        if batch is batches[-1]:
            before_last()
        losses.append(gradients(batch))
    return torch.stack(losses).sum() if len(losses) > 1 else losses[0]


@dataclass(frozen=True)
class TrainConfig:
    """Length and reports of a training; field names are those of the command line's flags.

    Attributes:
        epochs: passes over the training set.
        max_steps: stop after exactly this many optimization steps.
        print_freq: steps between printed lines.
        test_freq: steps between evaluations; None: after every epoch.
        test_after: no evaluation before this many epochs.
        checkpoint_freq: steps between checkpoints; None: only the best and the last.
        auc_threshold: stop when the metric reaches this value in an evaluation.
        plateau_patience: multiply the learning rate by `plateau_factor` after this many evaluations
            without a new best; None never does.
        plateau_factor: see `plateau_patience`.
        early_stop: stop after this many evaluations without a new best; None never does.
        benchmark_warmup_steps: first steps that the throughput does not count.
        gradient_accumulation_steps: number of micro-batches that a process splits its batch into
            and processes in turn: less memory, the same gradients.
        verdict: report with each printed line the time of each part of the steps, and what bounds
            them.

    Raises:
        ValueError: a value is impossible; the message names flag and value.
    """

    epochs: int = 1
    max_steps: int | None = None
    print_freq: int = 200
    test_freq: int | None = None
    test_after: float = 0.0
    checkpoint_freq: int | None = None
    auc_threshold: float | None = None
    plateau_patience: int | None = None
    plateau_factor: float = 0.1
    early_stop: int | None = None
    benchmark_warmup_steps: int = 0
    gradient_accumulation_steps: int = 1
    verdict: bool = True

    def __post_init__(self) -> None:
        at_least_one = ["epochs", "max_steps", "print_freq", "test_freq", "checkpoint_freq"]
        at_least_one += ["gradient_accumulation_steps", "plateau_patience", "early_stop"]
        for flag in at_least_one:
            value = getattr(self, flag)
            if value is not None and value < 1:
                raise ValueError(f"--{flag} {value}: expected 1 or more")
        for flag in ("test_after", "benchmark_warmup_steps"):
            if not getattr(self, flag) >= 0:
                raise ValueError(f"--{flag} {getattr(self, flag)}: expected 0 or more")
        if self.auc_threshold is not None and not 0 < self.auc_threshold <= 1:
            raise ValueError(
                f"--auc_threshold {self.auc_threshold}: expected more than 0, at most 1"
            )
        if not 0 < self.plateau_factor < 1:
            raise ValueError(
                f"--plateau_factor {self.plateau_factor}: expected a number between 0 and 1"
            )

    def num_steps(self, steps_per_epoch: int) -> int:
        """Returns the steps of the whole run."""
        steps = self.epochs * steps_per_epoch
        return steps if self.max_steps is None else min(steps, self.max_steps)
