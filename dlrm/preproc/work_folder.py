"""The directory of an unfinished run: its finished stages, options and input.

    OUTPUT.unfinished/run.json      the options and the input
    OUTPUT.unfinished/run/output/   becomes OUTPUT when it is complete
    OUTPUT.unfinished/run/...       one file per finished stage, and what stages have made

Finished stages are not repeated, so a killed run resumes with the first that is not. A run whose
output is neither here nor at OUTPUT, according to its manifest, starts from the beginning.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dlrm.documents import read_json
from dlrm.files import (
    MANIFEST,
    atomic_file,
    check_replaceable,
    errors_named,
    publish_directory,
    restore_replaced,
    sync_tree,
    tidy_after_killed,
    tidy_leftovers,
)
from dlrm.locks import lock
from dlrm.manifest import read_manifest

FACTS = "run.json"
_LOCK, _REMOVED = "lock", ".removed"
KIND = "dlrm preprocessing"


@dataclass
class WorkFolder:
    """The directory of a run; see `open_work_folder`.

    Attributes:
        path: directory of finished work.
        final: path of the finished output.
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
        """The location of the unfinished run, for messages."""
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
        with atomic_file(self._marker(stage)) as partial:
            partial.write_text(json.dumps(result), encoding="utf-8")

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
        FileExistsError: `final` may not be replaced, or the directory is not ours.
        BlockingIOError: another process is at work in it.
        ValueError: an unfinished run has other facts, which the message names.
    """
    final = final.resolve()
    folder = work_path(final)
    work = WorkFolder(folder / "run", final, resumed=False)
    own = json.loads(json.dumps({"kind": KIND, "facts": facts}))
    tidy_after_killed(final)
    if restart or not (_record(folder) == own and work.is_published()):
        check_replaceable(final, replace)
    if folder.exists():
        _check_ours(folder)
    final.parent.mkdir(parents=True, exist_ok=True)
    with lock(folder / _LOCK, f"{folder}: another process is at work here"):
        for removed in folder.glob(f"*{_REMOVED}"):
            shutil.rmtree(removed)
        restore_replaced(work.path, final)
        work.resumed = (folder / FACTS).exists()
        if work.resumed and (restart or not _is_to_go_on(work, _record(folder) == own)):
            _empty(folder)
            (folder / FACTS).unlink()
            work.resumed = False
        if work.resumed:
            _check_same(folder, _record(folder), own["facts"])
        else:
            with atomic_file(folder / FACTS) as partial:
                partial.write_text(json.dumps(own), encoding="utf-8")
        work.path.mkdir(exist_ok=True)
        tidy_leftovers(work.output)  # which its manifest would list
        shutil.rmtree(work.path / "spill", ignore_errors=True)
        with errors_named(final, work.path):
            yield work


def _record(folder: Path) -> Any:
    """Returns the kind and the facts of an unfinished run; None if there is none."""
    return read_json(folder / FACTS, object) if (folder / FACTS).exists() else None


def work_path(final: Path) -> Path:
    """Returns the directory of a run, given its output."""
    final = final.resolve()
    return final.with_name(f"{final.name}.unfinished")


def _is_to_go_on(work: WorkFolder, is_same: bool) -> bool:
    """Returns whether a run of the same facts, or one that has read its input, left its work.

    A run whose output was moved resumes only to report it, if that output is intact.
    """
    if work.result("described") is not None and not work.has_output():
        return is_same and work.is_published()
    done = [path.stem for path in work.path.glob("*.done")]
    return bool(done) if is_same else any(n.endswith(("spark", "count", "written")) for n in done)


def remove_work_folder(folder: Path) -> None:
    """Removes the directory of a run, and last the file that marks it as ours."""
    _empty(folder)
    (folder / FACTS).unlink()
    (folder / _LOCK).unlink()
    with suppress(OSError):  # another process locks it now
        folder.rmdir()


def _empty(folder: Path) -> None:
    """Removes all but the facts; if interrupted, the rest does not look like a run."""
    for entry in folder.iterdir():
        if entry.is_dir():
            removed = entry.rename(entry.with_name(f"{entry.name}{_REMOVED}"))
            shutil.rmtree(removed)
        elif entry.name not in (FACTS, _LOCK):
            entry.unlink()


def _check_ours(folder: Path) -> None:
    if folder.is_dir():
        entries = {entry.name for entry in folder.iterdir()} - {_LOCK}
        if FACTS in entries or all(name.startswith(f".{FACTS}.") for name in entries):
            return
    raise FileExistsError(
        f"{folder}: exists and has no {FACTS}, so it was not written by this program and is not "
        "touched; rename or remove it"
    )


def _check_same(folder: Path, record: Any, facts: dict[str, Any]) -> None:
    """Raises ValueError if an unfinished run has other facts than this one."""
    try:
        earlier = _flat(record["facts"]) if record["kind"] == KIND else {}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / FACTS}: not the facts of a run ({error!r})") from error
    facts = _flat(facts)
    changed = [
        f"{name} was {_shown(earlier.get(name))} and is {_shown(facts.get(name))}"
        for name in sorted({*earlier, *facts})
        if earlier.get(name) != facts.get(name)
    ]
    if changed:
        raise ValueError(
            f"{folder}: has a run that did not finish, of other settings: {'; '.join(changed)}. "
            "--restart discards it and begins with the new settings; the earlier ones resume it"
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
