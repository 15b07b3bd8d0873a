"""Measures a GPU's figures beside their targets and limits, in one run of some minutes.

    python benchmarks/gpu.py                        one GPU, with the CUDA kernels built
    python benchmarks/gpu.py --device cpu --tiny    tries the parts; its figures mean nothing

Training and inference run by our command, each in a process of its own, with new ids for every
batch; the model has 26 tables of 100,000 rows and 128 columns. The ops are those of `ops.py`, the
matrix products those of `train.py`. Shares are of the speed of a copy within the GPU's memory,
measured in the same run; the bytes of an update are the gradients' and, once, each touched row's.
The limit of a step is its matrix products plus the bytes of interaction, gather and update at that
speed. torch's interaction is a concatenation, a batched product and a selection.
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import ops as op_figures
import torch
from train import products

from dlrm.model.config import DLRMConfig
from dlrm.ops.library import why_not_cuda_kernels

TABLES = 26
OF_A_STEP = ("interaction forward+backward", "gather", "SGD update")
Row = tuple[str, str, str, str]  # what, measured, target, and what it is to be seen beside


def main() -> str | None:
    """Prints the table; returns why there is none."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--tiny", action="store_true", help="sizes for a try on a CPU")
    parser.add_argument("--batch", type=int, default=65536)
    parser.add_argument("--inference_batch", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=300)
    parser.set_defaults(rows=100_000, dim=128, bottom="512,256,128", top="1024,1024,512,256,1")
    args = parser.parse_args()
    if args.device == "cuda":
        if not torch.cuda.is_available():
            return "gpu.py: torch finds no GPU here; --device cpu --tiny tries the parts"
        if problem := why_not_cuda_kernels():
            return f"gpu.py: no CUDA kernels: {problem}"
    if args.tiny:
        sizes = {"batch": 64, "inference_batch": 32, "steps": 4, "rows": 50, "dim": 8}
        vars(args).update(sizes, bottom="8", top="16,1")
    args.tables, args.hotness = TABLES, 1  # as ops.py names them
    print(op_figures.described(args.device))
    rows = [*of_training(args), *of_inference(args), *of_ops(args)]
    print("\n| figure | measured | target | beside it |\n|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    return None


def of_training(args: argparse.Namespace) -> list[Row]:
    steps = [f"--max_steps={args.steps}", f"--benchmark_warmup_steps={args.steps // 4}"]
    speeds = {}
    for name, flags in (
        ("--amp --cuda_graphs", ["--amp", "--cuda_graphs"]),
        ("--amp", ["--amp"]),
        ("--cuda_graphs", ["--cuda_graphs"]),
    ):
        summary = command(args, "--mode=train", *steps, *flags)
        speeds[name] = summary["average_train_throughput"]
        print(f"training, {name}: {speeds[name] / 1e6:.2f} M samples/s", flush=True)
    best, *others = speeds
    beside = ", ".join(f"{name} {speeds[name] / 1e6:.2f} M" for name in others)
    figure = f"training, samples/s, batch {args.batch:,}, {best}"
    return [(figure, f"{speeds[best] / 1e6:.2f} M", ">= 12 M", beside)]


def of_inference(args: argparse.Namespace) -> list[Row]:
    size = args.inference_batch
    flags = [
        *("--mode=inference_benchmark", f"--inference_benchmark_batch_sizes={size}", "--amp"),
        *(f"--inference_benchmark_steps={args.steps}", "--inference_benchmark_runtimes=native"),
    ]
    key = f"mean_inference_throughput_batch_{size}"
    recorded, plain = (command(args, *flags, *more)[key] for more in (["--cuda_graphs"], []))
    figure = f"inference, samples/s, batch {size:,}, --amp --cuda_graphs"
    beside = f"without graphs {plain / 1e6:.2f} M"
    return [(figure, f"{recorded / 1e6:.2f} M", ">= 15 M", beside)]


def command(args: argparse.Namespace, *flags: str) -> dict[str, float]:
    """The summary of `dlrm.scripts.main` on made-up batches."""
    sizes = ",".join([str(args.rows)] * TABLES)
    samples = args.batch * (args.steps + 8)  # no epoch ends, so nothing is tested
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.json")
        words = [
            *("-m", "dlrm.scripts.main", f"--base_device={args.device}", f"--log_path={log}"),
            *("--dataset_type=synthetic_gpu", f"--synthetic_dataset_table_sizes={sizes}"),
            *(f"--synthetic_dataset_num_entries={samples}", f"--batch_size={args.batch}"),
            *(f"--test_batch_size={args.batch}", f"--embedding_dim={args.dim}"),
            *(f"--bottom_mlp_sizes={args.bottom}", f"--top_mlp_sizes={args.top}"),
            *("--embedding_optimizer=sgd", "--mlp_optimizer=sgd", "--lr=0.01"),
            *("--warmup_steps=0", f"--print_freq={10 * args.steps}", *flags),
        ]
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(words)}\n{done.stdout}\n{done.stderr}")
        last = log.read_text(encoding="utf-8").splitlines()[-1]
    return json.loads(last.removeprefix("DLLL "))["data"]


def of_ops(args: argparse.Namespace) -> list[Row]:
    """Shares of a copy's speed, the interaction beside torch's, and the limit of a step."""
    steps = argparse.Namespace(**{**vars(args), "steps": 4 if args.tiny else 50})
    dtype = torch.float16 if args.device == "cuda" else torch.bfloat16
    bandwidth = op_figures.copy_bandwidth(args.device)
    gemm = op_figures.gemm_speed(dtype, args.device)
    tables, found, moved = op_figures.Tables(args), {}, 0.0
    for case in op_figures.cases(args, tables, dtype):
        name, *_, traffic = case
        if name in OF_A_STEP:
            found[name] = op_figures.measured(case, dtype, steps, bandwidth, gemm)
            moved += traffic
        if len(found) == len(OF_A_STEP):
            break
    bottom, top = (tuple(map(int, sizes.split(","))) for sizes in (args.bottom, args.top))
    config = DLRMConfig((args.rows,) * TABLES, 13, args.dim, bottom, top)
    calls = products(config, args.batch, dtype, args.device)
    sides = {"products": lambda: [product() for product in calls]}
    gemms = op_figures.in_turn(sides, steps.steps, device=args.device)["products"]
    copying = 1e3 * moved / bandwidth
    rows: list[Row] = []
    for name, target in zip(OF_A_STEP, (">= 60 %", ">= 60 %", ">= 50 %"), strict=True):
        row = found[name]
        beside = f"{row['ours']:.3f} ms, torch {row['torch']:.3f} ms, limit {row['limit']:.3f} ms"
        rows.append((f"{name}, of a copy's speed", f"{row['share']:.0%}", target, beside))
    interaction = found[OF_A_STEP[0]]
    ratio = interaction["torch"] / interaction["ours"]
    figure = f"{OF_A_STEP[0]}, times torch's batched product, {str(dtype)[6:]}"
    rows.append((figure, f"{ratio:.1f}", ">= 4", f"copy {bandwidth / 1e9:,.0f} GB/s"))
    limit = args.batch / (gemms + copying) * 1e3
    parts = f"products {gemms:.2f} ms, bytes {copying:.2f} ms"
    rows.append(("limit of training, samples/s", f"{limit / 1e6:.2f} M", "-", parts))
    return rows


if __name__ == "__main__":
    sys.exit(main())
