"""Verifies a chain of days, and describes it: values and candidates by day and dictionary."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlrm.command_line import aligned
from dlrm.data.clicks import layout
from dlrm.data.transform import stored
from dlrm.data.transform.dictionaries import segment_name, segments_of
from dlrm.data.transform.transform import Transform
from dlrm.documents import read_json
from dlrm.files import MANIFEST
from dlrm.manifest import check_file, read_manifest
from dlrm.preproc.increments.segments import DAY
from dlrm.preproc.stages.options import day_number

_FOLDERS = (f"{layout.TRANSFORM}/", f"{layout.CHAIN}/")
_BAR = 20  # characters


@dataclass
class _Link:
    """A dataset or checkpoint with a transform of a chain."""

    path: Path
    digest: str
    fitted: Transform

    @property
    def days(self) -> list[dict[str, Any]]:
        """Returns the facts of its days, with its own digest."""
        increment = self.fitted.increment
        assert increment is not None
        return [*increment.days[:-1], increment.days[-1] | {"transform": self.digest}]


@dataclass
class _Files:
    """Compares files with the checksums of manifests, each file once, whatever its links."""

    faults: dict[tuple[int, int], str] = field(default_factory=dict)  # "" for none
    users: dict[tuple[int, int], list[Path]] = field(default_factory=dict)

    def check(self, link: _Link) -> Iterator[str]:
        """Compares the files of a transform and its chain; yields what is wrong besides them."""
        try:
            kind = read_json(link.path / MANIFEST)["kind"]
            files = read_manifest(link.path, kind)["files"]
        except (OSError, ValueError, KeyError) as error:
            yield str(error)
            return
        for name, facts in files.items():
            if not name.startswith(_FOLDERS):
                continue
            path = link.path / name
            status = path.stat()
            key = status.st_dev, status.st_ino
            self.users.setdefault(key, []).append(link.path)
            if key not in self.faults:
                self.faults[key] = ""
                try:
                    check_file(path, facts["crc32"])
                except ValueError as error:
                    self.faults[key] = str(error)

    def damaged(self) -> list[str]:
        """Returns a line for each damaged file, with all that use it."""
        return [
            f"{fault}; it is used by {', '.join(dict.fromkeys(map(str, self.users[key])))}"
            for key, fault in self.faults.items()
            if fault
        ]


def inspect_chain(path: Path) -> dict[str, Any]:
    """Returns a description of the chain of days of a dataset or checkpoint, as JSON values.

    Earlier days are found by the digests of their transforms, beside the path: in the directory
    above it, or below the directories beside that one under the same name.

    Raises:
        FileNotFoundError: the path has no transform.
        ValueError: its transform is damaged, or is in no chain.
    """
    own = _link(path)
    if own is None:
        raise ValueError(
            f"{path}: expected the transform of a day (prepare --day or --extend), got one that is "
            "in no chain"
        )
    start = own.days[0]["transform"]
    others = (link for link in _links_beside(path) if link.days[0]["transform"] == start)
    beside = [own, *others]
    by_digest = {link.digest: link for link in reversed(beside)}
    files, faults = _Files(), list(_of_order(own))
    for link in beside:
        faults += files.check(link)
    days, values = [], 0
    for day in own.days:
        values += sum(day["new"])
        found = by_digest.get(day["transform"])
        if found is not None and found.days != own.days[: len(found.days)]:
            faults.append(f"{found.path}: its days are not those that {path} has of it")
        same = [link for link in beside if link.days[-1]["day"] == day["day"]]
        if found is None and same:
            faults.append(
                f"{same[0].path}: day {day['day']} has another transform than the one that "
                f"{path} extends: it was prepared again since"
            )
        sums = {name: sum(day[name]) for name in ("new", "candidates", "forgotten")}
        days.append(
            {"day": day["day"], "rows": day["rows"], "values": values}
            | sums
            | {"transform": day["transform"], "dataset": found and str(found.path)}
        )
    faults += files.damaged()
    increment = own.fitted.increment
    assert increment is not None
    return {
        "path": str(path),
        "day": increment.day,
        "numerics": increment.numerics,
        "files_checked": len(files.faults),
        "days": days,
        "dictionaries": list(_dictionaries(own)),
        "faults": faults,
    }


def _link(path: Path) -> _Link | None:
    """Returns a transform of a chain; None if it is in none."""
    fitted = Transform.load(path / layout.TRANSFORM)
    if fitted.increment is None:
        return None
    return _Link(path, stored.digest(path / layout.TRANSFORM), fitted)


def _links_beside(path: Path) -> Iterator[_Link]:
    place = path.resolve()
    for folder in sorted({*place.parent.glob("*"), *place.parent.parent.glob(f"*/{place.name}")}):
        if folder != place and (folder / layout.TRANSFORM).is_dir():
            try:
                link = _link(folder)
            except (OSError, ValueError):
                continue  # of which no digest is known
            if link is not None:
                yield link


def _of_order(own: _Link) -> Iterator[str]:
    numbers = [day_number(day["day"]) for day in own.days]
    if sorted(set(numbers)) != numbers:
        yield f"{own.path}: expected days in order, got {[day['day'] for day in own.days]}"
    sizes = [sum(column) for column in zip(*(day["new"] for day in own.days), strict=True)]
    if sizes != list(map(len, own.fitted.dictionaries)):
        yield f"{own.path}: its days add up to other dictionaries than its own"
    state = own.path / layout.CHAIN / DAY
    if state.exists() and read_json(state).get("transform") != own.digest:
        yield f"{state}: belongs to another transform, so it is left over from another run"


def _dictionaries(own: _Link) -> Iterator[dict[str, Any]]:
    fitted, last = own.fitted, own.days[-1]
    for place, fields in enumerate(fitted.schema.dictionaries().values()):
        dictionary, sizes = fitted.dictionaries[place], []
        for k, segment in enumerate(segments_of(dictionary)):
            name = segment_name(place, k)
            files = (own.path / layout.TRANSFORM).glob(f"*_{name}.npy")
            sizes.append({"values": len(segment), "bytes": sum(p.stat().st_size for p in files)})
        kept = (own.path / layout.CHAIN).glob(f"candidate_*_{place}.npy")
        yield {
            "columns": [field.column for field in fields],
            "values": len(dictionary),
            "new": last["new"][place],
            "candidates": last["candidates"][place],
            "forgotten": last["forgotten"][place],
            "segments": sizes,
            "bytes": sum(size["bytes"] for size in sizes),
            "candidate_bytes": sum(path.stat().st_size for path in kept),
        }


def lines_of_chain(found: dict[str, Any]) -> list[str]:
    """Returns the description of a chain as lines."""
    days, faults = found["days"], found["faults"]
    checked = f"{found['files_checked']} files " + ("checked" if faults else "are right")
    lines = [f"{found['path']}: a chain of {len(days)} days, up to {found['day']}; {checked}", ""]
    most = max(day["values"] for day in days) or 1
    width = max(len(day["dataset"] or "not here") for day in days)
    rows = [
        [
            day["day"],
            _count(day["rows"]),
            *(_count(day[name]) for name in ("values", "new", "forgotten", "candidates")),
            ("#" * round(_BAR * day["values"] / most)).ljust(_BAR),
            (day["dataset"] or "not here").ljust(width),
        ]
        for day in days
    ]
    heads = ["day", "rows", "values", "new", "forgotten", "candidates", "", "dataset".ljust(width)]
    lines += aligned(heads, rows)
    names = ("values", "new", "forgotten", "candidates", "bytes", "candidate_bytes")
    fields = [
        [", ".join(one["columns"]), *(_count(one[name]) for name in names)]
        + [str(len(one["segments"]))]
        for one in found["dictionaries"]
    ]
    heads = ["field", *names[:-1], "of candidates", "segments"]
    lines += ["", *aligned(heads, fields)]
    return lines + ([""] if faults else []) + [f"wrong: {fault}" for fault in faults]


def _count(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"
