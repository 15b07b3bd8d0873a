"""Progress of a run: its saved state, its losses, and the lines that report them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dlrm.distributed import OtherRankError, World, all_sum
from dlrm.step_clock import StepClock
from dlrm.train.agreement import raise_device_errors
from dlrm.train.benchmark import Stopwatch, Throughput
from dlrm.train.checkpoints.directory import CheckpointDirectory
from dlrm.train.config import TrainConfig
from dlrm.train.log import RunLog
from dlrm.train.precision import LossScaler
from dlrm.train.reports.console import Point, Position
from dlrm.train.reports.verdict import shares_of_ranks

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


class LossWindow:
    """Sums the losses since the last printed line, and ends the run if one is NaN or infinite.

    The sum and the points of the curve stay on the device until a line is due.

    Args:
        checkpoints: error messages name the last one; None if nothing is saved.
    """

    def __init__(
        self, progress: Progress, world: World, checkpoints: CheckpointDirectory | None
    ) -> None:
        self.progress, self._world, self._checkpoints = progress, world, checkpoints
        self._sums = torch.zeros(2, device=world.device)  # since the last line, and the last point
        self._points: list[
            tuple[int, int, Tensor]
        ] = []  # step, steps and sum of each point not read yet
        self._finite_step = 0  # no loss up to this step was infinite or NaN

    def resume(self) -> None:
        """Continues the window of a checkpoint."""
        self._restart()
        self._finite_step = self.progress.step

    def add(self, loss: Tensor) -> None:
        """Adds the loss of a step; does not wait for the device."""
        self._sums += loss
        self.progress.window_steps += 1
        self.progress.curve_steps += 1

    def mark(self) -> None:
        """Ends a point of the curve; does not wait for the device."""
        progress = self.progress
        self._points.append((progress.step, progress.curve_steps, self._sums[1].clone()))
        self._sums[1].zero_()
        progress.curve_steps = 0

    def mean(self) -> float:
        """Returns the mean loss since the last line, over all ranks.

        Raises:
            FloatingPointError: it is NaN or infinite; the message names the steps.
            RuntimeError: a kernel found a bad id on a GPU since the last call.
        """
        raise_device_errors(self._world)
        loss, _ = self._totals()
        self.check_finite(loss, "loss")
        self._finite_step = self.progress.step - 1  # the last loss precedes its update
        return loss / max(self.progress.window_steps, 1)

    def clear(self) -> None:
        """Begins a new window."""
        self._sums[0].zero_()
        self.progress.window_steps = 0

    def save(self) -> None:
        """Saves the sums in the progress, and continues from there as a resumed run does."""
        self.progress.window_loss, self.progress.curve_loss = self._totals()
        self._restart()

    def check_finite(self, value: float, what: str) -> None:
        """Ends the run on a NaN or infinity; `value` is the same on all ranks."""
        if math.isfinite(value):
            return
        last = self._checkpoints.last() if self._checkpoints else None
        if self._world.rank:
            raise OtherRankError("rank 0 names it")
        kept = f"The last checkpoint is {last}." if last else "There is no checkpoint."
        raise FloatingPointError(
            f"the {what} became {value} between steps {self._finite_step + 1} and "
            f"{self.progress.step}: the training diverged and stops; these steps are not saved. "
            f"A smaller --lr, a longer warm-up or another --seed may help. {kept}"
        )

    def _restart(self) -> None:
        """Keeps the sums on the first rank only, so that a resumed run adds in the same order."""
        saved = [self.progress.window_loss, self.progress.curve_loss]
        self._sums.copy_(torch.tensor([0.0, 0.0] if self._world.rank else saved))

    def _totals(self) -> tuple[float, float]:
        """Returns both sums over all ranks; moves the points of the curve to the progress."""
        sums = torch.stack([*self._sums.unbind(), *(total for _, _, total in self._points)])
        window, since_point, *of_points = all_sum(sums, self._world).tolist()
        for (step, steps, _), total in zip(self._points, of_points, strict=True):
            self.progress.curve.append({"step": step, "loss": total / steps})
        self._points.clear()
        return window, since_point


@dataclass
class StepReport:
    """Prints a line when one is due, and measures the throughput.

    Attributes:
        window: the losses since the last line.
        clock: runs while the model is trained.
        config: when a line is due, and the number of steps.
        schedule: step, counted from 1 -> learning rate.
        scaler: counts the skipped steps.
        parts: measures the time of each part of the steps; None does not report it.
        advice: see `dlrm.train.reports.verdict`.
    """

    window: LossWindow
    clock: Stopwatch
    config: TrainConfig
    schedule: Callable[[int], float]
    scaler: LossScaler
    log: RunLog
    steps_per_epoch: int
    parts: StepClock | None = None
    world: World = World()
    advice: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._total = self.config.num_steps(self.steps_per_epoch)
        self._stride = -(-self._total // _CURVE_POINTS)
        self._throughput = Throughput(self.clock, self.config.benchmark_warmup_steps)
        self._steps = self._samples = 0  # since the last line

    def step(self, loss: Tensor, num_samples: int) -> None:
        """Adds a step and prints a line if one is due; otherwise does not wait for the device.

        Lines are numbered as NVIDIA's: line i comes after the step with index i, counted from 0.
        The last step of a run has a line of its own, which does not end the window of the mean.
        """
        self._throughput.count(num_samples)
        self._steps, self._samples = self._steps + 1, self._samples + num_samples
        self.log.console.advance()
        self.window.add(loss)
        done = self.window.progress.own_step
        if done % self._stride == 0 or done == self._total:
            self.window.mark()
        due = done > 1 and (done - 1) % self.config.print_freq == 0
        if due or done == self._total:
            self._line(done)
        if due:
            self.window.clear()

    def _line(self, done: int) -> None:
        mean, step = self.window.mean(), self.window.progress.step
        at = Position(done, self._total, self.config.epochs, self.steps_per_epoch)
        step_time = self.clock.lap(step)
        rate, samples = self.schedule(step), self._samples / self._steps
        self.log.console.point(Point(at, mean, step_time, samples, rate, self.scaler.report()))
        values = {"loss": mean, "step_time": step_time, "lr": rate}
        self.log.step(*at.last_index, values, step)
        if self.parts:
            self._verdict(self.parts, at, step_time * self._steps)
        self.window.progress.history.append({"step": step, "loss": mean, "lr": rate})
        self._steps = self._samples = 0

    def _verdict(self, parts: StepClock, at: Position, seconds: float) -> None:
        if shares := shares_of_ranks(parts.lap(), self.world):
            self.log.console.time(shares, seconds, self.advice)
            named = {f"share_{name.replace(' ', '_')}": share for name, share in shares.items()}
            self.log.step(*at.last_index, named, self.window.progress.step)

    def summary(self) -> dict[str, float]:
        """Returns the last printed loss and the throughput; prints the number of skipped steps."""
        if skipped := self.scaler.num_skipped():
            self.log.line(
                f"note: {skipped} steps changed nothing, since their gradients overflowed; a "
                "smaller --loss_scale, or bf16, may help"
            )
        losses = [entry["loss"] for entry in self.window.progress.history if "lr" in entry]
        summary = {"training_loss": losses[-1]} if losses else {}
        if rate := self._throughput.rate():
            summary["average_train_throughput"] = rate
        return summary
