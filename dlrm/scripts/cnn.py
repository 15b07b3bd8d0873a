"""Trains, validates or times image networks: python -m dlrm.scripts.cnn --mode train ..."""

import dlrm.scripts.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlrm import __version__
from dlrm.data.augment import Augmentation
from dlrm.data.images import (
    GeneratedImages,
    ImageDataset,
    ImageLoader,
    ImageSource,
    SyntheticImages,
)
from dlrm.distributed import World, agreed, all_sum, check_same
from dlrm.scripts import cnn_flags, session
from dlrm.scripts.all_checkpoints import average_checkpoints, checkpoints_of, validate_all
from dlrm.scripts.cnn_flags import BatchPlan
from dlrm.scripts.config_flags import Values
from dlrm.tasks.images import ImageClassification, ImageLossConfig, NetworkConfig
from dlrm.train.averaging import MovingAverage, NoAverage
from dlrm.train.checkpoint import (
    CheckpointDirectory,
    Parameters,
    find_checkpoint,
    last_checkpoint,
    load_checkpoint,
    read_config,
)
from dlrm.train.execution import ExecutionConfig, partition
from dlrm.train.log import Loader, RunLog
from dlrm.train.optim import NetworkOptimizerConfig
from dlrm.train.precision import PrecisionConfig
from dlrm.train.schedule import CurveConfig, learning_rate_curve
from dlrm.train.trainer import TrainConfig, Trainer
from dlrm.train.watchdog import Watchdog
from dlrm.train.weights import load_weights

_LOADED_BYTES = 1 << 30  # of batches that are read ahead


def main(arguments: list[str]) -> None:
    try:
        values = cnn_flags.parse(arguments)
    except ValueError as error:
        sys.exit(f"error: {error}")
    if values["help"]:
        print(__doc__, cnn_flags.FLAGS.help(), sep="\n")
        return
    session.exit_with(lambda: run(values), values["save_checkpoint_path"])


def run(values: Values) -> dict[str, float]:
    """Does what the flags say and returns the summary, on every rank.

    Raises:
        ValueError, OSError, FloatingPointError: what the user can mend.
        OtherRankError: another rank raises one of these.
        StoppedError: the training was stopped by a signal.
    """
    world = session.join(
        values["base_device"], values["backend"], "backend" in values.given, values["rank_timeout"]
    )
    check_same({f"--{name}": value for name, value in values.items()}, world)
    with agreed(world, *session.USER_ERRORS):
        setup = _set_up(values, world)
    values = setup.values
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = values["tf32"]
    torch.manual_seed(values["seed"])
    with RunLog(values["log_path"], quiet=world.rank > 0) as log:
        log.parameters(dict(values))
        for line in _notices(setup):
            log.line(line)
        with Watchdog(world, values["rank_timeout"]) as watchdog, ExitStack() as at_the_end:
            mode = values["mode"]
            if mode == "validate":
                summary = _validate(setup, log)
            elif mode == "benchmark_inference":
                summary = _benchmark_inference(setup, log)
            else:
                summary = _train(setup, log, watchdog, at_the_end)
        log.summary(summary)
    return summary


@dataclass
class Setup:
    """What all modes need.

    Attributes:
        values: the flags, with the recipe's and a checkpoint's architecture.
        world: the processes.
        plan: the batch.
        task: the network.
        checkpoint: whose weights are loaded, or None.
    """

    values: Values
    world: World
    plan: BatchPlan
    task: ImageClassification
    checkpoint: Path | None


def _set_up(values: Values, world: World) -> Setup:
    plan = cnn_flags.batch_plan(values, world.size)
    values = cnn_flags.resolved(values, plan.global_batch)
    _check(values)
    checkpoint = values["load_checkpoint_path"] and find_checkpoint(values["load_checkpoint_path"])
    resumed = last_checkpoint(values["save_checkpoint_path"]) if values["resume"] else None
    known = resumed or checkpoint
    if values["mode"] == "validate":
        known = checkpoints_of(values["restore_path"])[0]
    if known:
        saved = read_config(known)["flags"]
        values = values.filled({k: saved[k] for k in cnn_flags.ARCHITECTURE if k in saved})
    if values["data"] == "dataset":
        classes = ImageDataset(values["dataset"], "test").num_classes
        values = values.filled({"num_classes": classes})
    task = ImageClassification(
        values.config(NetworkConfig),
        values.config(Augmentation),
        values.config(ImageLossConfig),
        values.config(PrecisionConfig),
        values.config(ExecutionConfig),
        world,
        values["seed"],
        values["channels_last"],
    )
    if values["init_checkpoint"]:
        load_weights(task.model, values["init_checkpoint"], ("fc.", "classifier."))
    return Setup(values, world, plan, task, checkpoint)


def _check(values: Values) -> None:
    mode = values["mode"]
    if values["resume"] and (mode != "train" or values["save_checkpoint_path"] is None):
        raise ValueError("--resume needs --mode train and --save_checkpoint_path")
    for flag in ("checkpoint_freq", "ckpts_per_epoch", "weight_avg_exp"):
        if flag in values.given and values[flag] and values["save_checkpoint_path"] is None:
            raise ValueError(f"--{flag} {values[flag]} needs --save_checkpoint_path")
    if mode == "validate" and values["restore_path"] is None:
        raise ValueError("--mode validate needs --restore_path, the directory of the checkpoints")
    if values["data"] is None or values["data"] == "dataset" and values["dataset"] is None:
        raise ValueError("--dataset: expected a directory, or --data generated or synthetic")
    if not 0 <= values["start_epoch"] < values["epochs"]:
        raise ValueError(f"--start_epoch {values['start_epoch']}: expected 0 to --epochs, excluded")
    if values["repeat"] < 2:
        raise ValueError(f"--repeat {values['repeat']}: expected 2 or more; the first is left out")
    if values["max_grad_norm"] is not None and not values["max_grad_norm"] > 0:
        raise ValueError(f"--max_grad_norm {values['max_grad_norm']}: expected a number above 0")


def _notices(setup: Setup) -> Iterator[str]:
    """Lines about what runs, and about what is not as the flags might suggest."""
    values, task, world = setup.values, setup.task, setup.world
    count = sum(p.numel() for p in task.model.parameters())
    plan, half = setup.plan, setup.task.precision.dtype(world.device)
    threads = f" ({torch.get_num_threads()} threads)" if world.device == "cpu" else ""
    yield (
        f"device: {world.device}{threads}  processes: {world.size}  model: {values['model']} "
        f"({count:,} parameters)  products: {str(half).removeprefix('torch.')}  batch: "
        f"{values['batch_size']} x {plan.accumulation} x {world.size} = {plan.global_batch}"
    )
    if plan.note:
        yield plan.note
    if values["precision"] in ("16.16", "16.32") and values["half_dtype"] is None:
        yield f"--precision {values['precision']}: its 16 bits are {half}; --half_dtype chooses"
    if values["pipeline_splits"]:
        parts = partition(task.stages(), values["pipeline_splits"])
        sizes = ", ".join(f"{next(iter(part))} ({len(part)} stages)" for part in parts)
        yield (
            f"--pipeline_splits: {len(parts)} parts, which each process runs one after the other "
            f"with the same results (--pipeline_schedule {values['pipeline_schedule']}): {sizes}"
        )
    for flag in ("mixup_alpha", "cutmix_lambda"):
        if values["data"] == "synthetic" and flag in values.given:
            yield f"--{flag} is not used; --data synthetic is one batch, in which nothing is mixed"
    if values["init_checkpoint"]:
        yield f"weights from {values['init_checkpoint']}"
    elif setup.checkpoint is None and values["mode"] == "benchmark_inference":
        yield "note: no --load_checkpoint_path, so these are the initial weights"


class _Float32:
    """A source whose images travel as float32, four times the bytes."""

    def __init__(self, source: ImageSource):
        self.num_samples, self.num_classes = source.num_samples, source.num_classes
        self.size, self._source = source.size, source

    def read(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        images, labels = self._source.read(rows)
        return images.float(), labels


def _loader(setup: Setup, split: str, batch_size: int) -> Loader:
    """The batches of a split, of what is asked for; training leaves the last short one out."""
    values, world, train = setup.values, setup.world, split == "train"
    size, classes, seed = values["image_size"], values["num_classes"], values["seed"]
    count = values["synthetic_dataset_num_entries"]
    if values["data"] == "synthetic":
        made = (count, batch_size)
        return SyntheticImages(*made, size=size, num_classes=classes, seed=seed, world=world)
    source: ImageSource
    if values["data"] == "generated":
        source = GeneratedImages(count, size, classes, seed)
    else:
        source = ImageDataset(values["dataset"], split)
    if values["io"] == "float32":
        source = _Float32(source)
    width = 4 if values["io"] == "float32" else 1
    read = batch_size * 3 * source.size**2 * width // world.size
    return ImageLoader(
        source,
        batch_size,
        shuffle=train,
        drop_last=train,
        num_partners=setup.task.augmentation.num_partners if train else 0,
        seed=seed,
        world=world,
        depth=max(1, min(4, _LOADED_BYTES // max(read, 1))),
    )


class _Nothing:
    """A test set without images."""

    num_samples = 0

    def __len__(self) -> int:
        return 0

    def batches(self, epoch: int = 0, start: int = 0):
        yield from ()


def _train(
    setup: Setup, log: RunLog, watchdog: Watchdog, at_the_end: ExitStack
) -> dict[str, float]:
    values, world, task = setup.values, setup.world, setup.task
    train = _loader(setup, "train", setup.plan.global_batch)
    tested = not (values["no_validation"] or values["mode"] == "benchmark_training")
    test = _loader(setup, "test", values["test_batch_size"]) if tested else _Nothing()
    config = _train_config(setup, len(train))
    checkpoints = None
    if values["save_checkpoint_path"]:
        checkpoints = CheckpointDirectory(
            values["save_checkpoint_path"],
            values["keep_checkpoints"],
            world=world,
            beat=watchdog.beat,
        )
        session.new_or_resumed(checkpoints, values["resume"])
        at_the_end.callback(checkpoints.release)
    run = {"dlrm_version": __version__, "flags": dict(values), "dataset": _fingerprint(setup)}
    ema = values["ema_decay"]
    trainer = Trainer(
        task,
        task.optimizers(values.config(NetworkOptimizerConfig)),
        learning_rate_curve(values.config(CurveConfig), config.epochs * len(train), len(train)),
        config,
        world,
        log,
        task.precision.scaler(world.device, values["max_grad_norm"]),
        checkpoints,
        run,
        NoAverage() if ema is None else MovingAverage(task.model, ema),
        watchdog.beat,
    )
    resumed = values["resume"] and session.resume(trainer, log, _frozen)
    if not resumed and setup.checkpoint:
        load_checkpoint(setup.checkpoint, trainer.parameters, world=world)
        log.line(f"weights from {setup.checkpoint}")
    if not resumed:
        trainer.progress.step = trainer.progress.tested_step = values["start_epoch"] * len(train)
    with session.stopped_by_sigterm(trainer):
        summary = trainer.fit(train, test)
    watchdog.rest()
    if tested:
        session.report_files(trainer, log, values["log_path"])
    if checkpoints and values["weight_avg_exp"] is not None:
        summary |= average_checkpoints(trainer, test, values["weight_avg_exp"])
    return summary


def _train_config(setup: Setup, steps_per_epoch: int) -> TrainConfig:
    values = setup.values
    config = values.config(TrainConfig, gradient_accumulation_steps=setup.plan.accumulation)
    if values["mode"] == "benchmark_training":
        steps = config.max_steps or 120
        warmup = config.benchmark_warmup_steps
        if "benchmark_warmup_steps" not in values.given:
            warmup = min(20, steps // 2)
        epochs = max(config.epochs, -(-steps // steps_per_epoch))
        config = replace(config, epochs=epochs, max_steps=steps, benchmark_warmup_steps=warmup)
    if values["ckpts_per_epoch"]:
        freq = max(1, round(steps_per_epoch / values["ckpts_per_epoch"]))
        config = replace(config, checkpoint_freq=freq)
    return config


def _fingerprint(setup: Setup) -> dict[str, Any]:
    values = setup.values
    if values["data"] != "dataset":
        return {"data": values["data"], "images": values["synthetic_dataset_num_entries"]}
    train = ImageDataset(values["dataset"], "train")
    return {"images": train.num_samples, "classes": train.classes, "size": train.size}


def _frozen(run: dict[str, Any]) -> dict[str, Any]:
    """What must stay the same when a run goes on."""
    run = json.loads(json.dumps(run))
    kept = {f"--{k}": v for k, v in run["flags"].items() if k not in cnn_flags.RESUME_MAY_CHANGE}
    kept["--base_device"] = session.device(kept["--base_device"])
    return kept | {f"dataset's {k}": v for k, v in run["dataset"].items()}


def _validate(setup: Setup, log: RunLog) -> dict[str, float]:
    values = setup.values
    test = _loader(setup, "test", values["test_batch_size"])
    results = Path(values["results"] or Path(values["restore_path"], "validation.csv"))
    return validate_all(setup.task, test, values["restore_path"], results, setup.world, log)


@torch.inference_mode()
def _benchmark_inference(setup: Setup, log: RunLog) -> dict[str, float]:
    """Passes over the images; without the first, their mean throughput over all processes."""
    values, world, task = setup.values, setup.world, setup.task
    if setup.checkpoint:
        load_checkpoint(setup.checkpoint, Parameters(task.model), world=world)
        log.line(f"weights from {setup.checkpoint}")
    task.model.eval()
    loader = _loader(setup, "test", values["batch_size"] * world.size)
    rates: list[float] = []
    seconds: list[float] = []
    for index in range(values["repeat"]):
        began, images, batches = time.perf_counter(), 0, []
        for batch in loader.batches():
            start = time.perf_counter()
            task.predict(batch)
            if world.device.startswith("cuda"):
                torch.cuda.synchronize()
            batches.append(time.perf_counter() - start)
            images += batch.num_samples
        rate = all_sum(torch.tensor(images / (time.perf_counter() - began)), world).item()
        log.line(f"pass {index + 1}/{values['repeat']}: {rate:.2f} images/s")
        if index:
            rates.append(rate)
            seconds += batches
    p50, p95, p99 = np.percentile(seconds, (50, 95, 99)).tolist()
    return {
        "mean_inference_throughput": float(np.mean(rates)),
        "mean_inference_latency": float(np.mean(seconds)),
        "p50_inference_latency": p50,
        "p95_inference_latency": p95,
        "p99_inference_latency": p99,
        "max_inference_latency": max(seconds),
    }


def start() -> None:
    main(sys.argv[1:])


if __name__ == "__main__":
    start()
