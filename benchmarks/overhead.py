"""What the trainer itself costs a step: a network of one weight, trained by it and by a bare loop.

    python benchmarks/overhead.py [--rounds 7] [--steps 5000]

Both take the same batches, compute the same loss and gradient and update with the same optimizer.
They take turns; the difference of the medians is the trainer's own time.
"""

import dlrm.scripts.common.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import argparse
import statistics
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from dlrm.train.optim.dense import dense_optimizer
from dlrm.train.task import TrainConfig
from dlrm.train.trainer import Trainer


class Null:
    """A network of one weight, and its loss."""

    metric = loss_metric = "loss"

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1, bias=False)

    def loss(self, batch: Tensor) -> Tensor:
        return self.model(batch).sum()

    def split(self, batch: Tensor, parts: int) -> list[Tensor]:
        return [batch]

    def num_samples(self, batch: Tensor) -> int:
        return len(batch)

    def evaluate(self, loader: object) -> dict[str, float]:
        return {"loss": 0.0}

    def table_parameters(self) -> tuple:
        return ()


class Same:
    """One batch again and again."""

    def __init__(self, steps: int, num_samples: int = 1) -> None:
        self.steps, self.num_samples, self._batch = steps, num_samples, torch.ones(1, 1)

    def __len__(self) -> int:
        return self.steps

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Tensor]:
        yield from (self._batch for _ in range(start, self.steps))


def trained(task: Null, steps: int) -> float:
    optimizer = dense_optimizer("sgd", task.model.parameters())
    trainer = Trainer(
        task,
        optimizers=[optimizer],
        schedule=lambda step: 1e-3,
        config=TrainConfig(print_freq=10**9),
    )
    trainer.log.line = lambda text: None  # type: ignore[method-assign]
    began = time.perf_counter()
    trainer.fit(Same(steps), Same(1, num_samples=0))
    return time.perf_counter() - began


def looped(task: Null, steps: int) -> float:
    optimizer = dense_optimizer("sgd", task.model.parameters())
    began = time.perf_counter()
    for batch in Same(steps).batches():
        task.loss(batch).backward()
        optimizer.step()
        task.model.zero_grad(set_to_none=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5000)
    options = parser.parse_args()
    task = Null()
    sides = {"trainer": trained, "bare loop": looped}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for run in sides.values():
        run(task, 100)
    for _ in range(options.rounds):
        for name, run in sides.items():
            times[name].append(run(task, options.steps) / options.steps * 1e6)
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, value in medians.items():
        print(f"{name:<10}  {value:6.1f} us a step")
    own = medians["trainer"] - medians["bare loop"]
    print(f"the trainer's own: {own:.1f} us a step")


if __name__ == "__main__":
    main()
