"""Measures weak and strong scaling of training over processes, and the cost of communication.

    python benchmarks/scaling.py [--processes 2] [--rounds 7] [--steps 4] [--dtype fp32]

Every process has one thread and a core of its own, also the single process for comparison;
"threads" is one process with as many threads as the others are processes. Weak scaling keeps the
batch of each process, strong scaling the global batch. "apart" is the same number of processes
that train without communication: they lose only to shared memory and clocks, which software cannot
change. All take turns; medians over rounds are compared.

Communication is measured twice: by itself, with the same shapes on an otherwise idle machine, and
as the time for which training waits for it ("exposed"); the rest is overlapped.
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from train import DTYPES, WORKLOADS, StepLog

from dlrm.data.clicks.batch import Shard
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.distributed import World, exchange
from dlrm.pages.pictures import write_picture
from dlrm.step_clock import EXCHANGE
from dlrm.tasks.recommendation import ClickLoader, Recommendation
from dlrm.train.config import TrainConfig
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.trainer import Trainer


class Training:
    """A run of this process's rank that takes a few steps on request."""

    def __init__(self, world: World, workload: str, dtype: str, batch: int):
        config, _ = WORKLOADS[workload]
        self.world, self.batch = world, batch
        task = Recommendation(config, world, DTYPES[dtype])
        data = DataConfig(
            dataset_type="synthetic_gpu",
            batch_size=batch,
            synthetic_dataset_table_sizes=config.table_sizes,
            synthetic_dataset_num_entries=batch * 1_000_000,
        )
        shard = Shard(world, tuple(task.model.fields_by_rank[world.rank]))
        self.batches = ClickLoader(open_datasets(data, shard).train)
        self.task = task
        settings = TrainConfig(max_steps=1, print_freq=1_000_000, verdict=False)
        optimizers = task.optimizers(OptimizerConfig(), one_look_up=True)
        self.trainer = Trainer(
            task,
            optimizers=optimizers,
            schedule=lambda step: 0.01,
            config=settings,
            world=world,
            log=StepLog(),
        )

    def run(self, steps: int) -> tuple[float, float]:
        """Seconds of a step, and those of it that communication was waited for."""
        nothing = type("Nothing", (), {"num_samples": 0})()
        done = self.trainer.progress.step
        self.trainer.config = replace(self.trainer.config, max_steps=done + steps)
        if self.world.size > 1:
            dist.barrier()
        began = self.trainer._clock.seconds()
        self.trainer.fit(self.batches, nothing)
        seconds, waited = self.trainer._clock.seconds() - began, self.trainer._parts.lap()[EXCHANGE]
        return seconds / steps, waited / steps

    def communicate(self, steps: int) -> tuple[float, float]:
        """Seconds that a step's communication takes with nothing beside it."""
        if self.world.size == 1:
            return 0.0, 0.0
        model = self.task.model
        own = len(model.fields_by_rank[self.world.rank])
        shape = (self.batch, own, model.config.embedding_dim)
        vectors = torch.zeros(shape, dtype=model.dtype, requires_grad=True)
        held = {id(weight) for weight, _ in self.task.table_parameters()}
        dense = torch.zeros(sum(p.numel() for p in model.parameters() if id(p) not in held))
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            received = exchange(vectors, model.fields_by_rank, self.world)()
            received.backward(received.detach())
            vectors.grad = None
            dist.all_reduce(dense)
        return (time.perf_counter() - began) / steps, 0.0


class Team:
    """Processes that train together, each with a core of its own, or each by itself."""

    def __init__(
        self, size: int, together: bool, workload: str, dtype: str, batch: int, threads: int = 1
    ):
        spawning = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes = []
        for rank in range(size):
            here, there = spawning.Pipe()
            world = World(rank, size) if together else World()
            store = Path(self._folder.name, "store").as_uri()
            arguments = (there, rank, world, store, workload, dtype, batch, threads)
            spawning.Process(target=_serve, args=arguments, daemon=True).start()
            self._pipes.append(here)

    def call(self, method: str, steps: int) -> tuple[float, float]:
        """The slowest process's seconds of a step, and the mean of what they waited."""
        for pipe in self._pipes:
            pipe.send((method, steps))
        results = [pipe.recv() for pipe in self._pipes]
        return max(s for s, _ in results), statistics.mean(waited for _, waited in results)


def _serve(pipe, core, world, store, workload, dtype, batch, threads):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [cores[(core + i) % len(cores)] for i in range(threads)])
    torch.set_num_threads(threads)
    if world.size > 1:
        limit = timedelta(seconds=600)
        dist.init_process_group(
            "gloo", init_method=store, rank=world.rank, world_size=world.size, timeout=limit
        )
    training = Training(world, workload, dtype, batch)
    with contextlib.suppress(EOFError):
        while True:
            method, steps = pipe.recv()
            pipe.send(getattr(training, method)(steps))


def measure(options, dtype: str) -> list[str]:
    """Returns the table of a dtype, line by line."""
    _, batch = WORKLOADS[options.workload]
    size = options.processes
    teams = {
        "alone": Team(1, True, options.workload, dtype, batch),
        "threads": Team(1, True, options.workload, dtype, batch, threads=size),
        "apart": Team(size, False, options.workload, dtype, batch),
        "weak": Team(size, True, options.workload, dtype, batch * size),
        "strong": Team(size, True, options.workload, dtype, batch),
    }
    found: dict[str, list] = {name: [] for name in teams}
    alone: dict[str, list] = {"weak": [], "strong": []}
    for team in teams.values():
        team.call("run", 2)
    for _ in range(options.rounds):
        for name, team in teams.items():
            found[name].append(team.call("run", options.steps))
            if name in alone:
                alone[name].append(team.call("communicate", options.steps)[0])
    seconds = {name: statistics.median(s for s, _ in runs) for name, runs in found.items()}
    lines = []
    for name in teams:
        samples = batch * (size if name in ("apart", "weak") else 1)
        count = 1 if name in ("alone", "threads") else size
        step, one = seconds[name], seconds["alone"]
        efficiency = samples / step / (batch / one * (size if name == "threads" else count))
        line = f"| {dtype} | {name} | {count} | {samples:,} | {step * 1e3:,.0f} | "
        line += f"{samples / step:,.0f} | {efficiency:.3f} |"
        if name in alone:
            whole = statistics.median(alone[name])
            exposed = statistics.median(waited for _, waited in found[name])
            line += f" {whole * 1e3:.0f} ({whole / step:.1%}) | {exposed * 1e3:.0f} "
            line += f"({exposed / step:.1%}) | {max(1 - exposed / whole, 0):.0%} |"
        else:
            line += " | | |"
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workload", choices=WORKLOADS, default="terabyte")
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16"),
        action="append",
        help="default: both; fp16 is for GPUs, and this measures processes on the CPU",
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--plot", type=Path, help="picture to draw, such as scaling.png")
    options = parser.parse_args()
    print(f"{options.workload}, torch {torch.__version__}, {os.cpu_count()} cores, gloo, ", end="")
    print(f"1 thread a process, {options.rounds} rounds of {options.steps} steps\n")
    print(
        "| dtype | | processes | batch | ms a step | samples/s | efficiency | communication ",
        end="",
    )
    print("by itself, ms (of the step) | exposed, ms (of the step) | overlapped |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    lines = []
    for dtype in options.dtype or ["fp32", "bf16"]:
        lines += measure(options, dtype)
        print("\n".join(lines[-5:]), flush=True)
    draw = partial(_draw, lines)
    if options.plot and (problem := write_picture(options.plot, draw)):
        sys.exit(f"no picture: {problem}")


def _draw(lines: list[str], figure: Any) -> None:
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    figure.set_size_inches(7, 4)
    axis = figure.subplots()
    bars = [(f"{c[0]} {c[1]}", float(c[6])) for c in cells if c[1] != "alone"]
    axis.bar([name for name, _ in bars], [value for _, value in bars])
    for index, (_, value) in enumerate(bars):
        axis.annotate(f"{value:.2f}", (index, value), ha="center", va="bottom")
    axis.axhline(1, color="gray", linestyle="--")
    axis.set_ylabel("efficiency: of so many times one process")
    axis.set_ylim(0, 1.15)


if __name__ == "__main__":
    main()
