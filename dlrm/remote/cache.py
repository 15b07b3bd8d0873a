"""A cache of objects in local files, and folders that show the objects of a URI as files.

    CACHE/objects/<digest>                         an object's bytes, by URI and version
    CACHE/views/<digest>/<scheme>/<bucket>/<key>   links to them, for one listing of a URI
    CACHE/outputs/<digest>/<scheme>/<bucket>/<key> output that is not published yet

Files are immutable and appear whole, so processes share a cache. The digest of a view is that of
the listing: an object that changes gives another view, and files that are read keep their content.
"""

import fcntl
import hashlib
import os
import shutil
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dlrm.files import check_owned, make_directories
from dlrm.locks import in_use, lock, remove_unused
from dlrm.remote.config import CacheConfig
from dlrm.remote.objects import Entry, Wanted, download, link, open_store
from dlrm.remote.uri import Local, Uri

_COMPLETE, _OBJECTS = ".complete", "objects.lock"
_SHARE = 0.5  # of the free space of the disk, if no limit is given


class Listing(NamedTuple):
    """Objects, and the files that show them, by path below the bucket."""

    files: dict[str, Entry]
    checksums: dict[str, str] = {}  # where a manifest has them, as of `dlrm.manifest.Checksum`
    hollow: frozenset[str] = frozenset()  # not needed; these get their size and no content
    manifest: Mapping[str, Any] = {}  # of a published directory


@dataclass(frozen=True)
class Cache:
    """A folder of fetched objects."""

    folder: Path
    limit: int | None = None  # bytes of objects that are kept; None is half of what the disk has

    @classmethod
    def open(cls, folder: str | os.PathLike | None = None, limit: int | None = None) -> "Cache":
        """Returns a cache, whose folder is created; None is `default_folder()`.

        Raises:
            OSError: the folder cannot be made, or belongs to another user.
        """
        path = Path(folder or default_folder()).expanduser().absolute()
        make_directories(path)
        check_owned(path)
        return cls(path.resolve(), limit)

    @classmethod
    def of_flags(cls, values: Mapping[str, Any]) -> "Cache":
        """Returns the cache that flags name, those of `CacheConfig`; see `open`."""
        config = CacheConfig(values.get("cache_dir"), values.get("cache_gib"))
        return cls.open(config.cache_dir, config.limit)

    def fetched(self, uri: Uri, listing: Listing) -> Local:
        """Returns the file or folder with the objects of a URI, fetched if they are not here.

        Raises:
            OSError: an object cannot be read, or the disk is full; the message has URI and path.
            ValueError: an object is damaged.
        """
        lines = [str(uri)]
        for name, entry in listing.files.items():
            version = "" if name in listing.hollow else f"{entry.key}\0{entry.version}"
            lines.append(f"{name}\0{entry.size}\0{version}")
        view = self.folder / "views" / _digest("\n".join(lines))[:16]
        held, stays = ExitStack(), False
        while not stays:
            make_directories(view)
            stays = held.enter_context(in_use(view))
        local = Local.within(view, uri)
        weakref.finalize(local, held.close)
        self._fill(view, uri, listing)
        return local

    def _fill(self, view: Path, uri: Uri, listing: Listing) -> None:
        """Makes a view complete, once for all processes that want it."""
        with lock(view.with_name(f"{view.name}.lock")):
            os.utime(view)
            store, root = open_store(uri), f"{view}/{uri.scheme}/{uri.authority}"
            objects = self.folder / "objects"  # one, as ext4 creates files slowly in new folders
            every, missing = [], []
            for name in listing.files.keys() - listing.hollow:
                entry, checksum = listing.files[name], listing.checksums.get(name)
                digest = _digest(f"{store.root}{entry.key}\n{entry.size}\n{entry.version}")
                path = f"{objects}/{digest[:32]}"
                every.append(Wanted(entry, path, checksum, f"{root}/{name}"))
            if (view / _COMPLETE).exists() and all(_has(one.name, one.entry) for one in every):
                return
            self._make_room(sum(o.entry.size for o in every if not _has(o.path, o.entry)), uri)
            with open(self.folder / _OBJECTS, "w") as held:
                fcntl.flock(held, fcntl.LOCK_SH)
                objects.mkdir(exist_ok=True)
                for folder in {os.path.dirname(f"{root}/{name}") for name in listing.files}:
                    os.makedirs(folder, exist_ok=True)
                for one in every:
                    if _has(one.path, one.entry):
                        link(one.path, one.name)
                    else:
                        missing.append(one)
                download(store, missing)
                for name in listing.hollow:
                    Path(root, name).touch()
                    os.truncate(f"{root}/{name}", listing.files[name].size)
            (view / _COMPLETE).touch()

    def _make_room(self, needed: int, uri: Uri) -> None:
        """Removes what has not been used for longest until so many bytes fit, or raises OSError."""
        views = (path for path in (self.folder / "views").glob("*") if path.name[0] != ".")
        unused = sorted(filter(Path.is_dir, views), key=lambda view: _status(view, "st_mtime"))
        while True:
            used = sum(_status(path, "st_size") for path in (self.folder / "objects").glob("*"))
            free, limit = shutil.disk_usage(self.folder).free, self.limit
            soft = int((used + free) * _SHARE) if limit is None else limit
            if not (unused and used and (used + needed > soft or needed > free)):
                break
            with suppress(FileNotFoundError):
                remove_unused(unused.pop(0))
            self._drop_unlinked()
        if needed > min(free, needed if limit is None else limit):
            allowed = "" if limit is None else f", and {limit:,} may be used (--cache_gib)"
            has = f"needs {needed:,} bytes in {self.folder}, which has {free:,} left{allowed}"
            raise OSError(f"{uri}: {has}; name a larger disk by --cache_dir")

    def _drop_unlinked(self) -> None:
        """Removes the objects of which no view is left, unless a process is fetching some."""
        with suppress(BlockingIOError), lock(self.folder / _OBJECTS, "in use"):
            for path in (self.folder / "objects").glob("*"):
                if _status(path, "st_nlink") == 1:
                    path.unlink(missing_ok=True)

    def output_folder(self, uri: Uri) -> Path:
        """Returns the folder with what is not published under a URI yet."""
        return self.folder / "outputs" / _digest(str(uri))[:16]

    def output_path(self, uri: Uri) -> Path:
        """Returns the path that `output` yields."""
        return Path(Local.within(self.output_folder(uri), uri))

    @contextmanager
    def output(self, uri: Uri) -> Iterator[Path]:
        """Yields the local place of output for a URI, with what a killed run has left.

        Raises:
            BlockingIOError: another process writes output for the URI.
        """
        place, folder = self.output_path(uri), self.output_folder(uri)
        make_directories(place.parent)
        busy = f"{uri}: another process of this machine writes there"
        with lock(folder.with_name(f"{folder.name}.lock"), busy):
            yield place
            shutil.rmtree(folder, ignore_errors=True)


def default_folder() -> Path:
    """Returns `dlrm/remote` in the user's cache, which `XDG_CACHE_HOME` moves."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "dlrm", "remote").expanduser()


def _has(path: str, entry: Entry) -> bool:
    """Returns whether a file has an object's size, which it may lack after a power failure."""
    try:
        return os.stat(path).st_size == entry.size
    except OSError:
        return False


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _status(path: Path, name: str) -> Any:
    """Returns a field of a file's status; 0 of one that another process has removed."""
    with suppress(FileNotFoundError):
        return getattr(path.stat(), name)
    return 0
