"""Trains, tests or times a DLRM: python -m dlrm.scripts.main --mode train ..."""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import functools
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from dlrm import ops
from dlrm.data.clicks.batch import Dataset
from dlrm.data.clicks.datasets import Datasets
from dlrm.data.clicks.layout import TRANSFORM, WEIGHT_FILE
from dlrm.data.transform.stored import facts_file
from dlrm.data.transform.transform import Transform
from dlrm.distributed import World, agreed
from dlrm.metrics.clicks import one_class_note
from dlrm.metrics.table import line_of, metrics_note
from dlrm.scripts.common import dlrm_flags, session
from dlrm.scripts.common import run as driver
from dlrm.scripts.common.auto_flags import takes_recipe, with_recipe
from dlrm.scripts.common.config_flags import Values
from dlrm.scripts.common.dlrm_setup import DLRMSetup, check, own_part, set_up, training
from dlrm.scripts.common.inference_benchmark import inference_benchmark
from dlrm.scripts.common.run import Watch
from dlrm.scripts.common.seeds import train_seeds
from dlrm.serving.network.recalibration import load_recalibration
from dlrm.tasks.bad_rows import bad_ids_named, check_scores
from dlrm.tasks.click_training import set_aside_note
from dlrm.tasks.recommendation import Batches, Recommendation
from dlrm.train.checkpoints.checkpoint import Parameters, averaged, load_checkpoint
from dlrm.train.execution import why_not_lazy
from dlrm.train.log import RunLog, Watched
from dlrm.train.precision import PrecisionConfig
from dlrm.train.schedule import idle_steps_note, short_run_advice
from dlrm.train.trainer import Trainer


def main(
    arguments: list[str], defaults: Mapping[str, Any] | None = None, doc: str | None = __doc__
) -> None:
    """Runs a command line and ends the process.

    Args:
        arguments: arguments after the command's name.
        defaults: defaults that replace those of flags.
        doc: text at the start of the help.
    """
    flags = dlrm_flags.make_flags(defaults)
    parse = functools.partial(dlrm_flags.parse, flags=flags)
    driver.main(arguments, parse, lambda: f"{doc}\n{flags.help()}", run)


def run(values: Values) -> dict[str, float]:
    """Runs the mode of the flags and returns the summary; see `dlrm.scripts.common.run`."""
    if values["seeds"]:
        return train_seeds(values, run)
    may_differ = dlrm_flags.RANKS_MAY_DIFFER
    values, chosen = with_recipe(values)
    notices = functools.partial(_notices, chosen=chosen)
    return driver.run(values, set_up, notices, _act, check, may_differ)


def _notices(setup: DLRMSetup, chosen: str | None) -> Iterator[str]:
    """Returns lines about the run, and about flags that are accepted but have no effect.

    Args:
        setup: data and model of the run.
        chosen: a line about the choices of a recipe.
    """
    if chosen:
        yield chosen
    values, device = setup.values, setup.world.device
    if "output_dir" in values.given:
        yield "note: --output_dir is not used; checkpoints go to --save_checkpoint_path"
    if setup.unrecorded:
        yield (
            f"note: --cuda_graphs is not used; {setup.unrecorded}. Steps run eagerly, with the "
            "same results"
        )
    yield from _execution_notices(setup)
    if not setup.task.has_clicks:
        yield "note: the targets are fractions and no clicks, so tests report no AUC, the loss only"
    is_half = values.config(PrecisionConfig).dtype(device) == torch.float16
    if "loss_scale" in values.given and not is_half:
        yield "note: --loss_scale is not used; it is for fp16 only"
    if setup.trains and values["overlap"] == "stale":
        yield (
            "note: --overlap stale: rows are looked up before the update of the step before, but "
            "for the first step of an epoch and after a checkpoint; results differ from those of "
            "--overlap none"
        )
    aside = set_aside_note(setup.whole, keeps_best=bool(values["save_checkpoint_path"]))
    yield from filter(None, [*(setup.note or "").split("\n"), aside])
    if _has_weights(values, "train" if setup.trains else "test"):
        yield _said_of_weights(values)
    if (kept := _kept_negatives(values["dataset"])) < 1:
        yield (
            f"note: training rows are {kept:g} of those with label 0, so probabilities and "
            "calibration below are too high; `dlrm.scripts.evaluate --sampling_rate "
            f"{kept:g}` corrects them"
        )
    varies = setup.trains and setup.task.updates_vary(dlrm_flags.optimizer_config(values))
    if varies and not values["deterministic"]:
        yield session.VARIES
    if setup.adopted:
        yield setup.adopted
    if setup.checkpoint and (made := load_recalibration(setup.checkpoint)):
        yield _said_of_recalibration(setup, made.kind)
    yield _describe(setup.task, setup.whole, setup.world)


def _has_weights(values: Values, split: str) -> bool:
    return bool(values["dataset"]) and Path(values["dataset"], split, WEIGHT_FILE).is_file()


def _said_of_weights(values: Values) -> str:
    if not values["sample_weights"]:
        return "note: --nosample_weights: every row counts once, though the dataset has weights"
    return "note: the dataset's sample weights weight the loss and the metrics of tests"


def _said_of_recalibration(setup: DLRMSetup, kind: str) -> str:
    if not setup.trains:
        return (
            f"note: scores are without the recalibration ({kind}) of {setup.checkpoint}; "
            "dlrm.scripts.evaluate and dlrm.scripts.predict apply it"
        )
    return (
        f"note: the recalibration ({kind}) of {setup.checkpoint} is not carried over: it "
        "fits the scores of those weights; dlrm.scripts.evaluate --recalibrated_checkpoint makes "
        "one for the trained model"
    )


def _kept_negatives(dataset: str | None) -> float:
    """Returns the share of training rows with label 0 that preprocessing kept."""
    folder = Path(dataset, TRANSFORM) if dataset else None
    if folder is None or not facts_file(folder).is_file():
        return 1.0
    return Transform.load(folder).keep_negatives


def _execution_notices(setup: DLRMSetup) -> Iterator[str]:
    values = setup.values
    if setup.task.execution == "lazy":
        yield "--execution lazy: torch's lazy backend runs the MLPs and the interaction"
    elif values["execution"] == "lazy":
        yield (
            f"--execution lazy: torch's lazy backend cannot run: {why_not_lazy(setup.world.device)}"
            "; so the step is compiled (as graph)"
        )
    if values["execution"] != "eager" and "optimized_mlp" in values.given:
        yield f"note: --optimized_mlp is not used; --execution {values['execution']} chooses"


def _describe(task: Recommendation, datasets: Datasets, world: World) -> str:
    config, held = task.model.config, {id(weight) for weight, _ in task.table_parameters()}
    rows = sum(config.embedding_rows)
    dense = sum(p.numel() for p in task.model.parameters() if id(p) not in held)
    weights = dense + rows * (config.embedding_dim + config.wide)
    splits = {"train": 0, "test": 0, "validation": 0, **datasets.rows()}  # in this order
    shown = ", ".join(f"{split} {count:,}" for split, count in splits.items())
    device = world.device
    if device == "cpu":
        native = ops.instruction_set() if ops.native_available() else "plain torch"
        device += f" ({torch.get_num_threads()} threads, operators: {native})"
    if world.size > 1:
        counts = ", ".join(str(len(tables)) for tables in task.model.tables_by_rank)
        device += f"  processes: {world.size}, with {counts} tables"
    return (
        f"device: {device}  parameters: {weights:,} ({len(datasets.train.table_sizes)} tables, "
        f"{rows:,} rows)  rows: {shown}"
    )


def _act(setup: DLRMSetup, watch: Watch) -> dict[str, float]:
    with bad_ids_named(setup.whole, setup.data_name):
        datasets = own_part(setup)
        if setup.trains:
            return _train(setup, datasets, watch)
        _load_weights(setup, watch.log)
        if setup.values["mode"] == "test":
            return _test(setup, datasets.test, watch)
        return inference_benchmark(setup.task, datasets.test, setup.values, watch.log)


def _train(setup: DLRMSetup, datasets: Datasets, watch: Watch) -> dict[str, float]:
    values, task, chosen = setup.values, setup.task, training(setup.values)
    arguments = chosen.trainer_arguments(task, datasets.train)
    trainer = driver.make_trainer(setup, watch, **arguments)
    batches = chosen.batches(datasets, task)

    def begin(trainer: Trainer) -> None:
        if setup.checkpoint:
            with_state = values["load_optimizer_state"]
            load_checkpoint(
                setup.checkpoint, trainer.parameters, world=setup.world, optimizers=with_state
            )
            loaded = "weights and optimizer state" if with_state else "weights"
            watch.log.line(f"{loaded} from {setup.checkpoint}; the run starts at step 0")
        choices = {"lr", *dlrm_flags.ADAM_SWITCHES, *dlrm_flags.ADAM_SWITCHES.values()}
        by_default = not choices & values.given
        num_steps = chosen.train.num_steps(len(batches.train))
        recipe = takes_recipe(values)
        if advice := short_run_advice(chosen.schedule, num_steps, by_default, recipe):
            watch.log.line(f"note: {advice}")
        if idle := idle_steps_note(chosen.schedule, num_steps):
            watch.log.line(f"note: {idle}")

    summary: dict[str, Any] = driver.train(setup, watch, trainer, begin, *batches)
    roles = batches.roles
    # The trainer checks the scores of other tests.
    check_scores(task, setup.whole, setup.data_name, roles.reports or roles.chooses)
    if note := metrics_note(summary):
        watch.log.line(note)
    if values["recipe"] is not None or values["set_aside"]:  # NVIDIA's summary has no roles
        summary |= roles.facts()
    return summary


def _load_weights(setup: DLRMSetup, log: RunLog) -> None:
    parameters = averaged(Parameters(setup.task.model, setup.task.table_parameters()))
    if not driver.load_weights(setup, parameters, log):
        log.line("note: no --load_checkpoint_path, so these are the initial weights")


def _test(setup: DLRMSetup, data: Dataset, watch: Watch) -> dict[str, float]:
    task, log = setup.task, watch.log
    test = Batches(data, setup.world.device, slots=task.slots())
    with agreed(setup.world, ValueError):
        if not test.num_samples:
            raise ValueError(f"{setup.values['dataset']}: the test split has no rows")
    began = time.perf_counter()
    metrics = task.evaluate(Watched(test, "test", log.quiet, lambda: watch.dog.beat(0)))
    seconds = time.perf_counter() - began
    check_scores(task, setup.whole, setup.data_name, "test")
    log.line(f"Finished testing: {line_of(metrics)}")
    weighted = setup.values["sample_weights"] and _has_weights(setup.values, "test")
    for note in (metrics_note(metrics), one_class_note(metrics, test.num_samples, weighted)):
        if note:
            log.line(note)
    return metrics | {
        "avg_inference_latency": seconds / len(test),
        "average_test_throughput": test.num_samples / seconds,
    }


def start() -> None:
    main(sys.argv[1:])


if __name__ == "__main__":
    start()
