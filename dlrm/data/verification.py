"""Compares a dataset's files with the checksums of its manifest, once.

What was compared is noted beside the manifest or, if it is not writable, in the user's cache, and
is not compared again while a file keeps its size, time and inode. Only the standard library is
imported.
"""

import hashlib
import os
import threading
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from dlrm.data.choices import VERIFY_DATA
from dlrm.files import MANIFEST, write_atomically
from dlrm.locks import lock
from dlrm.manifest import check_files, read_manifest, read_sealed, sealed_json

STAMP = ".verified.json"  # beside the manifest: file -> its facts when it was compared
_CACHE = Path("~/.cache/dlrm/verified")


class Verifier:
    """Checks files of a dataset, and notes which were checked.

    A dataset without a manifest, written by other software, has no checksums to compare.

    Args:
        mode: "first" compares what is not noted, "always" everything again, "never" nothing.
        allow_links: whether files may be symbolic links out of the directory.

    Raises:
        FileNotFoundError, ValueError: an unknown mode, or see `read_manifest`.
    """

    def __init__(
        self, directory: Path, kind: str, mode: str, allow_links: bool | None = False
    ) -> None:
        if mode not in VERIFY_DATA:
            raise ValueError(f"--verify_data {mode}: expected one of {', '.join(VERIFY_DATA)}")
        files: dict[str, Any] = {}
        if (directory / MANIFEST).exists():
            files = read_manifest(directory, kind, allow_links=allow_links)["files"]
        self._directory, self._mode = directory, mode
        self._checksums: dict[str, str] = {name: file["crc32"] for name, file in files.items()}
        self._lock, self._done = threading.Lock(), set[str]()

    def check(self, paths: Iterable[Path]) -> None:
        """Compares files that were not compared before, on all cores.

        Processes that need the same files wait for the first.

        Raises:
            ValueError: a file is damaged, or not listed in the manifest; the message names it.
        """
        if self._mode == "never" or not self._checksums:
            return
        names = {os.path.relpath(path, self._directory) for path in paths}
        if unknown := sorted(names - self._checksums.keys()):
            raise ValueError(
                f"{self._directory / unknown[0]}: not in {self._directory / MANIFEST}, so nothing "
                "checks it"
            )
        with self._lock:
            left = names - self._done
            if self._mode == "always":
                self._compare(left)
            elif self._unnoted(left):
                with _locked(self._directory):
                    if facts := self._unnoted(left):  # another process may have noted them
                        self._compare(facts)
                        _note(self._directory, facts)
            self._done |= names

    def check_names(self, *names: str) -> None:
        """Compares listed files, and all listed files below directories; see `check`."""
        folders = tuple(f"{name}/" for name in names)
        listed = [n for n in self._checksums if n in names or n.startswith(folders)]
        self.check(self._directory / name for name in listed)

    def _unnoted(self, names: Iterable[str]) -> dict[str, list[Any]]:
        """Returns files that no note names, with their facts, which a change makes others."""
        noted, facts = _noted(self._directory), dict[str, list[Any]]()
        for name in names:
            status = (self._directory / name).stat()
            digest = f"{zlib.crc32(self._checksums[name].encode()):08x}"
            facts[name] = [status.st_size, status.st_mtime_ns, status.st_ino, digest]
        return {name: own for name, own in facts.items() if noted.get(name) != own}

    def _compare(self, names: Iterable[str]) -> None:
        check_files(self._directory, {name: self._checksums[name] for name in names})


def _note_paths(directory: Path) -> Iterator[Path]:
    directory = directory.resolve()
    yield directory / STAMP
    with suppress(RuntimeError):  # a user without a home
        digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:24]
        yield _CACHE.expanduser() / f"{digest}.json"


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Waits for other processes that compare a dataset's files."""
    with ExitStack() as stack:
        for path in _note_paths(directory):
            with suppress(OSError):  # nothing can be written there
                file = path.with_suffix(".lock")
                stack.enter_context(lock(file))
                stack.callback(file.unlink, missing_ok=True)
                break
        yield


def _noted(directory: Path) -> dict[str, Any]:
    """Returns the facts of the files that were compared; none of unreadable or damaged notes."""
    noted: dict[str, Any] = {}
    for path in filter(Path.is_file, _note_paths(directory)):
        with suppress(OSError, ValueError):
            noted |= read_sealed(path, required=True)
    return noted


def _note(directory: Path, compared: dict[str, list[Any]]) -> None:
    """Adds facts to the first notes that can be written."""
    for path in _note_paths(directory):
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, sealed_json(_noted(directory) | compared))
            return
