"""Searches training settings by successive halving, on the training rows of a dataset alone.

    dlrm tune --dataset DIR --output tuning [--trials 27] [--folds 5]
    dlrm train --dataset DIR --flagfile tuning/best.flags --save_checkpoint_path run

Trials are judged on held-out training rows; test and validation rows are never opened. The first
trial is `--recipe auto`, and Optuna chooses the settings of the others, which end early if they are
behind after a share of their steps. The same command resumes a search that was stopped or killed,
several at the same time share it, and more --trials extend it. --space names a YAML file such as:

    lr: {low: 0.0005, high: 0.004, log: true}   # of a range, evenly in its logarithm
    embedding_dim: [8, 16, 32]                  # one of these
    schedule: linear                            # always this
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import json
import math
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from dlrm.command_line import (
    aligned,
    flags_of,
    free_name,
    importing,
    missing_extra,
    say,
    shell_line,
    text_of,
)
from dlrm.documents import brief, read_yaml
from dlrm.files import errors_named, make_directories, write_atomically
from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.limits import check_processes
from dlrm.locks import lock, new_suffix, owned_directory, remove_abandoned
from dlrm.machine import available_cores
from dlrm.metrics.table import HIGHER, METRICS, SHOWN, cost
from dlrm.scripts.common.table_flags import say_progress
from dlrm.settings import REQUIRED, check_settings, setting

if TYPE_CHECKING:
    import numpy as np
    import optuna

    from dlrm.data.clicks.feature_spec import FeatureSpec
    from dlrm.tasks.recipe import DatasetFacts

# Metrics of which either higher or lower values are better.
_JUDGES = [name for name in SHOWN if math.isinf(METRICS[name].ideal)]
_JOURNAL, _TABLE, _FLAGS, _FOLDS = "study.journal", "tuning.txt", "best.flags", ".folds-"
_COMPARED = ("folds", "held_out", "order", "metric", "seed", "eta", "rungs")
# Settings of the search itself, or that need checkpoints. A teacher may know the held-out rows.
_NOT_SEARCHED = {
    *("distill", "distill_weight", "seed", "dataset_subset", "early_stop", "auc_threshold"),
    *("verify_data", "set_aside", "test_freq", "test_after"),
}
_LOCKED_SECONDS = 10  # after which a lock of the journal counts as that of a killed process
_BLOCK_ROWS = 1 << 18
Space = Mapping[str, Any]  # setting -> its value, a list of values, or a range


@dataclass(frozen=True)
class TuneConfig:
    """The dataset, and the search; field names are those of the flags."""

    dataset: Path = setting(REQUIRED, "directory of the dataset", uri="read")
    output: Path = setting(REQUIRED, "directory for the search's state and results")
    space: Path | None = setting(
        None, "YAML file of the settings to search; default: from the dataset", uri="read"
    )
    trials: int = setting(27, "number of settings to try", least=1)
    rungs: int = setting(3, "rungs of the halving, each of --eta times as many steps", least=1)
    eta: int = setting(3, "one trial in this many advances to the next rung", least=2)
    folds: int = setting(1, "cross-validation folds; 1 holds out --held_out", least=1)
    held_out: float = setting(0.2, "share of the rows held out with one fold", above=0, below=1)
    order: str = setting(
        "random", "held-out rows: random, or the last ones, for logs", choices=("random", "last")
    )
    metric: str = setting("auc", "metric to choose by", choices=_JUDGES)
    seed: int = setting(1, "random seed", least=0)
    processes: int | None = setting(None, "trainings at a time; default: one per core", least=1)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.folds > 1 and self.order != "random":
            raise ValueError(f"--order {self.order} is for --folds 1, got {self.folds} folds")


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    line, hint = ConfigFlags([("Flags", TuneConfig)]), "the same command resumes the search"
    return run_command(line, _tune, __doc__, arguments, usage=2, hint=hint)


def _tune(values: Values) -> None:
    with importing():
        try:
            import optuna
        except ImportError as error:
            raise ValueError(missing_extra(error, "tune")) from error
        from dlrm.data.clicks.feature_spec import FeatureSpec
        from dlrm.data.workers import workers

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    options = values.config(TuneConfig)
    cores = max(int(available_cores()[0]), 1)
    processes = options.processes or cores
    check_processes("--processes", processes)
    spec = FeatureSpec.load(options.dataset)
    space = _space(options, spec)
    study = _begin(options, space, spec)
    remove_abandoned(options.output, _FOLDS)
    with (
        owned_directory(options.output / f"{_FOLDS}{new_suffix()}") as folds,
        errors_named(options.output),
        workers(processes) as in_order,
    ):
        for fold in range(options.folds):
            write_fold(options, fold, folds / str(fold))
        train = partial(_train_next, options, space, folds, max(cores // processes, 1))
        for line in filter(None, in_order(train, range(options.trials))):
            say_progress(line)
    for line in _write_results(options, study):
        say(line)
    command = ["dlrm", "train", "--dataset", str(options.dataset)]
    command += ["--flagfile", str(options.output / _FLAGS)]
    print(shell_line([*command, "--save_checkpoint_path", free_name("run")]))


def _space(options: TuneConfig, spec: "FeatureSpec") -> Space:
    """Returns the space of the search, by default one around the settings of the recipe."""
    from dlrm.api.training import SETTINGS
    from dlrm.data.clicks.readers import SplitDataset
    from dlrm.tasks.recipe import BATCH_SIZE, DatasetFacts

    if options.space is None:
        return default_space(DatasetFacts.from_dataset(SplitDataset(spec, "train", BATCH_SIZE)))
    space: Space = read_yaml(options.space)
    known = [name for name in SETTINGS if name not in _NOT_SEARCHED]
    check_space(space, known, str(options.space))
    return space


def _begin(options: TuneConfig, space: Space, spec: "FeatureSpec") -> "optuna.Study":
    """Returns the study, a new one or one of the same dataset, space and flags."""
    from dlrm.data import layout

    manifest = layout.read_dataset_manifest(spec.directory)
    found: dict[str, Any] = {f"--{name}": getattr(options, name) for name in _COMPARED}
    found |= {f"--space, {name}": value for name, value in space.items()}
    found["--dataset"] = manifest["own_crc32"] if manifest else spec.feature_spec
    found = json.loads(json.dumps(found))
    make_directories(options.output)
    names = [path.name for path in options.output.iterdir() if path.name[0] != "."]
    if names and _JOURNAL not in names:
        raise FileExistsError(f"{options.output}: exists, and is no search; name another --output")
    study = open_study(options)
    begun = study.user_attrs.get("search", found)
    for name in sorted({*begun, *found}):
        if begun.get(name) != found.get(name):
            raise ValueError(
                f"{name}: expected {brief(begun.get(name))}, got {brief(found.get(name))}; "
                f"{options.output} was begun with the former, so name another --output"
            )
    study.set_user_attr("search", found)
    return study


def open_study(options: TuneConfig) -> "optuna.Study":
    """Opens the study of a search, or begins one, and cuts half a line, as of a full disk.

    Raises:
        ValueError: its journal cannot be read.
    """
    import optuna
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    journal = options.output / _JOURNAL
    of_journal = JournalFileOpenLock(str(journal), _LOCKED_SECONDS)
    backend = JournalFileBackend(str(journal), of_journal)
    of_journal.acquire()
    try:
        with open(journal, "rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
    finally:
        of_journal.release()
    try:
        return optuna.create_study(
            storage=optuna.storages.JournalStorage(backend),
            study_name="tune",
            direction="maximize" if METRICS[options.metric].ideal == HIGHER else "minimize",
            pruner=optuna.pruners.SuccessiveHalvingPruner(1, options.eta),
            load_if_exists=True,
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{journal}: expected a journal of Optuna, got {error!r}; name another --output"
        ) from None


def _train_next(options: TuneConfig, space: Space, folds: Path, threads: int, _: int) -> str | None:
    """Trains a trial on each fold until it is pruned; returns a line, or None without a trial."""
    import optuna
    import torch

    from dlrm.api.training import judge_settings

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    torch.set_num_threads(threads)
    study = open_study(options)
    if (trial := _next_trial(study, options, folds)) is None:
        return None
    number, tests = trial.user_attrs["trial"], options.eta ** (options.rungs - 1)
    settings = suggest(trial, space) if number else fixed(space)  # the first is the recipe
    results: dict[str, list[float]] = {name: [] for name in _JUDGES}
    end = ""

    def on_test(done: int, metrics: dict[str, float]) -> None:
        for name in _JUDGES:
            results[name][fold:] = [metrics[name]]
        step = fold * tests + done
        trial.report(fmean(results[options.metric]), step)
        if step < options.folds * tests and trial.should_prune():
            raise optuna.TrialPruned

    try:
        for fold in range(options.folds):
            own = {"recipe": "auto", "seed": options.seed, **settings}
            judge_settings(folds / str(fold), tests=tests, on_test=on_test, **own)
    except (optuna.TrialPruned, FloatingPointError) as error:
        end = f" ({str(error) or 'pruned'})"
        if isinstance(error, FloatingPointError):  # it diverged
            results = {name: [] for name in _JUDGES}
    except ValueError as error:
        chosen = ", ".join(f"{name} {value}" for name, value in settings.items())
        raise ValueError(f"trial {number} ({chosen}): {error}") from error
    trial.set_user_attr("settings", settings)
    trial.set_user_attr("results", results)
    if end:
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    else:
        study.tell(trial, fmean(results[options.metric]))
    return f"trial {number}: {'  '.join(f'{n} {_text(v)}' for n, v in results.items())}{end}"


def _next_trial(study: "optuna.Study", options: TuneConfig, folds: Path) -> "optuna.Trial | None":
    """Returns a trial that no process has, or None if all are done or running."""
    import numpy as np
    from optuna.samplers import TPESampler
    from optuna.trial import TrialState

    with lock(options.output / ".lock"):
        for one in study.get_trials(states=[TrialState.RUNNING]):
            if not folds.with_name(one.user_attrs.get("folds", "none")).exists():  # was killed
                study.tell(one.number, state=TrialState.FAIL)
        kept = [one for one in study.get_trials() if one.state != TrialState.FAIL]
        free = {*range(options.trials)} - {one.user_attrs.get("trial") for one in kept}
        if not free:
            return None
        number = min(free)  # determines the settings drawn, besides what finished trials found
        seed = int(np.random.SeedSequence([options.seed, number]).generate_state(1)[0])
        study.sampler = TPESampler(seed=seed)
        trial = study.ask()
        trial.set_user_attr("trial", number)
        trial.set_user_attr("folds", folds.name)
        return trial


def check_space(space: Space, known: Collection[str], source: str) -> None:
    """Raises ValueError if a setting is unknown or a value or a range invalid; it is named."""
    import optuna

    from dlrm.api.training import check_setting_types

    trial = optuna.create_study(sampler=optuna.samplers.RandomSampler()).ask()
    for name, value in space.items():
        if name not in known:
            raise ValueError(f"{source}: {name}: expected a setting among {', '.join(known)}")
        try:
            suggest(trial, {name: value})
            ends = [value["low"], value["high"]] if isinstance(value, dict) else value
            for one in ends if isinstance(ends, list) else [ends]:
                check_setting_types({name: one})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{source}: {name} {brief(value)}: {error}") from None


def fixed(space: Space) -> dict[str, Any]:
    """Returns the settings that a search does not vary."""
    return {name: value for name, value in space.items() if not isinstance(value, list | dict)}


def suggest(trial: Any, space: Space) -> dict[str, Any]:
    """Returns the settings of a trial of Optuna."""
    settings = fixed(space)
    for name, value in space.items():
        if isinstance(value, list):
            settings[name] = json.loads(trial.suggest_categorical(name, [*map(json.dumps, value)]))
        elif isinstance(value, dict):
            if isinstance(value.get("low"), int) and isinstance(value.get("high"), int):
                settings[name] = trial.suggest_int(name, **value)
            else:  # rounded, so that printed values are exactly those tried
                settings[name] = float(f"{trial.suggest_float(name, **value):.4g}")
    return settings


def default_space(facts: "DatasetFacts") -> Space:
    """Returns the space of a search without --space, around the settings of `--recipe auto`."""
    from dlrm.tasks.recipe import auto

    usual = auto(facts)
    size, epochs, lr = usual["batch_size"], usual["epochs"], usual["lr"]
    l2 = usual.get("embedding_l2", 0)
    space = {
        "batch_size": [size // 2, size, 2 * size],
        "epochs": {"low": max(epochs // 2, 1), "high": 2 * epochs, "log": True},
        "lr": {"low": lr / 2, "high": 2 * lr, "log": True},
        "embedding_dim": [8, 16, 32],
        "embedding_l2": {"low": l2 / 10, "high": 5 * l2, "log": True},
        "dropout": [0.1, 0.2, 0.3, 0.4],
        "numerical_bins": [24, 64, 256],
    }
    return {name: value for name, value in space.items() if name in usual}


def write_fold(options: TuneConfig, fold: int, directory: Path) -> None:
    """Writes training rows as a dataset whose test rows are those held out in a fold.

    Raises:
        ValueError: a file is damaged, or the fold has no rows to fit, or holds none out.
    """
    from dlrm.data import layout
    from dlrm.data.bags import take_rows
    from dlrm.data.clicks.feature_spec import FeatureSpec
    from dlrm.data.clicks.readers import SplitDataset
    from dlrm.data.clicks.writer import SplitWriter
    from dlrm.data.verification import Verifier

    spec = FeatureSpec.load(options.dataset)
    verifier = Verifier(spec.directory, layout.KIND, "first")
    verifier.check_names(spec.path.name, layout.TRANSFORM)
    rows = SplitDataset(spec, "train", _BLOCK_ROWS, verifier=verifier)
    files = {split: spec.source_spec[split] for split in ("train", "test")}
    own = replace(spec, path=directory / layout.FEATURE_SPEC, source_spec=files)
    with SplitWriter(own, "train") as fitted, SplitWriter(own, "test") as judged:
        for index in range(len(rows)):
            batch = rows.batch(index)
            columns = batch.columns(spec)
            held_out = _held_out(options, fold, index, rows.num_samples)
            for split, writer, chosen in (("train", fitted, ~held_out), ("test", judged, held_out)):
                ids = [take_rows(column, chosen) for column in columns]
                writer.write(batch.labels.numpy()[chosen], batch.numerical.numpy()[chosen], ids)
                if batch.weights is not None:
                    weights_file = own.file(split, own.label).with_name(layout.WEIGHT_FILE)
                    with open(weights_file, "ab") as file:
                        file.write(batch.weights.numpy()[chosen].tobytes())
    counts = {"train": fitted.num_rows, "test": judged.num_rows}
    if not all(counts.values()):
        raise ValueError(f"{options.dataset}: too few training rows to fit and to hold out")
    own.save()
    if (spec.directory / layout.TRANSFORM).is_dir():
        shutil.copytree(spec.directory / layout.TRANSFORM, directory / layout.TRANSFORM)
    layout.write_dataset_manifest(directory, counts, spec.cardinalities, {"fold": fold})


def _held_out(options: TuneConfig, fold: int, block: int, rows: int) -> "np.ndarray":
    """Returns which rows of a block of a dataset's `rows` are held out in a fold."""
    import numpy as np

    begin = block * _BLOCK_ROWS
    count = min(_BLOCK_ROWS, rows - begin)
    if options.order == "last":
        return begin + np.arange(count) >= rows - round(options.held_out * rows)
    place = np.random.default_rng([options.seed, block]).permutation(count)
    if options.folds > 1:
        return place % options.folds == fold
    return place < round(options.held_out * count)


def _write_results(options: TuneConfig, study: "optuna.Study") -> list[str]:
    """Writes the table of trials and the flags of the best; returns the lines of the table."""
    from optuna.trial import TrialState

    def rank(trial: Any) -> tuple[bool, bool, int, float]:
        diverged = not trial.user_attrs["results"][options.metric]
        steps, value = trial.last_step or 0, trial.value or 0.0
        return trial.state == TrialState.PRUNED, diverged, -steps, cost(options.metric, value)

    done = study.get_trials(states=[TrialState.COMPLETE, TrialState.PRUNED])
    trials = sorted(done, key=rank)
    roles = "metrics are of held-out training rows; test and validation rows were not opened"
    lines = [*_table(trials, options), roles]
    flags = flags_of({"recipe": "auto", **trials[0].user_attrs["settings"]})
    write_atomically(options.output / _TABLE, "\n".join(lines) + "\n")
    write_atomically(options.output / _FLAGS, "\n".join(flags) + "\n")
    return lines


def _table(trials: Sequence[Any], options: TuneConfig) -> list[str]:
    """Returns a table of trials, best first; deviations are over folds."""
    settings = [trial.user_attrs["settings"] for trial in trials]
    names = dict.fromkeys(name for one in settings for name in one)
    varied = [name for name in names if len({repr(one.get(name)) for one in settings}) > 1]
    whole = options.folds * options.eta ** (options.rungs - 1)
    rows = [
        [
            str(trial.user_attrs["trial"]),
            f"{(trial.last_step or 0) / whole:.0%}",
            *(_text(trial.user_attrs["results"][name]) for name in _JUDGES),
            *(text_of(own.get(name, "default")) for name in varied),
        ]
        for trial, own in zip(trials, settings, strict=True)
    ]
    return aligned(["trial", "steps", *_JUDGES, *varied], rows)


def _text(values: Sequence[float]) -> str:
    deviation = f" ± {stdev(values):.5f}" if len(values) > 1 else ""
    return f"{fmean(values):.5f}{deviation}" if values else "diverged"


if __name__ == "__main__":
    sys.exit(main())
