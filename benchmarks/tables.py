"""Compares tables in pieces with whole ones, and the planner's predictions with measurements.

    python benchmarks/tables.py constants   those of "cpu" in dlrm/tasks/planning/machines.py
    python benchmarks/tables.py memory      predicted and measured, for nine configurations
    python benchmarks/tables.py skewed      one table of 60 % of all bytes, 4 processes
    python benchmarks/tables.py often       one table looked up 10 times as often, 2 processes
    python benchmarks/tables.py store       tables of 10 times their memory, on the disk of --folder

`skewed` and `often` train one model on the same batches in memory, under `--placement balanced` and
`auto`. All processes exist at the same time, with one thread each; the two placements take turns,
and medians over the rounds are compared. On a busy machine the processor time of the busiest
process says more than the time of steps. `memory` trains each configuration in a process of its
own, and compares its peak resident size with the plan's. `store` trains one model with Zipf ids
(1.05) in memory and from a store, in processes that take turns; random reads of the store take
turns with reads of the disk without the page cache (random_reads.c).
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import argparse
import contextlib
import multiprocessing
import os
import re
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from dlrm import ops
from dlrm.data.clicks.batch import Batch, Shard
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.data.prefetch import BatchedRows
from dlrm.distributed import World
from dlrm.distributed.placement import Placement
from dlrm.model.config import DLRMConfig
from dlrm.store.config import TableStoreConfig
from dlrm.store.layout import RowBlock
from dlrm.store.row_slots import THREADS
from dlrm.store.row_store import RowStore
from dlrm.tasks.click_memory import table_store
from dlrm.tasks.planning.costs import costs, step_seconds
from dlrm.tasks.planning.machines import MACHINES
from dlrm.tasks.planning.planner import Limits, plan_placement
from dlrm.tasks.planning.workload import Workload
from dlrm.tasks.recommendation import ClickLoader, Recommendation
from dlrm.train.config import TrainConfig
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.trainer import Trainer

CPU = MACHINES["cpu"]
_SMALL = {"bottom_mlp_sizes": (64, 64), "top_mlp_sizes": (64, 1), "embedding_dim": 64}
_BATCHES = 4  # held in memory and repeated
_EPOCH = 10_000  # batches; every run of a few steps makes the order of all of them


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        config: the architecture.
        batch: samples of all processes.
        optimizer: of the tables.
        hotness: most ids of a sample in each table; None is one each.
    """

    config: DLRMConfig
    batch: int
    optimizer: str = "sgd"
    hotness: tuple[int, ...] | None = None

    @property
    def workload(self) -> Workload:
        mean = self.hotness and tuple((1 + most) / 2 for most in self.hotness)
        return Workload(self.config, self.batch, self.optimizer, lookups=mean)


SKEWED = Case(DLRMConfig((600_000, *[40_000] * 10), **_SMALL), 4096)
OFTEN = Case(
    DLRMConfig((100_000,) * 6, bottom_mlp_sizes=(64, 128), top_mlp_sizes=(64, 1)),
    1024,
    hotness=(79, *[7] * 5),  # 40 and 4 on average
)
MEMORY = {
    "26 tables, SGD": Case(DLRMConfig((80_000,) * 26), 2048),
    "26 tables, Adagrad": Case(DLRMConfig((60_000,) * 26), 4096, "adagrad"),
    "26 tables, Adam": Case(DLRMConfig((40_000,) * 26), 2048, "adam"),
    "row-wise Adagrad": Case(DLRMConfig((2_000_000, *[1000] * 25)), 8192, "row_wise_adagrad"),
    "bf16 tables": Case(DLRMConfig((100_000,) * 26, embedding_dtype="bf16"), 4096),
    "16 columns": Case(
        DLRMConfig(
            (1_000_000,) * 26,
            embedding_dim=16,
            bottom_mlp_sizes=(512, 256, 64, 16),
            top_mlp_sizes=(512, 256, 1),
        ),
        8192,
    ),
    "13 fields of one table, Adagrad": Case(
        DLRMConfig((600_000,) * 13 + (60_000,) * 13, field_tables=(0,) * 13 + tuple(range(1, 14))),
        2048,
        "adagrad",
    ),
    "13 tables of 32 columns, Adagrad": Case(
        DLRMConfig((90_000,) * 26, field_dims=(None, 32) * 13), 2048, "adagrad"
    ),
    "both, Adam": Case(
        DLRMConfig(
            (400_000,) * 13 + (60_000,) * 13,
            field_tables=(0,) * 13 + tuple(range(1, 14)),
            field_dims=(None,) * 13 + (32,) * 13,
        ),
        2048,
        "adam",
    ),
}


STORED = DLRMConfig(
    (1_000_000,) * 8,
    embedding_dim=32,
    bottom_mlp_sizes=(512, 256, 32),
    top_mlp_sizes=(512, 256, 1),
)
STORE_MEMORY = "102MB"  # a tenth of the tables


class Ready(BatchedRows):
    """Batches of another dataset that were made once."""

    def __init__(self, dataset, num_samples: int):
        super().__init__(num_samples, dataset.batch_size)
        self._batches = [dataset.batch(index) for index in range(_BATCHES)]

    def batch(self, index: int):
        return self._batches[index % _BATCHES]


class Training:
    """A run of this process's rank that takes a few steps on request."""

    def __init__(self, world: World, case: Case, placement: Placement, ready: bool = True):
        self.world = world
        task = Recommendation(case.config, world, placement=placement)
        data = DataConfig(
            dataset_type="synthetic_gpu",
            batch_size=case.batch,
            synthetic_dataset_table_sizes=case.config.table_sizes,
            synthetic_dataset_num_entries=case.batch * _EPOCH,
            synthetic_dataset_hotness=case.hotness,
        )
        model = task.model
        shard = Shard(world, tuple(model.fields_by_rank[world.rank]), model.own_samples_only)
        made = open_datasets(data, shard).train
        self.batches = ClickLoader(Ready(made, made.num_samples) if ready else made)
        self.trainer = Trainer(
            task,
            optimizers=task.optimizers(OptimizerConfig(case.optimizer), case.hotness is None),
            schedule=lambda step: 0.01,
            config=TrainConfig(max_steps=1, print_freq=1_000_000),
            world=world,
        )
        self.trainer.log.quiet = True

    def run(self, steps: int) -> tuple[float, float]:
        """Seconds of a step, and those of the processor, which other programs change less."""
        nothing = type("Nothing", (), {"num_samples": 0})()
        done = self.trainer.progress.step
        self.trainer.config = replace(self.trainer.config, max_steps=done + steps)
        if self.world.size > 1:
            dist.barrier()
        began, busy = self.trainer._clock.seconds(), time.process_time()
        self.trainer.fit(self.batches, nothing)
        return (
            (self.trainer._clock.seconds() - began) / steps,
            (time.process_time() - busy) / steps,
        )


class Team:
    """Processes that train together, each with one thread."""

    def __init__(self, case: Case, placement: Placement):
        spawning = multiprocessing.get_context("spawn")
        self._folder, self._pipes = tempfile.TemporaryDirectory(), []
        store = Path(self._folder.name, "store").as_uri()
        for rank in range(placement.num_ranks):
            here, there = spawning.Pipe()
            world = World(rank, placement.num_ranks)
            arguments = (there, world, store, case, placement)
            spawning.Process(target=_serve, args=arguments, daemon=True).start()
            self._pipes.append(here)

    def run(self, steps: int) -> tuple[float, float]:
        """Seconds of a step of the slowest process, and the processor's of the busiest."""
        for pipe in self._pipes:
            pipe.send(steps)
        wall, busy = zip(*(pipe.recv() for pipe in self._pipes), strict=True)
        return max(wall), max(busy)


def _join(world: World, store: str) -> None:
    torch.set_num_threads(1)
    if world.size > 1:
        limit = timedelta(seconds=600)
        dist.init_process_group(
            "gloo", init_method=store, rank=world.rank, world_size=world.size, timeout=limit
        )


def _serve(pipe, world: World, store: str, case: Case, placement: Placement) -> None:
    _join(world, store)
    training = Training(world, case, placement)
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(training.run(pipe.recv()))


def compare(case: Case, num_ranks: int, rounds: int, steps: int) -> None:
    """Prints bytes and steps of both placements."""
    found = {
        "balanced": case.config.placed(num_ranks),
        "auto": plan_placement(case.workload, Limits(num_ranks), CPU),
    }
    teams = {name: Team(case, placement) for name, placement in found.items()}
    seconds: dict[str, list[float]] = {name: [] for name in teams}
    busy: dict[str, list[float]] = {name: [] for name in teams}
    for team in teams.values():
        team.run(3)
    for _ in range(rounds):
        for name, team in teams.items():
            for kept, value in zip((seconds, busy), team.run(steps), strict=True):
                kept[name].append(value)
    heads = ("placement", "pieces", "largest rank's bytes / mean", "ms a step", "quartiles")
    print("|", " | ".join((*heads, "busiest processor, ms", "predicted, ms")), "|")
    print("|---" * 7 + "|")
    for name, placement in found.items():
        ranks = costs(placement, case.workload, CPU)
        tables = [cost.memory.tables for cost in ranks]
        low, middle, high = (value * 1e3 for value in statistics.quantiles(seconds[name], n=4))
        print(
            f"| {name} | {len(placement.pieces)} | {max(tables) * num_ranks / sum(tables):.2f} | "
            f"{middle:.1f} | {low:.1f} to {high:.1f} | {statistics.median(busy[name]) * 1e3:.1f} | "
            f"{step_seconds(ranks) * 1e3:.1f} |"
        )
    for what, values in (("a step", seconds), ("the busiest processor", busy)):
        pairs = zip(values["balanced"], values["auto"], strict=True)
        ratio = statistics.median(before / after for before, after in pairs)
        print(f"balanced / auto, of {what}, median of rounds: {ratio:.2f}")


def _peak(pipe, case: Case) -> None:
    """Sends the greatest resident size of a training, and that before it made a model."""
    torch.set_num_threads(1)
    before = _resident()
    Training(World(), case, case.config.placed(1), ready=False).run(6)
    pipe.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, before))


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def memory() -> None:
    """Prints predicted and measured bytes of a process."""
    spawning = multiprocessing.get_context("spawn")
    print("| | predicted, MB | measured | error | before the model |")
    print("|---|---|---|---|---|")
    for name, case in MEMORY.items():
        here, there = spawning.Pipe()
        process = spawning.Process(target=_peak, args=(there, case))
        process.start()
        measured, before = here.recv()
        process.join()
        (cost,) = costs(case.config.placed(1), case.workload, CPU)
        predicted = cost.memory.total
        print(
            f"| {name} | {predicted / 1e6:,.0f} | {measured / 1e6:,.0f} | "
            f"{predicted / measured - 1:+.1%} | {before / 1e6:,.0f} |",
            flush=True,
        )


class Zipf(BatchedRows):
    """Batches whose ids are as frequent as their rank to the power of -1.05, made once."""

    def __init__(self, sizes: tuple[int, ...], batch_size: int, num_batches: int):
        super().__init__(batch_size * num_batches, batch_size)
        random, power = np.random.default_rng(1), 1 - 1.05
        self.table_sizes, self.one_id_each = list(sizes), True
        shares = random.random((num_batches * batch_size, len(sizes)))
        ranks = (1 - shares * (1 - np.array(sizes, float) ** power)) ** (1 / power)
        ids = np.minimum(ranks.astype(np.int64) - 1, np.array(sizes) - 1)
        self._ids = torch.from_numpy(ids.astype(np.int32))
        self._numerical = torch.rand(batch_size, 13)
        self._labels = torch.arange(batch_size) % 2.0

    def batch(self, index: int) -> Batch:
        first, end = self.rows(index)
        return Batch(self._numerical, self._ids[first:end], self._labels)


class FromStore:
    """A training from `Zipf` batches, in memory or with a store, as the trainer runs it."""

    def __init__(self, pipe, folder: str | None, steps: int):
        torch.set_num_threads(2)
        self._before, store, config = _resident(), None, STORED
        if folder is not None:
            limit = TableStoreConfig(STORE_MEMORY, folder)
            store = table_store(limit, config, OptimizerConfig("sgd"), World())
        task = Recommendation(config, store=store)
        self._trainer = Trainer(
            task,
            optimizers=task.optimizers(OptimizerConfig("sgd")),
            schedule=lambda step: 0.01,
            config=TrainConfig(max_steps=1, print_freq=1_000_000),
        )
        self._trainer.log.quiet = True
        data = Zipf(config.table_sizes, 2048, steps)
        self._batches = ClickLoader(data, slots=task.slots(trains=True))
        self._store, self._pipe = store, pipe

    def serve(self) -> None:
        """Trains as many steps as it is asked to; sends seconds of a step and what it took."""
        nothing = type("Nothing", (), {"num_samples": 0})()
        with contextlib.suppress(EOFError):
            while True:
                steps = self._pipe.recv()
                done = self._trainer.progress.step
                config = replace(self._trainer.config, max_steps=done + steps)
                self._trainer.config = config
                began = time.perf_counter()
                self._trainer.fit(self._batches, nothing)
                seconds = (time.perf_counter() - began) / steps
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
                counters = self._store.parts[STORED.embedding_dim].counters() if self._store else {}
                waited = self._store.waited if self._store else 0.0
                self._pipe.send((seconds, peak - self._before, waited, counters))


def _from_store(pipe, folder: str | None, steps: int) -> None:
    FromStore(pipe, folder, steps).serve()


def _forget_pages(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _page_cache() -> int:
    cached = re.search(r"^Cached:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(cached[1]) * 1024 if cached else 0


def store(folder: str, rounds: int, steps: int) -> None:
    """Prints steps of a model in memory and from a store, and random reads of a store."""
    spawning = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=folder) as place:
        teams, seconds = {}, {"memory": [], "store": []}
        for name in seconds:
            here, there = spawning.Pipe()
            arguments = (there, None if name == "memory" else place, steps * rounds + 50)
            spawning.Process(target=_from_store, args=arguments, daemon=True).start()
            teams[name] = here
        for pipe in teams.values():
            pipe.send(50)
            pipe.recv()
        (rows,) = Path(place).rglob("rows.bin")
        _forget_pages(rows)
        cached, last = _page_cache(), {}
        for _ in range(rounds):
            for name, pipe in teams.items():
                pipe.send(steps)
                last[name] = pipe.recv()
                seconds[name].append(last[name][0])
        grown = _page_cache() - cached
        ratio = statistics.median(
            one / other for one, other in zip(seconds["store"], seconds["memory"], strict=True)
        )
        for name, found in seconds.items():
            print(
                f"{name}: {statistics.median(found) * 1e3:.1f} ms a step, "
                f"{last[name][1] / 1e6:,.0f} MB of memory above that before the model"
            )
        print(f"store / memory, median of rounds: {ratio:.2f}")
        print(
            f"page cache grew by {grown / 1e6:,.0f} MB; rows.bin {rows.stat().st_size / 1e6:,.0f}"
        )
        print(f"waited {last['store'][2]:.2f} s of all steps; {last['store'][3]}")
        for pipe in teams.values():
            pipe.close()
        _random_reads(place, rounds)


def _random_reads(place: str, rounds: int) -> None:
    """Compares reads of uniform records with those of the disk."""
    binary = Path(place, "random_reads")
    source = Path(__file__).with_name("random_reads.c")
    subprocess.run(["cc", "-O2", "-o", binary, source, "-lpthread"], check=True)
    size, count = STORED.embedding_dim, 20_000
    records = sum(STORED.table_sizes)
    stored = RowStore(Path(place, "uniform"), dict(enumerate(STORED.table_sizes)), 4 * count)
    weight = torch.zeros(stored.slots, size)
    firsts = range(0, records, 1 << 16)
    blocks = (RowBlock(first, min(1 << 16, records - first), {}) for first in firsts)  # zeros
    stored.create({"weight": weight}, blocks)
    rows = stored.directory / "rows.bin"
    random, ratios, rates = np.random.default_rng(3), [], []
    for number in range(rounds):
        _forget_pages(rows)
        command = [binary, rows, str(4 * size), str(count), str(THREADS), str(number)]
        disk = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        _forget_pages(rows)
        chosen = random.integers(0, records, count)
        before, began = stored.counters()["reads"], time.perf_counter()
        _, ticket = stored.prepare(chosen)
        took = time.perf_counter() - began
        ours = (stored.counters()["reads"] - before) / took
        stored.release(ticket)
        ratios.append(ours / disk)
        rates.append((ours, disk))
    ours, disk = (statistics.median(rate) for rate in zip(*rates, strict=True))
    print(
        f"uniform rows of {4 * size} bytes, {THREADS} threads: {ours:,.0f} reads/s, disk without "
        f"the page cache {disk:,.0f} reads/s, median of rounds {statistics.median(ratios):.2f}"
    )


def _median(work: Callable[[], object]) -> float:
    work()
    found = []
    for _ in range(9):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def constants() -> None:
    """Prints the constants of this machine, one thread and processes within it."""
    torch.set_num_threads(1)
    seconds = {}
    for dim in (16, 256):
        rows = (1 << 28) // dim // 4
        weight, lr = torch.zeros(rows, dim), torch.tensor(0.1)
        ids, offsets = torch.randint(rows, (100_000, 1)), torch.tensor([0, rows])
        grad = torch.zeros(len(ids), dim)
        look_up = _median(partial(ops.joint_embedding, weight, ids, offsets))
        update = _median(partial(ops.row_sgd_, weight, ids[:, 0], grad, lr))
        seconds[dim] = (look_up + update) / len(ids)
    moved = (256 - 16) * 4 * (2 + 4)  # as `costs` counts them: looked up, and updated
    bandwidth = moved / (seconds[256] - seconds[16])
    print(f"row_bandwidth  {bandwidth:.2e} bytes/s")
    print(f"row_seconds    {(seconds[16] - 16 * 4 * 6 / bandwidth) / 2:.2e} s")
    for name, dtype in (("flops", torch.float32), ("half_flops", torch.bfloat16)):
        a, b = torch.randn(1024, 1024, dtype=dtype), torch.randn(1024, 1024, dtype=dtype)
        print(f"{name:14} {2 * 1024**3 / _median(partial(torch.mm, a, b)):.2e} /s")
    spawning = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store, (here, there) = Path(folder, "store").as_uri(), spawning.Pipe()
        both = [
            spawning.Process(target=_link, args=(there, World(rank, 2), store)) for rank in range(2)
        ]
        for process in both:
            process.start()
        latency, whole, size = here.recv()
        for process in both:
            process.join()
    print(f"link_seconds   {latency:.2e} s")
    print(f"link_bandwidth {size / (whole - latency):.2e} bytes/s")


def _link(pipe, world: World, store: str) -> None:
    _join(world, store)
    found = []
    size = 32 << 20
    for count in (8, size):
        sent, received = (
            torch.zeros(count, dtype=torch.uint8),
            torch.zeros(count, dtype=torch.uint8),
        )

        def both_ways(sent=sent, received=received):
            other = 1 - world.rank
            pending = [dist.isend(sent, other), dist.irecv(received, other)]
            for work in pending:
                work.wait()

        found.append(_median(both_ways))
    if world.rank == 0:
        pipe.send((*found, size))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("constants", "memory", "skewed", "often", "store"))
    parser.add_argument("--folder", default=".", help="store: on the disk to measure")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    if options.what in ("skewed", "often"):
        case, num_ranks = {"skewed": (SKEWED, 4), "often": (OFTEN, 2)}[options.what]
        compare(case, num_ranks, options.rounds, options.steps)
    elif options.what == "store":
        store(options.folder, options.rounds, options.steps)
    else:
        {"constants": constants, "memory": memory}[options.what]()


if __name__ == "__main__":
    main()
