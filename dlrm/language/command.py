"""A run of `dlrm.scripts.bert`: pre-training, fine-tuning, evaluating or timing BERT."""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlrm.distributed import Pipelines, World, gather
from dlrm.files import MANIFEST
from dlrm.flags import Values
from dlrm.language import flags as bert_flags
from dlrm.language.bert import SIZES, BertConfig
from dlrm.language.loader import TextLoader, TextSource
from dlrm.language.pairs import SentencePairs, majority_baseline
from dlrm.language.sources import ReadWhenAsked, made_up, open_sources
from dlrm.language.squad import (
    SquadFeatures,
    exact_match_and_f1,
    predict_answers,
    write_predictions,
)
from dlrm.language.task import PreTraining, QuestionAnswering, SequenceClassification
from dlrm.tasks.networks import work as networks
from dlrm.tasks.networks.checkpoints import checkpoints_of, load_tested
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

AnyTask = PreTraining | QuestionAnswering | SequenceClassification


def run(values: Values) -> dict[str, float]:
    """Runs the mode of the flags and returns the summary; see `networks.run_mode`."""
    return networks.run_mode(values, bert_flags.FLAGS.uris, bert_flags.TRAINING, _open, _MODES)


@dataclass(kw_only=True)
class TextWork(NetworkWork):
    """BERT with its data; see `NetworkWork`.

    Attributes:
        train, test: rows; None if there are none.
        scorer: scorer of answers to questions.
        initial: names of weights that `--init_checkpoint` lacks.
    """

    train: TextSource | None = None
    test: TextSource | None = None
    scorer: "AnswerScorer | None" = None
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
        if isinstance(self.test, SentencePairs) and self.test.labels is not None:
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
        elif self.checkpoint is None and values["mode"] == "inference_benchmark":
            yield "note: no --load_checkpoint_path, so these are the initial weights"
        elif values["resume"]:
            return  # another line reports the checkpoint
        elif self.checkpoint is None and values["mode"] == "finetune":
            yield "note: no --init_checkpoint, so the training begins with initial weights"
        elif self.checkpoint is None and values["phase"] == 2:
            yield "note: --phase 2 without --load_checkpoint_path begins with initial weights"

    def loaders(self) -> tuple[Loader, Loader]:
        assert self.train is not None
        train = self.loader(self.train, self.division.global_batch, train=True)
        return train, self.test_loader()

    def test_loader(self) -> Loader:
        """Returns the batches of the test rows, if there are some."""
        if self.test is None:
            return EmptyLoader()
        return self.loader(self.test, self.values["test_batch_size"], train=False)

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
    checkpoint = own = None
    if path is not None and values["mode"] == "evaluate" and not _is_one(path):
        checkpoint = Checkpoint(checkpoints_of(path)[0])
    elif path:
        checkpoint = Checkpoint.open(path)
    if initial_path and Path(initial_path).is_dir():
        own = Checkpoint.open(initial_path)
    known = resumed_checkpoint(values) or checkpoint or own
    names: tuple[str, ...] = bert_flags.ARCHITECTURE
    if checkpoint and values["mode"] in ("evaluate", "inference_benchmark"):
        names += bert_flags.INPUT
    values = with_saved_flags(values, known, names)
    values, by_recipe = bert_flags.resolved(values)
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
    scorer = AnswerScorer(test) if isinstance(test, SquadFeatures) else None
    task = make_task(values, pipelines.replicas, scorer)
    lacking: list[str] = []
    if initial_path:
        file = str(own.path / "dense.safetensors") if own else initial_path
        lacking = load_bert_weights(task.model, file, HEADS)
    if lacking and values["mode"] == "evaluate":
        raise ValueError(
            f"{initial_path}: expected all weights of --task {values['task']}, lacks {lacking}"
        )
    if values["batch_size"] == "max" and pipelines.parts.size > 1:
        raise ValueError(
            "--batch_size max is found with whole networks, and --pipeline_splits divides this one "
            f"among {pipelines.parts.size} processes: expected a number"
        )
    values = _with_batch_size(values, task, pipelines.world)
    if values["batches_per_step"] and values["data"] != "dataset":
        rows = values["batches_per_step"] * values["batch_size"] * pipelines.replicas.size
        values = values.replaced({"synthetic_dataset_num_entries": rows})
        train, test, values = open_sources(values, vocab_is_fixed)
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
        scorer=scorer,
        initial=lacking,
    )


def _is_one(path: str) -> bool:
    return Path(path, MANIFEST).is_file()


def make_task(
    values: Values, world: World = World(), scorer: "AnswerScorer | None" = None
) -> AnyTask:
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
        return QuestionAnswering(config, scorer, **common)
    return SequenceClassification(config, **common)


class AnswerScorer:
    """Exact match and F1 of answers to the questions of a test set.

    Attributes:
        best: f1 of the best answers so far, and these answers by question.
    """

    def __init__(self, features: SquadFeatures):
        self._features = features
        self.best: tuple[float, dict[str, str]] = -1.0, {}

    def __call__(self, starts: np.ndarray, ends: np.ndarray) -> dict[str, float]:
        missing = ((0, 0), (0, self._features.length - starts.shape[1]))
        both = (np.pad(logits, missing, constant_values=-np.inf) for logits in (starts, ends))
        answers = predict_answers(self._features, *both)
        metrics = exact_match_and_f1(self._features.questions, answers)
        if metrics["f1"] > self.best[0]:
            self.best = metrics["f1"], answers
        return metrics


def _with_batch_size(values: Values, task: AnyTask, world: World) -> Values:
    """Returns the flags with a number for `--batch_size max`, the largest that fits all devices."""
    size = values["batch_size"]
    if size != "max":
        return values.replaced({"batch_size": int(size)})

    def step(rows: int) -> None:
        """Runs the parts of a step that need memory, with a rate of 0, so weights stay the same."""
        (batch,) = TextLoader(made_up(values, rows), rows, cut=False).batches()
        batch = batch.map(lambda tensor: tensor.to(world.device))
        if values["mode"] in bert_flags.TRAINING:
            optimizers = task.optimizers(values.config(NetworkOptimizerConfig))
            task.loss(batch).backward()
            for optimizer in optimizers:
                optimizer.step()
            task.model.zero_grad(set_to_none=True)
        else:
            with torch.inference_mode():
                task.predict(batch)

    return values.replaced({"batch_size": min(gather(largest_batch(step), world))})


def largest_batch(compute: Callable[[int], object], most: int = 1 << 16) -> int:
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
    """Tests a checkpoint, or all checkpoints of a directory; writes the answers of the best."""
    values, path, work, log = run.values, run.values["load_checkpoint_path"], run.work, run.log
    assert isinstance(work, TextWork)
    test = work.test_loader()
    if path is not None and not _is_one(path):
        names = (values["test_dataset"], values["dataset"], values["data"])
        data = next(name for name in names if name)
        best = work.test_all(run, path, "evaluation.csv", data, _test_facts(work))
        summary = best.summary()
        if work.scorer:  # its answers may be those of an earlier evaluation
            load_tested(work.task, best.path, best.weights)
            work.scorer.best = -1.0, {}
            work.task.evaluate(Watched(test, "answers", log.quiet))
    else:
        run.load_weights(Parameters(work.task.model))
        metrics = work.task.evaluate(Watched(test, "test", log.quiet))
        summary = {f"test_{name}": value for name, value in metrics.items()}
    answers = work.scorer.best[1] if work.scorer else {}
    if answers:
        file = Path(values["predictions"] or Path(values["log_path"]).with_name("predictions.json"))
        write_predictions(file, answers)
        log.line(f"answers to {len(answers):,} questions: {file}")
    return summary


def _test_facts(work: TextWork) -> dict[str, Any]:
    """Returns everything that the metrics of a test depend on besides the checkpoint."""
    values, test = work.values, work.test
    facts = {flag: values[flag] for flag in (*bert_flags.ARCHITECTURE, *bert_flags.INPUT)}
    if isinstance(test, SquadFeatures):
        facts["questions"] = test.questions
    if test is not None:
        some = np.linspace(0, test.num_samples - 1, min(test.num_samples, 1024)).astype(np.int64)
        read = test.read(some)
        tensors = (read.ids, read.segments, read.labels, read.masked_ids)
        sums = [zlib.crc32(t.contiguous().numpy().data) for t in tensors if t is not None]
        facts["rows"] = [test.num_samples, zlib.crc32(np.asarray(test.lengths, "<i8").data), *sums]
    return facts


def _benchmark_inference(run: Run) -> dict[str, float]:
    values, world, work = run.values, run.world, run.work
    assert isinstance(work, TextWork)
    assert work.test is not None
    run.load_weights(Parameters(work.task.model))
    loader = work.loader(work.test, values["batch_size"] * world.size, train=False)
    unread = values["latency"] == "minimum"
    if unread and isinstance(loader, TextLoader):
        loader = ReadWhenAsked(loader, world.device)
    return networks.time_inference(run, loader, "sequences", with_reading=unread)


_MODES = {"evaluate": _evaluate, "inference_benchmark": _benchmark_inference}
