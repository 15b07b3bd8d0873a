"""Times steps of a model that attends to a list beside sum pooling and attention of plain torch.

    python benchmarks/attention.py [--rounds 7] [--steps 3] [--length 50] [--batch_size 2048]

The model has 26 fields, of which a list and its candidate share a table, 13 numerical fields, rows
of 16 numbers and MLPs of 512,256,16 and 512,256,1. All sides are this model and its trainer's
optimizers, and differ only in the pooling of the list:

    sum        pooling: sum
    attention  pooling: attention, by the native operator
    torch      the same activation unit in plain torch, over the tensor [batch, longest, 4 * dim]
    factored   the same, with the first layer folded as in the native operator

Sides take turns; "x sum" is the median of the rounds' ratios to sum pooling.
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from dlrm import ops
from dlrm.data.clicks.batch import Batch
from dlrm.model.config import DLRMConfig
from dlrm.tasks.recommendation import Recommendation
from dlrm.train.optim.base import set_learning_rate
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.precision import LossScaler

FIELDS, NUMERICAL, DIM, ROWS = 26, 13, 16, 100_000
LIST, CANDIDATE = 1, 0


def config(pooling: str) -> DLRMConfig:
    """Returns the model, whose field 1 is a list of the table of field 0."""
    return DLRMConfig(
        (ROWS,) * FIELDS,
        NUMERICAL,
        DIM,
        bottom_mlp_sizes=(512, 256, DIM),
        top_mlp_sizes=(512, 256, 1),
        table_poolings=(None, pooling, *[None] * (FIELDS - 2)),
        field_tables=(0, 0, *range(1, FIELDS - 1)),
        field_targets=(None, CANDIDATE, *[None] * (FIELDS - 2)) if pooling == "attention" else None,
    )


def batch_of(samples: int, length: int) -> Batch:
    """Returns random samples whose list has 0 to twice `length` items."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.ones(samples, FIELDS, dtype=torch.int16)
    lengths[:, LIST] = torch.randint(0, 2 * length + 1, (samples,), generator=random).short()
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), dtype=torch.int32, generator=random)
    numerical = torch.rand(samples, NUMERICAL, generator=random)
    labels = torch.randint(0, 2, (samples,), generator=random).float()
    return Batch(numerical, ids, labels, lengths)


def padded_attention(
    weight: Tensor,
    ids: Tensor,
    lengths: Tensor,
    table_offsets: Tensor,
    lists: list[tuple[int, int]],
    units: ops.ActivationUnits,
    *,
    sample_weights: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Does the same as `ops.attended_bag` for one list, as models in plain torch do."""
    ((field, target),) = lists
    unit = ops.ActivationUnits(*(part[0] for part in units))
    begins = (lengths.flatten().long().cumsum(0) - lengths.flatten()).view(lengths.shape)
    longest = int(lengths[:, field].max())
    places = begins[:, field, None] + torch.arange(longest)
    mask = torch.arange(longest) < lengths[:, field, None]
    rows = ids.long()[places.clamp(max=len(ids) - 1)] + table_offsets[0, field]
    items = F.embedding(rows, weight, sparse=True)
    shown = ids.long()[begins[:, target]] + table_offsets[0, target]
    candidate = F.embedding(shown, weight, sparse=True)
    candidates = candidate[:, None].expand_as(items)
    inputs = torch.cat([items, candidates, items - candidates, items * candidates], 2)
    zeros = torch.zeros_like(unit.items)
    first = torch.cat([unit.items, unit.candidates, zeros, unit.products], 1)
    factors = F.relu(F.linear(inputs, first, unit.bias)) @ unit.output + unit.output_bias
    attended = ((factors * mask)[:, :, None] * items).sum(1)
    pooled = ops.joint_embedding(weight, ids, table_offsets, lengths)
    return torch.cat([pooled[:, :field], attended[:, None], pooled[:, field + 1 :]], 1)


SIDES = {
    "sum": ("sum", None),
    "attention": ("attention", None),
    "torch": ("attention", padded_attention),
    "factored": ("attention", ops.attended_bag_reference),
}


def steps_of(name: str, batch: Batch, optimizer: str) -> Callable[[int], None]:
    """Returns a function that takes some steps of a side."""
    pooling, attend = SIDES[name]
    task = Recommendation(config(pooling), seed=1)
    dense = optimizer.removeprefix("row_wise_")
    optimizers = task.optimizers(OptimizerConfig(optimizer, dense))
    set_learning_rate(optimizers, 0.01)
    scaler = LossScaler(None)

    def run(steps: int) -> None:
        with patch.object(ops, "attended_bag", attend) if attend else nullcontext():
            for _ in range(steps):
                task.accumulate([batch], scaler, lambda: None)
                for one in optimizers:
                    one.step()
                    one.zero_grad(set_to_none=True)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=50, help="mean number of items of the list")
    parser.add_argument("--batch_size", type=int, default=2048)
    parser.add_argument("--optimizer", nargs="*", default=["sgd", "row_wise_adagrad"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--cpu_time", action="store_true", help="measure processor time, on one thread"
    )
    options = parser.parse_args()
    if options.cpu_time:
        torch.set_num_threads(1)
    clock = time.process_time if options.cpu_time else time.perf_counter
    batch = batch_of(options.batch_size, options.length)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, operators: "
        f"{ops.instruction_set()}, load of the machine before: {os.getloadavg()[0]:.1f}\n"
        f"ms a step (medians of {options.rounds} rounds of {options.steps} steps), batch "
        f"{options.batch_size}, lists of {options.length} items on average, dim {DIM}\n"
    )
    print(f"{'optimizer':18}{'side':>10}{'ms':>9}{'x sum':>8}")
    for optimizer in options.optimizer:
        sides = {name: steps_of(name, batch, optimizer) for name in SIDES}
        times: dict[str, list[float]] = {name: [] for name in sides}
        for round_number in range(options.rounds + 1):
            for name, run in sides.items():
                began = clock()
                run(options.steps)
                if round_number:  # the first round warms up
                    times[name].append((clock() - began) / options.steps * 1e3)
        for name, own in times.items():
            pairs = zip(own, times["sum"], strict=True)
            ratio = statistics.median(mine / other for mine, other in pairs)
            print(f"{optimizer:18}{name:>10}{statistics.median(own):9.1f}{ratio:8.2f}", flush=True)


if __name__ == "__main__":
    main()
