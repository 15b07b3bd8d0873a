"""Files of a run of Spark whose executors share no folder with the driver, in its output's store.

    URI/data-unfinished/   `folders` of the driver, which tasks read, `work`, files that tasks have
                           written for later ones, and `rows`, which the driver joins to files

The driver knows input by a file of its size, with its first and last bytes. An executor makes such
a file with the bytes that a part needs. Both have paths from which `shown` makes the URI.
"""

import hashlib
import io
import os
import pickle
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dlrm.data.tables.parts import footer_begin
from dlrm.locks import new_suffix
from dlrm.remote.cache import Cache, Listing
from dlrm.remote.objects import (
    Entry,
    Wanted,
    download,
    find_entries,
    open_store,
    upload,
    write_at,
)
from dlrm.remote.publish import RUN, listing_of
from dlrm.remote.uri import Local, Uri, is_uri, shown

_STREAMS = "streams"
_HEAD_BYTES, _TAIL_BYTES = 1 << 18, 1 << 16
_BLOCK_BYTES = 1 << 22
_WHOLE = (b"ORC", b"ARROW1", b"\xff\xff\xff\xff")  # begin inputs that the driver reads whole
_PARQUET = b"PAR1"
_Range = tuple[int, int, bool]  # begin and end, and whether also the rest of the last line


class Input(NamedTuple):
    """An object that a task reads, and the bytes of it; None is all."""

    uri: Uri
    entry: Entry
    ranges: list[_Range] | None = None


class Packed(NamedTuple):
    """A task or an item, with names in place of paths, and the input that it reads."""

    content: bytes
    inputs: dict[str, Input]


_inputs: dict[str, Input] = {}  # path of the driver -> object


class StoredFiles:
    """The files of a run, as the driver has them.

    Args:
        uri: URI of the output.
        work: the driver's folder of work on it.

    Attributes:
        data: URI for the rows that executors write.
    """

    def __init__(self, uri: Uri, work: Path) -> None:
        self._run, self.work = uri.below(RUN), str(work)
        self.data, self._shipped = self._run.below("rows"), set[str]()
        self.adopt_new()

    def call(self, task: Callable) -> Callable:
        """Returns what calls a task on an executor, where the task and items have files."""
        return partial(_called, self._run, _relative(self.work), self.pack(task))

    def pack(self, task: Any) -> Packed:
        """Returns a task or an item for executors."""
        packing = _Packing(content := io.BytesIO(), self)
        packing.dump(task)
        for item in task if type(task) is tuple else (task,):
            if hasattr(item, "ranges"):
                ranges = defaultdict[str, list[_Range]](list)
                for path, begin, end, *is_text in item.ranges():
                    ranges[path].append((begin, end, any(is_text)))
                own = {path: _inputs[path]._replace(ranges=some) for path, some in ranges.items()}
                packing.inputs = own
        return Packed(content.getvalue(), {_relative(p): own for p, own in packing.inputs.items()})

    def adopt_new(self) -> None:
        """Creates placeholders of the files that tasks have written."""
        uri = self._run.below("work")
        for entry in open_store(uri).entries(uri.folder):
            path = f"{self.work}/{entry.key.removeprefix(uri.folder)}"
            if path not in _inputs or _inputs[path].entry != entry:
                _create_placeholder(path, Uri(uri.scheme, uri.authority, entry.key), entry)

    def ship(self, folder: str) -> str:
        """Uploads a folder, once; returns its name."""
        name = f"folders/{hashlib.sha256(folder.encode()).hexdigest()[:16]}"
        if name not in self._shipped:
            uri, paths = self._run.below(name), Path(folder).rglob("*")
            files = {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}
            upload(open_store(uri), {uri.below(own).key: path for own, path in files.items()})
            self._shipped.add(name)
        return name


class _Packing(pickle.Pickler):
    """Pickles tasks with names in place of paths."""

    def __init__(self, file: Any, files: StoredFiles) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._files = files
        self.inputs: dict[str, Input] = {}

    def persistent_id(self, obj: Any) -> tuple[str, str, bool] | None:
        """Returns the names of a folder and of a file, and whether they are no text."""
        if not isinstance(obj, str | Path):
            return None
        path, is_path = str(obj), isinstance(obj, Path)
        is_inside = path.startswith(f"{self._files.work}/")
        if path in _inputs:
            self.inputs[path] = _inputs[path]
        elif (is_inside or is_path) and os.path.isdir(path):
            return self._files.ship(path), "", is_path
        elif not is_inside:
            return None
        return "", _relative(path), is_path


class _Unpacking(pickle.Unpickler):
    def __init__(self, content: bytes, path_of: Callable[[str, str], Path]) -> None:
        super().__init__(io.BytesIO(content))
        self._path_of = path_of

    def persistent_load(self, pid: Any) -> Any:
        """Returns the path of names on this machine."""
        path = self._path_of(*pid[:2])
        return path if pid[2] else str(path)


def _called(run: Uri, work: str, task: Packed, *arguments: Any) -> Iterator[Any]:
    """Calls a task with arguments, of which the last may be packed, and then has files as well."""
    *others, last = arguments
    if not isinstance(last, Packed):
        with _opened(run, work, task) as (function,):
            yield from function(*arguments)
        return
    try:
        with _opened(run, work, task, last) as (function, item):
            yield from function(*others, item)
    except ValueError:
        # Once more with whole files, as the message has the number of a line.
        whole = {name: one._replace(ranges=None) for name, one in last.inputs.items()}
        with _opened(run, work, task, last._replace(inputs=whole)) as (function, item):
            for _ in function(*others, item):
                pass
        raise


@contextmanager
def _opened(run: Uri, work: str, *packed: Packed) -> Iterator[list[Any]]:
    """Yields tasks and items, with files of their own, and uploads what they have written."""
    from pyspark import SparkFiles

    node = Path(SparkFiles.getRootDirectory(), _STREAMS)  # which Spark removes
    root, cache, held = node / new_suffix(), Cache.open(node), list[Local]()
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, root, ignore_errors=True)

        def path_of(folder: str, name: str) -> Path:
            if folder:
                uri = run.below(f"{folder}/")
                held.append(cache.fetched(uri, Listing({e.key: e for e in find_entries(uri)})))
                return Path(held[-1])
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            return root / name

        inputs = {path_of("", name): own for one in packed for name, own in one.inputs.items()}
        for uri in {run, *(own.uri for own in inputs.values())}:
            Local.within(root, uri)  # whose errors have it
        for path, own in inputs.items():
            _fetch(path, own)
        yield [_Unpacking(one.content, path_of).load() for one in packed]
        made = {p.relative_to(root / work).as_posix(): p for p in (root / work).rglob("*")}
        new = {name: p for name, p in made.items() if p.is_file() and p not in inputs}
        upload(open_store(run), {run.below(f"work/{name}").key: p for name, p in new.items()})


def _fetch(path: Path, wanted: Input) -> None:
    """Makes a file with the ranges of an object."""
    store, entry = open_store(wanted.uri), wanted.entry
    if wanted.ranges is None:
        download(store, [Wanted(entry, str(path))])
        return
    with open(path, "wb", buffering=0) as file:
        file.truncate(entry.size)
        for offset, end, is_text in wanted.ranges:
            text = b""
            while offset < entry.size and (offset < end or is_text and b"\n" not in text):
                stop = min(offset + _BLOCK_BYTES, end) if offset < end else offset + _TAIL_BYTES
                content = bytes(store.read(entry, offset, min(stop, entry.size)))
                write_at(file.fileno(), content, offset)
                text = content if offset >= end else b""
                offset += len(content)


def _relative(path: str) -> str:
    """Returns the name of a path of the driver: scheme, bucket and key."""
    return shown(path).replace("://", "/")


def _create_placeholder(path: str, uri: Uri, entry: Entry) -> None:
    """Creates a file of the size of an object, with what the driver reads of it."""
    tail = max(entry.size - _TAIL_BYTES, 0)
    ranges = [(0, _HEAD_BYTES, False), (tail, entry.size, False)]
    os.makedirs(os.path.dirname(path), exist_ok=True)
    _fetch(Path(path), Input(uri, entry, ranges))
    with open(path, "rb") as file:
        begins = file.read(8)
    if begins.startswith(_WHOLE):
        _fetch(Path(path), Input(uri, entry))
    elif begins.startswith(_PARQUET) and (footer := footer_begin(path)) < tail:
        _fetch(Path(path), Input(uri, entry, [*ranges, (footer, tail, False)]))
    os.utime(path, (entry.modified, entry.modified))
    _inputs[path] = Input(uri, entry)


@contextmanager
def outlines(cache: Cache, output: Uri) -> Iterator[Callable[[Any, str], Any]]:
    """Yields a function that returns paths in place of URIs of input, for the block.

    It is called with a flag's value and name. It raises OSError or ValueError if an object cannot
    be read, or the value is a path of this machine.

    Args:
        output: place of the output, which determines the paths.
    """
    digest = hashlib.sha256(str(output).encode()).hexdigest()[:16]
    root = cache.folder / _STREAMS / digest

    def outlined(value: Any, flag: str) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(path for one in value for path in paths(one, flag))
        (path,) = paths(value, flag)
        return type(value)(path)

    def paths(value: Any, flag: str) -> list[str]:
        if not is_uri(value):
            raise ValueError(
                f"--{flag} {value}: expected a URI, as executors have no folder in common with "
                "this machine"
            )
        uri = Uri.parse(value)
        files = listing_of(uri).files
        uris = [replace(uri, key=name) for name in files]
        made = [Local.within(root, one) for one in uris]
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(_create_placeholder, made, uris, files.values()))
        return sorted(made) if uri.has_pattern else [Local.within(root, uri)]

    try:
        yield outlined
    finally:
        shutil.rmtree(root, ignore_errors=True)
