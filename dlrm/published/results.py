"""Results of runs: one JSON object a line, appended as runs end."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dlrm.files import write_atomically
from dlrm.locks import lock

Record = dict[str, Any]
_KINDS = {"row": str, "label": str, "exit_code": int, "nodes": int, "devices": int}


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
    """Adds a run to a file of results; a killed process leaves the file as it was."""
    lines = path.read_text().splitlines() if path.exists() else []
    write_atomically(path, "\n".join([*lines, json.dumps(record), ""]))


def read(path: Path) -> list[Record]:
    """Returns all runs of a file, in their order; none where there is no file.

    Raises:
        ValueError: a line is no result; file and line are named.
    """
    try:
        lines = path.read_text().splitlines() if path.exists() else []
    except UnicodeDecodeError:
        raise ValueError(f"{path}: no file of results, since it is not text") from None
    records = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                records.append(_checked(json.loads(line)))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: no result of a run: {error}") from None
    return records


def _checked(record: Any) -> Record:
    if not isinstance(record, dict):
        raise ValueError("expected an object")
    outcome: dict[str, type] = {"error": str} if record.get("exit_code") else {"values": list}
    for name, kind in (_KINDS | outcome).items():
        if type(record.get(name)) is not kind:
            got = f"{record.get(name)!r:.40}"
            raise ValueError(f"expected {kind.__name__} as {name!r}, got {got}")
    if min(record["nodes"], record["devices"]) < 1:
        raise ValueError("expected one device or more")
    values = record.get("values", [0.0])
    if not values or not all(isinstance(v, int | float) and math.isfinite(v) for v in values):
        raise ValueError("expected finite numbers as 'values'")
    return record


def finished(records: Iterable[Record]) -> list[Record]:
    """Returns the runs that gave a value."""
    return [record for record in records if record["exit_code"] == 0]
