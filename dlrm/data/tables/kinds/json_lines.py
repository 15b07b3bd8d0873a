"""Files of JSON lines, whose rows become columns of text; numbers keep their text."""

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dlrm.data.sources.text_files import (
    LONGEST_LINE,
    archive_named,
    not_utf_8,
    open_text,
    too_long,
    without_mark,
    wrong_encoding,
)
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.kinds.cells import Cell, Cells
from dlrm.data.tables.kinds.text import Column, Reading, Text
from dlrm.data.transform.lists import in_list
from dlrm.data.transform.values import number_text
from dlrm.documents import brief

_FIRST_ROWS = 1000  # whose columns are those of the file


class JsonLines(Text):
    """A map of columns to values on each line, which need not have all columns."""

    name, title = "jsonl", "JSON lines"
    suffixes = (".jsonl", ".ndjson", ".json")
    may_lack_columns = True

    def begins(self, start: bytes) -> bool:
        """Returns whether a file begins with a map."""
        return without_mark(start).startswith(b"{")

    def names(self, path: Path, text: TextFormat) -> list[str]:
        """Returns the columns of the first 1,000 rows."""
        rows = read_json_lines(path, replace(text, chunk_rows=_FIRST_ROWS), wanted=())
        return next((block.names for block in rows), [])

    def read(
        self, path: Path, reading: Reading
    ) -> Iterator[tuple[list[str], np.ndarray, list[Column]]]:
        """Yields the rows of a file; see `Text.read`."""
        text, lists, columns, problems, _, nested = reading
        for rows in read_json_lines(path, text, problems, lists, columns, nested):
            wanted = rows.names if columns is None else [n for n in rows.names if n in columns]
            cells: list[Column] = [(name, [row.get(name) for row in rows.cells]) for name in wanted]
            yield rows.names, np.array(rows.lines, np.int64), cells

    def array(
        self,
        name: str,
        column: pa.Array | list[Cell],
        cells: Cells,
        text: TextFormat,
        numbers: set[str],
    ) -> pa.Array:
        """Returns the cells of a column; see `Text.array`."""
        plain = plain_numbers(column, name, numbers)
        return cells.array(name, column if cells.earlier else plain)


def plain_numbers(column: Iterable[Cell], name: str, numbers: set[str]) -> list[Cell]:
    """Returns cells in which numbers have the text of typed ones.

    If there are other values, the column's name is removed from `numbers`.
    """
    cells: list[Cell] = []
    for cell in column:
        if isinstance(cell, list):
            numbers -= {name for value in cell if not isinstance(value, Number)}
            cell = [number_text(value) if isinstance(value, Number) else value for value in cell]
        elif isinstance(cell, Number):
            cell = number_text(cell)
        elif cell is not None:
            numbers.discard(name)
        cells.append(cell)
    return cells


class Number(str):
    """The text of a number, which was no text in JSON."""


class JsonRows(NamedTuple):
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
) -> Iterator[JsonRows]:
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
                yield JsonRows(list(names), lines, rows)
                lines, rows = [], []
    yield JsonRows(list(names), lines, rows)


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
    cells: dict[str, Cell] = {}
    for name, value in row.items():
        if wanted is not None and name not in wanted:
            cells[name] = None
        elif nested is not None and _is_nested(value):
            nested.setdefault(name, f"{brief(value)} in line {number}")
            cells[name] = None
        elif isinstance(value, list) and (lists is None or name in lists):
            cells[name] = [
                _value(f"column {name}: {in_list(place, '')}", item)
                for place, item in enumerate(value)
            ]
        elif lists and name in lists and not _may_be_list(value):
            raise ValueError(f"column {name}: expected a list of values, got {brief(value)}")
        else:
            cells[name] = _value(f"column {name}: ", value)
    return cells


def _may_be_list(value: Any) -> bool:
    """Returns whether a value that is no list is missing, or text that is split as in CSV."""
    return value is None or (isinstance(value, str) and not isinstance(value, Number))


def _is_nested(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(item, dict | list) for item in value)
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
    if len(mapping := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two values of {twice!r}")
    return mapping
