"""Finished and unfinished runs, read from their checkpoints and logs, and their summaries."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm.documents import json_text, parse_json, read_bytes, read_json, with_nan
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.directory import best_checkpoint, run_directory
from dlrm.train.reports.roles import OF_NVIDIA, Roles

_LOG, _PREFIX = "log.json", "DLLL "
_MAX_LOG_BYTES = 1 << 28
_RESULTS = "results.json"  # in a checkpoint: the summary of a training by `dlrm.fit`
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
    saved = Checkpoint(checkpoint)
    folder = checkpoint.absolute().parent
    best = {k: v for k, v in saved.progress.get("best", {}).items() if k not in ("step", "epoch")}
    logs = [folder / _LOG, run_directory(folder) / _LOG]
    log = next((file for file in logs if file.is_file()), None)
    history = saved.progress.get("history", [])
    return SavedRun(
        {k: v for k, v in saved.config["flags"].items() if k not in _PLACES},
        best | (_summary(log) if log else {}),
        list(best),
        saved.progress.get("curve") or [entry for entry in history if "lr" in entry],
        [entry for entry in history if "lr" not in entry],
        Roles.from_config(saved.config) or OF_NVIDIA,
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


def write_results(checkpoint: Path, results: Mapping[str, Any]) -> None:
    """Replaces a checkpoint by one with the summary of its training, as `dlrm.fit` has it.

    Raises:
        OSError, ValueError: it cannot be written, or the checkpoint is damaged.
    """
    texts = {_RESULTS: json_text(dict(results), indent=1) + "\n"}
    Checkpoint(checkpoint).copy(checkpoint, texts, replace="checkpoint", is_linked=True)


def read_results(checkpoint: Path) -> dict[str, Any]:
    """Returns the summary of a checkpoint's training, or what its progress and log say of it.

    The metrics of rows that were never chosen on are in the log of a command, which is read for the
    run's best checkpoint only. Without a readable checkpoint the result is empty.
    """
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        saved = Checkpoint(checkpoint)
        if _RESULTS in saved.manifest["files"]:
            saved.verify(lambda name: name == _RESULTS)
            return with_nan(read_json(checkpoint / _RESULTS))
        run = read_run(checkpoint)
        is_best = best_checkpoint(checkpoint.parent) == checkpoint
        others = {n: v for n, v in run.metrics.items() if n not in run.tested and is_best}
        tested = {f"{run.roles.chooses}_{name}": run.metrics[name] for name in run.tested}
        return {**tested, **others, **run.roles.facts()}
    return {}
