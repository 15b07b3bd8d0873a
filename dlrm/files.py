"""Files and directories that appear complete and durable, or not at all.

Datasets, checkpoints, exports and scores are written with these functions. Content that appears
under its final name is on the disk, together with its name and the names of the directories that
were created above it. The functions also check that paths in files stay within their directory, and
that paths of the user are no URIs. Only the standard library is imported.
"""

import fcntl
import glob
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from dlrm.documents import brief, read_json

_SYNCED_AT_ONCE = 8  # 2,000 small files take 0.2 s, one at a time 0.9 (ext4)
MANIFEST = "manifest.json"  # in every directory that this package has written; see `dlrm.manifest`
# Flags and keyword arguments that may look like a URI: all others are taken for paths.
NOT_PATHS = frozenset(
    [
        *("mlflow", "triton_server_url", "http_headers", "address"),  # servers and requests
        *("master", "conf", "spark_sql", "spark_table"),  # of Spark
        "command",  # of another program, to translate
        # Columns, and values of columns.
        *("label", "positive", "weight", "time", "columns", "numerical", "categorical"),
        *("split_key", "split_column", "cross", "encode", "slices", "missing_values", "delimiter"),
    ]
)
# Also the forms "s3:/bucket", which pathlib makes of a URI, and "cache::s3://bucket".
_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*(?=:/)|[a-z][a-z0-9+.-]*(?=://)", re.IGNORECASE)


def check_local(path: str | os.PathLike, name: str = "") -> None:
    """Refuses a path that is no text in UTF-8, as checkpoints and logs state paths, and a URI.

    The files of a URI, such as `s3://bucket/x`, would end up in a local folder `s3:`.

    Args:
        path: a path as the user gave it, or the `Path` of it.
        name: the flag or argument that holds it, for the message.

    Raises:
        ValueError: it is one of these; the message has `name` and what to do instead.
    """
    text = os.fsdecode(path)
    _check_utf8(text, name)
    if scheme := _SCHEME.search(text):
        shown = text if "://" in text else text.replace(":/", "://", 1)
        instead = (
            "use a local path and copy the files with the storage's own tool, or mount the storage "
            "as a folder"
        )
        if scheme[0].lower() == "file":
            instead = "leave out file://"
        raise ValueError(
            f"{f'{name} {shown}'.strip()}: expected a path of this machine, got a URI "
            f"({scheme[0]}://); {instead}"
        )


def _check_utf8(text: str, name: str) -> None:
    if not any("\ud800" <= letter <= "\udfff" for letter in text):
        return
    shown, remedy = os.fsencode(text).decode("utf-8", "backslashreplace"), "rename it"
    if "\\x" not in shown:  # Python has read it in another encoding
        remedy = "set PYTHONUTF8=1, or LC_ALL=C.UTF-8, since this locale's encoding is "
        remedy += sys.getfilesystemencoding()
    raise ValueError(f"{f'{name} {shown}'.strip()}: expected a path in UTF-8; {remedy}")


def check_all_local(values: Iterable[tuple[str, Any]]) -> None:
    """Checks the paths among flags or keyword arguments: all texts, except in `NOT_PATHS`.

    Args:
        values: their names, flags with dashes, and values; only texts, paths and lists of them are
            checked.

    Raises:
        ValueError: a value is refused by `check_local`.
    """
    for name, value in values:
        if name.lstrip("-").replace("-", "_") not in NOT_PATHS:
            for one in value if isinstance(value, list | tuple) else [value]:
                if isinstance(one, str | os.PathLike):
                    check_local(one, name)


def check_relative(name: Any, source: str | os.PathLike) -> None:
    """Checks that a name in a file is a path below a directory.

    Args:
        name: the path.
        source: the file that contains it.

    Raises:
        ValueError: it is not text, is empty, absolute or has `..`; the message has `source` and
            name.
    """
    is_text = isinstance(name, str) and name not in ("", ".") and "\0" not in name
    if not is_text or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ValueError(
            f"{source}: expected a path within its directory, without .., got {brief(name)}"
        )


def within(
    directory: Path, name: Any, source: str | os.PathLike, allow_links: bool | None = None
) -> Path:
    """Returns the path of a file below a directory.

    Args:
        directory: directory of the file.
        name: its path from there.
        source: the file that contains the name.
        allow_links: whether symbolic links may lead out of the directory; None if no flag allows
            it.

    Raises:
        ValueError: the file is elsewhere; the message has `source` and name.
    """
    check_relative(name, source)
    path = directory / name
    if not allow_links and _has_link(directory, name):
        found = path.resolve()
        if not found.is_relative_to(directory.resolve()):
            hint = "" if allow_links is None else "; --allow_links reads it all the same"
            raise ValueError(
                f"{source}: {brief(name)}: expected a file in {directory}, got a symbolic link to "
                f"{found}{hint}"
            )
    return path


def _has_link(directory: Path, name: str) -> bool:
    """Returns whether a part of a relative path is a symbolic link."""
    place = os.fspath(directory)
    for part in name.split("/"):
        place = os.path.join(place, part)
        if os.path.islink(place):
            return True
    return False


def check_owned(directory: Path) -> None:
    """Refuses another user's directory within one that all may write to, such as /tmp.

    A user who creates it first could choose its content, or the target of a link.

    Raises:
        PermissionError: it is such a directory, or a link; the message names it.
    """
    parent, path = directory.absolute().parent, directory.absolute()
    if os.path.lexists(path) and parent.stat().st_mode & stat.S_IWOTH:
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode) or found.st_uid != os.getuid():
            raise PermissionError(
                f"{directory}: another user may have made it, as all may write to {parent}; name a "
                "directory of your own"
            )


@contextmanager
def staged_directory(path: str | os.PathLike, replace: bool | str = False) -> Iterator[Path]:
    """Yields a new directory that becomes `path` when the block ends without an error.

    After an error the new directory is removed, and `path` is unchanged.

    Args:
        path: the directory to create; its parents are created.
        replace: whether to replace an existing directory at `path`; a kind, as in a manifest,
            allows only directories of that kind. Only a directory with a manifest, which this
            package wrote, is replaced, so that a mistyped path loses nothing.

    Raises:
        FileExistsError: `path` exists and may not be replaced.
        OSError: nothing can be written there.
        ValueError: `path` is a URI.
    """
    final, staging = stage_directory(path, replace)
    try:
        yield staging
        publish_directory(staging, final)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def stage_directory(path: str | os.PathLike, replace: bool | str = False) -> tuple[Path, Path]:
    """Makes the directory of `staged_directory`; returns its final path and its own.

    Raises:
        FileExistsError: `path` exists and may not be replaced.
        ValueError: `path` is a URI.
    """
    check_local(path)
    final = Path(path).resolve()  # replaces the target of a link, not the link
    tidy_after_killed(final)
    check_replaceable(final, replace)
    make_directories(final.parent)
    staging = _partial(final)
    staging.mkdir()
    return final, staging


def check_replaceable(path: Path, replace: bool | str) -> None:
    """Raises OSError if `staged_directory` would refuse `path`, before any work."""
    parent = next(folder for folder in path.parents if folder.exists())
    if not parent.is_dir():
        raise NotADirectoryError(f"{parent}: expected a directory to write in, got a file")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(f"{parent}: expected a directory that may be written in")
    if path.is_mount():
        raise FileExistsError(
            f"{path}: a mount point cannot be replaced by a new directory; name one inside it"
        )
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not path.is_dir():
        raise FileExistsError(f"{path}: expected a directory or nothing, got a file")
    if not replace:
        raise FileExistsError(f"{path}: exists and is not empty; name another or remove it")
    if not (path / MANIFEST).is_file():
        raise FileExistsError(
            f"{path}: exists and has no {MANIFEST}, so it was not written by this program and is "
            "not replaced; name another directory or remove it"
        )
    if isinstance(replace, str):
        kind = read_json(path / MANIFEST).get("kind")
        if kind != replace:
            raise FileExistsError(
                f"{path}: expected nothing, or an earlier {replace} to replace, got a "
                f"{brief(kind)}; name another directory"
            )


def publish_directory(staging: Path, final: Path) -> None:
    """Moves a complete directory to `final`, and removes its old content."""
    sync_tree(staging)
    _swap(staging, final)


def tidy_after_killed(final: Path) -> None:
    """Removes leftovers of processes killed while they wrote `final`.

    If one was killed between the two renames of `_swap`, the old `final` is restored.
    """
    for old in final.parent.glob(f".{glob.escape(final.name)}.old-*"):
        if not is_running(old):
            shutil.rmtree(old) if final.exists() else old.rename(final)
    for partial in final.parent.glob(f".{glob.escape(final.name)}.partial-*"):
        if not is_running(partial) or partial == _partial(final):
            shutil.rmtree(partial)


def _partial(final: Path) -> Path:
    """Returns the path at which this process prepares `final`."""
    return final.with_name(f".{final.name}.partial-{os.getpid()}")


def tidy_leftovers(directory: Path) -> None:
    """Removes leftovers of killed processes, which were writing or removing, in a directory.

    No other process may write there at the same time.
    """
    for path in directory.glob(".*-[0-9]*"):
        if re.fullmatch(r"\..+\.(partial|removed)-\d+", path.name):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def is_running(leftover: Path) -> bool:
    """Returns whether the process still runs whose id ends the name of a leftover."""
    try:
        os.kill(int(leftover.name.rpartition("-")[2]), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, ValueError, OverflowError):
        return True  # another user's, or not a name of ours
    return True


def _swap(staging: Path, final: Path) -> None:
    if not final.exists():
        staging.rename(final)
    else:
        old = final.with_name(f".{final.name}.old-{os.getpid()}")
        final.rename(old)
        try:
            staging.rename(final)
        except BaseException:
            old.rename(final)
            raise
        # Partly removed, it must not be restored like a complete one in `tidy_after_killed`.
        removed = old.rename(_partial(final))
        shutil.rmtree(removed, ignore_errors=True)
    sync(final.parent)


def sync_tree(directory: Path) -> None:
    """Waits until all files of a directory, and their names, are on the disk.

    Many files are waited for at a time, since the disk then writes them together.
    """
    found = [(parent, names) for parent, _, names in os.walk(directory, topdown=False)]
    with ThreadPoolExecutor(_SYNCED_AT_ONCE) as pool:
        for _ in pool.map(sync, [Path(parent, name) for parent, names in found for name in names]):
            pass
    for parent, _ in found:
        sync(Path(parent))


def sync(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directories(path: Path) -> None:
    """Creates a directory and missing ones above it, and waits until their names are on disk.

    Raises:
        ValueError: the path is a URI.
    """
    check_local(path)
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        sync(directory.parent)


@contextmanager
def staged_file(path: str | os.PathLike, one_of_many: bool = False) -> Iterator[Path]:
    """Yields the path of a new file that becomes `path` when the block ends without an error.

    After an error the new file is removed and `path` is unchanged. Leftovers of killed processes
    are removed first.

    Args:
        path: file to create or replace; its parent must exist.
        one_of_many: whether the caller writes a directory of files, removes leftovers and waits
            for all names at the end (`sync`), as to do it for each takes long.

    Raises:
        OSError: it cannot be written; the message names `path`.
        ValueError: `path` is a URI.
    """
    check_local(path)
    final = Path(path)
    partial = _partial(final)
    leftovers = f".{glob.escape(final.name)}.partial-*"
    for left in () if one_of_many else final.parent.glob(leftovers):
        if left.is_file() and not is_running(left):
            left.unlink(missing_ok=True)
    try:
        yield partial
        sync(partial)
        partial.replace(final)
        if not one_of_many:
            sync(final.parent)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(partial), partial):
            raise OSError(error.errno, error.strerror, str(final)) from None
        raise


def write_atomically(path: str | os.PathLike, text: str) -> None:
    """Writes a text file that readers see complete or not at all."""
    with staged_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def in_use(directory: Path) -> Iterator[bool]:
    """Keeps `remove_unused` from removing a directory within the block.

    Yields:
        Whether the directory exists and will stay; False if it is being removed.
    """
    lock = None
    try:
        try:
            lock = os.open(directory, os.O_RDONLY)
            _lock(lock, fcntl.LOCK_SH)
            stays = os.path.samestat(os.fstat(lock), directory.stat())
        except (FileNotFoundError, BlockingIOError):
            stays = False
        yield stays
    finally:
        if lock is not None:
            os.close(lock)


def remove_unused(directory: Path) -> bool:
    """Removes a directory unless another process uses it; returns whether it did.

    It is renamed first, so that no process sees a part of it under its name. A link is kept. Files
    that cannot be removed, such as one open on another machine, are left to `tidy_leftovers`.
    """
    if directory.is_symlink():
        return False
    lock = os.open(directory, os.O_RDONLY)
    try:
        _lock(lock, fcntl.LOCK_EX)
        removed = directory.rename(directory.with_name(f".{directory.name}.removed-{os.getpid()}"))
        sync(directory.parent)
        shutil.rmtree(removed, ignore_errors=True)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _lock(descriptor: int, kind: int) -> None:
    """Locks a file or directory without waiting; does nothing on a file system without locks.

    Raises:
        BlockingIOError: another process holds the lock.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass
