"""Searches training settings with Optuna: a study in a journal, halved by training steps."""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import fcntl
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import torch
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import TrialState

from dlrm.api.recipe import BATCH_SIZE, DatasetFacts
from dlrm.api.training import SETTINGS, judge_settings
from dlrm.command_line import aligned, flags_of, free_name, say, shell_line, text_of
from dlrm.data import layout
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.readers import SplitDataset
from dlrm.data.workers import workers
from dlrm.documents import brief, read_yaml
from dlrm.files import errors_named, make_directories, write_atomically
from dlrm.host_cores import available_cores
from dlrm.limits import check_processes
from dlrm.locks import OwnedDirectory, remove_abandoned
from dlrm.manifest import sealed_lines
from dlrm.metrics.table import HIGHER, METRICS, cost
from dlrm.scripts.tune.flags import JUDGES, TuneConfig
from dlrm.scripts.tune.folds import write_fold
from dlrm.scripts.tune.space import Space, check_space, default_space, fixed, suggest
from dlrm.train.reports.roles import CHOSEN, NEVER_CHOSEN

JOURNAL, TABLE, FLAGS, _FOLDS = "study.journal", "tuning.txt", "best.flags", ".folds-"
_COMPARED = ("folds", "held_out", "order", "metric", "seed", "eta", "rungs")
# Settings of the search itself, or that need checkpoints. A teacher may know the held-out rows.
_NOT_SEARCHED = {
    *("distill", "distill_weight", "seed", "dataset_subset", "early_stop", "auc_threshold"),
    *("verify_data", "set_aside", "test_freq", "test_after"),
}
_LOCKED_SECONDS = 10  # after which a lock of the journal counts as that of a killed process
optuna.logging.set_verbosity(optuna.logging.WARNING)


def run(options: TuneConfig) -> None:
    """Runs the search."""
    cores = max(int(available_cores()[0]), 1)
    processes = options.processes or cores
    check_processes("--processes", processes)
    threads = max(cores // processes, 1)
    spec = FeatureSpec.load(options.dataset)
    if options.space:
        space: Space = read_yaml(options.space)
        check_space(space, [n for n in SETTINGS if n not in _NOT_SEARCHED], str(options.space))
    else:
        space = default_space(DatasetFacts.from_dataset(SplitDataset(spec, "train", BATCH_SIZE)))
    study = _begin(options, space, spec)
    remove_abandoned(options.output, _FOLDS)
    folds = OwnedDirectory(options.output, _FOLDS)
    try:
        with errors_named(options.output), workers(processes) as in_order:
            for fold in range(options.folds):
                write_fold(options, fold, folds.path / str(fold))
            train = partial(_train_next, options, space, folds.path, threads)
            for line in filter(None, in_order(train, range(options.trials))):
                say(line)
    finally:
        folds.remove()
    done = study.get_trials(states=[TrialState.COMPLETE, TrialState.PRUNED])
    trials = sorted(done, key=partial(_rank, options.metric))
    roles = f"held-out training rows, {CHOSEN}; test and validation rows: {NEVER_CHOSEN}"
    lines = [*_table(trials, options), f"metrics are of {roles}"]
    flags = flags_of({"recipe": "auto", **trials[0].user_attrs["settings"]})
    write_atomically(options.output / TABLE, "\n".join(lines) + "\n")
    write_atomically(options.output / FLAGS, sealed_lines("\n".join(flags) + "\n"))
    for line in lines:
        say(line)
    command = ["dlrm", "train", "--dataset", str(options.dataset)]
    command += ["--flagfile", str(options.output / FLAGS)]
    print(shell_line([*command, "--save_checkpoint_path", free_name("run")]))


def _begin(options: TuneConfig, space: Space, spec: FeatureSpec) -> optuna.Study:
    """Returns the study, a new one or one of the same dataset, space and flags."""
    manifest = layout.read_dataset_manifest(spec.directory)
    found: dict[str, Any] = {f"--{name}": getattr(options, name) for name in _COMPARED}
    found |= {f"--space, {name}": value for name, value in space.items()}
    found["--dataset"] = manifest["own_crc32"] if manifest else spec.feature_spec
    found = json.loads(json.dumps(found))
    make_directories(options.output)
    names = [path.name for path in options.output.iterdir() if path.name[0] != "."]
    if names and JOURNAL not in names:
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


def open_study(options: TuneConfig) -> optuna.Study:
    """Opens the study of a search, or begins one, and cuts half a line, as of a full disk.

    Raises:
        ValueError: its journal cannot be read.
    """
    journal = options.output / JOURNAL
    lock = JournalFileOpenLock(str(journal), _LOCKED_SECONDS)
    backend = JournalFileBackend(str(journal), lock)
    lock.acquire()
    try:
        with open(journal, "rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
    finally:
        lock.release()
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


def _next_trial(study: optuna.Study, options: TuneConfig, folds: Path) -> optuna.Trial | None:
    """Returns a trial that no process has, or None if all are done or running."""
    with open(options.output / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for one in study.get_trials(states=[TrialState.RUNNING]):
            if not folds.with_name(one.user_attrs.get("folds", "none")).exists():  # was killed
                study.tell(one.number, state=TrialState.FAIL)
        kept = [one for one in study.get_trials() if one.state != TrialState.FAIL]
        free = {*range(options.trials)} - {one.user_attrs.get("trial") for one in kept}
        if not free:
            return None
        number = min(free)  # determines the settings drawn, besides what finished trials found
        seed = int(np.random.SeedSequence([options.seed, number]).generate_state(1)[0])
        study.sampler = optuna.samplers.TPESampler(seed=seed)
        trial = study.ask()
        trial.set_user_attr("trial", number)
        trial.set_user_attr("folds", folds.name)
        return trial


def _train_next(options: TuneConfig, space: Space, folds: Path, threads: int, _: int) -> str | None:
    """Trains a trial on each fold until it is pruned; returns a line, or None without a trial."""
    torch.set_num_threads(threads)
    study = open_study(options)
    if (trial := _next_trial(study, options, folds)) is None:
        return None
    number, tests = trial.user_attrs["trial"], options.eta ** (options.rungs - 1)
    settings = suggest(trial, space) if number else fixed(space)  # the first is the recipe
    results: dict[str, list[float]] = {name: [] for name in JUDGES}
    end = ""

    def on_test(done: int, metrics: dict[str, float]) -> None:
        for name in JUDGES:
            results[name][fold:] = [metrics[name]]
        step = fold * tests + done
        trial.report(float(np.mean(results[options.metric])), step)
        if step < options.folds * tests and trial.should_prune():
            raise optuna.TrialPruned

    try:
        for fold in range(options.folds):
            own = {"recipe": "auto", "seed": options.seed, **settings}
            judge_settings(folds / str(fold), tests=tests, on_test=on_test, **own)
    except (optuna.TrialPruned, FloatingPointError) as error:
        end = f" ({str(error) or 'pruned'})"
        if isinstance(error, FloatingPointError):  # it diverged
            results = {name: [] for name in JUDGES}
    except ValueError as error:
        chosen = ", ".join(f"{name} {value}" for name, value in settings.items())
        raise ValueError(f"trial {number} ({chosen}): {error}") from error
    trial.set_user_attr("settings", settings)
    trial.set_user_attr("results", results)
    if end:
        study.tell(trial, state=TrialState.PRUNED)
    else:
        study.tell(trial, float(np.mean(results[options.metric])))
    shown = "  ".join(f"{name} {_text(values)}" for name, values in results.items())
    return f"trial {number}: {shown}{end}"


def _rank(metric: str, trial: Any) -> tuple[bool, bool, int, float]:
    diverged = not trial.user_attrs["results"][metric]
    steps, value = trial.last_step or 0, trial.value or 0.0
    return trial.state == TrialState.PRUNED, diverged, -steps, cost(metric, value)


def _table(trials: list[Any], options: TuneConfig) -> list[str]:
    """Returns a table of trials, best first; deviations are over folds."""
    settings = [trial.user_attrs["settings"] for trial in trials]
    names = dict.fromkeys(name for one in settings for name in one)
    varied = [name for name in names if len({repr(one.get(name)) for one in settings}) > 1]
    whole = options.folds * options.eta ** (options.rungs - 1)
    rows = [
        [
            str(trial.user_attrs["trial"]),
            f"{(trial.last_step or 0) / whole:.0%}",
            *(_text(trial.user_attrs["results"][name]) for name in JUDGES),
            *(text_of(own.get(name, "default")) for name in varied),
        ]
        for trial, own in zip(trials, settings, strict=True)
    ]
    return aligned(["trial", "steps", *JUDGES, *varied], rows)


def _text(values: list[float]) -> str:
    deviation = f" ± {np.std(values, ddof=1):.5f}" if len(values) > 1 else ""
    return f"{np.mean(values):.5f}{deviation}" if values else "diverged"
