"""Inference speed of a model."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from dlrm.metrics.latency import Latency


@torch.inference_mode()
def measure_inference(
    predict: Callable[[Any], Any],
    batches: Iterable[Any],
    warmup: int = 10,
    device: str = "cpu",
) -> Latency:
    """Times each call of `predict` until the device has finished.

    Args:
        batches: the batches; the first `warmup` of them are not counted.
        warmup: number of calls to discard.
        device: device to wait for after every call.

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
    if len(seconds) <= warmup:
        raise ValueError(f"expected more than {warmup} batches to measure, got {len(seconds)}")
    return Latency.of(seconds[warmup:])
