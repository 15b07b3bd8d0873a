"""A run of `dlrm.scripts.cnn`: training, validating or timing an image network."""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dlrm.command_line import missing_extra
from dlrm.distributed import Pipelines
from dlrm.flags import Values
from dlrm.settings import architecture_of
from dlrm.tasks.networks import flags as network_flags, work as networks
from dlrm.tasks.networks.checkpoints import checkpoints_of, validate_all
from dlrm.tasks.networks.work import EmptyLoader, NetworkWork, SameBatch
from dlrm.tasks.run import Run, resumed_checkpoint, with_saved_flags
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.pretrained import load_weights
from dlrm.train.checkpoints.state import Parameters
from dlrm.train.config import ExecutionConfig, PrecisionConfig, TrainConfig
from dlrm.train.log import Loader
from dlrm.train.trainer import Trainer
from dlrm.vision.augmentation import Augmentation
from dlrm.vision.config import ImageLossConfig, ImagesConfig, NetworkConfig
from dlrm.vision.flags import ARCHITECTURE, FLAGS, TRAINING, resolved
from dlrm.vision.loader import GeneratedImages, ImageLoader, ImageSource
from dlrm.vision.task import ImageClassification

_LOADED_BYTES = 1 << 30  # of prefetched batches


def run(values: Values) -> dict[str, float]:
    """Runs the mode of the flags and returns the summary; see `networks.run_mode`."""
    return networks.run_mode(values, FLAGS.uris, TRAINING, _open, _MODES)


def _open(values: Values, pipelines: Pipelines) -> "ImageWork":
    division = network_flags.divide_batch(values, pipelines.replicas.size)
    values = resolved(values, division.global_batch)
    _check(values)
    path, is_validated = values["load_checkpoint_path"], values["mode"] == "validate"
    checkpoint = Checkpoint.open(path) if path else None
    if is_validated:
        checkpoint = Checkpoint(checkpoints_of(values["restore_path"])[0])
        _check_same_network(values, checkpoint)
    taken = (*ARCHITECTURE, *(("amp", "amp_dtype") if is_validated else ()))
    values = with_saved_flags(values, resumed_checkpoint(values) or checkpoint, taken)
    sources = _sources(values)
    train, dataset = sources["train"], {"data": values["data"]}
    if values["data"] == "dataset":
        dataset = {"classes": train.classes or train.num_classes, "size": train.size}
        known = checkpoint.config["dataset"].get("classes") if checkpoint else None
        if is_validated and known not in (None, dataset["classes"]):
            raise ValueError(
                f"{values['dataset']}: expected the classes that {checkpoint} was trained on, "
                f"{_shown(known)}, got {_shown(dataset['classes'])}"
            )
        if "num_classes" in values.given and values["num_classes"] != train.num_classes:
            has = f"{values['dataset']} has {train.num_classes}"
            raise ValueError(f"--num_classes {values['num_classes']}: {has}")
        values = values.filled({"num_classes": train.num_classes})
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
    dataset = {"images": train.num_samples, **dataset}
    others = {"checkpoint": checkpoint, "dataset": dataset, "sources": sources}
    return ImageWork.divided(FLAGS, values, pipelines, task, TRAINING, **others)


def _check(values: Values) -> None:
    network_flags.check(values, ("train",))
    if values["mode"] == "validate" and values["restore_path"] is None:
        raise ValueError("--mode validate needs --restore_path, the directory of the checkpoints")
    if values["data"] is None or values["data"] == "dataset" and values["dataset"] is None:
        raise ValueError("--dataset: expected a directory, or --data generated or synthetic")
    if not 0 <= values["start_epoch"] < values["epochs"]:
        raise ValueError(f"--start_epoch {values['start_epoch']}: expected 0 to --epochs, excluded")


def _check_same_network(values: Values, checkpoint: Checkpoint) -> None:
    for flag in architecture_of(NetworkConfig):
        known = checkpoint.config["flags"].get(flag)
        known = tuple(known) if isinstance(known, list) else known
        if flag in values.given and values[flag] != known:
            raise ValueError(f"--{flag} {values[flag]}: {checkpoint} has {known}")


def _shown(classes: Any) -> str:
    if isinstance(classes, int):
        return str(classes)
    return f"{len(classes)}: {', '.join(classes[:5])}{', ...' if len(classes) > 5 else ''}"


def _sources(values: Values) -> Mapping[str, Any]:
    """Returns the images of each split."""
    if values["data"] != "dataset":
        count, size = values["synthetic_dataset_num_entries"], values["image_size"]
        source = GeneratedImages(count, size, values["num_classes"], values["seed"])
        return {"train": source, "test": source}
    try:
        from dlrm.vision.images import open_images
    except ImportError as error:
        raise ValueError(f"--dataset: {missing_extra(error, 'images')}") from error
    return open_images(values["dataset"], values.config(ImagesConfig), values["num_classes"])


@dataclass(kw_only=True)
class ImageWork(NetworkWork):
    """An image network with its data.

    Attributes:
        sources: images of each split.
    """

    sources: Mapping[str, ImageSource]

    def lines(self) -> Iterator[str]:
        values = self.values
        yield self.device_line(values["model"])
        yield from super().lines()
        if values["data"] == "dataset":
            counts = "  ".join(f"{name} {s.num_samples:,}" for name, s in self.sources.items())
            yield f"{values['dataset']}: {counts} images of {values['num_classes']} classes"
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
        train = self.loader("train", self.division.global_batch)
        if self.values["no_validation"] or self.values["mode"] == "benchmark_training":
            return train, EmptyLoader()
        return train, self.test_loader()

    def test_loader(self) -> Loader:
        """Returns the batches to test on."""
        return self.loader("test", self.values["test_batch_size"])

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
        source = self.sources[split]
        if values["data"] == "synthetic":
            loader = ImageLoader(source, batch_size, drop_last=True, world=world)
            return SameBatch(loader, world.device)
        dtype = torch.float32 if values["io"] == "float32" else torch.uint8
        read = batch_size * 3 * source.size**2 * dtype.itemsize // world.size
        readers = max(4, len(os.sched_getaffinity(0)) // world.size)  # each decodes a batch
        return ImageLoader(
            source,
            batch_size,
            shuffle=train,
            drop_last=train,
            num_partners=self.task.augmentation.num_partners if train else 0,
            dtype=dtype,
            seed=values["seed"],
            world=world,
            depth=max(1, min(readers, _LOADED_BYTES // max(read, 1))),
        )


def _validate(run: Run) -> dict[str, float]:
    work = run.work
    assert isinstance(work, ImageWork)
    directory = run.values["restore_path"]
    results = Path(run.values["results"] or Path(directory, "validation.csv"))
    return validate_all(work.task, work.test_loader(), directory, results, run.log).summary()


def _benchmark_inference(run: Run) -> dict[str, float]:
    work = run.work
    assert isinstance(work, ImageWork)
    run.load_weights(Parameters(work.task.model))
    loader = work.loader("test", run.values["batch_size"] * run.world.size)
    return networks.time_inference(run, loader, "images")


_MODES = {"validate": _validate, "benchmark_inference": _benchmark_inference}
