"""Measures training of ResNet-50 on the CPU: our trainer beside a plain loop over torchvision.

    python benchmarks/vision.py [--rounds 5] [--steps 3] [--batch_size 16] [--dtype bf16]

Both sides train on one uint8 batch in memory, which each step converts to floats; ours also crops
and mirrors it. The plain loop is that of a careful user: autocast, SGD with momentum in torch's
fused kernel; ours is compared with the faster of channels last and contiguous. All take turns, and
medians over rounds are compared. torchvision is in the extra "peers".
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from train import StepLog

from dlrm.tasks.networks.work import EmptyLoader, SameBatch
from dlrm.train.config import PrecisionConfig, TrainConfig
from dlrm.train.optim.config import NetworkOptimizerConfig
from dlrm.train.trainer import Trainer
from dlrm.vision.augmentation import Augmentation
from dlrm.vision.loader import GeneratedImages, ImageLoader
from dlrm.vision.task import ImageClassification, NetworkConfig

SIZE, CLASSES, LR = 224, 1000, 1e-3


def ours(dtype: str, batch_size: int, channels_last: bool) -> Callable[[int], float]:
    """Returns what takes so many steps of the trainer, and gives their seconds."""
    task = ImageClassification(
        NetworkConfig("resnet50"),
        Augmentation(image_size=SIZE),
        precision=PrecisionConfig(amp=dtype == "bf16"),
        channels_last=channels_last,
    )
    optimizers = task.optimizers(NetworkOptimizerConfig("momentum", weight_decay=1e-4))

    def run(steps: int) -> float:
        trainer = Trainer(
            task,
            optimizers=optimizers,
            schedule=lambda step: LR,
            config=TrainConfig(print_freq=10**6, max_steps=steps),
            log=StepLog(),
        )
        data = SameBatch(ImageLoader(GeneratedImages(steps * batch_size, SIZE), batch_size), "cpu")
        began = time.perf_counter()
        trainer.fit(data, EmptyLoader())
        return time.perf_counter() - began

    return run


def plain(dtype: str, batch_size: int, channels_last: bool) -> Callable[[int], float]:
    """The same of a bare loop over torchvision's network."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model: nn.Module = torchvision().models.resnet50().to(memory_format=layout)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=LR, momentum=0.9, weight_decay=1e-4, fused=True
    )
    images = torch.randint(256, (batch_size, 3, SIZE, SIZE), dtype=torch.uint8)
    labels = torch.randint(CLASSES, (batch_size,))
    half = torch.autocast("cpu", torch.bfloat16) if dtype == "bf16" else nullcontext()

    def run(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            inputs = images.float().div_(255).sub_(0.45).div_(0.225)
            with half:
                logits = model(inputs.contiguous(memory_format=layout))
            F.cross_entropy(logits.float(), labels).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - began

    return run


def torchvision():
    """torchvision, without the operators that torch's CPU wheel lacks."""
    with declared_operators():
        try:
            return importlib.import_module("torchvision")
        except ModuleNotFoundError as error:
            sys.exit(f"error: {error}: it is the peer; pip install -e '.[peers]' installs it")


@contextmanager
def declared_operators() -> Iterator[None]:
    """Declares the operators that torchvision extends on import and torch's CPU wheel lacks."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    yield


def compare(dtype: str, batch_size: int, rounds: int, steps: int) -> None:
    """Prints the medians of all sides in images a second, and ours as a ratio."""
    sides = {
        (name, "channels last" if last else "contiguous"): make(dtype, batch_size, last)
        for name, make in (("ours", ours), ("plain loop", plain))
        for last in (True, False)
    }
    rates: dict[tuple[str, str], list[float]] = {side: [] for side in sides}
    for run in sides.values():
        run(1)
    for _ in range(rounds):
        for side, run in sides.items():
            rates[side].append(steps * batch_size / run(steps))
    medians = {side: statistics.median(values) for side, values in rates.items()}
    for (name, layout), rate in medians.items():
        print(f"{dtype}  {name:<10}  {layout:<13}  {rate:6.2f} images/s")
    best = max(rate for (name, _), rate in medians.items() if name != "ours")
    ratio = medians["ours", "channels last"] / best
    print(f"{dtype}  ours, channels last, is {ratio:.2f}x the faster plain loop")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], action="append")
    options = parser.parse_args()
    threads = torch.get_num_threads()
    print(f"ResNet-50, {SIZE} pixels, batch {options.batch_size}, {threads} threads")
    for dtype in options.dtype or ["fp32", "bf16"]:
        compare(dtype, options.batch_size, options.rounds, options.steps)


if __name__ == "__main__":
    main()
