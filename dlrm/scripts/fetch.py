"""Copies what is at a URI to a new directory: dlrm fetch URI DIR

    dlrm fetch s3://bucket/dataset dataset
    dlrm fetch 's3://bucket/logs/day=*' logs

A dataset, a checkpoint or a run that was published becomes the directory that it was, compared with
its checksums; other objects become files below DIR, with their names below the URI. Many objects
are copied at a time. DIR appears when it is complete, and the same command resumes one that was
stopped.
"""

import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dlrm.files import check_relative, check_replaceable, make_directories, publish_directory
from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.settings import REQUIRED, setting


@dataclass(frozen=True)
class FetchConfig:
    """The place of the objects, and of the files; field names are those of the arguments."""

    uri: str = setting(
        REQUIRED,
        "an object, a published directory, a prefix or a pattern",
        positional=True,
        uri="own",
    )
    directory: Path = setting(REQUIRED, "directory to write, new or empty", positional=True)


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    line = ConfigFlags([("Flags", FetchConfig)])
    hint = "the same command resumes the copy"
    return run_command(line, _run, __doc__, arguments, usage=2, hint=hint)


def _run(values: Values) -> None:
    from tqdm import tqdm

    own = values.config(FetchConfig)
    with tqdm(unit="B", unit_scale=True, disable=None) as bar:

        def total(size: int) -> None:
            bar.total = size
            bar.refresh()

        files, size = fetch(own.uri, own.directory, bar.update, total)
    print(f"{own.directory}: {files:,} files, {size:,} bytes from {own.uri}")


def fetch(
    text: str,
    directory: Path,
    done: Callable[[int], object] = lambda size: None,
    total: Callable[[int], object] = lambda size: None,
) -> tuple[int, int]:
    """Copies objects to a directory, which appears when it is complete.

    Args:
        done: called with the bytes of each file that is there.
        total: called with the bytes of all files, before the first.

    Returns:
        The number of files, and their bytes.

    Raises:
        FileExistsError: the directory exists and is not empty.
        BlockingIOError: another process copies there.
        OSError: an object cannot be read, or the files cannot be written.
        ValueError: no URI, or an object is damaged.
    """
    from dlrm.remote.publish import listing_of
    from dlrm.remote.store import open_store, total_bytes
    from dlrm.remote.transfer import Wanted, download
    from dlrm.remote.uri import Uri

    uri, final = Uri.parse(text), directory.resolve()
    check_replaceable(final, replace=False)
    listing = listing_of(uri)
    base = uri.before_pattern() if uri.has_pattern else uri.folder
    places = {}
    for entry in listing.entries:
        name = listing.names.get(entry.key, entry.key)
        name = name.removeprefix(base) if name.startswith(base) else uri.name
        check_relative(name, str(uri))
        places[name] = entry
    with _work_folder(final) as work:
        there = {path for path in work.rglob("*") if path.is_file()}
        whole = set()
        for path in there:
            listed = places.get(path.relative_to(work).as_posix())
            status = path.stat()
            if listed and (status.st_size, status.st_mtime) == (listed.size, listed.modified):
                whole.add(path)
            else:  # of another version, or left by a process that was killed
                path.unlink()
        size = total_bytes([*places.values()])
        total(size)
        done(sum(path.stat().st_size for path in whole))
        files = {work / name: entry for name, entry in places.items()}
        for folder in {path.parent for path in files}:
            folder.mkdir(parents=True, exist_ok=True)
        wanted = [
            Wanted(entry, str(path), listing.checksums.get(entry.key))
            for path, entry in files.items()
            if path not in whole
        ]
        download(open_store(uri), wanted, done)
        publish_directory(work, final, replace=False)
    return len(places), size


@contextmanager
def _work_folder(final: Path) -> Iterator[Path]:
    """Yields the folder beside a directory in which it is made, for this process alone."""
    work = final.with_name(f".{final.name}.fetched")
    make_directories(work)
    held = os.open(work, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"{final}: another process copies there") from None
        yield work
    finally:
        os.close(held)


if __name__ == "__main__":
    sys.exit(main())
