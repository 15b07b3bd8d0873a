"""All checkpoints of a run: their average, and a table of their test metrics."""

import csv
import hashlib
import io
import json
import math
from collections.abc import Mapping
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
_NAMES = ("checkpoint", "weights", "tested_on")
_Results = dict[tuple[str, str, str], dict[str, float]]


class Best(NamedTuple):
    """The best checkpoint of `validate_all`; its weights are "trained" or their "average"."""

    path: Path
    weights: str
    metrics: dict[str, float]

    def summary(self) -> dict[str, float]:
        """Returns the metrics with the prefix best_."""
        return {f"best_{name}": value for name, value in self.metrics.items()}


def average_checkpoints(trainer: Trainer, test: Loader, decay: float) -> dict[str, float]:
    """Saves an average of a run's checkpoints beside them (`average_in_order`), and tests it.

    Raises:
        FileExistsError: there is another average of this step.
    """
    assert trainer.checkpoints is not None
    directory, model, step = trainer.checkpoints.path, trainer.task.model, trainer.progress.step
    world, average = trainer.world, {}
    paths = from_first(sorted(directory.glob("step-*/manifest.json")), world)
    with agreed(world, ValueError, OSError):
        if world.rank == 0:
            average = average_in_order((Checkpoint(p.parent).dense for p in paths), decay)
    average = from_first(average, world)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(average[name])
    target = directory / f"{AVERAGED}-{step:09d}"
    facts = {"step": step, "weight_avg_exp": decay, "checkpoints": [p.parent.name for p in paths]}
    with agreed(world, FileExistsError, ValueError, OSError):
        saved = Checkpoint(target).progress if world.rank == 0 and target.exists() else {}
        if saved and any(saved.get(name) != value for name, value in facts.items()):
            raise FileExistsError(
                f"{target}: another average, of --weight_avg_exp {saved.get('weight_avg_exp')} "
                f"and {len(saved.get('checkpoints', []))} checkpoints; move it away"
            )
    if not from_first(saved, world):
        weights = Parameters(model, parts=trainer.parameters.parts)
        Checkpoint.save(target, weights, trainer.run, facts, world=world)
    trainer.log.line(f"average of {len(paths)} checkpoints (--weight_avg_exp {decay}): {target}")
    if not test.num_samples:
        return {}
    metrics = trainer.task.evaluate(test)
    return {f"averaged_{name}": value for name, value in metrics.items()}


def checkpoints_of(path: str) -> list[Path]:
    """Returns the checkpoints of a directory in the order of their steps, averages last."""
    series = [sorted(Path(path).glob(f"{name}-*/manifest.json")) for name in ("step", AVERAGED)]
    found = [file.parent for files in series for file in files]
    if not found:
        raise FileNotFoundError(f"{path}: no checkpoint here (expected step-*/)")
    return found


def validate_all(
    task: NetworkTask, test: Loader, directory: str, results: Path, log: RunLog, tested_on: str
) -> Best:
    """Tests all checkpoints of a directory that the table of results lacks; returns the best.

    Args:
        task: the network, whose weights change.
        directory: directory of checkpoints; averages of weights are tested as well.
        results: CSV with earlier results; it is written after each test.
        tested_on: the data and everything else that a result depends on (`name_of`); other results
            are ignored.
    """
    table = _read_results(results, (task.metric, task.loss_metric))
    for path in checkpoints_of(directory):
        has_average = "average.safetensors" in Checkpoint(path).manifest["files"]
        for weights in ("trained", *(["average"] if has_average else [])):
            key = (path.name, weights, tested_on)
            if key in table:
                log.line(f"{path.name} ({weights}): in {results} already")
                continue
            progress = load_tested(task, path, weights)
            metrics = task.evaluate(Watched(test, path.name, log.quiet))
            log.line(f"{path.name} ({weights}): {line_of(metrics)}")
            table[key] = {"step": progress["step"], **metrics}
            if task.world.rank == 0:
                _write_results(results, table)
    finite = {
        key: row
        for key, row in table.items()
        if key[2] == tested_on and math.isfinite(row[task.loss_metric])
    }
    if not finite:
        raise ValueError(f"{directory}: no checkpoint has a finite {task.loss_metric}")
    best, which, _ = key = min(finite, key=lambda key: cost(task.metric, finite[key][task.metric]))
    log.line(f"best: {best} ({which}); all are in {results}")
    return Best(Path(directory, best), which, finite[key])


def load_tested(task: NetworkTask, path: Path, weights: str) -> dict[str, Any]:
    """Loads a checkpoint's "trained" weights or their "average"; returns its progress."""
    parameters = Parameters(task.model)
    if weights == "average":
        parameters = parameters.averaged()
    # A diverged one has metrics that are NaN, and is not the best.
    return Checkpoint(path).load(parameters, task.world, finite=False)


def name_of(data: str, facts: Mapping[str, Any]) -> str:
    """Returns a name for what a result depends on: the data, and a digest of all facts."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return f"{data} ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


def _read_results(path: Path, metrics: tuple[str, ...]) -> _Results:
    if not path.exists():
        return {}
    expected = (*_NAMES, "step", *metrics)
    results: _Results = {}
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if not set(expected) <= set(reader.fieldnames or ()):
            raise ValueError(f"{path}: expected a table with the columns {', '.join(expected)}")
        for row in reader:
            try:
                key = (row.pop("checkpoint"), row.pop("weights"), row.pop("tested_on"))
                results[key] = {name: float(value) for name, value in row.items()}
                results[key]["step"] = int(results[key]["step"])
            except (TypeError, ValueError) as error:
                where = f"{path}: line {reader.line_num}"
                raise ValueError(f"{where}: expected {', '.join(expected)}, got {row}") from error
    return results


def _write_results(path: Path, table: _Results) -> None:
    values = list(dict.fromkeys(name for row in table.values() for name in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [*_NAMES, *values], restval="nan")
    writer.writeheader()
    for key, row in table.items():
        writer.writerow({**dict(zip(_NAMES, key, strict=True)), **row})
    write_atomically(path, text.getvalue())
