"""The reports of a run: console lines, a file in DLLogger's format, a progress bar."""

import json
import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, TextIO

from tqdm import tqdm

from dlrm.documents import one_line
from dlrm.files import errors_named
from dlrm.metrics.table import metric_of
from dlrm.train.reports.trackers import Outcome, Tracker


class StoppedError(Exception):
    """Raised when a training was asked to stop, after it saved its state."""


class RunLog:
    """Writes the log file, prints lines, and shows a progress bar on a terminal.

    Every line of the file is `DLLL ` and a JSON object with `timestamp`, `datetime`, `elapsedtime`,
    `type` (LOG or METADATA), `step` and `data`, as NVIDIA's DLLogger writes.

    Args:
        path: the file, or None for none; lines of an earlier run are kept.
        quiet: write and print nothing; for all ranks except the first.

    Attributes:
        trackers: receive the flags, the values of steps and the files of the run as well.
        last_lines: lines for people at the end of the summary.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike | None = None, quiet: bool = False):
        self._file: TextIO | None = None
        self._start = time.time()
        self._bar: tqdm | None = None
        self.quiet = quiet
        self.trackers: list[Tracker] = []
        if path is not None and not quiet:
            Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, _: object, error: BaseException | None, *where: object) -> None:
        self.end_progress()
        for tracker in self.trackers:
            tracker.close(_outcome(error))
        if self._file:
            with errors_named(self._file.name):
                self._file.close()

    def parameters(self, values: dict[str, Any]) -> None:
        """Records the flags of the run."""
        self._write(type="LOG", step="PARAMETER", data=values)
        for tracker in self.trackers:
            tracker.flags(values)

    def step(self, epoch: int, step: int, values: dict[str, float], done: int) -> None:
        """Records values of a step of an epoch, after `done` steps of the run."""
        self._write(type="LOG", step=[epoch, step], data=values)
        for tracker in self.trackers:
            tracker.scalars(done, values)

    def file(self, path: Path) -> None:
        """Passes a file of the run to the trackers."""
        for tracker in self.trackers:
            tracker.file(path)

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

    def line(self, text: str) -> None:
        """Prints a line, with any indented lines that continue it, above the progress bar."""
        if not self.quiet:
            tqdm.write(one_line(text), file=sys.stdout)
            sys.stdout.flush()

    def start_progress(self, total: int, initial: int) -> None:
        """Shows a progress bar of training steps, if standard error is a terminal."""
        self._bar = _bar(total, "train", initial, self.quiet)

    def progress(self) -> None:
        """Advances the bar by a step."""
        if self._bar is not None:
            self._bar.update()

    def end_progress(self) -> None:
        """Removes the bar."""
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
        with errors_named(self._file.name):
            self._file.write("DLLL " + json.dumps(head | entry) + "\n")
            self._file.flush()


def _outcome(error: BaseException | None) -> Outcome:
    if error is None:
        return "finished"
    stopped = isinstance(error, StoppedError) or not isinstance(error, Exception)
    return "killed" if stopped else "failed"


def _unit(name: str) -> str:
    metric = metric_of(name)
    return metric.unit if metric else ""


class Loader(Protocol):
    """Batches of a data set; `batches` can start anywhere in an epoch."""

    num_samples: int

    def __len__(self) -> int: ...

    def batches(self, epoch: int = 0, start: int = 0) -> Generator[Any, None, None]: ...


class Watched:
    """A loader whose batches advance a progress bar, if standard error is a terminal.

    Args:
        loader: the loader to read.
        title: title of the bar.
        quiet: show no bar.
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
