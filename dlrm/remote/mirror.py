"""Checkpoints of a training that are published at a URI as they are saved.

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
from dlrm.files import MANIFEST, atomic_directory, link_or_copy, make_directories, write_atomically
from dlrm.locks import in_use
from dlrm.remote.cache import Cache
from dlrm.remote.localize import BEST, checkpoint_among, localize, whole_steps
from dlrm.remote.objects import open_store, remove_all, upload
from dlrm.remote.publish import publish
from dlrm.remote.uri import Uri, is_uri, origin

NOT_UPLOADED = 74  # EX_IOERR: exit code of a training whose last checkpoint is not at its URI
_RECORD = ".uploaded.json"  # digests of the manifests that are at the URI, by checkpoint
_PATIENCE = 60.0  # seconds that the end of an interrupted training waits


class NotUploadedError(Exception):
    """Raised when a training has ended, and not all of it is at its URI."""


class Mirror:
    """A local directory, and the thread that makes a URI reflect it; see `mirrored`.

    The store repeats failed requests. What fails nevertheless is tried again with the next
    checkpoint, and at the end.
    """

    def __init__(self, path: Path, uri: Uri, keep: int, uploaded: dict[str, str]) -> None:
        self.path, self.uri = path, uri
        self._logs: dict[Path, Uri] = {}
        self._keep = keep
        self._note(uploaded)
        self._store = open_store(uri)
        self._best: bytes | None = b""  # at the URI; unknown at first
        self._wanted: tuple[list[Path], bytes | None] = ([], None)
        self._failed = ""
        self._closing = self._complete = self._given_up = False
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="dlrm-mirror")
        self._thread.start()

    def add_log(self, path: str | os.PathLike) -> None:
        """Uploads a file with each checkpoint from now on, if it stands for a URI."""
        if is_uri(place := origin(path)):
            self._logs[Path(path)] = Uri.parse(place)

    def saved(self, steps: Sequence[Path]) -> None:
        """Takes the directories of the checkpoints that there are now; returns at once."""
        best = self.path / BEST
        wanted = sorted(steps), best.read_bytes() if best.exists() else None
        if wanted != self._wanted:
            self._wanted = wanted
            self._changed.set()

    def close(self, seconds: float | None = None) -> str:
        """Uploads what is left, all other files too; returns what is not at the URI, and why.

        Args:
            seconds: the longest time to wait; by default until the store gives up.
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
        if self._thread.is_alive():
            self._failed = self._failed or f"not done within {seconds:.0f} s"
        return "" if self._complete else self._waiting("")

    def _waiting(self, yet: str) -> str:
        """Returns what is not at the URI, and why."""
        number = sum(step.name not in self._uploaded for step in self._wanted[0])
        what = {0: "some files are", 1: "1 checkpoint is"}.get(number, f"{number} checkpoints are")
        why = f" ({self._failed})" if self._failed else ""
        return f"{self.uri}: {what} not uploaded{yet}{why}"

    def _run(self) -> None:
        while not self._complete:
            self._changed.wait()
            self._changed.clear()
            closing, (steps, best) = self._closing, self._wanted
            try:
                if steps:
                    self._reflect(steps, best, closing)
                if self._failed:
                    say_aside(f"note: {self.uri}: uploaded now")
                self._failed, self._complete = "", closing
            except (OSError, ValueError) as error:
                self._failed = one_line(error)
                if closing:
                    return
                say_aside(f"warning: {self._waiting(' yet')}; the training continues")

    def _reflect(self, steps: list[Path], best: bytes | None, closing: bool) -> None:
        """Makes the URI have these checkpoints, this record of the best, and at last all files."""
        with ExitStack() as held:
            for step in steps:
                if not held.enter_context(in_use(step)):
                    if closing:
                        raise FileNotFoundError(f"{step}: was removed")
                    return  # pruned, so there are newer ones
            named = f"step-{int(json.loads(best)['step']):09d}" if best else ""
            for step in steps:
                self._upload(step)
            if best != self._best:
                key = self.uri.below(BEST).key
                self._store.remove(key) if best is None else self._store.write(key, best)
                self._best = best
            for path, uri in self._logs.items():
                if path.exists():
                    lines = path.read_bytes()  # the last of which may be half written
                    open_store(uri).write(uri.key, lines[: lines.rfind(b"\n") + 1])
            self._prune({named, *(step.name for step in steps)})
            if closing:
                self._upload_others()

    def _upload(self, step: Path) -> None:
        """Uploads a checkpoint unless it is there."""
        if self._uploaded.get(step.name) == (digest := _digest_of(step)):
            return
        if self._given_up:
            raise OSError(f"{self.uri}: given up")
        place = self.uri.below(step.name)
        if step.name in self._uploaded:  # another one, which must not be taken for it
            self._store.remove(place.below(MANIFEST).key)
        publish(step, place, None, plain=True)
        self._note({**self._uploaded, step.name: digest})

    def _note(self, uploaded: dict[str, str]) -> None:
        self._uploaded = uploaded
        write_atomically(self.path / _RECORD, json.dumps(uploaded, indent=2) + "\n")

    def _prune(self, kept: set[str]) -> None:
        """Deletes older checkpoints at the URI, and what a killed run has left of some."""
        listed = [entry.key for entry in self._store.entries(self.uri.folder)]
        kept |= {*whole_steps(self.uri, listed)[-self._keep :]}
        keys: dict[str, list[str]] = {}
        for key in listed:
            name, slash, _ = key.removeprefix(self.uri.folder).partition("/")
            if slash and name.startswith("step-") and name not in kept and name < max(kept):
                keys.setdefault(name, []).append(key)
        for name, own in keys.items():
            self._store.remove(self.uri.below(f"{name}/{MANIFEST}").key)
            remove_all(self._store, own)
        if keys:
            self._note({k: v for k, v in self._uploaded.items() if k not in keys})

    def _upload_others(self) -> None:
        """Uploads all files that are in no checkpoint of the run."""
        files = {}
        for path in self.path.rglob("*"):
            name = path.relative_to(self.path).as_posix()
            if path.is_file() and not name.startswith(("step-", ".")) and name != BEST:
                files[self.uri.below(name).key] = path
        upload(self._store, files)


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
    """
    uri.check_writable()
    with cache.output(uri) as path:
        mirror = Mirror(path, uri, keep, _fetch_run(cache, uri, path, resume))
        how = "from where the same command with --resume uploads"
        kept = f"; kept in {cache.output_folder(uri)}, {how}"
        try:
            yield mirror
        except BaseException as error:
            if left := mirror.close(_PATIENCE):
                if isinstance(error, saved):
                    raise NotUploadedError(f"{left}{kept}") from error
                say_aside(f"warning: {left}{kept}")
            raise
        if left := mirror.close():
            raise NotUploadedError(f"{left}{kept}")


def _fetch_run(cache: Cache, uri: Uri, path: Path, resume: bool) -> dict[str, str]:
    """Makes a local directory have what a run at a URI resumes from; returns what is there."""
    store = open_store(uri)
    listed = [entry.key for entry in store.entries(uri.folder)]
    there = {
        name: hashlib.sha256(store.content(uri.below(f"{name}/{MANIFEST}").key)).hexdigest()
        for name in whole_steps(uri, listed)
    }
    another = ", or name another place with --save_checkpoint_path"
    if there and not resume:
        last = uri.below([*there][-1])
        raise FileExistsError(f"{last}: from an earlier run; --resume continues from it{another}")
    local = sorted(manifest.parent.name for manifest in path.glob(f"step-*/{MANIFEST}"))
    if not _knows(path, there):
        if local:
            left = f"{local[-1]} that an earlier run has left on this machine is not used"
            say_aside(f"note: {uri}: another run has changed it, so {left}")
        shutil.rmtree(path, ignore_errors=True)
        local = []
    if local and not resume:
        left = f"has {local[-1]} of an earlier run that could not upload it to {uri}"
        folder = cache.output_folder(uri)
        raise FileExistsError(f"{folder}: {left}; --resume continues from it{another}")
    make_directories(path)
    if there and not local:
        for place in {checkpoint_among(uri, listed, newest) for newest in (False, True)}:
            assert place is not None
            with atomic_directory(path / place.name) as target:
                source = localize(place, cache)
                shutil.copytree(source, target, copy_function=link_or_copy, dirs_exist_ok=True)
        for key in listed:  # files beside them, such as the log
            name = key.removeprefix(uri.folder)
            if "/" not in name and name[0] != ".":
                (path / name).write_bytes(store.content(key))
    return there


def _knows(path: Path, there: Mapping[str, str]) -> bool:
    """Returns whether only this directory has changed the checkpoints at the URI."""
    uploaded: dict[str, str] = {}
    with suppress(FileNotFoundError):
        uploaded = read_json(path / _RECORD)
    if not there:
        return not uploaded
    return all(own in (uploaded.get(name), _digest_of(path / name)) for name, own in there.items())


def _digest_of(step: Path) -> str:
    try:
        return hashlib.sha256((step / MANIFEST).read_bytes()).hexdigest()
    except FileNotFoundError:
        return ""
