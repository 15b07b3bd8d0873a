"""A run of an image or language network, from its flags to its summary: what all of them share."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from dlrm import __version__
from dlrm.distributed import World, agreed, all_sum, check_same
from dlrm.scripts.common import session
from dlrm.scripts.common.all_checkpoints import average_checkpoints
from dlrm.scripts.common.config_flags import Values, show
from dlrm.scripts.common.network_flags import BatchPlan
from dlrm.train.checkpoints.checkpoint import Parameters, load_checkpoint, read_config
from dlrm.train.checkpoints.directory import CheckpointDirectory, last_checkpoint
from dlrm.train.ema import EMA
from dlrm.train.execution import partition
from dlrm.train.log import Loader, RunLog
from dlrm.train.optim.network import NetworkOptimizerConfig
from dlrm.train.schedule import CurveConfig, learning_rate_curve
from dlrm.train.task import TrainConfig
from dlrm.train.trainer import Trainer
from dlrm.train.watchdog import Watchdog


@dataclass
class Setup:
    """What all modes need.

    Attributes:
        values: the flags, with the recipe's and a checkpoint's architecture.
        world: the processes.
        plan: the batch.
        task: the network.
        checkpoint: whose weights are loaded, or None.
        dataset: what must be the same of it when a run goes on.
        may_change: flags that need not be.
    """

    values: Values
    world: World
    plan: BatchPlan
    task: Any
    checkpoint: Path | None
    dataset: dict[str, Any]
    may_change: frozenset[str] = field(default_factory=frozenset)


AnySetup = TypeVar("AnySetup", bound=Setup)


@dataclass
class Watch:
    """What goes along with a run.

    Attributes:
        log: where to report.
        dog: finds a rank that hangs.
        at_the_end: what is called when the run ends.
    """

    log: RunLog
    dog: Watchdog
    at_the_end: ExitStack


def main(
    arguments: list[str],
    parse: Callable[[list[str]], Values],
    help_text: Callable[[], str],
    act: Callable[[Values], object],
) -> None:
    """Acts on a command line and ends the process, or shows the help."""
    try:
        values = parse(arguments)
    except ValueError as error:
        sys.exit(f"error: {error}")
    if values["help"]:
        show(help_text())
    else:
        session.exit_with(lambda: act(values), values["save_checkpoint_path"])


def run(
    values: Values,
    set_up: Callable[[Values, World], AnySetup],
    notices: Callable[[AnySetup], Iterable[str]],
    act: Callable[[AnySetup, Watch], dict[str, float]],
) -> dict[str, float]:
    """Does what the flags say and returns the summary, on every rank.

    Args:
        values: the flags.
        set_up: makes what all modes need; may raise what the user can mend.
        notices: lines about what runs.
        act: does what the mode says.

    Raises:
        ValueError, OSError, FloatingPointError: what the user can mend.
        OtherRankError: another rank raises one of these.
        StoppedError: the training was stopped by a signal.
    """
    session.set_deterministic(values["deterministic"])
    world = session.join(
        values["base_device"], values["backend"], "backend" in values.given, values["rank_timeout"]
    )
    check_same({f"--{name}": value for name, value in values.items()}, world)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = values["tf32"]
    with agreed(world, *session.USER_ERRORS):
        setup = set_up(values, world)
    values = setup.values
    torch.manual_seed(values["seed"] + world.rank)  # ranks drop out different activations
    with RunLog(values["log_path"], quiet=world.rank > 0) as log:
        log.parameters(dict(values))
        for line in notices(setup):
            log.line(line)
        with Watchdog(world, values["rank_timeout"]) as dog, ExitStack() as at_the_end:
            summary = act(setup, Watch(log, dog, at_the_end))
        log.summary(summary)
    return summary


def known_checkpoint(values: Values, checkpoint: Path | None) -> Path | None:
    """Returns the last checkpoint of the run that goes on, if one does, else `checkpoint`."""
    path = values["save_checkpoint_path"]
    return (last_checkpoint(path) if values["resume"] and path else None) or checkpoint


def with_saved_flags(values: Values, checkpoint: Path | None, names: Iterable[str]) -> Values:
    """Takes flags that were not given from those a checkpoint was saved with, if there is one."""
    if checkpoint is None:
        return values
    saved = read_config(checkpoint)["flags"]
    return values.filled({name: saved[name] for name in names if name in saved})


def device_line(setup: Setup, model: str) -> str:
    """Says what runs where: device, network, precision and batch."""
    task, world, plan = setup.task, setup.world, setup.plan
    count = sum(p.numel() for p in task.model.parameters())
    half = str(task.precision.dtype(world.device)).removeprefix("torch.")
    threads = f" ({torch.get_num_threads()} threads)" if world.device == "cpu" else ""
    return (
        f"device: {world.device}{threads}  processes: {world.size}  model: {model} "
        f"({count:,} parameters)  products: {half}  batch: {setup.values['batch_size']} x "
        f"{plan.accumulation} x {world.size} = {plan.global_batch}"
    )


def common_notices(setup: Setup) -> Iterator[str]:
    """Lines about what is not as the flags might suggest."""
    values, task = setup.values, setup.task
    if setup.plan.note:
        yield setup.plan.note
    if values["precision"] in ("16.16", "16.32") and values["half_dtype"] is None:
        half = task.precision.dtype(setup.world.device)
        yield (
            f"note: --precision {values['precision']}: its 16 bits are {half}; --half_dtype chooses"
        )
    if values["pipeline_splits"]:
        parts = partition(task.stages(), values["pipeline_splits"])
        sizes = ", ".join(f"{next(iter(part))} ({len(part)} stages)" for part in parts)
        yield (
            f"note: --pipeline_splits: {len(parts)} parts, which each process runs one after the "
            "other with the same results "
            f"(--pipeline_schedule {values['pipeline_schedule']}): {sizes}"
        )


class Nothing:
    """A test set without samples."""

    num_samples = 0

    def __len__(self) -> int:
        return 0

    def batches(self, epoch: int = 0, start: int = 0):
        yield from ()


def train_config(setup: Setup, steps_per_epoch: int) -> TrainConfig:
    """Returns how long to train, with the plan's micro-batches and `--ckpts_per_epoch`."""
    values = setup.values
    config = values.config(TrainConfig, gradient_accumulation_steps=setup.plan.accumulation)
    if values["ckpts_per_epoch"]:
        freq = max(1, round(steps_per_epoch / values["ckpts_per_epoch"]))
        config = replace(config, checkpoint_freq=freq)
    return config


def train(
    setup: Setup,
    watch: Watch,
    batches: Loader,
    test: Loader,
    config: TrainConfig,
    num_steps: int,
    begin: Callable[[Trainer], object],
) -> dict[str, float]:
    """Trains, or goes on training, and returns the summary.

    Args:
        setup: flags and network.
        watch: log and the like.
        batches: what to train on.
        test: what is watched during training; may be empty.
        config: how long, and what to report.
        num_steps: of the learning rate's curve.
        begin: what is done before the first step of a run that is new.
    """
    values, log = setup.values, watch.log
    checkpoints = _checkpoints(setup, watch)
    trainer = _trainer(setup, watch, len(batches), config, num_steps, checkpoints)
    if not values["resume"] or not session.resume(trainer, log, lambda run: _frozen(setup, run)):
        begin(trainer)
    log.line(
        f"training: {config.num_steps(len(batches))} steps, {len(batches)} an epoch, with "
        f"{values['optimizer']}, lr {values['lr']:.4g} {values['lr_schedule']}, weight decay "
        f"{values['weight_decay']:.3g}"
    )
    if setup.world.device.startswith("cuda") and not values["deterministic"]:
        log.line(session.VARIES)
    with session.stopped_by_sigterm(trainer):
        summary = trainer.fit(batches, test)
    watch.dog.rest()
    if values["mode"] != "benchmark_training":
        session.report_files(trainer, log, values["log_path"])
    if checkpoints and values["weight_avg_exp"] is not None:
        summary |= average_checkpoints(trainer, test, values["weight_avg_exp"])
    return summary


def _checkpoints(setup: Setup, watch: Watch) -> CheckpointDirectory | None:
    """The directory of `--save_checkpoint_path`, if one is named, until the run ends."""
    values = setup.values
    path, keep = values["save_checkpoint_path"], values["keep_checkpoints"]
    if not path:
        return None
    checkpoints = CheckpointDirectory(path, keep, world=setup.world, beat=watch.dog.beat)
    session.new_or_resumed(checkpoints, values["resume"])
    watch.at_the_end.callback(checkpoints.release)
    return checkpoints


def _trainer(
    setup: Setup,
    watch: Watch,
    steps_per_epoch: int,
    config: TrainConfig,
    num_steps: int,
    checkpoints: CheckpointDirectory | None,
) -> Trainer:
    values, task = setup.values, setup.task
    run = {
        "dlrm_version": __version__,
        "flags": dict(values),
        "dataset": setup.dataset,
        "global_batch": setup.plan.global_batch,
    }
    decay = values["ema_decay"]
    return Trainer(
        task,
        optimizers=task.optimizers(values.config(NetworkOptimizerConfig)),
        schedule=learning_rate_curve(values.config(CurveConfig), num_steps, steps_per_epoch),
        config=config,
        world=setup.world,
        log=watch.log,
        scaler=task.precision.scaler(setup.world.device, values["max_grad_norm"]),
        checkpoints=checkpoints,
        run=run,
        ema=None if decay is None else EMA(task.model, decay),
        beat=watch.dog.beat,
    )


def _frozen(setup: Setup, run: dict[str, Any]) -> dict[str, Any]:
    """What must stay the same when a run goes on."""
    # A flag that is newer than the run must have the default, which is what the run did.
    newer = {k: v for k, v in setup.values.items() if k not in setup.values.given}
    run = json.loads(json.dumps({**run, "flags": {**newer, **run["flags"]}}))
    kept = {f"--{k}": v for k, v in run["flags"].items() if k not in setup.may_change}
    kept["--base_device"] = session.device(kept["--base_device"])
    kept["the global batch (see --replicas)"] = run.get("global_batch")
    return kept | {f"dataset's {k}": v for k, v in run["dataset"].items()}


def load_weights_of(setup: Setup, parameters: Parameters, log: RunLog) -> None:
    """Loads the checkpoint of `--load_checkpoint_path`, if one is named, and says so."""
    if setup.checkpoint:
        load_checkpoint(setup.checkpoint, parameters, world=setup.world)
        log.line(f"weights from {setup.checkpoint}")


@torch.inference_mode()
def time_inference(
    setup: Setup, log: RunLog, loader: Loader, unit: str, with_reading: bool = False
) -> dict[str, float]:
    """Passes over a data set; without the first, their mean throughput over all processes.

    A sample's latency is that of its batch: from batch in hand to answer in hand.

    Args:
        setup: flags and network.
        log: where to report.
        loader: what to pass over.
        unit: what a sample is, in the plural.
        with_reading: begin a batch's latency where it is asked for.
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
    p50, p95, p99, p999 = np.percentile(seconds, (50, 95, 99, 99.9)).tolist()
    return {
        "mean_inference_throughput": float(np.mean(rates)),
        "mean_inference_latency": float(np.mean(seconds)),
        "min_inference_latency": min(seconds),
        "p50_inference_latency": p50,
        "p95_inference_latency": p95,
        "p99_inference_latency": p99,
        "p999_inference_latency": p999,
        "max_inference_latency": max(seconds),
    }
