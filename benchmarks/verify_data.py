"""Times the verification of a dataset beside the copy bandwidth and an epoch of training.

    python benchmarks/verify_data.py [--rows 4000000] [--rounds 5] [--directory DIR]

It reads a synthetic dataset of Criteo's shape (13 numerical features, 26 tables) from the page
cache, batch by batch: without verification (`--verify_data never`), in a first run (`first`,
nothing recorded) and in a later one (`first`, everything recorded). The epoch is that of the model
of `make demo` with lazy Adam at batch 2048, extrapolated from some batches. All take turns; medians
over rounds are compared. OMP_NUM_THREADS sets the number of training threads.
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import argparse
import os
import statistics
import tempfile
import time
import zlib
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from dlrm.data.clicks.batch import ClickDataset
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.data.prefetch import prefetch
from dlrm.data.verification import STAMP
from dlrm.model.config import DLRMConfig
from dlrm.tasks.recommendation import Recommendation
from dlrm.train.optim.config import OptimizerConfig

_TABLE_SIZES = (100_000,) * 9 + (10_000,) * 9 + (100,) * 8
_BATCH = 2048
_TRAINED_BATCHES = 150


def open_train(directory: Path, verify_data: str) -> ClickDataset:
    config = DataConfig(dataset=str(directory), batch_size=_BATCH, verify_data=verify_data)
    return open_datasets(config).train


def read_seconds(directory: Path, verify_data: str) -> float:
    began = time.perf_counter()
    train = open_train(directory, verify_data)
    with closing(prefetch(train, range(len(train)))) as batches:
        for _ in batches:
            pass
    return time.perf_counter() - began


def train_seconds(task: Recommendation, train: ClickDataset) -> float:
    """Seconds of training on all rows, by those of some batches."""
    optimizers = task.optimizers(OptimizerConfig("adam", "adam"), one_look_up=True)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(1e-3) if torch.is_tensor(group["lr"]) else 1e-3
    began = 0.0
    with closing(prefetch(train, range(_TRAINED_BATCHES))) as batches:
        for step, batch in enumerate(batches):
            if step == 10:
                began = time.perf_counter()
            task.loss(batch).backward()
            for optimizer in optimizers:
                optimizer.step()
            task.model.zero_grad(set_to_none=True)
    return (time.perf_counter() - began) / (_TRAINED_BATCHES - 10) * len(train)


def crc_rate() -> tuple[float, float]:
    """GB/s of one thread: CRC-32, and a copy in memory."""
    data = np.random.default_rng(0).integers(0, 256, 1 << 26, np.uint8)
    began = time.perf_counter()
    zlib.crc32(data)
    crc = time.perf_counter() - began
    target = np.empty_like(data)
    np.copyto(target, data)
    began = time.perf_counter()
    np.copyto(target, data)
    return data.nbytes / crc / 1e9, data.nbytes / (time.perf_counter() - began) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default=None, help="where to write the dataset")
    options = parser.parse_args()
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        directory = Path(folder, "dataset")
        open_datasets(
            DataConfig(
                dataset_type="synthetic_disk",
                synthetic_dataset_dir=str(directory),
                synthetic_dataset_table_sizes=_TABLE_SIZES,
                synthetic_dataset_num_entries=options.rows,
            )
        )
        train = open_train(directory, "never")
        size = sum(path.stat().st_size for path in (directory / "train").iterdir())
        task = Recommendation(DLRMConfig(_TABLE_SIZES, 13, 16, (128, 64, 16), (256, 128, 1)))
        read_seconds(directory, "never")  # fills the page cache
        for _ in range(options.rounds):
            (directory / STAMP).unlink(missing_ok=True)
            for name, mode in (("never", "never"), ("first run", "first"), ("later", "first")):
                found.setdefault(name, []).append(read_seconds(directory, mode))
            found.setdefault("training", []).append(train_seconds(task, train))
    report(size, options, {name: statistics.median(values) for name, values in found.items()})


def report(size: int, options: argparse.Namespace, medians: dict[str, float]) -> None:
    crc, copy = crc_rate()
    cost = medians["first run"] - medians["never"]
    print(
        f"{size / 1e9:.2f} GB, {options.rows:,} rows, batch {_BATCH}, {os.cpu_count()} cores, "
        f"{options.rounds} rounds; one thread: CRC-32 {crc:.1f} GB/s, copy {copy:.1f} GB/s\n\n"
        "| an epoch | seconds | GB/s | share of an epoch of training |\n|---|---|---|---|"
    )
    for name, value in medians.items():
        print(
            f"| {name} | {value:.2f} | {size / value / 1e9:.2f} | "
            f"{value / medians['training']:.3f} |"
        )
    print(
        f"\ncomparing: {cost:.2f} s, {size / cost / 1e9:.2f} GB/s, "
        f"{cost / medians['training']:.4f} of a first epoch of training, "
        f"{(medians['later'] - medians['never']) / medians['training']:.4f} of a later one"
    )


if __name__ == "__main__":
    main()
