"""Results of runs: one JSON object a line, appended as runs end."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Record = dict[str, Any]
# What may differ between runs that are compared: which run it was, and what it gave.
SETTING = (
    *("arguments", "processes", "threads", "smoke", "emulated", "pipeline", "data", "torch"),
    "processor",
)


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Adds a run.

    Raises:
        OSError: the file cannot be written; the path is named.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def read(path: Path) -> list[Record]:
    """Returns all runs of a file, in their order; none where there is no file.

    A last line that a killed process left unfinished is passed over.

    Raises:
        ValueError: another line is no result; file and line are named.
    """
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or "row" not in record:
                raise ValueError("no result of a run")
        except ValueError as error:
            if number == len(lines):
                continue
            raise ValueError(f"{path}, line {number}: {error}") from None
        records.append(record)
    return records


def matching(records: Iterable[Record], setting: Mapping[str, Any]) -> list[Record]:
    """Returns the runs of a setting, failures included."""
    wanted = json.loads(json.dumps(dict(setting)))
    return [r for r in records if all(r.get(key) == value for key, value in wanted.items())]


def finished(records: Iterable[Record]) -> list[Record]:
    """Returns the runs that gave a value."""
    return [r for r in records if r.get("exit_code") == 0 and r.get("values")]


def check_comparable(groups: Iterable[Iterable[Record]], but: Iterable[str] = ()) -> None:
    """Raises ValueError where the settings of runs differ that are to be compared.

    Args:
        groups: runs; those of all groups must agree.
        but: parts of the setting that are meant to differ.
    """
    seen: dict[str, tuple[Any, str]] = {}
    skipped = set(but)
    for record in (record for group in groups for record in group):
        name = f"{record['row']} at {record['label']}"
        for key in SETTING:
            if key in skipped:
                continue
            value, first = seen.setdefault(key, (record.get(key), name))
            if record.get(key) != value:
                raise ValueError(
                    f"{first} and {name} ran in different settings, {key} {value} and "
                    f"{record.get(key)}; run both anew in one setting"
                )


def percentiles(values: list[float]) -> dict[str, float]:
    """Returns the 50th, 90th and 99th percentile by nearest rank."""
    ordered = sorted(values)
    return {f"p{q}": ordered[math.ceil(q / 100 * len(ordered)) - 1] for q in (50, 90, 99)}
