"""Directories that appear whole or not at all, and the manifest that says what is in them.

Datasets and checkpoints are written with these. Only the standard library is imported.
"""

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_PREPARED_BY = {
    "image dataset": "preproc/prepare_images.py",
    "pre-training dataset": "preproc/prepare_text.py",
}
_BLOCK = 1 << 22


@contextmanager
def staged_directory(path: str | os.PathLike, replace: bool = False) -> Iterator[Path]:
    """Yields a new directory that becomes `path` when the block ends without an error.

    After an error the new directory is removed and whatever stood at `path` is as it was.

    Args:
        path: the directory to create; its parents are created.
        replace: whether a directory that stands at `path` already may be replaced. Only one that
            has a manifest (one that we wrote) is, so that a mistyped path loses nothing.

    Raises:
        FileExistsError: something that may not be replaced stands at `path`.
    """
    final, staging = stage_directory(path, replace)
    try:
        yield staging
        publish_directory(staging, final)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def stage_directory(path: str | os.PathLike, replace: bool = False) -> tuple[Path, Path]:
    """Makes what `staged_directory` yields; returns what it is to become, and it.

    Raises:
        FileExistsError: something that may not be replaced stands at `path`.
    """
    final = Path(path).resolve()  # what a link points to is replaced, not the link
    tidy_after_killed(final)
    check_replaceable(final, replace)
    final.parent.mkdir(parents=True, exist_ok=True)
    staging = final.with_name(f".{final.name}.partial-{os.getpid()}")
    staging.mkdir()
    return final, staging


def check_replaceable(path: Path, replace: bool) -> None:
    """Raises FileExistsError where `staged_directory` would refuse `path`."""
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


def publish_directory(staging: Path, final: Path) -> None:
    """Makes a directory that is whole appear as `final`, whose old content goes."""
    sync_tree(staging)
    _swap(staging, final)


def tidy_after_killed(final: Path) -> None:
    """Removes what processes left that were killed while they wrote `final`.

    One that was killed between the two renames of `_swap` left no `final`: the old one comes back.
    """
    for old in final.parent.glob(f".{final.name}.old-*"):
        if not _is_running(old):
            shutil.rmtree(old) if final.exists() else old.rename(final)
    for partial in final.parent.glob(f".{final.name}.partial-*"):
        if not _is_running(partial) or partial.name.endswith(f"-{os.getpid()}"):
            shutil.rmtree(partial)


def _is_running(leftover: Path) -> bool:
    """Whether the process still runs whose number the name ends in."""
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
        shutil.rmtree(old, ignore_errors=True)
    sync(final.parent)


def sync_tree(directory: Path) -> None:
    """Waits until all files of a directory, and their names, are on the disk."""
    for parent, _, names in os.walk(directory, topdown=False):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))


def sync(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: str | os.PathLike, text: str) -> None:
    """Writes a text file that readers see whole or not at all."""
    final = Path(path)
    partial = final.with_name(f".{final.name}.partial-{os.getpid()}")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(final)
    finally:
        partial.unlink(missing_ok=True)


def crc32(path: str | os.PathLike) -> str:
    """Returns the CRC-32 of a file as eight hexadecimal digits."""
    value = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


def write_manifest(
    directory: Path, kind: str, checksums: dict[str, str] | None = None, **facts: Any
) -> None:
    """Writes `manifest.json`: `facts`, and size and CRC-32 of every file. Call it last.

    Args:
        directory: what the manifest is of.
        kind: "dataset" or "checkpoint".
        checksums: CRC-32 of files, by relative path, where they are known already.
        facts: further entries.
    """
    files = {}
    for path in sorted(p for p in directory.rglob("*") if p.is_file() and p.name != MANIFEST):
        name = path.relative_to(directory).as_posix()
        crc = (checksums or {}).get(name) or crc32(path)
        files[name] = {"bytes": path.stat().st_size, "crc32": crc}
    manifest = {"kind": kind, "version": 1, **facts, "files": files}
    write_atomically(directory / MANIFEST, json.dumps(manifest, indent=2) + "\n")


def read_manifest(
    directory: Path,
    kind: str,
    check_crc: bool = False,
    wanted: Callable[[str], bool] = lambda name: True,
) -> dict[str, Any]:
    """Reads `manifest.json` and checks that every file it names is there with its size.

    Args:
        directory: the dataset or checkpoint.
        kind: what it should be: "dataset" or "checkpoint".
        check_crc: also read every file and compare its CRC-32.
        wanted: which files, by relative path, are read for that.

    Raises:
        FileNotFoundError: there is no manifest, or a file it names is missing.
        ValueError: it is of another kind or version, or a file has another size or CRC-32.
    """
    path = directory / MANIFEST
    if not path.is_file():
        made_by = f"; {_PREPARED_BY[kind]} makes one" if kind in _PREPARED_BY else ""
        raise FileNotFoundError(
            f"{path}: no such file, so {directory} is not a complete {kind}{made_by}"
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        found, version = manifest["kind"], manifest["version"]
        files = {name: (f["bytes"], f["crc32"]) for name, f in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a manifest ({error!r})") from error
    if (found, version) != (kind, 1):
        raise ValueError(
            f"{path}: expected a {kind} of version 1, got a {found} of version {version}"
        )
    for name, (expected_bytes, expected_crc) in files.items():
        file = directory / name
        if not file.is_file():
            raise FileNotFoundError(f"{file}: missing, though {path} names it")
        if (size := file.stat().st_size) != expected_bytes:
            raise ValueError(f"{file}: expected {expected_bytes} bytes, got {size}")
        if check_crc and wanted(name) and (crc := crc32(file)) != expected_crc:
            raise ValueError(f"{file}: expected CRC-32 {expected_crc}, got {crc}: damaged")
    return manifest
