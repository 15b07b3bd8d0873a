"""How long a model takes to answer: latency percentiles and throughput."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Latency:
    """Seconds of a batch, and what they come to."""

    mean: float
    p50: float
    p95: float
    p99: float
    samples_per_second: float


@torch.inference_mode()
def measure_inference(
    predict: Callable[[Any], Any],
    batches: Iterable[Any],
    batch_size: int,
    warmup: int = 10,
    device: str = "cpu",
) -> Latency:
    """Times `predict` on each batch, from batch in hand to answer in hand.

    Args:
        predict: the model.
        batches: `warmup` of them are not counted, all others are.
        batch_size: samples of a batch.
        warmup: first calls to leave out.
        device: waited for after every call.

    Raises:
        ValueError: there are no batches after the warm-up.
    """
    seconds = []
    for batch in batches:
        began = time.perf_counter()
        predict(batch)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    counted = np.array(seconds[warmup:])
    if not len(counted):
        raise ValueError(f"expected more than {warmup} batches to measure, got {len(seconds)}")
    p50, p95, p99 = np.percentile(counted, (50, 95, 99)).tolist()
    mean = float(counted.mean())
    return Latency(mean, p50, p95, p99, batch_size / mean)
