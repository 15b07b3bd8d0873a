"""Files of JSON lines, whose rows become columns of text; numbers keep their text."""

import io
import itertools
import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dlrm.data.sources import native
from dlrm.data.sources.csv_rows import Reading, Spans, array_of_cells
from dlrm.data.sources.row_error import LineError
from dlrm.data.sources.text_files import (
    has_lone_returns,
    is_utf_8,
    not_utf_8,
    read_blocks,
    without_mark,
)
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.kinds.cells import Cell, Cells
from dlrm.data.tables.kinds.text import Rows, Text
from dlrm.data.transform.lists import in_list
from dlrm.data.transform.values import is_inexact, number_text
from dlrm.documents import brief

_BLOCK_BYTES = 16 << 20
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
        return _Rows(path, Reading(text, columns=())).first_names()

    def read(self, path: Path, reading: Reading, cells: Cells, numbers: set[str]) -> Iterator[Rows]:
        """Yields the rows of a file; see `Text.read`."""
        columns, size = reading.columns, reading.text.chunk_rows
        for block in _Rows(path, reading).of_file():
            if isinstance(block, JsonRows):
                wanted = [name for name in block.names if columns is None or name in columns]
                of_column = {name: [row.get(name) for row in block.cells] for name in wanted}
                arrays = {n: _array(n, c, cells, numbers, reading) for n, c in of_column.items()}
                yield block.names, np.array(block.lines, np.int64), arrays
                continue
            every = _arrays_of(block, reading.distinct)
            others = {n for n, c in zip(block.names, block.columns, strict=False) if _has_text(c)}
            for begin in range(0, len(block.lines), size):
                some = slice(begin, begin + size)
                numbers -= others
                yield block.names, block.lines[some], {n: array[some] for n, array in every.items()}


def _array(
    name: str, column: list[Cell], cells: Cells, numbers: set[str], reading: Reading
) -> pa.Array:
    column = plain_numbers(column, name, numbers)
    if reading.mixed is None:
        return cells.array(name, column)
    kinds = {type(cell) for cell in column if cell is not None}
    if list in kinds and len(kinds) > 1:
        reading.mixed[name] = None
    elif kinds:
        return pa.array(column, pa.list_(pa.string()) if list in kinds else pa.string())
    return pa.nulls(len(column))


def plain_numbers(column: Iterable[Cell], name: str, numbers: set[str]) -> list[Cell]:
    """Returns cells in which numbers have the text of typed ones.

    If there are other values, the column's name is removed from `numbers`.
    """
    cells: list[Cell] = []
    for cell in column:
        if isinstance(cell, list):
            numbers -= {name for value in cell if not isinstance(value, Number)}
            cell = [_plain(value) if isinstance(value, Number) else value for value in cell]
        elif isinstance(cell, Number):
            cell = _plain(cell)
        elif cell is not None:
            numbers.discard(name)
        cells.append(cell)
    return cells


def _plain(number: str) -> str:
    """Returns a number's text, from which a float that need not be exact can still be told."""
    return str(number) if is_inexact(number) else number_text(number)


class Number(str):
    """The text of a number, which was no text in JSON."""


def _has_text(column: native.Column) -> bool:
    return isinstance(column, native.Texts) and not column.tags.all()


def _arrays_of(block: native.JsonBlock, distinct: Collection[str]) -> dict[str, pa.Array]:
    """Returns the columns that were kept, of which some may stay indices; see `plain_numbers`."""
    arrays = {}
    for name, column in zip(block.names, block.columns, strict=False):
        if column is None:
            continue
        array = arrays[name] = array_of_cells(column)
        if not isinstance(column, native.Texts):
            continue
        if others := np.flatnonzero(column.tags == native.OTHER_NUMBER).tolist():
            texts = array.dictionary.to_pylist()
            for place in others:
                texts[place] = _plain(texts[place])
            array = pa.DictionaryArray.from_arrays(array.indices, pa.array(texts, pa.string()))
        arrays[name] = array if name in distinct else array.dictionary_decode()
    return arrays


class JsonRows(NamedTuple):
    """Some rows of JSON lines: names of the columns, and the line and the cells of each row."""

    names: list[str]
    lines: list[int]
    cells: list[dict[str, Cell]]


class _Rows:
    """Reads the rows of a file, some at a time; blank lines are no rows.

    A line that is not a map of columns to values is a ValueError with file and line.
    """

    def __init__(self, path: Path, reading: Reading) -> None:
        self._path, self._reading = path, reading
        self._spans = reading.spans or Spans()
        self._names: dict[str, int] = {}
        self._line = 0  # lines that have been read

    def first_names(self) -> list[str]:
        """Returns the columns of the first 1,000 rows."""
        lines = itertools.chain.from_iterable(map(_lines_of, self._blocks()))
        return next(self._of_lines(lines, _FIRST_ROWS)).names

    def of_file(self) -> Iterator[JsonRows | native.JsonBlock]:
        """Yields all rows, most of them read by the compiled host code."""
        for block in self._blocks():
            if (read := self.read_block(block)) is not None:
                yield read
            else:
                yield from self._of_lines(_lines_of(block), self._reading.text.chunk_rows)
        yield JsonRows(list(self._names), [], [])

    def _blocks(self) -> Iterator[bytes]:
        text, within = self._reading.text, self._reading.within
        if self._reading.content is not None:
            return iter([self._reading.content])
        self._line = 0 if within is None else within.lines
        place = text.encoding, text.compression, within, lambda: self._line
        return read_blocks(self._path, _BLOCK_BYTES, *place)

    def read_block(self, block: bytes) -> native.JsonBlock | None:
        """Returns the rows of a block if they have nothing that needs a decision."""
        wanted, lists, numbers = self._reading.columns, self._reading.lists, self._reading.numbers
        if wanted is None or (lists and not set(lists).isdisjoint(wanted)):
            return None
        if b"\0" in block or has_lone_returns(block) or not is_utf_8(block):
            return None
        if not self._names:
            self._names |= dict.fromkeys(_first_names(block), 0)
        while True:
            names = list(self._names)
            kept = [native.DISTINCT if name in wanted else native.NOTHING for name in names]
            of_numbers = [i for i, name in enumerate(names) if name in numbers]
            for i in of_numbers:
                kept[i] = native.NUMBERS
            read = native.read_json(block, names, kept)
            if not read.decided:
                return None
            self._names |= dict.fromkeys(read.names, 0)
            if set(read.names[len(names) :]).isdisjoint(wanted):
                break
        for i in of_numbers:
            if isinstance(read.columns[i], native.Texts):
                numbers.discard(names[i])
        before, self._line = self._line, self._line + read.num_lines
        self._spans.read += read.num_lines
        return read._replace(lines=before + read.lines)

    def _of_lines(self, lines: Iterable[str], chunk_rows: int) -> Iterator[JsonRows]:
        numbers: list[int] = []
        rows: list[dict[str, Cell]] = []
        path, problems = self._path, self._reading.problems
        for line in lines:
            self._line += 1
            self._spans.read += 1
            number = self._line
            if not line.strip():
                continue
            if number == 1 and line.lstrip()[0] == "[" and problems is None:
                raise ValueError(
                    f"{path}: expected a map of columns to values on each line, got an array; "
                    "`jq -c .[]` writes its elements as lines, or read it as a data frame"
                )
            try:
                rows.append(_row(line, number, self._reading))
            except ValueError as error:
                if problems is None:
                    raise LineError(f"{path}, line {number}, {error}") from None
                shown = line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
                problems[number] = f"{error}\t{shown.rstrip()}"
                rows.append({})
            numbers.append(number)
            self._names |= dict.fromkeys(rows[-1], 0)
            if len(rows) == chunk_rows:
                yield JsonRows(list(self._names), numbers, rows)
                numbers, rows = [], []
        yield JsonRows(list(self._names), numbers, rows)


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
    lists, wanted, nested = reading.lists, reading.columns, reading.nested
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
