"""A cache of objects in local files, and folders that show the objects of a URI as files.

    CACHE/objects/<digest>                         an object's bytes, by URI and version
    CACHE/views/<digest>/<scheme>/<bucket>/<key>   links to them, for one listing of a URI
    CACHE/outputs/<digest>/<name>                  output that is not published yet
    CACHE/streams/<digest>/<scheme>/<bucket>/<key> outlines of input, see `stored_files.py`

Files are immutable and appear whole, so processes share a cache. The digest of a view is that of
the listing: an object that changes gives another view, and files that are read keep their content.
"""

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from dlrm.files import check_owned, make_directories
from dlrm.locks import in_use, remove_unused
from dlrm.remote.config import CacheConfig
from dlrm.remote.store import Entry, Store, find_entries, open_store, total_bytes
from dlrm.remote.transfer import Wanted, download, link
from dlrm.remote.uri import Uri, is_uri

_COMPLETE, _OBJECTS = ".complete", "objects.lock"
_AT_ONCE = fcntl.LOCK_EX | fcntl.LOCK_NB
_SHARE = 0.5  # of the free space of the disk, if no limit is given
STREAMS = "streams"
_VIEW = rf"/(?:views|outputs|{STREAMS})/[0-9a-f]{{16}}/([a-z0-9]+)/"


class Listing(NamedTuple):
    """Objects, and the files that show them.

    Attributes:
        entries: the objects.
        names: key -> path below the bucket, where it is not the key itself.
        checksums: key -> checksum, where a manifest has it; see `dlrm.manifest.Checksum`.
        hollow: objects that are not needed, whose files have their size and no content.
    """

    entries: list[Entry]
    names: dict[str, str] = {}
    checksums: dict[str, str] = {}
    hollow: Sequence[Entry] = ()

    def only(self, patterns: Sequence[str]) -> "Listing":
        """Returns the same with those hollow whose file has a name of none of the patterns."""
        parts: tuple[list[Entry], list[Entry]] = [], []
        for entry in self.entries:
            name = PurePosixPath(entry.key).name
            parts[not any(fnmatch(name, pattern) for pattern in patterns)].append(entry)
        return self._replace(entries=parts[0], hollow=parts[1])

    def name_of(self, entry: Entry) -> str:
        """Returns the path of an object below the bucket."""
        return self.names.get(entry.key, entry.key)


@dataclass(frozen=True)
class Cache:
    """A folder of fetched objects.

    Attributes:
        folder: the folder; see `default_folder`.
        limit: bytes of objects that are kept; None is half of what the disk has left.
    """

    folder: Path
    limit: int | None = None

    @classmethod
    def open(cls, folder: str | os.PathLike | None = None, limit: int | None = None) -> "Cache":
        """Returns a cache, whose folder is created.

        Args:
            folder: the folder; None is `default_folder()`.

        Raises:
            OSError: the folder cannot be made, or belongs to another user.
        """
        path = Path(folder or default_folder()).expanduser().absolute()
        make_directories(path)
        check_owned(path)
        return cls(path, limit)

    @classmethod
    def of_flags(cls, values: Mapping[str, Any]) -> "Cache":
        """Returns the cache that flags name, those of `CacheConfig`; see `open`."""
        config = CacheConfig(values.get("cache_dir"), values.get("cache_gib"))
        return cls.open(config.cache_dir, config.limit)

    @contextmanager
    def fetched(self, uri: Uri, listing: Listing | None = None) -> Iterator[Path]:
        """Yields the file, or the folder, with the objects of a URI; it stays within the block.

        Args:
            uri: an object, a prefix or a pattern, for which the folder above its matches is given.
            listing: its objects; None lists them.

        Raises:
            OSError: an object cannot be read, or the disk is full; the message has URI and path.
            ValueError: an object is damaged.
        """
        listing = Listing(find_entries(uri)) if listing is None else listing
        _check_folders(uri, listing.entries)
        lines = [str(uri), *(f"{e.key}\0{e.size}\0{e.version}" for e in listing.entries)]
        lines += (f"{e.key}\0{e.size}\0" for e in listing.hollow)
        view = self.folder / "views" / _digest("\n".join(lines))[:16]
        make_directories(view)
        while True:
            with in_use(view) as stays:
                if stays:
                    self._fill(view, uri, listing)
                    yield view / uri.scheme / uri.authority / uri.before_pattern()
                    return
            make_directories(view)

    def _fill(self, view: Path, uri: Uri, listing: Listing) -> None:
        """Makes a view complete, once for all processes that want it."""
        entries = listing.entries
        with _flock(view.with_name(f"{view.name}.lock"), fcntl.LOCK_EX):
            os.utime(view)
            root = view / uri.scheme / uri.authority
            paths = [f"{root}/{listing.name_of(entry)}" for entry in entries]
            if (view / _COMPLETE).exists() and all(map(_has, paths, entries)):
                return
            store = open_store(uri)
            places = [*self._places(store, entries)]
            every = [
                Wanted(entry, place, listing.checksums.get(entry.key), path)
                for entry, path, place in zip(entries, paths, places, strict=True)
            ]
            absent = [one.entry for one in every if not _has(one.path, one.entry)]
            self._make_room(total_bytes(absent), uri)
            with _flock(self.folder / _OBJECTS, fcntl.LOCK_SH):
                for folder in {os.path.dirname(path) for path in (*paths, *places)}:
                    os.makedirs(folder, exist_ok=True)
                missing = []
                for one, path in zip(every, paths, strict=True):
                    if _has(one.path, one.entry):
                        link(one.path, path)
                    else:
                        missing.append(one)
                download(store, missing)
                for entry in listing.hollow:
                    empty = root / listing.name_of(entry)
                    empty.parent.mkdir(parents=True, exist_ok=True)
                    empty.touch()
                    os.truncate(empty, entry.size)
            (view / _COMPLETE).touch()

    def _places(self, store: Store, entries: Sequence[Entry]) -> Iterator[str]:
        """Yields the paths of objects, in one folder, as ext4 creates files slowly in new ones."""
        folder, root = self.folder / "objects", str(store.root)
        for entry in entries:
            digest = _digest(f"{root}{entry.key}\n{entry.size}\n{entry.version}")
            yield f"{folder}/{digest[:32]}"

    def _make_room(self, needed: int, uri: Uri) -> None:
        """Removes what has not been used for longest, until so many bytes fit.

        Raises:
            OSError: they do not fit; the message has both sizes and the remedy.
        """
        views = (path for path in (self.folder / "views").glob("*") if path.name[0] != ".")
        unused = sorted(filter(Path.is_dir, views), key=lambda view: _status(view, "st_mtime"))
        while unused and self._lacks(needed):
            with suppress(FileNotFoundError):
                remove_unused(unused.pop(0))
            self._drop_unlinked()
        if needed > (free := shutil.disk_usage(self.folder).free):
            raise OSError(
                f"{uri}: needs {needed:,} bytes in {self.folder}, which has {free:,} left; name a "
                "larger disk by --cache_dir"
            )
        if self.limit is not None and needed > self.limit:
            raise OSError(
                f"{uri}: needs {needed:,} bytes in {self.folder}, of which {self.limit:,} may be "
                "used (--cache_gib)"
            )

    def _lacks(self, needed: int) -> bool:
        """Returns whether something has to go before so many bytes are added."""
        used = sum(_status(path, "st_size") for path in (self.folder / "objects").glob("*"))
        free = shutil.disk_usage(self.folder).free
        limit = int((used + free) * _SHARE) if self.limit is None else self.limit
        return used > 0 and (used + needed > limit or needed > free)

    def _drop_unlinked(self) -> None:
        """Removes the objects of which no view is left, unless a process is fetching some."""
        with suppress(BlockingIOError), _flock(self.folder / _OBJECTS, _AT_ONCE):
            for path in (self.folder / "objects").glob("*"):
                with suppress(FileNotFoundError):
                    if path.stat().st_nlink == 1:
                        path.unlink()

    def output_folder(self, uri: Uri) -> Path:
        """Returns the folder with what is not published under a URI yet."""
        return self.folder / "outputs" / _digest(str(uri))[:16]

    def output_path(self, uri: Uri) -> Path:
        """Returns the path that `output` yields."""
        return self.output_folder(uri) / uri.scheme / uri.authority / uri.key.rstrip("/")

    @contextmanager
    def output(self, uri: Uri) -> Iterator[Path]:
        """Yields the local place of output that is published under a URI, for this process alone.

        What a killed run left, such as its finished tasks, is there.

        Raises:
            BlockingIOError: another process writes output for the URI.
        """
        place, folder = self.output_path(uri), self.output_folder(uri)
        make_directories(place.parent)
        with ExitStack() as stack:
            try:
                stack.enter_context(_flock(folder.with_name(f"{folder.name}.lock"), _AT_ONCE))
            except BlockingIOError:
                busy = f"{uri}: another process of this machine writes there"
                raise BlockingIOError(busy) from None
            yield place
            shutil.rmtree(folder, ignore_errors=True)


def default_folder() -> Path:
    """Returns `dlrm/remote` in the user's cache, which `XDG_CACHE_HOME` moves."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "dlrm", "remote").expanduser()


def with_uris(text: str) -> str:
    """Returns a message with URIs in place of paths in a cache."""
    return re.sub(rf"/[^\s'\"=,]*{_VIEW}", r"\1://", text)


def values_with_uris(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns flags with URIs in place of paths in a cache."""
    return {name: with_uris(own) if isinstance(own, str) else own for name, own in values.items()}


def origin_of(path: str | os.PathLike) -> str:
    """Returns the URI of what is in a cache, and the absolute path of what is elsewhere."""
    if is_uri(path):
        return os.fspath(path).rstrip("/")
    return with_uris(str(Path(path).resolve()))


@contextmanager
def _flock(path: Path, kind: int) -> Iterator[None]:
    """Has a lock within the block; with `_AT_ONCE`, BlockingIOError says that another has it."""
    with open(path, "w") as lock:
        fcntl.flock(lock, kind)
        yield


def _has(path: str, entry: Entry) -> bool:
    """Returns whether a file has an object's size, which it may lack after a power failure."""
    try:
        return os.stat(path).st_size == entry.size
    except OSError:
        return False


def _check_folders(uri: Uri, entries: Sequence[Entry]) -> None:
    """Raises OSError if an object has the name of a folder of others, which no file can have."""
    keys = {entry.key for entry in entries}
    folders = {os.path.dirname(key) for key in keys}
    while folders:
        if both := folders & keys:
            raise OSError(
                f"{uri.root}{min(both)}: is an object, and a folder with other objects; expected "
                "only one of them"
            )
        folders = {os.path.dirname(folder) for folder in folders} - {""}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _status(path: Path, name: str) -> Any:
    """Returns a field of a file's status; 0 of one that another process has removed."""
    with suppress(FileNotFoundError):
        return getattr(path.stat(), name)
    return 0
