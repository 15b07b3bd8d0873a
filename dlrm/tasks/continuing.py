"""Trainings that continue where another run ended: `--continue_from`.

A run's checkpoints have, under "continues" in their configuration, the checkpoint that it continues
from. Rows whose ids have not been seen for some days begin anew; the days are counted in
`days.safetensors`, by table: "seen.<table>" is the last day of each row, and "evicted.<table>" the
rows that have begun anew and were not seen since. A day is a run.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlrm.data.clicks.batch import ClickDataset
from dlrm.data.clicks.replay import Replayed
from dlrm.files import MANIFEST
from dlrm.flags import Values
from dlrm.remote.cache import with_uris
from dlrm.tasks.config import CARRIED, CONSTANT, REWARM, SCHEDULE
from dlrm.tasks.run import CONTINUES, known_checkpoint, saved_flags
from dlrm.train.checkpoints.checkpoint import read_config, read_progress
from dlrm.train.checkpoints.directory import find_checkpoint
from dlrm.train.checkpoints.nvidia import is_nvidia
from dlrm.train.checkpoints.state import read_tensors
from dlrm.train.schedule import ScheduleConfig

DAYS = "days.safetensors"
_RUN_WITH_ONE_DAY = {"day": 1}


def with_carried(values: Values) -> Values:
    """Returns settings with those of the run that is continued for the ones that are not given.

    A run that has been interrupted and is resumed has those of its own checkpoint.
    """
    if values.get("mode", "train") != "train":
        return values
    resumed, path = known_checkpoint(values, None), values["continue_from"]
    if resumed is not None and CONTINUES in read_config(resumed):
        names = {*CARRIED, "continue_lr", "replay", "replay_data"}
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
    config, manifest = read_config(checkpoint), checkpoint / MANIFEST
    digest = hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.exists() else None
    before = config.get(CONTINUES, _RUN_WITH_ONE_DAY)
    return {
        "run": directory,
        "checkpoint": checkpoint.name,
        "manifest": digest,
        "step": int(read_progress(checkpoint).get("step", 0)) if digest else 0,
        "day": before["day"] + 1,
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


@dataclass(frozen=True)
class Days:
    """The last days on which rows of tables were seen in training.

    Attributes:
        seen: for each table the last day of each row, int16.
        evicted: for each table the rows that have begun anew and were not seen since, ascending.
    """

    seen: list[np.ndarray]
    evicted: list[np.ndarray]

    @classmethod
    def load(cls, checkpoint: Path, table_sizes: Sequence[int], day: int) -> "Days":
        """Returns the days in a checkpoint; rows without one were seen on its own `day`."""
        path = checkpoint / DAYS
        stored = read_tensors(path) if path.is_file() else {}
        seen, evicted = [], []
        for table, rows in enumerate(table_sizes):
            days = np.full(rows, day, np.int16)
            known = stored.get(f"seen.{table}", torch.empty(0, dtype=torch.int16)).numpy()
            gone = stored.get(f"evicted.{table}", torch.empty(0, dtype=torch.int64)).numpy()
            if len(known) > rows or (len(gone) and gone[-1] >= rows):
                raise ValueError(f"{path}: table {table}: expected at most {rows} rows: damaged")
            days[: len(known)] = known
            seen.append(days)
            evicted.append(gone)
        return cls(seen, evicted)

    def unseen(self, today: int, most: int) -> dict[int, np.ndarray]:
        """Returns the rows of each table that were not seen on `most` days before today.

        Row 0, of missing and unknown values, stays, and so do rows that have begun anew already.
        """
        found = {}
        for table, (seen, gone) in enumerate(zip(self.seen, self.evicted, strict=True)):
            rows = np.flatnonzero(today - seen.astype(np.int64) > most)
            rows = np.setdiff1d(rows[rows > 0], gone, assume_unique=True)
            if len(rows):
                found[table] = rows
        return found

    def after(self, today: int, data: ClickDataset, evicted: Mapping[int, np.ndarray]) -> "Days":
        """Returns the days after a training on rows.

        Args:
            evicted: rows that have begun anew today.
        """
        own = data.dataset if isinstance(data, Replayed) else data
        here = [np.zeros(len(seen), bool) for seen in self.seen]
        tables = own.field_tables or range(len(here))
        for index in range(len(own)):
            batch = own.batch(index)
            ids, count = batch.categorical.cpu().numpy(), len(tables)
            if batch.lengths is None:
                of_fields = [ids[:, field] for field in range(count)]
            else:
                lengths = batch.lengths.cpu().numpy().astype(np.int64)
                fields = np.tile(np.arange(count), len(lengths)).repeat(lengths.ravel())
                of_fields = [ids[fields == field] for field in range(count)]
            for table, column in zip(tables, of_fields, strict=True):
                mark = here[table]
                known = (column >= 0) & (column < len(mark))  # the training names others
                mark[column[known].astype(np.int64)] = True
        gone = []
        for table, mark in enumerate(here):
            rows = np.union1d(self.evicted[table], evicted.get(table, np.empty(0, np.int64)))
            gone.append(rows[~mark[rows]].astype(np.int64))
        days = zip(here, self.seen, strict=True)
        return Days([np.where(m, today, s).astype(np.int16) for m, s in days], gone)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the content of `DAYS`."""
        return {
            f"{name}.{table}": torch.from_numpy(array)
            for name, arrays in (("seen", self.seen), ("evicted", self.evicted))
            for table, array in enumerate(arrays)
        }


def evicted_rows(checkpoint: Path) -> int | None:
    """Returns the number of rows that have begun anew and were not seen since, if it is counted."""
    path = checkpoint / DAYS
    if not path.is_file():
        return None
    return sum(len(rows) for name, rows in read_tensors(path).items() if name.startswith("evicted"))
