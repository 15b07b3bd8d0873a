"""The terminal of a run, in one of two forms: lines like NVIDIA's, or a short form for people."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from dlrm.command_line import highlighted, painted, wrapped
from dlrm.documents import one_line
from dlrm.metrics.table import SHOWN, line_of, title, unit_of
from dlrm.train.reports.verdict import bound_by, verdict_line

_LABEL = 12  # columns of the names at the start of lines
_NOTICE_LINES = 2  # of a line that the short form abridges
_PATIENCE, _MOST_PATIENCE = 30, 600  # seconds between lines of progress without a terminal
_SHARE = 0.1  # of the steps between such lines, unless they take longer than that


class Line(NamedTuple):
    """Holds a line about a run, and that of the short form; see `NvidiaConsole.line`."""

    text: str
    short: str | None = None


class Position(NamedTuple):
    """Holds the progress of a run: `done` of `total` steps, of `epochs` times `steps_of_epoch`."""

    done: int
    total: int
    epochs: int
    steps_of_epoch: int

    @property
    def last_index(self) -> tuple[int, int]:
        """The epoch of the last step and the step's index in it, both counted from 0."""
        epoch, index = divmod(self.done - 1, self.steps_of_epoch)
        return epoch, index


class Point(NamedTuple):
    """Holds the values of the steps since the last print.

    Attributes:
        loss: mean loss.
        seconds: mean seconds of a step.
        samples: mean samples of a step.
        rate: learning rate.
        skipped: a text about skipped steps, or "".
    """

    at: Position
    loss: float
    seconds: float
    samples: float
    rate: float
    skipped: str = ""

    @property
    def eta(self) -> timedelta:
        """The time that the remaining steps take."""
        return timedelta(seconds=int(self.seconds * (self.at.total - self.at.done)))


class Evaluated(NamedTuple):
    """Holds the results of a test during the training.

    Attributes:
        name: the rows, such as "test".
        metrics: all metrics.
        chief: names of the metric that chooses the best weights, and of the loss.
        seconds: seconds that the test took.
        is_best: whether it is the best so far.
    """

    at: Position
    name: str
    metrics: Mapping[str, float]
    chief: tuple[str, str]
    seconds: float
    is_best: bool


class Kept(NamedTuple):
    """Holds the metrics of the weights that a training keeps.

    Attributes:
        which: such as "best, step 400".
        results: their metrics by the name of the rows.
        roles: roles of these rows in words, if they have one.
    """

    which: str
    results: Mapping[str, Mapping[str, float]]
    roles: Mapping[str, str]


class Saved(NamedTuple):
    """Names the files of a training.

    Attributes:
        curves: the picture; None if there is to be none.
        problem: the reason why there is none, or None.
        last, best: checkpoints; both are None if the weights are not saved, and the best also if
            nothing was tested.
    """

    curves: Path | None
    problem: str | None
    last: Path | None
    best: Path | None


class NvidiaConsole:
    """Prints lines like those of NVIDIA's program, and shows a progress bar.

    docs/reference/nvidia.md lists the differences.

    Args:
        quiet: print nothing; for all ranks except the first.
    """

    bar_format: str | None = None

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self._bar: tqdm | None = None
        self._advised: set[str] = set()

    def line(self, text: str, short: str | None = None) -> None:
        """Prints a line, with any indented lines that continue it, above the progress bar.

        Args:
            short: the line of the short form, if it is another one; "" for none.
        """
        self._print(one_line(text))

    def start(self, total: int, done: int) -> None:
        """Shows a progress bar of training steps, if standard error is a terminal."""
        self._bar = progress_bar(total, "train", done, self.quiet, bar_format=self.bar_format)

    def advance(self) -> None:
        """Advances the bar by a step."""
        if self._bar is not None:
            self._bar.update()

    def end(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def point(self, point: Point) -> None:
        """Reports the steps since the last point."""
        at, (epoch, index) = point.at, point.at.last_index
        self.line(
            f"Epoch:[{epoch}/{at.epochs}] [{index}/{at.steps_of_epoch}]  eta: {point.eta}  "
            f"loss: {point.loss:.4f}  step_time: {point.seconds:.6f}  lr: {_short(point.rate)}"
            f"{point.skipped}"
        )

    def time(self, shares: Mapping[str, float], seconds: float, advice: Mapping[str, str]) -> None:
        """Reports the parts of the time of the steps since the last point.

        Args:
            advice: suggestions by part, each of which is printed once.
        """
        new = {part: text for part, text in advice.items() if part not in self._advised}
        self.line(verdict_line(shares, new))
        self._advised.add(bound_by(shares)[1])

    def test(self, test: Evaluated) -> None:
        """Reports a test during the training."""
        epoch, index = test.at.last_index
        metrics = line_of(test.metrics)
        self.line(f"Epoch {epoch} step {index}. {test.name}: {metrics}  ({test.seconds:.1f} s)")

    def kept(self, kept: Kept) -> None:
        """Reports the metrics of the weights that are kept."""
        for name, metrics in kept.results.items():
            role = f", {kept.roles[name]}" if name in kept.roles else ""
            self.line(f"Final weights ({kept.which}). {name}{role}: {line_of(metrics)}")

    def saved(self, saved: Saved) -> None:
        """Reports the files of a training."""
        if saved.problem or saved.curves:
            self.line(saved.problem or f"curves: {saved.curves}")
        if saved.last:
            best = f"best {saved.best}" if saved.best else "no best one without a test"
            self.line(f"checkpoints: last {saved.last}, {best}")
        else:
            self.line("the weights are not saved; --save_checkpoint_path saves them")

    def suggest(self, commands: Sequence[str]) -> None:
        """Takes commands that can follow the run."""

    def summary(self, values: Mapping[str, float]) -> None:
        """Reports the results of the run."""
        now = datetime.now()
        for name, value in values.items():
            self.line(f"DLL {now} - () {name} : {value} {unit_of(name)}".rstrip())

    def _print(self, text: str) -> None:
        if not self.quiet:
            with tqdm.external_write_mode(sys.stdout):  # the bar returns after the flush
                print(text, flush=True)


class ShortConsole(NvidiaConsole):
    """Prints a line for each test and a closing block; the progress bar has loss and throughput.

    Without a terminal, lines of progress are printed: one each tenth of the steps, at least half a
    minute and at most ten minutes apart.

    Args:
        quiet: print nothing; for all ranks except the first.
        verbose: also print a line of progress and the parts of the time at each point.
    """

    bar_format = "{desc} {percentage:3.0f}%|{bar}| {n:,}/{total:,} steps{postfix}, ETA {remaining}"

    def __init__(
        self,
        quiet: bool = False,
        verbose: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(quiet)
        self._verbose, self._clock = verbose, clock
        self._printed = (0, clock())  # step and time of the last line of progress
        self._seconds: dict[str, float] = {}
        self._advice: Mapping[str, str] = {}
        self._kept: Kept | None = None
        self._saved: Saved | None = None
        self._commands: Sequence[str] = ()

    def line(self, text: str, short: str | None = None) -> None:
        if short is None or self._verbose:
            self._print(highlighted(wrapped(one_line(text))))
        elif short:
            label, _, rest = short.partition(": ")
            self._labeled(label, rest, most=_NOTICE_LINES)

    def start(self, total: int, done: int) -> None:
        super().start(total, done)
        self._printed = done, self._clock()

    def point(self, point: Point) -> None:
        at = point.at
        progress = [f"loss {point.loss:.4f}"]
        if point.seconds:
            progress.append(_rate(point.samples / point.seconds))
        if self._bar is not None and not self._bar.disable:
            self._bar.set_postfix_str(", ".join(progress), refresh=False)
        if self._verbose or self._is_due(at):
            self._printed = at.done, self._clock()
            parts = [_steps(at), *progress, f"lr {point.rate:.2g}", f"ETA {point.eta}"]
            self._labeled("train", "  ".join(parts) + point.skipped)

    def time(self, shares: Mapping[str, float], seconds: float, advice: Mapping[str, str]) -> None:
        if self._verbose:
            super().time(shares, seconds, advice)
        self._advice = advice
        for name, share in shares.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + share * seconds

    def test(self, test: Evaluated) -> None:
        metrics = _metrics({name: test.metrics[name] for name in dict.fromkeys(test.chief)})
        self._labeled(test.name, f"{_steps(test.at)}  {metrics}", "best" if test.is_best else "")

    def kept(self, kept: Kept) -> None:
        self._kept = kept

    def saved(self, saved: Saved) -> None:
        self._saved = saved

    def suggest(self, commands: Sequence[str]) -> None:
        self._commands = commands

    def summary(self, values: Mapping[str, float]) -> None:
        if self.quiet:
            return
        if self._saved is None and self._kept is None:
            self._values(values)
        else:
            self._print("")
            self._close(values, self._saved)

    def _values(self, values: Mapping[str, float]) -> None:
        """Prints the results of a run that is no training, but for those of a printed table."""
        shown = {
            title(name).replace("_", " "): f"{value:.6g} {unit_of(name)}".rstrip()
            for name, value in values.items()
            if "_batch_" not in name
        }
        width = max(map(len, shown), default=0)
        for name, text in shown.items():
            self._print(f"{name:<{width}}  {text}")

    def _close(self, values: Mapping[str, float], saved: Saved | None) -> None:
        """Prints the closing block of a training; `dlrm.fit` names no files."""
        kept = self._kept or Kept("", {}, {})
        for name, metrics in kept.results.items():
            self._labeled(name, f"{_metrics(metrics)}  {kept.roles.get(name, '')}".rstrip())
        if "average_train_throughput" in values:
            speed = _rate(values["average_train_throughput"])
            if "training_loss" in values:  # a run may end before the first is printed
                speed += f", training loss {values['training_loss']:.4f}"
            self._labeled("speed", speed)
        if total := sum(self._seconds.values()):
            shares = {name: seconds / total for name, seconds in self._seconds.items()}
            self._labeled("time", verdict_line(shares, self._advice).removeprefix("time: "))
        if saved is not None:
            self._files(saved)
        for index, command in enumerate(self._commands):
            self._labeled("" if index else "next", command, end=" \\")

    def _files(self, saved: Saved) -> None:
        best, last = saved.best, saved.last
        if last is None:
            self._labeled("saved", "no weights; --save_checkpoint_path saves them")
        elif best is None or best == last:
            self._labeled("saved", f"{_relative(last)} (last{' and best' if best else ''})")
        else:
            self._labeled("saved", f"{_relative(best)} (best), {last.name} (last)")
        if curves := saved.problem or (saved.curves and _relative(saved.curves)):
            self._labeled("curves", curves)

    def _is_due(self, at: Position) -> bool:
        """Returns whether a line of progress is due, where there is no bar."""
        if self._bar is None or not self._bar.disable or at.done == at.total:
            return False
        step, when = self._printed
        passed = self._clock() - when
        is_share = at.done - step >= _SHARE * at.total
        return passed >= (_PATIENCE if is_share else _MOST_PATIENCE)

    def _labeled(self, label: str, text: str, mark: str = "", **wrapping: Any) -> None:
        """Prints a line with its name in the first column, and a mark at its end."""
        label = label.replace("_", " ")
        body = wrapped(f"{label:<{_LABEL}}{one_line(text)}", _LABEL, **wrapping)
        mark = f"  {painted(mark, 'green')}" if mark else ""
        self._print(painted(label, "bold") + body[len(label) :] + mark)


def open_console(log_format: str, verbose: bool, quiet: bool) -> NvidiaConsole:
    """Returns the console of a run.

    Args:
        log_format: form of the lines, see `dlrm.train.config.LOG_FORMATS`.
        verbose: whether the short form prints more.
    """
    return ShortConsole(quiet, verbose) if log_format == "short" else NvidiaConsole(quiet)


def progress_bar(
    total: int, name: str, initial: int = 0, quiet: bool = False, **others: Any
) -> tqdm:
    """Returns a progress bar of steps on standard error, if that is a terminal.

    Args:
        name: text at its start.
        initial: steps done.
        others: see `tqdm`.
    """
    return tqdm(
        total=total,
        initial=initial,
        desc=name,
        unit="step",
        leave=False,
        dynamic_ncols=True,
        disable=quiet or not sys.stderr.isatty(),
        **others,
    )


def _steps(at: Position) -> str:
    """Returns the steps done, as wide as at the end of the run."""
    total = f"{at.total:,}"
    return f"step {at.done:>{len(total)},}/{total}"


def _rate(rate: float) -> str:
    """Returns a throughput, to one digit if it is small."""
    return f"{rate:,.0f} samples/s" if rate >= 10 else f"{rate:.2g} samples/s"


def _metrics(metrics: Mapping[str, float]) -> str:
    """Returns the metrics that summaries show, or all if they show none of these."""
    names = [name for name in metrics if name in SHOWN] or list(metrics)
    return "  ".join(f"{title(name)} {metrics[name]:.4f}" for name in names)


def _short(rate: float) -> str:
    """Returns four decimals, as NVIDIA prints them, unless they would hide a small rate."""
    return f"{rate:.4f}" if rate >= 0.01 or rate == 0 else f"{rate:.4g}"


def _relative(path: Path) -> str:
    """Returns a path from the working directory, if it is below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
