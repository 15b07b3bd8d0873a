"""Measures the host's time of a step: the trainer alone, and a DLRM's step eager and replayed.

    python benchmarks/overhead.py [--rounds 7] [--steps 5000]

The trainer alone: a network of one weight, trained by it and by a bare loop. Both take the same
batches, compute the same loss and gradient and update with the same optimizer. The difference of
the medians is the trainer's own time.

A DLRM's step: the operators of the Terabyte model (13 + 26 features, MLPs of 3 and 5 layers), so
narrow and for so few samples that little is computed; the rest is the host's work to launch them.
In fp16 the products are the operators that a GPU runs; in float32 they are oneDNN's, whose calls
alone take 0.2 ms of a step on the CPU. A replayed step fills the recording's batch and takes its
result, without the launch of the graph itself. On a GPU a launch costs more than the call of a CPU
operator, so this is a lower bound.

It also counts the operators of an eager step for which a GPU launches one kernel or more: those
that are not views and do more than allocate memory.

All sides take turns in one thread. Times are processor time, which other programs affect less.
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from train import StepLog

from dlrm.data.clicks.batch import Batch
from dlrm.model.config import DLRMConfig
from dlrm.tasks.recommendation import Recommendation
from dlrm.train.config import TrainConfig
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.optim.dense import dense_optimizer
from dlrm.train.precision import LossScaler
from dlrm.train.task import Task
from dlrm.train.trainer import Trainer

ONE = torch.ones(1, 1)
NARROW = DLRMConfig((10,) * 26, 13, 4, (8, 8, 4), (1, 8, 8, 8, 1))  # as deep as the Terabyte model


class Null(Task):
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


class Same:
    """One batch again and again."""

    def __init__(self, steps: int, num_samples: int = 1, batch: Any = ONE) -> None:
        self.steps, self.num_samples, self._batch = steps, num_samples, batch

    def __len__(self) -> int:
        return self.steps

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Any]:
        yield from (self._batch for _ in range(start, self.steps))


def trained(task: Null, steps: int) -> float:
    optimizer = dense_optimizer("sgd", task.model.parameters())
    trainer = Trainer(
        task,
        optimizers=[optimizer],
        schedule=lambda step: 1e-3,
        config=TrainConfig(print_freq=10**9),
        log=StepLog(),
    )
    began = time.process_time()
    trainer.fit(Same(steps), Same(1, num_samples=0))
    return time.process_time() - began


def looped(task: Null, steps: int) -> float:
    optimizer = dense_optimizer("sgd", task.model.parameters())
    began = time.process_time()
    for batch in Same(steps).batches():
        task.loss(batch).backward()
        optimizer.step()
        task.model.zero_grad(set_to_none=True)
    return time.process_time() - began


class Nothing:
    """A `dlrm.train.cuda_graph.CudaRecorder` whose recordings do nothing when they are replayed."""

    def run(self, function: Callable[[], Any]) -> Any:
        return function()

    def record(self, function: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        return lambda: None, function()


class Launches(TorchDispatchMode):
    """Counts the operators that compute something."""

    count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A sparse tensor is made of its parts, and taken apart, without a launch.
        made = ("empty", "new_empty", "_sparse_coo", "_values", "_indices", "detach")
        self.count += not (op.is_view or op._opname.startswith(made))
        return op(*args, **(kwargs or {}))


def dlrm(half: bool, recorder: Nothing | None = None) -> Callable[[int], float]:
    """Returns what trains the narrow DLRM for some steps; `half` as --amp does on a GPU."""
    task = Recommendation(NARROW, dtype=torch.float16 if half else torch.float32)
    task.recorder = recorder
    trainer = Trainer(
        task,
        optimizers=task.optimizers(OptimizerConfig("sgd", "sgd")),
        schedule=lambda step: 1e-3,
        config=TrainConfig(print_freq=10**9),
        scaler=LossScaler(torch.tensor(128.0) if half else None),
        log=StepLog(),
    )
    batch = Batch(torch.rand(4, 13), torch.zeros(4, 26, dtype=torch.int32), torch.zeros(4))

    def train(steps: int) -> float:
        trainer.progress.step = 0
        began = time.process_time()
        trainer.fit(Same(steps, batch=batch), Same(1, num_samples=0))
        return time.process_time() - began

    return train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = Null()
    sides: dict[str, Callable[[int], float]] = {
        "trainer": lambda steps: trained(task, steps),
        "bare loop": lambda steps: looped(task, steps),
        "DLRM, eager": dlrm(half=False),
        "DLRM, eager, fp16": dlrm(half=True),
        "DLRM, replayed": dlrm(half=False, recorder=Nothing()),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for run in sides.values():
        run(100)
    for _ in range(options.rounds):
        for name, run in sides.items():
            times[name].append(run(options.steps) / options.steps * 1e6)
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, value in medians.items():
        print(f"{name:<17}  {value:6.1f} us a step")
    for half in (False, True):
        run = dlrm(half)
        run(1)
        with Launches() as twice:
            run(2)
        with Launches() as once:
            run(1)
        launches = twice.count - once.count
        print(f"operators of an eager step{', fp16' * half}: {launches}")
    own = medians["trainer"] - medians["bare loop"]
    print(f"the trainer's own: {own:.1f} us a step")


if __name__ == "__main__":
    main()
