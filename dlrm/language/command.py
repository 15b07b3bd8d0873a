"""A run of `dlrm.scripts.bert`: pre-training, fine-tuning, evaluating or timing BERT."""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlrm.distributed import Pipelines, World, gather
from dlrm.files import write_atomically
from dlrm.flags import Values
from dlrm.language import flags as bert_flags
from dlrm.language.config import SIZES, BertConfig
from dlrm.language.loader import TextLoader, TextSource
from dlrm.language.pairs import SentencePairs, majority_baseline
from dlrm.language.sources import made_up, open_sources
from dlrm.language.squad import AnswerScorer, SquadFeatures
from dlrm.language.task import (
    LanguageTask,
    PreTraining,
    QuestionAnswering,
    SequenceClassification,
)
from dlrm.tasks.networks import work as networks
from dlrm.tasks.networks.work import EmptyLoader, NetworkWork, SameBatch
from dlrm.tasks.run import Run, resumed_checkpoint, with_saved_flags
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.pretrained import load_bert_weights
from dlrm.train.checkpoints.state import Parameters
from dlrm.train.config import ExecutionConfig, PrecisionConfig, TrainConfig
from dlrm.train.log import Loader, Watched
from dlrm.train.optim.config import NetworkOptimizerConfig
from dlrm.train.trainer import Trainer

HEADS = ("cls.", "qa_outputs.", "classifier.", "bert.pooler.")  # possibly of another task
_TEST_WINDOW = 50  # test batches within which rows are sorted by length
_MOST_ROWS = 1 << 16  # of `--batch_size max`


def run(values: Values) -> dict[str, float]:
    """Runs the mode of the flags and returns the summary; see `networks.run_mode`."""
    return networks.run_mode(values, bert_flags.FLAGS.uris, bert_flags.TRAINING, _open, _MODES)


@dataclass(kw_only=True)
class TextWork(NetworkWork):
    """BERT with its data; see `NetworkWork`.

    Attributes:
        train, test: rows; None if there are none.
        initial: names of weights that `--init_checkpoint` lacks.
    """

    train: TextSource | None = None
    test: TextSource | None = None
    initial: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        values = self.values
        shape = values.config(BertConfig).shape
        known = SIZES[values["size"]] == shape
        name = values["size"] if known else f"{shape.num_layers} x {shape.hidden_size}"
        yield self.device_line(f"BERT {name} for {values['task']}")
        yield from super().lines()
        for name, source in (("train", self.train), ("test", self.test)):
            if source is not None:
                mean = float(np.mean(source.lengths))
                yield (
                    f"{name}: {source.num_samples:,} rows of {mean:.0f} tokens on average, "
                    f"{source.length} at most"
                )
        if isinstance(self.test, SentencePairs):
            majority = majority_baseline(self.test.labels)
            yield (
                f"test: always the more frequent class: accuracy {majority['accuracy']:.6f}  "
                f"f1 {majority['f1']:.6f}"
            )
        if values["length_window"] and self.train and values["data"] == "dataset":
            yield (
                f"note: --length_window {values['length_window']}: rows are sorted by length "
                "within windows of this number of batches, which reduces padding"
            )
        if values["init_checkpoint"]:
            lacking = f", but for {', '.join(self.initial)}" if self.initial else ""
            yield f"weights from {values['init_checkpoint']}{lacking}"
        elif self.checkpoint is None and not values["resume"]:
            if values["mode"] == "inference_benchmark":
                yield "note: no --load_checkpoint_path, so these are the initial weights"
            elif values["mode"] == "finetune":
                yield "note: no --init_checkpoint, so the training begins with initial weights"
            elif values["phase"] == 2:
                yield "note: --phase 2 without --load_checkpoint_path begins with initial weights"

    def loaders(self) -> tuple[Loader, Loader]:
        assert self.train is not None
        train = self.loader(self.train, self.division.global_batch, train=True)
        if self.test is None:
            return train, EmptyLoader()
        return train, self.loader(self.test, self.values["test_batch_size"], train=False)

    def loader(self, source: TextSource, batch_size: int, train: bool) -> Any:
        """Returns batches; training leaves out a short last one, and graphs have fixed shapes."""
        values, is_graph = self.values, self.values["execution"] == "graph"
        loader = TextLoader(
            source,
            batch_size,
            shuffle=train,
            drop_last=train,
            window=values["length_window"] if train else 0 if is_graph else _TEST_WINDOW,
            cut=not (is_graph or (train and self.pipelines.parts.size > 1)),
            parts=self.division.accumulation if train else 1,
            prefetch=train or values["latency"] == "low",
            seed=values["seed"],
            world=self.pipelines.replicas,
        )
        return SameBatch(loader, self.world.device) if values["data"] == "synthetic" else loader

    def curve_steps(self, config: TrainConfig, steps_per_epoch: int) -> int:
        return self.values["total_steps"] or super().curve_steps(config, steps_per_epoch)

    def train_config(self, steps_per_epoch: int) -> TrainConfig:
        values, config = self.values, super().train_config(steps_per_epoch)
        if not values["total_steps"]:
            return config
        num_steps = values["total_steps"]
        stop = min(num_steps, config.max_steps or num_steps)
        needed = -(-num_steps // steps_per_epoch)
        epochs = min(config.epochs, needed) if "epochs" in values.given else needed
        return replace(config, epochs=epochs, max_steps=stop)

    def begin(self, run: Run, trainer: Trainer, train: Loader) -> None:
        """Phase 2 takes weights and moments of phase 1; steps and random numbers start anew."""
        if self.values["phase"] == 1 or not self.checkpoint:
            return super().begin(run, trainer, train)
        self.checkpoint.load(trainer.parameters, trainer.world, resume=True)
        torch.manual_seed(self.values["seed"] + trainer.world.rank)
        for weight, optimizer in trainer.parameters.optimizer_of():
            if isinstance(step := optimizer.state[weight].get("step"), torch.Tensor):
                step.zero_()
        text = f"phase 2: weights and moments from {self.checkpoint}; steps and rates begin anew"
        return run.log.line(text)

    def ready(self, run: Run, trainer: Trainer, train: Loader) -> None:
        own, steps = trainer.config.num_steps(len(train)), len(train)
        if own < (num_steps := self.curve_steps(trainer.config, steps)):
            run.log.line(f"the run has {own} of the {num_steps} steps of the learning rate's curve")
        super().ready(run, trainer, train)


def _open(values: Values, pipelines: Pipelines) -> TextWork:
    path, initial_path = values["load_checkpoint_path"], values["init_checkpoint"]
    checkpoint = Checkpoint.open(path) if path else None
    own = Checkpoint.open(initial_path) if initial_path and Path(initial_path).is_dir() else None
    known = resumed_checkpoint(values) or checkpoint or own
    names: tuple[str, ...] = bert_flags.ARCHITECTURE
    if checkpoint and values["mode"] in ("evaluate", "inference_benchmark"):
        names += bert_flags.INPUT
    values, by_recipe = bert_flags.resolved(with_saved_flags(values, known, names))
    values = with_saved_flags(values, known, names)  # and not the recipe's
    bert_flags.check(values)
    saved = checkpoint.config["flags"].get("task") if checkpoint else values["task"]
    if saved != values["task"]:
        raise ValueError(
            f"{checkpoint}: of --task {saved}, and not {values['task']}; --init_checkpoint takes "
            "from it what both networks have"
        )
    vocab_is_fixed = known is not None or "vocab_size" in {*values.given, *by_recipe}
    train, test, values = open_sources(values, vocab_is_fixed)
    task = make_task(values, pipelines.replicas, test)
    lacking: list[str] = []
    if initial_path:
        file = str(own.path / "dense.safetensors") if own else initial_path
        lacking = load_bert_weights(task.model, file, HEADS)
    if lacking and values["mode"] == "evaluate":
        raise ValueError(
            f"{initial_path}: expected all weights of --task {values['task']}, lacks {lacking}"
        )
    values = _with_batch_size(values, task, pipelines)
    if values["batches_per_step"] and values["data"] != "dataset":
        rows = values["batches_per_step"] * values["batch_size"] * pipelines.replicas.size
        values = values.replaced({"synthetic_dataset_num_entries": rows})
        test = made_up(values, rows)
    return TextWork.divided(
        bert_flags.FLAGS,
        values,
        pipelines,
        task,
        bert_flags.TRAINING,
        checkpoint=checkpoint,
        dataset=_fingerprint(values, train),
        train=train,
        test=test,
        initial=lacking,
    )


def make_task(values: Values, world: World, test: TextSource | None) -> LanguageTask:
    """Returns the task of the flags, with initial weights."""
    config = values.config(BertConfig)
    common: dict[str, Any] = {
        "precision": values.config(PrecisionConfig),
        "execution": values.config(ExecutionConfig),
        "world": world,
        "seed": values["seed"],
    }
    if values["task"] == "pretrain":
        return PreTraining(config, **common)
    if values["task"] == "squad":
        scorer = AnswerScorer(test) if isinstance(test, SquadFeatures) else None
        return QuestionAnswering(config, scorer, **common)
    return SequenceClassification(config, **common)


def _with_batch_size(values: Values, task: LanguageTask, pipelines: Pipelines) -> Values:
    """Returns the flags with a number for `--batch_size max`, the largest that fits all devices."""
    if values["batch_size"] != "max":
        return values.replaced({"batch_size": int(values["batch_size"])})
    if pipelines.parts.size > 1:
        raise ValueError(
            "--batch_size max is found with whole networks, and --pipeline_splits divides this one "
            f"among {pipelines.parts.size} processes: expected a number"
        )

    def step(rows: int) -> None:
        """Runs the parts of a step that need memory, with a rate of 0, so weights stay the same."""
        here = World(device=task.world.device)
        (batch,) = TextLoader(made_up(values, rows), rows, world=here, cut=False).batches()
        if values["mode"] in bert_flags.TRAINING:
            optimizers = task.optimizers(values.config(NetworkOptimizerConfig))
            task.loss(batch).backward()
            for optimizer in optimizers:
                optimizer.step()
            task.model.zero_grad(set_to_none=True)
        else:
            with torch.inference_mode():
                task.predict(batch)

    return values.replaced({"batch_size": min(gather(largest_batch(step), pipelines.world))})


def largest_batch(compute: Callable[[int], object], most: int = _MOST_ROWS) -> int:
    """Returns the largest n, up to `most`, for which `compute(n)` does not run out of memory.

    Tries ascending powers of two, and bisects between the last two.
    """
    fits, too_many = 0, most + 1
    while too_many - fits > 1:
        doubled = max(1, 2 * fits)
        size = doubled if doubled < too_many == most + 1 else (fits + too_many) // 2
        try:
            compute(size)
            fits = size
        except torch.OutOfMemoryError:
            too_many = size
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    if not fits:
        raise ValueError("--batch_size max: not even one sample fits in the device's memory")
    return fits


def _fingerprint(values: Values, train: TextSource | None) -> dict[str, Any]:
    if values["data"] != "dataset" or train is None:
        return {"data": values["data"], "rows": values["synthetic_dataset_num_entries"]}
    lengths = np.ascontiguousarray(train.lengths, "<i8")
    checksum = f"{zlib.crc32(lengths.data):08x}"
    return {"rows": train.num_samples, "length": train.length, "lengths' CRC-32": checksum}


def _evaluate(run: Run) -> dict[str, float]:
    """Tests a checkpoint, and writes its answers to questions."""
    values, work, log = run.values, run.work, run.log
    assert isinstance(work, TextWork)
    assert work.test is not None
    run.load_weights(Parameters(work.task.model))
    test = work.loader(work.test, values["test_batch_size"], train=False)
    metrics = work.task.evaluate(Watched(test, "test", log.quiet))
    if isinstance(scorer := getattr(work.task, "scorer", None), AnswerScorer) and scorer.answers:
        answers = scorer.answers
        file = Path(values["log_path"]).with_name("predictions.json")
        write_atomically(file, json.dumps(answers, indent=1, ensure_ascii=False) + "\n")
        log.line(f"answers to {len(answers):,} questions: {file}")
    return {f"test_{name}": value for name, value in metrics.items()}


def _benchmark_inference(run: Run) -> dict[str, float]:
    values, world, work = run.values, run.world, run.work
    assert isinstance(work, TextWork)
    assert work.test is not None
    run.load_weights(Parameters(work.task.model))
    loader = work.loader(work.test, values["batch_size"] * world.size, train=False)
    unread = values["latency"] == "minimum"
    return networks.time_inference(run, loader, "sequences", with_reading=unread)


_MODES = {"evaluate": _evaluate, "inference_benchmark": _benchmark_inference}
