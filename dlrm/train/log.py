"""What a run reports: console lines, a JSON-lines file as DLLogger's, a progress bar, curves."""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, TextIO

from tqdm import tqdm

UNITS = {"throughput": "samples/s", "latency": "s"}


class RunLog:
    """Writes the log file, prints lines, and shows a progress bar where a person watches.

    Every line of the file is `DLLL ` and a JSON object with `timestamp`, `datetime`, `elapsedtime`,
    `type` (LOG or METADATA), `step` and `data`, as NVIDIA's DLLogger writes.

    Args:
        path: the file, or None for none; an earlier run's lines in it are kept.
        quiet: write and print nothing; for all ranks but the first.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike | None = None, quiet: bool = False):
        self._file: TextIO | None = None
        self._start = time.time()
        self._bar: tqdm | None = None
        self._conclusion: list[str] = []
        self.quiet = quiet
        if path is not None and not quiet:
            Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *error: object) -> None:
        self.end_progress()
        if self._file:
            self._file.close()

    def parameters(self, values: dict[str, Any]) -> None:
        """Records the flags of the run."""
        self._write(type="LOG", step="PARAMETER", data=values)

    def step(self, epoch: int, step: int, values: dict[str, float]) -> None:
        """Records values of a step of an epoch."""
        self._write(type="LOG", step=[epoch, step], data=values)

    def summary(self, values: dict[str, float]) -> None:
        """Records and prints the results of the run, each with its unit."""
        for name in values:
            unit = _unit(name)
            if unit:
                self._write(type="METADATA", metric=name, metadata={"unit": unit})
        self._write(type="LOG", step=[], data=values)
        now = datetime.now()
        for name, value in values.items():
            self.line(f"DLL {now} - () {name} : {value} {_unit(name)}".rstrip())
        for text in self._conclusion:
            self.line(text)

    def conclude(self, text: str) -> None:
        """Prints a line after those of the summary, which are for programs."""
        self._conclusion.append(text)

    def line(self, text: str) -> None:
        """Prints a line above the progress bar."""
        if not self.quiet:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def start_progress(self, total: int, initial: int) -> None:
        """Shows a progress bar of training steps, if standard error is a terminal."""
        self._bar = _bar(total, "train", initial, self.quiet)

    def progress(self) -> None:
        """Moves the bar on by a step."""
        if self._bar is not None:
            self._bar.update()

    def end_progress(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _write(self, **entry: Any) -> None:
        if self._file is None:
            return
        now = time.time()
        head = {
            "timestamp": str(now),
            "datetime": str(datetime.fromtimestamp(now)),
            "elapsedtime": str(now - self._start),
        }
        if isinstance(data := entry.get("data"), dict):  # JSON has no NaN
            entry["data"] = {k: None if v != v else v for k, v in data.items()}
        self._file.write("DLLL " + json.dumps(head | entry) + "\n")
        self._file.flush()


def _unit(name: str) -> str:
    return next((unit for word, unit in UNITS.items() if word in name), "")


class Loader(Protocol):
    """Batches of a data set; `batches` can start anywhere in an epoch."""

    num_samples: int

    def __len__(self) -> int: ...

    def batches(self, epoch: int = 0, start: int = 0) -> Generator[Any, None, None]: ...


class Watched:
    """A loader whose batches move a progress bar of their own, if standard error is a terminal.

    Args:
        loader: what to read.
        title: of the bar.
        quiet: show none.
        on_batch: called before each batch.
    """

    def __init__(
        self,
        loader: Loader,
        title: str,
        quiet: bool = False,
        on_batch: Callable[[], object] = lambda: None,
    ):
        self._loader, self._title, self._quiet = loader, title, quiet
        self._on_batch = on_batch
        self.num_samples = loader.num_samples

    def __len__(self) -> int:
        return len(self._loader)

    def batches(self, epoch: int = 0, start: int = 0) -> Generator[Any, None, None]:
        """Yields the loader's batches."""
        with (
            closing(self._loader.batches(epoch, start)) as batches,
            _bar(len(self) - start, self._title, quiet=self._quiet) as bar,
        ):
            for batch in batches:
                self._on_batch()
                yield batch
                bar.update()


def _bar(total: int, title: str, initial: int = 0, quiet: bool = False) -> tqdm:
    return tqdm(
        total=total,
        initial=initial,
        desc=title,
        unit="step",
        leave=False,
        dynamic_ncols=True,
        disable=quiet or not sys.stderr.isatty(),
    )


def draw_curves(
    history: Sequence[dict[str, float]], metric: str, loss_metric: str, path: str | os.PathLike
) -> str | None:
    """Draws losses, learning rate and the test metric over the steps of a run.

    Args:
        history: entries with `step` and `loss` and `lr`, or with `step` and a test's metrics.
        metric: name of the test metric, as "auc".
        loss_metric: name of the test loss, as "log_loss".
        path: the picture to write, as "curves.png".

    Returns:
        None, or why nothing was drawn: no matplotlib, nothing to draw, no place to write.
    """
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it reports on its font cache
    try:
        import matplotlib
    except ImportError:
        return "no curves: matplotlib is missing (pip install matplotlib)"
    if not history:
        return "no curves: the run printed no step (see --print_freq)"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    trained = [entry for entry in history if "lr" in entry]
    tested = [entry for entry in history if "lr" not in entry]
    panels = [
        ("loss", [("training", trained, "loss"), ("test", tested, loss_metric)]),
        ("learning rate", [("", trained, "lr")]),
        (f"test {metric.upper()}", [("", tested, metric)]),
    ]
    figure, axes = pyplot.subplots(3, 1, figsize=(8, 8), sharex=True, layout="constrained")
    for axis, (label, lines) in zip(axes, panels, strict=True):
        _draw_panel(axis, lines)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("step")
    figure.align_ylabels()
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        return f"no curves: {error}"
    finally:
        pyplot.close(figure)
    return None


def _draw_panel(axis: Any, lines: Sequence[tuple[str, Sequence[dict[str, float]], str]]) -> None:
    """Draws lines, each of a label, entries of the history, and the value to take of them."""
    drawn = [line for line in lines if any(line[2] in entry for entry in line[1])]
    for label, entries, name in drawn:
        points = [(entry["step"], entry[name]) for entry in entries if name in entry]
        marker = "o" if len(points) < 40 else ""
        axis.plot(*zip(*points, strict=True), marker=marker, label=label)
    if not drawn:
        axis.text(0.5, 0.5, "none yet", ha="center", va="center", transform=axis.transAxes)
    if len(drawn) > 1:
        axis.legend()
