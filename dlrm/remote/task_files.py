"""Files of tasks on machines that share no folder: fetched from a store, and written to it.

Tasks are functions over local paths. Those of a run whose folders are in a store get paths in a
directory of their own, where `ROOT/<scheme>/<bucket>/<key>` stands for the object of that key:

* `fetch`, `open_input`, `read_ranges` and `shared` have what a task reads on this machine. A task
  fetches the bytes that it needs, and a machine fetches files that all tasks read once.
* Whatever else is in the directory when the task ends is uploaded, and the directory removed.
* Rows that tasks write into a common file of the dataset, with `write_slice`, become one object of
  the task, whose slices the published dataset joins.

The names and the bytes of all these objects are determined by the run and the task, so attempts of
a task write the same objects, one after another or at the same time. Outside of such a run, all
functions use local files.
"""

import ctypes
import io
import os
import pickle
import shutil
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from fcntl import LOCK_EX, flock
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from dlrm.locks import new_suffix
from dlrm.manifest import slice_sums
from dlrm.mapped_files import map_npy
from dlrm.remote.cache import STREAMS  # paths from which messages make URIs

if TYPE_CHECKING:
    import numpy as np

    from dlrm.remote.store import Entry, Store
    from dlrm.remote.uri import Uri

Range = tuple[str, int, int]  # a file, and the bytes of it from one to another
END_BYTES, _PARQUET = 1 << 16, b"PAR1"
_ARENA_MAX = -8  # M_ARENA_MAX of <malloc.h>
_AHEAD = 16  # ranges that are requested before the first is used
_BUFFER_BYTES = 1 << 22  # of an input that is read from its beginning to its end
_active: ContextVar["NodeFiles | None"] = ContextVar("_active", default=None)  # of this thread


def path_of(uri: "Uri") -> str:
    """Returns the path of a URI below a root."""
    return f"{uri.scheme}/{uri.authority}/{uri.key.rstrip('/')}"


def is_active() -> bool:
    """Returns whether the files of this task, or of the driver of a run, are in a store."""
    return _active.get() is not None


def of_driver() -> "NodeFiles":
    """Returns the driver's files, see `driver_files`."""
    files = _active.get()
    assert files is not None, "no driver_files"
    return files


def fetch(path: str | os.PathLike, ranges: Sequence[tuple[int, int]] | None = None) -> None:
    """Has a file, or some bytes of it, on this machine; the file then has its full size."""
    if (files := _active.get()) is not None:
        files.fetch(os.fspath(path), ranges)


def fetch_ends(path: str | os.PathLike) -> None:
    """Has the first and the last bytes of a file, of Parquet those that describe its groups."""
    if (files := _active.get()) is not None:
        files.fetch_ends(os.fspath(path))


def open_input(path: str | os.PathLike, end: int | None = None) -> BinaryIO:
    """Opens a file to read it from some place on, to about `end` if that is not its end."""
    if (files := _active.get()) is None:
        return open(path, "rb")
    return io.BufferedReader(_Object(files, os.fspath(path), end), _BUFFER_BYTES)


def read_ranges(ranges: Iterable[Range]) -> Iterator[bytes]:
    """Yields bytes of files, in the given order."""
    if (files := _active.get()) is not None:
        yield from files.read_ranges(ranges)
        return
    for path, begin, end in ranges:
        with open(path, "rb") as file:
            file.seek(begin)
            yield file.read(end - begin)


def map_arrays(paths: Sequence[Path]) -> "Iterator[np.ndarray]":
    """Yields the arrays of small files in NumPy's format, of which all tasks read some."""
    files = _active.get()
    yield from map(map_npy, paths if files is None else files.shared_files(paths))


def shared(folder: str) -> str:
    """Returns a folder with all files of another one, which all tasks read."""
    files = _active.get()
    return folder if files is None else files.shared(folder)


def write_slice(path: Path, place: int, parts: Iterable[memoryview]) -> bool:
    """Writes bytes of a file of the dataset; returns False, and writes none, of a local one."""
    if (files := _active.get()) is None:
        return False
    files.write_slice(path, place, parts)
    return True


class RunFiles(NamedTuple):
    """The places of a run, for its tasks.

    Attributes:
        root: the driver's directory, of which tasks have their own.
        state: the folder of intermediate files and results, relative to `root`.
        data: the folder of the dataset, likewise.
        node: directory for the tasks of this machine; None for that of Spark's executor.
        name: digits that other runs do not have.
    """

    root: str
    state: str
    data: str
    node: str | None
    name: str


class NodeFiles:
    """The files of a task, or of the driver, in a directory that stands for those of stores.

    Args:
        common: directory for the files that all tasks of this machine read; None for the driver,
            whose directory stays.
        entries: path relative to `root` -> object, of inputs, which must not change.
    """

    def __init__(self, root: str, common: str | None, entries: "dict[str, Entry]") -> None:
        self.root, self.entries, self.fetched = root, entries, set[str]()
        self._common, self._pack = common, f"{root}/pack"
        self._done = set[tuple[str, tuple[tuple[int, int], ...] | None]]()
        self.slices: list[tuple[str, int, int, list[int]]] = []

    def store_of(self, path: str) -> "tuple[Store, str]":
        """Returns the bucket and the key of a path."""
        from dlrm.remote.store import open_store
        from dlrm.remote.uri import Uri

        scheme, authority, key = os.path.relpath(path, self.root).split("/", 2)
        return open_store(Uri(scheme, authority)), key

    def entry(self, path: str) -> "Entry":
        """Returns the object of a path: of an input the one that the driver has found."""
        known = self.entries.get(os.path.relpath(path, self.root))
        if known is None:
            store, key = self.store_of(path)
            return store.entry(key)
        return known

    def _reading(self, path: str) -> "tuple[Store, Entry]":
        """Returns an object to read known ranges of, for which nobody has to ask for its size."""
        from dlrm.remote.store import Entry

        store, key = self.store_of(path)
        known = self.entries.get(os.path.relpath(path, self.root))
        return store, known or Entry(key, 0, "size unknown", 0.0)

    def fetch(self, path: str, ranges: Sequence[tuple[int, int]] | None) -> None:
        """Has a file, or some bytes of it; see the function."""
        from dlrm.remote.transfer import Wanted, download, write_at

        wanted = (path, None if ranges is None else tuple(ranges))
        if wanted in self._done:
            return
        store, _ = self.store_of(path)
        entry = self.entry(path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self.fetched.add(path)
        self._done.add(wanted)
        if ranges is None:
            download(store, [Wanted(entry, path)])
            return
        with open(path, "ab") as file:
            file.truncate(entry.size)
        blocks = [
            (place, min(place + _BUFFER_BYTES, end, entry.size))
            for begin, end in ranges
            for place in range(begin, min(end, entry.size), _BUFFER_BYTES)
        ]
        with open(path, "r+b", buffering=0) as file:
            contents = _in_order(lambda one: store.read(entry, *one), blocks)
            for (begin, _), content in zip(blocks, contents, strict=True):
                write_at(file.fileno(), content, begin)

    def fetch_ends(self, path: str) -> None:
        """Has the first and the last bytes of a file; see the function."""
        size = self.entry(path).size
        tail = max(size - END_BYTES, 0)
        self.fetch(path, [(0, END_BYTES), (tail, size)] if tail else [(0, size)])
        with open(path, "rb") as file:
            if file.read(4) != _PARQUET or size < 12:
                return
            file.seek(size - 8)
            footer = int.from_bytes(file.read(4), "little") + 8
        if END_BYTES < footer < size:
            self.fetch(path, [(size - footer, tail)])

    def read_ranges(self, ranges: Iterable[Range]) -> Iterator[bytes]:
        """Yields bytes of files; see the function."""

        def read(one: Range) -> bytes:
            path, begin, end = one
            if begin >= end:
                return b""
            store, entry = self._reading(path)
            return bytes(store.read(entry, begin, end))

        yield from _in_order(read, ranges)

    def shared_files(self, paths: Sequence[Path]) -> list[Path]:
        """Returns the places of small files, which this machine fetches once."""
        if self._common is None:
            for path in paths:
                if not path.exists():
                    self.fetch(str(path), None)
            return list(paths)
        places = [Path(self._common, path.relative_to(self.root)) for path in paths]
        left = [pair for pair in zip(paths, places, strict=True) if not pair[1].exists()]

        def copy(pair: tuple[Path, Path]) -> None:
            store, key = self.store_of(str(pair[0]))
            content = store.read(store.entry(key))
            pair[1].parent.mkdir(parents=True, exist_ok=True)
            partial = pair[1].with_name(f".{pair[1].name}.{new_suffix()}")
            partial.write_bytes(content)
            partial.rename(pair[1])

        for _ in _in_order(copy, left):
            pass
        return places

    def shared(self, folder: str) -> str:
        """Returns a folder with all files of another one; see the function."""
        if self._common is None:
            return folder
        from dlrm.remote.transfer import Wanted, download

        place = Path(self._common, os.path.relpath(folder, self.root))
        complete = place.with_name(f".{place.name}.complete")
        place.mkdir(parents=True, exist_ok=True)
        with open(place.with_name(f".{place.name}.lock"), "w") as lock:
            flock(lock, LOCK_EX)
            if not complete.exists():
                store, key = self.store_of(folder)
                entries = store.entries(f"{key}/")
                paths = [f"{place}/{entry.key.removeprefix(f'{key}/')}" for entry in entries]
                for path in paths:
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                download(store, [Wanted(*pair) for pair in zip(entries, paths, strict=True)])
                complete.touch()
        return str(place)

    def write_slice(self, path: Path, place: int, parts: Iterable[memoryview]) -> None:
        """Writes bytes of a file of the dataset; see the function."""
        with open(self._pack, "ab") as pack:
            for part in parts:
                name = os.path.relpath(path, self.root)
                self.slices.append((name, place, len(part), slice_sums(place, part)))
                pack.write(part)
                place += len(part)

    def upload(self, told: RunFiles, task: str) -> dict[str, Any]:
        """Uploads what a task has written; returns the facts of its slices, in an object `task`."""
        from dlrm.remote.transfer import upload

        files: dict[str, Path] = {}
        for folder, _, names in os.walk(self.root):
            for path in (f"{folder}/{name}" for name in names):
                if path not in self.fetched and path != self._pack:
                    store, key = self.store_of(path)
                    files[key] = Path(path)
        facts: dict[str, Any] = {}
        if self.slices:
            store, key = self.store_of(f"{self.root}/{told.data}/{task}")
            files[key] = Path(self._pack)
            own = [(os.path.relpath(name, told.data), *rest) for name, *rest in self.slices]
            facts = {"object": task, "slices": own}
        if len(files) == 1:
            ((key, file),) = files.items()
            store.write(key, file)
        elif files:
            upload(store, files)
        return facts


def _in_order(act: Any, items: Iterable[Any]) -> Iterator[Any]:
    """Yields the results for items, with some of them at work ahead."""
    items = iter(items)
    first = list(islice(items, _AHEAD))
    if len(first) < 2:  # without threads
        yield from map(act, first)
        return
    with ThreadPoolExecutor(_AHEAD) as pool:
        waiting = deque(pool.submit(act, item) for item in first)
        try:
            while waiting:
                result = waiting.popleft().result()
                waiting.extend(pool.submit(act, item) for item in islice(items, 1))
                yield result
        finally:
            pool.shutdown(cancel_futures=True)


class _Object(io.RawIOBase):
    """An object as a file that is read in ranges, the next of which is fetched meanwhile.

    Args:
        end: expected end of reading; data behind it are read in small ranges.
    """

    def __init__(self, files: NodeFiles, path: str, end: int | None) -> None:
        self._store, _ = files.store_of(path)
        self._entry, self._place = files.entry(path), 0
        self._end = self._entry.size if end is None else min(end, self._entry.size)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        self._ahead: tuple[int, int, Future[Any]] | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = (0, self._place, self._entry.size)[whence]
        self._place = base + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def close(self) -> None:
        if not self.closed:
            self._pool.shutdown(wait=False, cancel_futures=True)
        super().close()

    def readinto(self, buffer: Any) -> int:
        if self._ahead is not None and self._ahead[0] == self._place:
            end, content = self._ahead[1], self._ahead[2].result()
        else:
            end = self._range_end(self._place)
            content = self._store.read(self._entry, self._place, end)
        content = memoryview(content)[: len(buffer)]
        buffer[: len(content)] = content
        self._place, self._ahead = self._place + len(content), None
        if len(content) and self._place == end < self._end:
            following = self._range_end(end)
            future = self._pool.submit(self._store.read, self._entry, end, following)
            self._ahead = end, following, future
        return len(content)

    def _range_end(self, place: int) -> int:
        if place < self._end:
            return min(place + _BUFFER_BYTES, self._end)
        return min(place + END_BYTES, self._entry.size)


class _Packing(pickle.Pickler):
    """Pickles tasks with the paths below a root as such, and collects the inputs among them."""

    def __init__(self, file: Any, root: str, entries: "Mapping[str, Entry]") -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._root, self._entries = root, entries
        self.inputs: dict[str, Entry] = {}

    def persistent_id(self, obj: Any) -> Any:
        """Returns the facts from which `_Unpacking` makes a path; None for other objects."""
        if not isinstance(obj, str | Path):
            return None
        text = str(obj)
        if text != self._root and not text.startswith(f"{self._root}/"):
            return None
        name = os.path.relpath(text, self._root)
        if name in self._entries:
            self.inputs[name] = self._entries[name]
        return name, isinstance(obj, Path), os.path.isdir(text)


class _Unpacking(pickle.Unpickler):
    def __init__(self, content: bytes, root: str) -> None:
        super().__init__(io.BytesIO(content))
        self._root = root

    def persistent_load(self, pid: Any) -> Any:
        """Returns a path below another root, with its folders."""
        name, is_path, is_folder = pid
        text = f"{self._root}/{name}"
        os.makedirs(text if is_folder else os.path.dirname(text), exist_ok=True)
        return Path(text) if is_path else text


def packed(work: Any, root: str, entries: "Mapping[str, Entry]") -> "tuple[bytes, dict]":
    """Returns a task or an item for `unpacked`, and the inputs that it names, by path.

    Args:
        root: directory of whose paths there are others on each machine.
        entries: see `NodeFiles`.
    """
    content = io.BytesIO()
    packing = _Packing(content, root, entries)
    packing.dump(work)
    return content.getvalue(), packing.inputs


def run_task(told: RunFiles, stage: str, task: bytes, item: "tuple[int, bytes, dict]") -> None:
    """Runs a task of a run on this machine, uploads what it writes, and last its result.

    `task` is a packed function that returns JSON, and `item` a number, its packed argument, and
    inputs.
    """
    import json

    number, content, entries = item
    with attempt(told, entries) as files:
        function, work = (_Unpacking(one, files.root).load() for one in (task, content))
        result = {"result": function(work)} | files.upload(told, f"{stage}.{number}")
        store, key = files.store_of(f"{files.root}/{told.state}/{stage}.tasks/{number}.json")
        store.write(key, json.dumps(result).encode())


def run_function(told: RunFiles, task: bytes, argument: Any) -> Any:
    """Returns the result of a packed function that reads no files, and uploads what it writes."""
    with attempt(told, {}) as files:
        result = _Unpacking(task, files.root).load()(argument)
        files.upload(told, "")
        return result


@cache
def _return_memory() -> None:
    """Makes the threads of this process share the C library's heap.

    What threads that fetch have freed would otherwise stay in a heap of each: 139 instead of 89 MiB
    of a process that sorts a bucket.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:  # of glibc
        mallopt(_ARENA_MAX, 1)


@contextmanager
def attempt(told: RunFiles, entries: "dict[str, Entry]") -> Iterator[NodeFiles]:
    """Has a directory for the files of a task within the block."""
    _return_memory()
    node = told.node and f"{told.node}/{os.getpid()}"
    if node is None:
        local = os.environ.get("SPARK_LOCAL_DIRS") or tempfile.gettempdir()
        node = f"{local.partition(',')[0]}/dlrm-{told.name}"
    root, common = f"{node}/{STREAMS}/{new_suffix()}", f"{node}/{STREAMS}/{told.name}"
    os.makedirs(root)
    try:
        with _activated(NodeFiles(root, common, entries)) as files:
            yield files
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def driver_files(root: str) -> Iterator[NodeFiles]:
    """Has the files of the driver below a directory within the block."""
    with _activated(NodeFiles(root, None, {})) as files:
        yield files


@contextmanager
def _activated(files: NodeFiles) -> Iterator[NodeFiles]:
    before = _active.set(files)
    try:
        yield files
    finally:
        _active.reset(before)
