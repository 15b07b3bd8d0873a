"""A run of `main` or `dist_main`: training, testing or timing a DLRM."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dlrm import ops
from dlrm.command_line import shell_line
from dlrm.data.clicks.config import DataConfig
from dlrm.data.layout import TRANSFORM, WEIGHT_FILE
from dlrm.data.transform.stored import facts_file
from dlrm.data.transform.transform import Transform
from dlrm.distributed import World, agreed
from dlrm.flags import Values
from dlrm.metrics.table import line_of, metrics_note, one_class_note
from dlrm.remote.config import CacheConfig
from dlrm.scripts.common.auto_flags import takes_recipe, with_recipe
from dlrm.scripts.common.dlrm_flags import CommandConfig
from dlrm.scripts.common.inference_benchmark import inference_benchmark
from dlrm.scripts.common.seeds import train_seeds
from dlrm.serving.loading import load_model
from dlrm.serving.network.recalibration import load_recalibration
from dlrm.session.session import VARIES, Session, held_checkpoint
from dlrm.settings import resumable_of, uris_of
from dlrm.tasks.bad_rows import bad_ids_named, check_scores
from dlrm.tasks.click_run import ClickRun
from dlrm.tasks.config import CLICK_CONFIGS, ClickConfig
from dlrm.tasks.continuing import check_continued, with_carried
from dlrm.tasks.recommendation import ClickLoader
from dlrm.train.checkpoints.checkpoint import Parameters, averaged, load_checkpoint
from dlrm.train.log import Watched
from dlrm.train.reports.console import Line
from dlrm.train.schedule import idle_steps_note, short_run_advice
from dlrm.train.trainer import Trainer

_RESUMABLE = resumable_of(CommandConfig, CacheConfig)
_URIS = uris_of(CommandConfig, *(config for _, config in CLICK_CONFIGS))
# Flags in which the ranks of a run may differ: locations of the same data.
RANKS_MAY_DIFFER = frozenset(
    [
        *("dataset", "synthetic_dataset_dir", "log_path", "output_dir"),
        *("cache_dir", "cache_gib"),
    ]
)


def run(values: Values) -> dict[str, float]:
    """Runs the mode of the flags and returns the summary, on every rank.

    Raises:
        ValueError, OSError, FloatingPointError: the user's error; the message names it.
        StoppedError: the training was stopped by a signal.
    """
    check_continued(values)
    if values["seeds"]:
        return train_seeds(values, _run)
    return _run(values)


def _run(values: Values) -> dict[str, float]:
    chosen: list[Line] = []

    def complete(values: Values, world: World) -> Values:
        filled, line = with_recipe(values)
        chosen.extend([line] if line else [])
        _check(filled := with_carried(filled), world)
        return filled

    trains = values["mode"] == "train"
    with Session(values, RANKS_MAY_DIFFER, _URIS, trains, complete) as session:
        values, world = session.values, session.world
        torch.manual_seed(values["seed"] + world.rank)  # of dropout, which differs between ranks
        path = values["load_checkpoint_path"] or values["continue_from"]
        held = held_checkpoint(path, world, newest=values["continue_from"] is not None)
        checkpoint = session.at_the_end.enter_context(held)
        click_run = ClickRun.open(values, world, checkpoint, values["mode"], _RESUMABLE)
        held = held_checkpoint(values["distill"], world)
        if teacher := session.at_the_end.enter_context(held):
            click_run.distill(teacher, load_model)
        session.watch(click_run, _notices(click_run, *chosen))
        with bad_ids_named(click_run.whole, click_run.data_name):
            summary = _MODES[values["mode"]](click_run, session)
        session.log.summary(summary)
    return summary


def _check(values: Values, world: World) -> None:
    """Raises ValueError for flags that are impossible or contradict each other."""
    ClickConfig.from_values(values)
    mode = values["mode"]
    if values["auc_threshold"] is not None and not values.config(DataConfig).has_clicks:
        raise ValueError(
            f"--auc_threshold {values['auc_threshold']}: the targets of --dataset_type "
            f"{values['dataset_type']} are fractions, of which there is no AUC"
        )
    files = values["table_files"]
    if files is not None and values["async_checkpoint"]:
        raise ValueError(
            f"--table_files {files} contradicts --async_checkpoint, which copies tables in memory"
        )
    if mode == "inference_benchmark" and world.size > 1:
        raise ValueError(f"--mode inference_benchmark: expected one process, got {world.size}")
    if mode != "train" and values["resume"]:
        raise ValueError(f"--resume contradicts --mode {mode}: only training continues")
    if values["resume"] and not values["save_checkpoint_path"]:
        raise ValueError("--resume needs --save_checkpoint_path, where the checkpoints are")
    if values["checkpoint_freq"] and not values["save_checkpoint_path"]:
        freq = values["checkpoint_freq"]
        raise ValueError(f"--checkpoint_freq {freq} needs --save_checkpoint_path")
    if values["load_optimizer_state"] and (mode != "train" or not values["load_checkpoint_path"]):
        raise ValueError(
            "--load_optimizer_state: expected --mode train and --load_checkpoint_path, whose state "
            "is loaded"
        )
    if values["early_stop"] and not values["save_checkpoint_path"]:
        raise ValueError(
            f"--early_stop {values['early_stop']} needs --save_checkpoint_path, which the best "
            "weights are restored from"
        )


def _notices(run: ClickRun, chosen: Line | None = None) -> Iterator[str | Line]:
    """Returns lines about the run, and about flags that are accepted but have no effect."""
    if chosen:
        yield chosen
    values, device = run.values, run.world.device
    if "output_dir" in values.given:
        yield "note: --output_dir is not used; checkpoints go to --save_checkpoint_path"
    if not run.task.has_clicks:
        yield "note: the targets are fractions and no clicks, so tests report no AUC, the loss only"
    is_half = run.config.precision.dtype(device) == torch.float16
    if "loss_scale" in values.given and not is_half:
        yield "note: --loss_scale is not used; it is for fp16 only"
    yield from run.notes
    if _has_weights(values, "train" if run.trains else "test"):
        yield _said_of_weights(values)
    if (kept := _kept_negatives(values["dataset"])) < 1:
        yield (
            f"note: training rows are {kept:g} of those with label 0, so probabilities and "
            "calibration below are too high; `dlrm evaluate --sampling_rate "
            f"{kept:g}` corrects them"
        )
    varies = run.trains and run.task.updates_vary(run.config.optimizers)
    if varies and not values["deterministic"]:
        yield VARIES
    if run.checkpoint and (made := load_recalibration(run.checkpoint)):
        yield _said_of_recalibration(run, made.kind)
    yield _describe(run)


def _has_weights(values: Values, split: str) -> bool:
    return bool(values["dataset"]) and Path(values["dataset"], split, WEIGHT_FILE).is_file()


def _said_of_weights(values: Values) -> str:
    if not values["sample_weights"]:
        return "note: --nosample_weights: every row counts once, though the dataset has weights"
    return "note: the dataset's sample weights weight the loss and the metrics of tests"


def _said_of_recalibration(run: ClickRun, kind: str) -> str:
    if run.continued:
        return (
            f"note: the recalibration ({kind}) of {run.checkpoint} is carried over to this run's "
            "checkpoints; tests of the training are without it"
        )
    if not run.trains:
        return (
            f"note: scores are without the recalibration ({kind}) of {run.checkpoint}; "
            "dlrm evaluate and dlrm predict apply it"
        )
    return (
        f"note: the recalibration ({kind}) of {run.checkpoint} is not carried over: it "
        "fits the scores of those weights; dlrm evaluate --recalibrated_checkpoint makes "
        "one for the trained model"
    )


def _kept_negatives(dataset: str | None) -> float:
    """Returns the share of training rows with label 0 that preprocessing kept."""
    folder = Path(dataset, TRANSFORM) if dataset else None
    if folder is None or not facts_file(folder).is_file():
        return 1.0
    return Transform.load(folder).keep_negatives


def _describe(run: ClickRun) -> Line:
    task, datasets, world = run.task, run.whole, run.world
    config, held = task.model.config, {id(weight) for weight, _ in task.table_parameters()}
    sizes = config.embedding_rows
    rows = sum(sizes)
    dense = sum(p.numel() for p in task.model.parameters() if id(p) not in held)
    weights = dense + rows * (config.embedding_dim + config.wide)
    splits = {"train": 0, "test": 0, "validation": 0, **datasets.rows()}  # in this order
    shown = ", ".join(f"{split} {count:,}" for split, count in splits.items())
    device = world.device
    if device == "cpu":
        native = ops.instruction_set() if ops.native_available() else "plain torch"
        device += f" ({torch.get_num_threads()} threads, operators: {native})"
    if world.size > 1:
        counts = ", ".join(str(len(own)) for own in task.model.placement.tables_by_rank())
        device += f"  processes: {world.size}, with {counts} tables"
    train, steps = datasets.train, len(datasets.train)
    total = run.config.train.num_steps(steps)
    epochs = f" ({_counted(f'{total / steps:.3g}', 'epoch')})" if total >= steps else ""
    model = f"{weights:,} parameters, {_place(world)}"
    shortly = {
        "train": f"train: {train.num_samples:,} rows, {total:,} steps of "
        f"{run.values['batch_size']:,} rows{epochs}, {model}",
        "test": f"test: {splits['test']:,} rows, {model}",
    }
    return Line(
        f"device: {device}  parameters: {weights:,} ({len(config.embedding_rows)} tables, "
        f"{rows:,} rows)  rows: {shown}",
        shortly.get(run.values["mode"]),
    )


def _place(world: World) -> str:
    """Returns device and processes in a few words."""
    own = _counted(str(torch.get_num_threads()), "thread")
    threads = f" ({own})" if world.device == "cpu" else ""
    processes = f", {world.size} processes" if world.size > 1 else ""
    return f"{world.device}{threads}{processes}"


def _counted(count: str, name: str) -> str:
    return f"{count} {name}{'' if count == '1' else 's'}"


def _train(run: ClickRun, session: Session) -> dict[str, float]:
    datasets, values = run.own_part(), run.values
    trainer = Trainer(
        log=session.log,
        checkpoints=session.checkpoints,
        after_step=session.after_step,
        **run.trainer_arguments(datasets.train),
    )
    batches = run.batches(datasets)
    if not session.resume(run, trainer):
        _begin(run, session, trainer, len(batches.train))
    summary: dict[str, Any] = session.train(run, trainer, *batches)
    roles = batches.roles
    # The trainer checks the scores of other tests.
    check_scores(run.task, run.whole, run.data_name, roles.reports or roles.chooses)
    if note := metrics_note(summary):
        session.log.line(note, short="")
    session.log.console.suggest(_next_commands(values))
    if values["recipe"] is not None or values["set_aside"]:  # NVIDIA's summary has no roles
        summary |= roles.facts()
    return summary


def _next_commands(values: Values) -> list[str]:
    """Returns commands for the trained model."""
    model, data = values["save_checkpoint_path"], values["dataset"]
    if not model or not data:
        return []
    read = ["--checkpoint", model]
    return [
        shell_line(["dlrm", "evaluate", *read, "--dataset", data]),
        shell_line(["dlrm", "predict", *read, "--input", data, "--output", "scores.npy"]),
        shell_line(["dlrm", "export", *read]),
    ]


def _begin(run: ClickRun, session: Session, trainer: Trainer, steps_per_epoch: int) -> None:
    """Loads the weights that a new run begins with, and reports a schedule that does not fit."""
    values, line, schedule = run.values, session.log.line, run.config.schedule
    if run.continued:
        line(run.begin_where_another_ended(trainer))
        return
    if run.checkpoint:
        with_state = values["load_optimizer_state"]
        load_checkpoint(run.checkpoint, trainer.parameters, world=run.world, optimizers=with_state)
        loaded = "weights and optimizer state" if with_state else "weights"
        line(f"{loaded} from {run.checkpoint}; the run starts at step 0")
    choices = {"lr", "embedding_optimizer", "mlp_optimizer"}
    by_default = not choices & values.given
    num_steps = run.config.train.num_steps(steps_per_epoch)
    recipe = takes_recipe(values)
    if advice := short_run_advice(schedule, num_steps, by_default, recipe):
        line(f"note: {advice}")
    if idle := idle_steps_note(schedule, num_steps):
        line(f"note: {idle}")


def _load_weights(run: ClickRun, session: Session) -> None:
    parameters = averaged(Parameters(run.task.model, run.task.table_parameters()))
    if not session.load_weights(run, parameters):
        session.log.line("note: no --load_checkpoint_path, so these are the initial weights")


def _test(run: ClickRun, session: Session) -> dict[str, float]:
    data, task, log = run.own_part().test, run.task, session.log
    _load_weights(run, session)
    test = ClickLoader(data, run.world.device)
    with agreed(run.world, ValueError):
        if not test.num_samples:
            raise ValueError(f"{run.values['dataset']}: the test split has no rows")
    began = time.perf_counter()
    metrics = task.evaluate(Watched(test, "test", log.quiet))
    seconds = time.perf_counter() - began
    check_scores(task, run.whole, run.data_name, "test")
    log.line(f"Finished testing: {line_of(metrics)}", short="")
    if note := metrics_note(metrics):
        log.line(note, short="")
    weighted = run.values["sample_weights"] and _has_weights(run.values, "test")
    if note := one_class_note(metrics, test.num_samples, weighted):
        log.line(note)
    return metrics | {
        "avg_inference_latency": seconds / len(test),
        "average_test_throughput": test.num_samples / seconds,
    }


def _time(run: ClickRun, session: Session) -> dict[str, float]:
    test = run.own_part().test
    _load_weights(run, session)
    return inference_benchmark(run.task, test, run.values, session.log)


_MODES = {"train": _train, "test": _test, "inference_benchmark": _time}
