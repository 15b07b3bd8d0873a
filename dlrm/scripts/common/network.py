"""Runs of image and language networks: their common part."""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from dlrm.distributed import Pipelines, World, agreed, all_sum, pipelines
from dlrm.distributed.pipeline import bubble_fraction
from dlrm.metrics.latency import Latency
from dlrm.scripts.common import run, session
from dlrm.scripts.common.all_checkpoints import average_checkpoints
from dlrm.scripts.common.config_flags import Values
from dlrm.scripts.common.network_flags import BatchPlan, pipeline_parts
from dlrm.scripts.common.run import Setup, Watch
from dlrm.tasks.network import NetworkTask
from dlrm.train.ema import EMA
from dlrm.train.execution import partition
from dlrm.train.log import Loader, RunLog
from dlrm.train.optim.network import NetworkOptimizerConfig
from dlrm.train.schedule import CurveConfig, learning_rate_curve
from dlrm.train.task import TrainConfig
from dlrm.train.trainer import Trainer


@dataclass(kw_only=True)
class NetworkSetup(Setup):
    """The inputs of all modes of a network's command; see `Setup`.

    Attributes:
        plan: division of the global batch.
        pipelines: division of the network's parts among the processes.
    """

    plan: BatchPlan
    pipelines: Pipelines

    def recorded(self) -> dict[str, Any]:
        return super().recorded() | {"global_batch": self.plan.global_batch}

    def frozen(self, run: dict[str, Any]) -> dict[str, Any]:
        same_batch = {"the global batch (see --replicas)": run.get("global_batch")}
        return super().frozen(run) | same_batch


AnySetup = TypeVar("AnySetup", bound=NetworkSetup)


def run_network(
    values: Values,
    training_modes: Sequence[str],
    set_up: Callable[[Values, Pipelines], AnySetup],
    notices: Callable[[AnySetup], Iterable[str]],
    act: Callable[[AnySetup, Watch], dict[str, float]],
) -> dict[str, float]:
    """Runs the mode of the flags and returns the summary; see `run.run`.

    Args:
        values: the flags.
        training_modes: modes in which processes may form pipelines.
        set_up: opens the data and makes the network; may raise the user's errors on any rank.
        notices: lines about the run.
        act: carries out the mode.
    """

    def agreed_set_up(values: Values, world: World, _: ExitStack) -> AnySetup:
        with agreed(world, *session.USER_ERRORS):
            parts = pipeline_parts(values, world.size, training_modes)
        divided = pipelines(world, parts, values["rank_timeout"])
        with agreed(world, *session.USER_ERRORS):
            setup = set_up(values, divided)
        # Ranks drop out different activations.
        torch.manual_seed(setup.values["seed"] + world.rank)
        return setup

    return run.run(values, agreed_set_up, notices, act)


def divide(task: NetworkTask, values: Values, divided: Pipelines, plan: BatchPlan) -> None:
    """Reduces a network to the part of this process, if the processes form pipelines.

    Raises:
        ValueError: network, flags and number of processes contradict each other.
    """
    parts, schedule = divided.parts.size, values["pipeline_schedule"]
    if parts == 1:
        return
    if schedule == "1f1b" and plan.accumulation < parts:
        raise ValueError(
            f"--pipeline_schedule 1f1b: expected {parts} micro-batches or more for {parts} parts, "
            f"got {plan.accumulation}; raise --gradient_accumulation_steps, or use gpipe"
        )
    task.divide(divided.parts, values["pipeline_splits"], schedule)


def device_line(setup: NetworkSetup, model: str) -> str:
    """Returns a line about the run: device, network, precision and batch."""
    task, world, plan = setup.task, setup.world, setup.plan
    half = str(task.precision.dtype(world.device)).removeprefix("torch.")
    threads = f" ({torch.get_num_threads()} threads)" if world.device == "cpu" else ""
    return (
        f"device: {world.device}{threads}  processes: {world.size}  model: {model} "
        f"({task.num_parameters:,} parameters)  products: {half}  batch: "
        f"{setup.values['batch_size']} x {plan.accumulation} x {setup.pipelines.replicas.size} = "
        f"{plan.global_batch}"
    )


def common_notices(setup: NetworkSetup) -> Iterator[str]:
    """Returns lines about differences from what the flags suggest."""
    values, task = setup.values, setup.task
    if setup.plan.note:
        yield setup.plan.note
    if values["precision"] in ("16.16", "16.32") and values["half_dtype"] is None:
        half = task.precision.dtype(setup.world.device)
        yield (
            f"note: --precision {values['precision']}: its 16 bits are {half}; --half_dtype chooses"
        )
    if values["pipeline_splits"]:
        yield _pipeline_notice(setup)


def _pipeline_notice(setup: NetworkSetup) -> str:
    """Returns a line about the parts of the network and their processes."""
    values, world = setup.values, setup.world
    schedule, count = values["pipeline_schedule"], setup.plan.accumulation
    parts = partition(setup.task.stages(), values["pipeline_splits"])
    names = [f"{next(iter(part))} ({len(part)} stages)" for part in parts]
    if setup.pipelines.parts.size == 1:
        return (
            f"note: --pipeline_splits: {len(parts)} parts, which each process runs one after the "
            f"other with the same results (--pipeline_schedule {schedule}): {', '.join(names)}"
        )
    ranks = [",".join(map(str, range(p, world.size, len(parts)))) for p in range(len(parts))]
    where = ", ".join(f"{name} on rank {of}" for name, of in zip(names, ranks, strict=True))
    return (
        f"pipelines: {setup.pipelines.replicas.size} of {len(parts)} processes: {where}; "
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


def train_config(setup: NetworkSetup, steps_per_epoch: int) -> TrainConfig:
    """Returns the length of training, with the plan's micro-batches and `--ckpts_per_epoch`."""
    values = setup.values
    config = values.config(TrainConfig, gradient_accumulation_steps=setup.plan.accumulation)
    if values["ckpts_per_epoch"]:
        freq = max(1, round(steps_per_epoch / values["ckpts_per_epoch"]))
        config = replace(config, checkpoint_freq=freq)
    return config


def train(
    setup: NetworkSetup,
    watch: Watch,
    batches: Loader,
    test: Loader,
    config: TrainConfig,
    num_steps: int,
    begin: Callable[[Trainer], object],
) -> dict[str, float]:
    """Trains, or resumes training, and returns the summary.

    Args:
        setup: flags and network.
        watch: log, watchdog and checkpoints.
        batches: the training set.
        test: the set to evaluate during training; may be empty.
        config: length and reports of the training.
        num_steps: steps of the learning rate's curve.
        begin: called before the first step of a new run.
    """
    values, decay = setup.values, setup.values["ema_decay"]
    optimizer = values.config(NetworkOptimizerConfig)
    limits = [values["max_grad_norm"]]
    if setup.pipelines.parts.size > 1:  # an optimizer has only the gradients of its part
        limits.append(optimizer.max_grad_norm)
    trainer = run.make_trainer(
        setup,
        watch,
        optimizers=setup.task.optimizers(optimizer),
        scaler=setup.task.scaler(min((n for n in limits if n is not None), default=None)),
        pipelines=setup.pipelines,
        accumulate=setup.task.accumulate,
        schedule=learning_rate_curve(values.config(CurveConfig), num_steps, len(batches)),
        config=config,
        ema=None if decay is None else EMA(setup.task.model, decay),
    )
    told = [
        f"training: {config.num_steps(len(batches))} steps, {len(batches)} an epoch, with "
        f"{values['optimizer']}, lr {values['lr']:.4g} {values['lr_schedule']}, weight decay "
        f"{values['weight_decay']:.3g}"
    ]
    if setup.world.device.startswith("cuda") and not values["deterministic"]:
        told.append(session.VARIES)
    summary = run.train(setup, watch, trainer, begin, batches, test, told=told)
    if watch.checkpoints and values["weight_avg_exp"] is not None:
        summary |= average_checkpoints(trainer, test, values["weight_avg_exp"])
    return summary


@torch.inference_mode()
def time_inference(
    setup: NetworkSetup, log: RunLog, loader: Loader, unit: str, with_reading: bool = False
) -> dict[str, float]:
    """Times passes over a dataset; returns mean throughput over processes, and latencies.

    A sample's latency is that of its batch, from receiving the batch to having its result.

    Args:
        setup: flags and network.
        log: destination of reports.
        loader: the batches.
        unit: name of a sample, in the plural.
        with_reading: whether latencies include reading.
    """
    world, task, repeat = setup.world, setup.task, setup.values["repeat"]
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
