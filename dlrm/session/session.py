"""Sessions of training commands: from joining the world to the summary, with an exit code."""

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dlrm.distributed import (
    World,
    agreed,
    check_same,
    choose_device,
    from_first,
    join_world,
    launch,
)
from dlrm.files import MANIFEST
from dlrm.flags import Values
from dlrm.remote.cache import values_with_uris
from dlrm.serving.network.recalibration import recalibrations
from dlrm.session.ending import end_with_launcher, stopped_by_sigterm
from dlrm.session.local_paths import enter_local_paths
from dlrm.session.profiling import StepProfiler
from dlrm.tasks.run import CONTINUES, USER_ERRORS, Run
from dlrm.train.checkpoints.checkpoint import (
    Parameters,
    check_unchanged,
    load_checkpoint,
    read_config,
)
from dlrm.train.checkpoints.directory import (
    CheckpointDirectory,
    checkpoint_in_use,
    run_directory,
)
from dlrm.train.log import RunLog
from dlrm.train.reports.console import Line, Saved
from dlrm.train.reports.curves import draw_curves
from dlrm.train.reports.model_card import MODEL_CARD
from dlrm.train.reports.trackers import open_trackers
from dlrm.train.trainer import Trainer
from dlrm.version import __version__

_DATA = ("dataset", "test_dataset")
VARIES = "note: on cuda runs differ in their last bits; --deterministic adds in a fixed order"


class Session:
    """A command's part in a run of several processes; a context that ends the run.

    `watch` opens the attributes after `world`.

    Attributes:
        values: the flags, with the path of the log.
        log: destination of reports.
        checkpoints: directory of a training's checkpoints; None saves nothing.

    Args:
        ranks_may_differ: flags that may differ between ranks.
        uris: flags that may be URIs, with their roles; see `dlrm.session.local_paths`.
        trains: whether the command trains.
        complete: fills in further flags, once there are local paths for all URIs, and raises errors
            about the flags of a rank.
    """

    log: RunLog
    checkpoints: CheckpointDirectory | None

    def __init__(
        self,
        values: Values,
        ranks_may_differ: frozenset[str] = frozenset(),
        uris: Mapping[str, str] | None = None,
        trains: bool = False,
        complete: Callable[[Values, World], Values] = lambda values, world: values,
    ) -> None:
        set_deterministic(values["deterministic"])
        given = "backend" in values.given
        self.world = join(values["base_device"], values["backend"], given)
        self.at_the_end = ExitStack()
        try:
            with self.agreed():
                local, self._mirror = enter_local_paths(
                    self.at_the_end, values, uris or {}, trains, self.world
                )
            found = _with_log_path(local)
            _check_copies({name: found.get(name) for name in _DATA}, self.world)
            with self.agreed():
                self.values = complete(found, self.world)
            self._check_same(ranks_may_differ)
        except BaseException:
            self.at_the_end.__exit__(*sys.exc_info())
            raise

    def _check_same(self, ranks_may_differ: frozenset[str]) -> None:
        values = self.values
        named = values_with_uris(values)  # as hosts may have caches at other places
        shared = {f"--{k}": v for k, v in named.items() if k not in ranks_may_differ}
        check_same({"version of dlrm": __version__, **shared}, self.world)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = values["tf32"]
        self._profiler: StepProfiler | None = None

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.at_the_end.__exit__(*exception)

    def agreed(self) -> AbstractContextManager:
        """Returns a context in which an error of the user ends all ranks."""
        return agreed(self.world, *USER_ERRORS)

    def watch(self, run: Run, lines: Iterable[str | Line]) -> None:
        """Opens the log and the checkpoints of a run, and reports how it begins."""
        values, world = run.values, self.world
        with self.agreed():
            if values["profile"] and not run.trains:
                raise ValueError(
                    f"--profile {values['profile']} contradicts --mode {values['mode']}: only a "
                    "training takes steps"
                )
            form = values["log_format"], values["verbose"]
            self.log = RunLog(values["log_path"], world.rank > 0, *form)
        self.at_the_end.enter_context(self.log)
        _open_trackers(run, self.log)
        check_same({f"the dataset's {name}": v for name, v in run.dataset.items()}, world)
        self.checkpoints = self._checkpoints(run) if run.trains else None
        self.log.parameters(values_with_uris(values))
        for line in lines:
            self.log.line(*((line,) if isinstance(line, str) else line))
        if values["profile"]:
            self._profiler = StepProfiler(
                values["profile"],
                values["benchmark_warmup_steps"],
                Path(values["log_path"]).absolute().parent,
                world.rank,
                world.device,
                self.log.line,
            )
            self.at_the_end.callback(self._profiler.close)

    def after_step(self, step: int) -> None:
        """Counts a step of the training for `--profile`."""
        if self._profiler:
            self._profiler.after_step()

    def load_weights(self, run: Run, parameters: Parameters) -> bool:
        """Loads and reports `--load_checkpoint_path`; returns whether it is given."""
        if run.checkpoint:
            load_checkpoint(run.checkpoint, parameters, world=self.world)
            self.log.line(f"weights from {run.checkpoint}", short=f"weights: {run.checkpoint}")
        return run.checkpoint is not None

    def resume(self, run: Run, trainer: Trainer) -> bool:
        """Resumes from the last checkpoint, if `--resume` is given and there is one."""
        return self.values["resume"] and resume(trainer, self.log, run.frozen)

    def train(self, run: Run, trainer: Trainer, *batches: Any) -> dict[str, float]:
        """Trains until the end or until SIGTERM, and returns the summary.

        Args:
            batches: the arguments of `Trainer.fit`.
        """
        with stopped_by_sigterm(trainer):
            summary = trainer.fit(*batches)
        if self._profiler:
            self._profiler.finish()
        if run.values["mode"] != "benchmark_training":
            report_files(trainer, self.log, run.values["log_path"])
        return summary

    def _checkpoints(self, run: Run) -> CheckpointDirectory | None:
        """Returns the directory of `--save_checkpoint_path`, if given, until the run ends."""
        values = run.values
        if not values["save_checkpoint_path"]:
            return None
        checkpoints = CheckpointDirectory(
            values["save_checkpoint_path"],
            values["keep_checkpoints"],
            run.transform,
            self.world,
            values.get("async_checkpoint", False),
        )
        if run.continued:
            checkpoints.inherited = partial(recalibrations, run.checkpoint, checkpoints.path)
        if self._mirror is not None:
            checkpoints.saved = self._mirror.saved
            self._mirror.add_log(values["log_path"])
        new_or_resumed(checkpoints, values["resume"])
        self.at_the_end.callback(checkpoints.release)
        return checkpoints


def _with_log_path(values: Values) -> Values:
    """Puts the log beside the checkpoints, if some are saved and --log_path is not given."""
    folder = values["save_checkpoint_path"]
    if not folder:
        return values
    return values.filled({"log_path": str(Path(folder, Path(values["log_path"]).name))})


def _open_trackers(run: Run, log: RunLog) -> None:
    """Opens `--tensorboard` and `--mlflow` for training, on the first rank."""
    values = run.values
    asked = [name for name in ("tensorboard", "mlflow") if values[name]]
    if asked and not run.trains:
        log.line(f"note: --{asked[0]} is not used: only a training reports to trackers")
    elif asked and run.world.rank == 0:
        name = run_directory(Path(values["log_path"]).absolute().parent).name
        trackers = open_trackers(values["tensorboard"], values["mlflow"], name, log.line)
        log.trackers = [*trackers]


def set_deterministic(wanted: bool) -> None:
    """Makes all operators reproducible bit for bit, or as fast as possible.

    Call it before CUDA starts, since cuBLAS reads its variable then. cuDNN follows torch's setting.
    """
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Do not fill memory that is overwritten anyway.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(wanted)


def join(asked: str | None, backend: str, backend_given: bool) -> World:
    """Joins the world of the launcher's variables.

    Args:
        asked: device, or None for CUDA if available.
        backend_given: whether the user chose that backend.
    """
    if launch().size > 1:
        end_with_launcher()
    chosen = choose_device(asked)
    if chosen == "cpu" and backend_given and backend != "gloo" and launch().size > 1:
        raise ValueError(f"--backend {backend}: expected gloo for --base_device cpu")
    if chosen.startswith("cuda:"):
        torch.cuda.set_device(chosen)  # for code that names no device, such as a stream
    return join_world(chosen, backend)


@contextmanager
def held_checkpoint(path: str | None, world: World, newest: bool = False) -> Iterator[Path | None]:
    """Yields the checkpoint at a path, the same on every rank; it is not pruned within the block.

    The path may be another on each host, as long as all have copies of the same directory.

    Args:
        newest: see `find_checkpoint`.
    """
    with ExitStack() as held:
        inside = None
        with agreed(world, ValueError, OSError):
            if path and world.rank == 0:
                inside = os.path.relpath(held.enter_context(checkpoint_in_use(path, newest)), path)
        inside = from_first(inside, world)
        found = Path(path, inside) if path and inside else None
        _check_copies({"checkpoint": found}, world)
        yield found


def _check_copies(paths: Mapping[str, str | os.PathLike | None], world: World) -> None:
    """Checks that all ranks have the same datasets or checkpoints, by their manifests."""
    digests = {}
    for name, path in paths.items():
        manifest = Path(path or "", MANIFEST)
        digest = path and manifest.is_file() and hashlib.sha256(manifest.read_bytes()).hexdigest()
        digests[f"SHA-256 of the {name}'s {MANIFEST}"] = digest or "none"
    check_same(digests, world)


def new_or_resumed(checkpoints: CheckpointDirectory, resume: bool) -> None:
    """Claims a directory of checkpoints; refuses one with checkpoints unless resuming.

    Raises:
        FileExistsError: the directory has checkpoints; the message names the last.
        BlockingIOError: another run uses the directory.
    """
    last = checkpoints.last()
    with agreed(checkpoints.world, OSError):
        if last and not resume:
            raise FileExistsError(
                f"{last}: from an earlier run; --resume continues from it, or name another "
                "directory with --save_checkpoint_path"
            )
    checkpoints.claim()


def resume(
    trainer: Trainer, log: RunLog, frozen: Callable[[dict[str, Any]], Mapping[str, Any]]
) -> bool:
    """Resumes from the last checkpoint of the trainer's directory, if it has one.

    Args:
        frozen: configuration of a run -> the part of it that must be unchanged.
    """
    assert trainer.checkpoints is not None
    last = trainer.checkpoints.last()
    if last is None:
        unfinished = from_first(sorted(trainer.checkpoints.path.glob("step-*")), trainer.world)
        with agreed(trainer.world, ValueError):
            if unfinished:
                raise ValueError(f"{unfinished[-1]}: no whole checkpoint (its manifest is missing)")
        begins = (
            "starting with another run's state"
            if CONTINUES in trainer.run
            else "starting at step 0"
        )
        log.line(f"no checkpoint in {trainer.checkpoints.path} yet: {begins}")
        return False
    with agreed(trainer.world, ValueError, OSError):
        check_unchanged(last, dict(frozen(read_config(last))), dict(frozen(trainer.run)))
    trainer.resume(last)
    log.line(f"resumed from {last}: {trainer.progress.step} steps are done")
    return True


def report_files(trainer: Trainer, log: RunLog, log_path: str) -> None:
    """Draws the curves, and reports the paths of curves and checkpoints."""
    last = best = None
    if trainer.checkpoints:
        last, best = trainer.checkpoints.last(), trainer.checkpoints.best()
    if log.quiet:
        return
    curves = Path(log_path).absolute().with_name("curves.png")
    task, progress, flags = trainer.task, trainer.progress, trainer.run.get("flags", {})
    data = flags.get("dataset") or flags.get("data_dir") or flags.get("dataset_type") or ""
    problem = draw_curves(
        progress.curve,
        progress.history,
        task.metric,
        task.loss_metric,
        curves,
        title=f"{run_directory(curves.parent).name}, step {progress.step}\n{data}",
        schedule=trainer.scheduled,
        best_step=progress.best.get("step"),
        tested=trainer.roles.chooses,
        first_step=progress.first_step,
    )
    log.console.saved(Saved(curves, problem, last, best))
    for file in (None if problem else curves, last / MODEL_CARD if last else None):
        if file:
            log.file(file)
