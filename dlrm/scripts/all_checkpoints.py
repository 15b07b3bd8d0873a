"""All checkpoints of a run: their average, and a table of how each of them tests."""

import csv
from pathlib import Path

import torch
from safetensors.torch import load_file

from dlrm.distributed import World, from_first
from dlrm.train.averaging import average_in_order
from dlrm.train.checkpoint import AVERAGE, Parameters, load_checkpoint, save_checkpoint
from dlrm.train.log import Loader, RunLog, Watched
from dlrm.train.trainer import Task, Trainer

AVERAGED = "averaged"  # begins the name of an average of checkpoints
_NAMES = ("checkpoint", "weights")


def average_checkpoints(trainer: Trainer, test: Loader, decay: float) -> dict[str, float]:
    """Saves an average of a run's checkpoints beside them (`average_in_order`), and tests it."""
    assert trainer.checkpoints is not None
    directory, model, step = trainer.checkpoints.path, trainer.task.model, trainer.progress.step
    paths = sorted(directory.glob("step-*/dense.safetensors"))
    average = average_in_order((load_file(path) for path in paths), decay)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(average[name])
    target = directory / f"{AVERAGED}-{step:09d}"
    if not from_first(target.exists(), trainer.world):
        world = trainer.world
        save_checkpoint(target, Parameters(model), trainer.run, {"step": step}, world=world)
    trainer.log.line(f"average of {len(paths)} checkpoints (--weight_avg_exp {decay}): {target}")
    if not test.num_samples:
        return {}
    metrics = trainer.task.evaluate(test)
    return {f"averaged_{name}": value for name, value in metrics.items()}


def checkpoints_of(path: str) -> list[Path]:
    """The checkpoints of a directory in the order of their steps, averages last.

    Raises:
        FileNotFoundError: there is none.
    """
    series = [sorted(Path(path).glob(f"{name}-*/manifest.json")) for name in ("step", AVERAGED)]
    found = [file.parent for files in series for file in files]
    if not found:
        raise FileNotFoundError(f"{path}: no checkpoint here (expected step-*/)")
    return found


def validate_all(
    task: Task, test: Loader, directory: str, results: Path, world: World, log: RunLog
) -> dict[str, float]:
    """Tests all checkpoints of a directory that the table of results lacks; returns the best.

    Args:
        task: the network, whose weights change.
        test: what to test on.
        directory: of checkpoints; averages of weights are tested as well.
        results: CSV with what is known.
        world: the ranks.
        log: where to report.

    Raises:
        FileNotFoundError, ValueError: there is no checkpoint, or a file is not what it should be.
    """
    known = _read_results(results, (task.metric, task.loss_metric))
    for path in checkpoints_of(directory):
        for weights in ("trained", "average"):
            if weights == "average" and not (path / AVERAGE).exists():
                continue
            if (path.name, weights) in known:
                log.line(f"{path.name} ({weights}): in {results} already")
                continue
            average = dict(task.model.state_dict()) if weights == "average" else {}
            parameters = Parameters(task.model, average=average)
            progress = load_checkpoint(path, parameters, world=world)
            metrics = task.evaluate(Watched(test, path.name, log.quiet))
            shown = "  ".join(f"{name} {value:.6f}" for name, value in metrics.items())
            log.line(f"{path.name} ({weights}): {shown}")
            known[path.name, weights] = {"step": progress["step"], **metrics}
    if world.rank == 0:
        _write_results(results, known)
    (best, which), row = max(known.items(), key=lambda item: item[1][task.metric])
    log.line(f"best: {best} ({which}); all are in {results}")
    return {f"best_{name}": value for name, value in row.items()}


def _read_results(path: Path, metrics: tuple[str, ...]) -> dict[tuple[str, str], dict[str, float]]:
    if not path.exists():
        return {}
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    expected = (*_NAMES, "step", *metrics)
    if any(not set(expected) <= set(row) for row in rows):
        raise ValueError(f"{path}: expected a table with the columns {', '.join(expected)}")
    return {
        (row["checkpoint"], row["weights"]): {
            name: float(value) for name, value in row.items() if name not in _NAMES
        }
        for row in rows
    }


def _write_results(path: Path, known: dict[tuple[str, str], dict[str, float]]) -> None:
    values = list(next(iter(known.values())))
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*_NAMES, *values])
        writer.writeheader()
        for (checkpoint, weights), row in known.items():
            writer.writerow({"checkpoint": checkpoint, "weights": weights, **row})
