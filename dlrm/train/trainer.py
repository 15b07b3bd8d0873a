"""The training loop, for any model: steps, printed lines, evaluation, checkpoints, early stop."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dlrm.distributed import OtherRankError, World, all_sum
from dlrm.train.agreement import Agreement, raise_device_errors
from dlrm.train.benchmark import Stopwatch, Throughput
from dlrm.train.checkpoints.checkpoint import Parameters, load_checkpoint
from dlrm.train.checkpoints.directory import CheckpointDirectory
from dlrm.train.cuda_graph import Graphed, Recorder, let_record
from dlrm.train.ema import NoAverage
from dlrm.train.gradient_sum import GradientSum, average_statistics
from dlrm.train.log import Loader, RunLog, Watched
from dlrm.train.optim.dense import set_learning_rate
from dlrm.train.precision import LossScaler


class StoppedError(Exception):
    """The training was asked to stop, and has saved what there was to save."""


class Task(Protocol):
    """What is trained: a network, its loss and its evaluation.

    Attributes:
        model: the network.
        metric: the entry of `evaluate` that tells the best checkpoint; greater is better.
        loss_metric: the entry that is the test loss.
    """

    metric: str
    loss_metric: str

    @property
    def model(self) -> nn.Module: ...

    def loss(self, batch: Any) -> Tensor:
        """Returns the sum of the process's losses over the size of the global batch, a scalar."""
        ...

    def split(self, batch: Any, parts: int) -> Sequence[Any]:
        """Cuts a batch in up to `parts` micro-batches, as many on every rank, that add up to it."""
        ...

    def num_samples(self, batch: Any) -> int:
        """Returns the samples of a batch on all ranks."""
        ...

    def evaluate(self, loader: Loader) -> dict[str, float]:
        """Returns the metrics of a data set, the same on every rank."""
        ...

    def table_parameters(self) -> Sequence[tuple[nn.Parameter, Mapping[int, int]]]:
        """Returns the parameters that hold tables, with the tables they hold: number -> rows."""
        ...


@dataclass(frozen=True)
class TrainConfig:
    """How long to train and what to report; field names are those of the command line's flags.

    Attributes:
        epochs: passes over the training set.
        max_steps: stop after exactly this many optimization steps.
        print_freq: steps between printed lines.
        test_freq: steps between evaluations; None: after every epoch.
        test_after: no evaluation before this many epochs.
        checkpoint_freq: steps between checkpoints; None: only the best and the last.
        auc_threshold: stop when an evaluation reaches this metric.
        benchmark_warmup_steps: steps that the throughput leaves out.
        gradient_accumulation_steps: micro-batches that a process's batch is computed in, one after
            the other: less memory, the same gradients.

    Raises:
        ValueError: an impossible value; flag and value are named.
    """

    epochs: int = 1
    max_steps: int | None = None
    print_freq: int = 200
    test_freq: int | None = None
    test_after: float = 0.0
    checkpoint_freq: int | None = None
    auc_threshold: float | None = None
    benchmark_warmup_steps: int = 0
    gradient_accumulation_steps: int = 1

    def __post_init__(self) -> None:
        at_least_one = ("epochs", "max_steps", "print_freq", "test_freq", "checkpoint_freq")
        for flag in (*at_least_one, "gradient_accumulation_steps"):
            value = getattr(self, flag)
            if value is not None and value < 1:
                raise ValueError(f"--{flag} {value}: expected 1 or more")
        for flag in ("test_after", "benchmark_warmup_steps"):
            if not getattr(self, flag) >= 0:
                raise ValueError(f"--{flag} {getattr(self, flag)}: expected 0 or more")
        if self.auc_threshold is not None and not 0 < self.auc_threshold <= 1:
            raise ValueError(
                f"--auc_threshold {self.auc_threshold}: expected more than 0, at most 1"
            )

    def num_steps(self, steps_per_epoch: int) -> int:
        """Returns the steps of the whole run."""
        steps = self.epochs * steps_per_epoch
        return steps if self.max_steps is None else min(steps, self.max_steps)


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


class Trainer:
    """Trains a task, with the same steps on every rank.

    Args:
        task: what to train.
        optimizers: those of all its parameters.
        schedule: step, counted from 1 -> learning rate.
        config: how long, and what to report.
        world: the processes that train together.
        log: where to report.
        scaler: of the loss; none by default.
        checkpoints: where to save; None saves nothing.
        average: of the weights over the steps, which is then what is tested; none by default.
        run: how the run was configured, stored in checkpoints.
        beat: called with the step whenever the training has got on.
        recorder: records the step, which is replayed from then on; None runs it op by op. Then
            optimizers have their learning rates on the device, and there is one process.

    Attributes:
        stop_requested: set it, on any rank, to end all after a step, with a checkpoint.
    """

    def __init__(
        self,
        task: Task,
        optimizers: Sequence[Optimizer],
        schedule: Callable[[int], float],
        config: TrainConfig,
        world: World = World(),
        log: RunLog | None = None,
        scaler: LossScaler | None = None,
        checkpoints: CheckpointDirectory | None = None,
        run: dict[str, Any] | None = None,
        average: NoAverage | None = None,
        beat: Callable[[int], object] = lambda step: None,
        recorder: Recorder | None = None,
    ):
        self.task, self.optimizers, self.schedule, self.config = task, optimizers, schedule, config
        self.world, self.log = world, log or RunLog()
        self.scaler, self.checkpoints, self.run = scaler or LossScaler(), checkpoints, run or {}
        self.average = average or NoAverage()
        self.parameters = Parameters(
            task.model, task.table_parameters(), optimizers, self.average.state
        )
        tables = {id(weight) for weight, _ in task.table_parameters()}
        updated = (weight for weight, _ in self.parameters.optimizer_of())
        self._gradients = GradientSum((w for w in updated if id(w) not in tables), world)
        self._agreement = Agreement(world)
        self._update: Callable[[Any], Tensor] = self._updated
        if recorder:
            let_record(optimizers)
            self._update = Graphed(self._updated, recorder)
        self.beat, self.stop_requested = beat, False
        self.progress = Progress()
        self._window_loss = torch.zeros((), device=world.device)
        self._clock = Stopwatch(world.device)
        self._test_seconds, self._test_samples = 0.0, 0
        self._finite_step = 0  # up to here no loss was infinite or NaN

    def resume(self, directory: Any) -> None:
        """Goes on from a checkpoint of this run: weights, optimizers, random state, position."""
        progress = load_checkpoint(directory, self.parameters, resume=True, world=self.world)
        self.progress = Progress(**progress)
        self._window_loss.fill_(0 if self.world.rank else self.progress.window_loss)
        self._finite_step = self.progress.step
        if self.checkpoints:
            self.progress.best = self.checkpoints.best_record()

    def fit(
        self, train: Loader, test: Loader, validation: Loader | None = None
    ) -> dict[str, float]:
        """Trains to the end of the run and returns its summary.

        The best checkpoint, where one is saved, else the final weights, are evaluated on
        `validation` once at the end; the model then has these weights.

        Args:
            train: the training set, batch after batch.
            test: the set that is watched during training.
            validation: a set that is not.

        Raises:
            FloatingPointError: the loss is NaN or infinite; step and last checkpoint are named.
            RuntimeError: a kernel on a GPU met a bad id since the last line; it is named.
            StoppedError: `stop_requested` was set.
        """
        total = self.config.num_steps(len(train))
        throughput = Throughput(self._clock, self.config.benchmark_warmup_steps)
        stopped = False
        if self.progress.tested_step < self.progress.step:  # saved just before its test
            reached = self._evaluate_if_due(test, len(train))
        else:  # a run that had reached its threshold is not trained on
            last = self.progress.history[-1] if self.progress.history else {}
            reached = self._is_enough(last.get(self.task.metric, math.nan))
        if self.progress.step >= total:
            self.log.line(f"all {total} steps are done already; there is nothing left to train")
        self._clock.lap(self.progress.step)
        self.log.start_progress(total, self.progress.step)
        while self.progress.step < total and not (reached or stopped):
            epoch, start = divmod(self.progress.step, len(train))
            with closing(train.batches(epoch, start)) as batches:
                self._clock.resume()
                for batch in batches:
                    loss = self._train_step(batch)
                    throughput.count(self.task.num_samples(batch))
                    self.log.progress()
                    self.beat(self.progress.step)
                    self._report(loss, len(train), total)
                    reached = self._evaluate_if_due(test, len(train))
                    self._checkpoint_if_due(total)
                    stopped = self._agree()
                    if self.progress.step == total or reached or stopped:
                        break
                self._clock.pause()
        self.log.end_progress()
        stopped_late, _ = self._agreement.finish()
        if stopped or stopped_late:
            self._stop()
        return self._finish(len(train), test, validation, throughput)

    def _train_step(self, batch: Any) -> Tensor:
        set_learning_rate(self.optimizers, self.schedule(self.progress.step + 1))
        loss = self._update(batch)
        self.progress.step += 1
        return loss

    def _updated(self, batch: Any) -> Tensor:
        """What a step does on the device; returns the loss that it began with."""
        loss = self._compute_gradients(batch)
        self._gradients.wait()
        self.scaler.step(self.optimizers, self.world)
        self.task.model.zero_grad(set_to_none=True)  # also of what no optimizer updates
        self.average.update()
        return loss

    def _compute_gradients(self, batch: Any) -> Tensor:
        """Adds up the gradients of the micro-batches of a batch; returns its loss."""
        losses = []
        parts = self.task.split(batch, self.config.gradient_accumulation_steps)
        for part in parts:
            loss = self.task.loss(part)
            if part is parts[-1]:
                self._gradients.expect()
            self.scaler.backward(loss)
            losses.append(loss.detach())
        return torch.stack(losses).sum() if len(losses) > 1 else losses[0]

    def _agree(self) -> bool:
        """Whether to stop now, and so all ranks; publishes what all of them have written."""
        written = bool(self.checkpoints and self.checkpoints.written())
        stop, all_written = self._agreement.exchange(self.stop_requested, written)
        if all_written and self.checkpoints:
            self.checkpoints.finish()
        return stop

    def _stop(self) -> None:
        kept = "nothing is saved (--save_checkpoint_path saves)"
        if self.checkpoints:
            self._save()
            self.checkpoints.finish()
            kept = f"--resume goes on from {self.checkpoints.last()}"
        raise StoppedError(f"stopped after step {self.progress.step}; {kept}")

    def _report(self, loss: Tensor, steps_per_epoch: int, total: int) -> None:
        """Prints a line where one is due; elsewhere nothing waits for the device.

        Lines are numbered as NVIDIA's: line i comes after the step with index i, counted from 0.
        The last step of a run has a line of its own, which does not end the window of the mean.
        """
        progress = self.progress
        self._window_loss += loss
        progress.window_steps += 1
        index = progress.step - 1
        due = index > 0 and index % self.config.print_freq == 0
        if not due and progress.step != total:
            return
        mean = self._mean_window_loss()
        epoch, step = divmod(index, steps_per_epoch)
        step_time = self._clock.lap(progress.step)
        rate = self.schedule(progress.step)
        eta = timedelta(seconds=int(step_time * (total - progress.step)))
        self.log.line(
            f"Epoch:[{epoch}/{self.config.epochs}] [{step}/{steps_per_epoch}]  eta: {eta}  "
            f"loss: {mean:.4f}  step_time: {step_time:.6f}  lr: {_short(rate)}"
            f"{self.scaler.report()}"
        )
        self.log.step(epoch, step, {"loss": mean, "step_time": step_time, "lr": rate})
        progress.history.append({"step": progress.step, "loss": mean, "lr": rate})
        if due:
            self._window_loss.zero_()
            progress.window_steps = 0

    def _mean_window_loss(self) -> float:
        """Returns the mean loss since the last line, of all ranks; finds a NaN and bad ids."""
        raise_device_errors(self.world)
        loss = self._global_window_loss()
        self._check_finite(loss, "loss")
        self._finite_step = self.progress.step - 1  # whose update the last loss has judged
        return loss / max(self.progress.window_steps, 1)

    def _global_window_loss(self) -> float:
        return all_sum(self._window_loss.clone(), self.world).item()

    def _check_finite(self, value: float, what: str) -> None:
        """Ends the run on a NaN or infinity; `value` is the same on all ranks."""
        step = self.progress.step
        if math.isfinite(value):
            return
        last = self.checkpoints.last() if self.checkpoints else None
        if self.world.rank:
            raise OtherRankError("rank 0 names it")
        kept = f"The last checkpoint is {last}." if last else "There is no checkpoint."
        raise FloatingPointError(
            f"the {what} became {value} between steps {self._finite_step + 1} and {step}: the "
            "training diverged and stops; these steps are not saved. A smaller --lr, a longer "
            f"warm-up or another --seed may help. {kept}"
        )

    def _evaluate_if_due(self, test: Loader, steps_per_epoch: int) -> bool:
        step = self.progress.step
        if step % (self.config.test_freq or steps_per_epoch) or not test.num_samples:
            return False
        if step / steps_per_epoch < self.config.test_after:
            return False
        return self._evaluate(test, steps_per_epoch)

    def _evaluate(self, test: Loader, steps_per_epoch: int) -> bool:
        """Tests the model, saves it if it is the best so far; returns whether it is good enough."""
        self._mean_window_loss()
        self._clock.pause()
        began = time.perf_counter()
        average_statistics(self.task.model, self.average.state, self.world)
        try:
            with self.average.applied():
                metrics = self.task.evaluate(self._watched(test, "test"))
        except Exception:  # the test set's fault, which must not cost the training
            if self.checkpoints and self.world.size == 1:  # others may wait in the evaluation
                self._save()
                self.checkpoints.finish()
            raise
        self._check_finite(metrics[self.task.loss_metric], "test loss")
        seconds = time.perf_counter() - began
        self._test_seconds += seconds
        self._test_samples += test.num_samples
        progress, score = self.progress, metrics[self.task.metric]
        progress.tested_step = progress.step
        epoch, index = divmod(progress.step - 1, steps_per_epoch)
        self.log.line(f"Epoch {epoch} step {index}. test: {_shown(metrics)}  ({seconds:.1f} s)")
        self.log.step(epoch, index, {f"test_{name}": value for name, value in metrics.items()})
        progress.history.append({"step": progress.step, **metrics})
        if math.isnan(score):
            self.log.line(f"note: {self.task.metric} is undefined, the test set has one class only")
        best = progress.best.get(self.task.metric, math.nan)
        if math.isnan(best) or score > best:
            done = progress.step / steps_per_epoch
            progress.best = {**metrics, "step": progress.step, "epoch": done}
            if self.checkpoints:
                self._save()
                self.checkpoints.mark_best(progress.best)
        self._clock.resume()
        return self._is_enough(score)

    def _is_enough(self, score: float) -> bool:
        threshold = self.config.auc_threshold
        if threshold is None or not score >= threshold:
            return False
        self.log.line(f"{self.task.metric} {score:.6f} has reached --auc_threshold {threshold}")
        return True

    def _checkpoint_if_due(self, total: int) -> None:
        freq = self.config.checkpoint_freq
        last = self.progress.step == total  # which is saved when it has been tested
        if self.checkpoints and freq and self.progress.step % freq == 0 and not last:
            self._save()

    def _save(self) -> None:
        assert self.checkpoints is not None
        self._mean_window_loss()
        average_statistics(self.task.model, self.average.state, self.world)
        for name, value in self.parameters.dense().items():
            self._check_finite(value.sum().item(), f"sum of {name}")
        self._clock.pause()
        self.progress.window_loss = self._global_window_loss()
        # As a resumed run begins, so that both go on adding in the same order.
        self._window_loss.fill_(0 if self.world.rank else self.progress.window_loss)
        self.checkpoints.save(self.progress.step, self.parameters, self.run, asdict(self.progress))
        self._clock.resume()

    def _finish(
        self,
        steps_per_epoch: int,
        test: Loader,
        validation: Loader | None,
        throughput: "Throughput",
    ) -> dict[str, float]:
        """Saves the last checkpoint, evaluates the one to keep, and sums the run up."""
        progress, metric = self.progress, self.task.metric
        whole = progress.step / steps_per_epoch >= max(self.config.test_after, 1)
        untested = progress.tested_step < progress.step and test.num_samples > 0
        if untested and (progress.tested_step or whole):
            self._evaluate(test, steps_per_epoch)
        if self.checkpoints:
            self._save()
            self.checkpoints.finish()
        self._clock.pause()
        if skipped := self.scaler.num_skipped():
            self.log.line(
                f"note: {skipped} steps changed nothing, since their gradients overflowed; a "
                "smaller --loss_scale, or bf16, may help"
            )
        losses = [entry["loss"] for entry in progress.history if "lr" in entry]
        summary = {"training_loss": losses[-1]} if losses else {}
        if rate := throughput.rate():
            summary["average_train_throughput"] = rate
        if not progress.best:
            reason = "the run ended before the first one was due (see --test_freq)"
            if not test.num_samples:
                reason = "none was asked for, or there is no test set"
            self.log.line(f"no test: {reason}")
            return summary
        if self._test_seconds:
            summary["average_test_throughput"] = self._test_samples / self._test_seconds
        summary |= {
            f"best_{metric}": progress.best[metric],
            "best_epoch": progress.best["epoch"],
            "best_validation_loss": progress.best[self.task.loss_metric],
        }
        return summary | self._final_report(test, validation)

    def _final_report(self, test: Loader, validation: Loader | None) -> dict[str, float]:
        tests = [entry for entry in self.progress.history if self.task.metric in entry]
        tested = tests[-1] if tests else self.progress.best  # saved before its only test
        best = self.checkpoints.best() if self.checkpoints else None
        if best and self.progress.best["step"] != self.progress.step:
            load_checkpoint(best, self.parameters, world=self.world)
            tested = self.progress.best
        which = f"best, step {int(tested['step'])}" if best else f"last, step {self.progress.step}"
        results = {"test": {k: v for k, v in tested.items() if k not in ("step", "epoch")}}
        if validation is not None and validation.num_samples:
            with self.average.applied():
                watched = self._watched(validation, "validation")
                results["validation"] = self.task.evaluate(watched)
        for name, metrics in results.items():
            self.log.line(f"Final weights ({which}). {name}: {_shown(metrics)}")
        return {f"{s}_{name}": v for s, metrics in results.items() for name, v in metrics.items()}

    def _watched(self, loader: Loader, title: str) -> Watched:
        return Watched(loader, title, self.log.quiet, lambda: self.beat(self.progress.step))


def _short(rate: float) -> str:
    """Four decimals, as NVIDIA prints them, unless they would hide a small rate."""
    return f"{rate:.4f}" if rate >= 0.01 or rate == 0 else f"{rate:.4g}"


def _shown(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.6f}" for name, value in metrics.items())
