"""Objects copied to local files and back, many at a time."""

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlrm.files import staged_file
from dlrm.manifest import BLOCK_BYTES, damaged
from dlrm.remote.store import Entry, Store

IN_FLIGHT = 32  # requests; 10,000 small objects of a local server took as long with 64
PART_BYTES = 2 * BLOCK_BYTES  # of a large object, in one request


def download(
    store: Store,
    wanted: Iterable[tuple[Entry, Path, str | None]],
    done: Callable[[int], object] = lambda size: None,
) -> None:
    """Copies objects to files, which appear whole, each with the object's time.

    Args:
        store: the bucket.
        wanted: objects, files and, where a manifest has them, checksums, see
            `dlrm.manifest.Checksum`.
        done: called with the bytes of each object that is there.

    Raises:
        OSError: an object is gone, was replaced, or cannot be read or written; the message has its
            URI, or the file.
        ValueError: a checksum differs; the message has the URI and the bytes.
    """

    def copy(work: tuple[Entry, Path, str | None]) -> int:
        entry, path, checksum = work
        _copy(store, entry, path, checksum, pool)
        return entry.size

    small = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="fetch")
    with ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="parts") as pool, small:
        for size in _all(small, copy, wanted):
            done(size)


def _all(
    pool: ThreadPoolExecutor, act: Callable[[Any], Any], items: Iterable[Any]
) -> Iterator[Any]:
    """Yields results as they come, with a bounded number of items at work; stops at an error."""
    waiting: set[Future[Any]] = set()
    try:
        for item in items:
            waiting.add(pool.submit(act, item))
            if len(waiting) >= 2 * IN_FLIGHT:
                finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in finished)
        while waiting:
            finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in finished)
    finally:
        for future in waiting:
            future.cancel()


def _copy(
    store: Store, entry: Entry, path: Path, checksum: str | None, pool: ThreadPoolExecutor
) -> None:
    parts = range(0, max(entry.size, 1), PART_BYTES)

    def fetch(begin: int) -> list[str]:
        with _unread_named():
            content = store.read(entry, begin, min(begin + PART_BYTES, entry.size))
        os.pwrite(descriptor, content, begin)
        return sums_of(content) if checksum else []

    with staged_file(path, one_of_many=True) as partial:
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            sums = [fetch(0)] if len(parts) == 1 else pool.map(fetch, parts)
            found = "".join(crc for part in sums for crc in part)
        finally:
            os.close(descriptor)
        if checksum is not None:
            check_sums(store, entry, partial, checksum, found)
        os.utime(partial, (entry.modified, entry.modified))


class UnreadError(OSError):
    """An object cannot be read; not an error of writing, which gets the name of the file."""


@contextmanager
def _unread_named() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if type(error) is OSError:
            raise UnreadError(*error.args) from error
        raise


def sums_of(content: Any) -> list[str]:
    """Returns the CRC-32 of each block of bytes, as manifests have them."""
    view = memoryview(content)
    return [
        f"{zlib.crc32(view[begin : begin + BLOCK_BYTES]):08x}"
        for begin in range(0, max(len(view), 1), BLOCK_BYTES)
    ]


def check_sums(store: Store, entry: Entry, path: Path, expected: str, found: str) -> None:
    """Raises ValueError if the sums of an object's blocks are not those of its manifest."""
    if len(expected) == 8 < len(found):  # of the whole file, in manifests of version 1
        crc = 0
        with open(path, "rb") as file:
            while block := file.read(BLOCK_BYTES):
                crc = zlib.crc32(block, crc)
        found = f"{crc:08x}"
    if found != expected:
        raise damaged(str(replace(store.root, key=entry.key)), expected, found)


def upload(
    store: Store,
    files: Mapping[str, Path],
    done: Callable[[int], object] = lambda size: None,
) -> None:
    """Writes files as objects, several at a time.

    Args:
        store: the bucket.
        files: key -> file.
        done: called with the bytes of each object that is there.

    Raises:
        OSError: an object cannot be written; the message has its URI.
    """

    def put(item: tuple[str, Path]) -> int:
        key, path = item
        store.write(key, path)
        return path.stat().st_size

    with ThreadPoolExecutor(8, thread_name_prefix="upload") as pool:  # each has several parts
        for size in _all(pool, put, files.items()):
            done(size)


def remove_all(store: Store, keys: Sequence[str]) -> None:
    """Deletes objects, several at a time, as far as it is permitted."""
    with ThreadPoolExecutor(IN_FLIGHT) as pool, suppress(OSError):
        for _ in pool.map(lambda key: store.remove([key]), keys):
            pass
