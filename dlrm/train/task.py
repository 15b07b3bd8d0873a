"""The input of a trainer: the task."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dlrm.distributed import Pipelines
from dlrm.distributed.placement import Shard
from dlrm.train.cuda_graph import CudaRecorder
from dlrm.train.log import Loader
from dlrm.train.precision import LossScaler


class Task:
    """A training task: a network, its loss and its evaluation.

    Attributes:
        model: the network.
        metric: the entry of `evaluate` that selects the best checkpoint, by its direction in
            `dlrm.metrics.table`.
        loss_metric: the entry that is the test loss.
        recorder: records the step and replays it from then on; None runs it op by op. With a
            recorder, optimizers have their learning rates on the device.
        pipelines: division of the network among the processes; None: each has the whole network.
    """

    model: nn.Module
    metric: str
    loss_metric: str
    recorder: CudaRecorder | None = None
    pipelines: Pipelines | None = None

    def loss(self, batch: Any) -> Tensor:
        """Returns the sum of the process's losses over the size of the global batch, a scalar."""
        raise NotImplementedError

    def split(self, batch: Any, parts: int) -> Sequence[Any]:
        """Splits a batch into up to `parts` micro-batches, the same number on every rank."""
        return batch.split(parts)

    def num_samples(self, batch: Any) -> int:
        """Returns the samples of a batch on all ranks."""
        raise NotImplementedError

    def evaluate(self, loader: Loader) -> dict[str, float]:
        """Returns the metrics of a data set, the same on every rank.

        It runs the network in evaluation mode (`dlrm.train.evaluation.evaluation_mode`).
        """
        raise NotImplementedError

    def table_parameters(self) -> Sequence[tuple[nn.Parameter, Mapping[int, Shard]]]:
        """Returns the parameters that hold tables, with their contents; see `Parameters`."""
        return ()

    def accumulate(
        self, batches: Sequence[Any], scaler: LossScaler, before_last: Callable[[], object]
    ) -> Tensor:
        """Adds the gradients of micro-batches; returns the sum of their losses, without a graph.

        Args:
            before_last: called before the last micro-batch, which completes the gradients.
        """
        losses, gradients = [], self.gradients_of(batches[0], scaler)
        for batch in batches:
            if batch is batches[-1]:
                before_last()
            losses.append(gradients(batch))
        return torch.stack(losses).sum() if len(losses) > 1 else losses[0]

    def gradients_of(self, first: Any, scaler: LossScaler) -> Callable[[Any], Tensor]:
        """Returns a function that adds a micro-batch's gradients, and returns its loss.

        Args:
            first: the first micro-batch of a step.
        """

        def gradients(batch: Any) -> Tensor:
            loss = self.loss(batch)
            scaler.backward(loss)
            return loss.detach()

        return gradients
