"""What tasks of networks without tables share: one network of named stages, one optimizer."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dlrm.distributed import World
from dlrm.train.evaluation import evaluation_mode
from dlrm.train.execution import ExecutionConfig, executable, recompute
from dlrm.train.log import Loader
from dlrm.train.optim.network import NetworkOptimizerConfig, network_optimizer
from dlrm.train.precision import PrecisionConfig


class NetworkTask:
    """A network on its device, in its precision, as it is executed; subclasses know the loss.

    Args:
        model: the network; `model.stages()` names what it runs one after the other.
        precision: of weights and layers.
        execution: how the network is run.
        world: the processes that train together.
    """

    loss_metric = "loss"

    def __init__(
        self,
        model: nn.Module,
        precision: PrecisionConfig,
        execution: ExecutionConfig,
        world: World,
    ):
        self.world, self.precision = world, precision
        self.model = model.to(world.device)
        precision.cast_weights(self.model, world.device)
        if execution.recompute:
            recompute(self.stages())
        self._forward = executable(self.model, execution)

    def stages(self) -> Mapping[str, nn.Module]:
        """Name -> module of what the network runs one after the other."""
        return self.model.stages()  # type: ignore[operator]

    def split(self, batch: Any, parts: int) -> list[Any]:
        return batch.split(parts)

    def num_samples(self, batch: Any) -> int:
        """Returns the samples of a batch in all processes."""
        return batch.global_size

    def table_parameters(self) -> Sequence[tuple[nn.Parameter, Mapping[int, int]]]:
        return ()

    def optimizers(self, config: NetworkOptimizerConfig) -> list[torch.optim.Optimizer]:
        """Returns the network's optimizer."""
        return [network_optimizer(config, self.model)]

    @contextmanager
    def _tested(self, loader: Loader) -> Iterator[Iterator[Any]]:
        """Yields the batches of a test to a network in evaluation mode."""
        with evaluation_mode(self.model), closing(loader.batches()) as batches:
            yield batches

    def _run(self, *inputs: Tensor | None) -> Any:
        """The network's output in its precision."""
        with self.precision.autocast(self.world.device):
            return self._forward(*inputs)
