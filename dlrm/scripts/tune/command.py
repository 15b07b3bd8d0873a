"""Searches training settings with Optuna: a study in a journal, halved by training steps."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dlrm.api.defaults import set_aside_default
from dlrm.api.recipe import BATCH_SIZE, DatasetFacts, auto
from dlrm.api.training import SETTINGS, judge_settings
from dlrm.command_line import aligned, flags_of, say, shell_line, text_of
from dlrm.data.clicks import layout
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.readers import SplitDataset
from dlrm.data.workers import workers
from dlrm.documents import brief, read_yaml
from dlrm.files import MANIFEST, make_directories, write_atomically
from dlrm.flags import Values
from dlrm.limits import check_processes
from dlrm.locks import OwnedDirectory, remove_abandoned
from dlrm.manifest import checksum, damaged, read_sealed, sealed_lines
from dlrm.metrics.table import HIGHER, METRICS, cost
from dlrm.scripts.tune.flags import JUDGES, TuneConfig
from dlrm.scripts.tune.folds import write_fold
from dlrm.scripts.tune.space import (
    Space,
    TrialState,
    check_space,
    default_space,
    fixed,
    next_trial,
    open_study,
    suggest,
)
from dlrm.train.reports.roles import CHOSEN, NEVER_CHOSEN

JOURNAL, TABLE, FLAGS, _FOLDS = "study.journal", "tuning.txt", "best.flags", ".folds-"
_COMPARED = ("folds", "held_out", "order", "metric", "seed", "eta", "rungs")
# Settings of the search itself, or that need checkpoints. A teacher may know the held-out rows.
_NOT_SEARCHED = {
    *("distill", "distill_weight", "seed", "dataset_subset", "early_stop", "auc_threshold"),
    *("verify_data", "set_aside", "test_freq", "test_after"),
}
_ROLES = (
    f"metrics are of held-out training rows, {CHOSEN}; test and validation rows: {NEVER_CHOSEN}"
)


class _Job(NamedTuple):
    options: TuneConfig
    space: Space
    folds: Path
    threads: int


def run(values: Values) -> None:
    """Runs the search."""
    options = values.config(TuneConfig)
    if options.folds > 1 and options.order != "random":
        raise ValueError(f"--order {options.order} is for --folds 1, got {options.folds} folds")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    processes = options.processes or cores or 1
    check_processes("--processes", processes)
    spec = FeatureSpec.load(options.dataset)
    facts = DatasetFacts.from_dataset(SplitDataset(spec, "train", BATCH_SIZE))
    space: Space = default_space(facts)
    if options.space:
        space = read_yaml(options.space)
        known = [name for name in SETTINGS if name not in _NOT_SEARCHED]
        check_space(space, known, str(options.space))
    study = _begin(options, space, spec)
    remove_abandoned(options.output, _FOLDS)
    folds = OwnedDirectory(options.output, _FOLDS)
    try:
        for fold in range(options.folds):
            write_fold(options, fold, folds.path / str(fold))
        job = _Job(options, space, folds.path, max((cores or 1) // processes, 1))
        with workers(processes) as in_order:
            for line in in_order(_train_next, [job] * options.trials):
                if line:
                    say(line)
    finally:
        folds.remove()
    done = study.get_trials(states=[TrialState.COMPLETE, TrialState.PRUNED])
    best, *_ = trials = sorted(done, key=lambda trial: _rank(trial, options.metric))
    lines = [*_table(trials, options), _ROLES]
    # Test rows are not opened, and so count as present.
    rows = {split: 1 if split == "test" else spec.num_rows(split) for split in spec.splits}
    aside = set_aside_default(rows)
    trained = facts._replace(rows=round((1 - aside.get("set_aside", 0)) * facts.rows))
    flags = flags_of(aside | auto(trained, _plain(best.user_attrs["settings"])))
    write_atomically(options.output / TABLE, "\n".join(lines) + "\n")
    write_atomically(options.output / FLAGS, sealed_lines("\n".join(flags) + "\n"))
    for line in lines:
        say(line)
    command = ["dlrm", "train", "--dataset", str(options.dataset)]
    print(shell_line([*command, "--flagfile", str(options.output / FLAGS)]))


def _begin(options: TuneConfig, space: Space, spec: FeatureSpec) -> Any:
    """Returns the study, a new one or one of the same dataset, space and flags."""
    folders = spec.file("train", spec.label).parent, spec.directory / layout.TRANSFORM
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    manifest = spec.directory / MANIFEST
    expected = read_sealed(manifest).get("files", {}) if manifest.is_file() else {}
    found: dict[str, Any] = {}
    for path in [spec.path, *files]:
        name = path.relative_to(spec.directory).as_posix()
        own = found[name] = checksum(path)
        if (known := expected.get(name, {}).get("crc32", own)) != own:
            raise damaged(path, known, own)
    found |= {f"--{name}": getattr(options, name) for name in _COMPARED}
    found |= {f"--space, {name}": value for name, value in space.items()}
    found = json.loads(json.dumps(found))
    make_directories(options.output)
    names = [path.name for path in options.output.iterdir() if path.name[0] != "."]
    if names and JOURNAL not in names:
        raise FileExistsError(f"{options.output}: exists, and is no search; name another --output")
    study = _study(options)
    begun = study.user_attrs.get("search", found)
    for name in sorted({*begun, *found}):
        if begun.get(name) != found.get(name):
            raise ValueError(
                f"{name}: expected {brief(begun.get(name))}, got {brief(found.get(name))}; "
                f"{options.output} was begun with the former, so name another --output"
            )
    study.set_user_attr("search", found)
    return study


def _study(options: TuneConfig) -> Any:
    rises = METRICS[options.metric].ideal == HIGHER
    return open_study(options.output / JOURNAL, rises, options.eta)


def _train_next(job: _Job) -> str | None:
    """Trains a trial on each fold until it is pruned; returns a line, or None without a trial."""
    torch.set_num_threads(job.threads)
    options, study = job.options, _study(job.options)
    found = next_trial(study, options.output, options.trials, options.seed)
    if found is None:
        return None
    trial, lock = found
    number, tests = trial.user_attrs["trial"], options.eta ** (options.rungs - 1)
    # The first trial is the recipe.
    settings = suggest(trial, job.space) if number else fixed(job.space)
    results: list[dict[str, float]] = []
    pruned, why = False, ""

    def on_test(done: int, metrics: dict[str, float]) -> bool:
        nonlocal pruned
        results[fold:] = [{name: metrics[name] for name in JUDGES}]
        done += fold * tests
        trial.report(float(np.mean([one[options.metric] for one in results])), done)
        pruned = done < options.folds * tests and trial.should_prune()
        return pruned

    try:
        for fold in range(options.folds):
            if not pruned:
                own = {"recipe": "auto", "seed": options.seed, **settings}
                judge_settings(job.folds / str(fold), tests=tests, on_test=on_test, **own)
    except FloatingPointError as error:
        pruned, why = True, f"diverged: {error}"
        results.clear()
    except ValueError as error:
        chosen = ", ".join(f"{name} {value}" for name, value in settings.items())
        raise ValueError(f"trial {number} ({chosen}): {error}") from error
    trial.set_user_attr("results", results)
    trial.set_user_attr("settings", settings)
    if pruned:
        study.tell(trial, state=TrialState.PRUNED)
    else:
        study.tell(trial, float(np.mean([one[options.metric] for one in results])))
    (options.output / f".trial-{trial.number}").unlink()
    os.close(lock)
    shown = "  ".join(f"{name} {_mean(results, name)}" for name in JUDGES)
    return f"trial {number}: {why or shown}{' (pruned)' * (pruned and not why)}"


def _rank(trial: Any, metric: str) -> tuple[bool, int, float, int]:
    results = trial.user_attrs["results"]
    value = cost(metric, float(np.mean([one[metric] for one in results]))) if results else math.inf
    steps = trial.last_step or 0 if results else 0
    return trial.state == TrialState.PRUNED, -steps, value, trial.user_attrs["trial"]


def _table(trials: Sequence[Any], options: TuneConfig) -> list[str]:
    """Returns a table of trials, best first; deviations are over folds."""
    settings = [trial.user_attrs["settings"] for trial in trials]
    names = dict.fromkeys(name for one in settings for name in one)
    varied = [name for name in names if len({repr(one.get(name)) for one in settings}) > 1]
    metrics = [options.metric, *(name for name in JUDGES if name != options.metric)]
    whole = options.folds * options.eta ** (options.rungs - 1)
    rows = [
        [
            str(trial.user_attrs["trial"]),
            f"{(trial.last_step or 0) / whole:.0%}",
            *(_mean(trial.user_attrs["results"], name) for name in metrics),
            *(text_of(_plain(own)[name]) if name in own else "default" for name in varied),
        ]
        for trial, own in zip(trials, settings, strict=True)
    ]
    return aligned(["trial", "steps", *metrics, *varied], rows)


def _mean(results: Sequence[dict[str, float]], name: str) -> str:
    values = [one[name] for one in results]
    deviation = f" ± {np.std(values, ddof=1):.5f}" if len(values) > 1 else ""
    return f"{np.mean(values):.5f}{deviation}" if values else "diverged"


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    return {n: tuple(one) if isinstance(one, list) else one for n, one in settings.items()}
