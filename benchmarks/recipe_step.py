"""Compares steps of the recipe's model with those of the plain small model.

    python benchmarks/recipe_step.py [--rounds 7] [--steps 40]

The small model of `train.py` takes turns with the same that has a wide term, piecewise-linear
vectors of its numbers, L2 of its tables, or members of a packed or mixed ensemble. All run in the
real trainer with one thread, and times are processor time, medians over rounds of the median step.
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import argparse
import dataclasses
import statistics
import time

import torch
from train import WORKLOADS, StepLog, ours, synthetic

SMALL, BATCH = WORKLOADS["small"]
PIECEWISE = {"numerical_embedding": "piecewise", "numerical_bins": 64}
SIDES: dict[str, tuple[dict, float]] = {  # fields of the configuration, and L2
    "small": ({}, 0.0),
    "wide": ({"wide": True}, 0.0),
    "piecewise": (PIECEWISE, 0.0),
    "piecewise, wide": ({"wide": True, **PIECEWISE}, 0.0),
    "piecewise, wide, L2": ({"wide": True, **PIECEWISE}, 1e-4),
    "L2": ({}, 1e-4),
    "packed 8": ({"ensemble": 8}, 0.0),
    "packed 5": ({"ensemble": 5}, 0.0),
    "quadratic": ({"interaction_op": "quadratic"}, 0.0),
    "dot*3,quadratic*2": ({"ensemble": "dot*3,quadratic*2"}, 0.0),
}


class ProcessorLog(StepLog):
    """Notes the processor time after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def advance(self) -> None:
        self.ends.append(time.process_time())

    def milliseconds(self) -> float:
        """Returns the median time of a step since the last call."""
        spent = [after - before for before, after in zip(self.ends, self.ends[1:], strict=False)]
        self.ends.clear()
        return 1e3 * statistics.median(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40, help="training steps of a round")
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs, logs = {}, {}
    for name in options.sides:
        fields, l2 = SIDES[name]
        config = dataclasses.replace(SMALL, **fields)
        logs[name] = ProcessorLog()
        data = synthetic(config, BATCH, options.steps)
        runs[name] = ours(
            config, data, torch.float32, logs[name], optimizer="adam", embedding_l2=l2
        )
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(options.rounds + 1):
        for name, run in runs.items():
            run(options.steps)
            spent = logs[name].milliseconds()
            if turn:
                found[name].append(spent)
    base = next(iter(found.values()))
    print("| side | processor ms a step | x |\n|---|---|---|")
    for name, spent in found.items():
        ratio = statistics.median(own / first for own, first in zip(spent, base, strict=True))
        print(f"| {name} | {statistics.median(spent):.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
