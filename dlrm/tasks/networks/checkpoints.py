"""All checkpoints of a run: their average, and a table of their test metrics."""

import csv
import io
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dlrm.distributed import agreed, from_first
from dlrm.files import write_atomically
from dlrm.metrics.table import cost, line_of
from dlrm.tasks.networks.task import NetworkTask
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.state import Parameters
from dlrm.train.ema import average_in_order
from dlrm.train.log import Loader, RunLog, Watched
from dlrm.train.trainer import Trainer

AVERAGED = "averaged"  # prefix of the name of an average of checkpoints


class Best(NamedTuple):
    """The best checkpoint of `validate_all`; its weights are "trained" or their "average"."""

    path: Path
    weights: str
    metrics: dict[str, float]

    def summary(self) -> dict[str, float]:
        """Returns the metrics with the prefix best_."""
        return {f"best_{name}": value for name, value in self.metrics.items()}


def average_checkpoints(trainer: Trainer, test: Loader, decay: float) -> dict[str, float]:
    """Saves an average of a run's checkpoints beside them (`average_in_order`), and tests it."""
    assert trainer.checkpoints is not None
    directory, model, step = trainer.checkpoints.path, trainer.task.model, trainer.progress.step
    world, average = trainer.world, {}
    target = directory / f"{AVERAGED}-{decay}-{step:09d}"
    paths = from_first(sorted(directory.glob("step-*/manifest.json")), world)
    with agreed(world, ValueError, OSError):
        if world.rank == 0:
            average = average_in_order((Checkpoint(p.parent).dense for p in paths), decay)
    average = from_first(average, world)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(average[name])
    if not from_first(target.exists(), world):  # by an earlier run that ended here
        weights = Parameters(model, parts=trainer.parameters.parts)
        facts = {"step": step, "checkpoints": [path.parent.name for path in paths]}
        Checkpoint.save(target, weights, trainer.run, facts, world=world)
    trainer.log.line(f"average of {len(paths)} checkpoints (--weight_avg_exp {decay}): {target}")
    metrics = trainer.task.evaluate(test) if test.num_samples else {}
    return {f"averaged_{name}": value for name, value in metrics.items()}


def checkpoints_of(path: str) -> list[Path]:
    """Returns the checkpoints of a directory in the order of their steps, averages last."""
    series = [sorted(Path(path).glob(f"{name}-*/manifest.json")) for name in ("step", AVERAGED)]
    found = [file.parent for files in series for file in files]
    if not found:
        raise FileNotFoundError(f"{path}: no checkpoint here (expected step-*/)")
    return found


def validate_all(
    task: NetworkTask, test: Loader, directory: str, results: Path, log: RunLog
) -> Best:
    """Tests all checkpoints of a directory; returns the best.

    Args:
        task: the network, whose weights change.
        directory: directory of checkpoints; averages of weights are tested as well.
        results: CSV file of the results; it is written after each test.
    """
    table: list[dict[str, Any]] = []
    for path in checkpoints_of(directory):
        has_average = "average.safetensors" in Checkpoint(path).manifest["files"]
        for weights in ("trained", *(["average"] if has_average else [])):
            step = load_tested(task, path, weights)["step"]
            metrics = task.evaluate(Watched(test, path.name, log.quiet))
            log.line(f"{path.name} ({weights}): {line_of(metrics)}")
            table.append({"checkpoint": path.name, "weights": weights, "step": step, **metrics})
            if task.world.rank == 0:
                _write(results, table)
    finite = [row for row in table if math.isfinite(row[task.loss_metric])]
    if not finite:
        raise ValueError(f"{directory}: no checkpoint has a finite {task.loss_metric}")
    best = min(finite, key=lambda row: cost(task.metric, row[task.metric]))
    name, weights = best.pop("checkpoint"), best.pop("weights")
    log.line(f"best: {name} ({weights}); all are in {results}")
    return Best(Path(directory, name), weights, best)


def load_tested(task: NetworkTask, path: Path, weights: str) -> dict[str, Any]:
    """Loads a checkpoint's "trained" weights or their "average"; returns its progress."""
    parameters = Parameters(task.model)
    if weights == "average":
        parameters = parameters.averaged()
    # A diverged one has metrics that are NaN, and is not the best.
    return Checkpoint(path).load(parameters, task.world, finite=False)


def _write(path: Path, table: list[dict[str, Any]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, table[0].keys())
    writer.writeheader()
    writer.writerows(table)
    write_atomically(path, text.getvalue())
