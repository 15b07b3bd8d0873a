"""A run of preparation and its stages: the engine, the results and the messages."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any

from tqdm import tqdm

from dlrm.data.transform.lookup import IdLookup
from dlrm.data.transform.transform import Transform
from dlrm.preproc.engine import Engine
from dlrm.preproc.errors import EngineError
from dlrm.preproc.parent import Parent, open_parent
from dlrm.preproc.work_folder import WorkFolder, open_work_folder

QUARANTINE = "quarantine"  # directory of rows that were left out
_MINUTE = 60.0  # between lines about progress in a file


@dataclass
class PreparationRun:
    """The context of all stages: the engine, the folder of results, and the output."""

    engine: Engine
    work: WorkFolder
    options: Any  # LogOptions or TableOptions
    say: Callable[[str], None] = print
    parent: Parent | None = None  # whose dictionaries the rows extend

    @contextmanager
    def stage(self, name: str) -> Iterator["Stage"]:
        """Shows the progress of a stage and, at its end, the time that it took."""
        stage, start = Stage(name), time.perf_counter()
        try:
            yield stage
        finally:
            if stage.bar is not None:
                stage.bar.close()
        seconds = max(time.perf_counter() - start, 1e-9)
        rate = f"{stage.rows:>14,} rows" if stage.rows is not None else " " * 19
        speed = f" {stage.size / seconds / 1e6:>10,.1f} MB/s" if stage.size else ""
        self.say(f"{name + ':':<12}{rate} {seconds:8.1f} s{speed}")

    def write_lookups(self, name: str, transform: Path) -> Path:
        """Writes the lookups of a transform to a folder of the run, once."""
        folder = self.work.folder(name)
        indices, cores = range(len(self.options.schema.dictionaries())), self.engine.cores
        task = partial(_write_lookups, transform=str(transform), folder=str(folder))
        each = map if self.engine.is_distributed else self.engine.map  # as the driver has them
        self.work.once(name, lambda: [*each(task, [indices[i::cores] for i in range(cores)])])
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


def _write_lookups(indices: Sequence[int], transform: str, folder: str) -> int:
    fitted = Transform.load(transform)
    for index in indices:
        if fitted.dictionaries[index].type != "id":
            fitted.check(index)
            IdLookup.write(fitted.dictionaries[index].keys, folder, index)
    return len(indices)


class _Bar(tqdm):
    monitor_interval = 0  # starts no thread, as processes are forked


@dataclass
class Stage:
    """A running stage, and what the message at its end says of its input."""

    name: str
    rows: int | None = None
    size: int = 0
    bar: tqdm | None = None

    def progress(self, parts: Sequence[Any]) -> Callable[[int], None]:
        """Shows a bar, or a line a minute in a file.

        Returns:
            A function to call with the number of each part that is done.
        """
        sizes = [part.size for part in parts]
        pause = 0.1 if sys.stderr.isatty() else _MINUTE
        how: dict[str, Any] = {"unit": "B", "unit_scale": True, "leave": False}
        how |= {"delay": pause, "mininterval": pause, "miniters": 1}
        bar = self.bar = _Bar(desc=self.name, total=sum(sizes), **how)

        def on_part(number: int) -> None:
            bar.update(sizes[number])

        return on_part
