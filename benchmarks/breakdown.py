"""Where the time of a training step goes: matrix products, interaction, gather, update, the rest.

    python benchmarks/breakdown.py [--workload kaggle] [--dtype bf16] [--rounds 5] [--steps 10]

The workloads are those of train.py, the trainer and its loader the real ones, the process set up as
our commands set theirs. Method: torch.profiler notes every operator of the training thread; its own
time, without that of operators it calls, goes to the part of the step that its name or its callers'
belong to. What lies between operators (Python, the autograd engine, memory) is the wall time less
all that. Readers run in threads of their own: only the wait for them is in the step. Figures are
medians over rounds, of the mean step of each.
"""

import dlrm.scripts.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import argparse
import os
import statistics
import time
from collections import defaultdict
from contextlib import closing

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from train import DTYPES, WORKLOADS, StepLog, gemms, ours, synthetic

from dlrm.data.loader import open_datasets
from dlrm.tasks.recommendation import Batches

LOADER, REST = "loader wait", "Python, autograd engine, memory"
PARTS = {  # beginnings of operators' names; the innermost that fits decides
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn::_linear"),
    "bias and ReLU": (
        *("aten::relu", "aten::clamp_min", "aten::threshold_backward", "aten::sum"),
        "aten::_addmm_activation",
    ),
    "casts": ("aten::_to_copy",),
    "interaction": ("dlrm::dot_interaction", "GeneratedBackwardFor_dlrm_dot_interaction"),
    "gather": ("dlrm::joint_embedding", "GeneratedBackwardFor_dlrm_joint_embedding"),
    "row update": ("dlrm::row_", "Optimizer.step#Row"),
    "dense optimizer": ("aten::_fused_", "Optimizer.step#", "Optimizer.zero_grad#"),
    "loss": (
        *("aten::binary_cross_entropy", "aten::log_sigmoid", "BinaryCrossEntropyWithLogits"),
        "autograd::engine::evaluate_function: BinaryCrossEntropy",
    ),
    LOADER: (LOADER,),
}


class WatchedBatches(Batches):
    """Batches, the wait for each of which the profiler sees."""

    def batches(self, epoch: int = 0, start: int = 0):
        with closing(super().batches(epoch, start)) as inner:
            while True:
                with record_function(LOADER):
                    batch = next(inner, None)
                if batch is None:
                    return
                yield batch


def part_of(event) -> str:
    """The part of the step that an operator belongs to."""
    if event.name == "aten::copy_" and event.cpu_parent is not None:
        if event.cpu_parent.name == "aten::addmm":
            return "bias and ReLU"  # the bias, laid out for the product to be added to
        event = event.cpu_parent
    while event is not None:
        for part, names in PARTS.items():
            if event.name.startswith(names):
                return part
        event = event.cpu_parent
    return REST


def measure(workload: str, dtype: str, steps: int, rounds: int) -> dict[str, float]:
    """Milliseconds of a step: of each part, "whole", "unprofiled" and "products alone"."""
    config, batch_size = WORKLOADS[workload]
    data = synthetic(config, batch_size, steps)
    log = StepLog()
    run = ours(config, data, DTYPES[dtype], log, WatchedBatches)
    products = gemms(config, batch_size, DTYPES[dtype])
    run(steps)
    products(steps)
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        found["products alone"].append(1e3 * products(steps) / steps)
        found["unprofiled"].append(1e3 * run(steps) / steps)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            whole = 1e3 * run(steps) / steps
        parts = dict.fromkeys(PARTS, 0.0)
        for event in profiler.events():
            if (part := part_of(event)) != REST:
                parts[part] += 1e-3 * event.self_cpu_time_total / steps
        for part, milliseconds in parts.items():
            found[part].append(milliseconds)
        found[REST].append(whole - sum(parts.values()))
        found["whole"].append(whole)
    log.faults_a_step()
    train = open_datasets(data).train
    began = time.perf_counter()
    for index in range(steps):
        train.batch(index)
    found["reading"].append(1e3 * (time.perf_counter() - began) / steps)
    return {name: statistics.median(values) for name, values in found.items()}


def report(columns: dict[str, dict[str, float]]) -> None:
    """Prints a table: a row for each part, milliseconds and share of the step of each workload."""
    print(f"| part of a step, ms (share) | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    for part in (*PARTS, REST):
        cells = (f"{c[part]:.2f} ({c[part] / c['whole']:.0%})" for c in columns.values())
        print(f"| {part} | {' | '.join(cells)} |")
    for name, title in (
        ("whole", "whole step, profiled"),
        ("unprofiled", "whole step, not profiled"),
        ("products alone", "the same matrix products, alone"),
        ("reading", "work of a reader's thread, a batch"),
    ):
        print(f"| {title} | {' | '.join(f'{c[name]:.2f}' for c in columns.values())} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="training steps of a round")
    parser.add_argument("--workload", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES)
    options = parser.parse_args()
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.rounds} rounds of "
        f"{options.steps} steps, load of the machine before: {os.getloadavg()[0]:.1f}\n"
    )
    report(
        {
            f"{workload} {dtype}": measure(workload, dtype, options.steps, options.rounds)
            for workload in options.workload
            for dtype in options.dtype
        }
    )
