"""Trainings that continue where another run ended: `--continue_from`.

A run's checkpoints have, under "continues" in their configuration, the checkpoint that it continues
from.
"""

import hashlib
from pathlib import Path
from typing import Any

from dlrm.data.clicks.batch import ClickDataset
from dlrm.files import MANIFEST
from dlrm.flags import Values
from dlrm.remote.cache import with_uris
from dlrm.tasks.config import CARRIED, CONSTANT, REWARM, SCHEDULE
from dlrm.tasks.run import CONTINUES, known_checkpoint, saved_flags
from dlrm.train.checkpoints.checkpoint import read_config, read_progress
from dlrm.train.checkpoints.directory import find_checkpoint
from dlrm.train.checkpoints.nvidia import is_nvidia
from dlrm.train.schedule import ScheduleConfig


def with_carried(values: Values) -> Values:
    """Returns settings with those of the run that is continued for the ones that are not given.

    A run that has been interrupted and is resumed has those of its own checkpoint.
    """
    if values.get("mode", "train") != "train":
        return values
    resumed, path = known_checkpoint(values, None), values["continue_from"]
    if resumed is not None and CONTINUES in read_config(resumed):
        names = {*CARRIED, "continue_lr"}
        return values.filled(saved_flags(resumed, names & values.keys()))
    if path is None or resumed is not None:
        return values
    found = find_checkpoint(path, newest=True)
    if is_nvidia(found):  # whose flags are of another program
        return values
    return values.filled(saved_flags(found, {*CARRIED} & {*values}))


def check_continued(values: Values) -> None:
    """Raises ValueError for settings that contradict `--continue_from`, or need it."""
    path = values["continue_from"]
    if path is None:
        if values["continue_lr"] is not None and not values["resume"]:
            raise ValueError(f"--continue_lr {values['continue_lr']} needs --continue_from")
        return
    asked = f"--continue_from {path}"
    if values.get("mode", "train") != "train":
        raise ValueError(f"{asked} contradicts --mode {values['mode']}: only a training continues")
    for name in ("load_checkpoint_path", "seeds", "recipe"):
        if values.get(name) is not None:
            why = {
                "load_checkpoint_path": "both name the weights to begin with",
                "seeds": "it continues from one model; continue each seed by itself",
                "recipe": "the settings are those of the run that is continued",
            }
            raise ValueError(f"{asked} contradicts --{name} {values[name]}: {why[name]}")


def facts_of(checkpoint: Path, save_checkpoint_path: str | None) -> dict[str, Any]:
    """Returns the facts of a checkpoint that a run records which continues it.

    Raises:
        ValueError: the run saves where the checkpoint is, or the checkpoint is damaged.
    """
    directory = with_uris(str(checkpoint.parent.absolute()))
    saved_in = save_checkpoint_path and with_uris(str(Path(save_checkpoint_path).absolute()))
    same = saved_in and Path(saved_in).exists() and Path(saved_in).samefile(checkpoint.parent)
    if saved_in and (saved_in == directory or same):
        raise ValueError(
            f"--continue_from {with_uris(str(checkpoint))}: is in --save_checkpoint_path "
            f"{saved_in}; a continued run needs a directory of its own (--resume alone continues "
            "an interrupted run)"
        )
    manifest = checkpoint / MANIFEST
    digest = hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.exists() else None
    return {
        "run": directory,
        "checkpoint": checkpoint.name,
        "manifest": digest,
        "step": int(read_progress(checkpoint).get("step", 0)) if digest else 0,
    }


def check_sizes(checkpoint: Path, data: ClickDataset, name: str) -> None:
    """Raises ValueError if a dataset has fewer ids than the tables of the checkpoint."""
    before = read_config(checkpoint)["dataset"].get("table sizes")
    if before is None or len(before) != len(data.table_sizes):
        return  # loading names the tables
    for field, old, new in zip(data.categorical_names, before, data.table_sizes, strict=True):
        if new < old:
            raise ValueError(
                f"{name}: {field}: expected {old} ids or more, as in {checkpoint}, got {new}: the "
                "ids of a continued dataset are those of the one before, with new ones after "
                "them"
            )


def learning_rate_mode(asked: str | None, schedule: ScheduleConfig, step: int) -> str:
    """Returns the mode of the learning rate after a step, one of `CONTINUE_LR`.

    Args:
        asked: the mode that the user asked for, or None.
        step: last step of the run that is continued.

    Raises:
        ValueError: the schedule has no rates after the step.
    """
    if asked in (CONSTANT, REWARM):
        return str(asked)
    reason = None
    if schedule.knows_the_run:
        reason = f"--schedule {schedule.schedule} depends on the length of the run, which is over"
    elif not any(rate_after > 0 for rate_after in map(schedule.rates(1, 1), (step + 1, step + 2))):
        reason = f"its rate is 0 after step {step:,}"
    if reason is None:
        return SCHEDULE
    if asked == SCHEDULE:
        raise ValueError(
            f"--continue_lr {SCHEDULE}: {reason}; --continue_lr {CONSTANT} keeps --lr, and "
            f"{REWARM} begins the schedule again"
        )
    return REWARM
