"""Times ROC AUC over processes beside scikit-learn's in one process on the same rows.

    python benchmarks/auc.py [--rows 10000000] [--ranks 2] [--rounds 5]
    python benchmarks/auc.py --intervals [--rows 10000000] [--replicates 3] [--rounds 3]

The ranks are processes of one thread, connected by gloo; each has its part of the rows in memory,
as after an evaluation. All sides run in turn in every round, each alone, and the medians are
compared. The time of the ranks is that of the slowest.

With --intervals, the metrics of `dlrm evaluate` that scikit-learn has are measured once and in each
replicate of a bootstrap, on one thread: AUC, average precision, log loss and Brier score. Ours are
all metrics of `dlrm evaluate`, and DeLong's interval of the AUC as well. The time is that of the
processor, for the metrics and for each replicate; the values must agree.
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from sklearn.metrics import (
    average_precision_score,
    brier_score_loss,
    log_loss,
    roc_auc_score,
)

from dlrm.distributed import World
from dlrm.metrics.clicks import roc_auc
from dlrm.metrics.judged import ScoredRows, judge


def rows(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits, float32, and labels; a tenth clicks, AUC about 0.8."""
    random = np.random.default_rng(seed)
    labels = random.random(count) < 0.1
    return random.normal(-2.5, 1.0, count).astype(np.float32) + np.float32(1.19) * labels, labels


def serve(rank: int, size: int, store: str, count: int, pipe) -> None:
    """Times `roc_auc` of this rank's part whenever it is asked to."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=300)
    )
    part = World(rank, size)
    scores, labels = (torch.from_numpy(x) for x in rows(count, rank))
    labels = labels.float()
    pipe.send(None)
    while pipe.recv():
        dist.barrier()
        began = time.perf_counter()
        area = roc_auc(scores, labels, part)
        pipe.send((time.perf_counter() - began, area))
    dist.destroy_process_group()


def timed(function) -> tuple[float, float]:
    began = time.perf_counter()
    area = function()
    return time.perf_counter() - began, area


def measure(count: int, size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round of each side, which all find the same area."""
    spawning = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    with tempfile.TemporaryDirectory() as folder:
        store = (Path(folder) / "store").as_uri()
        for rank in range(size):
            here, there = spawning.Pipe()
            arguments = (rank, size, store, count // size, there)
            processes.append(spawning.Process(target=serve, args=arguments, daemon=True))
            processes[-1].start()
            pipes.append(here)
        for pipe in pipes:
            pipe.recv()
        parts = [rows(count // size, rank) for rank in range(size)]
        scores, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        tensors = torch.from_numpy(scores), torch.from_numpy(labels).float()

        def over_ranks() -> tuple[float, float]:
            for pipe in pipes:
                pipe.send(True)
            seconds, areas = zip(*(pipe.recv() for pipe in pipes), strict=True)
            assert len(set(areas)) == 1
            return max(seconds), areas[0]

        sides = {
            "scikit-learn": lambda: timed(lambda: roc_auc_score(labels, scores)),
            "one process": lambda: timed(lambda: roc_auc(*tensors)),
            f"{size} ranks": over_ranks,
        }
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds):
            areas = {}
            for name, side in sides.items():
                took, areas[name] = side()
                seconds[name].append(took)
            assert areas["one process"] == areas[f"{size} ranks"]
            assert abs(areas["one process"] - areas["scikit-learn"]) < 1e-12, areas
        for pipe in pipes:
            pipe.send(False)
        for process in processes:
            process.join(20)
    return seconds


def of_scikit_learn(
    scores: np.ndarray, labels: np.ndarray, weights: np.ndarray | None
) -> dict[str, float]:
    likely = 1 / (1 + np.exp(-scores.astype(np.float64)))
    return {
        "auc": roc_auc_score(labels, scores, sample_weight=weights),
        "pr_auc": average_precision_score(labels, scores, sample_weight=weights),
        "log_loss": log_loss(labels, likely, sample_weight=weights),
        "rmse": brier_score_loss(labels, likely, sample_weight=weights) ** 0.5,
    }


def replicated(scores: np.ndarray, labels: np.ndarray, replicates: int) -> dict[str, float]:
    """Metrics by scikit-learn, whose replicates weigh each row by how often it is drawn."""
    random, count = np.random.default_rng(0), len(labels)
    for _ in range(replicates):
        drawn = np.bincount(random.integers(0, count, count), minlength=count)
        of_scikit_learn(scores, labels, drawn)
    return of_scikit_learn(scores, labels, None)


def judged(scores: np.ndarray, labels: np.ndarray, replicates: int) -> dict[str, float]:
    (found,) = judge(ScoredRows((scores,), labels), replicates).models
    return {name: interval.value for name, interval in found.items()}


def intervals(count: int, replicates: int, rounds: int) -> None:
    """Prints processor seconds of the metrics, and of each replicate, of both sides."""
    scores, labels = rows(count, 0)
    sides = {"scikit-learn": replicated, "ours": judged}
    numbers = (0, replicates)
    seconds: dict[tuple[str, int], list[float]] = {(s, n): [] for s in sides for n in numbers}
    for _ in range(rounds):
        for number in numbers:
            found = {}
            for name, side in sides.items():
                began = time.process_time()
                found[name] = side(scores, labels, number)
                seconds[name, number].append(time.process_time() - began)
            for metric, value in found["scikit-learn"].items():
                assert abs(value - found["ours"][metric]) < 1e-6, metric
    middle = {key: statistics.median(values) for key, values in seconds.items()}
    print(f"{count:,} rows, medians of {rounds} rounds, processor seconds, one thread\n")
    print("| side | metrics | a replicate | 200 replicates, from these | x scikit-learn |")
    print("|---|---|---|---|---|")
    whole = {}
    for name in sides:
        once, more = middle[name, 0], middle[name, replicates]
        each = (more - once) / replicates
        whole[name] = once + 200 * each
        times = whole["scikit-learn"] / whole[name]
        print(f"| {name} | {once:.2f} | {each:.2f} | {whole[name]:.0f} | {times:.1f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--intervals", action="store_true", help="metrics with a bootstrap")
    parser.add_argument("--replicates", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.intervals:
        intervals(options.rows, options.replicates, options.rounds)
        sys.exit()
    found = measure(options.rows, options.ranks, options.rounds)
    middle = {name: statistics.median(seconds) for name, seconds in found.items()}
    print(f"{options.rows:,} rows, medians of {options.rounds} rounds, one thread a process\n")
    print("| side | seconds | least | most | x scikit-learn |")
    print("|---|---|---|---|---|")
    for name, seconds in found.items():
        print(
            f"| {name} | {middle[name]:.3f} | {min(seconds):.3f} | {max(seconds):.3f} | "
            f"{middle['scikit-learn'] / middle[name]:.1f} |"
        )
