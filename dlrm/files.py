"""Files and directories that appear complete and durable, or not at all; checks of paths.

What appears under its final name is on the disk, together with its name and those of the
directories that were created above it.
"""

import ctypes
import errno
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dlrm.documents import brief, read_json
from dlrm.locks import abandoned, new_suffix, owned_directory, remove_abandoned, sync

_OLD = "old"  # beside a staging directory: what it replaces, between two renames
_SYNCED_AT_ONCE = 8  # 2,000 small files take 0.2 s, one at a time 0.9 (ext4)
_OF_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_EXCHANGE = 2  # RENAME_EXCHANGE of <linux/fs.h>
_AT_FDCWD = -100
_renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)  # glibc 2.28
MANIFEST = "manifest.json"  # in every directory that this package has written; see `dlrm.manifest`
# Flags and keyword arguments that may look like a URI: all others are taken for paths.
NOT_PATHS = frozenset(
    [
        *("mlflow", "triton_server_url", "http_headers", "address"),  # servers and requests
        *("master", "conf", "spark_sql", "spark_table"),  # of Spark
        *("command", "others"),  # of another program
        # Columns, and values of columns.
        *("label", "positive", "weight", "time", "columns", "cross", "slices", "delimiter"),
        *("split_key", "split_column"),
    ]
)
# Also the forms "s3:/bucket", which pathlib makes of a URI, and "cache::s3://bucket".
_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*(?=:/)|[a-z][a-z0-9+.-]*(?=://)", re.IGNORECASE)


def check_local(path: str | os.PathLike, name: str = "") -> None:
    """Refuses a URI, and a path that is no text in UTF-8, as checkpoints and logs state paths.

    The files of a URI, such as `s3://bucket/x`, would end up in a local folder `s3:`.

    Args:
        path: a path as the user gave it, or the `Path` of it.
        name: the flag or argument that holds it, for the message.

    Raises:
        ValueError: it is one of these; the message has `name` and what to do instead.
    """
    text = os.fsdecode(path)
    problem = ""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        text = os.fsencode(text).decode("utf-8", "backslashreplace")
        problem = "a path in UTF-8; rename it, or set PYTHONUTF8=1 if this locale's encoding, "
        problem += f"{sys.getfilesystemencoding()}, is another"
    elif scheme := _SCHEME.search(text):
        text = text if "://" in text else text.replace(":/", "://", 1)
        problem = f"a path of this machine, got a URI ({scheme[0]}://); "
        is_file = scheme[0].lower() == "file"
        problem += "leave out file://" if is_file else "use a local path, or a mounted folder"
    if problem:
        raise ValueError(f"{f'{name} {text}'.strip()}: expected {problem}")


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
            for item in value if isinstance(value, list | tuple) else [value]:
                if isinstance(item, str | os.PathLike):
                    check_local(item, name)


def check_relative(name: Any, source: str | os.PathLike) -> None:
    """Checks that a name in a file is a path below a directory.

    Raises:
        ValueError: it is not text, is empty, absolute or has `..`; the message has both.
    """
    parts = name.split("/") if isinstance(name, str) else [""]
    if name in ("", ".") or not parts[0] or ".." in parts or "\0" in name:
        raise ValueError(
            f"{source}: expected a path within its directory, without .., got {brief(name)}"
        )


def within(
    directory: Path, name: Any, source: str | os.PathLike, allow_links: bool | None = None
) -> Path:
    """Returns the path of a file below a directory.

    Args:
        name: its path from there.
        allow_links: whether links may lead out of the directory; None if no flag allows it.

    Raises:
        ValueError: the file is elsewhere; the message has `source` and name.
    """
    check_relative(name, source)
    path = directory / name
    if not allow_links and not (resolved := path.resolve()).is_relative_to(directory.resolve()):
        hint = "" if allow_links is None else "; --allow_links reads it all the same"
        raise ValueError(
            f"{source}: {brief(name)}: expected a file in {directory}, got a symbolic link to "
            f"{resolved}{hint}"
        )
    return path


def check_owned(directory: Path) -> None:
    """Refuses another user's directory within one that all may write to, such as /tmp.

    A user who creates it first could choose its content, or the target of a link.

    Raises:
        PermissionError: it is such a directory, or a link; the message names it.
    """
    path = directory.absolute()
    if (
        os.path.lexists(path)
        and path.parent.stat().st_mode & stat.S_IWOTH
        and (path.is_symlink() or path.stat().st_uid != os.getuid())
    ):
        reason = f"another user may have made it, as all may write to {path.parent}"
        raise PermissionError(f"{directory}: {reason}; name a directory of your own")


@contextmanager
def errors_named(path: str | os.PathLike, staged: Path | None = None) -> Iterator[None]:
    """Gives errors of writing a file within the block its path, where they have none.

    A full disk is noticed in `write`, which knows no name. The errors stay OSErrors.

    Args:
        path: the file, or the directory of several.
        staged: the directory in which an entry will become `path`; errors name the final paths.
    """
    try:
        yield
    except shutil.Error as error:  # of a tree; it has a list of source, target and reason
        source, target, reason = error.args[0][0]
        raise OSError(f"{source}, copied to {target}: {reason}") from error
    except OSError as error:
        name = error.filename if isinstance(error.filename, str | os.PathLike) else None
        if staged is not None and name is not None and Path(name).is_relative_to(staged):
            final = os.fspath(Path(path, *Path(name).relative_to(staged).parts[1:]))
            raise type(error)(error.errno, error.strerror, final) from error
        if error.filename is None and error.errno in _OF_WRITING:
            raise OSError(error.errno, os.strerror(error.errno), os.fspath(path)) from error
        if type(error) is OSError and error.errno is None and os.fspath(path) not in str(error):
            raise OSError(f"{path}: {error}") from error  # NumPy's and Arrow's
        raise


def check_outside(path: str | os.PathLike, source: str | os.PathLike) -> None:
    """Raises ValueError if a directory to write is inside the one that it is made from."""
    if Path(path).resolve().is_relative_to(Path(source).resolve()):
        raise ValueError(f"{path}: expected a directory outside of {source}, which is read")


@contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[Path]:
    """Yields the path of a new file that becomes `path` when the block ends without an error.

    After an error `path` is unchanged. Leftovers of killed processes are removed first.

    Args:
        path: file to create or replace; its parent must exist.

    Raises:
        OSError: it cannot be written; the message names `path`.
        ValueError: `path` is a URI.
    """
    check_local(path)
    final = Path(path)
    remove_abandoned(final.parent, _prefix(final))
    folder = _new_folder(final)
    with errors_named(final, folder), owned_directory(folder):
        yield folder / final.name
        sync(folder / final.name)
        (folder / final.name).replace(final)
        sync(final.parent)


def write_atomically(path: str | os.PathLike, text: str) -> None:
    """Writes a text file that readers see complete or not at all."""
    with atomic_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def atomic_directory(
    path: str | os.PathLike, replace: bool | str = False, beside: Path | None = None
) -> Iterator[Path]:
    """Yields a new directory that becomes `path` when the block ends without an error.

    After an error the new directory is removed, and `path` is unchanged. Leftovers of killed
    processes are removed first.

    Args:
        path: the directory to create; its parents are created.
        replace: whether to replace an existing directory at `path`; a kind, as in a manifest,
            allows only directories of that kind. Only a directory with a manifest, which this
            package wrote, is replaced, so that a mistyped path loses nothing.
        beside: path beside which to fill the new directory, on the same file system; None means
            `path`.

    Raises:
        FileExistsError: `path` exists and may not be replaced.
        OSError: nothing can be written there.
        ValueError: `path` is a URI.
    """
    check_local(path)
    final = Path(path).resolve()  # replaces the target of a link, not the link
    place = final if beside is None else beside.resolve()
    tidy_after_killed(place)
    check_replaceable(final, replace)
    make_directories(final.parent)
    folder = _new_folder(place)
    with errors_named(path, folder), owned_directory(folder):
        content = folder / "content"
        content.mkdir()
        yield content
        publish_directory(content, final, bool(replace))


def check_replaceable(path: Path, replace: bool | str) -> None:
    """Raises OSError if `atomic_directory` would refuse `path`, before any work."""
    parent = next(folder for folder in path.parents if folder.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise PermissionError(f"{parent}: expected a directory that may be written in")
    if path.is_mount():
        raise FileExistsError(f"{path}: a mount point cannot be replaced; name a directory in it")
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
    if isinstance(replace, str) and (kind := read_json(path / MANIFEST).get("kind")) != replace:
        raise FileExistsError(
            f"{path}: expected nothing, or an earlier {replace} to replace, got a {brief(kind)}; "
            "name another directory"
        )


def publish_directory(staging: Path, final: Path, replace: bool = True) -> None:
    """Moves a complete directory to `final`.

    Where the system can exchange two names, `final` exists at every instant. Otherwise it is
    missing for the time between two renames, and `tidy_after_killed` restores it after a kill.

    Args:
        staging: the directory; what it replaces is left in its parent.
        replace: whether it may replace a directory that is not empty.

    Raises:
        FileExistsError: it may not.
    """
    sync_tree(staging)
    if not (replace and final.exists()):
        try:
            staging.rename(final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise FileExistsError(f"{final}: another process has written it meanwhile") from None
    elif not exchange(staging, final):
        try:
            final.rename(staging.with_name(_OLD))
            staging.rename(final)
        finally:
            restore_replaced(staging.parent, final)
    sync(final.parent)


def exchange(first: Path, other: Path) -> bool:
    """Exchanges two directories at one instant; returns whether the system could."""
    names = os.fsencode(first), os.fsencode(other)
    return _renameat2 is not None and not _renameat2(
        _AT_FDCWD, names[0], _AT_FDCWD, names[1], _EXCHANGE
    )


def restore_replaced(folder: Path, final: Path) -> None:
    """Restores `final` if its replacement stopped between two renames.

    Args:
        folder: parent of the staging directory.
    """
    if (folder / _OLD).exists() and not final.exists():
        (folder / _OLD).rename(final)


def tidy_after_killed(final: Path) -> None:
    """Removes what killed processes left of `final`; see `restore_replaced`."""
    for folder in abandoned(final.parent, _prefix(final)):
        restore_replaced(folder, final)


def _prefix(final: Path) -> str:
    return f".{final.name}.partial-"


def _new_folder(final: Path) -> Path:
    return final.with_name(f"{_prefix(final)}{new_suffix()}")


def tidy_leftovers(directory: Path) -> None:
    """Removes what killed processes left of any entry of a directory, as they wrote or removed it.

    An entry whose replacement stopped between two renames is restored first. No other process may
    write there at the same time.
    """
    for path in directory.glob(".*-[0-9a-f]*"):
        if left := re.fullmatch(r"\.(.+)\.(?:partial|removed)-[0-9a-f]+", path.name):
            if path.is_dir() and not path.is_symlink():
                restore_replaced(path, directory / left[1])
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def sync_tree(directory: Path) -> None:
    """Waits until all files of a directory, and their names, are on the disk.

    Many files are waited for at a time, since the disk then writes them together.
    """
    folders = [(Path(parent), names) for parent, _, names in os.walk(directory, topdown=False)]
    with ThreadPoolExecutor(_SYNCED_AT_ONCE) as pool:
        list(pool.map(sync, [parent / name for parent, names in folders for name in names]))
    for parent, _ in folders:
        sync(parent)


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


def link_or_copy(source: str, target: str) -> None:
    """Links a file under another name, or copies it if it cannot be linked."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def write_array(path: str | os.PathLike, array: Any) -> None:
    """Writes a NumPy array as `numpy.save` does, and raises OSError for a full disk.

    `numpy.save` writes files of the system through a buffer of its own, and does not report that
    the last bytes of it could not be written.
    """
    from numpy.lib import format as npy

    with open(path, "wb") as file:
        npy.write_array(SimpleNamespace(write=file.write), array, allow_pickle=False)
