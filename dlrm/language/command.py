"""A run of `dlrm.scripts.bert`: pre-training, fine-tuning, evaluating or timing BERT."""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import zlib
from collections.abc import Iterator
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
from dlrm.language.largest_batch import largest_batch
from dlrm.language.loader import TextLoader, TextSource
from dlrm.language.pairs import SentencePairs, majority_baseline
from dlrm.language.sources import ReadWhenAsked, SameBatch, made_up, open_sources
from dlrm.language.squad import (
    SquadFeatures,
    exact_match_and_f1,
    predict_answers,
    write_predictions,
)
from dlrm.language.task import PreTraining, QuestionAnswering, SequenceClassification
from dlrm.tasks.networks import flags as network_flags, work as networks
from dlrm.tasks.networks.checkpoints import checkpoints_of, load_tested, name_of, validate_all
from dlrm.tasks.networks.work import EmptyLoader, NetworkWork
from dlrm.tasks.run import Run, resumed_checkpoint, with_saved_flags
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.pretrained import load_bert_weights
from dlrm.train.checkpoints.state import Parameters
from dlrm.train.config import ExecutionConfig, PrecisionConfig, TrainConfig
from dlrm.train.log import Loader, RunLog, Watched
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
        window = values["length_window"] if train else 0 if is_graph else _TEST_WINDOW
        of_one_shape = is_graph or (train and self.pipelines.parts.size > 1)
        loader = TextLoader(
            source,
            batch_size,
            shuffle=train,
            drop_last=train,
            window=window,
            cut=not of_one_shape,
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
        if self.values["phase"] == 2 and self.checkpoint:
            _begin_phase_2(trainer, self.checkpoint, self.values["seed"], run.log)
        else:
            super().begin(run, trainer, train)

    def ready(self, run: Run, trainer: Trainer, train: Loader) -> None:
        own, steps = trainer.config.num_steps(len(train)), len(train)
        if own < (num_steps := self.curve_steps(trainer.config, steps)):
            run.log.line(f"the run has {own} of the {num_steps} steps of the learning rate's curve")
        super().ready(run, trainer, train)


def _open(values: Values, pipelines: Pipelines) -> TextWork:
    checkpoint = _checkpoint(values)
    known = checkpoint or _own_checkpoint(values["init_checkpoint"])
    known = resumed_checkpoint(values) or known
    names: tuple[str, ...] = bert_flags.ARCHITECTURE
    if checkpoint and values["mode"] in ("evaluate", "inference_benchmark"):
        names += bert_flags.INPUT
    values = with_saved_flags(values, known, names)
    values, by_recipe = bert_flags.resolved(values)
    values = with_saved_flags(values, known, names)  # and not the recipe's
    bert_flags.check(values)
    world, replicas = pipelines.world, pipelines.replicas
    _check_task_of(checkpoint, values["task"])
    vocab_is_fixed = known is not None or "vocab_size" in {*values.given, *by_recipe}
    sources = open_sources(values, vocab_is_fixed)
    values = sources.values
    scorer = AnswerScorer(sources.test) if isinstance(sources.test, SquadFeatures) else None
    task = make_task(values, replicas, scorer)
    initial = _load_initial(task, values) if values["init_checkpoint"] else []
    if values["batch_size"] == "max" and pipelines.parts.size > 1:
        raise ValueError(
            "--batch_size max is found with whole networks, and --pipeline_splits divides this one "
            f"among {pipelines.parts.size} processes: expected a number"
        )
    values = _with_batch_size(values, task, world)
    if values["batches_per_step"] and values["data"] != "dataset":
        rows = values["batches_per_step"] * values["batch_size"] * replicas.size
        values = Values({**values, "synthetic_dataset_num_entries": rows}, values.given)
        sources = open_sources(values, vocab_is_fixed)
    division = network_flags.divide_batch(values, replicas.size)
    networks.divide(task, values, pipelines, division)
    return TextWork(
        values=values,
        world=world,
        pipelines=pipelines,
        task=task,
        trains=values["mode"] in bert_flags.TRAINING,
        checkpoint=checkpoint,
        dataset=_fingerprint(values, sources.train),
        may_change=bert_flags.RESUME_MAY_CHANGE,
        division=division,
        train=sources.train,
        test=sources.test,
        scorer=scorer,
        initial=initial,
    )


def _checkpoint(values: Values) -> Checkpoint | None:
    path = values["load_checkpoint_path"]
    if path is None or values["mode"] != "evaluate" or _is_one(path):
        return Checkpoint.open(path) if path else None
    return Checkpoint(checkpoints_of(path)[0])


def _check_task_of(checkpoint: Checkpoint | None, task: str) -> None:
    saved = checkpoint.config["flags"].get("task") if checkpoint else task
    if saved != task:
        raise ValueError(
            f"{checkpoint}: of --task {saved}, and not {task}; --init_checkpoint takes from it "
            "what both networks have"
        )


def _own_checkpoint(path: str | None) -> Checkpoint | None:
    """Returns the checkpoint that `--init_checkpoint` names, if it is one of ours."""
    return Checkpoint.open(path) if path and Path(path).is_dir() else None


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
        return Values({**values, "batch_size": int(size)}, values.given)

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

    found = min(gather(largest_batch(step), world))
    return Values({**values, "batch_size": found}, values.given)


def _load_initial(task: AnyTask, values: Values) -> list[str]:
    """Loads `--init_checkpoint`; returns the names of the head's weights that it lacks."""
    path = values["init_checkpoint"]
    own = _own_checkpoint(path)
    kept = load_bert_weights(
        task.model, str(own.path / "dense.safetensors") if own else path, HEADS
    )
    if kept and values["mode"] == "evaluate":
        raise ValueError(f"{path}: expected all weights of --task {values['task']}, lacks {kept}")
    return kept


def _fingerprint(values: Values, train: TextSource | None) -> dict[str, Any]:
    if values["data"] != "dataset" or train is None:
        return {"data": values["data"], "rows": values["synthetic_dataset_num_entries"]}
    lengths = np.ascontiguousarray(train.lengths, "<i8")
    checksum = f"{zlib.crc32(lengths.data):08x}"
    return {"rows": train.num_samples, "length": train.length, "lengths' CRC-32": checksum}


def _begin_phase_2(trainer: Trainer, checkpoint: Checkpoint, seed: int, log: RunLog) -> None:
    """Loads weights and moments of phase 1; steps and random numbers start anew."""
    checkpoint.load(trainer.parameters, trainer.world, resume=True)
    torch.manual_seed(seed + trainer.world.rank)
    for weight, optimizer in trainer.parameters.optimizer_of():
        if isinstance(step := optimizer.state[weight].get("step"), torch.Tensor):
            step.zero_()
    log.line(f"phase 2: weights and moments from {checkpoint}; steps and rates begin anew")


def _evaluate(run: Run) -> dict[str, float]:
    """Tests a checkpoint, or all checkpoints of a directory; writes the answers of the best."""
    values, path, work, log = run.values, run.values["load_checkpoint_path"], run.work, run.log
    assert isinstance(work, TextWork)
    test = work.test_loader()
    if path is not None and not _is_one(path):
        results = Path(values["results"] or Path(path, "evaluation.csv"))
        names = (values["test_dataset"], values["dataset"], values["data"])
        tested_on = name_of(next(name for name in names if name), _test_facts(work))
        best = validate_all(work.task, test, path, results, log, tested_on)
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
