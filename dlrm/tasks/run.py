"""A run: a task and its data, with a log and checkpoints, opened alike on all ranks.

Command and `dlrm.fit` settle their settings first. `Run.open` then assembles everything, in one
place for click-through models, image networks and BERT, and `Run.train` trains.
"""

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from dlrm.distributed import World, agreed, check_same, choose_device, from_first
from dlrm.files import check_all_local
from dlrm.flags import Values
from dlrm.remote.mirror import Mirror
from dlrm.remote.uri import values_with_uris
from dlrm.serving.network.recalibration import recalibrations
from dlrm.tasks.config import USER_ERRORS
from dlrm.tasks.ending import stopped_by_sigterm
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.directory import CheckpointDirectory, last_checkpoint, run_directory
from dlrm.train.checkpoints.state import Parameters
from dlrm.train.log import Loader, RunLog
from dlrm.train.profiling import StepProfiler
from dlrm.train.reports.callbacks import Callbacks
from dlrm.train.reports.console import Line, Saved
from dlrm.train.reports.curves import draw_curves
from dlrm.train.reports.model_card import MODEL_CARD
from dlrm.train.reports.trackers import open_trackers
from dlrm.train.trainer import Trainer
from dlrm.version import __version__

CONTINUES = "continues"  # in a configuration: facts of the checkpoint that the run continues
VARIES = "note: on cuda runs differ in their last bits; --deterministic adds in a fixed order"
_DATA_PATHS = ("dataset", "test_dataset", "synthetic_dataset_dir")


@dataclass(kw_only=True)
class Work:
    """Holds what a kind of network brings to a run: a task and its data.

    Attributes:
        values: the settings, as they are recorded.
        trains: whether the run is a training.
        checkpoint: checkpoint whose weights are loaded, or None.
        dataset: facts of the dataset that must be equal on all ranks, and in a resumed run.
        may_change: settings that a resumed run may change.
        transform: folder of the dataset's fitted transform, which is saved in checkpoints, or None.
        continued: facts of the checkpoint that the run continues, as stored in its own; None if it
            continues none.
    """

    values: Values
    world: World
    task: Any
    trains: bool
    dataset: dict[str, Any]
    checkpoint: Checkpoint | None = None
    may_change: frozenset[str] = field(default_factory=frozenset)
    transform: Path | None = None
    continued: dict[str, Any] | None = None

    def lines(self) -> Iterable[str | Line]:
        """Returns lines about the run, and about flags that are accepted but have no effect."""
        return ()

    def rows_named(self) -> AbstractContextManager:
        """Returns a context in which errors of operators name the row of the dataset."""
        return nullcontext()

    def loaders(self) -> Sequence[Any]:
        """Returns the arguments of `Trainer.fit`."""
        raise NotImplementedError

    def trainer_arguments(self, train: Loader) -> dict[str, Any]:
        """Returns the arguments of `Trainer` that are not the run's."""
        raise NotImplementedError

    def begin(self, run: "Run", trainer: Trainer, train: Loader) -> None:
        """Gives the trainer the weights that a new run begins with."""
        run.load_weights(trainer.parameters)

    def ready(self, run: "Run", trainer: Trainer, train: Loader) -> None:
        """Reports the training that is about to begin, or to go on."""

    def finish(
        self, run: "Run", trainer: Trainer, loaders: Sequence[Any], summary: dict[str, Any]
    ) -> dict[str, Any]:
        """Completes the summary of a training."""
        return summary

    def recorded(self) -> dict[str, Any]:
        """Returns the configuration of the run, as stored in its checkpoints.

        Paths of data are absolute, so that they are valid in any directory, or URIs.

        Raises:
            ValueError: the current folder's path is not in UTF-8.
        """
        flags = dict(self.values)
        flags |= {name: os.path.abspath(flags[name]) for name in _DATA_PATHS if flags.get(name)}
        check_all_local((f"--{name}", flags.get(name)) for name in _DATA_PATHS)
        return {
            "dlrm_version": __version__,
            "flags": values_with_uris(flags),
            "dataset": self.dataset,
            **({CONTINUES: self.continued} if self.continued else {}),
        }

    def frozen(self, run: dict[str, Any]) -> dict[str, Any]:
        """Returns the settings that a resumed run must keep, by name.

        Args:
            run: the configuration in a checkpoint.
        """
        # A flag newer than the run must have its default, which is what the run used.
        newer = {k: v for k, v in self.values.items() if k not in self.values.given}
        run = json.loads(json.dumps({**run, "flags": {**newer, **run["flags"]}}))
        kept = {f"--{k}": v for k, v in run["flags"].items() if k not in self.may_change}
        kept["--base_device"] = choose_device(kept["--base_device"])
        if continued := run.get(CONTINUES):
            digest = str(continued["manifest"])[:12]
            kept["--continue_from"] = f"step {continued['step']} (manifest {digest})"
        return kept | {f"dataset's {k}": v for k, v in run["dataset"].items()}


class Config(Protocol):
    """The settled settings of a run."""

    def assemble(self, world: World) -> Work:
        """Opens the data and makes the model, on all ranks in step."""
        ...


class Run:
    """A run with its log and its checkpoints; a context that closes them.

    Attributes:
        work: its task and data.
        log: destination of reports.
        checkpoints: directory of a training's checkpoints; None saves nothing.
    """

    log: RunLog
    checkpoints: CheckpointDirectory | None = None

    def __init__(self, work: Work, world: World) -> None:
        self.work, self.world, self.values = work, world, work.values
        self._stack, self._profiler = ExitStack(), None  # type: ExitStack, StepProfiler | None
        self._in_python = False

    @classmethod
    def open(
        cls, config: Config, world: World, mirror: Mirror | None = None, log: RunLog | None = None
    ) -> "Run":
        """Assembles data, model, optimizers, checkpoints and log.

        Args:
            config: the settled settings.
            mirror: uploads checkpoints that are saved at a URI; None if they are not.
            log: that of a Python program, which has no file and no trackers; by default that of the
                flags.

        Raises:
            ValueError, OSError: the user's error, on all ranks.
        """
        run = cls(config.assemble(world), world)
        with ExitStack() as stack:
            run._stack = stack
            run._open_log(log)
            check_same({f"the dataset's {k}": v for k, v in run.work.dataset.items()}, world)
            if run.work.trains and run.values["save_checkpoint_path"]:
                run.checkpoints = run._open_checkpoints(mirror)
            run.log.parameters(values_with_uris(run.values))
            for line in run.work.lines():
                run.log.line(*((line,) if isinstance(line, str) else line))
            run._open_profiler()
            run._stack = stack.pop_all()
        return run

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    def _open_log(self, log: RunLog | None) -> None:
        values, world = self.values, self.world
        if log is not None:
            self.log, self._in_python = log, True
            return
        with agreed(world, *USER_ERRORS):
            if values["profile"] and not self.work.trains:
                profiled = f"--profile {values['profile']} contradicts --mode {values['mode']}"
                raise ValueError(f"{profiled}: only a training takes steps")
            form = values["log_format"], values["verbose"]
            self.log = self._stack.enter_context(RunLog(values["log_path"], world.rank > 0, *form))
        asked = [name for name in ("tensorboard", "mlflow") if values[name]]
        if asked and not self.work.trains:
            self.log.line(f"note: --{asked[0]} is not used: only a training reports to trackers")
        elif asked and world.rank == 0:
            name = run_directory(Path(values["log_path"]).absolute().parent).name
            trackers = values["tensorboard"], values["mlflow"], name
            self.log.trackers = [*open_trackers(*trackers, self.log.line)]

    def _open_checkpoints(self, mirror: Mirror | None) -> CheckpointDirectory:
        """Returns the directory of `--save_checkpoint_path`, which the run claims until it ends.

        Raises:
            FileExistsError: it has checkpoints, and the run does not resume; the last is named.
            BlockingIOError: another run uses the directory.
        """
        values, work = self.values, self.work
        checkpoints = CheckpointDirectory(
            values["save_checkpoint_path"],
            values["keep_checkpoints"],
            work.transform,
            self.world,
            values.get("async_checkpoint", False),
        )
        if work.continued and work.checkpoint:
            checkpoints.inherited = partial(recalibrations, work.checkpoint.path, checkpoints.path)
        if mirror is not None:
            checkpoints.saved = mirror.saved
            mirror.add_log(values["log_path"])
        last = checkpoints.last()
        with agreed(self.world, OSError):
            if last and not values["resume"]:
                resumes = "" if self._in_python else "--resume continues from it, or "
                raise FileExistsError(
                    f"{last}: from an earlier run; {resumes}name another directory with "
                    "--save_checkpoint_path"
                )
        checkpoints.claim()
        self._stack.callback(checkpoints.release)
        return checkpoints

    def _open_profiler(self) -> None:
        values, world = self.values, self.world
        if self._in_python or not values["profile"]:
            return
        self._profiler = StepProfiler(
            values["profile"],
            values["benchmark_warmup_steps"],
            Path(values["log_path"]).absolute().parent,
            world.rank,
            world.device,
            self.log.line,
        )
        self._stack.callback(self._profiler.close)

    def train(self, callbacks: Callbacks = Callbacks()) -> dict[str, Any]:
        """Trains until the end or until SIGTERM, and returns the summary.

        Args:
            callbacks: functions that watch the training and may end it.
        """
        with self.work.rows_named():
            loaders = self.work.loaders()
            trainer = Trainer(
                task=self.work.task,
                world=self.world,
                log=self.log,
                checkpoints=self.checkpoints,
                run=self.work.recorded(),
                after_step=self._profiler.after_step if self._profiler else lambda step: None,
                callbacks=callbacks,
                **self.work.trainer_arguments(loaders[0]),
            )
            if not self._resume(trainer):
                self.work.begin(self, trainer, loaders[0])
            self.work.ready(self, trainer, loaders[0])
            with nullcontext() if self._in_python else stopped_by_sigterm(trainer):
                summary = trainer.fit(*loaders)
            if not self._in_python:
                self._report_files(trainer)
            return self.work.finish(self, trainer, loaders, summary)

    def load_weights(self, parameters: Parameters) -> bool:
        """Loads and reports the weights of the checkpoint; returns whether there is one."""
        checkpoint = self.work.checkpoint
        if checkpoint:
            checkpoint.load(parameters, self.world)
            self.log.line(f"weights from {checkpoint}", short=f"weights: {checkpoint}")
        return checkpoint is not None

    def _resume(self, trainer: Trainer) -> bool:
        """Resumes from the last checkpoint, if `--resume` is given and there is one."""
        checkpoints, world = self.checkpoints, self.world
        if checkpoints is None or not self.values["resume"]:
            return False
        last = checkpoints.last()
        if last is None:
            unfinished = from_first(sorted(checkpoints.path.glob("step-*")), world)
            if unfinished:  # on all ranks
                raise ValueError(f"{unfinished[-1]}: no whole checkpoint (its manifest is missing)")
            begins = "with another run's state" if self.work.continued else "at step 0"
            self.log.line(f"no checkpoint in {checkpoints.path} yet: starting {begins}")
            return False
        frozen = self.work.frozen
        with agreed(world, ValueError, OSError):
            check_unchanged(last, frozen(Checkpoint(last).config), frozen(trainer.run))
        trainer.resume(Checkpoint(last))
        self.log.line(f"resumed from {last}: {trainer.progress.step} steps are done")
        return True

    def _report_files(self, trainer: Trainer) -> None:
        """Draws the curves, and reports the paths of curves and checkpoints."""
        if self._profiler:
            self._profiler.finish()
        if self.values["mode"] == "benchmark_training":
            return
        checkpoints = self.checkpoints
        last, best = (checkpoints.last(), checkpoints.best()) if checkpoints else (None, None)
        if self.log.quiet:
            return
        curves = Path(self.values["log_path"]).absolute().with_name("curves.png")
        progress, flags = trainer.progress, trainer.run["flags"]
        data = flags.get("dataset") or flags.get("dataset_type") or ""
        problem = draw_curves(
            progress,
            trainer.task,
            curves,
            trainer.scheduled,
            f"{run_directory(curves.parent).name}, step {progress.step}\n{data}",
            trainer.roles.chooses,
        )
        self.log.console.saved(Saved(curves, problem, last, best))
        for file in (None if problem else curves, last / MODEL_CARD if last else None):
            if file:
                self.log.file(file)


def check_unchanged(
    directory: str | os.PathLike, saved: dict[str, Any], current: dict[str, Any]
) -> None:
    """Raises ValueError naming every entry that differs between two flat maps."""
    missing = object()
    different = [
        f"{name}: {saved.get(name)!r} in the checkpoint, now {current.get(name)!r}"
        for name in sorted(saved.keys() | current.keys())
        if saved.get(name, missing) != current.get(name, missing)
    ]
    if different:
        raise ValueError(
            f"{directory}: cannot resume with other values, since the run would not continue as it "
            "began:\n  " + "\n  ".join(different)
        )


def resumed_checkpoint(values: Values) -> Checkpoint | None:
    """Returns the last checkpoint of a run that is resumed, if it has one."""
    path = values["save_checkpoint_path"]
    last = last_checkpoint(path) if values["resume"] and path else None
    return Checkpoint(last) if last else None


def with_saved_flags(values: Values, checkpoint: Checkpoint | None, names: Iterable[str]) -> Values:
    """Takes flags that were not given from a checkpoint, if there is one."""
    return values.filled(checkpoint.saved_flags(names)) if checkpoint else values
