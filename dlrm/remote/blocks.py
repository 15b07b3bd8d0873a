"""Files of a published directory whose blocks are fetched when they are read: streaming.

A large object is a sparse local file of its full size, which readers map as any other file. They
say which bytes they read next, and these are fetched, compared with the manifest's checksums and
written before they are read. Only so many blocks stay: the least recently used go first.

The files belong to one process, which knows in memory which blocks they have. Files that a killed
process left are removed, not read.
"""

import ctypes
import os
import threading
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from dlrm.locks import OwnedDirectory, remove_abandoned
from dlrm.manifest import BLOCK_BYTES, damaged
from dlrm.remote.cache import STREAMS, Cache
from dlrm.remote.publish import Published
from dlrm.remote.store import Entry, Store, open_store
from dlrm.remote.transfer import write_at

_IN_FLIGHT = 16  # requests of a block each
_AHEAD_BLOCKS, _AHEAD_BATCHES = 128, 2048  # half a GiB, or less of a small cache
_AHEAD_SHARE = 4  # of the blocks that stay, one in this many may be fetched ahead
_PUNCH_HOLE = 1 | 2  # FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE of <linux/falloc.h>
_fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)  # of Linux
_open_directories: dict[Path, "StreamedDirectory"] = {}

Span = tuple["StreamedFile", int, int]  # a file, and the bytes of it from one to another


@contextmanager
def streamed_directory(
    cache: Cache, found: Published, streamed: Container[str], limit: int
) -> Iterator[Path]:
    """Yields a directory with the files of a published one, some of which are streamed.

    Within the block `find_streamed` returns it. The other files are fetched before.

    Args:
        streamed: names of the files to stream, with a checksum for each of their blocks.
        limit: bytes of blocks that stay. More stay only while readers use them at one time.

    Raises:
        OSError, ValueError: see `Cache.fetched`; or the blocks of files in the cache cannot be
            freed.
    """
    uri, entries = found.uri, found.entries
    whole = [name for name in entries if name not in streamed]
    place, parent = replace(uri, key=uri.folder), cache.folder / STREAMS
    parent.mkdir(exist_ok=True)
    remove_abandoned(parent, "")
    with cache.fetched(place, found.listing(without=streamed)) as fetched:
        owned = OwnedDirectory(parent, "")
        path = cache.path_in(owned.path, place)
        for name in entries:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
        for name in whole:
            os.link(fetched / name, path / name)
        directory = StreamedDirectory(open_store(uri), limit)
        try:
            for name, entry in entries.items():
                if name not in whole:
                    directory.add(path / name, entry, found.checksums[entry.key])
            _open_directories[path] = directory
            yield path
        finally:
            _open_directories.pop(path, None)
            directory.close()
            owned.remove()


def find_streamed(path: Path) -> "StreamedDirectory | None":
    """Returns the streamed directory at a path, if this process has opened one there."""
    return _open_directories.get(path)


class StreamedDirectory:
    """The streamed files of a directory, and the blocks of them that are present.

    Safe to use from several threads, but not in forked processes.

    A thread that touches blocks of a file holds them until it touches others of the same file,
    releases all, or ends. A reader touches the bytes that it wants of a file once and copies them
    before it does either, so all that it copies is held. Blocks are held before they are found
    present or waited for, and freed under the same lock, so a block that was waited for is still
    there. What is held counts toward the limit, but is never freed: with a small limit more blocks
    stay than it allows.

    Args:
        limit: bytes of blocks that stay.
    """

    def __init__(self, store: Store, limit: int) -> None:
        self._store, self._limit = store, max(limit // BLOCK_BYTES, 1)
        self.ahead = min(_AHEAD_BLOCKS, self._limit // _AHEAD_SHARE)
        self._files: dict[Path, StreamedFile] = {}
        self._lock, self._process = threading.Lock(), os.getpid()
        self._pool = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="blocks")
        self._present: OrderedDict[_Block, None] = OrderedDict()  # least recently used first
        self._fetching: dict[_Block, Future[None]] = {}
        self._held: WeakKeyDictionary[threading.Thread, dict[StreamedFile, Sequence[int]]] = (
            WeakKeyDictionary()
        )
        self._taken = 0  # blocks with bytes on the disk, also those that are being written
        self.fetched_blocks = 0

    def add(self, path: Path, entry: Entry, checksum: str) -> None:
        """Adds a file, which is created without blocks; see `StreamedFile`."""
        with open(path, "wb") as file:
            file.truncate(entry.size)
        if not self._files:
            _free(path, 0)  # raises where it cannot
        self._files[path] = StreamedFile(self, path, entry, checksum)

    def file(self, path: Path) -> "StreamedFile | None":
        """Returns a streamed file, or None for a path of another."""
        return self._files.get(path)

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def hold(self, file: "StreamedFile", blocks: Sequence[int]) -> None:
        """Waits until blocks are present, and keeps them; see the class."""
        assert os.getpid() == self._process, "streamed files in a forked process"
        with self._lock:
            self._held.setdefault(threading.current_thread(), {})[file] = blocks
            waiting = [one for block in blocks if (one := self._started((file, block)))]
        for future in waiting:
            future.result()

    def release(self) -> None:
        """Lets the blocks be freed that this thread holds, as it has copied what it wants."""
        with self._lock:
            self._held.pop(threading.current_thread(), None)

    def request(self, file: "StreamedFile", blocks: Iterable[int]) -> int:
        """Starts to fetch those blocks that are not present; returns their number."""
        with self._lock:
            before = len(self._fetching)
            for block in blocks:
                self._started((file, block))
            return len(self._fetching) - before

    def _started(self, key: "_Block") -> Future[None] | None:
        """Returns the fetch of a block, started where there is none; None for a present one."""
        if key in self._present:
            self._present.move_to_end(key)
            return None
        if key not in self._fetching:
            self._fetching[key] = self._pool.submit(self._fetch, key)
        return self._fetching[key]

    def _fetch(self, key: "_Block") -> None:
        file, block = key
        taken = False
        try:
            content = file.fetched(self._store, block)
            with self._lock:
                self._make_room()
                self._taken, taken = self._taken + 1, True
            file.write(self._store, block, content)
        except BaseException:
            with self._lock:
                del self._fetching[key]
                self._taken -= taken
            raise
        with self._lock:  # at once, so that it is present or fetched at any time
            del self._fetching[key]
            self._present[key] = None
            self.fetched_blocks += 1

    def _make_room(self) -> None:
        """Frees blocks until there is room for one more, or all are held."""
        if self._taken < self._limit:
            return
        held = {
            (file, block)
            for files in self._held.values()
            for file, blocks in files.items()
            for block in blocks
        }
        while self._taken >= self._limit:
            key = next((key for key in self._present if key not in held), None)
            if key is None:
                return
            _free(key[0].path, key[1])
            del self._present[key]
            self._taken -= 1


class StreamedFile:
    """A file of a `StreamedDirectory`; takes the place of `dlrm.data.verification.CheckedFile`.

    Args:
        checksum: checksum of each block; see `dlrm.manifest.Checksum`.
    """

    is_done = False  # there is always something to touch

    def __init__(
        self, directory: StreamedDirectory, path: Path, entry: Entry, checksum: str
    ) -> None:
        self.directory, self.path = directory, path
        self._entry, self._sums = entry, checksum

    def touch(self, begin: int, end: int) -> None:
        """Waits until the bytes from `begin` to `end` can be read; see `StreamedDirectory`.

        Raises:
            OSError: the object is gone, was replaced, or cannot be read, or the disk is full; the
                message has its URI.
            ValueError: a block is damaged; the message has its URI and the bytes.
        """
        if end > begin:
            self.directory.hold(self, _blocks(begin, end))

    def touch_rows(self, rows: np.ndarray, row_bytes: int) -> None:
        """Waits for rows in any order; see `touch`."""
        if len(rows):
            first, last = rows * row_bytes, (rows + 1) * row_bytes - 1
            blocks = np.union1d(first // BLOCK_BYTES, last // BLOCK_BYTES)
            self.directory.hold(self, blocks.tolist())

    def touch_all(self) -> None:
        """Fetches the whole file, of which not all blocks may stay; see `touch`."""
        for block in _blocks(0, self._entry.size):
            self.directory.hold(self, [block])

    def fetched(self, store: Store, block: int) -> Any:
        """Returns the bytes of a block, after a second request for those that are damaged."""
        begin = block * BLOCK_BYTES
        expected = self._sums[8 * block : 8 * block + 8]
        for _ in range(2):
            content = store.read(self._entry, begin, min(begin + BLOCK_BYTES, self._entry.size))
            if (actual := f"{zlib.crc32(content):08x}") == expected:
                return content
        raise damaged(self._uri(store), expected, actual, block)

    def write(self, store: Store, block: int, content: Any) -> None:
        """Writes the bytes of a block, which readers see in their maps at once."""
        try:
            with open(self.path, "r+b", buffering=0) as file:
                write_at(file.fileno(), content, block * BLOCK_BYTES)
        except OSError as error:
            raise OSError(
                f"{self._uri(store)}: cannot be written to the cache ({error.strerror}); name a "
                "larger disk by --cache_dir"
            ) from error

    def _uri(self, store: Store) -> str:
        return str(replace(store.root, key=self._entry.key))


_Block = tuple[StreamedFile, int]


def fetched_ahead(
    order: Sequence[int], spans: Callable[[int], Iterable[Span]], blocks: int
) -> Iterator[int]:
    """Yields an order of batches, and has the blocks of those that follow fetched meanwhile.

    Args:
        order: the batches.
        spans: returns the bytes that a batch needs.
        blocks: number of blocks to fetch ahead; those of a batch that is yielded always are.
    """
    asked: dict[StreamedFile, range] = {}
    started: deque[tuple[int, int]] = deque()  # place in the order, blocks
    under_way = following = 0
    for place, index in enumerate(order):
        while started and started[0][0] <= place:
            under_way -= started.popleft()[1]
        end = min(place + _AHEAD_BATCHES, len(order))
        while following <= place or (following < end and under_way < blocks):
            count = 0
            for file, first, last in spans(order[following]):
                wanted = _blocks(first, last)
                if asked.get(file) != wanted:
                    asked[file] = wanted
                    count += file.directory.request(file, wanted)
            if following > place:
                started.append((following, count))
                under_way += count
            following += 1
        yield index


def _blocks(begin: int, end: int) -> range:
    return range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES))


def _free(path: Path, block: int) -> None:
    """Removes the bytes of a block from the disk, and from all maps of the file."""
    error = "this system cannot"
    if _fallocate is not None:
        with open(path, "r+b", buffering=0) as file:
            place = ctypes.c_int64(block * BLOCK_BYTES), ctypes.c_int64(BLOCK_BYTES)
            if _fallocate(file.fileno(), _PUNCH_HOLE, *place) == 0:
                return
        error = os.strerror(ctypes.get_errno())
    raise OSError(f"{path}: its blocks cannot be freed ({error}); name another disk by --cache_dir")
