"""Times the gather from tables of several sizes, which address translation may slow down.

    python benchmarks/gpu_gather.py [--gigabytes 1 32 64 100] [--json gather.json]
    python benchmarks/gpu_gather.py --device cpu --tiny

Each sample has one uniform id for each of 26 tables of 128 columns in float32. The tables are
zeros, since filling them by a generator would take longer. torch's `index_select` of the same rows
is timed as well. A GPU may reach only part of its memory at full speed (64 GB of an A100's, arXiv
2405.11425), so a benchmark of small tables does not show the cost of large ones. Sizes that do not
fit are skipped with a message.
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import argparse
import json
from pathlib import Path

import torch
from ops import copy_bandwidth, in_turn

from dlrm import ops

TABLES = 26
SPARE = 4e9  # bytes for what is gathered, and for torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", nargs="+", type=float, default=[1, 32, 64, 100])
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--batch", type=int, default=65536)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tiny", action="store_true", help="sizes for a try on a CPU")
    parser.add_argument("--json", type=Path, help="writes the figures there, too")
    args = parser.parse_args()
    if args.tiny:
        vars(args).update(gigabytes=[0.001, 0.01, 1e6], batch=64, steps=2)
    bandwidth = copy_bandwidth(args.device)
    rows = []
    print("| table, GB | ours, ms | torch, ms | of a copy's speed |\n|---|---|---|---|")
    for size in args.gigabytes:
        if size * 1e9 + SPARE > free_bytes(args.device):
            print(f"| {size:g} | does not fit | - | - |", flush=True)
            continue
        found = {"gigabytes": size, **times(size, args)}
        moved = 2 * 4 * args.batch * TABLES * args.dim
        found["share"] = 1e3 * moved / bandwidth / found["ours"]
        rows.append(found)
        cells = f"{found['ours']:.3f} | {found['torch']:.3f} | {found['share']:.0%}"
        print(f"| {size:g} | {cells} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"bytes_per_second": bandwidth, "sizes": rows}))


def times(size: float, args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of the gather and of torch's, medians of calls in turn."""
    rows = max(int(size * 1e9 / (4 * args.dim * TABLES)), 1)
    random = torch.Generator(args.device).manual_seed(0)
    weight = torch.zeros(TABLES * rows, args.dim, device=args.device)
    offsets = torch.arange(TABLES + 1, device=args.device) * rows
    shape = (args.batch, TABLES)
    ids = torch.randint(rows, shape, generator=random, device=args.device)
    flat = (ids + offsets[:-1]).flatten()
    sides = {
        "ours": lambda: ops.joint_embedding(weight, ids, offsets),
        "torch": lambda: weight.index_select(0, flat),
    }
    return in_turn(sides, args.steps, device=args.device)


def free_bytes(device: str) -> int:
    if device == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]
    return 10**10


if __name__ == "__main__":
    main()
