"""A run of main, dist_main, cnn or bert, from its command line to its summary."""

import json
import os
import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from dlrm import __version__
from dlrm.command_line import fail
from dlrm.distributed import World, agreed, check_same, choose_device
from dlrm.files import check_all_local
from dlrm.flags import HelpAsked, Values, help_of_absl, show
from dlrm.scripts.common import session
from dlrm.scripts.common.profiling import StepProfiler
from dlrm.train.checkpoints.checkpoint import Parameters, load_checkpoint, read_config
from dlrm.train.checkpoints.directory import CheckpointDirectory, last_checkpoint, run_directory
from dlrm.train.log import Loader, RunLog
from dlrm.train.reports.roles import OF_NVIDIA, Roles
from dlrm.train.reports.trackers import open_trackers
from dlrm.train.trainer import Trainer
from dlrm.train.watchdog import Watchdog

# torch.distributed.launch without --use_env passes it to each process; the environment has it.
_LOCAL_RANK = re.compile(r"--local[-_]rank=\d+")
_DATA_PATHS = ("dataset", "test_dataset", "synthetic_dataset_dir")


@dataclass(kw_only=True)
class Setup:
    """The inputs of all modes of a command.

    Attributes:
        values: the flags, with a checkpoint's architecture and other replaced defaults.
        world: the processes.
        task: the network.
        trains: whether the mode is a training.
        checkpoint: checkpoint of `--load_checkpoint_path`, or None.
        dataset: facts of the dataset that must be equal on all ranks, and in a resumed run.
        may_change: flags that a resumed run may change.
        transform: folder of the dataset's fitted transform, which is saved in checkpoints, or None.
    """

    values: Values
    world: World
    task: Any
    trains: bool
    checkpoint: Path | None
    dataset: dict[str, Any]
    may_change: frozenset[str] = field(default_factory=frozenset)
    transform: Path | None = None

    def recorded(self) -> dict[str, Any]:
        """Returns the configuration of the run, as stored in its checkpoints.

        Paths of data are absolute, so that they are valid in any directory.

        Raises:
            ValueError: the current folder's path is not in UTF-8.
        """
        flags = dict(self.values)
        flags |= {name: os.path.abspath(flags[name]) for name in _DATA_PATHS if flags.get(name)}
        check_all_local((f"--{name}", flags.get(name)) for name in _DATA_PATHS)
        return {"dlrm_version": __version__, "flags": flags, "dataset": self.dataset}

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
        return kept | {f"dataset's {k}": v for k, v in run["dataset"].items()}


AnySetup = TypeVar("AnySetup", bound=Setup)


@dataclass(frozen=True)
class Watch:
    """The log, the watchdog and the checkpoints of a run.

    Attributes:
        log: destination of reports.
        dog: detects a rank that hangs.
        checkpoints: directory of a training's checkpoints; None saves nothing.
        profiler: profiler of `--profile`, if it is given.
    """

    log: RunLog
    dog: Watchdog
    checkpoints: CheckpointDirectory | None
    profiler: StepProfiler | None = None

    def beat(self, step: int) -> None:
        """Reports that training has reached a step."""
        self.dog.beat(step)
        if self.profiler:
            self.profiler.beat(step)


def main(
    arguments: list[str],
    parse: Callable[[list[str]], Values],
    help_text: Callable[[], str],
    act: Callable[[Values], object],
) -> None:
    """Runs a command line and ends the process, or shows the help."""
    try:
        values = parse([word for word in arguments if not _LOCAL_RANK.fullmatch(word)])
    except HelpAsked as asked:
        hint = "Try --helpfull to get a list of all flags."
        show(f"{help_text()}\n\n{help_of_absl() if asked.full else hint}")
    except ValueError as error:
        fail(error)
    else:
        session.exit_with(lambda: act(values), values["save_checkpoint_path"])


def run(
    values: Values,
    set_up: Callable[[Values, World, ExitStack], AnySetup],
    notices: Callable[[AnySetup], Iterable[str]],
    act: Callable[[AnySetup, Watch], dict[str, float]],
    check: Callable[[Values, World], object] = lambda values, world: None,
    ranks_may_differ: frozenset[str] = frozenset(),
) -> dict[str, float]:
    """Runs the mode of the flags and returns the summary, on every rank.

    Args:
        values: the flags.
        set_up: opens the data and makes the task, on all ranks in step; contexts that it enters end
            with the run.
        notices: lines about the run.
        act: carries out the mode.
        check: raises errors about the flags of a rank.
        ranks_may_differ: flags that may differ between ranks.

    Raises:
        ValueError, OSError, FloatingPointError: the user's error; the message names it.
        OtherRankError: another rank raises one of these.
        StoppedError: the training was stopped by a signal.
    """
    values = _with_log_path(values)
    session.set_deterministic(values["deterministic"])
    world = session.join(
        values["base_device"], values["backend"], "backend" in values.given, values["rank_timeout"]
    )
    with agreed(world, *session.USER_ERRORS):
        check(values, world)
    shared = {f"--{k}": v for k, v in values.items() if k not in ranks_may_differ}
    check_same(shared, world)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = values["tf32"]
    with ExitStack() as at_the_end:
        setup = set_up(values, world, at_the_end)
        with agreed(world, *session.USER_ERRORS):
            if values["profile"] and not setup.trains:
                raise ValueError(
                    f"--profile {values['profile']} contradicts --mode {values['mode']}: only a "
                    "training takes steps"
                )
            log = RunLog(values["log_path"], quiet=world.rank > 0)
        at_the_end.enter_context(log)
        _open_trackers(setup, log)
        check_same({f"the dataset's {name}": v for name, v in setup.dataset.items()}, world)
        dog = at_the_end.enter_context(Watchdog(world, values["rank_timeout"]))
        checkpoints = _checkpoints(setup, dog, at_the_end) if setup.trains else None
        log.parameters(dict(setup.values))
        for line in notices(setup):
            log.line(line)
        profiler = _profiler(setup, log, at_the_end) if values["profile"] else None
        summary = act(setup, Watch(log, dog, checkpoints, profiler))
        log.summary(summary)
    return summary


def _with_log_path(values: Values) -> Values:
    """Puts the log beside the checkpoints, if some are saved and --log_path is not given."""
    folder = values["save_checkpoint_path"]
    if not folder:
        return values
    return values.filled({"log_path": str(Path(folder, Path(values["log_path"]).name))})


def _open_trackers(setup: Setup, log: RunLog) -> None:
    """Opens `--tensorboard` and `--mlflow` for training, on the first rank."""
    values = setup.values
    asked = [name for name in ("tensorboard", "mlflow") if values[name]]
    if asked and not setup.trains:
        log.line(f"note: --{asked[0]} is not used: only a training reports to trackers")
    elif asked and setup.world.rank == 0:
        name = run_directory(Path(values["log_path"]).absolute().parent).name
        trackers = open_trackers(values["tensorboard"], values["mlflow"], name, log.line)
        log.trackers = [*trackers]


def _profiler(setup: Setup, log: RunLog, at_the_end: ExitStack) -> StepProfiler:
    values, world = setup.values, setup.world
    profiler = StepProfiler(
        values["profile"],
        values["benchmark_warmup_steps"],
        Path(values["log_path"]).absolute().parent,
        world.rank,
        world.device,
        log.line,
    )
    at_the_end.callback(profiler.close)
    return profiler


def _checkpoints(setup: Setup, dog: Watchdog, at_the_end: ExitStack) -> CheckpointDirectory | None:
    """The directory of `--save_checkpoint_path`, if one is named, until the run ends."""
    values = setup.values
    if not values["save_checkpoint_path"]:
        return None
    checkpoints = CheckpointDirectory(
        values["save_checkpoint_path"],
        values["keep_checkpoints"],
        setup.transform,
        setup.world,
        values.get("async_checkpoint", False),
        dog.beat,
    )
    session.new_or_resumed(checkpoints, values["resume"])
    at_the_end.callback(checkpoints.release)
    return checkpoints


def known_checkpoint(values: Values, checkpoint: Path | None) -> Path | None:
    """Returns the last checkpoint of a resumed run, otherwise `checkpoint`."""
    path = values["save_checkpoint_path"]
    return (last_checkpoint(path) if values["resume"] and path else None) or checkpoint


def with_saved_flags(values: Values, checkpoint: Path | None, names: Iterable[str]) -> Values:
    """Takes flags that were not given from a checkpoint, if there is one."""
    if checkpoint is None:
        return values
    return values.filled(saved_flags(checkpoint, names))


def saved_flags(checkpoint: Path, names: Iterable[str]) -> dict[str, Any]:
    """Returns some of the flags that a checkpoint was saved with; older ones lack later flags."""
    saved = read_config(checkpoint)["flags"]
    found = {name: saved[name] for name in names if name in saved}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}


def load_weights(setup: Setup, parameters: Parameters, log: RunLog) -> bool:
    """Loads and reports `--load_checkpoint_path`; returns whether it is given."""
    if setup.checkpoint:
        load_checkpoint(setup.checkpoint, parameters, world=setup.world)
        log.line(f"weights from {setup.checkpoint}")
    return setup.checkpoint is not None


def make_trainer(setup: Setup, watch: Watch, **own: Any) -> Trainer:
    """Returns a trainer of the task with the reports, checkpoints and watchdog of the flags.

    Args:
        setup: flags and task.
        watch: log, watchdog and checkpoints.
        own: the trainer's other arguments.
    """
    return Trainer(
        task=setup.task,
        world=setup.world,
        log=watch.log,
        checkpoints=watch.checkpoints,
        run=setup.recorded(),
        beat=watch.beat,
        **own,
    )


def train(
    setup: Setup,
    watch: Watch,
    trainer: Trainer,
    begin: Callable[[Trainer], object],
    batches: Loader,
    test: Loader,
    validation: Loader | None = None,
    roles: Roles = OF_NVIDIA,
    told: Iterable[str] = (),
) -> dict[str, float]:
    """Trains, or resumes training, and returns the summary.

    Args:
        setup: flags and task.
        watch: log, watchdog and checkpoints.
        trainer: the trainer.
        begin: called before the first step of a new run.
        batches, test, validation, roles: see `Trainer.fit`.
        told: lines to print before the first step.
    """
    values, log = setup.values, watch.log
    if not values["resume"] or not session.resume(trainer, log, setup.frozen):
        begin(trainer)
    for line in told:
        log.line(line)
    with session.stopped_by_sigterm(trainer):
        summary = trainer.fit(batches, test, validation, roles)
    watch.dog.rest()
    if watch.profiler:
        watch.profiler.finish()
    if values["mode"] != "benchmark_training":
        session.report_files(trainer, log, values["log_path"])
    return summary
