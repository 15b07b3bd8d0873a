"""Times the parts of a training step: matrix products, interaction, gather, update, the rest.

    python benchmarks/breakdown.py [--workload kaggle] [--dtype bf16] [--steps 40]
    python benchmarks/breakdown.py --device cuda --workload terabyte --batch 65536 --dtype fp16
    python benchmarks/breakdown.py ... --trace timeline.json.gz     for chrome://tracing or Perfetto

The workloads are those of train.py, with the real trainer and loader in a process set up as by our
commands. torch.profiler records every operator of the training thread. The own time of each,
without the operators that it calls, counts for the part of the step to which its name or its
callers' names belong; the time between operators is that of Python and the autograd engine. Every
step has the same operators in the same order, so the time of each, and of each product of the
limit, is the first decile over all steps, which excludes the influence of other programs. Readers
run in threads of their own: a step includes only the wait for them. On a GPU the time of an
operator is that of its kernels, the mean over all steps, since two threads launch them in no fixed
order; the rest is the time between kernels. Steps run eagerly.
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import argparse
import os
import statistics
from collections import defaultdict
from contextlib import closing

import torch
from ops import copy_bandwidth, in_turn, milliseconds
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from train import (
    DTYPES,
    OWN_OPTIMIZER,
    WORKLOADS,
    StepLog,
    bytes_of_a_step,
    ours,
    products,
    synthetic,
)

from dlrm.data.clicks.datasets import open_datasets
from dlrm.tasks.recommendation import ClickLoader

LOADER, REST = "loader wait", "Python and the autograd engine"
PARTS = {  # beginnings of operators' names; the innermost that fits decides
    "MLPs, interaction and loss in one call": ("dlrm::network",),
    "MLPs and other products": (
        *("dlrm::linear_relu", "aten::mm", "aten::addmm", "aten::bmm", "mkldnn::_linear"),
    ),
    "bias and ReLU": (
        *("aten::relu", "aten::clamp_min", "aten::threshold_backward", "aten::sum"),
        *("aten::_addmm_activation", "dlrm::relu_bias_backward"),
    ),
    "casts": ("aten::_to_copy",),
    "interaction alone": ("dlrm::dot_interaction", "GeneratedBackwardFor_dlrm_dot_interaction"),
    "gather": ("dlrm::joint_embedding", "GeneratedBackwardFor_dlrm_joint_embedding"),
    "row update": ("dlrm::row_", "Optimizer.step#Row"),
    "dense optimizer": (
        "aten::_fused_",
        "dlrm::dense_adam",
        "Optimizer.step#",
        "Optimizer.zero_grad#",
    ),
    "loss alone": (
        *("aten::binary_cross_entropy", "aten::log_sigmoid", "BinaryCrossEntropyWithLogits"),
        *("autograd::engine::evaluate_function: BinaryCrossEntropy", "dlrm::logistic_loss"),
    ),
    LOADER: (LOADER,),
}


class WatchedBatches(ClickLoader):
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


def measure(
    workload: str,
    dtype: str,
    steps: int,
    device: str = "cpu",
    batch_size: int = 0,
    trace: str | None = None,
) -> dict[str, float]:
    """Milliseconds of a step: of each part, and of what `report` names.

    The timeline of the profiled steps is written to `trace`.
    """
    config, own_batch_size = WORKLOADS[workload]
    batch_size = batch_size or own_batch_size
    data = synthetic(config, batch_size, steps, device)
    log = StepLog()
    optimizer = OWN_OPTIMIZER.get(workload, "sgd")
    run = ours(config, data, DTYPES[dtype], log, WatchedBatches, optimizer)
    run(steps)
    found = {"unprofiled": 1e3 * first_decile(log.seconds_of_steps())}
    if device == "cuda":  # the host is ahead within a run, and at its end it is not
        found["unprofiled"] = milliseconds(lambda: run(steps), device) / steps
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA][: 1 + (device == "cuda")]
    with profile(activities=activities) as profiler:
        run(steps)
    if trace is not None:
        profiler.export_chrome_trace(trace)
    if device == "cpu":
        found |= parts_of_steps(profiler.events())
    else:
        found |= parts_of_kernels(profiler.events(), steps)
        found[REST] = found["unprofiled"] - sum(found[part] for part in PARTS)
    found["whole"] = sum(found[part] for part in (*PARTS, REST))
    sides = dict(enumerate(products(config, batch_size, DTYPES[dtype], device)))
    found["products alone"] = sum(in_turn(sides, steps, first_decile, device).values())
    train = open_datasets(data).train
    moved = bytes_of_a_step(config, train.batch(0), DTYPES[dtype], optimizer)
    found["moving"] = 1e3 * moved / copy_bandwidth(device)
    found["composite"] = found["products alone"] + found["moving"]
    found["reading"] = first_decile(timed(lambda: train.batch(0), steps, device))
    return found


def parts_of_steps(events) -> dict[str, float]:
    """Milliseconds of each part of a step on the CPU, from the operators of many steps."""
    thread = next(event.thread for event in events if event.name == LOADER)
    ordered = sorted(
        (e for e in events if e.thread == thread and e.device_type == DeviceType.CPU),
        key=lambda e: e.time_range.start,
    )
    steps: list[list] = []
    for event in ordered:
        if event.name == LOADER:
            steps.append([])
        if steps:
            steps[-1].append(event)
    usual = statistics.mode(map(len, steps))
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    for step in steps:
        if len(step) != usual:
            continue  # the first or last of a run
        end = step[0].time_range.start
        for place, event in enumerate(step):
            times[place, part_of(event)].append(1e-3 * event.self_cpu_time_total)
            if event.cpu_parent is None:
                times[-1 - place, REST].append(1e-3 * (event.time_range.start - end))
                end = event.time_range.end
    parts = dict.fromkeys((*PARTS, REST), 0.0)
    for (_, part), values in times.items():
        parts[part] += first_decile(values)
    return parts


def parts_of_kernels(events, steps: int) -> dict[str, float]:
    """Milliseconds of each part of a step on a GPU, from the kernels of all operators."""
    parts = dict.fromkeys((*PARTS, REST), 0.0)
    for event in events:
        if event.device_type == DeviceType.CPU:
            parts[part_of(event)] += 1e-3 * event.self_device_time_total / steps
    return parts


def first_decile(values: list[float]) -> float:
    return statistics.quantiles(values, n=10, method="inclusive")[0]


def timed(function, count: int, device: str) -> list[float]:
    """Milliseconds of each of `count` calls."""
    return [milliseconds(function, device) for _ in range(count)]


def report(columns: dict[str, dict[str, float]]) -> None:
    """Prints milliseconds and shares of each part that takes time, a column for each workload."""
    print(f"| part of a step, ms (share) | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    for part in (*PARTS, REST):
        if not any(c[part] for c in columns.values()):
            continue
        cells = (f"{c[part]:.2f} ({c[part] / c['whole']:.0%})" for c in columns.values())
        print(f"| {part} | {' | '.join(cells)} |")
    shares = (f"{c['composite'] / c['unprofiled']:.2f}" for c in columns.values())
    print(f"| composite limit / whole step, not profiled | {' | '.join(shares)} |")
    for name, title in (
        ("whole", "whole step, sum of these"),
        ("unprofiled", "whole step, not profiled"),
        ("products alone", "the MLPs' matrix products, alone"),
        ("moving", "the bytes that must move, at the speed of a copy"),
        ("composite", "composite limit, the sum of these two"),
        ("reading", "a reader's work for a batch, in its thread"),
    ):
        print(f"| {title} | {' | '.join(f'{c[name]:.2f}' for c in columns.values())} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--workload", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--dtype", nargs="+", default=["fp32", "bf16"], choices=DTYPES)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--batch", type=int, default=0, help="0: each workload's own")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--trace", help="write the timeline of the last workload's steps there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.steps} steps, "
        f"load of the machine before: {os.getloadavg()[0]:.1f}\n"
    )
    report(
        {
            f"{workload} {dtype}": measure(
                workload, dtype, options.steps, options.device, options.batch, options.trace
            )
            for workload in options.workload
            for dtype in options.dtype
        }
    )
