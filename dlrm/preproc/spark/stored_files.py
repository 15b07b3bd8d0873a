"""Files of a run of Spark whose executors share no folder with the driver, in its output's store.

    URI/data-unfinished/folders/<digest>/...   folders of the driver that tasks read
    URI/data-unfinished/work/...               files that tasks have written for later ones
    URI/data-<name>/...                        rows of the dataset, which its manifest names

The driver knows input by a file of its size, with its first and last bytes. An executor makes such
a file with the bytes that a part needs. Both have paths from which `with_uris` makes the URI.
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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dlrm.data.tables.parts import footer_begin
from dlrm.locks import new_suffix
from dlrm.remote.cache import STREAMS, Cache, with_uris
from dlrm.remote.publish import PREFIX, RUN, listing_of
from dlrm.remote.store import Entry, open_store
from dlrm.remote.transfer import Wanted, download, upload, write_at
from dlrm.remote.uri import Uri, is_uri

_HEAD_BYTES, _TAIL_BYTES = 1 << 18, 1 << 16
_BLOCK_BYTES = 1 << 22
_WHOLE = (b"ORC", b"ARROW1", b"\xff\xff\xff\xff")  # begin inputs that the driver reads whole
_PARQUET = b"PAR1"


Range = tuple[int, int, bool]  # begin and end of bytes, and whether also the rest of the last line


class Input(NamedTuple):
    """An object that a task reads, and the bytes of it; None is all."""

    uri: Uri
    entry: Entry
    ranges: list[Range] | None = None


Packed = tuple[bytes, dict[str, Input]]  # a task, or an item of one, and the input that it names
_inputs: dict[str, Input] = {}  # path of the driver -> object


class StoredFiles:
    """The files of a run, as the driver has them.

    Args:
        uri: place of the output.
        work: the driver's folder of work on it.

    Attributes:
        data: place of the rows, which executors write.
        opened: unpacks tasks on an executor; see `attempt`.
    """

    def __init__(self, uri: Uri, work: Path) -> None:
        self.data, self._run = uri.below(f"{PREFIX}{new_suffix()}"), uri.below(RUN)
        self._work = str(work)
        self._shipped = set[str]()
        self.opened = partial(attempt, self._run, _relative(self._work))
        self.adopt_new()

    def pack(self, task: Any) -> Packed:
        """Returns a task, or an item of one, with names in place of paths."""
        packing = _Packing(content := io.BytesIO(), self)
        packing.dump(task)
        for item in task if type(task) is tuple else (task,):
            if hasattr(item, "ranges"):
                ranges = defaultdict[str, list[Range]](list)
                for path, begin, end, *is_text in item.ranges():
                    ranges[path].append((begin, end, any(is_text)))
                packing.inputs = {
                    path: _inputs[path]._replace(ranges=ranges[path]) for path in ranges
                }
        named = {_relative(path): one for path, one in packing.inputs.items()}
        return content.getvalue(), named

    def adopt_new(self) -> None:
        """Makes outlines of the files that tasks have written."""
        place = self._run.below("work")
        for entry in open_store(place).entries(place.folder):
            path = f"{self._work}/{entry.key.removeprefix(place.folder)}"
            if path not in _inputs or _inputs[path].entry != entry:
                _outline(path, Uri(place.scheme, place.authority, entry.key), entry)

    def named(self, path: str, is_path: bool) -> tuple[str, str] | None:
        """Returns a folder's name below `RUN`, or nothing, and a file's name; None for others."""
        inside = path.startswith(f"{self._work}/")
        if (inside or is_path) and path not in _inputs and os.path.isdir(path):
            return self._shipped_as(Path(path)), ""
        return ("", _relative(path)) if inside or path in _inputs else None

    def _shipped_as(self, folder: Path) -> str:
        """Uploads a folder, unless it is there; returns its name."""
        name = f"folders/{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}/"
        if name not in self._shipped:
            prefix = f"{self._run.below(name).key}"
            files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
            upload(
                open_store(self._run),
                {f"{prefix}{own}": path for own, path in files.items() if path.is_file()},
            )
            self._shipped.add(name)
        return name


class _Packing(pickle.Pickler):
    """Pickles tasks with names in place of paths."""

    def __init__(self, file: Any, files: StoredFiles) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._files = files
        self.inputs: dict[str, Input] = {}

    def persistent_id(self, obj: Any) -> Any:
        """Returns the facts from which `_Unpacking` makes a path; None for other objects."""
        if not isinstance(obj, str | Path):
            return None
        is_path, path = isinstance(obj, Path), str(obj)
        if (names := self._files.named(path, is_path)) is None:
            return None
        if path in _inputs:
            self.inputs[path] = _inputs[path]
        return *names, is_path


class _Unpacking(pickle.Unpickler):
    def __init__(self, content: bytes, path_of: Callable[[str, str], Path]) -> None:
        super().__init__(io.BytesIO(content))
        self._path_of = path_of

    def persistent_load(self, pid: Any) -> Any:
        """Returns the path of a name on this machine."""
        folder, name, is_path = pid
        path = self._path_of(folder, name)
        return path if is_path else str(path)


@contextmanager
def attempt(run: Uri, work: str, *tasks: Packed, whole: bool = False) -> Iterator[list[Any]]:
    """Yields tasks and items, with files of their own, and uploads what they have written.

    Args:
        run: the place of what tasks read and write.
        work: name of the driver's folder of work.
        whole: whether they have all bytes of their input.
    """
    from pyspark import SparkFiles

    node = Path(SparkFiles.getRootDirectory(), STREAMS)  # which Spark removes
    root, cache = node / new_suffix(), Cache.open(node)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, root, ignore_errors=True)

        def path_of(folder: str, name: str) -> Path:
            if folder:
                return stack.enter_context(cache.fetched(run.below(folder)))
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            return root / name

        inputs = {name: one for _, own in tasks for name, one in own.items()}
        for name, one in inputs.items():
            _fetch(path_of("", name), one._replace(ranges=None) if whole else one)
        yield [_Unpacking(content, path_of).load() for content, _ in tasks]
        made = {path.relative_to(root).as_posix(): path for path in root.rglob("*")}
        new = {
            run.below(f"work/{name.removeprefix(f'{work}/')}").key: path
            for name, path in made.items()
            if path.is_file() and name not in inputs
        }
        upload(open_store(run), new)


def _fetch(path: Path, wanted: Input) -> None:
    """Makes a file with the ranges of an object."""
    store, entry = open_store(wanted.uri), wanted.entry
    if wanted.ranges is None:
        download(store, [Wanted(entry, str(path))])
        return
    with open(path, "wb", buffering=0) as file:
        file.truncate(entry.size)
        for place, end, is_text in wanted.ranges:
            text = b""
            while place < entry.size and (place < end or is_text and b"\n" not in text):
                stop = min(place + _BLOCK_BYTES, end) if place < end else place + _TAIL_BYTES
                content = bytes(store.read(entry, place, min(stop, entry.size)))
                write_at(file.fileno(), content, place)
                text = content if place >= end else b""
                place += len(content)


def _relative(path: str) -> str:
    """Returns the name of a path of the driver: scheme, bucket and key."""
    return with_uris(path).replace("://", "/")


def _outline(path: str, uri: Uri, entry: Entry) -> None:
    """Makes a file of the size of an object, with what the driver reads of it."""
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

    It is called with URIs and with the name of their flag, and raises OSError or ValueError if an
    object cannot be read, or a value is a path of this machine.

    Args:
        output: place of the output, which determines the paths.
    """
    digest = hashlib.sha256(str(output).encode()).hexdigest()[:16]
    root = cache.folder.resolve() / STREAMS / digest

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
