"""Results of runs: one JSON object a line, appended as runs end."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dlrm.files import errors_named
from dlrm.locks import lock

Record = dict[str, Any]
# What runs must have in common to be compared.
SETTING = (
    *("arguments", "processes", "threads", "smoke", "emulated", "pipeline", "data", "torch"),
    "processor",
)


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Within the block no other process appends to a file of results.

    Raises:
        BlockingIOError: another process does.
        OSError: the file cannot be written.
    """
    busy = f"--results {path}: another run appends to it; wait, or name another file"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise OSError(f"--results {path}: cannot be written: {error.strerror}") from None
    with lock(path.with_name(f".{path.name}.lock"), busy):
        yield


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Adds a run, in place of a last line that a killed process left unfinished."""
    with errors_named(path), path.open("rb+" if path.exists() else "wb") as file:
        text = path.read_bytes()
        end = text.rfind(b"\n") + 1
        try:
            json.loads(text[end:])
            file.seek(0, 2)
            file.write(b"\n")
        except ValueError:
            file.seek(end)
            file.truncate()
        file.write(json.dumps(record).encode() + b"\n")


def read(path: Path) -> list[Record]:
    """Returns all runs of a file, in their order; none where there is no file.

    Skips a last line that a killed process left unfinished.

    Raises:
        ValueError: another line is no result; file and line are named.
    """
    if not path.exists():
        return []
    try:
        lines = path.read_text().split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: no file of results, since it is not text") from None
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                continue
            raise ValueError(f"{path}, line {number}: {error}") from None
        if problem := _problem(record):
            raise ValueError(f"{path}, line {number}: no result of a run: {problem}")
        records.append(record)
    return records


def _problem(record: Any) -> str:
    """Returns why a line is no result; "" where it is one."""
    if not isinstance(record, dict):
        return "expected an object"
    kinds = {"row": str, "label": str, "exit_code": int, "nodes": int, "devices": int}
    for name, kind in kinds.items():
        if not isinstance(record.get(name), kind) or isinstance(record[name], bool):
            return f"expected {kind.__name__} as {name!r}, got {record.get(name)!r:.40}"
    if min(record["nodes"], record["devices"]) < 1:
        return "expected one device or more"
    if record["exit_code"]:
        return "" if isinstance(record.get("error"), str) else "expected the error of a failed run"
    values = record.get("values")
    if not isinstance(values, list) or not values:
        return f"expected a list of numbers as 'values', got {values!r:.40}"
    if not all(isinstance(v, int | float) and math.isfinite(v) for v in values):
        return "expected finite numbers as 'values'"
    return ""


def matching(records: Iterable[Record], setting: Mapping[str, Any]) -> list[Record]:
    """Returns the runs of a setting, failures included."""
    wanted = json.loads(json.dumps(dict(setting)))
    return [r for r in records if all(r.get(key) == value for key, value in wanted.items())]


def finished(records: Iterable[Record]) -> list[Record]:
    """Returns the runs that gave a value."""
    return [record for record in records if record["exit_code"] == 0]


def setting_of(record: Record, but: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the settings that a run shares with those it is compared with.

    Args:
        but: parts of the setting that may differ.
    """
    return {key: record.get(key) for key in SETTING if key not in but}


def percentiles(values: list[float]) -> dict[str, float]:
    """Returns the 50th, 90th and 99th percentile by nearest rank."""
    ordered = sorted(values)
    return {f"p{q}": ordered[math.ceil(q / 100 * len(ordered)) - 1] for q in (50, 90, 99)}
