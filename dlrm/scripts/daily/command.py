"""Learns the new days of a log, each after it has been scored."""

import json
import math
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from dlrm.command_line import painted, say
from dlrm.data.sources.row_error import LEAVES_OUT
from dlrm.documents import read_json, with_nan
from dlrm.files import make_directories, write_atomically
from dlrm.flags import Values
from dlrm.manifest import read_manifest, read_sealed, sealed_json
from dlrm.remote.cache import Cache
from dlrm.remote.edges import show_uris
from dlrm.remote.uri import is_uri
from dlrm.scripts.common.steps import StepError, run_step
from dlrm.scripts.daily.chain import BEGUN, LOG, Chain, LearnedDay, digest_of, open_chain
from dlrm.scripts.daily.days import Day, date_of, find_days
from dlrm.scripts.daily.drift import alarms_of, psi_by_field
from dlrm.scripts.daily.flags import CONTINUED, FROZEN, RETRAINED, AlarmConfig, DailyConfig
from dlrm.scripts.daily.page import page, table_of
from dlrm.scripts.daily.rows import Logs, Tables, rows_of

DRIFTED = 3  # exit code: all days are learned, and a new one or the last one raised an alarm
PAGE = "daily.html"
_FLAGS = "train.flags"  # in the directory of the first day, if it was trained with some
_TIME = "%Y-%m-%dT%H:%M:%S%z"
_TRAINED = "trained"
_RETRAINED, _RECALIBRATED = "retrained", "recalibrated"  # folders of a day, until it is learned
_METRICS = ("auc", "log_loss", "calibration", "normalized_entropy", "gauc_by_impressions")


def run(values: Values) -> int:
    """Runs the command; returns the exit code."""
    own, bounds = values.config(DailyConfig), values.config(AlarmConfig)
    rows, output, cache = rows_of(values), own.output.absolute(), None
    if is_uri(own.days):
        show_uris()
        cache = Cache.of_flags(values)
    with (
        open_chain(
            output, rows.digest, rows.dataset, rows.difference, last_is_whole=own.undo is None
        ) as chain,
        open(output / LOG, "a", buffering=1, encoding="utf-8") as log,
    ):
        if own.undo is not None:
            chain.remove_last(own.undo)
            write_atomically(output / PAGE, page(chain.days))
            say(f"{own.undo}: removed; {chain.days[-1].name} is the last day")
            return 0
        _note_other_flags(own.train_flags, chain)
        found = find_days(own.days, say, cache)
        for name in sorted({*own.skip, *own.accept} - {day.name for day in found}):
            say(f"note: --skip or --accept {name}: no such day in {own.days}")
        new = chain.new_days(found, own.skip)
        if own.until is not None:
            new = _until(new, own.until, chain)
        follower = _Follower(own, rows, chain, bounds, log, found)
        try:
            for day in new:
                follower.learn(day)
        except StepError as failed:
            lines = f"the command and all of its lines are in {own.output / LOG}"
            skip = f"the same command tries again, and --skip {day.name} leaves the day out"
            why = str(failed).replace(LEAVES_OUT, "")  # a flag that this command does not have
            print(f"error: {day.name}: {why}; {lines}; {skip}", file=sys.stderr)
            return failed.code
        finally:
            if chain.days:
                write_atomically(output / PAGE, page(chain.days))
        if not chain.days:
            raise ValueError(f"{own.days}: all days are left out by --skip; nothing is learned")
    for line in table_of(chain.days):
        say(line)
    say(f"page: {own.output / PAGE}")
    learned = chain.days[len(chain.days) - len(new) :]
    if not new:  # the model is that of the last day, whose alarms stand
        say(f"nothing new: {chain.days[-1].name} is the last day")
        learned = chain.days[-1:]
    return DRIFTED if any(day.alarms for day in learned) else 0


def _note_other_flags(file: Path | None, chain: Chain) -> None:
    """Reports that a file of flags is not the one with which the first day was trained."""
    if file is None or not chain.days:
        return
    first = chain.days[0].name
    asked, kept = (
        path.read_text("utf-8") if path.is_file() else None
        for path in (file, chain.path_of(first) / _FLAGS)
    )
    if kept is None or asked != kept:
        say(
            f"note: --train_flags {file} is not the file with which {first} was trained, and has "
            "no effect: later days have the settings of the first"
        )


def _until(new: list[Day], last: str, chain: Chain) -> list[Day]:
    names = [day.name for day in new]
    if last in names:
        return new[: names.index(last) + 1]
    if last in {day.name for day in chain.days}:
        return []
    days = ", ".join(names[-3:]) or "none"
    raise ValueError(f"--until {last}: expected a day that is learned or new, got new days: {days}")


class _Follower:
    """Learns days, one at a time."""

    def __init__(
        self,
        own: DailyConfig,
        rows: Tables | Logs,
        chain: Chain,
        bounds: AlarmConfig,
        log: TextIO,
        found: Sequence[Day],
    ) -> None:
        self._own, self._rows, self._chain, self._bounds = own, rows, chain, bounds
        self._log = log
        self._raw = {day.name: day for day in found}

    def learn(self, day: Day) -> None:
        """Scores a day, learns it, and records both.

        Raises:
            ValueError: the day is refused, and nothing is recorded.
            StepError: a command failed; the next `dlrm daily` resumes it.
        """
        say(painted(day.name, "bold"))
        with day.local() as path:
            self._learn(day, path)
        self._prune()
        for alarm in self._chain.days[-1].alarms:
            say(f"warning: {day.name}: {alarm}")

    def _learn(self, day: Day, path: Path) -> None:
        before = self._chain.days[-1] if self._chain.days else None
        content = day.digest_at(path)
        self._chain.check_new(day, content)
        folder = self._chain.path_of(day.name)
        facts = {"content": content, "parent": before.digest if before else ""}
        self._begin(folder, facts | {"schema": self._chain.schema})
        judged: dict[str, dict[str, float | None]] = {}
        fields: dict[str, dict[str, float]] = {}
        if before is not None:
            judged, fields, rows, clicks = self._judge(day, path, folder)
            self._check_rows(day, folder, rows, clicks)
        self._prepare(day, path, folder, before)
        dataset = self._chain.dataset_of(day.name)
        if before is None:
            rows, clicks = _counts(dataset)
            self._check_rows(day, folder, rows, clicks)
        else:
            for name, psi in psi_by_field(self._chain.dataset_of(before.name), dataset).items():
                fields.setdefault(name, {})["psi"] = psi
        self._train(day, path, folder, before, rows)
        checkpoint = self._chain.checkpoint_of(day.name)
        self._chain.add(
            LearnedDay(
                day.name,
                day.files,
                content,
                before.digest if before else "",
                digest_of(dataset) or "",
                digest_of(checkpoint) or "",
                rows,
                clicks,
                judged,
                fields,
                alarms_of(self._bounds, judged.get(CONTINUED, {}), fields),
            )
        )

    def _begin(self, folder: Path, facts: dict[str, str]) -> None:
        """Makes the directory of a day, without what was begun from other rows."""
        path = folder / BEGUN
        if path.exists() and {n: read_sealed(path).get(n) for n in facts} == facts:
            return
        if folder.exists():
            shutil.rmtree(folder)
        make_directories(folder)
        write_atomically(path, sealed_json(facts))

    def _judge(self, day: Day, path: Path, folder: Path) -> tuple[dict, dict, int, int]:
        """Returns metrics by model, shares by field, rows and clicks of a day not yet learned."""
        models = {CONTINUED: self._chain.checkpoint_of(self._chain.days[-1].name)}
        if FROZEN in self._own.compare:
            models[FROZEN] = self._chain.checkpoint_of(self._chain.days[0].name)
        if RETRAINED in self._own.compare:
            models[RETRAINED] = self._retrained(folder)
        facts = {}
        for model, checkpoint in models.items():
            output = folder / "judged" / model
            if not (output / "evaluation.json").exists():
                flags = {"checkpoint": checkpoint, "input": path, "output": output}
                with self._timed(day.name, f"judge {model}"):
                    self._step("evaluate", {**flags, "bootstrap": 0, **self._rows.judging})
            facts[model] = with_nan(read_json(output / "evaluation.json"))
        judged = {
            model: {n: own["models"][0][n]["value"] for n in _METRICS if n in own["models"][0]}
            for model, own in facts.items()
        }
        continued = facts[CONTINUED]
        fields = {
            name: {"missing": missing, "unknown": unknown}
            for name, missing, unknown in continued["fields"]
        }
        return judged, fields, continued["rows"], continued["clicks"]

    def _retrained(self, folder: Path) -> Path:
        """Returns a model of all learned days, trained anew."""
        at, names = folder / _RETRAINED, [day.name for day in self._chain.days]
        if gone := [name for name in names if name not in self._raw]:
            raise ValueError(
                f"--compare {RETRAINED}: expected all learned days in --days, got none named "
                f"{gone[0]}"
            )
        if not (at / _TRAINED).exists():
            with self._timed(folder.name, "retrain"):
                at.mkdir(exist_ok=True)
                with ExitStack() as stack:
                    paths = [stack.enter_context(self._raw[name].local()) for name in names]
                    flags = self._preparation(paths, at)
                    self._step("prepare", {**flags, "overwrite": True})
                flags = self._first_training(at / self._rows.dataset, at / "run")
                self._step("train", flags, self._flag_file())
            write_atomically(at / _TRAINED, "")
        return at / "run"

    def _check_rows(self, day: Day, folder: Path, rows: int, clicks: int) -> None:
        """Refuses a day without clicks, or with far fewer rows than the day before."""
        problem, accept = "", f"--accept {day.name} learns it, "
        if not 0 < clicks < rows:
            problem = f"expected rows with and without a click, got {clicks:,} clicks of {rows:,}"
            accept = ""
        elif self._chain.days and day.name not in self._own.accept:
            usual, name = self._chain.days[-1].rows, self._chain.days[-1].name
            if rows < (least := self._own.least_rows * usual):
                problem = (
                    f"expected {math.ceil(least):,} rows or more (--least_rows "
                    f"{self._own.least_rows:g} of the {usual:,} of {name}), got {rows:,}"
                )
        if problem:
            shutil.rmtree(folder)
            raise ValueError(
                f"{day.place}: {problem}; nothing is learned of it. {accept}--skip {day.name} "
                "leaves it out"
            )

    def _prepare(self, day: Day, path: Path, folder: Path, before: LearnedDay | None) -> None:
        if digest_of(self._chain.dataset_of(day.name)) is not None:
            return
        flags = self._preparation([path], folder)
        names = ("half_life", "candidates", "admission_probability")
        flags |= {name: getattr(self._own, name) for name in names}
        if before is not None:
            flags["extend"] = self._chain.dataset_of(before.name)
        if (date := date_of(day.name)) is not None or before is None:
            flags["day"] = date or 0
        with self._timed(day.name, "prepare"):
            self._step("prepare", flags)

    def _train(
        self, day: Day, path: Path, folder: Path, before: LearnedDay | None, rows: int
    ) -> None:
        if (folder / _TRAINED).exists():
            return
        dataset, run = self._chain.dataset_of(day.name), folder / "run"
        flags, words = self._first_training(dataset, run), self._flag_file()
        if before is None and self._own.train_flags is not None:
            write_atomically(folder / _FLAGS, self._own.train_flags.read_text("utf-8"))
        if before is not None:
            checkpoint = self._chain.checkpoint_of(before.name)
            if self._own.recalibrate:
                checkpoint = self._recalibrated(checkpoint, day, path, folder)
            flags, words = self._further_training(dataset, run, checkpoint), []
            flags |= self._l2_of_recipe(checkpoint, rows)
        with self._timed(day.name, "train"):
            self._step("train", flags, words)
        write_atomically(folder / _TRAINED, "")

    def _recalibrated(self, checkpoint: Path, day: Day, path: Path, folder: Path) -> Path:
        """Returns a copy of a checkpoint that is recalibrated to a day, which it has not learned.

        The training that continues from it carries the recalibration over.
        """
        made = folder / _RECALIBRATED / checkpoint.name
        if not made.exists():
            flags = {"checkpoint": checkpoint, "input": path, "bootstrap": 0, **self._rows.judging}
            flags |= {"recalibrate": True, "recalibrated_checkpoint": made}
            with self._timed(day.name, "recalibrate"):
                made.parent.mkdir(exist_ok=True)
                self._step("evaluate", flags)
        return made

    def _preparation(self, inputs: Sequence[Path], folder: Path) -> dict[str, Any]:
        return {**self._rows.preparation(inputs, folder), "cores": self._own.cores}

    def _first_training(self, dataset: Path, output: Path) -> dict[str, Any]:
        flags = {"dataset": dataset, "save_checkpoint_path": output, "resume": True, "set_aside": 0}
        return flags | ({"recipe": "auto"} if self._own.train_flags is None else {})

    def _further_training(self, dataset: Path, output: Path, checkpoint: Path) -> dict[str, Any]:
        own, flags = self._own, {"dataset": dataset, "save_checkpoint_path": output, "resume": True}
        flags |= {"continue_from": checkpoint, "epochs": own.epochs}
        flags["evict_unseen_days"] = own.evict_unseen_days
        if own.replay:
            kept = [self._chain.dataset_of(day.name) for day in self._chain.days[-own.keep :]]
            flags |= {"replay": own.replay, "replay_data": kept}
        return flags

    def _l2_of_recipe(self, checkpoint: Path, rows: int) -> dict[str, float]:
        """Returns the recipe's regularization for the rows of all days; it falls as they grow."""
        from dlrm.api.recipe import embedding_l2
        from dlrm.tasks.run import saved_flags
        from dlrm.train.checkpoints.directory import find_checkpoint

        regularized = saved_flags(find_checkpoint(checkpoint), ["embedding_l2"])["embedding_l2"]
        if self._own.train_flags is not None or not regularized:
            return {}
        return {"embedding_l2": embedding_l2(rows + sum(day.rows for day in self._chain.days))}

    def _flag_file(self) -> list[str]:
        file = self._own.train_flags
        return [] if file is None else [f"--flagfile={file.absolute()}"]

    def _step(self, name: str, flags: Mapping[str, Any], words: list[str] | None = None) -> None:
        run_step(name, flags, self._log, "^(note|warning):", words or [])

    @contextmanager
    def _timed(self, day: str, step: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        seconds = round(time.monotonic() - began, 2)
        facts = {"day": day, "step": step, "seconds": seconds, "ended": time.strftime(_TIME)}
        self._log.write(f"{json.dumps(facts)}\n")
        say(f"  {step:<18}{seconds:8.1f} s")

    def _prune(self) -> None:
        """Removes datasets and checkpoints of old days, except the checkpoint of the first."""
        days = self._chain.days
        for name in (_RETRAINED, _RECALIBRATED):
            shutil.rmtree(self._chain.path_of(days[-1].name) / name, ignore_errors=True)
        for number, day in enumerate(days[: -self._own.keep]):
            folder = self._chain.path_of(day.name)
            for name in ("dataset", *(["run"] if number else [])):
                shutil.rmtree(folder / name, ignore_errors=True)


def _counts(dataset: Path) -> tuple[int, int]:
    """Returns rows and clicks of a dataset's training rows."""
    from dlrm.data.clicks.feature_spec import FeatureSpec

    rows = read_manifest(dataset, "dataset")["rows"]["train"]
    return rows, FeatureSpec.load(dataset).metadata["clicks"]["train"]
