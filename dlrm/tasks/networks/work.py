"""Runs of image and language networks: their common part."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from dlrm.distributed import Pipelines, World, agreed, all_sum, pipelines
from dlrm.distributed.pipeline import bubble_fraction
from dlrm.flags import ConfigFlags, Values
from dlrm.metrics.latency import Latency
from dlrm.tasks.config import USER_ERRORS
from dlrm.tasks.networks.checkpoints import average_checkpoints
from dlrm.tasks.networks.flags import BatchDivision, divide_batch, pipeline_parts
from dlrm.tasks.networks.task import NetworkTask
from dlrm.tasks.run import VARIES, Run, Work
from dlrm.tasks.start import started
from dlrm.train.config import TrainConfig
from dlrm.train.ema import EMA
from dlrm.train.execution import partition
from dlrm.train.log import Loader
from dlrm.train.optim.config import NetworkOptimizerConfig
from dlrm.train.schedule import CurveConfig
from dlrm.train.trainer import Trainer

WorkT = TypeVar("WorkT", bound="NetworkWork")


@dataclass(kw_only=True)
class NetworkWork(Work):
    """An image or language network with its data; see `Work`.

    Attributes:
        division: replicas and micro-batches of the global batch.
        pipelines: division of the network's parts among the processes.
    """

    division: BatchDivision
    pipelines: Pipelines

    @classmethod
    def divided(
        cls: type[WorkT],
        flags: ConfigFlags,
        values: Values,
        pipelines: Pipelines,
        task: NetworkTask,
        training_modes: Sequence[str],
        **others: Any,
    ) -> WorkT:
        """Returns the work of a process, which holds its part of the network.

        Args:
            flags: the command line of the network.
            others: further fields.
        """
        division = divide_batch(values, pipelines.replicas.size)
        divide(task, values, pipelines, division)
        return cls(
            values=values,
            world=pipelines.world,
            pipelines=pipelines,
            task=task,
            trains=values["mode"] in training_modes,
            may_change=flags.resumable,
            division=division,
            **others,
        )

    def recorded(self) -> dict[str, Any]:
        return super().recorded() | {"global_batch": self.division.global_batch}

    def frozen(self, run: dict[str, Any]) -> dict[str, Any]:
        same_batch = {"the global batch (see --replicas)": run.get("global_batch")}
        return super().frozen(run) | same_batch

    def lines(self) -> Iterator[str]:
        """Yields lines about the division of the batch and of the network."""
        if self.division.note:
            yield self.division.note
        values, schedule = self.values, self.values["pipeline_schedule"]
        if not values["pipeline_splits"]:
            return
        parts = partition(self.task.stages(), values["pipeline_splits"])
        names = [f"{next(iter(part))} ({len(part)} stages)" for part in parts]
        if self.pipelines.parts.size == 1:
            yield (
                f"note: --pipeline_splits: {len(parts)} parts, which each process runs one after "
                f"the other with the same results (--pipeline_schedule {schedule}): "
                f"{', '.join(names)}"
            )
            return
        size, count = self.world.size, self.division.accumulation
        ranks = [",".join(map(str, range(p, size, len(parts)))) for p in range(len(parts))]
        where = ", ".join(f"{name} on rank {of}" for name, of in zip(names, ranks, strict=True))
        yield (
            f"pipelines: {self.pipelines.replicas.size} of {len(parts)} processes: {where}; "
            f"--pipeline_schedule {schedule} with {count} micro-batches: bubble fraction "
            f"{bubble_fraction(schedule, len(parts), count):.4f}"
        )

    def device_line(self, model: str) -> str:
        """Returns a line about the run: device, network, precision and batch."""
        task, world, division = self.task, self.world, self.division
        half = str(task.precision.dtype(world.device)).removeprefix("torch.")
        threads = f" ({torch.get_num_threads()} threads)" if world.device == "cpu" else ""
        return (
            f"device: {world.device}{threads}  processes: {world.size}  model: {model} "
            f"({task.num_parameters:,} parameters)  products: {half}  batch: "
            f"{self.values['batch_size']} x {division.accumulation} x "
            f"{self.pipelines.replicas.size} = {division.global_batch}"
        )

    def train_config(self, steps_per_epoch: int) -> TrainConfig:
        """Returns the length of training, with micro-batches and `--ckpts_per_epoch`."""
        values = self.values
        config = values.config(TrainConfig, gradient_accumulation_steps=self.division.accumulation)
        if values["ckpts_per_epoch"]:
            freq = max(1, round(steps_per_epoch / values["ckpts_per_epoch"]))
            config = replace(config, checkpoint_freq=freq)
        return config

    def curve_steps(self, config: TrainConfig, steps_per_epoch: int) -> int:
        """Returns the steps of the learning rate's curve."""
        return config.epochs * steps_per_epoch

    def trainer_arguments(self, train: Loader) -> dict[str, Any]:
        values, decay = self.values, self.values["ema_decay"]
        config = self.train_config(len(train))
        optimizer = values.config(NetworkOptimizerConfig)
        limits = [values["max_grad_norm"]]
        if self.pipelines.parts.size > 1:  # an optimizer has only the gradients of its part
            limits.append(optimizer.max_grad_norm)
        num_steps = self.curve_steps(config, len(train))
        return {
            "optimizers": self.task.optimizers(optimizer),
            "scaler": self.task.scaler(min((n for n in limits if n is not None), default=None)),
            "schedule": values.config(CurveConfig).rates(num_steps, len(train)),
            "config": config,
            "ema": None if decay is None else EMA(self.task.model, decay),
        }

    def ready(self, run: Run, trainer: Trainer, train: Loader) -> None:
        values, steps = self.values, trainer.config.num_steps(len(train))
        run.log.line(
            f"training: {steps} steps, {len(train)} an epoch, with {values['optimizer']}, "
            f"lr {values['lr']:.4g} {values['lr_schedule']}, weight decay "
            f"{values['weight_decay']:.3g}"
        )
        if self.world.device.startswith("cuda") and not values["deterministic"]:
            run.log.line(VARIES)

    def finish(
        self, run: Run, trainer: Trainer, loaders: Sequence[Any], summary: dict[str, Any]
    ) -> dict[str, Any]:
        decay = self.values["weight_avg_exp"]
        if run.checkpoints and decay is not None:
            summary |= average_checkpoints(trainer, loaders[1], decay)
        return summary


class NetworkConfig(NamedTuple):
    """The settled settings of a network's run; `open` makes the work from them."""

    values: Values
    pipelines: Pipelines
    open: Callable[[Values, Pipelines], NetworkWork]

    def assemble(self, world: World) -> NetworkWork:
        """Opens the data and makes the network, on all ranks in step."""
        with agreed(world, *USER_ERRORS):
            work = self.open(self.values, self.pipelines)
        torch.manual_seed(work.values["seed"] + world.rank)  # of dropout, which ranks draw anew
        return work


def run_mode(
    values: Values,
    uris: Mapping[str, str],
    training_modes: Sequence[str],
    open_work: Callable[[Values, Pipelines], NetworkWork],
    modes: Mapping[str, Callable[[Run], dict[str, float]]],
) -> dict[str, float]:
    """Runs the mode of the flags and returns the summary, on every rank.

    Args:
        open_work: see `NetworkConfig`.
        modes: functions of modes other than those of trainings.

    Raises:
        ValueError, OSError, FloatingPointError: the user's error; the message names it.
        StoppedError: the training was stopped by a signal.
    """
    trains = values["mode"] in training_modes
    with started(values, uris, trains) as (values, world, mirror):
        with agreed(world, *USER_ERRORS):
            parts = pipeline_parts(values, world.size, training_modes)
        config = NetworkConfig(values, pipelines(world, parts), open_work)
        with Run.open(config, world, mirror) as run:
            summary = run.train() if trains else modes[values["mode"]](run)
            run.log.summary(summary)
    return summary


def divide(task: NetworkTask, values: Values, divided: Pipelines, division: BatchDivision) -> None:
    """Reduces a network to the part of this process, if the processes form pipelines."""
    parts, schedule = divided.parts.size, values["pipeline_schedule"]
    if schedule == "1f1b" and division.accumulation < parts:
        raise ValueError(
            f"--pipeline_schedule 1f1b: expected {parts} micro-batches or more for {parts} parts, "
            f"got {division.accumulation}; raise --gradient_accumulation_steps, or use gpipe"
        )
    task.pipelines = divided
    if parts > 1:
        task.divide(divided.parts, values["pipeline_splits"], schedule)


class SameBatch:
    """A loader that repeats the first batch of another from the device, without any input.

    Args:
        loader: loader of the first batch, with the same number of batches; it has `epoch`.
    """

    def __init__(self, loader: Any, device: str):
        self._length, self.num_samples = len(loader), loader.num_samples
        self._batch = loader.epoch(0).batch(0).map(lambda tensor: tensor.to(device))

    def __len__(self) -> int:
        return self._length

    def batches(self, epoch: int = 0, start: int = 0) -> Generator[Any, None, None]:
        """Yields the batch."""
        for _ in range(start, len(self)):
            yield self._batch


class EmptyLoader:
    """A test set without samples."""

    num_samples = 0

    def __len__(self) -> int:
        return 0

    def batches(self, epoch: int = 0, start: int = 0) -> Generator[Any, None, None]:
        yield from ()


@torch.inference_mode()
def time_inference(
    run: Run, loader: Loader, unit: str, with_reading: bool = False
) -> dict[str, float]:
    """Times passes over a dataset; returns mean throughput over processes, and latencies.

    A sample's latency is that of its batch, from receiving the batch to having its result.

    Args:
        unit: name of a sample, in the plural.
        with_reading: whether latencies include reading.
    """
    world, task, repeat = run.world, run.work.task, run.values["repeat"]
    task.model.eval()
    rates: list[float] = []
    seconds: list[float] = []
    for index in range(repeat):
        began, samples, batches = time.perf_counter(), 0.0, []
        asked = began
        with closing(loader.batches()) as read:
            for batch in read:
                start = asked if with_reading else time.perf_counter()
                task.predict(batch)
                if world.device.startswith("cuda"):
                    torch.cuda.synchronize()
                asked = time.perf_counter()
                batches.append(asked - start)
                samples += task.num_samples(batch) / world.size
        rate = all_sum(torch.tensor(samples / (time.perf_counter() - began)), world).item()
        run.log.line(f"pass {index + 1}/{repeat}: {rate:.2f} {unit}/s")
        if index:
            rates.append(rate)
            seconds += batches
    latency = Latency.of(seconds)._asdict().items()
    return {
        "mean_inference_throughput": float(np.mean(rates)),
        **{f"{name}_inference_latency": value for name, value in latency},
    }
