"""A run of preprocessing and its stages: the engine, the results and the messages."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any

from dlrm.data.transform.lookup import IdLookup
from dlrm.data.transform.transform import Transform
from dlrm.preproc.engine import Engine
from dlrm.preproc.errors import EngineError
from dlrm.preproc.parent import Parent, open_parent
from dlrm.preproc.work_folder import ProgressLine, WorkFolder, open_work_folder

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
        try:
            yield stage
        finally:
            stage.line.clear()
        seconds = max(time.perf_counter() - start, 1e-9)
        rate = f"{stage.rows:>14,} rows" if stage.rows is not None else " " * 19
        speed = f" {stage.size / seconds / 1e6:>10,.1f} MB/s" if stage.size else ""
        self.say(f"{name + ':':<12}{rate} {seconds:8.1f} s{speed}")

    def write_lookups(self, name: str, transform: Path) -> Path:
        """Writes the lookups of a transform to a folder of the run, once."""
        folder = self.work.folder(name)
        places = range(len(self.options.schema.dictionaries()))
        task = partial(_write_lookup, transform=str(transform), folder=str(folder))
        each = map if self.engine.is_distributed else self.engine.map  # as the driver has them
        self.work.once(name, lambda: [*each(task, places)])
        return folder


@contextmanager
def open_run(
    options: Any,
    output: Path,
    facts: dict[str, Any],
    engine: Callable[[Path], AbstractContextManager[Engine]],
    replace: bool | str = False,
    restart: bool = False,
    say: Callable[[str], None] = print,
    lost: tuple[type[BaseException], ...] = (),
    hinted: type[Exception] | UnionType = EngineError,
) -> Iterator[PreparationRun]:
    """Opens the work folder of an output, starts the engine, and publishes the output at the end.

    Args:
        options: `LogOptions` or `TableOptions`.
        facts: what determines the output besides the options, by flag or file.
        engine: starts the engine, which may use a directory.
        replace, restart: see `open_work_folder`.
        say: called with lines about the stages.
        lost: errors after which the run cannot be resumed.
        hinted: errors whose messages say how to resume it otherwise.
    """
    parent = open_parent(options.increment, options.schema)
    facts = options.facts() | facts | ({} if parent is None else parent.facts())
    with open_work_folder(output, facts, replace, restart) as work:
        if work.resumed:
            say(f"continuing with what {work.shown} has")
        try:
            with engine(work.folder("spill")) as running:
                yield PreparationRun(running, work, options, say, parent)
                work.publish()
        except BaseException as error:
            if isinstance(error, lost):
                work.discard()
            elif isinstance(error, hinted):
                hint = f"what is done is kept in {work.shown}: the same command resumes it"
                raise type(error)(f"{error} ({hint})") from error
            raise


def _write_lookup(place: int, transform: str, folder: str) -> int:
    fitted = Transform.load(transform)
    if fitted.dictionaries[place].kind != "id":
        fitted.check(place)
        IdLookup.write(fitted.dictionaries[place].keys, folder, place)
    return place


@dataclass
class Stage:
    """A running stage, and the message for its end."""

    run: PreparationRun
    name: str
    rows: int | None = None
    size: int = 0

    def __post_init__(self) -> None:
        self.line = ProgressLine(self.name)

    def progress(self, parts: Sequence[Any]) -> Callable[[int], None]:
        """Returns a function to call with the number of each part that is done."""
        return self.line.begin([part.size for part in parts])
