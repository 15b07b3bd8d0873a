"""Base of tasks of networks without tables: one network of named stages, one optimizer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dlrm.distributed import World
from dlrm.distributed.pipeline import Pipeline
from dlrm.train.config import ExecutionConfig, PrecisionConfig
from dlrm.train.evaluation import evaluation_mode
from dlrm.train.execution import keep_only, partition, recompute
from dlrm.train.log import Loader
from dlrm.train.optim.config import NetworkOptimizerConfig
from dlrm.train.optim.dense import network_optimizer
from dlrm.train.precision import LossScaler, autocast, loss_scaler
from dlrm.train.task import Task

Judge = Callable[[Any], Tensor]  # output of the network -> loss


class NetworkTask(Task):
    """A network on its device, with its precision and execution; subclasses define the loss.

    Args:
        model: the network; `model.stages()` names the stages that it runs in sequence, and
            `model.run` runs some of them.
        world: the processes that each compute a share of a batch.

    Attributes:
        num_parameters: number of parameters of the whole network.
        pipeline: this process's part of the network, once it is divided; None: it runs all of it.
    """

    loss_metric = "loss"

    def __init__(
        self,
        model: nn.Module,
        precision: PrecisionConfig = PrecisionConfig(),
        execution: ExecutionConfig = ExecutionConfig(),
        world: World = World(),
    ):
        self.world, self.precision = world, precision
        self.model = model.to(world.device)
        if execution.recompute:
            recompute(self.stages())
        self._is_graph = execution.execution == "graph"
        self._forward = torch.compile(self.model) if self._is_graph else self.model
        self.num_parameters = sum(p.numel() for p in self.model.parameters())
        self.pipeline: Pipeline | None = None

    def stages(self) -> Mapping[str, nn.Module]:
        """Returns name -> module for the stages that the network runs in sequence."""
        return self.model.stages()  # type: ignore[operator]

    def divide(self, parts: World, splits: Sequence[str], schedule: str) -> None:
        """Divides the network among the processes of a pipeline and keeps this one's part only.

        Args:
            parts: the processes of the pipeline, one for each part.
            splits: the stages that begin a part; see `partition`.
            schedule: one of `dlrm.distributed.pipeline.Pipeline`.

        Raises:
            ValueError: the network cannot be divided like this; flag and value are named.
        """
        if self._is_graph:
            raise ValueError(
                "--execution graph compiles a whole network, which --pipeline_splits divides among "
                f"{parts.size} processes: use --execution eager, or as many processes as --replicas"
            )
        found = partition(self.stages(), splits)
        assert len(found) == parts.size, f"{len(found)} parts for {parts.size} processes"
        for part in found:
            if not any(p.requires_grad for stage in part.values() for p in stage.parameters()):
                raise ValueError(
                    f"--pipeline_splits {','.join(splits)}: the part of {', '.join(part)} has no "
                    "weights, which a process of a pipeline needs; leave its name out"
                )
        stages, is_end = found[parts.rank], parts.rank in (0, parts.size - 1)
        shared = self._shared_weights() if is_end else []
        keep_only(self.model, stages.values(), shared)
        pipeline = Pipeline(partial(self._run_part, stages), parts, schedule, shared)
        self._forward = lambda *inputs: pipeline.output(lambda is_first: inputs)
        self.pipeline = pipeline

    def loss(self, batch: Any) -> Tensor:
        """Returns these samples' share of the loss of the global batch, a scalar."""
        inputs, judge = self._problem(batch)
        return judge(self._run(*inputs))

    def accumulate(
        self, batches: Sequence[Any], scaler: LossScaler, before_last: Callable[[], object]
    ) -> Tensor:
        """Adds gradients, see `Task`; in a pipeline the loss is 0 on all ranks but the last."""
        if self.pipeline is None:
            return super().accumulate(batches, scaler, before_last)
        losses = [torch.zeros((), device=self.world.device)]

        def judge(output: Any, number: int) -> Tensor:
            _, loss_of = self._problem(batches[number])
            loss = loss_of(output)
            losses.append(loss.detach())
            return scaler.scaled(loss)

        inputs = [partial(self._inputs, batch) for batch in batches]
        with evaluation_mode(self.model):
            self.pipeline.prepare(inputs)
        self.pipeline.backward(inputs, judge)
        before_last()  # the sums over replicas begin when all gradients are complete
        return torch.stack(losses).sum()

    def scaler(self, max_grad_norm: float | None = None) -> LossScaler:
        """Returns the loss scaler, which clips by the norm of the gradients of all parts."""
        if self.pipeline is None:
            return loss_scaler(self.precision, self.world.device, max_grad_norm)
        parts = self.pipeline.parts
        counted_elsewhere = self.pipeline.shared if parts.rank == parts.size - 1 else ()
        return loss_scaler(
            self.precision, self.world.device, max_grad_norm, parts, counted_elsewhere
        )

    def num_samples(self, batch: Any) -> int:
        """Returns the samples of a batch in all processes."""
        return batch.global_size

    def optimizers(self, config: NetworkOptimizerConfig) -> list[torch.optim.Optimizer]:
        """Returns the network's optimizer."""
        return [network_optimizer(config, self.model)]

    @contextmanager
    def _tested(self, loader: Loader) -> Iterator[Iterator[Any]]:
        """Yields the batches of a test, with the network in evaluation mode."""
        with evaluation_mode(self.model), closing(loader.batches()) as batches:
            yield batches

    def _problem(self, batch: Any) -> tuple[tuple[Tensor | None, ...], Judge]:
        """Returns the network's inputs in training, and a function from its output to the loss."""
        raise NotImplementedError

    def _inputs(self, batch: Any, is_first: bool = True) -> tuple[Tensor | None, ...]:
        """Returns a part's training inputs from a batch, without the previous part's output."""
        return self._problem(batch)[0] if is_first else ()

    def _shared_weights(self) -> list[nn.Parameter]:
        """Returns the weights that the first stage holds and the last one uses as well."""
        return []

    def _run_part(
        self,
        stages: Mapping[str, nn.Module],
        hidden: Tensor | None,
        inputs: Callable[[bool], tuple[Tensor | None, ...]],
    ) -> Any:
        with autocast(self.precision, self.world.device):
            return self.model.run(stages, hidden, *inputs(hidden is None))  # type: ignore[operator]

    def _run(self, *inputs: Tensor | None) -> Any:
        """Returns the network's output in its precision."""
        with autocast(self.precision, self.world.device):
            return self._forward(*inputs)
