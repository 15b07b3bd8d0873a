"""The input of a trainer: the task, and the length of its training."""

from collections.abc import Callable, Mapping, Sequence
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
        metric: the entry of `evaluate` that selects the best checkpoint, by its direction in
            `dlrm.metrics.table`.
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
    gradients: Callable[[Any], Tensor],
    batches: Sequence[Any],
    before_last: Callable[[], object],
) -> Tensor:
    """Accumulates the gradients of micro-batches one by one; returns the sum of their losses.

    Args:
        gradients: adds the gradients of a micro-batch, and returns its loss without a graph.
        before_last: called before the last micro-batch, which completes the gradients.
    """
    losses = []
    for batch in batches:
        if batch is batches[-1]:
            before_last()
        losses.append(gradients(batch))
    return torch.stack(losses).sum() if len(losses) > 1 else losses[0]
