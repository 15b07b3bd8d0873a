"""Times training steps on rows with lists beside the package's peers, and the reading of rows.

    python benchmarks/lists.py [--rounds 7] [--steps 5] [--workload kaggle] [--dtype fp32]
        [--optimizer sgd]

Ours is the real trainer, which reads a dataset on disk: each field of a row has 1 to 19 ids, 10 on
average. The peers are lean models with a bare loop, on batches prepared in the form that each
needs: one over `nn.EmbeddingBag(sparse=True)`, all tables in one weight, with torch's SGD or
Adagrad (torch has no row-wise one), and, where `fbgemm-gpu-cpu` is installed, one over FBGEMM's
table-batched embedding, whose optimizer is fused into its backward pass. All take turns; "x best"
is the median of the rounds' ratios to the faster peer. Reading is that of one thread.
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import argparse
import importlib.util
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from ops import fbgemm_tables
from torch import nn
from train import DTYPES, WORKLOADS, PlainDLRM, StepLog

from dlrm.data import layout
from dlrm.data.bags import Jagged, ListField
from dlrm.data.clicks.batch import Batch
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import Datasets, open_datasets
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.writer import SplitWriter
from dlrm.model.config import DLRMConfig
from dlrm.tasks.recommendation import ClickLoader, Recommendation
from dlrm.train.config import TrainConfig
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.trainer import Trainer

LR = 0.01
LONGEST = 19
OPTIMIZERS = {  # ours -> torch's and FBGEMM's
    "sgd": (torch.optim.SGD, "EXACT_SGD"),
    "row_wise_adagrad": (torch.optim.Adagrad, "EXACT_ROWWISE_ADAGRAD"),
}


def write_dataset(directory: Path, config: DLRMConfig, rows: int) -> None:
    """Writes random rows, the same for both splits but for their numbers."""
    names = {f"field_{i}": size for i, size in enumerate(config.table_sizes)}
    numerical = [f"number_{i}" for i in range(config.num_numerical_features)]
    lists = {name: ListField(LONGEST) for name in names}
    path = directory / layout.FEATURE_SPEC
    spec = FeatureSpec.named(path, "label", numerical, names, ("train", "test"), lists=lists)
    random = np.random.default_rng(0)
    for split, count in (("train", rows), ("test", 1)):
        with SplitWriter(spec, split) as writer:
            columns = []
            for size in names.values():
                lengths = random.integers(1, LONGEST + 1, count)
                columns.append(Jagged(random.integers(0, size, lengths.sum()), lengths))
            values = random.random((count, len(numerical)))
            writer.write(random.integers(0, 2, count), values, columns)
    spec.save()


class TorchBags(nn.Module):
    """All tables in one `nn.EmbeddingBag`."""

    updates_itself = False

    def __init__(self, sizes: tuple[int, ...], dim: int, optimizer: str):
        super().__init__()
        self.embedding = nn.EmbeddingBag(sum(sizes), dim, mode="sum", sparse=True)
        self.shape = (-1, len(sizes), dim)
        self.offsets = torch.tensor((0, *sizes[:-1])).cumsum(0)

    def wanted(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = batch.lengths.flatten().long()
        tables = torch.arange(len(self.offsets)).repeat(batch.num_samples)
        rows = batch.categorical + self.offsets[tables.repeat_interleave(lengths)]
        return rows, lengths.cumsum(0) - lengths

    def forward(self, rows, offsets):
        return self.embedding(rows, offsets).view(self.shape)


class FbgemmBags(nn.Module):
    """FBGEMM's table-batched embedding; its backward pass updates the tables."""

    updates_itself = True

    def __init__(self, sizes: tuple[int, ...], dim: int, optimizer: str):
        super().__init__()
        self.shape = (-1, len(sizes), dim)
        self.module = fbgemm_tables(sizes, dim, "cpu", OPTIMIZERS[optimizer][1], LR)
        self.module.init_embedding_weights_uniform(-0.01, 0.01)

    def wanted(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Its bags go table by table."""
        lengths = batch.lengths.long()
        bags = torch.arange(lengths.numel()).repeat_interleave(lengths.flatten())
        order = (bags % lengths.shape[1]).argsort(stable=True)
        by_table = lengths.T.flatten().cumsum(0)
        return batch.categorical[order].long(), F.pad(by_table, (1, 0))

    def forward(self, indices, offsets):
        return self.module(indices, offsets).view(self.shape)


def peer(
    config: DLRMConfig, kind: type[nn.Module], batches: list[Batch], optimizer: str, dtype
) -> Callable[[int], object]:
    """Returns a function that trains a peer for some steps."""
    model = PlainDLRM(config, kind(config.table_sizes, config.embedding_dim, optimizer))
    dense = [*model.bottom.parameters(), *model.top.parameters()]
    make = OPTIMIZERS[optimizer][0]
    optimizers = [make(dense, lr=LR)]
    if not model.tables.updates_itself:
        optimizers.append(make(model.tables.parameters(), lr=LR))
    ready = [(b.numerical.float(), *model.tables.wanted(b)) for b in batches]

    def run(steps: int) -> None:
        for step in range(steps):
            index = step % len(batches)
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                logits = model(*ready[index])
            F.binary_cross_entropy_with_logits(logits, batches[index].labels).backward()
            for one in optimizers:
                one.step()
                one.zero_grad(set_to_none=True)

    return run


def ours(config: DLRMConfig, datasets: Datasets, optimizer: str, dtype) -> Callable[[int], object]:
    """The same for this package's trainer, which reads its batches."""
    task = Recommendation(config, dtype=dtype)
    dense = optimizer.removeprefix("row_wise_")
    optimizers = task.optimizers(OptimizerConfig(optimizer, dense))
    log = StepLog()

    def run(steps: int) -> None:
        training = TrainConfig(max_steps=steps, print_freq=10**9, epochs=steps, test_after=steps)
        trainer = Trainer(
            task,
            optimizers=optimizers,
            schedule=lambda step: LR,
            config=training,
            log=log,
        )
        trainer.fit(ClickLoader(datasets.train), ClickLoader(datasets.test))

    return run


def reading(datasets: Datasets, batches: int) -> Callable[[int], object]:
    """Reads as many batches as a round of training takes."""

    def run(steps: int) -> None:
        for index in itertools.islice(itertools.cycle(range(batches)), steps):
            datasets.train.batch(index)

    return run


def measure(config: DLRMConfig, datasets: Datasets, optimizer: str, dtype, options) -> None:
    """Prints thousands of samples a second of each side, medians over rounds taken in turn."""
    count = len(datasets.train)
    batches = [datasets.train.batch(index) for index in range(count)]
    peers = {"torch": TorchBags, "fbgemm": FbgemmBags}
    if importlib.util.find_spec("fbgemm_gpu") is None:
        del peers["fbgemm"]
    sides = {name: peer(config, kind, batches, optimizer, dtype) for name, kind in peers.items()}
    sides |= {
        "ours": ours(config, datasets, optimizer, dtype),
        "reading": reading(datasets, count),
    }
    clock = time.process_time if options.cpu_time else time.perf_counter
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for round_number in range(options.rounds + 1):
        for name, run in sides.items():
            steps = options.steps * (4 if name == "reading" else 1)
            began = clock()
            run(steps)
            if round_number:  # the first round warms up
                speeds[name].append(steps * datasets.train.batch_size / (clock() - began) / 1000)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    best = max(peers, key=medians.__getitem__)

    def ratio(of: str, to: str) -> float:
        return statistics.median(a / b for a, b in zip(speeds[of], speeds[to], strict=True))

    shown = [
        f"{medians[name]:9.2f}" if name in medians else f"{'-':>9}"
        for name in ("ours", "torch", "fbgemm")
    ]
    print(
        f"{options.workload:9} {str(dtype).removeprefix('torch.'):9} {optimizer:17}"
        + "".join(shown)
        + f" {ratio('ours', best):7.2f} {medians['reading']:9.1f} {ratio('reading', 'ours'):8.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, default="kaggle")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), nargs="*", default=("fp32", "bf16"))
    parser.add_argument("--optimizer", choices=OPTIMIZERS, nargs="*", default=tuple(OPTIMIZERS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--cpu_time", action="store_true", help="measure processor time, on one thread"
    )
    options = parser.parse_args()
    if options.cpu_time:
        torch.set_num_threads(1)
    config, batch_size = WORKLOADS[options.workload]
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.rounds} rounds of "
        f"{options.steps} steps, load of the machine before: {os.getloadavg()[0]:.1f}\n"
        f"thousands of samples a second (medians), batch {batch_size}, 1 to {LONGEST} ids a field\n"
    )
    print(
        f"{'workload':9} {'dtype':9} {'optimizer':17}{'ours':>9}{'torch':>9}{'fbgemm':>9} "
        f"{'x best':>7} {'reading':>9} {'x ours':>8}"
    )
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_dataset(directory, config, 8 * batch_size)
        datasets = open_datasets(DataConfig(folder, batch_size=batch_size))
        for dtype in options.dtype:
            for optimizer in options.optimizer:
                measure(config, datasets, optimizer, DTYPES[dtype], options)


if __name__ == "__main__":
    main()
