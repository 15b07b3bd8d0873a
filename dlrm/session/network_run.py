"""Runs of image and language networks: their common part."""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from dlrm.distributed import Pipelines, all_sum, pipelines
from dlrm.distributed.pipeline import bubble_fraction
from dlrm.flags import Values
from dlrm.metrics.latency import Latency
from dlrm.session.all_checkpoints import average_checkpoints
from dlrm.session.network_flags import BatchDivision, pipeline_parts
from dlrm.session.session import VARIES, Session
from dlrm.tasks.network_task import NetworkTask
from dlrm.tasks.run import Run
from dlrm.train.config import TrainConfig
from dlrm.train.ema import EMA
from dlrm.train.execution import partition
from dlrm.train.log import Loader, RunLog
from dlrm.train.optim.network_optimizers import NetworkOptimizerConfig
from dlrm.train.schedule import CurveConfig, learning_rate_curve
from dlrm.train.trainer import Trainer


@dataclass(kw_only=True)
class NetworkRun(Run):
    """The inputs of all modes of a network's command; see `Run`.

    Attributes:
        division: replicas and micro-batches of the global batch.
        pipelines: division of the network's parts among the processes.
    """

    division: BatchDivision
    pipelines: Pipelines

    def recorded(self) -> dict[str, Any]:
        return super().recorded() | {"global_batch": self.division.global_batch}

    def frozen(self, run: dict[str, Any]) -> dict[str, Any]:
        same_batch = {"the global batch (see --replicas)": run.get("global_batch")}
        return super().frozen(run) | same_batch


Opened = TypeVar("Opened", bound=NetworkRun)


def run_mode(
    values: Values,
    uris: Mapping[str, str],
    training_modes: Sequence[str],
    open_run: Callable[[Values, Pipelines], Opened],
    notices: Callable[[Opened], Iterable[str]],
    modes: Mapping[str, Callable[[Opened, Session], dict[str, float]]],
) -> dict[str, float]:
    """Runs the mode of the flags and returns the summary, on every rank.

    Raises:
        ValueError, OSError, FloatingPointError: the user's error; the message names it.
        StoppedError: the training was stopped by a signal.
    """
    with Session(values, uris=uris, trains=values["mode"] in training_modes) as session:
        values, world = session.values, session.world
        with session.agreed():
            parts = pipeline_parts(values, world.size, training_modes)
        divided = pipelines(world, parts)
        with session.agreed():
            run = open_run(values, divided)
        torch.manual_seed(run.values["seed"] + world.rank)  # of dropout, which ranks draw anew
        session.watch(run, notices(run))
        summary = modes[values["mode"]](run, session)
        session.log.summary(summary)
    return summary


def divide(task: NetworkTask, values: Values, divided: Pipelines, division: BatchDivision) -> None:
    """Reduces a network to the part of this process, if the processes form pipelines."""
    parts, schedule = divided.parts.size, values["pipeline_schedule"]
    if parts == 1:
        return
    if schedule == "1f1b" and division.accumulation < parts:
        raise ValueError(
            f"--pipeline_schedule 1f1b: expected {parts} micro-batches or more for {parts} parts, "
            f"got {division.accumulation}; raise --gradient_accumulation_steps, or use gpipe"
        )
    task.divide(divided.parts, values["pipeline_splits"], schedule)


def device_line(run: NetworkRun, model: str) -> str:
    """Returns a line about the run: device, network, precision and batch."""
    task, world, division = run.task, run.world, run.division
    half = str(task.precision.dtype(world.device)).removeprefix("torch.")
    threads = f" ({torch.get_num_threads()} threads)" if world.device == "cpu" else ""
    return (
        f"device: {world.device}{threads}  processes: {world.size}  model: {model} "
        f"({task.num_parameters:,} parameters)  products: {half}  batch: "
        f"{run.values['batch_size']} x {division.accumulation} x {run.pipelines.replicas.size} = "
        f"{division.global_batch}"
    )


def common_notices(run: NetworkRun) -> Iterator[str]:
    """Returns lines about differences from what the flags suggest."""
    if run.division.note:
        yield run.division.note
    if run.values["pipeline_splits"]:
        yield _pipeline_notice(run)


def _pipeline_notice(run: NetworkRun) -> str:
    """Returns a line about the parts of the network and their processes."""
    values, world = run.values, run.world
    schedule, count = values["pipeline_schedule"], run.division.accumulation
    parts = partition(run.task.stages(), values["pipeline_splits"])
    names = [f"{next(iter(part))} ({len(part)} stages)" for part in parts]
    if run.pipelines.parts.size == 1:
        return (
            f"note: --pipeline_splits: {len(parts)} parts, which each process runs one after the "
            f"other with the same results (--pipeline_schedule {schedule}): {', '.join(names)}"
        )
    ranks = [",".join(map(str, range(p, world.size, len(parts)))) for p in range(len(parts))]
    where = ", ".join(f"{name} on rank {of}" for name, of in zip(names, ranks, strict=True))
    return (
        f"pipelines: {run.pipelines.replicas.size} of {len(parts)} processes: {where}; "
        f"--pipeline_schedule {schedule} with {count} micro-batches: bubble fraction "
        f"{bubble_fraction(schedule, len(parts), count):.4f}"
    )


class EmptyLoader:
    """A test set without samples."""

    num_samples = 0

    def __len__(self) -> int:
        return 0

    def batches(self, epoch: int = 0, start: int = 0) -> Generator[Any, None, None]:
        yield from ()


def train_config(run: NetworkRun, steps_per_epoch: int) -> TrainConfig:
    """Returns the length of training, with the division's micro-batches and `--ckpts_per_epoch`."""
    values = run.values
    config = values.config(TrainConfig, gradient_accumulation_steps=run.division.accumulation)
    if values["ckpts_per_epoch"]:
        freq = max(1, round(steps_per_epoch / values["ckpts_per_epoch"]))
        config = replace(config, checkpoint_freq=freq)
    return config


def trainer(
    run: NetworkRun, session: Session, batches: Loader, config: TrainConfig, num_steps: int
) -> Trainer:
    """Returns the trainer of a network.

    Args:
        num_steps: steps of the learning rate's curve.
    """
    values, decay = run.values, run.values["ema_decay"]
    optimizer = values.config(NetworkOptimizerConfig)
    limits = [values["max_grad_norm"]]
    if run.pipelines.parts.size > 1:  # an optimizer has only the gradients of its part
        limits.append(optimizer.max_grad_norm)
    return Trainer(
        task=run.task,
        world=run.world,
        log=session.log,
        checkpoints=session.checkpoints,
        run=run.recorded(),
        after_step=session.after_step,
        optimizers=run.task.optimizers(optimizer),
        scaler=run.task.scaler(min((n for n in limits if n is not None), default=None)),
        pipelines=run.pipelines,
        accumulate=run.task.accumulate,
        schedule=learning_rate_curve(values.config(CurveConfig), num_steps, len(batches)),
        config=config,
        ema=None if decay is None else EMA(run.task.model, decay),
    )


def train(
    run: NetworkRun, session: Session, trainer: Trainer, batches: Loader, test: Loader
) -> dict[str, float]:
    """Trains a network that has its first weights, and returns the summary.

    Args:
        test: the set to evaluate during training; may be empty.
    """
    values = run.values
    session.log.line(
        f"training: {trainer.config.num_steps(len(batches))} steps, {len(batches)} an epoch, with "
        f"{values['optimizer']}, lr {values['lr']:.4g} {values['lr_schedule']}, weight decay "
        f"{values['weight_decay']:.3g}"
    )
    if run.world.device.startswith("cuda") and not values["deterministic"]:
        session.log.line(VARIES)
    summary = session.train(run, trainer, batches, test)
    if session.checkpoints and values["weight_avg_exp"] is not None:
        summary |= average_checkpoints(trainer, test, values["weight_avg_exp"])
    return summary


@torch.inference_mode()
def time_inference(
    run: NetworkRun, log: RunLog, loader: Loader, unit: str, with_reading: bool = False
) -> dict[str, float]:
    """Times passes over a dataset; returns mean throughput over processes, and latencies.

    A sample's latency is that of its batch, from receiving the batch to having its result.

    Args:
        unit: name of a sample, in the plural.
        with_reading: whether latencies include reading.
    """
    world, task, repeat = run.world, run.task, run.values["repeat"]
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
        log.line(f"pass {index + 1}/{repeat}: {rate:.2f} {unit}/s")
        if index:
            rates.append(rate)
            seconds += batches
    latency = Latency.of(seconds)._asdict().items()
    return {
        "mean_inference_throughput": float(np.mean(rates)),
        **{f"{name}_inference_latency": value for name, value in latency},
    }
