"""Temporary directories of models and datasets, which also vanish after a process was killed."""

import atexit
import os
import stat
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from dlrm.locks import new_suffix, owned_directory, remove_abandoned

_PREFIX = "process-"
_owned: dict[tuple[int, str], Path] = {}  # by process, as forks have this too, and place
_lock = threading.Lock()


def temporary_directory(folder: str | os.PathLike | None = None) -> tempfile.TemporaryDirectory:
    """Returns a temporary directory, in one of this process, in a folder or where `TMPDIR` says.

    A process that is killed, such as the kernel of a notebook, leaves its directory. The next
    process of the same user that makes one removes it.
    """
    return tempfile.TemporaryDirectory(prefix="dlrm-", dir=_of_this_process(folder))


def _of_this_process(folder: str | os.PathLike | None) -> Path:
    place = os.getpid(), os.path.abspath(folder or tempfile.gettempdir())
    with _lock:
        if place not in _owned or not _owned[place].is_dir():
            parent = _of_this_user(Path(place[1]))
            remove_abandoned(parent, _PREFIX)
            block = owned_directory(parent / f"{_PREFIX}{new_suffix()}")
            _owned[place] = block.__enter__()
            atexit.register(block.__exit__, None, None, None)
        return _owned[place]


def _of_this_user(place: Path) -> Path:
    """Returns the directory of this user's processes, which others can neither read nor fill."""
    directory = place / f"dlrm-{os.getuid()}"
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    is_private = not found.st_mode & 0o077 and found.st_uid == os.getuid()
    if is_private and stat.S_ISDIR(found.st_mode):
        return directory
    return Path(tempfile.mkdtemp(prefix="dlrm-"))  # another user has made the former
