"""The directory of an unfinished run: its finished stages, options and input.

    OUTPUT.unfinished/run.json           the options and the input
    OUTPUT.unfinished/<digest>/output/   becomes OUTPUT when it is complete
    OUTPUT.unfinished/<digest>/...       one file per finished stage, and what stages have made

Finished stages are not repeated, so a killed run resumes with the first that is not. The digest is
that of options and input, so runs never mix. A run whose output is neither here nor at OUTPUT,
according to its manifest, starts from the beginning.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dlrm.documents import read_json
from dlrm.files import (
    MANIFEST,
    check_replaceable,
    errors_named,
    publish_directory,
    restore_replaced,
    staged_file,
    sync_tree,
    tidy_after_killed,
    tidy_leftovers,
)
from dlrm.manifest import read_manifest

FACTS = "run.json"
_REMOVED = ".removed"
KIND = "dlrm preprocessing"


@dataclass
class WorkFolder:
    """The directory of a run; see `open_work_folder`.

    Attributes:
        path: directory of finished work.
        final: place of the finished output.
        resumed: whether the run continues an earlier one.
    """

    path: Path
    final: Path
    resumed: bool

    @property
    def output(self) -> Path:
        """Directory that becomes `final`."""
        return self.path / "output"

    @property
    def shown(self) -> str:
        """The place of the unfinished run, for messages."""
        return str(self.path.parent)

    def folder(self, name: str) -> Path:
        """Returns a subdirectory, created if need be."""
        folder = self.path / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def result(self, stage: str) -> Any:
        """Returns the result passed to `finish` for a stage, or None if it is not finished."""
        path = self._marker(stage)
        return read_json(path, object) if path.exists() else None

    def finish(self, stage: str, result: Any) -> None:
        """Marks a stage as finished; call it last."""
        _write(self._marker(stage), result)

    def once(self, stage: str, make: Callable[[], Any]) -> Any:
        """Returns the result of a stage, which is made unless an earlier run finished it."""
        if (result := self.result(stage)) is None:
            result = make()
            sync_tree(self.path)
            self.finish(stage, result)
        return result

    def finish_output(self, result: Any) -> None:
        """Marks the output as complete, as `result("described")`, once it is on disk."""
        sync_tree(self.output)
        self.finish("manifest", _digest(self.output / MANIFEST))
        self.finish("described", result)

    def is_published(self) -> bool:
        """Returns whether `final` is the output of this run, with all its files."""
        manifest = self.final / MANIFEST
        if self.result("described") is None or not self._is_of_this_run(manifest):
            return False
        try:
            read_manifest(self.final, read_json(manifest)["kind"], check_crc=True)
        except (FileNotFoundError, ValueError):  # a file is missing, or damaged
            return False
        return True

    def has_output(self) -> bool:
        """Returns whether the complete output is still in `output`.

        Once published, that may have what the output replaced.
        """
        return self._is_of_this_run(self.output / MANIFEST)

    def _is_of_this_run(self, manifest: Path) -> bool:
        return manifest.is_file() and self.result("manifest") == _digest(manifest)

    def _marker(self, stage: str) -> Path:
        return self.path / f"{stage}.done"

    def publish(self) -> None:
        """Moves the output to `final` and removes the directory."""
        if not self.is_published():  # by a run that was killed before the next
            publish_directory(self.output, self.final)
        self.discard()

    def discard(self) -> None:
        """Removes the directory."""
        if self.path.parent.exists():
            remove_work_folder(self.path.parent)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _write(path: Path, result: Any) -> None:
    with staged_file(path) as partial:
        partial.write_text(json.dumps(result), encoding="utf-8")


@contextmanager
def open_work_folder(
    final: Path, facts: dict[str, Any], replace: bool | str, restart: bool
) -> Iterator[WorkFolder]:
    """Opens the directory of a new or resumed run, which it locks against other processes.

    Args:
        final: output of the run; the directory is beside it.
        facts: options, by flag, and input, by file, that determine the output; JSON.
        replace: whether an earlier output of ours may be replaced, other than this run's.
        restart: whether to discard an unfinished run.

    Raises:
        FileExistsError: `final` may not be replaced, or the directory is not ours or is in use.
        ValueError: an unfinished run has other facts, which the message names.
    """
    final = final.resolve()
    folder = work_path(final)
    facts = json.loads(json.dumps(facts))
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    work = WorkFolder(folder / digest, final, resumed=False)
    tidy_after_killed(final)
    if restart or not work.is_published():
        try:
            check_replaceable(final, replace)
        except FileExistsError as error:
            raise FileExistsError(f"{error}{_what_is_there(final)}") from None
    if folder.exists() and restart:
        _check_ours(folder)
    final.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        for removed in folder.glob(f"*{_REMOVED}"):
            shutil.rmtree(removed)
        for run in folder.iterdir():
            restore_replaced(run, final)
        if restart or (folder / FACTS).exists() and not _is_to_go_on(folder, work):
            _empty(folder)
            (folder / FACTS).unlink(missing_ok=True)
        work.resumed = (folder / FACTS).exists()
        if work.resumed:
            record = read_json(folder / FACTS, object)
            check_same(folder / FACTS, record, facts)
        else:
            _check_ours(folder)
            _write(folder / FACTS, {"kind": KIND, "facts": facts})
        work.path.mkdir(exist_ok=True)
        tidy_leftovers(work.output)  # which its manifest would list
        shutil.rmtree(work.path / "spill", ignore_errors=True)
        with errors_named(final, work.output):
            yield work


def _what_is_there(final: Path) -> str:
    """Describes a finished output, as of a run that was killed after publishing it, or nothing."""
    try:
        kind = read_json(final / MANIFEST)["kind"]
        manifest = read_manifest(final, kind)
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # the error about the directory itself is raised all the same
    when = datetime.fromtimestamp((final / MANIFEST).stat().st_mtime, timezone.utc)
    made = manifest.get("transform")
    options = made.items() if isinstance(made, dict) else ()
    shown = ", ".join(f"{name} {value}" for name, value in options if not isinstance(value, dict))
    return (
        f". It holds a finished {kind} with all its files, of {when:%Y-%m-%d %H:%M:%S} UTC"
        f"{shown and f', made with {shown}'}; if this command made it, nothing is left to do"
    )


def work_path(final: Path) -> Path:
    """Returns the directory of a run, given its output."""
    final = final.resolve()
    return final.with_name(f"{final.name}.unfinished")


def _is_to_go_on(folder: Path, work: WorkFolder) -> bool:
    """Returns whether this run, or one that has read its input, left its work in the directory.

    A run whose output was moved resumes only to report it, if that output is intact.
    """
    described = [path.parent for path in folder.glob("*/described.done")]
    if any(not WorkFolder(run, work.final, True).has_output() for run in described):
        return work.is_published()
    return any(work.path.glob("*.done")) or has_results(p.name for p in folder.glob("*/*.done"))


def has_results(names: Iterable[str]) -> bool:
    """Returns whether a run, by the names of its finished stages, has read its input."""
    return any(name.endswith(("spark.done", "count.done", "written.done")) for name in names)


def remove_work_folder(folder: Path) -> None:
    """Removes the directory of a run, and last the file that marks it as ours."""
    _empty(folder)
    (folder / FACTS).unlink()
    folder.rmdir()


def _empty(folder: Path) -> None:
    """Removes all but the facts; if interrupted, the rest does not look like a run."""
    for entry in folder.iterdir():
        if entry.is_dir():
            removed = entry.rename(entry.with_name(f"{entry.name}{_REMOVED}"))
            shutil.rmtree(removed)
        elif entry.name != FACTS:
            entry.unlink()


def _check_ours(folder: Path) -> None:
    if folder.is_dir():
        entries = [entry.name for entry in folder.iterdir()]
        if FACTS in entries or all(name.startswith(f".{FACTS}.") for name in entries):
            return
    raise FileExistsError(
        f"{folder}: exists and has no {FACTS}, so it was not written by this program and is not "
        "touched; rename or remove it"
    )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    _LOCKS.add(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FileExistsError(f"{folder}: another process is at work here") from error
        yield
    finally:
        _LOCKS.discard(descriptor)
        os.close(descriptor)


_LOCKS: set[int] = set()  # which copies of the process must not hold longer than it does


def _close_locks() -> None:
    for descriptor in _LOCKS:
        os.close(descriptor)
    _LOCKS.clear()


os.register_at_fork(after_in_child=_close_locks)


def check_same(place: object, record: Any, facts: dict[str, Any]) -> None:
    """Raises ValueError if an unfinished run, recorded at a place, has other facts than this."""
    try:
        earlier = dict(record["facts"]) if record["kind"] == KIND else {}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{place}: not the facts of a run ({error!r})") from error
    earlier, facts = _flat(earlier), _flat(facts)
    changed = [
        f"{name} was {_shown(earlier.get(name))} and is {_shown(facts.get(name))}"
        for name in sorted({*earlier, *facts})
        if earlier.get(name) != facts.get(name)
    ]
    if changed:
        raise ValueError(
            f"{os.path.dirname(str(place))}: has a run that did not finish, of other settings: "
            f"{'; '.join(changed)}. --restart discards it and begins with the new settings; the "
            "earlier ones resume it"
        )


def _flat(facts: dict[str, Any]) -> dict[str, Any]:
    """Returns facts with the entries of maps flattened under names of their own."""
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        parts = value if isinstance(value, dict) else {}
        flat |= {f"{name} {key}": part for key, part in parts.items()} or {name: value}
    return flat


def _shown(value: Any) -> str:
    """Returns a fact for a message, with the time of an input's last change as a date."""
    return "not there" if value is None else re.sub(r"(?<=, changed at )\d+$", _date, str(value))


def _date(nanoseconds: re.Match[str]) -> str:
    seconds, rest = divmod(int(nanoseconds[0]), 10**9)
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M:%S}.{rest:09} UTC"


class ProgressLine:
    """A line on the terminal, or one a minute in a file: share, speed and time left of a stage."""

    def __init__(self, stage: str) -> None:
        self._stage, self._live = stage, sys.stderr.isatty()

    def begin(self, sizes: Sequence[int]) -> Callable[[int], None]:
        """Returns a function to call with the number of each item that is done, of given bytes."""
        start = said = time.perf_counter()
        size, total = 0, max(sum(sizes), 1)

        def show(number: int) -> None:
            nonlocal size, said
            size += sizes[number]
            now = time.perf_counter()
            speed = max(size, 1) / (now - start)
            text = f"{self._stage}: {100 * size // total:3d} %  {speed / 1e6:,.1f} MB/s"
            text += f"  {_duration((total - size) / speed)} left"
            if self._live:
                print(f"\r{text:<78}", end="", file=sys.stderr, flush=True)
            elif now - said > 60:
                said = now
                print(text, file=sys.stderr, flush=True)

        return show

    def clear(self) -> None:
        """Removes the line."""
        if self._live:
            print(f"\r{'':<78}\r", end="", file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
