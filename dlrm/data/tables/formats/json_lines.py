"""Files of JSON lines, whose rows become columns of text; numbers keep their text."""

import io
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dlrm.data.sources import native
from dlrm.data.sources.csv_rows import CHUNK_ROWS, Reading, Spans, array_of_cells
from dlrm.data.sources.row_error import LineError
from dlrm.data.sources.text_files import (
    has_lone_returns,
    is_utf_8,
    not_utf_8,
    read_blocks,
    without_mark,
)
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.formats.cells import Cell, Cells
from dlrm.data.tables.formats.text import Rows, Text
from dlrm.data.transform.rows import in_list
from dlrm.data.transform.values import is_inexact, number_text
from dlrm.documents import brief

_BLOCK_BYTES = 16 << 20
_FIRST_ROWS = 1000  # whose columns are those of the file
_Lines = tuple[list[int], list[dict[str, Cell]]]  # numbers of lines, and their rows


class JsonLines(Text):
    """A map of columns to values on each line, which need not have all columns."""

    name, title = "jsonl", "JSON lines"
    suffixes = (".jsonl", ".ndjson", ".json")
    may_lack_columns = True

    def begins(self, start: bytes) -> bool:
        return without_mark(start).startswith(b"{")

    def names(self, path: Path, text: TextFormat) -> list[str]:
        reader = _Reader(path, Reading(text, columns=()))
        lines = itertools.chain.from_iterable(map(_lines_of, reader.blocks()))
        next(reader.python_rows(lines, _FIRST_ROWS))
        return list(reader.names)

    def read(self, path: Path, reading: Reading, cells: Cells, numbers: set[str]) -> Iterator[Rows]:
        reader = _Reader(path, reading)

        def rows_of(lines: list[int], rows: list[dict[str, Cell]]) -> Rows:
            arrays = {
                name: _array(name, [row.get(name) for row in rows], cells, numbers, reading.mixed)
                for name in reader.names
                if reading.columns is None or name in reading.columns
            }
            return list(reader.names), np.array(lines, np.int64), arrays

        for block in reader.blocks():
            if (read := reader.native_rows(block)) is None:
                for lines, rows in reader.python_rows(_lines_of(block), CHUNK_ROWS):
                    yield rows_of(lines, rows)
                continue
            pairs = zip(read.names, read.columns, strict=False)
            columns = {name: column for name, column in pairs if column is not None}
            arrays = {n: _native_array(c, n in reading.distinct) for n, c in columns.items()}
            texts = {n: c for n, c in columns.items() if isinstance(c, native.Texts)}
            others = {name for name, column in texts.items() if not column.tags.all()}
            for begin in range(0, len(read.lines), CHUNK_ROWS):
                part = slice(begin, begin + CHUNK_ROWS)
                numbers -= others
                yield read.names, read.lines[part], {n: array[part] for n, array in arrays.items()}
        yield rows_of([], [])


class Number(str):
    """The text of a number, which was no text in JSON."""


def _array(
    name: str,
    column: Iterable[Cell],
    cells: Cells,
    numbers: set[str],
    mixed: dict[str, None] | None,
) -> pa.Array:
    """Returns a column in which numbers have the text of typed ones.

    If there are other values, the column's name is removed from `numbers`.
    """
    plain: list[Cell] = []
    for cell in column:
        if isinstance(cell, list):
            numbers -= {name for value in cell if not isinstance(value, Number)}
            cell = [_plain(value) if isinstance(value, Number) else value for value in cell]
        elif isinstance(cell, Number):
            cell = _plain(cell)
        elif cell is not None:
            numbers.discard(name)
        plain.append(cell)
    if mixed is None:
        return cells.array(name, plain)
    types = {type(cell) for cell in plain if cell is not None}
    if list in types and len(types) > 1:
        mixed[name] = None
    elif types:
        return pa.array(plain, pa.list_(pa.string()) if list in types else pa.string())
    return pa.nulls(len(plain))


def _plain(number: str) -> str:
    """Returns a number's text, from which a float that need not be exact can still be told."""
    return str(number) if is_inexact(number) else number_text(number)


def _native_array(column: native.Texts | np.ndarray, distinct: bool) -> pa.Array:
    """Returns a column in which numbers have the text of typed ones, perhaps as indices."""
    array = array_of_cells(column)
    if not isinstance(column, native.Texts):
        return array
    if others := np.flatnonzero(column.tags == native.OTHER_NUMBER).tolist():
        texts = array.dictionary.to_pylist()
        for index in others:
            texts[index] = _plain(texts[index])
        array = pa.DictionaryArray.from_arrays(array.indices, pa.array(texts, pa.string()))
    return array if distinct else array.dictionary_decode()


class _Reader:
    """Reads the rows of a file, some at a time; blank lines are no rows.

    A line that is not a map of columns to values is a ValueError with file and line.

    Attributes:
        names: the columns so far, in their order.
    """

    def __init__(self, path: Path, reading: Reading) -> None:
        self._path, self._reading = path, reading
        self._spans = reading.spans or Spans()
        self._line = reading.within.lines if reading.within else 0  # that have been read
        self.names: dict[str, None] = {}

    def blocks(self) -> Iterator[bytes]:
        """Yields the text of the file."""
        reading = self._reading
        if reading.content is not None:
            return iter([reading.content])
        where = reading.within, lambda: self._line
        return read_blocks(self._path, _BLOCK_BYTES, reading.text, *where)

    def native_rows(self, block: bytes) -> native.JsonBlock | None:
        """Returns the rows of a block if they have nothing that needs a decision."""
        wanted, lists, numbers = self._reading.columns, self._reading.lists, self._reading.numbers
        if wanted is None or (lists and not set(lists).isdisjoint(wanted)):
            return None
        if b"\0" in block or has_lone_returns(block) or not is_utf_8(block):
            return None
        if not self.names:
            self.names |= dict.fromkeys(_first_names(block))
        while True:
            names = list(self.names)
            kept = [native.DISTINCT if name in wanted else native.NOTHING for name in names]
            kept = [native.NUMBERS if n in numbers else k for n, k in zip(names, kept, strict=True)]
            read = native.read_json(block, names, kept)
            if not read.decided:
                return None
            self.names |= dict.fromkeys(read.names)
            if set(read.names[len(names) :]).isdisjoint(wanted):
                break
        pairs = zip(names, read.columns, strict=False)
        numbers -= {name for name, column in pairs if isinstance(column, native.Texts)}
        lines = self._line + read.lines
        self._line += read.num_lines
        self._spans.read += read.num_lines
        return read._replace(lines=lines)

    def python_rows(self, lines: Iterable[str], most: int) -> Iterator[_Lines]:
        """Yields the numbers of lines and their rows, at most so many; the last may be none."""
        numbers: list[int] = []
        rows: list[dict[str, Cell]] = []
        path, problems = self._path, self._reading.problems
        for line in lines:
            self._line += 1
            self._spans.read += 1
            if not line.strip():
                continue
            if self._line == 1 and line.lstrip()[0] == "[" and problems is None:
                raise ValueError(
                    f"{path}: expected a map of columns to values on each line, got an array; "
                    "`jq -c .[]` writes its elements as lines, or read it as a data frame"
                )
            try:
                rows.append(_row(line, self._line, self._reading))
            except ValueError as error:
                if problems is None:
                    raise LineError(f"{path}, line {self._line}, {error}") from None
                shown = line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
                problems[self._line] = f"{error}\t{shown.rstrip()}"
                rows.append({})
            numbers.append(self._line)
            self.names |= dict.fromkeys(rows[-1])
            if len(rows) == most:
                yield numbers, rows
                numbers, rows = [], []
        yield numbers, rows


def _first_names(block: bytes) -> list[str]:
    """Returns the columns of a block's first line; none if it is not a map."""
    try:
        row = json.loads(block.lstrip().partition(b"\n")[0])
    except (ValueError, RecursionError):
        return []
    names = list(row) if isinstance(row, dict) else []
    return [] if any(map(not_utf_8, names)) else names


def _lines_of(block: bytes) -> Iterable[str]:
    return io.StringIO(block.decode("utf-8", "surrogateescape"), newline="")


def _row(line: str, number: int, reading: Reading) -> dict[str, Cell]:
    """Returns the cells of a line; those of columns that are not wanted are None."""
    lists, nested = reading.lists, reading.nested
    if problem := not_utf_8(line):
        raise ValueError(problem)
    try:
        row = json.loads(line, parse_int=Number, parse_float=Number, object_pairs_hook=_pairs)
    except RecursionError:
        raise ValueError("no JSON (lists and maps nested too deeply)") from None
    except ValueError as error:
        raise ValueError(f"no JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected a map of columns to values, got {brief(row)}")
    cells = dict[str, Cell].fromkeys(row)
    for name, value in row.items():
        if reading.columns is not None and name not in reading.columns:
            continue
        is_list = isinstance(value, list)
        values = value if is_list else [value]
        if nested is not None and any(isinstance(item, dict | list) for item in values):
            nested.setdefault(name, f"{brief(value)} in line {number}")
        elif is_list and (lists is None or name in lists):
            cells[name] = [
                _value(f"column {name}: {in_list(index, '')}", item)
                for index, item in enumerate(values)
            ]
        elif lists and name in lists and value is not None and type(value) is not str:
            raise ValueError(f"column {name}: expected a list of values, got {brief(value)}")
        else:
            cells[name] = _value(f"column {name}: ", value)
    return cells


def _value(where: str, value: Any) -> str | None:
    if isinstance(value, dict | list):
        raise ValueError(f"{where}expected one value, got {brief(value)}")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):  # NaN and Infinity, which are no numbers of JSON
        return Number(value)
    if value is not None and not_utf_8(value):
        raise ValueError(f"{where}expected text, got half of a UTF-16 pair")
    return value


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(mapping := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two values of {twice!r}")
    return mapping
