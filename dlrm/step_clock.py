"""Time of the parts of training steps: one clock, to which any code reports its part of a step.

    with part("exchange"):
        vectors.wait()

At every moment one part runs; a part within another interrupts it. Outside of a training, in
evaluations and while checkpoints are saved, reports have no effect.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, TypeVar

import torch

T = TypeVar("T")
DATA = "data"  # waits for the next batch
PRODUCTS = "products"  # the network forward and backward, but for what follows
LOOKUP = "lookup"  # rows of tables, forward
EXCHANGE = "exchange"  # waits for other processes
UPDATE = "update"  # the optimizers
OTHER = "other"  # the training loop itself
RECORDED = "recorded step"  # a CUDA graph, whose parts are not known
PARTS = (DATA, PRODUCTS, LOOKUP, EXCHANGE, UPDATE, OTHER, RECORDED)

_MEASURED_STEPS = 16  # of a lap, on a GPU
_NOTHING = nullcontext()
_running: "StepClock | None" = None


def part(name: str) -> AbstractContextManager:
    """Counts the time of the block as that of a part, one of `PARTS`."""
    return _NOTHING if _running is None else _Part(_running, name)


def enter(name: str) -> None:
    """Begins a part that lasts until another one begins."""
    if _running is not None:
        _running.enter(name)


def undivided(step: Callable[[Any], T]) -> Callable[[Any], T]:
    """Returns a function whose time is all that of `RECORDED`, whatever is reported within it."""

    def run(batch: Any) -> T:
        global _running
        enter(RECORDED)
        before, _running = _running, None
        try:
            return step(batch)
        finally:
            _running = before

    return run


def of_device(device: str, steps_of_lap: int) -> "StepClock":
    """Returns the clock of a device; see `DeviceStepClock`."""
    return DeviceStepClock(device, steps_of_lap) if device.startswith("cuda") else StepClock()


class StepClock:
    """Seconds of each part of the steps, as the host sees them: right for steps on the CPU."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._part, self._since = OTHER, 0.0

    def resume(self) -> None:
        """Starts the clock, to which code reports from now on."""
        global _running
        _running, self._part, self._since = self, OTHER, time.perf_counter()

    def pause(self) -> None:
        """Stops the clock."""
        global _running
        if _running is self:
            self.enter(OTHER)
            _running = None

    def next_step(self) -> None:
        """Begins a step, with the wait for its batch."""
        self.enter(DATA)

    def enter(self, name: str) -> str:
        """Begins a part; returns the one that ends by it."""
        now, before = time.perf_counter(), self._part
        self._seconds[before] += now - self._since
        self._part, self._since = name, now
        return before

    def lap(self) -> dict[str, float]:
        """Returns the seconds of each part since the last call."""
        self.enter(self._part)
        seconds, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return seconds


class DeviceStepClock(StepClock):
    """The same on a GPU's stream, by events in some steps of a lap, which `lap` alone reads.

    A part lasts from its first kernel to that of the next part. Where the device waits for the
    host, the wait is that of the part that the host is in.

    Args:
        steps_of_lap: about how many steps there are between two calls of `lap`.
    """

    def __init__(self, device: str, steps_of_lap: int) -> None:
        super().__init__()
        self._device, self._stride = device, max(steps_of_lap // _MEASURED_STEPS, 1)
        self._steps, self._measures = 0, False
        self._marks: list[tuple[str | None, torch.cuda.Event]] = []  # the part that ends there

    def resume(self) -> None:
        super().resume()
        self._measures = False

    def next_step(self) -> None:
        self.enter(DATA)
        self._steps += 1
        self._measures = self._steps % self._stride == 0
        if self._measures:
            self._mark(None)

    def enter(self, name: str) -> str:
        before, self._part = self._part, name
        if self._measures:
            self._mark(before)
        return before

    def lap(self) -> dict[str, float]:
        """Returns the seconds of each part in the steps measured; the device must have finished."""
        self.enter(self._part)
        seconds = dict.fromkeys(PARTS, 0.0)
        for (_, begin), (name, end) in pairwise(self._marks):
            if name is not None:
                seconds[name] += begin.elapsed_time(end) / 1000
        self._marks.clear()
        if self._measures:
            self._mark(None)
        return seconds

    def _mark(self, ended: str | None) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append((ended, event))


class _Part:
    def __init__(self, clock: StepClock, name: str):
        self._clock, self._name = clock, name

    def __enter__(self) -> None:
        self._before = self._clock.enter(self._name)

    def __exit__(self, *_: object) -> None:
        self._clock.enter(self._before)
