"""Training and inference speed of a model: throughput and latency."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from dlrm.metrics.latency import Latency
from dlrm.step_clock import StepClock


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


class Stopwatch:
    """Seconds spent training, without evaluation and checkpoints.

    Args:
        device: device to wait for when the watch is stopped or read, so that all work counts.
        parts: a step clock that pauses and runs with this watch, if given.
    """

    def __init__(self, device: str, parts: StepClock | None = None):
        self._cuda, self._parts = device.startswith("cuda"), parts
        self._total, self._since = 0.0, None  # type: float, float | None
        self._lap_seconds, self._lap_step = 0.0, 0

    def seconds(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        return self._total + running

    def resume(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()
            if self._parts:
                self._parts.resume()

    def pause(self) -> None:
        if self._parts:
            self._parts.pause()
        self._total, self._since = self.seconds(), None

    def lap(self, step: int) -> float:
        """Ends a lap after a step; returns the mean seconds of the lap's steps."""
        now = self.seconds()
        mean = (now - self._lap_seconds) / max(step - self._lap_step, 1)
        self._lap_seconds, self._lap_step = now, step
        return mean


class Throughput:
    """Samples per second over all steps after the warm-up."""

    def __init__(self, clock: Stopwatch, warmup_steps: int):
        self._clock, self._warmup = clock, warmup_steps
        self._steps, self._samples, self._start = 0, 0, 0.0

    def count(self, samples: int) -> None:
        """Counts a completed step."""
        self._steps += 1
        if self._steps > self._warmup:
            self._samples += samples
        elif self._steps == self._warmup:
            self._start = self._clock.seconds()

    def rate(self) -> float | None:
        """Returns the samples per second, or None if the run ended within the warm-up."""
        seconds = self._clock.seconds() - self._start
        return self._samples / seconds if self._samples and seconds > 0 else None
