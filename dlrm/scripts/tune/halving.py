"""Successive halving (Jamieson and Talwalkar, 2016; Li et al., 2018): the best trials advance.

The first rung judges all trials cheaply, the next one in `eta` of them at higher cost, and so on.
The higher cost is more folds or, with a single split, more rows to fit. Each finished training
writes a file, which a resumed search reads instead of training again.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dlrm.api.training import judge_settings
from dlrm.data.workers import InOrder, workers
from dlrm.documents import brief
from dlrm.files import make_directories, write_atomically
from dlrm.manifest import read_sealed, sealed_json
from dlrm.metrics.table import cost
from dlrm.scripts.tune.flags import JUDGES
from dlrm.scripts.tune.folds import FoldPart, write_part

_WHY = "diverged"  # in a result: the reason why it has no metrics


class Rung(NamedTuple):
    """A stage of a search.

    Attributes:
        trials: number of trials to judge.
        folds: number of folds for each.
        share: share of the rows that are not judged to fit.
    """

    trials: int
    folds: int
    share: float


def plan_rungs(trials: int, rungs: int, eta: int, folds: int) -> list[Rung]:
    """Returns the rungs of a search, whose last one takes all folds and all rows.

    Args:
        trials: trials of the first rung.
        rungs: maximum number of rungs; one is a random search.
        eta: one trial in this many advances.
        folds: number of folds; with one, the rungs differ in the number of fitted rows.
    """
    stages: list[Rung] = []
    for above in reversed(range(rungs)):
        part = eta**-above
        on = (math.ceil(folds * part), 1.0) if folds > 1 else (1, part)
        if stages and stages[-1][1:] == on:
            continue
        count = math.ceil(trials * eta ** -len(stages))
        stages.append(Rung(count, *on))
    return stages


@dataclass
class Trial:
    """Settings, and their results.

    Attributes:
        number: number of the trial, which determines its settings.
        settings: settings of the training, except those of `--recipe auto`.
        rung: the highest rung on which it was judged, from 0.
        results: rung -> metrics of each fold; None for a training that diverged.
    """

    number: int
    settings: dict[str, Any]
    rung: int = 0
    results: dict[int, list[dict[str, float] | None]] = field(default_factory=dict)

    def values(self, metric: str, rung: int | None = None) -> list[float]:
        """Returns a metric of each fold of a rung, by default the highest; NaN for divergence."""
        folds = self.results.get(self.rung if rung is None else rung, [])
        return [math.nan if one is None else one[metric] for one in folds]

    def mean(self, metric: str, rung: int | None = None) -> float:
        """Returns the mean of a metric over folds; NaN if one diverged."""
        return float(np.mean(self.values(metric, rung)))


def ranked(trials: Sequence[Trial], metric: str) -> list[Trial]:
    """Returns trials by the rung that they reached, and by a metric there, the best first."""

    def place(trial: Trial) -> tuple[int, float, int]:
        value = cost(metric, trial.mean(metric))
        return -trial.rung, math.inf if math.isnan(value) else value, trial.number

    return sorted(trials, key=place)


class TrialJob(NamedTuple):
    """A training of a search: its trial, its part of the rows, and the path of its result."""

    trial: int
    part: FoldPart
    checksum: str
    settings: Mapping[str, Any]
    dataset: Path
    result: Path
    threads: int

    def identity(self) -> dict[str, Any]:
        """Returns the facts that determine the result, as the result's file records them."""
        of = {"trial": self.trial, **self.part._asdict(), "dataset": self.checksum}
        return {**of, "settings": dict(self.settings)}


@dataclass(frozen=True)
class Search:
    """A search in a directory, from which it can be resumed.

    Attributes:
        dataset: dataset whose training rows are divided.
        checksum: checksum of the dataset, which its results record.
        directory: directory of parts and results.
        rungs: see `plan_rungs`.
        parts: fold, share -> the part.
        metric: one of `JUDGES`.
    """

    dataset: Path
    checksum: str
    directory: Path
    rungs: Sequence[Rung]
    parts: Mapping[tuple[int, float], FoldPart]
    metric: str
    seed: int
    processes: int
    threads: int

    def run(self, trials: Sequence[Trial], say: Any = print) -> list[Trial]:
        """Judges trials rung by rung; returns all of them, the best first.

        Raises:
            ValueError: settings do not fit together; the message names the trial.
            ChildProcessError: a process was killed.
        """
        make_directories(self.directory / "results")
        left = list(trials)
        with workers(self.processes) as run:
            for number, rung in enumerate(self.rungs):
                if number:
                    left = ranked(left, self.metric)[: rung.trials]
                self._judge(number, left, run, say)
        return ranked(trials, self.metric)

    def _judge(self, number: int, trials: Sequence[Trial], run: InOrder, say: Any) -> None:
        """Trains trials without a usable result file, and sets the results of all trials."""
        rung = self.rungs[number]
        jobs = [self._job(trial, fold, rung) for trial in trials for fold in range(rung.folds)]
        missing = [job for job in jobs if not _is_done(job, say)]
        say(
            f"rung {number + 1} of {len(self.rungs)}: {_counted(len(trials), 'trial')}, "
            f"{_counted(rung.folds, 'fold')}, {rung.share:.0%} of the rows; "
            f"{len(jobs) - len(missing)} of {_counted(len(jobs), 'training')} done"
        )
        for fold in range(rung.folds) if missing else ():
            part = self.parts[fold, rung.share]
            write_part(self.dataset, part, self.directory / "parts" / part.name, say)
        for done in run(train, missing):
            say(done)
        for trial in trials:
            trial.rung = number
            found = [_read(self._job(trial, fold, rung)) for fold in range(rung.folds)]
            trial.results[number] = [None if _WHY in one else one for one in found]

    def _job(self, trial: Trial, fold: int, rung: Rung) -> TrialJob:
        part = self.parts[fold, rung.share]
        return TrialJob(
            trial=trial.number,
            part=part,
            checksum=self.checksum,
            settings={"seed": self.seed} | trial.settings,
            dataset=self.directory / "parts" / part.name,
            result=self.directory / "results" / f"trial-{trial.number}-{part.name}.json",
            threads=self.threads,
        )


def train(job: TrialJob) -> str:
    """Trains and evaluates, writes the result, and returns a line about it.

    Raises:
        ValueError: settings do not fit together; the message names the trial.
    """
    torch.set_num_threads(job.threads)
    began = time.perf_counter()
    try:
        result: dict[str, Any] = dict(judge_settings(job.dataset, recipe="auto", **job.settings))
        shown = "  ".join(f"{name} {result[name]:.5f}" for name in JUDGES)
    except FloatingPointError as error:
        result, shown = {_WHY: str(error)}, _WHY
    except ValueError as error:
        chosen = ", ".join(f"{name} {value}" for name, value in job.settings.items())
        raise ValueError(f"trial {job.trial} ({chosen}): {error}") from error
    seconds = time.perf_counter() - began
    content = {**job.identity(), "result": result, "seconds": seconds}
    write_atomically(job.result, sealed_json(content))
    return f"  trial {job.trial}, {job.dataset.name}: {shown}  ({seconds:.1f} s)"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _is_done(job: TrialJob, say: Any) -> bool:
    """Returns whether a job has a result; one that cannot be used is reported, and is missing."""
    if not job.result.exists():
        return False
    try:
        _read(job)
    except ValueError as error:
        say(f"  trained again, since its result cannot be used: {error}")
        return False
    return True


def _read(job: TrialJob) -> dict[str, Any]:
    """Returns the metrics of a job, or the reason for having none, from its file."""
    content = read_sealed(job.result, required=True)
    if not isinstance(content.get("settings"), dict) or not _is_result(content.get("result")):
        raise ValueError(f"{job.result}: expected settings and metrics, got {brief(content)}")
    for name, expected in json.loads(json.dumps(job.identity())).items():
        found = content.get(name)
        if found != expected:
            raise ValueError(
                f"{job.result}: the result of another training: expected {name} {brief(expected)}, "
                f"got {brief(found)}"
            )
    return content["result"]


def _is_result(found: Any) -> bool:
    if not isinstance(found, dict):
        return False
    return _WHY in found or all(isinstance(found.get(name), int | float) for name in JUDGES)
