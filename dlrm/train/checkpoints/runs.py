"""Finished and unfinished runs, read from their checkpoints and logs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm.documents import parse_json, read_bytes
from dlrm.train.checkpoints.checkpoint import read_config, read_progress
from dlrm.train.checkpoints.directory import run_directory
from dlrm.train.reports.roles import OF_NVIDIA, Roles

_LOG, _PREFIX = "log.json", "DLLL "
_MAX_LOG_BYTES = 1 << 28
# Flags that name files or what a terminal shows, and do not affect the training.
_PLACES = (
    *("save_checkpoint_path", "load_checkpoint_path", "log_path", "output_dir", "resume"),
    *("tensorboard", "mlflow", "log_format", "verbose"),
)


@dataclass(frozen=True)
class SavedRun:
    """A run, from its newest checkpoint and its log.

    Attributes:
        flags: flags of the run, without paths.
        metrics: metrics of the best test, and of the log's summary.
        tested: names of the metrics of the best test.
        curve: "step" and training "loss".
        tests: "step" and the metrics of each test.
        roles: which rows choose and which report; those of NVIDIA's rule for other networks.
    """

    flags: dict[str, Any]
    metrics: dict[str, float]
    tested: list[str]
    curve: list[dict[str, float]]
    tests: list[dict[str, float]]
    roles: Roles


def read_run(checkpoint: Path) -> SavedRun:
    """Reads a run from a checkpoint and the log beside it."""
    config, progress = read_config(checkpoint), read_progress(checkpoint)
    folder = run_directory(checkpoint.absolute().parent)
    best = {k: v for k, v in progress.get("best", {}).items() if k not in ("step", "epoch")}
    metrics = dict(best)
    for log in (checkpoint.parent / _LOG, folder / _LOG):
        if log.is_file():
            metrics |= _summary(log)
            break
    history = progress.get("history", [])
    curve = progress.get("curve") or [entry for entry in history if "lr" in entry]
    return SavedRun(
        {k: v for k, v in config["flags"].items() if k not in _PLACES},
        metrics,
        list(best),
        curve,
        [entry for entry in history if "lr" not in entry],
        Roles.from_config(config) or OF_NVIDIA,
    )


def _summary(log: Path) -> dict[str, float]:
    """Returns the summary of the last run in a log; nothing if it has not ended."""
    summary: dict[str, float] = {}
    for line in read_bytes(log, _MAX_LOG_BYTES).splitlines():
        if not line.startswith(_PREFIX.encode()):
            raise ValueError(f"{log}: expected lines that begin with {_PREFIX!r}: not a run's log")
        entry = parse_json(line.removeprefix(_PREFIX.encode()), log)
        if entry.get("step") == "PARAMETER":
            summary = {}
        elif entry.get("step") == [] and isinstance(entry.get("data"), dict):
            summary = {k: v for k, v in entry["data"].items() if isinstance(v, int | float)}
    return summary


def different_flags(runs: Sequence[SavedRun]) -> list[str]:
    """Returns the flags in which runs differ; one that a run lacks counts as None."""
    names = dict.fromkeys(name for one in runs for name in one.flags)
    return [n for n in names if len({repr(one.flags.get(n)) for one in runs}) > 1]
