"""Objects copied to local files and back, many at a time."""

import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from dlrm.locks import new_suffix
from dlrm.manifest import BLOCK_BYTES, damaged
from dlrm.remote.store import Entry, Store

IN_FLIGHT = 32  # requests; 10,000 small objects of a local server took as long with 64
PART_BYTES = 2 * BLOCK_BYTES  # of a large object, in one request
_BATCH = 32  # small objects of a task


class Wanted(NamedTuple):
    """An object to fetch.

    Attributes:
        entry: the object.
        path: the file, which appears whole.
        checksum: see `dlrm.manifest.Checksum`; None where no manifest has it.
        name: a second name of the file.
    """

    entry: Entry
    path: str
    checksum: str | None = None
    name: str | None = None


def download(store: Store, wanted: Sequence[Wanted]) -> None:
    """Copies objects to files, each with the object's time.

    Nothing waits until they are on the disk: after a power failure a file may be shorter.

    Args:
        wanted: objects and files, whose folders exist.

    Raises:
        OSError: an object is gone, was replaced, or cannot be read or stored; the message has its
            URI.
        ValueError: a checksum differs; the message has the URI and the bytes.
    """

    def copy(some: Sequence[Wanted]) -> None:
        for one in some:
            _copy(store, one, pool)

    small = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="fetch")
    with ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="parts") as pool, small:
        for _ in small.map(copy, _batches(wanted)):
            pass


def _batches(wanted: Sequence[Wanted]) -> Iterator[list[Wanted]]:
    """Yields the objects that one thread fetches: several small ones, since a task takes time."""
    most = max(1, min(_BATCH, len(wanted) // (4 * IN_FLIGHT)))
    batch: list[Wanted] = []
    size = 0
    for one in wanted:
        batch.append(one)
        size += one.entry.size
        if len(batch) >= most or size >= PART_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _copy(store: Store, wanted: Wanted, pool: ThreadPoolExecutor) -> None:
    entry, path, checksum, name = wanted
    partial = f"{path}.partial-{new_suffix()}"

    def fetch(begin: int) -> list[str]:
        content = store.read(entry, begin, min(begin + PART_BYTES, entry.size))
        write_at(descriptor, content, begin)
        return _sums_of(content) if checksum else []

    try:
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            if entry.size <= PART_BYTES:
                sums = fetch(0)
            else:
                parts = pool.map(fetch, range(0, entry.size, PART_BYTES))
                sums = [crc for part in parts for crc in part]
            if checksum is not None and checksum != "".join(sums):
                place = str(replace(store.root, key=entry.key))
                raise damaged(place, checksum, "".join(sums))
            os.utime(descriptor, (entry.modified, entry.modified))
        finally:
            os.close(descriptor)
        os.rename(partial, path)
        if name is not None:
            link(path, name)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(partial)
        if isinstance(error, OSError) and error.errno is not None:  # not of the store
            uri, folder = replace(store.root, key=entry.key), os.path.dirname(path)
            raise OSError(f"{uri}: cannot be stored in {folder}: {error.strerror}") from error
        raise


def link(target: str, path: str) -> None:
    """Gives a file a second name, which may be another file's so far."""
    try:
        os.link(target, path)
    except FileExistsError:
        with suppress(FileNotFoundError):  # another process does the same
            os.unlink(path)
        os.link(target, path)


def write_at(descriptor: int, content: Any, begin: int) -> None:
    """Writes all bytes of a buffer from a place in a file on."""
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view, begin)
        view, begin = view[written:], begin + written


def _sums_of(content: Any) -> list[str]:
    """Returns the CRC-32 of each block of bytes, as manifests have them."""
    view = memoryview(content)
    return [
        f"{zlib.crc32(view[begin : begin + BLOCK_BYTES]):08x}"
        for begin in range(0, max(len(view), 1), BLOCK_BYTES)
    ]


def upload(
    store: Store,
    files: Mapping[str, Path],
    done: Callable[[int], object] = lambda size: None,
) -> None:
    """Writes files, by key, as objects, several at a time; calls `done` with the bytes of each.

    Raises:
        OSError: an object cannot be written; the message has its URI.
    """

    def put(item: tuple[str, Path]) -> int:
        key, path = item
        store.write(key, path)
        return path.stat().st_size

    with ThreadPoolExecutor(8, thread_name_prefix="upload") as pool:  # each has several parts
        for size in pool.map(put, files.items()):
            done(size)


def remove_all(store: Store, keys: Sequence[str]) -> None:
    """Deletes objects, several at a time, as far as it is permitted."""
    with ThreadPoolExecutor(IN_FLIGHT) as pool, suppress(OSError):
        for _ in pool.map(store.remove, keys):
            pass
