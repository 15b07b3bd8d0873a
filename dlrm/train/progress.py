"""Progress of a run: its saved state, its losses, its speed, and the lines that report them."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dlrm import ops
from dlrm.distributed import OtherRankError, World, agreed, all_sum
from dlrm.step_clock import PARTS, StepClock

if TYPE_CHECKING:
    from dlrm.train.trainer import Trainer

_CURVE_POINTS = 50


@dataclass
class Progress:
    """Progress of a run, saved in its checkpoints.

    Attributes:
        step: steps done, with those of earlier runs that this one continues.
        first_step: the last step of those runs; 0 if it continues none.
        window_loss: sum of the losses since the last printed line.
        window_steps: number of these losses.
        tested_step: the step of the last evaluation, 0 before the first.
        best: the best evaluation so far: its metrics, and "step" and "epoch".
        history: printed values: "step" with "loss" and "lr", or with an evaluation's metrics.
        drops: steps after which the learning rate was lowered on a plateau.
        curve: about fifty points of the training loss: "step", and the mean "loss" of the steps
            since the previous point.
        curve_loss: sum of the losses since the last point.
        curve_steps: number of these losses.
    """

    step: int = 0
    first_step: int = 0
    window_loss: float = 0.0
    window_steps: int = 0
    tested_step: int = 0
    best: dict[str, float] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)
    curve: list[dict[str, float]] = field(default_factory=list)
    curve_loss: float = 0.0
    curve_steps: int = 0

    def restore(self, saved: dict[str, Any]) -> None:
        """Restores the progress from a checkpoint."""
        vars(self).update(vars(Progress(**saved)))

    def continue_run(self, saved: Mapping[str, Any]) -> None:
        """Begins a run after the last step of another, whose steps and plateaus count on.

        Its losses and tests are of other data, and are not taken over.

        Args:
            saved: the progress in the other run's checkpoint.
        """
        step, drops = saved.get("step", 0), [*saved.get("drops", ())]
        vars(self).update(vars(Progress(step=step, first_step=step, tested_step=step, drops=drops)))

    @property
    def own_step(self) -> int:
        """Returns the steps done since the run began."""
        return self.step - self.first_step


class Stopwatch:
    """Measures the time spent training, without evaluation and checkpoints.

    Args:
        device: device to wait for when the watch is stopped or read, so that all work counts.
        parts: a step clock that pauses and runs with this watch.
    """

    def __init__(self, device: str, parts: StepClock):
        self._cuda, self.parts = device.startswith("cuda"), parts
        self._total, self._since = 0.0, None  # type: float, float | None
        self.start()

    def start(self, warmup: int = 0) -> None:
        """Begins to count steps, the first of which are no part of the throughput."""
        self._warmup, self._steps, self._samples = warmup, 0, 0
        self._lap = self._begin = self._now()

    def count(self, samples: int) -> None:
        """Counts a completed step."""
        self._steps += 1
        self._samples += samples
        if self._steps == self._warmup:
            self._begin = self._now()

    def seconds(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        return self._total + running

    def resume(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()
            self.parts.resume()

    def pause(self) -> None:
        self.parts.pause()
        self._total, self._since = self.seconds(), None

    def lap(self) -> tuple[float, int, int]:
        """Ends a lap; returns its seconds, steps and samples."""
        (seconds, steps, samples), self._lap = self._lap, self._now()
        return self._lap[0] - seconds, self._lap[1] - steps, self._lap[2] - samples

    def throughput(self) -> float | None:
        """Returns the samples per second, or None if the run ended within the warm-up."""
        began, _, before = self._begin
        seconds = self.seconds() - began
        is_measured = self._steps > self._warmup and seconds > 0
        return (self._samples - before) / seconds if is_measured else None

    def _now(self) -> tuple[float, int, int]:
        return self.seconds(), self._steps, self._samples


class StepReport:
    """Sums the losses of steps, and reports them with the speed where a line is due.

    The sums, and the points of the curve, stay on the device until a line, a test or a checkpoint
    needs them. A loss that is NaN or infinite ends the run.
    """

    def __init__(self, trainer: "Trainer", clock: Stopwatch) -> None:
        self._trainer, self._progress, self._clock = trainer, trainer.progress, clock
        self._world, self._log, self._scaler = trainer.world, trainer.log, trainer.scaler
        self._sums = torch.zeros(
            2, device=trainer.world.device
        )  # since the last line, and the last point
        self._points: list[tuple[int, int, Tensor]] = []  # step, steps and sum, if not read yet
        self._finite_step = 0  # no loss up to this step was infinite or NaN

    def start(self, steps_per_epoch: int) -> None:
        """Begins a training."""
        config = self._config = self._trainer.config
        self._steps_per_epoch = steps_per_epoch
        self._total = config.num_steps(steps_per_epoch)
        self._stride = -(-self._total // _CURVE_POINTS)
        self._clock.start(config.benchmark_warmup_steps)
        done = self._progress.own_step
        self._log.console.start(self._total, done, config.epochs, steps_per_epoch)

    def resume(self) -> None:
        """Continues the sums of a checkpoint."""
        self._restart()
        self._finite_step = self._progress.step

    def step(self, loss: Tensor, num_samples: int, rate: float) -> bool:
        """Adds a step; returns whether it has a line, and otherwise does not wait for the device.

        Lines are numbered as NVIDIA's: line i comes after the step with index i, counted from 0.
        The last step of a run has a line of its own, which does not end the window of the mean.
        """
        progress = self._progress
        self._clock.count(num_samples)
        self._log.console.advance()
        self._sums += loss
        progress.window_steps += 1
        progress.curve_steps += 1
        done = progress.own_step
        is_last = done == self._total
        if done % self._stride == 0 or is_last:
            self._points.append((progress.step, progress.curve_steps, self._sums[1].clone()))
            self._sums[1].zero_()
            progress.curve_steps = 0
        is_due = done > 1 and (done - 1) % self._config.print_freq == 0
        if is_due or is_last:
            self._line(done, rate)
        if is_due:
            self._sums[0].zero_()
            progress.window_steps = 0
        return is_due or is_last

    def _line(self, done: int, rate: float) -> None:
        mean, (seconds, steps, samples), log = self.mean(), self._clock.lap(), self._log
        step_time, of_run = seconds / steps, self._progress.step
        epoch, index = divmod(done - 1, self._steps_per_epoch)
        log.console.point(done, mean, step_time, samples / steps, rate, self._scaler.report())
        log.step(epoch, index, {"loss": mean, "step_time": step_time, "lr": rate}, of_run)
        if self._config.verdict and (shares := self._shares()):
            log.console.time(shares, seconds, self._trainer.advice)
            named = {f"share_{name.replace(' ', '_')}": share for name, share in shares.items()}
            log.step(epoch, index, named, of_run)
        self._progress.history.append({"step": of_run, "loss": mean, "lr": rate})

    def _shares(self) -> dict[str, float]:
        """Returns the share of each part in the steps of all ranks; empty if no time passed."""
        seconds = self._clock.parts.lap()
        sums = all_sum(torch.tensor([seconds[name] for name in PARTS]), self._world).tolist()
        total = sum(sums)
        return {name: one / total for name, one in zip(PARTS, sums, strict=True)} if total else {}

    def mean(self) -> float:
        """Returns the mean loss since the last line, over all ranks.

        Raises:
            FloatingPointError: it is NaN or infinite; the message names the steps.
            RuntimeError: a kernel found a bad id on a GPU since the last call.
        """
        raise_device_errors(self._world)
        loss, _ = self._totals()
        self.check_finite(loss, "loss")
        self._finite_step = self._progress.step - 1  # the last loss precedes its update
        return loss / max(self._progress.window_steps, 1)

    def save(self) -> None:
        """Saves the sums in the progress, and continues from there as a resumed run does."""
        self._progress.window_loss, self._progress.curve_loss = self._totals()
        self._restart()

    def check_finite(self, value: float, what: str) -> None:
        """Ends the run on a NaN or infinity; `value` is the same on all ranks."""
        if math.isfinite(value):
            return
        checkpoints = self._trainer.checkpoints
        last = checkpoints.last() if checkpoints else None
        if self._world.rank:
            raise OtherRankError("rank 0 names it")
        kept = f"The last checkpoint is {last}." if last else "There is no checkpoint."
        raise FloatingPointError(
            f"the {what} became {value} between steps {self._finite_step + 1} and "
            f"{self._progress.step}: the training diverged and stops; these steps are not saved. "
            f"A smaller --lr, a longer warm-up or another --seed may help. {kept}"
        )

    def summary(self) -> dict[str, float]:
        """Returns the last printed loss and the throughput; prints the number of skipped steps."""
        if skipped := self._scaler.num_skipped():
            self._log.line(
                f"note: {skipped} steps changed nothing, since their gradients overflowed; a "
                "smaller --loss_scale, or bf16, may help"
            )
        losses = [entry["loss"] for entry in self._progress.history if "lr" in entry]
        summary = {"training_loss": losses[-1]} if losses else {}
        if rate := self._clock.throughput():
            summary["average_train_throughput"] = rate
        return summary

    def _restart(self) -> None:
        """Keeps the sums on the first rank only, so that a resumed run adds in the same order."""
        saved = [self._progress.window_loss, self._progress.curve_loss]
        self._sums.copy_(torch.tensor([0.0, 0.0] if self._world.rank else saved))

    def _totals(self) -> tuple[float, float]:
        """Returns both sums over all ranks; moves the points of the curve to the progress."""
        sums = torch.stack([*self._sums.unbind(), *(total for _, _, total in self._points)])
        window, since_point, *of_points = all_sum(sums, self._world).tolist()
        for (step, steps, _), total in zip(self._points, of_points, strict=True):
            self._progress.curve.append({"step": step, "loss": total / steps})
        self._points.clear()
        return window, since_point


def raise_device_errors(world: World) -> None:
    """Raises on every rank the errors that kernels on any rank's GPU found; waits for the GPU.

    Raises:
        RuntimeError, OtherRankError: an id or a row was outside its range; see `agreed`.
    """
    if world.size > 1 and torch.device(world.device).type == "cpu":
        return  # on the CPU each call raises its own errors
    with agreed(world, RuntimeError):
        ops.raise_device_errors(world.device)
