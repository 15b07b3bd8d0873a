"""Measures training throughput beside the package's peers and the limits of the machine.

    python benchmarks/train.py [--rounds 7] [--steps 10] [--workload kaggle] [--dtype fp32]
    python benchmarks/train.py --workload small --batch 128 --steps 100
    python benchmarks/train.py --workload kaggle --optimizer row_wise_adagrad
    python benchmarks/train.py --device cuda --workload terabyte --batch 65536 --dtype fp16

Ours is the real trainer with its loader, from `--dataset_type synthetic_gpu`. The peers are lean
models with a bare loop, on batches prepared in the form that each needs: one over
`nn.Embedding(sparse=True)` with torch's optimizer of sparse gradients (for row-wise Adagrad its
Adagrad), one with Adam over all rows of dense tables, and, where `fbgemm-gpu-cpu` is installed, one
over FBGEMM's table-batched embedding, whose optimizer is fused into its backward pass. All take
turns, and medians over rounds are compared. On a CPU ours is timed from its first step to its last:
before and after them, a run starts readers and tests the model.

The limit is the time of the MLPs' matrix products, forward and backward, each by the fastest of
torch's and oneDNN's, those in float32 included, in the same run. The composite limit adds the bytes
that look-ups, interaction and updates must move, at the speed of a copy.

Memory is set up as torch and glibc are installed ("as installed"), or as by our commands
(`dlrm.environment`), for all sides alike; "x it as installed" compares ours under our commands with
the faster peer as installed, by medians of two processes. On a GPU there is one kind of memory,
steps are launched one by one (`gpu.py` records them), and the clock is read after pending work has
ended.
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import argparse
import functools
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from ops import copy_bandwidth, fbgemm_tables, in_turn
from torch import nn

from dlrm import ops
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.distributed import World
from dlrm.machine import processor
from dlrm.model.config import DLRMConfig
from dlrm.ops.layers import fused_linear_dtypes, matrix_product
from dlrm.tasks.recommendation import ClickLoader, Recommendation
from dlrm.train.config import TrainConfig
from dlrm.train.log import RunLog
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.trainer import Trainer
from dlrm.variables import DEFAULTS as VARIABLES

LR = 0.01
PEERS = ("plain torch", "dense torch", "fbgemm")
WORKLOADS = {  # one-hot uniform ids
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
    "small": (  # that of `make demo` without its wide term and numerical vectors
        DLRMConfig(
            (20_000,) * 26,
            embedding_dim=16,
            bottom_mlp_sizes=(128, 64, 16),
            top_mlp_sizes=(256, 128, 1),
        ),
        512,
    ),
}
OPTIMIZERS = {  # of the tables: that of the rest, FBGEMM's, and states as large as the tables
    "sgd": ("sgd", "EXACT_SGD", 0),
    "row_wise_adagrad": ("adagrad", "EXACT_ROWWISE_ADAGRAD", 0),
    "adam": ("adam", "ADAM", 2),
}
OWN_OPTIMIZER = {"small": "adam"}  # of a workload; "sgd" otherwise
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class TorchTables(nn.Module):
    """All tables in one `nn.Embedding`, as the plain-torch peer has them."""

    updates_itself = False

    def __init__(self, sizes: tuple[int, ...], dim: int, device: str = "cpu", sparse: bool = True):
        super().__init__()
        self.embedding = nn.Embedding(sum(sizes), dim, sparse=sparse, device=device)
        self.register_buffer("offsets", torch.tensor((0, *sizes[:-1])).cumsum(0))

    def wanted(self, ids):
        return (ids + self.offsets,)

    def forward(self, rows):
        return self.embedding(rows)


class FbgemmTables(nn.Module):
    """FBGEMM's table-batched embedding, with bags of one; backward updates the tables."""

    updates_itself = True

    def __init__(self, sizes: tuple[int, ...], dim: int, device: str, optimizer: str):
        super().__init__()
        self.shape = (-1, len(sizes), dim)
        self.module = fbgemm_tables(sizes, dim, device, optimizer, LR)
        self.module.init_embedding_weights_uniform(-0.01, 0.01)

    def wanted(self, ids):
        return ids.T.flatten().long(), torch.arange(ids.numel() + 1, device=ids.device)

    def forward(self, indices, offsets):
        return self.module(indices, offsets).view(self.shape)


class PlainDLRM(nn.Module):
    """Plain DLRM, as written in an afternoon: torch layers only, over some tables."""

    def __init__(self, config: DLRMConfig, tables: nn.Module):
        super().__init__()
        dim, num_tables = config.embedding_dim, len(config.table_sizes)
        self.tables = tables
        pairs = torch.tril_indices(num_tables + 1, num_tables + 1, offset=-1)
        self.register_buffer("pairs", pairs)
        width = dim + num_tables * (num_tables + 1) // 2
        self.bottom = self.layers(config.num_numerical_features, config.bottom_mlp_sizes)
        self.top = self.layers(width, config.top_mlp_sizes)[:-1]

    @staticmethod
    def layers(inputs: int, sizes: tuple[int, ...]) -> nn.Sequential:
        pairs = zip((inputs, *sizes), sizes, strict=False)
        return nn.Sequential(*(m for i, o in pairs for m in (nn.Linear(i, o), nn.ReLU())))

    def forward(self, numerical, *lookup):
        dense = self.bottom(numerical)
        vectors = self.tables(*lookup).to(dense.dtype)
        vectors = torch.cat([dense.unsqueeze(1), vectors], dim=1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([dense, dots], dim=1)).squeeze(1).float()


def peer_tables(config: DLRMConfig, device: str, optimizer: str) -> dict[str, nn.Module]:
    """The tables of each peer that there is."""
    sizes, dim = config.table_sizes, config.embedding_dim
    found: dict[str, nn.Module] = {"plain torch": TorchTables(sizes, dim, device)}
    if optimizer == "adam":
        found["dense torch"] = TorchTables(sizes, dim, device, sparse=False)
    if importlib.util.find_spec("fbgemm_gpu") is not None:
        try:
            found["fbgemm"] = FbgemmTables(sizes, dim, device, OPTIMIZERS[optimizer][1])
        except (AssertionError, RuntimeError, NotImplementedError) as error:
            print(f"FBGEMM has no {optimizer} on {device}: {error}", file=sys.stderr)
    return found


def plain(
    config: DLRMConfig,
    tables: nn.Module,
    batches: list,
    dtype: torch.dtype,
    device: str,
    kind: str = "sgd",
) -> Callable[[int], object]:
    """Returns a function that trains a peer for some steps."""
    model = PlainDLRM(config, tables).to(device)
    weights = [*model.bottom.parameters(), *model.top.parameters()]
    sparse: list[nn.Parameter] = []
    if not tables.updates_itself:
        (sparse if tables.embedding.sparse else weights).extend(tables.parameters())
    optimizers = torch_optimizers(kind, weights, sparse)
    ready = [(b.numerical.float(), *tables.wanted(b.categorical)) for b in batches]

    def run(steps: int) -> None:
        for step in range(steps):
            index = step % len(batches)
            with torch.autocast(device, dtype, enabled=dtype != torch.float32):
                logits = model(*ready[index])
            F.binary_cross_entropy_with_logits(logits, batches[index].labels).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    return run


def torch_optimizers(
    kind: str, weights: list[nn.Parameter], sparse: list[nn.Parameter]
) -> list[torch.optim.Optimizer]:
    """torch's own: fused of dense gradients where they are on this device, plain of sparse ones."""
    of_dense, of_sparse = {
        "sgd": (torch.optim.SGD, torch.optim.SGD),
        "row_wise_adagrad": (torch.optim.Adagrad, torch.optim.Adagrad),
        "adam": (torch.optim.Adam, torch.optim.SparseAdam),
    }[kind]
    fused = of_dense is not torch.optim.Adagrad or not weights[0].is_cuda
    dense = of_dense(weights, lr=LR, fused=fused)
    return [dense, of_sparse(sparse, lr=LR)] if sparse else [dense]


def synthetic(config: DLRMConfig, batch_size: int, steps: int, device: str = "cpu") -> DataConfig:
    """Batches for `steps` steps, and some more: no epoch ends, so nothing is tested."""
    return DataConfig(
        dataset_type="synthetic_gpu",
        batch_size=batch_size,
        synthetic_dataset_table_sizes=config.table_sizes,
        synthetic_dataset_num_entries=batch_size * (steps + 8),
        device=device,
    )


class StepLog(RunLog):
    """Prints nothing, and notes the time and the page faults of the process after every step."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.console.advance = self.advance
        self.steps: list[tuple[float, int]] = []

    def advance(self) -> None:
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        self.steps.append((time.perf_counter(), faults))

    def seconds_a_step(self) -> float:
        """The mean since the end of the first step noted."""
        return (self.steps[-1][0] - self.steps[0][0]) / (len(self.steps) - 1)

    def faults_a_step(self) -> float:
        """The mean since the first step noted; forgets them."""
        first, last, between = self.steps[0], self.steps[-1], len(self.steps) - 1
        self.steps = []
        return (last[1] - first[1]) / between

    def seconds_of_steps(self) -> list[float]:
        """The time from each step's end to the next one's; forgets them."""
        times = [time for time, _ in self.steps]
        self.steps = []
        return [b - a for a, b in zip(times, times[1:], strict=False)]


def ours(
    config: DLRMConfig,
    data: DataConfig,
    dtype: torch.dtype,
    log: StepLog,
    batches: type[ClickLoader] = ClickLoader,
    optimizer: str = "sgd",
    embedding_l2: float = 0.0,
) -> Callable[[int], object]:
    """The same for this package's trainer, which reports its steps to `log`."""
    world = World(device=data.device)
    task = Recommendation(config, world, dtype)
    datasets = open_datasets(data)
    chosen = OptimizerConfig(optimizer, OPTIMIZERS[optimizer][0], embedding_l2=embedding_l2)
    optimizers = task.optimizers(chosen, one_look_up=True)

    def run(steps: int) -> None:
        training = TrainConfig(max_steps=steps, print_freq=10**9)
        trainer = Trainer(
            task,
            optimizers=optimizers,
            schedule=lambda step: LR,
            config=training,
            world=world,
            log=log,
        )
        trainer.fit(batches(datasets.train, data.device), ClickLoader(datasets.test, data.device))

    return run


def products(
    config: DLRMConfig, batch_size: int, dtype: torch.dtype, device: str = "cpu"
) -> list[Callable]:
    """The matrix products of the MLPs: of every layer one forward and two backward.

    The inputs of the bottom MLP need no gradient, and the top MLP's are padded to a multiple of 8,
    as the interaction pads them. On the CPU each is the faster of torch's and oneDNN's.
    """
    bottom = (config.num_numerical_features, *config.bottom_mlp_sizes)
    width = ops.interaction_width(len(config.table_sizes), config.embedding_dim)
    top = (width, *config.top_mlp_sizes)
    calls: list[Callable] = []
    for sizes in (bottom, top):
        for layer, (i, o) in enumerate(zip(sizes, sizes[1:], strict=False)):
            shapes = (batch_size, i), (o, i), (batch_size, o)
            x, weight, grad = (torch.randn(s, dtype=dtype, device=device) for s in shapes)
            calls.append(fastest(x, weight.T))
            if sizes is top or layer:
                calls.append(fastest(grad, weight))
            calls.append(fastest(grad.T, x))
    return calls


def fastest(left: torch.Tensor, right: torch.Tensor) -> Callable:
    """The fastest way to multiply two matrices."""
    torchs = functools.partial(torch.mm, left, right)
    if left.device.type != "cpu":
        return torchs
    ways = {"torch": torchs}
    if left.dtype in fused_linear_dtypes():
        ways["oneDNN"] = functools.partial(matrix_product, left, right.T)
        ways["transposed"] = functools.partial(matrix_product, right.T, left)
    if left.dtype != torch.float32:  # some processors have no units for the others
        ways["float32"] = functools.partial(torch.mm, left.float(), right.float())
    times = in_turn(ways, 9)
    return ways[min(times, key=times.__getitem__)]


def gemms(
    config: DLRMConfig, batch_size: int, dtype: torch.dtype, device: str = "cpu"
) -> Callable[[int], object]:
    """The same as of `ours` for the matrix products alone."""
    calls = products(config, batch_size, dtype, device)

    def run(steps: int) -> None:
        for _ in range(steps):
            for product in calls:
                product()

    return run


def bytes_of_a_step(config: DLRMConfig, batch, dtype: torch.dtype, optimizer: str) -> int:
    """Bytes that look-ups, interaction and updates must move: each operand once.

    Of the tables those are the rows that the batch looks up. What enters and leaves the layers of
    the MLPs belongs to their products.
    """
    tables, dim = len(config.table_sizes), config.embedding_dim
    size, rows = torch.finfo(dtype).bits // 8, len(batch.labels)
    vectors, width = rows * tables * dim, ops.interaction_width(tables, dim)
    columns = batch.categorical.unbind(1)
    distinct = sum(len(column.unique()) for column in columns)
    gather = vectors * (4 + size)
    interaction = size * (3 * vectors + 2 * rows * width)
    state = OPTIMIZERS[optimizer][2]
    update = vectors * size + 8 * (1 + state) * distinct * dim
    layers = (config.num_numerical_features, *config.bottom_mlp_sizes, width, *config.top_mlp_sizes)
    weights = sum(i * o for i, o in zip(layers, layers[1:], strict=False))
    return gather + interaction + update + (12 + 8 * state) * weights


def measure(
    workload: str, dtype: str, options: argparse.Namespace, clock: Callable[[], float]
) -> dict[str, float]:
    """Thousands of samples a second of each side, medians over rounds taken in turn."""
    steps, rounds, device = options.steps, options.rounds, options.device
    config, batch_size = WORKLOADS[workload]
    batch_size = options.batch or batch_size
    optimizer = options.optimizer or OWN_OPTIMIZER.get(workload, "sgd")
    data = synthetic(config, batch_size, steps, device)
    train = open_datasets(data).train
    batches = [train.batch(i) for i in range(8)]
    log = StepLog()
    sides = {
        name: plain(config, tables, batches, DTYPES[dtype], device, optimizer)
        for name, tables in peer_tables(config, device, optimizer).items()
    }
    peers = list(sides)
    sides["ours"] = ours(config, data, DTYPES[dtype], log, optimizer=optimizer)
    sides["gemm limit"] = gemms(config, batch_size, DTYPES[dtype], device)
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    faults = []
    for round_number in range(rounds + 1):
        for name, run in sides.items():
            began = clock()
            run(steps)
            seconds = (clock() - began) / steps
            if name == "ours" and clock is time.perf_counter and device == "cpu":
                seconds = log.seconds_a_step()
            if round_number:  # the first round warms up
                speeds[name].append(batch_size / seconds / 1000)
        faults.append(log.faults_a_step())
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    faster_peer = max(peers, key=medians.__getitem__)

    def ratio(of: str, to: str) -> float:
        """The median of the rounds' ratios: what disturbs a round disturbs both sides."""
        pairs = zip(speeds[of], speeds[to], strict=True)
        return statistics.median(a / b for a, b in pairs)

    moved = bytes_of_a_step(config, batches[0], DTYPES[dtype], optimizer)
    copying = moved / copy_bandwidth(device) / batch_size * 1000  # seconds of a thousand samples
    composite = 1 / (1 / medians["gemm limit"] + copying)
    return medians | {
        "ratio": ratio("ours", faster_peer),
        "share": ratio("ours", "gemm limit"),
        "composite": composite,
        "composite share": ratio("ours", "gemm limit") * medians["gemm limit"] / composite,
        "faults": statistics.median(faults[1:]),
    }


def after_waiting() -> float:
    """Returns the time after the GPU has finished its work."""
    torch.cuda.synchronize()
    return time.perf_counter()


def report(arguments: argparse.Namespace) -> None:
    computes = torch.cuda.get_device_name() if arguments.device == "cuda" else processor()
    print(
        f"{computes}, torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"{arguments.rounds} rounds of {arguments.steps} steps, load of the machine before: "
        f"{os.getloadavg()[0]:.1f}"
    )
    unit = "second of processor time, on one thread" if arguments.cpu_time else "second"
    print(f"thousands of samples a {unit} (medians)\n")
    print(
        "| workload | dtype | memory | ours | plain torch | dense torch | FBGEMM "
        "| x the faster peer | x it as installed | GEMM limit | share of it | composite limit "
        "| share of it | our page faults a step |"
    )
    print("|---" * 14 + "|")
    for workload in arguments.workload:
        for dtype in arguments.dtype:
            for memory in ("as installed", "as our commands")[arguments.device != "cpu" :]:
                row = in_process_of_its_own(workload, dtype, memory, arguments)
                peers = {name: row[name] for name in PEERS if name in row}
                if memory == "as installed" or arguments.device != "cpu":
                    installed = max(peers.values())
                cells = [
                    *(workload, dtype, memory, f"{row['ours']:.1f}"),
                    *(f"{peers[name]:.1f}" if name in peers else "-" for name in PEERS),
                    *(f"{row['ratio']:.2f}", f"{row['ours'] / installed:.2f}"),
                    *(f"{row['gemm limit']:.1f}", f"{row['share']:.2f}"),
                    *(f"{row['composite']:.1f}", f"{row['composite share']:.2f}"),
                    f"{row['faults']:.0f}",
                ]
                print(f"| {' | '.join(cells)} |", flush=True)


def in_process_of_its_own(workload, dtype, memory, arguments) -> dict[str, float]:
    """Measures in a new process, since torch and glibc read their settings once."""
    command = [sys.executable, __file__, "--one", workload, dtype]
    command += ["--steps", str(arguments.steps), "--rounds", str(arguments.rounds)]
    command += ["--device", arguments.device, "--batch", str(arguments.batch)]
    if arguments.optimizer:
        command += ["--optimizer", arguments.optimizer]
    variables = dict(os.environ)
    if arguments.cpu_time:
        command.append("--cpu_time")
    if memory == "as installed":
        for name in VARIABLES:
            variables.pop(name, None)
        variables["DLRM_TUNE"] = "0"
        # Threads spin alike in both, or other programs' load would make the difference.
        variables["GOMP_SPINCOUNT"] = VARIABLES["GOMP_SPINCOUNT"]
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="training steps of a round")
    parser.add_argument("--workload", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--dtype", nargs="+", default=["fp32", "bf16"], choices=DTYPES)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--batch", type=int, default=0, help="0: each workload's own")
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, help="of the tables; default: sgd, of small adam"
    )
    parser.add_argument(
        "--cpu_time",
        action="store_true",
        help="measure processor time, on one thread: for machines where other programs run",
    )
    parser.add_argument("--one", nargs=2, metavar=("WORKLOAD", "DTYPE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    timer = time.process_time if options.cpu_time else time.perf_counter
    if options.device == "cuda":
        timer = after_waiting
    if options.cpu_time:
        torch.set_num_threads(1)
    if options.one:
        print(json.dumps(measure(*options.one, options, timer)))
    else:
        report(options)
