"""The days of a log: entries of a directory, or at a URI, whose names sort in the order of time."""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from dlrm.data.sources.text_files import unpacked_name
from dlrm.data.tables.files import kind_of
from dlrm.remote.cache import Cache
from dlrm.remote.edges import fetched
from dlrm.remote.store import find_entries
from dlrm.remote.uri import Uri, is_uri

_BLOCK = 1 << 22
# Names under which programs write a file that is not complete, or keep a copy of it.
_INCOMPLETE = (
    *("~", ".part", ".partial", ".filepart", ".crdownload", ".download", ".tmp", ".temp"),
    *(".swp", ".bak", ".old", ".orig"),
)


class Day(NamedTuple):
    """A day of a log.

    Attributes:
        name: name of its file without suffixes, or of its folder.
        place: the file or folder; its URI in a store.
        files: relative path of each file -> its bytes, and its time of change in nanoseconds; in a
            store, its version.
        cache: what it is fetched to from a store.
    """

    name: str
    place: Path | Uri
    files: dict[str, list[Any]]
    cache: Cache | None = None

    @contextmanager
    def local(self) -> Iterator[Path]:
        """Yields the file or folder; that of a store is fetched, and stays until the block ends."""
        if isinstance(self.place, Path):
            yield self.place.absolute()
            return
        assert self.cache is not None
        with fetched(self.cache, self.place) as path:
            yield path

    def digest(self) -> str:
        """Returns the SHA-256 of the content of its files, in the order of their names."""
        with self.local() as path:
            return self.digest_at(path)

    def digest_at(self, path: Path) -> str:
        """Returns the digest, given the path of `local`."""
        total, root = hashlib.sha256(), path if path.is_dir() else path.parent
        for name in sorted(self.files):
            with open(root / name, "rb") as file:
                while block := file.read(_BLOCK):
                    total.update(block)
        return total.hexdigest()


def find_days(folder: Path, say: Callable[[str], object], cache: Cache | None = None) -> list[Day]:
    """Returns the days of a directory in the order of their names, numbers by their value.

    Entries without a digit in their names, such as README.md, and incomplete files, such as
    2026-11-20.csv.part, are no days; hidden ones and those that begin with "_" are ignored.

    Args:
        folder: the directory, or a URI.
        say: called with a line about other entries.
        cache: what days of a store are fetched to.

    Raises:
        FileNotFoundError: there is no such directory, or no day in it.
        OSError: the store cannot be read.
        ValueError: two entries are the same day or have the same date, or a day has no file.
    """
    shown = str(Uri.parse(folder)) if is_uri(folder) else str(folder)
    entries = [*(_stored(Uri.parse(folder)) if is_uri(folder) else _local(folder))]
    others = sorted(day.place.name for day in entries if not _is_day(day.place.name))
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        say(f"note: {shown}: no days: {', '.join(others[:3])}{more}")
    days: dict[str, Day] = {}
    for day in sorted(entries, key=lambda day: day.place.name):
        day = day._replace(cache=cache)
        if day.place.name in others:
            continue
        if (other := days.setdefault(date_of(day.name) or day.name, day)) is not day:
            raise ValueError(
                f"{day.place}: expected one entry for a day, got {other.place} as well"
            )
        if "," in day.name:  # which separates names in flags
            raise ValueError(f"{day.place}: expected the name of a day without a comma")
        if not day.files:
            raise ValueError(f"{day.place}: expected files in the folder of a day, got none")
    if not days:
        raise FileNotFoundError(f"{shown}: no entry with a number in its name (--days)")
    return sorted(days.values(), key=lambda day: order_of(day.name))


def _is_day(name: str) -> bool:
    return bool(re.search(r"\d", name)) and not name.lower().endswith(_INCOMPLETE)


def _local(folder: Path) -> Iterator[Day]:
    """Yields the entries of a directory."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such directory (--days)")
    for path in folder.iterdir():
        if path.name[0] in "._":
            continue
        below = path.rglob("*") if path.is_dir() else [path]
        root = path if path.is_dir() else folder
        files = {}
        for file in below:
            if file.is_file():
                status = file.stat()
                name = file.relative_to(root).as_posix()
                files[name] = [status.st_size, status.st_mtime_ns]
        yield _day(path.name, path, files, path.is_dir())


def _stored(uri: Uri) -> Iterator[Day]:
    """Yields the files and folders below a URI."""
    if uri.has_pattern or uri.scheme in ("http", "https"):
        raise ValueError(
            f"--days {uri}: expected a folder of a store, whose entries are days, got "
            + ("a pattern" if uri.has_pattern else "a web server, which lists none")
        )
    root = uri.below("")
    entries: dict[tuple[str, bool], dict[str, list[Any]]] = {}
    for entry in find_entries(root):
        name, slash, rest = entry.key[len(root.key) :].partition("/")
        if name and name[0] not in "._" and not entry.key.endswith("/"):
            files = entries.setdefault((name, bool(slash)), {})
            files[rest or name] = [entry.size, entry.version]
    for (name, is_folder), files in entries.items():
        yield _day(name, uri.below(name), files, is_folder)


def _day(name: str, place: Path | Uri, files: Mapping[str, list[Any]], is_folder: bool) -> Day:
    """Returns an entry, without hidden files."""
    seen = {
        file: facts
        for file, facts in sorted(files.items())
        if not any(part.startswith((".", "_")) for part in PurePosixPath(file).parts)
    }
    return Day(name if is_folder else _without_suffixes(name), place, seen)


def order_of(name: str) -> tuple[list[tuple[int, int | str]], str]:
    """Returns a key that sorts names by their dates, and numbers by their value.

    day_9 is before day_10, and day=2026-11-20 before 2026-11-21.
    """
    parts = re.split(r"(\d+)", date_of(name) or name)
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts if part], name


def date_of(name: str) -> str | None:
    """Returns the date in the name of a day, such as that of `day=2026-11-20`, or None.

    A name with an hour, such as `2026-11-20T13`, `2026-11-20-13` or `2026-11-20_13`, has both.
    """
    found = re.search(r"(?<!\d)(\d{4}-\d\d-\d\d)(?:[T_-]([01]\d|2[0-3]))?(?!\d)", name)
    return found and "T".join(filter(None, found.groups()))


def _without_suffixes(name: str) -> str:
    if kind_of(Path(name)) is None:
        return name
    name = name[: len(unpacked_name(name))]
    return name.removesuffix(Path(name).suffix)
