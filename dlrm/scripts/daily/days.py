"""The days of a log: entries of a directory whose names sort in the order of time."""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dlrm.data.sources.text_files import unpacked_name
from dlrm.data.tables.files import kind_of

_BLOCK = 1 << 22


class Day(NamedTuple):
    """A day of a log.

    Attributes:
        name: name of its file without suffixes, or of its folder.
        path: the file or folder.
        files: relative path of each file -> its bytes and its time of change in nanoseconds.
    """

    name: str
    path: Path
    files: dict[str, list[int]]

    def digest(self) -> str:
        """Returns the SHA-256 of the content of its files, in the order of their names."""
        total = hashlib.sha256()
        root = self.path if self.path.is_dir() else self.path.parent
        for name in sorted(self.files):
            with open(root / name, "rb") as file:
                while block := file.read(_BLOCK):
                    total.update(block)
        return total.hexdigest()


def find_days(folder: Path, say: Callable[[str], object]) -> list[Day]:
    """Returns the days of a directory in the order of their names, numbers by their value.

    Entries without a digit in their names, such as README.md, are no days; hidden ones and those
    that begin with "_" are ignored.

    Args:
        folder: the directory.
        say: called with a line about other entries.

    Raises:
        FileNotFoundError: there is no such directory, or no day in it.
        ValueError: two entries are the same day, or a day has no file.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such directory (--days)")
    entries = [path for path in folder.iterdir() if path.name[0] not in "._"]
    others = sorted(path.name for path in entries if not re.search(r"\d", path.name))
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        say(f"note: {folder}: no days: {', '.join(others[:3])}{more}")
    days: dict[str, Day] = {}
    for path in sorted(path for path in entries if path.name not in others):
        name = path.name if path.is_dir() else _without_suffixes(path)
        if name in days:
            raise ValueError(f"{path}: expected one entry for a day, got {days[name].path} as well")
        days[name] = Day(name, path, _files(path))
        if not days[name].files:
            raise ValueError(f"{path}: expected files in the folder of a day, got none")
    if not days:
        raise FileNotFoundError(f"{folder}: no entry with a number in its name (--days)")
    return sorted(days.values(), key=lambda day: order_of(day.name))


def order_of(name: str) -> tuple[list[tuple[int, int | str]], str]:
    """Returns a key that sorts names, with numbers by their value: day_9 is before day_10."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts if part], name


def date_of(name: str) -> str | None:
    """Returns the date in the name of a day, such as that of `day=2026-11-20`, or None.

    A name with an hour, such as `2026-11-20T13`, `2026-11-20-13` or `2026-11-20_13`, has both.
    """
    found = re.search(r"(?<!\d)(\d{4}-\d\d-\d\d)(?:[T_-]([01]\d|2[0-3]))?(?!\d)", name)
    return found and "T".join(filter(None, found.groups()))


def _without_suffixes(path: Path) -> str:
    if kind_of(path) is None:
        return path.name
    name = path.name[: len(unpacked_name(path.name))]
    return name.removesuffix(Path(name).suffix)


def _files(path: Path) -> dict[str, list[int]]:
    root = path if path.is_dir() else path.parent
    below = path.rglob("*") if path.is_dir() else [path]
    names = {file.relative_to(root): file for file in below if file.is_file()}
    return {
        name.as_posix(): [(status := file.stat()).st_size, status.st_mtime_ns]
        for name, file in sorted(names.items())
        if not any(part.startswith((".", "_")) for part in name.parts)
    }
