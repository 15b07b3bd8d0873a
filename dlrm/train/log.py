"""The reports of a run: a console, a file in DLLogger's format, and trackers."""

import os
import time
from collections.abc import Generator
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, TextIO

from dlrm.documents import json_text
from dlrm.files import errors_named
from dlrm.metrics.table import unit_of
from dlrm.remote.uri import shown
from dlrm.train.reports.console import Console, is_watched, progress_bar
from dlrm.train.reports.trackers import Tracker


class StoppedError(Exception):
    """Raised when a training was asked to stop, after it saved its state."""


class RunLog:
    """Writes the log file, and reports on a console and to trackers.

    Every line of the file is `DLLL ` and a JSON object with `timestamp`, `datetime`, `elapsedtime`,
    `type` (LOG or METADATA), `step` and `data`, as NVIDIA's DLLogger writes.

    Args:
        path: the file, or None for none; lines of an earlier run are kept.
        quiet: write and print nothing; for all ranks except the first.
        log_format, verbose, progress: see `dlrm.train.reports.console.Console`.

    Attributes:
        console: prints the reports for people.
        trackers: receive the flags, the values of steps and the files of the run as well.
    """

    def __init__(
        self,
        path: str | os.PathLike | None = None,
        quiet: bool = False,
        log_format: str = "nvidia",
        verbose: bool = False,
        progress: bool | None = None,
    ):
        self._file: TextIO | None = None
        self._start = time.time()
        self.quiet = quiet
        self.console = Console(log_format, verbose, quiet, progress)
        self.trackers: list[Tracker] = []
        if path is not None and not quiet:
            Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, _: object, error: BaseException | None, *where: object) -> None:
        self.console.end()
        failed = isinstance(error, Exception) and not isinstance(error, StoppedError)
        outcome = "finished" if error is None else "failed" if failed else "killed"
        for tracker in self.trackers:
            tracker.close(outcome)
        if self._file:
            with errors_named(self._file.name):
                self._file.close()

    def line(self, text: str, short: str | None = None) -> None:
        """Prints a line; see `Console.line`."""
        self.console.line(text, short)

    def parameters(self, values: dict[str, Any]) -> None:
        """Records the flags of the run, with URIs in place of paths in the cache."""
        values = {k: shown(v) if isinstance(v, str) else v for k, v in values.items()}
        self._write(type="LOG", step="PARAMETER", data=values)
        for tracker in self.trackers:
            tracker.send("flags", values)

    def step(self, epoch: int, step: int, values: dict[str, float], done: int) -> None:
        """Records values of a step of an epoch, after `done` steps of the run."""
        self._write(type="LOG", step=[epoch, step], data=values)
        for tracker in self.trackers:
            tracker.send("scalars", done, values)

    def file(self, path: Path) -> None:
        """Passes a file of the run to the trackers."""
        for tracker in self.trackers:
            tracker.send("file", path)

    def summary(self, values: dict[str, float]) -> None:
        """Records and prints the results of the run, each with its unit."""
        for name in values:
            if unit := unit_of(name):
                self._write(type="METADATA", metric=name, metadata={"unit": unit})
        self._write(type="LOG", step=[], data=values)
        self.console.summary(values)

    def _write(self, **entry: Any) -> None:
        if self._file is None:
            return
        now = time.time()
        head = {
            "timestamp": str(now),
            "datetime": str(datetime.fromtimestamp(now)),
            "elapsedtime": str(now - self._start),
        }
        with errors_named(self._file.name):
            self._file.write(f"DLLL {json_text(head | entry)}\n")
            self._file.flush()


class Loader(Protocol):
    """Batches of a data set; `batches` can start anywhere in an epoch."""

    num_samples: int

    def __len__(self) -> int: ...

    def batches(self, epoch: int = 0, start: int = 0) -> Generator[Any, None, None]: ...


class Watched:
    """A loader whose batches advance a progress bar, where someone watches and it is not quiet."""

    def __init__(self, loader: Loader, title: str, quiet: bool = False):
        self._loader, self._title, self._quiet = loader, title, quiet
        self.num_samples = loader.num_samples

    def __len__(self) -> int:
        return len(self._loader)

    def batches(self, epoch: int = 0, start: int = 0) -> Generator[Any, None, None]:
        """Yields the loader's batches."""
        shown = is_watched() and not self._quiet
        with (
            closing(self._loader.batches(epoch, start)) as batches,
            progress_bar(len(self) - start, self._title, 0, shown, leave=False, delay=1) as bar,
        ):
            for batch in batches:
                yield batch
                bar.update()
