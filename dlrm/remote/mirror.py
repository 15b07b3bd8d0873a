"""A directory of checkpoints that is local while a training runs, and shown at a URI.

Training saves, reads and prunes in a local directory. A thread makes the URI reflect it:

    URI/step-<step>/...   a checkpoint, its manifest last, so that it appears whole or not at all
    URI/best.json         after the checkpoint that it names
    URI/<log>             with each checkpoint; other files at the end

Checkpoints that are pruned are deleted last, their manifests first. The URI decides: a local
directory that a killed run has left counts only if it knows all checkpoints at the URI.
"""

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from dlrm.command_line import say_aside
from dlrm.documents import one_line, read_json
from dlrm.files import (
    MANIFEST,
    atomic_directory,
    link_or_copy,
    make_directories,
    write_atomically,
)
from dlrm.locks import in_use
from dlrm.remote.cache import Cache, with_uris
from dlrm.remote.publish import fetched_directory
from dlrm.remote.runs import BEST, best_step, whole_steps
from dlrm.remote.store import Entry, open_store
from dlrm.remote.transfer import remove_all, upload
from dlrm.remote.uri import Uri, is_uri

NOT_UPLOADED = 74  # EX_IOERR: exit code of a training whose last checkpoint is not at its URI
_RECORD = ".uploaded.json"
_PATIENCE = 60.0  # seconds that the end of an interrupted training waits


class NotUploadedError(Exception):
    """Raised when a training has ended, and not all of it is at its URI."""


class _Record:
    """The checkpoints that are at the URI, for the next process that uses the local directory.

    Attributes:
        steps: digest of the manifest by name.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.steps = path, {}  # type: Path, dict[str, str]
        with suppress(FileNotFoundError):
            self.steps = dict(read_json(path / _RECORD))

    def knows(self, there: Mapping[str, str]) -> bool:
        """Returns whether only this directory has changed the checkpoints at the URI."""
        if not there:
            return not self.steps
        return all(
            digest in (self.steps.get(name), _digest_of(self._path / name))
            for name, digest in there.items()
        )

    def write(self, steps: Mapping[str, str]) -> None:
        self.steps = dict(steps)
        write_atomically(self._path / _RECORD, json.dumps(self.steps, indent=2) + "\n")


class Mirror:
    """A local directory, and the thread that makes a URI reflect it; see `mirrored`.

    The store repeats failed requests. What fails nevertheless is tried again with the next
    checkpoint, and at the end.

    Attributes:
        path: the local directory.
        uri: the URI.
    """

    def __init__(self, path: Path, uri: Uri, keep: int, record: _Record, folder: Path) -> None:
        self.path, self.uri = path, uri
        self._logs: dict[Path, Uri] = {}
        self._keep, self._record, self._folder = keep, record, folder
        self._store = open_store(uri)
        self._best: bytes | None = b""  # at the URI; unknown at first
        self._wanted: tuple[list[Path], bytes | None] = ([], None)
        self._failed = ""
        self._closing = self._complete = self._given_up = False
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="dlrm-mirror")
        self._thread.start()

    def add_log(self, path: str | os.PathLike) -> None:
        """Uploads a file with each checkpoint from now on, if it is in the cache."""
        if is_uri(shown := with_uris(os.path.abspath(path))):
            self._logs[Path(path)] = Uri.parse(shown)

    def saved(self, steps: Sequence[Path]) -> None:
        """Takes the checkpoints that the directory has now; returns at once.

        Args:
            steps: their directories, which `remove_unused` will remove.
        """
        best = self.path / BEST
        wanted = sorted(steps), best.read_bytes() if best.exists() else None
        if wanted != self._wanted:
            self._wanted = wanted
            self._changed.set()

    def close(self, seconds: float | None = None) -> str:
        """Uploads what is left, all other files of the directory too, and ends the thread.

        Args:
            seconds: the longest time to wait; by default until the store gives up.

        Returns:
            What is not at the URI, why, and where it is; nothing if all is.
        """
        if steps := self._wanted[0]:  # an interrupt may have come between a change and `saved`
            here = sorted(manifest.parent for manifest in self.path.glob(f"step-*/{MANIFEST}"))
            self.saved([step for step in here if step in steps or step > steps[-1]])
        self._closing = True
        self._changed.set()
        try:
            self._thread.join(seconds)
        finally:
            self._given_up = True
        if self._complete:
            return ""
        if self._thread.is_alive():
            self._failed = self._failed or f"not done within {seconds:.0f} s"
        return (
            f"{self.uri}: {self._waiting()} not uploaded{self._because()}; kept in {self._folder}, "
            "from where the same command with --resume uploads"
        )

    def _waiting(self) -> str:
        """Returns what is not at the URI."""
        number = sum(step.name not in self._record.steps for step in self._wanted[0])
        if number:
            return "1 checkpoint is" if number == 1 else f"{number} checkpoints are"
        return "some files are"

    def _because(self) -> str:
        return f" ({self._failed})" if self._failed else ""

    def _run(self) -> None:
        while not self._complete:
            self._changed.wait()
            self._changed.clear()
            closing, (steps, best) = self._closing, self._wanted
            try:
                if steps:
                    self._reflect(steps, best)
                if steps and closing:
                    self._upload_others()
                if self._failed:
                    say_aside(f"note: {self.uri}: uploaded now")
                self._failed, self._complete = "", closing
            except (OSError, ValueError) as error:
                self._failed = one_line(error)
                if closing:
                    return
                say_aside(
                    f"warning: {self.uri}: {self._waiting()} not uploaded yet{self._because()}; "
                    "the training continues"
                )

    def _check_awaited(self, size: int) -> None:
        """Ends an upload that nobody waits for."""
        if self._given_up:
            raise OSError(f"{self.uri}: given up")

    def _reflect(self, steps: list[Path], best: bytes | None) -> None:
        """Makes the URI have these checkpoints, and this record of the best."""
        with ExitStack() as held:
            for step in steps:
                if not held.enter_context(in_use(step)):
                    if self._closing:
                        raise FileNotFoundError(f"{step}: was removed")
                    return  # pruned, so there are newer ones
            named = f"step-{int(json.loads(best)['step']):09d}" if best else ""
            for step in steps[:-1]:
                self._upload(step)
            if any(step.name == named for step in steps[:-1]):
                self._upload_best(best)  # before the newest, which may name it as well
            self._upload(steps[-1])
            self._upload_best(best)
            for path, uri in self._logs.items():
                _upload_log(path, uri)
            self._prune({named, *(step.name for step in steps)})

    def _upload(self, step: Path) -> None:
        """Uploads a checkpoint unless it is there."""
        content, base = (step / MANIFEST).read_bytes(), self.uri.below(step.name).folder
        digest = _digest(content)
        if self._record.steps.get(step.name) == digest:
            return
        if step.name in self._record.steps:  # another one, which must not be taken for it
            self._store.remove(f"{base}{MANIFEST}")
        files = {
            f"{base}{path.relative_to(step).as_posix()}": path
            for path in sorted(step.rglob("*"))
            if path.is_file() and path != step / MANIFEST
        }
        upload(self._store, files, self._check_awaited)
        self._store.write(f"{base}{MANIFEST}", content)
        self._record.write({**self._record.steps, step.name: digest})

    def _upload_best(self, best: bytes | None) -> None:
        if best != self._best:
            key = self.uri.below(BEST).key
            if best is None:
                self._store.remove(key)
            else:
                self._store.write(key, best)
            self._best = best

    def _prune(self, kept: set[str]) -> None:
        """Deletes older checkpoints at the URI, and what a killed run has left of some."""
        listed = self._store.entries(self.uri.folder)
        there = [*whole_steps(self.uri, listed)]
        kept |= {*there[-self._keep :]}
        keys: dict[str, list[str]] = {}
        for entry in listed:
            name, slash, _ = entry.key.removeprefix(self.uri.folder).partition("/")
            if slash and name.startswith("step-") and name not in kept and name < max(kept):
                keys.setdefault(name, []).append(entry.key)
        for name, own in keys.items():
            self._store.remove(self.uri.below(f"{name}/{MANIFEST}").key)
            remove_all(self._store, own)
        if keys:
            left = {k: v for k, v in self._record.steps.items() if k not in keys}
            self._record.write(left)

    def _upload_others(self) -> None:
        """Uploads all files that are in no checkpoint of the run."""
        paths = (path for path in sorted(self.path.rglob("*")) if path.is_file())
        names = {path.relative_to(self.path).as_posix(): path for path in paths}
        files = {
            self.uri.below(name).key: path
            for name, path in names.items()
            if not name.startswith("step-") and name != BEST and not _is_hidden(name)
        }
        whole = {key: path for key, path in files.items() if path.name == MANIFEST}
        upload(self._store, {k: v for k, v in files.items() if k not in whole}, self._check_awaited)
        upload(self._store, whole, self._check_awaited)


def _upload_log(path: Path, uri: Uri) -> None:
    """Uploads the whole lines of a file that is being written."""
    if path.exists():
        content = path.read_bytes()
        open_store(uri).write(uri.key, content[: content.rfind(b"\n") + 1])


@contextmanager
def mirrored(
    cache: Cache,
    uri: Uri,
    keep: int = 1,
    resume: bool = False,
    saved: tuple[type[BaseException], ...] = (),
) -> Iterator[Mirror]:
    """Yields a local directory of checkpoints whose content is at a URI when the block ends.

    Pass `Mirror.saved` to `CheckpointDirectory`. If the block ends without an error, the local
    directory is removed.

    Args:
        keep: number of last checkpoints to keep there besides the best.
        resume: fetch the newest and the best checkpoint of the URI first.
        saved: errors after which a training has saved its state, such as a request to stop.

    Raises:
        BlockingIOError: another run of this machine writes there.
        FileExistsError: the URI has checkpoints, and `resume` is False.
        NotUploadedError: the block has ended, or with an error of `saved`, and something is not at
            the URI; the message has the reason, and its place on this machine.
        OSError, ValueError: the store cannot be read, or an object is damaged.
    """
    uri.check_writable()
    with cache.output(uri) as path:
        record = _fetch_run(cache, uri, path, resume)
        mirror = Mirror(path, uri, keep, record, cache.output_folder(uri))
        try:
            yield mirror
        except saved as error:
            if left := mirror.close(_PATIENCE):
                raise NotUploadedError(left) from error
            raise
        except BaseException:
            if left := mirror.close(_PATIENCE):
                say_aside(f"warning: {left}")
            raise
        if left := mirror.close():
            raise NotUploadedError(left)


def _fetch_run(cache: Cache, uri: Uri, path: Path, resume: bool) -> _Record:
    """Makes a local directory have what a run at a URI resumes from; returns what is there."""
    store, record = open_store(uri), _Record(path)
    listed = store.entries(uri.folder)
    steps = whole_steps(uri, listed)
    there = {name: _digest(bytes(store.read(entry))) for name, entry in steps.items()}
    if there and not resume:
        raise FileExistsError(
            f"{uri.below([*steps][-1])}: from an earlier run; --resume continues from it, or name "
            "another place with --save_checkpoint_path"
        )
    local = sorted(manifest.parent.name for manifest in path.glob(f"step-*/{MANIFEST}"))
    if not record.knows(there):
        if local:
            say_aside(
                f"note: {uri}: another run has changed it, so {local[-1]} that an earlier run has "
                "left on this machine is not used"
            )
        shutil.rmtree(path, ignore_errors=True)
        local = []
    if local and not resume:
        raise FileExistsError(
            f"{cache.output_folder(uri)}: has {local[-1]} of an earlier run that could not upload "
            f"it to {uri}; --resume continues from it, or name another place with "
            "--save_checkpoint_path"
        )
    make_directories(path)
    if there and not local:
        _fetch_newest(cache, uri, path, listed, {best_step(store, uri, steps), [*steps][-1]})
    record.write(there)
    return record


def _fetch_newest(
    cache: Cache, uri: Uri, path: Path, listed: Sequence[Entry], names: set[str]
) -> None:
    """Fetches checkpoints of a run, and the files beside them, such as the log."""
    for name in names:
        copy = fetched_directory(cache, uri.below(name))
        with copy as source, atomic_directory(path / name) as target:
            shutil.copytree(source, target, copy_function=link_or_copy, dirs_exist_ok=True)
    store = open_store(uri)
    for entry in listed:
        name = entry.key.removeprefix(uri.folder)
        if "/" not in name and not _is_hidden(name):
            (path / name).write_bytes(store.read(entry))


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _digest_of(step: Path) -> str:
    try:
        return _digest((step / MANIFEST).read_bytes())
    except FileNotFoundError:
        return ""
