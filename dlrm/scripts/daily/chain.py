"""The chain of days that were learned, in the order in which they were: `daily.json`."""

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dlrm.files import MANIFEST, make_directories, write_atomically
from dlrm.manifest import read_sealed, sealed_json
from dlrm.scripts.daily.days import Day, order_of

RECORD, LOG, FOLDER, LOCK = "daily.json", "daily.log", "days", ".lock"
BEGUN = "begun.json"  # in the directory of a day: the facts for which it was begun
_CLOCK = 60  # seconds that a clock may go back


@dataclass(frozen=True)
class LearnedDay:
    """The record of a day.

    Attributes:
        files: its files, as in `Day`.
        content: SHA-256 of their content.
        parent: digest of the record of the day before; "" for the first.
        dataset, checkpoint: SHA-256 of the manifests of both.
        rows, clicks: how many it had.
        judged: model -> its metrics on the day, before it was learned.
        fields: field -> how it differs from the day before: `psi`, `missing` and `unknown` shares.
        alarms: what was out of bounds.
    """

    name: str
    files: dict[str, list[Any]]
    content: str
    parent: str
    dataset: str
    checkpoint: str
    rows: int
    clicks: int
    judged: dict[str, dict[str, float | None]] = field(default_factory=dict)
    fields: dict[str, dict[str, float]] = field(default_factory=dict)
    alarms: list[str] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """Returns the digest of the record, which that of the next day has as its parent."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


class Chain:
    """The record of a directory, which only one process changes at a time; see `open_chain`.

    Attributes:
        schema: SHA-256 of the schema of all days.
        dataset: path of a day's dataset in its directory.
        difference: gives the first difference of the schema from that of a dataset; None if a day
            may extend it.
        days: the days, in the order in which they were learned.
    """

    def __init__(
        self, folder: Path, schema: str, dataset: str, difference: Callable[[Path], str | None]
    ) -> None:
        self.folder, self.schema, self.dataset = folder, schema, dataset
        self._difference = difference
        self.days: list[LearnedDay] = []

    def load(self, last_is_whole: bool = True) -> None:
        """Reads the record, if there is one.

        Args:
            last_is_whole: whether to check the dataset, the checkpoint and the schema of the last
                day.

        Raises:
            ValueError: it is damaged, has another schema, or a day does not follow the one before.
        """
        path = self.folder / RECORD
        if not path.exists():
            return
        found = read_sealed(path, required=True)
        self.days = [LearnedDay(**day) for day in found["days"]]
        for before, day in zip([None, *self.days], self.days, strict=False):
            parent = before.digest if before else ""
            if day.parent != parent:
                raise ValueError(f"{path}: day {day.name} does not follow the day before it")
        if (seconds := path.stat().st_mtime - time.time()) > _CLOCK:
            raise ValueError(
                f"{path}: was written {seconds:.0f} s after the present time of this machine, "
                "whose clock has gone back; set it first"
            )
        if not last_is_whole:
            return
        self._check_last()
        if found.get("schema") != self.schema and (why := self._difference(self.last_dataset)):
            raise ValueError(
                f"--schema: expected the schema with which {self.folder} was begun, got another "
                f"one: {why}; give back the former file, or name another --output"
            )

    def _check_last(self) -> None:
        """Raises ValueError unless dataset and checkpoint of the last day are those recorded."""
        if not self.days:
            return
        last = self.days[-1]
        for what in ("dataset", "checkpoint"):
            path, recorded = getattr(self, f"{what}_of")(last.name), getattr(last, what)
            found = digest_of(path)
            if found != recorded:
                shown = "none" if found is None else f"one of another run ({found[:12]})"
                raise ValueError(
                    f"{path}: expected the {what} of day {last.name} ({recorded[:12]}), got {shown}"
                )

    def path_of(self, day: str) -> Path:
        """Returns the directory of a day."""
        return self.folder / FOLDER / day

    def dataset_of(self, day: str) -> Path:
        """Returns the dataset of a day."""
        return self.path_of(day) / self.dataset

    @property
    def last_dataset(self) -> Path:
        """Returns the dataset of the last day."""
        return self.dataset_of(self.days[-1].name)

    def checkpoint_of(self, day: str) -> Path:
        """Returns the last checkpoint of a day; one that does not exist if there is none."""
        run = self.path_of(day) / "run"
        return max(run.glob("step-*"), default=run / "step")

    def add(self, day: LearnedDay) -> None:
        """Records a day, at once."""
        assert day.parent == (self.days[-1].digest if self.days else "")
        self.days.append(day)
        self._write()

    def remove_last(self, name: str) -> None:
        """Removes the last day from the record, and its directory.

        Raises:
            ValueError: another day is the last, or the day before is no longer on disk.
        """
        if not self.days or self.days[-1].name != name:
            last = self.days[-1].name if self.days else "none"
            raise ValueError(f"--undo {name}: expected the last day that was learned, {last}")
        *left, removed = self.days
        if not left:
            raise ValueError(
                f"--undo {name}: it is the only day; name another --output and begin again"
            )
        if digest_of(self.dataset_of(left[-1].name)) != left[-1].dataset:
            raise ValueError(
                f"--undo {name}: expected the dataset of the day before it, got none (--keep); "
                "name another --output and begin again"
            )
        self.days, folder = left, self.path_of(removed.name)
        (folder / BEGUN).unlink(missing_ok=True)  # so that a part of the directory is not resumed
        self._write()
        shutil.rmtree(folder, ignore_errors=True)

    def _write(self) -> None:
        entries = {"schema": self.schema, "days": [asdict(one) for one in self.days]}
        write_atomically(self.folder / RECORD, sealed_json(entries))

    def new_days(self, found: Sequence[Day], skipped: Sequence[str]) -> list[Day]:
        """Returns the days to learn: those after the last one that are not skipped.

        Raises:
            ValueError: a day is new and before the last one, or has changed since it was learned.
        """
        learned = {day.name: day for day in self.days}
        last, new = self.days[-1].name if self.days else None, []
        for name in skipped:
            if name in learned:
                raise ValueError(f"--skip {name}: the day has been learned already")
        for day in found:
            if day.name in skipped:
                continue
            if day.name in learned:
                self._check_same(day, learned[day.name])
            elif last is not None and order_of(day.name) < order_of(last):
                raise ValueError(
                    f"{day.place}: is before {last}, which has been learned; --skip {day.name} "
                    "leaves it out"
                )
            else:
                new.append(day)
        return new

    def _check_same(self, day: Day, learned: LearnedDay) -> None:
        if day.files == learned.files or (content := day.digest()) == learned.content:
            return
        same = [f", and has the content of {o.name} now" for o in self.days if o.content == content]
        raise ValueError(
            f"{day.place}: has changed since it was learned{''.join(same)}; give back the former "
            f"file, remove it, or undo the days from {day.name} on (--undo)"
        )

    def check_new(self, day: Day, content: str) -> None:
        """Raises ValueError if a day has the content of one that was learned."""
        same = [one.name for one in self.days if one.content == content]
        if same:
            raise ValueError(
                f"{day.place}: has the same content as {same[0]}, which has been learned; --skip "
                f"{day.name} leaves it out"
            )


@contextmanager
def open_chain(
    folder: Path,
    schema: str,
    dataset: str = "dataset",
    difference: Callable[[Path], str | None] = lambda _: "another file",
    last_is_whole: bool = True,
) -> Iterator[Chain]:
    """Opens the chain of a directory, and keeps others from changing it meanwhile.

    Args:
        folder, schema, dataset, difference: see `Chain`.
        last_is_whole: see `Chain.load`.

    Raises:
        FileExistsError: another process is at work there, or it is something else.
        ValueError: see `Chain.load`.
    """
    if folder.exists() and any(name not in (FOLDER, LOCK, LOG) for name in _names(folder)):
        raise FileExistsError(f"{folder}: exists and has no {RECORD}; name another --output")
    make_directories(folder / FOLDER)
    lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o666)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileExistsError(f"{folder}: another dlrm daily is at work here") from None
        chain = Chain(folder, schema, dataset, difference)
        chain.load(last_is_whole)
        yield chain
    finally:
        os.close(lock)


def _names(folder: Path) -> list[str]:
    """Returns the names in a directory that has no record."""
    if not folder.is_dir():
        raise FileExistsError(f"{folder}: expected a directory (--output), got a file")
    return [] if (folder / RECORD).exists() else [entry.name for entry in folder.iterdir()]


def digest_of(directory: Path) -> str | None:
    """Returns the SHA-256 of the manifest of a directory, or None if it has none."""
    path = directory / MANIFEST
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
