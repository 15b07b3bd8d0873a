"""Locks that end with their process: which unfinished files belong to a writer that still runs.

A process id cannot answer this. Two containers, or two machines on one storage, may use the same
id, and so may a process and its successor after a restart. The kernel and the file server release a
lock of `flock` when its last holder ends, however it ends. Names have random suffixes, so no two
writers share one. Only the standard library is imported.
"""

import ctypes
import errno
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_LOCK = "lock"  # in a directory of `OwnedDirectory`
_EXCHANGE = 2  # RENAME_EXCHANGE of <linux/fs.h>
_AT_FDCWD = -100
_renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # glibc 2.28
# Of a kernel or a file system that cannot exchange two names.
_CANNOT_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


class OwnedDirectory:
    """A new directory that others leave alone while this process, or a fork of it, runs.

    It has a lock file, and whatever its owner creates in it. `remove_abandoned` removes it once its
    owner has ended.

    Args:
        parent: directory to create it in.
        prefix: beginning of its name, which a random suffix completes.

    Attributes:
        path: the directory.
    """

    def __init__(self, parent: Path, prefix: str) -> None:
        lock = None
        while lock is None:  # another process may take an unlocked directory for an abandoned one
            self.path = parent / f"{prefix}{new_suffix()}"
            self.path.mkdir()
            lock = try_lock(self.path / _LOCK)
        self._lock: int | None = lock

    def remove(self) -> None:
        """Removes the directory and releases its lock, once."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            lock, self._lock = self._lock, None
            os.close(lock)


def new_suffix() -> str:
    """Returns the random end of a name that no other process will choose."""
    return secrets.token_hex(8)


def try_lock(path: Path, create: bool = True) -> int | None:
    """Locks a file without waiting; closing it releases the lock.

    On a file system without locks it succeeds for the file's creator only, so nothing of another
    process counts as abandoned there.

    Args:
        create: whether to create it if there is none.

    Returns:
        Its descriptor; None if another process has locked or removed it.

    Raises:
        FileNotFoundError: it is to be created in a directory that does not exist.
    """
    try:
        descriptor, created = _open(path, create)
    except FileNotFoundError:
        if create and not path.parent.is_dir():
            raise
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        kept = os.path.samestat(os.fstat(descriptor), path.stat())
    except (BlockingIOError, FileNotFoundError):
        kept = False
    except OSError:
        kept = created
    if not kept:
        os.close(descriptor)
        return None
    return descriptor


def _open(path: Path, create: bool) -> tuple[int, bool]:
    """Returns a descriptor of a file, and whether this call created it."""
    if create:
        with suppress(FileExistsError):
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), True
    return os.open(path, os.O_RDWR), False  # NFS locks no file that is open for reading only


def abandoned(parent: Path, prefix: str) -> Iterator[Path]:
    """Yields files and directories whose owner has ended, locked while the caller has each.

    Args:
        prefix: beginning of their names.
    """
    for path in parent.glob(f"{glob.escape(prefix)}*"):
        with suppress(PermissionError):  # another user's
            lock = try_lock(path / _LOCK) if path.is_dir() else try_lock(path, create=False)
            if lock is not None:
                try:
                    yield path
                finally:
                    os.close(lock)


def remove_abandoned(parent: Path, prefix: str) -> bool:
    """Removes abandoned directories; returns whether there were any."""
    left = False
    for path in abandoned(parent, prefix):
        left = True
        remove_tree(path)
    return left


def remove_tree(directory: Path) -> None:
    """Removes a directory that other processes may be removing as well."""

    def check(function: object, path: str, error: tuple[Any, BaseException, Any]) -> None:
        cause = error[1]
        if not isinstance(cause, OSError) or cause.errno not in (errno.ENOENT, errno.ENOTEMPTY):
            raise cause

    shutil.rmtree(directory, onerror=check)


def exchange(first: Path, other: Path) -> bool:
    """Exchanges two directories at one instant, so that each name always has one of them.

    Returns:
        Whether it did; False if the system or the file system cannot.

    Raises:
        OSError: it failed for another reason; the message names both.
    """
    if _renameat2 is None:
        return False
    names = os.fsencode(first), os.fsencode(other)
    if _renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(other))


class ReplacedError(OSError):
    """A directory was replaced by another while it was read."""


@contextmanager
def unreplaced(directory: Path) -> Iterator[None]:
    """Detects that a directory was replaced by another, or removed, while the block read it.

    Raises:
        ReplacedError: it was, so what the block read may be a mixture, and its errors may have
            that reason. Reading again gives the new content.
    """
    held = os.open(directory, os.O_RDONLY)  # keeps its number from being given to another
    try:
        try:
            yield
        except (OSError, ValueError) as error:
            if _is_at(held, directory):
                raise
            raise _replaced(directory) from error
        if not _is_at(held, directory):
            raise _replaced(directory)
    finally:
        os.close(held)


@contextmanager
def in_use(directory: Path) -> Iterator[bool]:
    """Keeps `remove_unused` from removing a directory within the block.

    Yields:
        Whether the directory exists and will stay; False if it is being removed or replaced.
    """
    try:
        held = os.open(directory, os.O_RDONLY)
    except FileNotFoundError:
        yield False
        return
    try:
        yield _lock(held, fcntl.LOCK_SH) and _is_at(held, directory)
    finally:
        os.close(held)


def _is_at(descriptor: int, path: Path) -> bool:
    """Returns whether an open directory is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _replaced(directory: Path) -> ReplacedError:
    return ReplacedError(f"{directory}: was replaced or removed while it was read; read it again")


def remove_unused(directory: Path) -> bool:
    """Removes a directory unless another process uses it; returns whether it did.

    It is renamed first, so that no process sees a part of it under its name. A link is kept. Files
    that cannot be removed, such as one open on another machine, are left to `tidy_leftovers`.
    """
    if directory.is_symlink():
        return False
    held = os.open(directory, os.O_RDONLY)
    try:
        if not _lock(held, fcntl.LOCK_EX):
            return False
        name = f".{directory.name}.removed-{new_suffix()}"
        removed = directory.rename(directory.with_name(name))
        sync(directory.parent)
        shutil.rmtree(removed, ignore_errors=True)
    finally:
        os.close(held)
    return True


def _lock(descriptor: int, kind: int) -> bool:
    """Locks a directory without waiting; returns whether it could, or there are no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def sync(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
