"""The training loop, for any model: steps, printed lines, evaluation, checkpoints, early stop."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dlrm import step_clock
from dlrm.distributed import Pipelines, World, all_sum, gather
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.directory import CheckpointDirectory
from dlrm.train.checkpoints.state import Parameters
from dlrm.train.config import TrainConfig
from dlrm.train.cuda_graph import GraphedCallable
from dlrm.train.ema import EMA
from dlrm.train.evaluation import Evaluation
from dlrm.train.gradient_sum import GradientSum, average_statistics
from dlrm.train.log import Loader, RunLog, StoppedError
from dlrm.train.optim.base import finish_updates, set_learning_rate
from dlrm.train.precision import LossScaler
from dlrm.train.progress import Progress, StepReport, Stopwatch
from dlrm.train.reports.callbacks import Callbacks, OnStep
from dlrm.train.reports.roles import OF_NVIDIA, Roles
from dlrm.train.task import Task


class Trainer:
    """Trains a task, with the same steps on every rank.

    Args:
        task: the task to train.
        optimizers: optimizers of all its parameters.
        schedule: step, counted from 1 -> learning rate.
        config: length of the training, and its reports.
        world: the processes that train together.
        log: destination of reports.
        scaler: scaler of the loss; none by default.
        checkpoints: directory to save in; None saves nothing.
        run: configuration of the run, stored in checkpoints.
        ema: EMA of the weights, which is then tested; none by default.
        after_step: called after each step, with its number.
        advice: suggestions for faster steps, by the part of the step that they are for.
        callbacks: functions that watch the training and may end it. If one raises, the training
            saves its state, and raises the same.
        schedule_restarts: whether a run that continues another begins its schedule anew.

    Attributes:
        stop_requested: set it on any rank to end the training after a step, with a checkpoint;
            of several ranks, after a step that prints, tests or saves.
        roles: names of the sets that the last `fit` tested.
        replicas: the processes that hold the same weights.
    """

    def __init__(
        self,
        task: Task,
        *,
        optimizers: Sequence[Optimizer],
        schedule: Callable[[int], float],
        config: TrainConfig,
        world: World = World(),
        log: RunLog | None = None,
        scaler: LossScaler | None = None,
        checkpoints: CheckpointDirectory | None = None,
        run: dict[str, Any] | None = None,
        ema: EMA | None = None,
        after_step: Callable[[int], object] = lambda step: None,
        advice: Mapping[str, str] | None = None,
        callbacks: Callbacks = Callbacks(),
        schedule_restarts: bool = False,
    ):
        self.task, self.optimizers, self.schedule, self.config = task, optimizers, schedule, config
        self.world, self.log, self.scaler = world, log or RunLog(), scaler or LossScaler()
        self.checkpoints, self.run, self.ema = checkpoints, run or {}, ema
        self.after_step, self.stop_requested, self.advice = after_step, False, advice or {}
        self.roles, self.progress = OF_NVIDIA, Progress()
        self._callbacks, self._ended = callbacks, False
        self._schedule_restarts, self._rate = schedule_restarts, math.nan
        pipelines = task.pipelines or Pipelines(world, world, World())
        self.replicas = pipelines.replicas
        tables, average = task.table_parameters(), ema.state if ema else {}
        self.parameters = Parameters(task.model, tables, optimizers, average, pipelines.parts)
        held = {id(weight) for weight, _ in tables}
        updated = (weight for weight, _ in self.parameters.optimizer_of())
        self._gradients = GradientSum((w for w in updated if id(w) not in held), self.replicas)
        self._weights = list(task.model.parameters())
        self._update: Callable[[Any], Tensor] = self._updated
        if task.recorder:
            self._update = step_clock.undivided(GraphedCallable(self._updated, task.recorder))
        device = world.device if config.verdict else "cpu"  # where nothing is recorded
        self._clock = Stopwatch(world.device, step_clock.of_device(device, config.print_freq))
        self._report = StepReport(self, self._clock)

    def rate(self, step: int) -> float:
        """Returns the learning rate of a step, counted from 1, lowered on each plateau before."""
        drops = sum(drop < step for drop in self.progress.drops)
        return self.scheduled(step) * self.config.plateau_factor**drops

    def scheduled(self, step: int) -> float:
        """Returns the learning rate of a step by the schedule alone."""
        return self.schedule(step - self.progress.first_step * self._schedule_restarts)

    def resume(self, checkpoint: Checkpoint) -> None:
        """Resumes from a checkpoint of this run: weights, optimizers, random state, position."""
        saved = checkpoint.load(self.parameters, self.world, resume=True)
        self.progress.restore(saved)
        self._report.resume()
        if self.checkpoints:
            self.progress.best = self.checkpoints.best_record()

    def continue_run(self, checkpoint: Checkpoint, table_sizes: Sequence[int]) -> None:
        """Begins a run where that of a checkpoint ended; the first batch is that of its own data.

        Weights, optimizers, random state and steps continue. A checkpoint in NVIDIA's format has
        weights only.

        Args:
            table_sizes: rows of the tables, which may be more than the checkpoint has.
        """
        has_state, sizes = checkpoint.format == "dlrm", table_sizes
        saved = checkpoint.load(self.parameters, self.world, has_state, table_sizes=sizes)
        self.progress.continue_run(saved if has_state else {})
        if self._schedule_restarts:
            self.progress.drops.clear()
        self._report.resume()

    def fit(
        self,
        train: Loader,
        test: Loader,
        validation: Loader | None = None,
        roles: Roles = OF_NVIDIA,
    ) -> dict[str, float]:
        """Trains to the end of the run and returns its summary.

        At the end it evaluates the best checkpoint on `validation`, or the final weights if none is
        saved; the model then has these weights.

        Args:
            validation: a set that is evaluated once, at the end.
            roles: names of the sets `test` and `validation` in logs and in the summary.

        Raises:
            FloatingPointError: the loss is NaN or infinite; the message names step and checkpoint.
            RuntimeError: a kernel on a GPU found a bad id since the last line; the message has it.
            StoppedError: `stop_requested` was set.
        """
        self._rate, self.roles = math.nan, roles
        progress = self.progress
        total = progress.first_step + self.config.num_steps(len(train))
        evaluation = Evaluation(self, test, len(train), roles)
        self._report.start(len(train))
        stopped, reached = False, self._has_reached(evaluation)
        if progress.step >= total:
            self.log.line(f"all {total} steps are done already; there is nothing left to train")
        if not reached:
            stopped = self._train(train, total, evaluation)
        self.log.console.end()
        if stopped:
            self._stop()
        return self._finish(evaluation, validation)

    def _has_reached(self, evaluation: Evaluation) -> bool:
        """Returns whether the resumed run has reached its threshold, so that training ends."""
        progress = self.progress
        if progress.tested_step < progress.step:  # saved just before its test
            return evaluation.is_due() and self._evaluate(evaluation)
        last = progress.history[-1] if progress.history else {}
        return evaluation.is_enough(last.get(self.task.metric, math.nan)) or evaluation.is_stale()

    def _train(self, train: Loader, total: int, evaluation: Evaluation) -> bool:
        """Takes the remaining steps; returns whether a rank asked to stop."""
        progress, reached, stopped = self.progress, False, False
        while progress.step < total and not (reached or stopped):
            epoch, start = divmod(progress.own_step, len(train))
            with closing(train.batches(epoch, start)) as batches:
                self._clock.resume()
                self._clock.parts.next_step()
                for batch in batches:
                    known = len(progress.history)
                    loss = self._train_step(batch)
                    self.after_step(progress.step)
                    line = self._report.step(loss, self.task.num_samples(batch), self._rate)
                    self._ended = line and self._called(self._callbacks.on_step)
                    tested = evaluation.is_due() and self._evaluate(evaluation)
                    reached = tested or self._ended
                    if saves := self._is_checkpoint_due(total):
                        self._save()
                    stopped = self._agree(saves or len(progress.history) > known)
                    if progress.step == total or reached or stopped:
                        break
                    self._clock.parts.next_step()
                self._clock.pause()
        return stopped

    def _called(self, function: OnStep | None) -> bool:
        """Calls a function with the last entry of the history; returns whether to end."""
        if function is None:
            return False
        self._clock.pause()
        values = {k: value for k, value in self.progress.history[-1].items() if k != "step"}
        try:
            answer = function(self.progress.step, values)
        except BaseException:  # also Ctrl-C
            self._save_alone()
            raise
        self._clock.resume()
        if getattr(answer, "ndim", None) == 0:  # of NumPy or torch
            answer = answer.item()
        return answer is True

    def _train_step(self, batch: Any) -> Tensor:
        rate = self.rate(self.progress.step + 1)
        if rate != self._rate:  # writing a device scalar costs as much as a small operator
            set_learning_rate(self.optimizers, rate)
            self._rate = rate
        step_clock.enter(step_clock.PRODUCTS)
        loss = self._update(batch)
        step_clock.enter(step_clock.OTHER)
        self.progress.step += 1
        return loss

    def _updated(self, batch: Any) -> Tensor:
        """Does the device's part of a step; returns the loss before the update."""
        parts = self.task.split(batch, self.config.gradient_accumulation_steps)
        loss = self.task.accumulate(parts, self.scaler, self._gradients.expect)
        step_clock.enter(step_clock.UPDATE)
        tables = self.scaler.of_tables(self.optimizers, self.world.device)
        self.scaler.step(self.optimizers, self._gradients.wait(tables))
        for weight in self._weights:  # including weights that no optimizer updates
            weight.grad = None
        if self.ema:
            self.ema.update()
        return loss

    def _agree(self, together: bool) -> bool:
        """Returns whether all ranks stop now, and publishes checkpoints that all have written.

        Args:
            together: whether the ranks wait for each other at this step anyway; at other steps
                several ranks decide nothing.
        """
        stop = self.stop_requested
        written = bool(self.checkpoints and self.checkpoints.written())
        if self.world.size > 1:
            if not together:
                return False
            said = torch.tensor([stop, not written], dtype=torch.long)
            stops, unwritten = all_sum(said, self.world).tolist()
            stop, written = stops > 0, not unwritten
        if written and self.checkpoints:
            self.checkpoints.finish()
        return stop

    def _stop(self) -> None:
        kept = "nothing is saved (--save_checkpoint_path saves)"
        if self.checkpoints:
            self._save()
            self.checkpoints.finish()
            kept = f"--resume continues from {self.checkpoints.last()}"
        raise StoppedError(f"stopped after step {self.progress.step}; {kept}")

    def _evaluate(self, evaluation: Evaluation) -> bool:
        """Tests the model, saves it if it is the best so far; returns whether it is good enough."""
        finish_updates(self.optimizers)
        self._report.mean()
        self._clock.pause()
        try:
            metrics, seconds = evaluation.test()
        except Exception:  # a fault of the test set must not cost the training
            self._save_alone()
            raise
        self._report.check_finite(metrics[self.task.loss_metric], "test loss")
        is_best = evaluation.record(metrics, seconds)
        if is_best and self.checkpoints:
            self._save()
            self.checkpoints.mark_best(self.progress.best)
        ended = self._called(self._callbacks.on_test)
        self._clock.resume()
        return evaluation.is_enough(metrics[self.task.metric]) or evaluation.is_stale() or ended

    def _save_alone(self) -> None:
        """Saves a checkpoint after an error, unless other ranks may wait elsewhere."""
        if self.checkpoints and self.world.size == 1:
            self._save()
            self.checkpoints.finish()

    def _is_checkpoint_due(self, total: int) -> bool:
        progress, freq = self.progress, self.config.checkpoint_freq
        if not self.checkpoints or not freq or progress.step == total:  # saved after its test
            return False
        return progress.own_step % freq == 0

    def _save(self) -> None:
        assert self.checkpoints is not None
        finish_updates(self.optimizers)
        self._report.mean()
        average_statistics(self.task.model, self.parameters.average, self.replicas)
        for part in gather(_largest(self.parameters.dense()), self.parameters.parts):
            for name, value in part.items():
                self._report.check_finite(value, f"largest value of {name}")
        self._clock.pause()
        self._report.save()
        self.checkpoints.save(self.progress.step, self.parameters, self.run, asdict(self.progress))
        self._clock.resume()

    def _finish(self, evaluation: Evaluation, validation: Loader | None) -> dict[str, float]:
        """Saves the last checkpoint, evaluates the one to keep, and returns the run's summary."""
        finish_updates(self.optimizers)
        if evaluation.is_due_at_end(self._ended):
            self._evaluate(evaluation)
        if self.checkpoints:
            self._save()
            self.checkpoints.finish()
        self._clock.pause()
        return self._report.summary() | evaluation.summary(validation, self._load_best())

    def _load_best(self) -> bool:
        """Loads the best checkpoint; returns whether there is one."""
        progress = self.progress
        best = self.checkpoints.best() if self.checkpoints and progress.best else None
        if best and progress.best["step"] != progress.step:
            Checkpoint(best).load(self.parameters, self.world)
        return best is not None


def _largest(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the largest magnitude of each tensor, read from the device at once.

    A sum of half-precision values may overflow where all of them are finite.
    """
    found = {
        name: torch.stack(value.aminmax()).abs().amax().float()
        for name, value in tensors.items()
        if value.is_floating_point() and value.numel()
    }
    return dict(zip(found, torch.stack([*found.values()]).tolist(), strict=True)) if found else {}
