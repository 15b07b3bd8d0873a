"""The terminal of a run: a progress bar, and lines like NVIDIA's or a short form for people."""

import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import TqdmWarning

with warnings.catch_warnings():  # in a notebook without ipywidgets the bar is text
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm

from dlrm.command_line import highlighted, painted, wrapped
from dlrm.documents import one_line
from dlrm.metrics.table import SHOWN, line_of, title, unit_of
from dlrm.step_clock import DATA, EXCHANGE, LOOKUP, PRODUCTS, RECORDED, UPDATE

_BAR = "{desc} {percentage:3.0f}%|{bar}| {n:,}/{total:,} steps{postfix}, ETA {remaining}"
_NOTEBOOK = "ipykernel.zmqshell"
_LABEL = 12  # columns of the names at the start of lines
_NOTICE_LINES = 2  # of a line that the short form abridges
_PATIENCE, _MOST_PATIENCE = 30, 600  # seconds between lines of progress without a bar
_SHARE = 0.1  # of the steps between such lines, unless they take longer than that
_WAITS = {DATA: "input-bound", EXCHANGE: "communication-bound"}
_LEAST_WAIT = 0.25  # a wait of this share of a step bounds the step
_LEAST_SHARE = 0.005  # shown


class Line(NamedTuple):
    """Holds a line about a run, and that of the short form; see `Console.line`."""

    text: str
    short: str | None = None


class Saved(NamedTuple):
    """Names the files of a training: the picture, or the problem with it, and checkpoints."""

    curves: Path | None
    problem: str | None
    last: Path | None
    best: Path | None


class Console:
    """Shows a run on the terminal.

    The lines of the form `nvidia` are like those of NVIDIA's program (docs/reference/nvidia.md
    lists the differences). The short form has a line for each test and a closing block. Where no
    bar is shown, it also has lines of progress: one each tenth of the steps, at least half a minute
    and at most ten minutes apart.

    Args:
        log_format: form of the lines, see `dlrm.train.config.LOG_FORMATS`.
        verbose: the short form also prints progress and the parts of the time at each point.
        quiet: print no lines; for all ranks except the first.
        progress: whether a bar shows the steps; None shows one beside lines, where `is_watched`.
    """

    def __init__(
        self,
        log_format: str = "nvidia",
        verbose: bool = False,
        quiet: bool = False,
        progress: bool | None = None,
    ) -> None:
        self.quiet, self._is_short, self._verbose = quiet, log_format == "short", verbose
        self._shows_bar = not quiet and is_watched() if progress is None else progress
        self._bar = progress_bar(0, "train", 0, shown=False)
        self._figures: dict[str, str] = {}
        self._advised: set[str] = set()
        self._seconds: dict[str, float] = {}
        self._advice: Mapping[str, str] = {}
        self._kept: dict[str, str] = {}
        self._files: dict[str, str] = {}
        self._commands: Sequence[str] = ()

    def line(self, text: str, short: str | None = None) -> None:
        """Prints a line, with any indented lines that continue it, above the progress bar.

        Args:
            short: the line of the short form, if it is another one; "" for none.
        """
        if not self._is_short:
            self._print(one_line(text))
        elif short is None or self._verbose:
            self._print(highlighted(wrapped(one_line(text))))
        elif short:
            label, _, rest = short.partition(": ")
            self._labeled(label, rest, most=_NOTICE_LINES)

    def start(self, total: int, done: int, epochs: int, steps_per_epoch: int) -> None:
        """Begins a training of `total` steps, of which some may be done."""
        self._total, self._epochs, self._steps_per_epoch = total, epochs, steps_per_epoch
        self._printed = done, time.monotonic()  # the last line of progress
        shown = {"leave": self.quiet, "bar_format": _BAR}
        self._bar = progress_bar(total, "train", done, self._shows_bar, **shown)

    def advance(self) -> None:
        """Advances the bar by a step."""
        self._bar.update()

    def end(self) -> None:
        """Ends the bar."""
        self._bar.close()

    def point(
        self, done: int, loss: float, seconds: float, samples: float, rate: float, skipped: str = ""
    ) -> None:
        """Reports the steps since the last point.

        Args:
            done: number of steps done.
            loss, seconds, samples: means of a step.
            rate: learning rate.
            skipped: a text about skipped steps, or "".
        """
        progress = {"loss": f"loss {loss:.4f}"}
        if seconds:
            progress["speed"] = _rate(samples / seconds)
        self._figure(progress)
        eta = timedelta(seconds=int(seconds * (self._total - done)))
        if not self._is_short:
            epoch, index = divmod(done - 1, self._steps_per_epoch)
            self.line(
                f"Epoch:[{epoch}/{self._epochs}] [{index}/{self._steps_per_epoch}]  eta: {eta}  "
                f"loss: {loss:.4f}  step_time: {seconds:.6f}  lr: {_short(rate)}{skipped}"
            )
        elif self._verbose or self._is_due(done):
            self._printed = done, time.monotonic()
            parts = [self._steps(done), *progress.values(), f"lr {rate:.2g}", f"ETA {eta}"]
            self._labeled("train", "  ".join(parts) + skipped)

    def time(self, shares: Mapping[str, float], seconds: float, advice: Mapping[str, str]) -> None:
        """Reports the shares of the parts in the seconds since the last point.

        Args:
            advice: suggestions by part, each of which is printed once.
        """
        if self._verbose or not self._is_short:
            new = {part: text for part, text in advice.items() if part not in self._advised}
            self.line(f"time: {verdict(shares, new)}")
            self._advised.add(bound_by(shares)[1])
        self._advice = advice
        for name, share in shares.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + share * seconds

    def test(
        self, done: int, name: str, metrics: Mapping[str, float], seconds: float, is_best: bool
    ) -> None:
        """Reports a test after `done` steps, which took some seconds, of rows such as "test"."""
        if self.quiet:  # no line has them
            self._figure({name: _metrics(metrics)})
        if not self._is_short:
            epoch, index = divmod(done - 1, self._steps_per_epoch)
            found = line_of(metrics)
            self.line(f"Epoch {epoch} step {index}. {name}: {found}  ({seconds:.1f} s)")
        else:
            found = f"{self._steps(done)}  {_metrics(metrics)}"
            self._labeled(name, found, "best" if is_best else "")

    def kept(
        self, which: str, results: Mapping[str, Mapping[str, float]], roles: Mapping[str, str]
    ) -> None:
        """Reports the metrics of the weights that a training keeps.

        Args:
            which: such as "best, step 400".
            results: their metrics by the name of the rows.
            roles: roles of these rows in words, if they have one.
        """
        for name, metrics in results.items():
            role = roles.get(name, "")
            self._kept[name] = f"{_metrics(metrics)}  {role}".rstrip()
            if not self._is_short:
                named = f"{name}, {role}" if role else name
                self.line(f"Final weights ({which}). {named}: {line_of(metrics)}")

    def saved(self, saved: Saved) -> None:
        """Reports the files of a training."""
        curves, problem, last, best = saved
        weights = "the weights are not saved; --save_checkpoint_path saves them"
        shortly = "no weights; --save_checkpoint_path saves them"
        if last:
            chosen = f"best {best}" if best else "no best one without a test"
            weights = f"checkpoints: last {last}, {chosen}"
            shortly = f"{_relative(last)} (last{' and best' if best == last else ''})"
            if best and best != last:
                shortly = f"{_relative(best)} (best), {last.name} (last)"
        self._files = {"saved": shortly}
        if curves:
            self._files["curves"] = problem or _relative(curves)
        if not self._is_short:
            if curves:
                self.line(problem or f"curves: {curves}")
            self.line(weights)

    def suggest(self, commands: Sequence[str]) -> None:
        """Takes commands that can follow the run, for the short form."""
        self._commands = commands

    def summary(self, values: Mapping[str, float]) -> None:
        """Reports the results of the run."""
        if not self._is_short:
            now = datetime.now()
            for name, value in values.items():
                self.line(f"DLL {now} - () {name} : {value} {unit_of(name)}".rstrip())
        elif self._files or self._kept:
            self._close(values)
        else:  # of no training; those of a printed table are not repeated
            own = {title(n).replace("_", " "): n for n in values if "_batch_" not in n}
            width = max(map(len, own), default=0)
            for words, name in own.items():
                self._print(f"{words:<{width}}  {values[name]:.6g} {unit_of(name)}".rstrip())

    def _close(self, values: Mapping[str, float]) -> None:
        """Prints the closing block of a training; `dlrm.fit` names no files."""
        self._print("")
        for name, text in self._kept.items():
            self._labeled(name, text)
        if "average_train_throughput" in values:
            speed = _rate(values["average_train_throughput"])
            if "training_loss" in values:  # a run may end before the first is printed
                speed += f", training loss {values['training_loss']:.4f}"
            self._labeled("speed", speed)
        if total := sum(self._seconds.values()):
            shares = {name: seconds / total for name, seconds in self._seconds.items()}
            self._labeled("time", verdict(shares, self._advice))
        for name, text in self._files.items():
            self._labeled(name, text)
        for index, command in enumerate(self._commands):
            self._labeled("" if index else "next", command, end=" \\")

    def _is_due(self, done: int) -> bool:
        """Returns whether a line of progress is due, where there is no bar."""
        step, when = self._printed
        patience = _PATIENCE if done - step >= _SHARE * self._total else _MOST_PATIENCE
        is_over = time.monotonic() - when >= patience
        return bool(self._bar.disable) and done != self._total and is_over

    def _steps(self, done: int) -> str:
        """Returns the steps done, as wide as at the end of the run."""
        total = f"{self._total:,}"
        return f"step {done:>{len(total)},}/{total}"

    def _figure(self, figures: Mapping[str, str]) -> None:
        """Shows figures in the bar."""
        self._figures |= figures
        if not self._bar.disable:
            self._bar.set_postfix_str(", ".join(self._figures.values()), refresh=False)

    def _labeled(self, label: str, text: str, mark: str = "", **wrapping: Any) -> None:
        """Prints a line with its name in the first column, and a mark at its end."""
        label = label.replace("_", " ")
        body = wrapped(f"{label:<{_LABEL}}{one_line(text)}", _LABEL, **wrapping)
        mark = f"  {painted(mark, 'green')}" if mark else ""
        self._print(painted(label, "bold") + body[len(label) :] + mark)

    def _print(self, text: str) -> None:
        if not self.quiet:
            with tqdm.external_write_mode(sys.stdout):  # the bar returns after the flush
                print(text, flush=True)


def is_watched() -> bool:
    """Returns whether standard error is a terminal, or the program runs in a notebook."""
    return sys.stderr.isatty() or _NOTEBOOK in sys.modules


def progress_bar(total: int, name: str, done: int, shown: bool, **others: Any) -> tqdm:
    """Returns a progress bar of steps on standard error, or in a notebook.

    Args:
        name: text at its start.
        others: see `tqdm`.
    """
    return tqdm(
        total=total,
        initial=done,
        desc=name,
        unit="step",
        dynamic_ncols=True,
        disable=not shown,
        **others,
    )


def bound_by(shares: Mapping[str, float]) -> tuple[str, str]:
    """Returns the kind of bound of the steps, and the part of that kind that takes longest.

    Batches are read and vectors sent while a step computes; only the time spent waiting for them is
    measured. The longest wait bounds the steps if it takes a quarter of them or more.
    """
    wait = max(_WAITS, key=lambda name: shares[name])
    if shares[wait] >= _LEAST_WAIT:
        return _WAITS[wait], wait
    parts = PRODUCTS, LOOKUP, UPDATE, RECORDED
    return "compute-bound", max(parts, key=lambda name: shares[name])


def verdict(shares: Mapping[str, float], advice: Mapping[str, str]) -> str:
    """Returns shares of the time of steps, what bounds them, and advice if its part has some."""
    bound, longest = bound_by(shares)
    shown = sorted((share, name) for name, share in shares.items() if share >= _LEAST_SHARE)
    parts = ", ".join(f"{name} {share:.0%}" for share, name in reversed(shown))
    advised = f"; try {advice[longest]}" if longest in advice else ""
    return f"{parts}: {bound}{advised}"


def _rate(rate: float) -> str:
    return f"{rate:,.0f} samples/s" if rate >= 10 else f"{rate:.2g} samples/s"


def _metrics(metrics: Mapping[str, float]) -> str:
    """Returns the metrics that summaries show, or all if they show none of these."""
    names = [name for name in metrics if name in SHOWN] or list(metrics)
    return "  ".join(f"{title(name)} {metrics[name]:.4f}" for name in names)


def _short(rate: float) -> str:
    """Returns four decimals, as NVIDIA prints them, unless they would hide a small rate."""
    return f"{rate:.4f}" if rate >= 0.01 or rate == 0 else f"{rate:.4g}"


def _relative(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
