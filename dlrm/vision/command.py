"""A run of `dlrm.scripts.cnn`: training, validating or timing an image network."""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dlrm.distributed import Pipelines
from dlrm.files import MANIFEST
from dlrm.flags import Values
from dlrm.manifest import checksum
from dlrm.tasks.networks import flags as network_flags, work as networks
from dlrm.tasks.networks.checkpoints import checkpoints_of, name_of, validate_all
from dlrm.tasks.networks.work import EmptyLoader, NetworkWork
from dlrm.tasks.run import Run, resumed_checkpoint, with_saved_flags
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.pretrained import load_weights
from dlrm.train.checkpoints.state import Parameters
from dlrm.train.config import ExecutionConfig, PrecisionConfig, TrainConfig
from dlrm.train.log import Loader
from dlrm.train.trainer import Trainer
from dlrm.vision import flags as cnn_flags
from dlrm.vision.augmentation import Augmentation
from dlrm.vision.loader import (
    GeneratedImages,
    ImageDataset,
    ImageLoader,
    ImageSource,
    SyntheticImages,
)
from dlrm.vision.task import ImageClassification, ImageLossConfig, NetworkConfig

TRAINING = ("train", "benchmark_training")
_LOADED_BYTES = 1 << 30  # of prefetched batches


def run(values: Values) -> dict[str, float]:
    """Runs the mode of the flags and returns the summary; see `networks.run_mode`."""
    return networks.run_mode(values, cnn_flags.FLAGS.uris, TRAINING, _open, _MODES)


def _open(values: Values, pipelines: Pipelines) -> "ImageWork":
    division = network_flags.divide_batch(values, pipelines.replicas.size)
    values = cnn_flags.resolved(values, division.global_batch)
    _check(values)
    path = values["load_checkpoint_path"]
    checkpoint = Checkpoint.open(path) if path else None
    validated = values["mode"] == "validate"
    if validated:
        checkpoint = Checkpoint(checkpoints_of(values["restore_path"])[0])
        _check_validated(values, checkpoint)
    taken = (*cnn_flags.ARCHITECTURE, *(("amp", "amp_dtype") if validated else ()))
    values = with_saved_flags(values, resumed_checkpoint(values) or checkpoint, taken)
    if values["data"] == "dataset":
        classes = ImageDataset(
            values["dataset"], "test", values["verify_data"], values["allow_links"]
        ).num_classes
        if "num_classes" in values.given and values["num_classes"] != classes:
            raise ValueError(
                f"--num_classes {values['num_classes']}: {values['dataset']} has {classes}"
            )
        values = values.filled({"num_classes": classes})
    task = ImageClassification(
        values.config(NetworkConfig),
        values.config(Augmentation),
        values.config(ImageLossConfig),
        precision=values.config(PrecisionConfig),
        execution=values.config(ExecutionConfig),
        world=pipelines.replicas,
        seed=values["seed"],
        channels_last=values["channels_last"],
    )
    if values["init_checkpoint"]:
        load_weights(task.model, values["init_checkpoint"], ("fc.", "classifier."))
    networks.divide(task, values, pipelines, division)
    return ImageWork(
        values=values,
        world=pipelines.world,
        pipelines=pipelines,
        task=task,
        trains=values["mode"] in TRAINING,
        checkpoint=checkpoint,
        dataset=_fingerprint(values),
        may_change=cnn_flags.RESUME_MAY_CHANGE,
        division=division,
    )


def _check(values: Values) -> None:
    network_flags.check(values, ("train",))
    mode = values["mode"]
    if mode == "validate" and values["restore_path"] is None:
        raise ValueError("--mode validate needs --restore_path, the directory of the checkpoints")
    if values["data"] is None or values["data"] == "dataset" and values["dataset"] is None:
        raise ValueError("--dataset: expected a directory, or --data generated or synthetic")
    if not 0 <= values["start_epoch"] < values["epochs"]:
        raise ValueError(f"--start_epoch {values['start_epoch']}: expected 0 to --epochs, excluded")


def _check_validated(values: Values, checkpoint: Checkpoint) -> None:
    """Raises ValueError if the checkpoint is of another network or of other classes."""
    saved = checkpoint.config
    for flag in ("model", "norm", "groups", "group_dim", "expand_ratio", "depths", "width"):
        known = saved["flags"].get(flag)
        known = tuple(known) if isinstance(known, list) else known
        if flag in values.given and values[flag] != known:
            raise ValueError(f"--{flag} {values[flag]}: {checkpoint} has {known}")
    classes = saved["dataset"].get("classes")
    if values["data"] == "dataset" and classes:
        test = ImageDataset(values["dataset"], "test", values["verify_data"], values["allow_links"])
        if test.classes != classes:
            raise ValueError(
                f"{values['dataset']}: expected the {len(classes)} classes that {checkpoint} was "
                f"trained on, {_shown(classes)}, got {len(test.classes)}, {_shown(test.classes)}"
            )


def _shown(classes: Sequence[str]) -> str:
    return ", ".join(classes[:5]) + (", ..." if len(classes) > 5 else "")


class _Float32:
    """A source whose images are copied as float32, four times the bytes."""

    def __init__(self, source: ImageSource):
        self.num_samples, self.num_classes = source.num_samples, source.num_classes
        self.size, self._source = source.size, source

    def read(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        images, labels = self._source.read(rows)
        return images.float(), labels


class ImageWork(NetworkWork):
    """An image network with its data."""

    def lines(self) -> Iterator[str]:
        values = self.values
        yield self.device_line(values["model"])
        yield from super().lines()
        for flag in ("mixup_alpha", "cutmix_lambda"):
            if values["data"] == "synthetic" and flag in values.given:
                yield (
                    f"note: --{flag} is not used; --data synthetic is one batch, in which nothing "
                    "is mixed"
                )
        if values["init_checkpoint"]:
            yield f"weights from {values['init_checkpoint']}"
        elif self.checkpoint is None and values["mode"] == "benchmark_inference":
            yield "note: no --load_checkpoint_path, so these are the initial weights"

    def loaders(self) -> tuple[Loader, Loader]:
        values = self.values
        train = self.loader("train", self.division.global_batch)
        if values["no_validation"] or values["mode"] == "benchmark_training":
            return train, EmptyLoader()
        return train, self.loader("test", values["test_batch_size"])

    def train_config(self, steps_per_epoch: int) -> TrainConfig:
        values, config = self.values, super().train_config(steps_per_epoch)
        if values["mode"] != "benchmark_training":
            return config
        steps = config.max_steps or 120
        warmup = config.benchmark_warmup_steps
        if "benchmark_warmup_steps" not in values.given:
            warmup = min(20, steps // 2)
        epochs = max(config.epochs, -(-steps // steps_per_epoch))
        return replace(config, epochs=epochs, max_steps=steps, benchmark_warmup_steps=warmup)

    def begin(self, run: Run, trainer: Trainer, train: Loader) -> None:
        super().begin(run, trainer, train)
        first = self.values["start_epoch"] * len(train)
        trainer.progress.step = trainer.progress.tested_step = first

    def loader(self, split: str, batch_size: int) -> Loader:
        """Returns the batches of a split; training leaves out a short last one."""
        values, world, train = self.values, self.pipelines.replicas, split == "train"
        size, classes, seed = values["image_size"], values["num_classes"], values["seed"]
        count = values["synthetic_dataset_num_entries"]
        if values["data"] == "synthetic":
            made = (count, batch_size)
            return SyntheticImages(*made, size=size, num_classes=classes, seed=seed, world=world)
        source: ImageSource
        if values["data"] == "generated":
            source = GeneratedImages(count, size, classes, seed)
        else:
            source = ImageDataset(
                values["dataset"], split, values["verify_data"], values["allow_links"]
            )
        if values["io"] == "float32":
            source = _Float32(source)
        width = 4 if values["io"] == "float32" else 1
        read = batch_size * 3 * source.size**2 * width // world.size
        return ImageLoader(
            source,
            batch_size,
            shuffle=train,
            drop_last=train,
            num_partners=self.task.augmentation.num_partners if train else 0,
            seed=seed,
            world=world,
            depth=max(1, min(4, _LOADED_BYTES // max(read, 1))),
        )


def _fingerprint(values: Values) -> dict[str, Any]:
    if values["data"] != "dataset":
        return {"data": values["data"], "images": values["synthetic_dataset_num_entries"]}
    train = ImageDataset(values["dataset"], "train", values["verify_data"], values["allow_links"])
    return {"images": train.num_samples, "classes": train.classes, "size": train.size}


def _validate(run: Run) -> dict[str, float]:
    values, work = run.values, run.work
    assert isinstance(work, ImageWork)
    test = work.loader("test", values["test_batch_size"])
    results = Path(values["results"] or Path(values["restore_path"], "validation.csv"))
    facts = {flag: values[flag] for flag in (*cnn_flags.ARCHITECTURE, "amp", "amp_dtype")}
    if values["data"] == "dataset":
        facts["dataset"] = checksum(Path(values["dataset"], MANIFEST))
    tested_on = name_of(values["dataset"] or values["data"], facts)
    best = validate_all(work.task, test, values["restore_path"], results, run.log, tested_on)
    return best.summary()


def _benchmark_inference(run: Run) -> dict[str, float]:
    work = run.work
    assert isinstance(work, ImageWork)
    run.load_weights(Parameters(work.task.model))
    loader = work.loader("test", run.values["batch_size"] * run.world.size)
    return networks.time_inference(run, loader, "images")


_MODES = {"validate": _validate, "benchmark_inference": _benchmark_inference}
