"""Locks of files, and directories that belong to a process: both end with it, however it ends.

A process id cannot say whether the writer of unfinished files still runs. Two containers, or two
machines on one storage, may use the same id, and so may a process and its successor after a
restart. The kernel and the file server release a lock when its holder ends.
"""

import errno
import fcntl
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_LOCK = "lock"  # in a directory of `owned_directory`
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of a file system


@contextmanager
def lock(path: str | os.PathLike, busy: str | None = None) -> Iterator[int | None]:
    """Holds the lock of a file within the block, in which no other process holds it.

    Forks of this process do not hold it. On a file system without locks the block runs unlocked.

    Args:
        path: a file for the lock alone; it is created, with its directory, and stays.
        busy: the message of the error if another process holds the lock; None waits for it.

    Yields:
        The descriptor of the file: a command that inherits it holds the lock as well, even if this
        process is killed. None on a file system without locks.

    Raises:
        BlockingIOError: another process holds the lock.
    """
    from filelock import FileLock, Timeout  # takes 50 ms

    held = list[int]()
    of_file = FileLock(path, thread_local=False, fallback_to_soft=False, on_acquired=held.append)
    try:
        of_file.acquire(blocking=busy is None)
    except Timeout:
        raise BlockingIOError(busy) from None
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
    try:
        yield held[0] if held else None
    finally:
        of_file.release()


@contextmanager
def owned_directory(path: Path) -> Iterator[Path]:
    """Makes a directory that others leave alone within the block, and removes it at the end.

    If the process is killed, `remove_abandoned` removes it.

    Args:
        path: the directory, named by a prefix and `new_suffix`; its parent must exist.
    """
    path.mkdir()
    owner = os.getpid()
    with open(path / _LOCK, "w") as file:  # forks have it, too, which only delays the removal
        _flock(file.fileno(), fcntl.LOCK_EX)
        try:
            yield path
        finally:
            if os.getpid() == owner:  # a fork may get here, too
                shutil.rmtree(path, ignore_errors=True)


def new_suffix() -> str:
    """Returns the random end of a name that no other process will choose."""
    return os.urandom(8).hex()


def abandoned(parent: Path, prefix: str) -> Iterator[Path]:
    """Yields directories of `owned_directory` whose process has ended, and removes each afterward.

    None are yielded on a file system without locks.

    Args:
        prefix: the beginning of their names.
    """
    for path in filter(Path.is_dir, parent.glob(f"{glob.escape(prefix)}*")):
        with suppress(BlockingIOError, PermissionError), lock(path / _LOCK, "in use") as held:
            if held is not None:
                yield path
                shutil.rmtree(path, ignore_errors=True)


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Removes directories of `owned_directory` whose process has ended."""
    for _ in abandoned(parent, prefix):
        pass


class ReplacedError(OSError):
    """A directory was replaced by another while it was read."""


@contextmanager
def unreplaced(directory: Path) -> Iterator[None]:
    """Detects that a directory was replaced by another, or removed, while the block read it.

    Raises:
        ReplacedError: it was, so what the block read may be a mixture, and its errors may have
            that reason. Reading again gives the new content.
    """
    failed: Exception | None = None
    with _opened(directory) as held:  # keeps its number from being given to another
        try:
            yield
        except (OSError, ValueError) as error:
            failed = error
        if not _is_at(held, directory):
            reason = "was replaced or removed while it was read; read it again"
            raise ReplacedError(f"{directory}: {reason}") from failed
        if failed is not None:
            raise failed


@contextmanager
def in_use(directory: Path) -> Iterator[bool]:
    """Keeps `remove_unused` from removing a directory within the block.

    Yields:
        Whether the directory exists and will stay; False if it is being removed or replaced.
    """
    with ExitStack() as stack:
        stays = False
        with suppress(FileNotFoundError):
            held = stack.enter_context(_opened(directory))
            stays = _flock(held, fcntl.LOCK_SH) and _is_at(held, directory)
        yield stays


def remove_unused(directory: Path) -> bool:
    """Removes a directory unless another process uses it; returns whether it did.

    It is renamed first, so that no process sees a part of it under its name. A link is kept. Files
    that cannot be removed, such as one open on another machine, are left to `tidy_leftovers`.
    """
    if directory.is_symlink():
        return False
    with _opened(directory) as held:
        if not _flock(held, fcntl.LOCK_EX):
            return False
        name = f".{directory.name}.removed-{new_suffix()}"
        removed = directory.rename(directory.with_name(name))
        sync(directory.parent)
        shutil.rmtree(removed, ignore_errors=True)
    return True


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _flock(descriptor: int, kind: int) -> bool:
    """Locks a file or directory at once; returns whether it could, or there are no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Returns whether an open directory is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def sync(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on the disk."""
    with _opened(path) as descriptor:
        os.fsync(descriptor)
