"""Training throughput on the CPU: this package beside plain torch, and the limit that GEMMs set.

    python benchmarks/train.py [--rounds 5] [--steps 6] [--workload kaggle] [--dtype fp32]

Ours is the real trainer with its loader, from `--dataset_type synthetic_gpu`. The peer is a lean
model over one `nn.Embedding(sparse=True)` with torch's SGD and a bare loop, on batches made before.
The limit is the time of the MLPs' matrix products alone, forward and backward, in the same run. The
three take turns; the figures are medians over rounds. Each dtype runs with torch's allocator as
installed and with huge pages (THP_MEM_ALLOC_ENABLE=1), which our commands always set.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from dlrm.data.loader import DataConfig, open_datasets
from dlrm.distributed import World
from dlrm.model.dlrm import DLRMConfig
from dlrm.tasks.recommendation import Batches, Recommendation
from dlrm.train.log import RunLog
from dlrm.train.optim import OptimizerConfig
from dlrm.train.trainer import TrainConfig, Trainer

LR = 0.01
WORKLOADS = {  # one-hot uniform ids, SGD
    "terabyte": (DLRMConfig((100_000,) * 26), 4096),
    "kaggle": (
        DLRMConfig(
            (1_000_000,) * 26,
            embedding_dim=16,
            bottom_mlp_sizes=(512, 256, 64, 16),
            top_mlp_sizes=(512, 256, 1),
        ),
        2048,
    ),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class PlainDLRM(nn.Module):
    """What one writes in an afternoon: torch layers only."""

    def __init__(self, config: DLRMConfig):
        super().__init__()
        dim, tables = config.embedding_dim, len(config.table_sizes)
        self.embedding = nn.Embedding(sum(config.table_sizes), dim, sparse=True)
        offsets = torch.tensor((0, *config.table_sizes[:-1])).cumsum(0)
        self.register_buffer("offsets", offsets)
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, offset=-1))
        width = dim + tables * (tables + 1) // 2
        self.bottom = self.layers(config.num_numerical_features, config.bottom_mlp_sizes)
        self.top = self.layers(width, config.top_mlp_sizes)[:-1]

    @staticmethod
    def layers(inputs: int, sizes: tuple[int, ...]) -> nn.Sequential:
        pairs = zip((inputs, *sizes), sizes, strict=False)
        return nn.Sequential(*(m for i, o in pairs for m in (nn.Linear(i, o), nn.ReLU())))

    def forward(self, numerical, ids):
        dense = self.bottom(numerical)
        vectors = self.embedding(ids + self.offsets).to(dense.dtype)
        vectors = torch.cat([dense.unsqueeze(1), vectors], dim=1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([dense, dots], dim=1)).squeeze(1).float()


def plain(config: DLRMConfig, batches: list, dtype: torch.dtype) -> Callable[[int], float]:
    """Returns a function that trains the peer for some steps and says how many seconds it took."""
    model = PlainDLRM(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    def run(steps: int) -> float:
        began = time.perf_counter()
        for step in range(steps):
            batch = batches[step % len(batches)]
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
                logits = model(batch.numerical.float(), batch.categorical.long())
            F.binary_cross_entropy_with_logits(logits, batch.labels).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - began

    return run


def ours(config: DLRMConfig, data: DataConfig, dtype: torch.dtype) -> Callable[[int], float]:
    """The same for this package's trainer."""
    task = Recommendation(config, World(), dtype)
    datasets = open_datasets(data)
    optimizers = task.optimizers(OptimizerConfig())

    def run(steps: int) -> float:
        training = TrainConfig(max_steps=steps, print_freq=10**9)
        trainer = Trainer(task, optimizers, lambda step: LR, training, log=SilentLog())
        summary = trainer.fit(Batches(datasets.train), Batches(datasets.test))
        return steps * data.batch_size / summary["average_train_throughput"]

    return run


class SilentLog(RunLog):
    def line(self, text: str) -> None:
        pass


def gemms(config: DLRMConfig, batch_size: int, dtype: torch.dtype) -> Callable[[int], float]:
    """The same for the matrix products of the MLPs: one forward and two backward a layer."""
    width = config.embedding_dim + len(config.table_sizes) * (len(config.table_sizes) + 1) // 2
    bottom = (config.num_numerical_features, *config.bottom_mlp_sizes)
    top = (width, *config.top_mlp_sizes)
    shapes = [pair for sizes in (bottom, top) for pair in zip(sizes, sizes[1:], strict=False)]
    layers = [
        (torch.randn(batch_size, i), torch.randn(o, i), torch.randn(batch_size, o))
        for i, o in shapes
    ]
    layers = [tuple(tensor.to(dtype) for tensor in layer) for layer in layers]

    def run(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            for x, weight, grad in layers:
                torch.mm(x, weight.T)
                torch.mm(grad, weight)
                torch.mm(grad.T, x)
        return time.perf_counter() - began

    return run


def measure(workload: str, dtype: str, steps: int, rounds: int) -> dict[str, float]:
    """Thousands of samples a second of each side, medians over rounds taken in turn."""
    config, batch_size = WORKLOADS[workload]
    data = DataConfig(
        dataset_type="synthetic_gpu",
        batch_size=batch_size,
        synthetic_dataset_table_sizes=config.table_sizes,
        synthetic_dataset_num_entries=batch_size
        * (steps + 8),  # no epoch ends, so nothing is tested
    )
    train = open_datasets(data).train
    batches = [train.batch(i) for i in range(8)]
    sides = {
        "plain torch": plain(config, batches, DTYPES[dtype]),
        "ours": ours(config, data, DTYPES[dtype]),
        "gemm limit": gemms(config, batch_size, DTYPES[dtype]),
    }
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for round_number in range(rounds + 1):
        for name, run in sides.items():
            speed = steps * batch_size / run(steps) / 1000
            if round_number:  # the first round warms up
                speeds[name].append(speed)
    ratios = [a / b for a, b in zip(speeds["ours"], speeds["plain torch"], strict=True)]
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    return medians | {"ratio": statistics.median(ratios)}


def report(arguments: argparse.Namespace) -> None:
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {arguments.rounds} rounds"
    )
    print("thousands of samples a second (medians)\n")
    print("| workload | dtype | pages | ours | plain torch | ratio | GEMM limit | share of it |")
    print("|---|---|---|---|---|---|---|---|")
    for workload in arguments.workload:
        for dtype in arguments.dtype:
            for pages in ("0", "1"):
                row = in_process_of_its_own(workload, dtype, pages, arguments)
                share = row["ours"] / row["gemm limit"]
                kind = "huge" if pages == "1" else "as installed"
                print(
                    f"| {workload} | {dtype} | {kind} | {row['ours']:.1f} "
                    f"| {row['plain torch']:.1f} | {row['ratio']:.2f} "
                    f"| {row['gemm limit']:.1f} | {share:.2f} |",
                    flush=True,
                )


def in_process_of_its_own(workload, dtype, pages, arguments) -> dict[str, float]:
    """Measures in a new process, since torch reads the allocator's setting once."""
    command = [sys.executable, __file__, "--one", workload, dtype]
    command += ["--steps", str(arguments.steps), "--rounds", str(arguments.rounds)]
    environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": pages}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="training steps of a round")
    parser.add_argument("--workload", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--one", nargs=2, metavar=("WORKLOAD", "DTYPE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one, options.steps, options.rounds)))
    else:
        report(options)
