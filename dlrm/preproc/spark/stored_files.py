"""Files of a run of Spark whose executors share no folder with the driver, in its output's store.

    URI/data-unfinished/folders/<digest>/...   folders of the driver that tasks read
    URI/data-unfinished/work/...               files that tasks have written for later ones
    URI/data-<name>/...                        rows of the dataset, which its manifest names

The driver knows input by a file of its size, with its first and last bytes. An executor makes such
a file with the bytes that a part needs. Both have paths from which `with_uris` makes the URI.
"""

import fcntl
import hashlib
import io
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dlrm.data.tables.parts import footer_begin
from dlrm.flags import Values
from dlrm.locks import new_suffix
from dlrm.remote.cache import STREAMS, Cache, with_uris
from dlrm.remote.config import CacheConfig
from dlrm.remote.edges import show_uris
from dlrm.remote.publish import PREFIX, RUN, listing_of
from dlrm.remote.store import Entry, Store, open_store
from dlrm.remote.transfer import Wanted, download, upload, write_at
from dlrm.remote.uri import Uri, is_uri
from dlrm.settings import settings_of

_HEAD_BYTES, _TAIL_BYTES = 1 << 18, 1 << 16
_BLOCK_BYTES = 1 << 22
_WHOLE = (b"ORC", b"ARROW1", b"\xff\xff\xff\xff")  # begin inputs that the driver reads whole
_PARQUET = b"PAR1"


class Range(NamedTuple):
    """Bytes of a file that a task reads; of text also the rest of the last line."""

    path: str
    begin: int
    end: int
    is_text: bool = False


class Input(NamedTuple):
    """An object that a task reads, and the ranges of it; None is all."""

    uri: Uri
    entry: Entry
    ranges: Sequence[Range] | None = None

    @property
    def whole(self) -> "Input":
        """All of it."""
        return self._replace(ranges=None)


_inputs: dict[str, Input] = {}  # path of the driver -> object


class StoredFiles:
    """The files of a run, as the driver has them.

    Args:
        uri: place of the output.
        work: the driver's folder of work on it.

    Attributes:
        data: place of the rows.
    """

    def __init__(self, uri: Uri, work: Path) -> None:
        self.uri, self.data = uri, uri.below(f"{PREFIX}{new_suffix()}")
        self._work, self._run = str(work), uri.below(RUN)
        self._shipped = set[str]()
        self.opened = partial(attempt, self._run, _relative(self._work))
        self.adopt_new()

    def pack(self, task: Any) -> tuple[bytes, dict[str, Input]]:
        """Returns what `opened` makes the task of, and the input that it names."""
        packing = _Packing(content := io.BytesIO(), self._named)
        packing.dump(task)
        found, items = packing.inputs, task if type(task) is tuple else (task,)
        for item in items:
            if hasattr(item, "ranges"):
                ranges = [Range(*one) for one in item.ranges()]
                own = {path: [one for one in ranges if one.path == path] for path, *_ in ranges}
                found = {path: found[path]._replace(ranges=some) for path, some in own.items()}
        return content.getvalue(), {_relative(path): one for path, one in found.items()}

    def adopt_new(self) -> None:
        """Has outlines of the files that tasks have written."""
        place = self._run.below("work")
        for entry in open_store(place).entries(place.folder):
            path = f"{self._work}/{entry.key.removeprefix(place.folder)}"
            if path not in _inputs or _inputs[path].entry != entry:
                _outline(path, Uri(place.scheme, place.authority, entry.key), entry)

    def folder(self, path: Path) -> Uri:
        """Returns where executors write rows."""
        return self.data

    def _named(self, text: str, is_path: bool) -> tuple[str, str] | None:
        """Returns the kind and the name of a path; None for other texts."""
        inside = text.startswith(f"{self._work}/")
        if text in _inputs:
            return "file", _relative(text)
        if os.path.isdir(text) if inside else is_path and os.path.isdir(text):
            return "folder", self._ship(Path(text))
        return ("new", _relative(text)) if inside else None

    def _ship(self, folder: Path) -> str:
        """Uploads a folder, unless it is there; returns its name."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        facts = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        name = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
        if name not in self._shipped:
            place = self._run.below(f"folders/{name}")
            keys = [place.below(path.relative_to(folder).as_posix()).key for path in files]
            upload(open_store(place), dict(zip(keys, files, strict=True)))
            self._shipped.add(name)
        return name


class _Packing(pickle.Pickler):
    """Pickles tasks with names in place of paths."""

    def __init__(self, file: Any, named: Callable[[str, bool], tuple[str, str] | None]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._named = named
        self.inputs: dict[str, Input] = {}

    def persistent_id(self, obj: Any) -> Any:
        """Returns the facts from which `_Unpacking` makes a path; None for other objects."""
        is_path = isinstance(obj, Path)
        found = self._named(str(obj), is_path) if is_path or isinstance(obj, str) else None
        if found is None:
            return None
        if found[0] == "file":
            self.inputs[str(obj)] = _inputs[str(obj)]
        return *found, is_path


class _Unpacking(pickle.Unpickler):
    def __init__(self, content: bytes, path_of: Callable[[str, str], Path]) -> None:
        super().__init__(io.BytesIO(content))
        self._path_of = path_of

    def persistent_load(self, pid: Any) -> Any:
        """Returns the path of a name on this machine."""
        kind, name, is_path = pid
        return self._path_of(kind, name) if is_path else str(self._path_of(kind, name))


@contextmanager
def attempt(run: Uri, work: str, *inputs: Mapping[str, Input]) -> Iterator[Callable[[bytes], Any]]:
    """Yields what unpacks tasks, with files of their own, and uploads what they have written.

    Args:
        run: the place of what tasks read and write.
        work: name of the driver's folder of work.
        inputs: what `pack` says of tasks.
    """
    from pyspark import SparkFiles

    node = Path(SparkFiles.getRootDirectory(), STREAMS)  # which Spark removes
    root = node / new_suffix()
    root.mkdir(parents=True)

    def path_of(kind: str, name: str) -> Path:
        if kind == "folder":
            return _fetched_folder(run.below(f"folders/{name}"), node / name)
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    try:
        fetched = {path_of("file", name): one for own in inputs for name, one in own.items()}
        for path, one in fetched.items():
            _fetch(path, one)
        yield lambda content: _Unpacking(content, path_of).load()
        made = [path for path in (root / work).rglob("*") if path.is_file()]
        keys = [run.below(f"work/{path.relative_to(root / work).as_posix()}").key for path in made]
        new = {key: path for key, path in zip(keys, made, strict=True) if path not in fetched}
        upload(open_store(run), new)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _fetched_folder(uri: Uri, folder: Path) -> Path:
    """Returns a folder with the objects below a URI, which a machine fetches once."""
    complete = folder.with_suffix(".complete")
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            store = open_store(uri)
            wanted = [
                Wanted(entry, f"{folder}/{entry.key.removeprefix(uri.folder)}")
                for entry in store.entries(uri.folder)
            ]
            for one in [f"{folder}/_", *(one.path for one in wanted)]:
                os.makedirs(os.path.dirname(one), exist_ok=True)
            download(store, wanted)
            complete.touch()
    return folder


def _fetch(path: Path, wanted: Input) -> None:
    """Makes a file with the ranges of an object."""
    store, entry = open_store(wanted.uri), wanted.entry
    if wanted.ranges is None:
        download(store, [Wanted(entry, str(path))])
        return
    with open(path, "wb", buffering=0) as file:
        file.truncate(entry.size)
        for _, begin, end, is_text in wanted.ranges:
            place = begin
            while place < min(end, entry.size):
                place += len(_copied(store, entry, file, place, min(place + _BLOCK_BYTES, end)))
            text = b""
            while is_text and place < entry.size and b"\n" not in text:
                text = _copied(store, entry, file, place, place + _TAIL_BYTES)
                place += len(text)


def _copied(store: Store, entry: Entry, file: Any, begin: int, end: int) -> bytes:
    content = bytes(store.read(entry, begin, min(end, entry.size)))
    write_at(file.fileno(), content, begin)
    return content


def _relative(path: str) -> str:
    """Returns the name of a path of the driver: scheme, bucket and key."""
    return with_uris(path).replace("://", "/")


def _outline(path: str, uri: Uri, entry: Entry) -> None:
    """Makes a file of the size of an object, with what the driver reads of it."""
    tail = max(entry.size - _TAIL_BYTES, 0)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    own = Input(uri, entry, [Range(path, 0, _HEAD_BYTES), Range(path, tail, entry.size)])
    _fetch(Path(path), own)
    with open(path, "r+b") as file:
        begins = file.read(8)
        if begins.startswith(_WHOLE):
            _copied(open_store(uri), entry, file, 0, entry.size)
        elif begins.startswith(_PARQUET) and (footer := footer_begin(path)) < tail:
            _copied(open_store(uri), entry, file, footer, tail)
    os.utime(path, (entry.modified, entry.modified))
    _inputs[path] = Input(uri, entry)


@contextmanager
def outlined_inputs(values: Values, names: Sequence[str], output: Uri) -> Iterator[Values]:
    """Has flags with paths in place of the URIs of input, within the block.

    Args:
        values: the flags, with those of `CacheConfig`.
        names: flags with input.
        output: place of the output, which determines the paths.

    Raises:
        OSError, ValueError: an object cannot be read, or a value is a path of this machine.
    """
    show_uris()
    with outlines(Cache.of_flags(values), output) as outlined:
        found = {name: outlined(values[name], name) for name in names if values[name]}
        yield values.without(settings_of(CacheConfig)).replaced(found)


@contextmanager
def outlines(cache: Cache, output: Uri) -> Iterator[Callable[[Any, str], Any]]:
    """Yields a function that returns paths in place of URIs of input; see `outlined_inputs`."""
    name = hashlib.sha256(str(output).encode()).hexdigest()[:16]
    root = cache.folder.resolve() / STREAMS / name

    def outlined(value: Any, flag: str) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(path for item in value for path in paths(item, flag))
        (path,) = paths(value, flag)
        return path if isinstance(value, str) else Path(path)

    def paths(value: Any, flag: str) -> list[str]:
        if not is_uri(value):
            raise ValueError(
                f"--{flag} {value}: expected a URI, as executors have no folder in common with "
                "this machine"
            )
        uri = Uri.parse(value)
        listing = listing_of(uri)

        def make(entry: Entry) -> str:
            own = Uri(uri.scheme, uri.authority, listing.name_of(entry))
            path = f"{root}/{_relative(str(own))}"
            _outline(path, own, entry)
            return path

        with ThreadPoolExecutor(16) as pool:
            made = list(pool.map(make, listing.entries))
        return sorted(made) if uri.has_pattern else [f"{root}/{_relative(str(uri)).rstrip('/')}"]

    try:
        yield outlined
    finally:
        shutil.rmtree(root, ignore_errors=True)
