"""Where a run stands: its saved progress, its losses, and the lines that report them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from dlrm.distributed import OtherRankError, World, all_sum
from dlrm.train.agreement import raise_device_errors
from dlrm.train.benchmark import Stopwatch, Throughput
from dlrm.train.checkpoints.directory import CheckpointDirectory
from dlrm.train.log import RunLog
from dlrm.train.precision import LossScaler
from dlrm.train.task import TrainConfig


@dataclass
class Progress:
    """Where a run stands; saved in its checkpoints.

    Attributes:
        step: steps done.
        window_loss: sum of the losses since the last printed line.
        window_steps: how many they are.
        tested_step: the step of the last evaluation, 0 before the first.
        best: the best evaluation so far: its metrics, and "step" and "epoch".
        history: what was printed: "step" with "loss" and "lr", or with an evaluation's metrics.
    """

    step: int = 0
    window_loss: float = 0.0
    window_steps: int = 0
    tested_step: int = 0
    best: dict[str, float] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)

    def restore(self, saved: dict[str, Any]) -> None:
        """Takes over what a checkpoint says."""
        vars(self).update(vars(Progress(**saved)))


class LossWindow:
    """Sums the losses since the last printed line, and ends the run where one is NaN or infinite.

    The sum stays on the device until a line is due.

    Args:
        progress: where the run stands.
        world: the ranks.
        checkpoints: whose last one an error names; None where nothing is saved.
    """

    def __init__(
        self, progress: Progress, world: World, checkpoints: CheckpointDirectory | None
    ) -> None:
        self.progress, self._world, self._checkpoints = progress, world, checkpoints
        self._sum = torch.zeros((), device=world.device)
        self._finite_step = 0  # up to here no loss was infinite or NaN

    def resume(self) -> None:
        """Continues the window of a checkpoint."""
        self._restart()
        self._finite_step = self.progress.step

    def add(self, loss: Tensor) -> None:
        """Takes in the loss of a step; does not wait for the device."""
        self._sum += loss
        self.progress.window_steps += 1

    def mean(self) -> float:
        """Returns the mean loss since the last line, of all ranks.

        Raises:
            FloatingPointError: it is NaN or infinite; the steps are named.
            RuntimeError: a kernel met a bad id on a GPU since the last call.
        """
        raise_device_errors(self._world)
        loss = self._total()
        self.check_finite(loss, "loss")
        self._finite_step = self.progress.step - 1  # whose update the last loss has judged
        return loss / max(self.progress.window_steps, 1)

    def clear(self) -> None:
        """Begins a new window."""
        self._sum.zero_()
        self.progress.window_steps = 0

    def save(self) -> None:
        """Notes the sum in the progress, and goes on from there as a resumed run does."""
        self.progress.window_loss = self._total()
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
        """Leaves the sum to the first rank, so that a resumed run adds in the same order."""
        self._sum.fill_(0 if self._world.rank else self.progress.window_loss)

    def _total(self) -> float:
        return all_sum(self._sum.clone(), self._world).item()


class StepReport:
    """Prints a line where one is due, and measures the throughput.

    Args:
        window: the losses since the last line.
        clock: runs while the model is trained.
        config: when a line is due, and how many steps there are.
        schedule: step, counted from 1 -> learning rate.
        scaler: counts the steps that were skipped.
        log: where to report.
        steps_per_epoch: steps of an epoch.
    """

    def __init__(
        self,
        window: LossWindow,
        clock: Stopwatch,
        *,
        config: TrainConfig,
        schedule: Callable[[int], float],
        scaler: LossScaler,
        log: RunLog,
        steps_per_epoch: int,
    ):
        self._window, self._clock, self._config, self._schedule = window, clock, config, schedule
        self._scaler, self._log, self._steps_per_epoch = scaler, log, steps_per_epoch
        self._total = config.num_steps(steps_per_epoch)
        self._throughput = Throughput(clock, config.benchmark_warmup_steps)

    def step(self, loss: Tensor, num_samples: int) -> None:
        """Takes in a step and prints a line where one is due; elsewhere waits for no device.

        Lines are numbered as NVIDIA's: line i comes after the step with index i, counted from 0.
        The last step of a run has a line of its own, which does not end the window of the mean.
        """
        self._throughput.count(num_samples)
        self._log.progress()
        self._window.add(loss)
        done = self._window.progress.step
        due = done > 1 and (done - 1) % self._config.print_freq == 0
        if due or done == self._total:
            self._line(done)
        if due:
            self._window.clear()

    def _line(self, done: int) -> None:
        mean = self._window.mean()
        epoch, step = divmod(done - 1, self._steps_per_epoch)
        step_time = self._clock.lap(done)
        rate = self._schedule(done)
        eta = timedelta(seconds=int(step_time * (self._total - done)))
        self._log.line(
            f"Epoch:[{epoch}/{self._config.epochs}] [{step}/{self._steps_per_epoch}]  eta: {eta}  "
            f"loss: {mean:.4f}  step_time: {step_time:.6f}  lr: {_short(rate)}"
            f"{self._scaler.report()}"
        )
        self._log.step(epoch, step, {"loss": mean, "step_time": step_time, "lr": rate})
        self._window.progress.history.append({"step": done, "loss": mean, "lr": rate})

    def summary(self) -> dict[str, float]:
        """Returns the last loss and the throughput; prints how many steps were skipped."""
        if skipped := self._scaler.num_skipped():
            self._log.line(
                f"note: {skipped} steps changed nothing, since their gradients overflowed; a "
                "smaller --loss_scale, or bf16, may help"
            )
        losses = [entry["loss"] for entry in self._window.progress.history if "lr" in entry]
        summary = {"training_loss": losses[-1]} if losses else {}
        if rate := self._throughput.rate():
            summary["average_train_throughput"] = rate
        return summary


def _short(rate: float) -> str:
    """Four decimals, as NVIDIA prints them, unless they would hide a small rate."""
    return f"{rate:.4f}" if rate >= 0.01 or rate == 0 else f"{rate:.4g}"
