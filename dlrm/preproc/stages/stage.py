"""A run of preprocessing and its stages: the engine, the results and the messages."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dlrm.preproc.execution.engines import Engine
from dlrm.preproc.execution.work_folder import ProgressLine, WorkFolder
from dlrm.preproc.stages.parent import Parent

QUARANTINE = "quarantine"  # directory of rows that were left out


@dataclass
class PreparationRun:
    """The context of all stages: the engine of tasks, the folder of results, and the output."""

    engine: Engine
    work: WorkFolder
    options: Any  # LogOptions or TableOptions
    say: Callable[[str], None] = print
    parent: Parent | None = None  # whose dictionaries the rows extend

    @contextmanager
    def stage(self, name: str) -> Iterator["Stage"]:
        """Prints, at the end of a stage, the time that it took."""
        stage, start = Stage(self, name), time.perf_counter()
        yield stage
        seconds = max(time.perf_counter() - start, 1e-9)
        rate = f"{stage.rows:>14,} rows" if stage.rows is not None else " " * 19
        speed = f" {stage.size / seconds / 1e6:>10,.1f} MB/s" if stage.size else ""
        self.say(f"{name + ':':<12}{rate} {seconds:8.1f} s{speed}")


@dataclass
class Stage:
    """A running stage, and the message for its end."""

    run: PreparationRun
    name: str
    rows: int | None = None
    size: int = 0

    def tasks(
        self,
        name: str,
        task: Callable[[Any], dict[str, Any]],
        items: Sequence[Any],
        sizes: Sequence[int] | None = None,
        rows: Sequence[int] | None = None,
    ) -> list[dict[str, Any]]:
        """Runs a task on items, of `sizes` in bytes and of `rows`, and shows the progress."""
        progress = ProgressLine(self.name, len(items), sizes, rows)
        try:
            return self.run.work.run(self.run.engine, name, task, items, progress)
        finally:
            progress.clear()
