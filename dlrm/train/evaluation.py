"""Evaluation of a model during its training: schedule, best result, and final report."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from torch import nn

from dlrm.metrics.table import cost
from dlrm.train.gradient_sum import average_statistics
from dlrm.train.log import Loader, Watched
from dlrm.train.reports.roles import Roles

if TYPE_CHECKING:
    from dlrm.train.trainer import Trainer


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Puts a model in evaluation mode within the block, and restores its mode afterward."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


class Evaluation:
    """Evaluates a trainer's task during the training, and keeps the best result in its progress.

    Args:
        test_set: rows to test; without samples nothing is tested.
    """

    def __init__(self, trainer: "Trainer", test_set: Loader, steps_per_epoch: int, roles: Roles):
        self.trainer, self.task, self.config = trainer, trainer.task, trainer.config
        self.progress, self.log, self.roles = trainer.progress, trainer.log, roles
        self.test_set, self.steps_per_epoch = test_set, steps_per_epoch
        self._seconds, self._samples = 0.0, 0

    def is_due(self) -> bool:
        """Returns whether a test is due after this step."""
        step, every = self.progress.own_step, self.config.test_freq or self.steps_per_epoch
        is_due = step % every == 0 and step / self.steps_per_epoch >= self.config.test_after
        return is_due and self.test_set.num_samples > 0

    def is_due_at_end(self, ended: bool = False) -> bool:
        """Returns whether to test the last step: after a test, or an epoch and `test_after`.

        Args:
            ended: whether the caller's program ended the training, which is tested at any step.
        """
        progress = self.progress
        whole = progress.own_step / self.steps_per_epoch >= max(self.config.test_after, 1)
        untested = progress.tested_step < progress.step and self.test_set.num_samples > 0
        return untested and (progress.tested_step > progress.first_step or whole or ended)

    def test(self) -> tuple[dict[str, float], float]:
        """Returns the metrics of the test set, and the seconds that the test took."""
        began = time.perf_counter()
        trainer = self.trainer
        average_statistics(self.task.model, trainer.parameters.average, trainer.replicas)
        metrics = self._evaluate(self.test_set, self.roles.chooses)
        seconds = time.perf_counter() - began
        self._seconds += seconds
        self._samples += self.test_set.num_samples
        return metrics, seconds

    def record(self, metrics: dict[str, float], seconds: float) -> bool:
        """Reports the metrics of this step; returns whether they are the best so far."""
        progress, metric = self.progress, self.task.metric
        progress.tested_step = progress.step
        best = progress.best.get(metric, math.nan)
        is_best = math.isnan(best) or cost(metric, metrics[metric]) < cost(metric, best)
        name, done = self.roles.chooses, progress.own_step
        self.log.console.test(done, name, metrics, seconds, is_best)
        tested = {f"{name}_{key}": value for key, value in metrics.items()}
        self.log.step(*divmod(done - 1, self.steps_per_epoch), tested, progress.step)
        progress.history.append({"step": progress.step, **metrics})
        self._note_undefined(name, metrics)
        if is_best:
            epochs = done / self.steps_per_epoch
            progress.best = {**metrics, "step": progress.step, "epoch": epochs}
        return is_best

    def is_enough(self, score: float) -> bool:
        """Returns whether a score has reached the threshold, and reports it."""
        threshold, metric = self.config.auc_threshold, self.task.metric
        if threshold is None or not cost(metric, score) <= cost(metric, threshold):
            return False
        self.log.line(f"{metric} {score:.6f} has reached --auc_threshold {threshold}")
        return True

    def is_stale(self) -> bool:
        """Lowers the learning rate on a plateau; returns whether to stop the training early."""
        config, progress = self.config, self.progress
        if progress.own_step >= config.num_steps(self.steps_per_epoch):
            return False
        since_drop = self._tests_since(max([*progress.drops, progress.best.get("step", 0)]))
        if config.plateau_patience and since_drop >= config.plateau_patience:
            progress.drops.append(progress.step)
            effect = f"the learning rate is multiplied by {config.plateau_factor:g}"
            self.log.line(f"no new best in {_tests(since_drop)}: {effect}")
        since_best = self._tests_since(progress.best.get("step", 0))
        if not config.early_stop or since_best < config.early_stop:
            return False
        self.log.line(f"no new best in {_tests(since_best)}: --early_stop ends the training")
        return True

    def _tests_since(self, step: float) -> int:
        """Counts the tests that were due after a step, without the extra one at a run's end."""
        every, first = self.config.test_freq or self.steps_per_epoch, self.progress.first_step
        tested = [e["step"] for e in self.progress.history if self.task.metric in e]
        return sum(after > step and (after - first) % every == 0 for after in tested)

    def summary(self, validation: Loader | None, has_best: bool) -> dict[str, float]:
        """Evaluates the weights to keep, and returns all results of the run.

        Args:
            validation: a set not used during training; None, or an empty one, is not evaluated.
            has_best: the model has the weights of the best checkpoint, not those of the last step.
        """
        best, metric, summary = self.progress.best, self.task.metric, {}
        if not best:
            reason = "the run ended before the first one was due (see --test_freq)"
            if not self.test_set.num_samples:
                reason = "none was asked for, or there is no test set"
            self.log.line(f"no test: {reason}")
            return {}
        if self._seconds:
            summary["average_test_throughput"] = self._samples / self._seconds
        summary[f"best_{metric}"] = best[metric]
        summary["best_epoch"] = best["epoch"]
        summary["best_validation_loss"] = best[self.task.loss_metric]  # NVIDIA's name
        for name, metrics in self._kept(validation, has_best).items():
            summary |= {f"{name}_{key}": value for key, value in metrics.items()}
        return summary

    def _kept(self, validation: Loader | None, has_best: bool) -> dict[str, dict[str, float]]:
        """Reports and returns the metrics of the weights to keep, by data set."""
        progress, roles = self.progress, self.roles
        tests = [entry for entry in progress.history if self.task.metric in entry]
        tested = tests[-1] if tests else progress.best  # saved before its only test
        if has_best and progress.best["step"] != progress.step:
            tested = progress.best
        which = f"best, step {int(tested['step'])}" if has_best else f"last, step {progress.step}"
        results = {roles.chooses: {k: v for k, v in tested.items() if k not in ("step", "epoch")}}
        if roles.reports and validation is not None and validation.num_samples:
            results[roles.reports] = self._evaluate(validation, roles.reports)
            self._note_undefined(roles.reports, results[roles.reports])
        # The last weights were not chosen, so their test needs no role.
        told = {n: r for n in results if (r := roles.of(n)) and (has_best or n == roles.reports)}
        self.log.console.kept(which, results, told)
        return results

    def _note_undefined(self, name: str, metrics: dict[str, float]) -> None:
        if math.isnan(metrics[metric := self.task.metric]):
            self.log.line(f"note: {metric} is undefined, the {name} set has one class only")

    def _evaluate(self, loader: Loader, title: str) -> dict[str, float]:
        with self.trainer.ema.applied() if self.trainer.ema else nullcontext():
            return self.task.evaluate(Watched(loader, title, self.log.quiet))


def _tests(count: int) -> str:
    return f"{count} test{'s' * (count > 1)}"
