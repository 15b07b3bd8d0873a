"""Times each native op beside its peers and beside the limit of this machine, in one run.

    python benchmarks/ops.py --batch 4096 --tables 26 --dim 128
    python benchmarks/ops.py --scaling        speedup by more threads, beside that of a copy
    python benchmarks/ops.py --device cuda --batch 65536

The peers are plain torch, torch.compile of the MLPs and, if installed, FBGEMM's table-batched
embedding. The limit is the op's arithmetic at the speed of a matrix multiplication, plus its bytes
at the speed of a copy, both measured in the same run: nothing whose operands are in main memory is
faster. "of copy" is the share of a copy's speed at which an op moves these bytes. All sides run in
turn, and medians are compared; on a shared machine only the ratios are meaningful. Memory is set up
as by our commands, with huge pages, for all sides alike; DLRM_TUNE=0 leaves it as installed. On a
GPU each side is a recorded CUDA graph, as in training with --cuda_graphs; one that cannot be
recorded runs eagerly.
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import argparse
import functools
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from dlrm import ops
from dlrm.model.layers.mlp import MLP
from dlrm.ops.library import cuda_kernels_available
from dlrm.train.cuda_graph import CALLS_BEFORE, CudaRecorder

Sides = dict[str, Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rows", type=int, default=100_000, help="of each table")
    parser.add_argument("--hotness", type=int, default=8, help="mean ids of a bag")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--scaling", action="store_true", help="time ours on 1 and on all threads")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    if args.scaling and args.device != "cpu":
        parser.error("--scaling: threads are the CPU's")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(described(args.device))
    if args.scaling:
        scaling(args)
    else:
        beside_peers(args)


def described(device: str) -> str:
    """Describes the machine and the setting of the figures."""
    if device == "cpu":
        threads = torch.get_num_threads()
        return f"torch {torch.__version__}, {threads} threads, {ops.instruction_set()} kernels"
    kernels = "our CUDA kernels" if cuda_kernels_available() else "no CUDA kernels of ours"
    return f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {kernels}"


def beside_peers(args: argparse.Namespace) -> None:
    """Prints each op's milliseconds, those of its peers and the limit."""
    results = []
    bandwidth = copy_bandwidth(args.device)
    tables = Tables(args)
    half = torch.bfloat16 if args.device == "cpu" else torch.float16  # as --amp has it
    for dtype in (torch.float32, half):
        speed = gemm_speed(dtype, args.device)
        results += [
            measured(case, dtype, args, bandwidth, speed) for case in cases(args, tables, dtype)
        ]
    report(results)
    print(json.dumps({**vars(args), "milliseconds": results}))


def measured(case, dtype, args, bandwidth: float, gemm: float) -> dict:
    """Milliseconds of the sides of a case and of its limit, and the share of a copy's speed."""
    op, sides, flops, traffic = case
    times = in_turn(sides, args.steps, device=args.device)
    copying = 1e3 * traffic / bandwidth
    limits = {"limit": 1e3 * flops / gemm + copying, "share": copying / times["ours"]}
    return {"op": op, "dtype": str(dtype)[6:], **limits, **times}


def scaling(args: argparse.Namespace) -> None:
    """Prints each of our ops' milliseconds on one thread and on all, and those of a copy.

    They are the least of all rounds: another program takes more from two threads than from one.
    """
    tables = Tables(args)
    source = torch.ones(64 << 20)
    target = torch.empty_like(source)
    rows = [("copy", torch.float32, lambda: target.copy_(source))]
    for dtype in (torch.float32, torch.bfloat16):
        rows += [(op, dtype, sides["ours"]) for op, sides, _, _ in cases(args, tables, dtype)]
    line = "{:<36}{:<10}{:>10}{:>12}{:>9}"
    print(line.format("op", "dtype", "1 thread", f"{args.threads} threads", "speedup"))
    for op, dtype, run in rows:
        sides = {str(n): functools.partial(on_threads, n, run) for n in (1, args.threads)}
        one, all_threads = in_turn(sides, args.steps, min).values()
        figures = (f"{one:.2f}", f"{all_threads:.2f}", f"{one / all_threads:.2f}")
        print(line.format(op, str(dtype)[6:], *figures))


def on_threads(count: int, run: Callable[[], object]) -> None:
    torch.set_num_threads(count)
    run()


class Tables:
    """Tables with uniform ids, shared by all cases: they are the big part of the memory."""

    def __init__(self, args: argparse.Namespace):
        with torch.device(args.device):
            self.weight = torch.randn(args.tables * args.rows, args.dim)
            self.offsets = torch.arange(args.tables + 1) * args.rows
            self.ids = torch.randint(args.rows, (args.batch, args.tables))
            self.rows = (self.ids + self.offsets[:-1]).flatten()
            self.state_by_row = torch.ones(len(self.weight))
            self.state = torch.ones_like(self.weight)
            # Jagged of 0 to 2 * hotness ids, of which the rows are what torch wants.
            self.lengths = torch.randint(2 * args.hotness + 1, (args.batch, args.tables))
            self.bag_ids = torch.randint(args.rows, (int(self.lengths.sum()),))
            self.bag_offsets = torch.cat([torch.zeros(1).long(), self.lengths.flatten().cumsum(0)])
        self.distinct = len(self.rows.unique())  # rows that an update reads and writes

    def bag_rows(self) -> torch.Tensor:
        """The rows of the joint weight that the bags' ids stand for."""
        table = torch.arange(self.lengths.shape[1], device=self.lengths.device)
        table = table.repeat(len(self.lengths))
        counts, total = self.lengths.flatten(), len(self.bag_ids)
        return self.bag_ids + self.offsets[table.repeat_interleave(counts, output_size=total)]


def cases(args, tables, dtype):
    """Yields each op's name, its sides, and the flops and bytes that none of them can avoid."""
    size = torch.finfo(dtype).bits // 8
    vectors = args.batch * args.tables * args.dim  # elements looked up
    random = functools.partial(torch.randn, dtype=dtype, device=args.device)
    dense = random(args.batch, args.dim).requires_grad_()
    embeddings = random(args.batch, args.tables, args.dim).requires_grad_()
    width = ops.interaction_width(args.tables, args.dim)
    grad = random(args.batch, width)

    def interact(function):
        return lambda: torch.autograd.grad(function(dense, embeddings), (dense, embeddings), grad)

    dots = args.batch * args.tables * (args.tables + 1)  # flops of the triangle, for each element
    yield (
        "interaction forward+backward",
        {"ours": interact(ops.dot_interaction), "torch": interact(ops.dot_interaction_reference)},
        3 * dots * args.dim,
        size * (3 * vectors + 2 * args.batch * width),
    )

    def gather():
        return ops.joint_embedding(tables.weight, tables.ids, tables.offsets, dtype=dtype)

    def torch_gather():
        return torch.nn.functional.embedding(tables.rows, tables.weight).to(dtype)

    gathering = vectors * (4 + size)
    yield "gather", {"ours": gather, "torch": torch_gather}, 0, gathering

    values = random(len(tables.rows), args.dim)
    lr = torch.tensor(1e-9, device=args.device)

    def update():
        ops.row_update_(ops.ROW_RULES["sgd"], tables.weight, [], tables.rows, values, lr)

    def torch_update():
        tables.weight.index_add_(0, tables.rows, values.float(), alpha=-1e-9)

    def torch_sgd():
        torch_gather()
        torch_update()

    def ours(rule, *states):
        args = ops.ROW_RULES[rule], tables.weight, states, tables.rows, values, lr
        return lambda: (gather(), ops.row_update_(*args))

    changing = vectors * size + 8 * tables.distinct * args.dim
    yield "SGD update", {"ours": update, "torch": torch_update}, 0, changing
    updating = gathering + changing
    sides = {"ours": ours("sgd"), "torch": torch_sgd}
    yield "gather+SGD", {**sides, **fbgemm(args, tables, values, "EXACT_SGD")}, 0, updating
    sides = {"ours": ours("row_wise_adagrad", tables.state_by_row)}
    sides.update(fbgemm(args, tables, values, "EXACT_ROWWISE_ADAGRAD"))
    yield "gather+row-wise Adagrad", sides, 0, updating
    sides = {"ours": ours("adagrad", tables.state)}
    sides.update(fbgemm(args, tables, values, "EXACT_ADAGRAD"))
    yield "gather+Adagrad", sides, 0, updating + 8 * tables.distinct * args.dim

    def pool():
        return ops.joint_embedding(
            tables.weight, tables.bag_ids, tables.offsets, tables.lengths, dtype=dtype
        )

    def torch_pool():
        rows = tables.bag_rows()
        weight, offsets = tables.weight, tables.bag_offsets
        pooled = F.embedding_bag(rows, weight, offsets, mode="sum", include_last_offset=True)
        return pooled.to(dtype)

    sides = {"ours": pool, "torch": torch_pool, **fbgemm_bags(args, tables, dtype)}
    yield "bags", sides, 0, len(tables.bag_ids) * (4 * args.dim + 8) + size * vectors

    yield from networks(args, dtype)


def networks(args, dtype):
    """Yields forward and backward passes of the Criteo model's MLPs; the limit is their products.

    torch's side is its layers one by one, under autocast in half precision.
    """
    width = ops.interaction_width(args.tables, args.dim)
    for name, inputs, sizes in (
        ("bottom MLP 13-512-256-128", 13, (512, 256, 128)),
        (f"top MLP {width}-1024-1024-512-256", width, (1024, 1024, 512, 256)),
    ):
        network = MLP(inputs, sizes, 0, "mlp", dtype).to(args.device)
        plain = nn.Sequential(*network)
        random = functools.partial(torch.randn, dtype=dtype, device=args.device)
        x = random(args.batch, inputs).requires_grad_(inputs == width)
        grad = random(args.batch, sizes[-1])

        def train(run, x=x, grad=grad, network=network):
            def step():
                with torch.autocast(args.device, dtype, enabled=dtype != torch.float32):
                    output = run(x)
                output.backward(grad)
                network.zero_grad()
                x.grad = None

            return step

        compiled = torch.compile(plain)
        sides = {"ours": train(network), "torch": train(plain), "compile": train(compiled)}
        weights = sum(layer.weight.numel() for layer in plain[::2])
        unwanted = 0 if x.requires_grad else plain[0].weight.numel()
        yield name, sides, 2 * args.batch * (3 * weights - unwanted), 0


def fbgemm_bags(args: argparse.Namespace, tables: Tables, dtype: torch.dtype) -> Sides:
    """FBGEMM's pooling of the same bags, which it wants table after table."""
    module = fbgemm_module(args, "EXACT_SGD")
    if module is None:
        return {}
    bags = tables.bag_ids.split(tables.lengths.flatten().tolist())
    by_table = [bags[b * args.tables + t] for t in range(args.tables) for b in range(args.batch)]
    indices, lengths = torch.cat(by_table), tables.lengths.T.flatten()
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return {"fbgemm": lambda: module(indices, offsets).to(dtype)}


def fbgemm(args: argparse.Namespace, tables: Tables, values, optimizer: str) -> Sides:
    """The step of FBGEMM's table-batched embedding, if that is installed."""
    module = fbgemm_module(args, optimizer)
    if module is None:
        return {}
    indices = tables.ids.T.flatten()
    offsets = torch.arange(len(indices) + 1, device=args.device)
    grad = values.view(args.batch, -1)
    return {"fbgemm": lambda: module(indices, offsets).to(grad.dtype).backward(grad)}


def fbgemm_module(args: argparse.Namespace, optimizer: str):
    """FBGEMM's table-batched embedding, or None where it is not installed."""
    if importlib.util.find_spec("fbgemm_gpu") is None:
        return None
    return fbgemm_tables([args.rows] * args.tables, args.dim, args.device, optimizer, 1e-9)


def fbgemm_tables(sizes: Sequence[int], dim: int, device: str, optimizer: str, lr: float):
    """FBGEMM's table-batched embedding with an optimizer of its names."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    where = EmbeddingLocation.DEVICE, ComputeDevice.CUDA
    if device == "cpu":
        where = EmbeddingLocation.HOST, ComputeDevice.CPU
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, *where) for rows in sizes],
        optimizer=EmbOptimType[optimizer],
        learning_rate=lr,
    )


def in_turn(
    sides: Sides,
    steps: int,
    choose: Callable[[list[float]], float] = statistics.median,
    device: str = "cpu",
) -> dict[str, float]:
    """The median milliseconds of each side, or another choice, all run once a round."""
    if device == "cuda":
        sides = {name: recorded(run) for name, run in sides.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for step in range(steps + 2):
        for name, run in sides.items():
            taken = milliseconds(run, device)
            if step >= 2:
                times[name].append(taken)
    return {name: choose(values) for name, values in times.items()}


def recorded(run: Callable[[], object]) -> Callable[[], object]:
    """Returns the replay of a call's CUDA graph, or the call where it cannot be recorded."""
    recorder = CudaRecorder("cuda")
    for _ in range(CALLS_BEFORE):
        recorder.run(run)
    torch.cuda.synchronize()
    try:
        return recorder.record(run)[0]
    except RuntimeError as error:  # it waits for the GPU, as some peers do
        print(f"not recorded: {str(error).splitlines()[0]}")
        return run


def milliseconds(run: Callable[[], object], device: str) -> float:
    """Returns the milliseconds of a call, on a GPU by its own clock."""
    if device == "cpu":
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def copy_bandwidth(device: str = "cpu") -> float:
    """Bytes a second, read and written, of a copy far beyond the caches."""
    source = torch.ones(64 << 20 if device == "cpu" else 512 << 20, device=device)
    target = torch.empty_like(source)
    # Not of a recorded graph, in which a copy is a fifth slower (H100, driver 580).
    taken = statistics.median(milliseconds(lambda: target.copy_(source), device) for _ in range(11))
    speed = 2 * source.numel() * source.element_size() / taken * 1e3
    print(f"copy: {speed / 1e9:.1f} GB/s read and written")
    return speed


def gemm_speed(dtype: torch.dtype, device: str = "cpu") -> float:
    """Flops a second of a matrix multiplication."""
    m, n = (2048, 1024) if device == "cpu" else (8192, 8192)
    a, b = (torch.randn(shape, dtype=dtype, device=device) for shape in ((m, n), (n, n)))
    speed = 2 * m * n * n / in_turn({"gemm": lambda: a @ b}, 15, device=device)["gemm"] * 1e3
    print(f"matrix multiplication, {dtype}: {speed / 1e9:.0f} GFLOP/s")
    return speed


def report(results: list[dict]) -> None:
    """Prints a line for each op: milliseconds, how many times faster, share of the limit."""
    names = ("torch", "compile", "fbgemm")
    line = "{:<36}{:<10}" + 5 * "{:>9}" + "{:>8}{:>10}{:>9}"
    print(line.format("op", "dtype", "ours", *names, "limit", "x best", "of limit", "of copy"))
    for row in results:
        peers = {name: row[name] for name in names if name in row}
        print(
            line.format(
                row["op"],
                row["dtype"],
                f"{row['ours']:.2f}",
                *(f"{peers[name]:.2f}" if name in peers else "-" for name in names),
                f"{row['limit']:.2f}",
                f"{min(peers.values()) / row['ours']:.2f}" if peers else "-",
                f"{row['limit'] / row['ours']:.2f}",
                f"{row['share']:.2f}" if row["share"] else "-",
            )
        )


if __name__ == "__main__":
    sys.exit(main())
