"""Times saving and loading a checkpoint beside the speed of the disk.

    python benchmarks/checkpoint.py [--gib 1] [--rounds 5] [--directory DIR]

For the disk, the same bytes are written to as many files, one after the other, by plain writes and
fsync. "stall" is the time for which training stops: the whole save, or with `--async_checkpoint`
the copy in memory. All sides take turns; medians over rounds are compared.
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from dlrm.model.config import DLRMConfig
from dlrm.tasks.recommendation import Recommendation
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.directory import CheckpointDirectory
from dlrm.train.checkpoints.state import Parameters
from dlrm.train.optim.config import OptimizerConfig

_TABLES, _DIM = 26, 128


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def write_plainly(parameters: Parameters, directory: Path) -> None:
    """Writes the tables' bytes alone, the least that a disk takes for a checkpoint."""
    directory.mkdir()
    for table, weight, own, _ in parameters.table_parts():
        with open(directory / str(table), "wb", buffering=0) as file:
            data = weight[own].detach().numpy().data.cast("B")
            while len(data):
                data = data[file.write(data) :]
            os.fsync(file.fileno())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default=None, help="on the disk to measure")
    options = parser.parse_args()
    rows = int(options.gib * 2**30 / 4 / _DIM / _TABLES)
    task = Recommendation(DLRMConfig((rows,) * _TABLES))
    optimizers = task.optimizers(OptimizerConfig())
    parameters = Parameters(task.model, task.table_parameters(), optimizers)
    found: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=options.directory) as folder:
            for name, value in measure(parameters, Path(folder)).items():
                found.setdefault(name, []).append(value)
    bytes_ = rows * _TABLES * _DIM * 4
    medians = {name: statistics.median(values) for name, values in found.items()}
    print(f"{bytes_ / 2**30:.2f} GiB of tables, torch {torch.__version__}, {os.cpu_count()} cores")
    print(
        f"{options.rounds} rounds\n\n| | seconds | MiB/s | x the disk's rate |\n|---|---|---|---|"
    )
    for name, value in medians.items():
        disk = medians["disk writes" if "write" in name or "save" in name else "disk reads"]
        print(f"| {name} | {value:.2f} | {bytes_ / 2**20 / value:,.0f} | {disk / value:.2f} |")


def measure(parameters: Parameters, folder: Path) -> dict[str, float]:
    result = {"disk writes": seconds(lambda: write_plainly(parameters, folder / "plain"))}
    reads = [(folder / "plain" / str(table)).read_bytes for table in range(_TABLES)]
    run = CheckpointDirectory(folder / "run")
    save = (1, parameters, {"flags": {}}, {"step": 1})
    result["save"] = seconds(lambda: run.save(*save))
    background = CheckpointDirectory(folder / "later", in_background=True)
    result["save, stall of --async_checkpoint"] = seconds(lambda: background.save(*save))
    background.finish()
    result["disk reads"] = sum(seconds(read) for read in reads)  # from the page cache, as load
    result["load, with its checksums"] = seconds(lambda: Checkpoint(run.last()).load(parameters))
    return result


if __name__ == "__main__":
    main()
