"""Rows of JSON lines as columns of text; numbers keep their text."""

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dlrm.data.sources.text_files import (
    LONGEST_LINE,
    archive_named,
    not_utf_8,
    open_text,
    too_long,
    wrong_encoding,
)
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.transform.lists import in_list
from dlrm.documents import brief

Cell = str | list[str | None] | None


class Number(str):
    """The text of a number, which was no text in JSON."""


class Rows(NamedTuple):
    """Some rows of JSON lines: names of the columns, and the line and the cells of each row."""

    names: list[str]
    lines: list[int]
    cells: list[dict[str, Cell]]


def read_json_lines(
    path: Path,
    text: TextFormat,
    problems: dict[int, str] | None = None,
    lists: Collection[str] | None = None,
    wanted: Collection[str] | None = None,
    nested: dict[str, str] | None = None,
) -> Iterator[Rows]:
    """Yields the rows of a file, some at a time; blank lines are no rows.

    Args:
        path: plain or compressed.
        text: its encoding, compression and the rows at a time.
        problems: receives the problem of a row as a whole, by line, with a tab and the row, whose
            cells are then empty; None raises the first.
        lists: the only columns with lists; None allows lists anywhere.
        wanted: columns whose cells are read, others being None; None is all.
        nested: receives columns of maps and of lists of them, which have no cells, with the first
            line of each; None refuses them.

    Raises:
        ValueError: a line is not a map of columns to values; the message has file and line.
    """
    names: dict[str, int] = {}
    lines: list[int] = []
    rows: list[dict[str, Cell]] = []
    number = 0
    with (
        open_text(path, text.encoding, text.compression) as file,
        archive_named(path, lambda: number),
    ):
        while line := _line(file, path, number, text.encoding):
            number += 1
            if len(line) == LONGEST_LINE and not line.endswith("\n"):
                raise too_long(path, number)
            if not line.strip():
                continue
            if number == 1 and line.lstrip()[0] == "[" and problems is None:
                raise ValueError(
                    f"{path}: expected a map of columns to values on each line, got an array; "
                    "`jq -c .[]` writes its elements as lines, or read it as a data frame"
                )
            try:
                rows.append(_row(line, lists, wanted, nested, number))
            except ValueError as error:
                if problems is None:
                    raise ValueError(f"{path}, line {number}, {error}") from None
                shown = line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
                problems[number] = f"{error}\t{shown.rstrip()}"
                rows.append({})
            lines.append(number)
            names |= dict.fromkeys(rows[-1], 0)
            if len(rows) == text.chunk_rows:
                yield Rows(list(names), lines, rows)
                lines, rows = [], []
    yield Rows(list(names), lines, rows)


def _line(file: Any, path: Path, number: int, encoding: str | None) -> str:
    try:
        return file.readline(LONGEST_LINE)
    except UnicodeError as error:
        raise wrong_encoding(path, number, encoding, error) from None


def _row(
    line: str,
    lists: Collection[str] | None,
    wanted: Collection[str] | None,
    nested: dict[str, str] | None,
    number: int,
) -> dict[str, Cell]:
    if not line.isascii() and (problem := not_utf_8(line)):
        raise ValueError(problem)
    try:
        row = json.loads(line, parse_int=Number, parse_float=Number, object_pairs_hook=_pairs)
    except RecursionError:
        raise ValueError("no JSON (lists and maps nested too deeply)") from None
    except ValueError as error:
        raise ValueError(f"no JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected a map of columns to values, got {brief(row)}")
    found: dict[str, Cell] = {}
    for name, value in row.items():
        if wanted is not None and name not in wanted:
            found[name] = None
        elif nested is not None and _is_nested(value):
            nested.setdefault(name, f"{brief(value)} in line {number}")
            found[name] = None
        elif isinstance(value, list) and (lists is None or name in lists):
            found[name] = [
                _value(f"column {name}: {in_list(place, '')}", one)
                for place, one in enumerate(value)
            ]
        elif lists and name in lists and not _may_be_list(value):
            raise ValueError(f"column {name}: expected a list of values, got {brief(value)}")
        else:
            found[name] = _value(f"column {name}: ", value)
    return found


def _may_be_list(value: Any) -> bool:
    """Returns whether a value that is no list is missing, or text that is split as in CSV."""
    return value is None or (isinstance(value, str) and not isinstance(value, Number))


def _is_nested(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(one, dict | list) for one in value)
    return isinstance(value, dict)


def _value(where: str, value: Any) -> str | None:
    if isinstance(value, dict | list):
        raise ValueError(f"{where}expected one value, got {brief(value)}")
    if isinstance(value, bool):
        value = "true" if value else "false"
    if isinstance(value, float):  # NaN and Infinity, which are no numbers of JSON
        value = Number(value)
    if isinstance(value, str) and not value.isascii() and not_utf_8(value):
        raise ValueError(f"{where}expected text, got half of a UTF-16 pair")
    return value


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two values of {twice!r}")
    return found
