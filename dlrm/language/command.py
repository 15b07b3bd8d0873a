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
from dlrm.language.data.loader import TextLoader, TextSource
from dlrm.language.data.pairs import SentencePairs, majority_baseline
from dlrm.language.data.squad import (
    SquadFeatures,
    exact_match_and_f1,
    predict_answers,
    write_predictions,
)
from dlrm.language.largest_batch import largest_batch
from dlrm.language.sources import ReadWhenAsked, SameBatch, made_up, open_sources
from dlrm.language.task import PreTraining, QuestionAnswering, SequenceClassification
from dlrm.session import network_flags, network_run
from dlrm.session.all_checkpoints import checkpoints_of, load_tested, name_of, validate_all
from dlrm.session.network_run import EmptyLoader, NetworkRun
from dlrm.session.session import Session
from dlrm.tasks.run import known_checkpoint, with_saved_flags
from dlrm.train.checkpoints.checkpoint import Parameters, load_checkpoint, read_config
from dlrm.train.checkpoints.directory import find_checkpoint
from dlrm.train.checkpoints.pretrained import load_bert_weights
from dlrm.train.config import ExecutionConfig, PrecisionConfig
from dlrm.train.log import Loader, RunLog, Watched
from dlrm.train.optim.network_optimizers import NetworkOptimizerConfig
from dlrm.train.trainer import Trainer

HEADS = ("cls.", "qa_outputs.", "classifier.", "bert.pooler.")  # possibly of another task
_TEST_WINDOW = 50  # test batches within which rows are sorted by length

AnyTask = PreTraining | QuestionAnswering | SequenceClassification


def run(values: Values) -> dict[str, float]:
    """Runs the mode of the flags and returns the summary; see `network_run.run_mode`."""
    uris = bert_flags.FLAGS.uris
    return network_run.run_mode(values, uris, bert_flags.TRAINING, _open, _notices, _MODES)


@dataclass(kw_only=True)
class TextRun(NetworkRun):
    """See `NetworkRun`.

    Attributes:
        train, test: rows; None if there are none.
        scorer: scorer of answers to questions.
        initial: names of weights that `--init_checkpoint` lacks.
    """

    train: TextSource | None = None
    test: TextSource | None = None
    scorer: "AnswerScorer | None" = None
    initial: list[str] = field(default_factory=list)


def _open(values: Values, pipelines: Pipelines) -> TextRun:
    checkpoint = _checkpoint(values)
    known = checkpoint or _own_checkpoint(values["init_checkpoint"])
    known = known_checkpoint(values, known)
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
    network_run.divide(task, values, pipelines, division)
    return TextRun(
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


def _checkpoint(values: Values) -> Path | None:
    path = values["load_checkpoint_path"]
    if path is None or values["mode"] != "evaluate" or _is_one(path):
        return path and find_checkpoint(path)
    return checkpoints_of(path)[0]


def _check_task_of(checkpoint: Path | None, task: str) -> None:
    saved = read_config(checkpoint)["flags"].get("task") if checkpoint else task
    if saved != task:
        raise ValueError(
            f"{checkpoint}: of --task {saved}, and not {task}; --init_checkpoint takes from it "
            "what both networks have"
        )


def _own_checkpoint(path: str | None) -> Path | None:
    """Returns the checkpoint that `--init_checkpoint` names, if it is one of ours."""
    return find_checkpoint(path) if path and Path(path).is_dir() else None


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
    kept = load_bert_weights(task.model, str(own / "dense.safetensors") if own else path, HEADS)
    if kept and values["mode"] == "evaluate":
        raise ValueError(f"{path}: expected all weights of --task {values['task']}, lacks {kept}")
    return kept


def _fingerprint(values: Values, train: TextSource | None) -> dict[str, Any]:
    if values["data"] != "dataset" or train is None:
        return {"data": values["data"], "rows": values["synthetic_dataset_num_entries"]}
    lengths = np.ascontiguousarray(train.lengths, "<i8")
    checksum = f"{zlib.crc32(lengths.data):08x}"
    return {"rows": train.num_samples, "length": train.length, "lengths' CRC-32": checksum}


def _notices(run: TextRun) -> Iterator[str]:
    """Yields notices about the run, and where it differs from what the flags suggest."""
    values = run.values
    shape = values.config(BertConfig).shape
    known = SIZES[values["size"]] == shape
    name = values["size"] if known else f"{shape.num_layers} x {shape.hidden_size}"
    yield network_run.device_line(run, f"BERT {name} for {values['task']}")
    yield from network_run.common_notices(run)
    for name, source in (("train", run.train), ("test", run.test)):
        if source is not None:
            mean = float(np.mean(source.lengths))
            yield (
                f"{name}: {source.num_samples:,} rows of {mean:.0f} tokens on average, "
                f"{source.length} at most"
            )
    if isinstance(run.test, SentencePairs) and run.test.labels is not None:
        majority = majority_baseline(run.test.labels)
        yield (
            f"test: always the more frequent class: accuracy {majority['accuracy']:.6f}  "
            f"f1 {majority['f1']:.6f}"
        )
    if values["length_window"] and run.train and values["data"] == "dataset":
        yield (
            f"note: --length_window {values['length_window']}: rows are sorted by length within "
            "windows of this number of batches, which reduces padding"
        )
    if values["init_checkpoint"]:
        lacking = f", but for {', '.join(run.initial)}" if run.initial else ""
        yield f"weights from {values['init_checkpoint']}{lacking}"
    elif run.checkpoint is None and values["mode"] == "inference_benchmark":
        yield "note: no --load_checkpoint_path, so these are the initial weights"
    elif values["resume"]:
        return  # another line reports the checkpoint
    elif run.checkpoint is None and values["mode"] == "finetune":
        yield "note: no --init_checkpoint, so the training begins with initial weights"
    elif run.checkpoint is None and values["phase"] == 2:
        yield "note: --phase 2 without --load_checkpoint_path begins with initial weights"


def _loader(run: TextRun, source: TextSource, batch_size: int, train: bool) -> Any:
    """Returns the batches; training leaves out a short last one, and graphs have fixed shapes."""
    values, is_graph = run.values, run.values["execution"] == "graph"
    window = values["length_window"] if train else 0 if is_graph else _TEST_WINDOW
    of_one_shape = is_graph or (train and run.pipelines.parts.size > 1)
    loader = TextLoader(
        source,
        batch_size,
        shuffle=train,
        drop_last=train,
        window=window,
        cut=not of_one_shape,
        parts=run.division.accumulation if train else 1,
        seed=values["seed"],
        world=run.pipelines.replicas,
    )
    return SameBatch(loader, run.world.device) if values["data"] == "synthetic" else loader


def _test_loader(run: TextRun) -> Loader:
    if run.test is None:
        return EmptyLoader()
    return _loader(run, run.test, run.values["test_batch_size"], train=False)


def _train(run: TextRun, session: Session) -> dict[str, float]:
    values = run.values
    assert run.train is not None
    train = _loader(run, run.train, run.division.global_batch, train=True)
    config = network_run.train_config(run, len(train))
    num_steps = values["total_steps"] or config.epochs * len(train)
    if values["total_steps"]:
        stop = min(num_steps, config.max_steps or num_steps)
        needed = -(-num_steps // len(train))
        epochs = min(config.epochs, needed) if "epochs" in values.given else needed
        config = replace(config, epochs=epochs, max_steps=stop)
    if (own := config.num_steps(len(train))) < num_steps:
        session.log.line(f"the run has {own} of the {num_steps} steps of the learning rate's curve")

    trainer = network_run.trainer(run, session, train, config, num_steps)
    if session.resume(run, trainer):
        pass  # it has its weights
    elif values["phase"] == 2 and run.checkpoint:
        _begin_phase_2(trainer, run.checkpoint, values["seed"], session.log)
    else:
        session.load_weights(run, trainer.parameters)
    return network_run.train(run, session, trainer, train, _test_loader(run))


def _begin_phase_2(trainer: Trainer, checkpoint: Path, seed: int, log: RunLog) -> None:
    """Loads weights and moments of phase 1; steps and random numbers start anew."""
    load_checkpoint(checkpoint, trainer.parameters, resume=True, world=trainer.world)
    torch.manual_seed(seed + trainer.world.rank)
    for weight, optimizer in trainer.parameters.optimizer_of():
        if isinstance(step := optimizer.state[weight].get("step"), torch.Tensor):
            step.zero_()
    log.line(f"phase 2: weights and moments from {checkpoint}; steps and rates begin anew")


def _evaluate(run: TextRun, session: Session) -> dict[str, float]:
    """Tests a checkpoint, or all checkpoints of a directory; writes the answers of the best."""
    values, path, log = run.values, run.values["load_checkpoint_path"], session.log
    test = _test_loader(run)
    if path is not None and not _is_one(path):
        results = Path(values["results"] or Path(path, "evaluation.csv"))
        names = (values["test_dataset"], values["dataset"], values["data"])
        tested_on = name_of(next(name for name in names if name), _test_facts(run))
        best = validate_all(run.task, test, path, results, log, tested_on)
        summary = best.summary()
        if run.scorer:  # its answers may be those of an earlier evaluation
            load_tested(run.task, best.path, best.weights)
            run.scorer.best = -1.0, {}
            run.task.evaluate(Watched(test, "answers", log.quiet))
    else:
        session.load_weights(run, Parameters(run.task.model))
        metrics = run.task.evaluate(Watched(test, "test", log.quiet))
        summary = {f"test_{name}": value for name, value in metrics.items()}
    answers = run.scorer.best[1] if run.scorer else {}
    if answers:
        file = Path(values["predictions"] or Path(values["log_path"]).with_name("predictions.json"))
        write_predictions(file, answers)
        log.line(f"answers to {len(answers):,} questions: {file}")
    return summary


def _test_facts(run: TextRun) -> dict[str, Any]:
    """Returns everything that the metrics of a test depend on besides the checkpoint."""
    values, test = run.values, run.test
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


def _benchmark_inference(run: TextRun, session: Session) -> dict[str, float]:
    values, world = run.values, run.world
    assert run.test is not None
    session.load_weights(run, Parameters(run.task.model))
    loader = _loader(run, run.test, values["batch_size"] * world.size, train=False)
    unread = values["latency"] == "minimum"
    if unread and isinstance(loader, TextLoader):
        loader = ReadWhenAsked(loader, world.device)
    return network_run.time_inference(run, session.log, loader, "sequences", with_reading=unread)


_MODES = {
    "pretrain": _train,
    "finetune": _train,
    "evaluate": _evaluate,
    "inference_benchmark": _benchmark_inference,
}
