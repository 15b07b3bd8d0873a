"""Counts the launches of a step's CUDA kernels, and the bytes that they move and must move.

    python benchmarks/cuda_traffic.py [--batch 128]

It needs no GPU: the emulator of the tests runs the kernels on the CPU and counts. A sector of 32
bytes counts as often as a warp reaches it by one instruction, as if there were no cache; atomic
additions count as a read and a write. What must move is each byte of inputs and outputs once, and
of a table the rows that are looked up. CUB's sort, which the updates of large tables launch, is not
emulated: only our kernels' writes and reads for it count.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from cuda_resources import kernel_name
from torch import Tensor

from dlrm import ops

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "ops"))
import emulated_cuda

TABLES, DIM, WIDTH = 26, 128, 512
LARGE, SMALL = 2000, 10  # rows of a table
HEADER = [
    "| operator | kernel | launches | read | written | added to | must move, KB | ratio |",
    "|---|---|---|---|---|---|---|---|",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=128)
    batch = parser.parse_args().batch
    emulator = emulated_cuda.Emulator(emulated_cuda.library())
    torch.manual_seed(0)
    print("\n".join(HEADER))
    with emulator.in_place_of_cpu():
        cases = [
            *(gather(batch, dtype) for dtype in (torch.float32, torch.float16)),
            *(case for d in (torch.float32, torch.float16) for case in interaction(batch, d)),
            relu(batch),
            *(update(batch, rows, rule) for rule in ("SGD", "Adagrad") for rows in (LARGE, SMALL)),
        ]
        for name, run, must in cases:
            emulator.configure()
            emulator.count_accesses()
            run()
            print("\n".join(lines(name, emulator.traffic(), must)))


Case = tuple[str, Callable[[], object], int]  # name, what runs it, bytes that must move


def gather(batch: int, dtype: torch.dtype) -> Case:
    weight, ids, offsets = torch.randn(TABLES * LARGE, DIM), ids_of(batch, LARGE), begins(LARGE)
    rows = (ids + offsets[:-1]).unique()
    must = len(rows) * DIM * 4 + bytes_of(ids, offsets) + ids.numel() * DIM * dtype.itemsize
    name = f"gather, fp32 to {short(dtype)}"
    return name, lambda: ops.joint_embedding(weight, ids, offsets, dtype=dtype), must


def interaction(batch: int, dtype: torch.dtype) -> list[Case]:
    dense = torch.randn(batch, DIM).to(dtype)
    embeddings = torch.randn(batch, TABLES, DIM).to(dtype)
    grad = torch.randn(batch, ops.interaction_width(TABLES, DIM)).to(dtype)
    vectors, both = bytes_of(dense, embeddings), torch.ops.dlrm
    return [
        (
            f"interaction, {short(dtype)}",
            lambda: both.dot_interaction(dense, embeddings),
            vectors + bytes_of(grad),
        ),
        (
            f"its backward, {short(dtype)}",
            lambda: both.dot_interaction_backward(grad, dense, embeddings),
            2 * vectors + bytes_of(grad),
        ),
    ]


def relu(batch: int) -> Case:
    grad, output = torch.randn(2, batch, WIDTH).half()
    must = 3 * bytes_of(grad) + WIDTH * 2
    return "ReLU and bias backward, fp16", lambda: ops.relu_bias_backward(grad, output), must


def update(batch: int, table_rows: int, rule: str) -> Case:
    weight, state = torch.randn(TABLES * table_rows, DIM), torch.zeros(TABLES * table_rows)
    rows = (ids_of(batch, table_rows) + begins(table_rows)[:-1]).flatten()
    grad, rate = torch.randn(len(rows), DIM), torch.tensor(0.1)
    sizes, distinct = (table_rows,) * TABLES, len(rows.unique())
    must = bytes_of(rows, grad) + 2 * distinct * DIM * 4
    name = f"{rule}, tables of {table_rows:,} rows"
    if rule == "SGD":
        args = ops.ROW_RULES["sgd"], weight, [], rows, grad, rate
        return name, lambda: ops.row_update_(*args, table_sizes=sizes), must
    args = ops.ROW_RULES["row_wise_adagrad"], weight, [state], rows, grad, rate
    name = f"row-wise {name}"
    return name, lambda: ops.row_update_(*args, table_sizes=sizes), must + 2 * distinct * 4


def lines(name: str, traffic: dict[str, emulated_cuda.Traffic], must: int) -> list[str]:
    """A line for each kernel, and one of all of them where there are several."""
    moved = sum(t.read + t.written + 2 * t.added_to for t in traffic.values())
    rest = f"{must / 1000:,.0f} | {moved / must:.2f} |"
    found = [(kernel_name(mangled), t) for mangled, t in traffic.items()]
    cells = [
        f"{kernel} | {t.launches} | "
        + " | ".join(f"{count / 1000:,.0f}" for count in (t.read, t.written, t.added_to))
        for kernel, t in sorted(found, key=lambda pair: pair[0])
    ]
    if len(cells) == 1:
        return [f"| {name} | {cells[0]} | {rest}"]
    launches = sum(t.launches for t in traffic.values())
    return [
        f"| {name} | all | {launches} | | | | {rest}",
        *(f"| | {kernel} | | |" for kernel in cells),
    ]


def ids_of(batch: int, table_rows: int) -> Tensor:
    return torch.randint(table_rows, (batch, TABLES), dtype=torch.int32)


def begins(table_rows: int) -> Tensor:
    return torch.arange(TABLES + 1) * table_rows


def bytes_of(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.float16: "fp16"}[dtype]


if __name__ == "__main__":
    main()
