"""Rows of CSV as columns of text, with their lines; `csrc/host/csv_block.h` splits them."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from dlrm.data.sources import native
from dlrm.data.sources.column_names import check_columns, listed
from dlrm.data.sources.native import Marks
from dlrm.data.sources.row_error import LineError
from dlrm.data.sources.text_files import (
    BROKEN,
    LONGEST_LINE,
    ByteRange,
    has_lone_returns,
    is_utf_8,
    not_utf_8,
    read_blocks,
    too_long,
    unpacked_name,
)
from dlrm.data.sources.text_format import NONE, TextFormat

DELIMITERS = (",", ";", "\t", "|")
CHUNK_ROWS = 1 << 16  # read at a time
_BLOCK_BYTES = 16 << 20
_HEAD_BYTES = 1 << 16  # in which the first line is
_MOST_LINES = 100  # of a row, as in csv_block.h


class Chunk(NamedTuple):
    """Some rows of a text file, whose cells are text, indices of distinct texts or float64."""

    names: list[str]
    lines: np.ndarray  # on which each row ends
    columns: list[pa.Array | None]  # None for those that were not asked for


@dataclass
class Spans:
    """The number of lines read, and the rows that quoted cells extend over several of them."""

    read: int = 0
    rows: int = 0
    lines: int = 0  # of these rows
    first: int = 0  # at which the first of them begins

    def note(self, path: Path | str, text: TextFormat) -> str | None:
        """Returns a line about such rows of a file, or None without any."""
        if not self.rows:
            return None
        rows = f"{self.rows:,} row{'s' * (self.rows > 1)}"
        note = f"note: {path}: quoted cells extend {rows} over {self.lines:,} lines, the first at "
        note += f"line {self.first}"
        if text.quote is None:
            note += "; if quotes are part of the text, use format: {quote: none} in the schema, or "
            note += "--quote none"
        return note


class Reading(NamedTuple):
    """Columns to read of a file of text, and what is noted meanwhile.

    Attributes:
        lists: the columns of lists, where cells can be lists; None allows lists anywhere.
        columns: the columns to read; None is all. Missing ones are left out.
        problems: receives the problem of a row as a whole, by line, with a tab and the row, whose
            cells are then empty; None raises the first.
        nested: receives the columns of JSON that are neither values nor lists, which have no cells,
            with the first line of each; None refuses them.
        mixed: receives the columns of JSON with values in some rows and lists in others, which have
            no cells; None makes cells of all.
        numbers: the columns that may be float64, from which those with other texts than usual
            numbers are removed.
    """

    text: TextFormat
    lists: Collection[str] | None = None
    columns: Collection[str] | None = None
    problems: dict[int, str] | None = None
    spans: Spans | None = None
    nested: dict[str, str] | None = None
    mixed: dict[str, None] | None = None
    distinct: Collection[str] = ()  # columns that may be indices of distinct texts
    within: ByteRange | None = None  # lines to read, of which the first may be a header
    numbers: set[str] = set()  # of none, which nothing is removed from
    content: bytes | None = None  # to read in place of the file

    def keep(self, names: Sequence[str]) -> list[int]:
        """Returns what `native` keeps of columns."""
        kept = [native.NOTHING] * len(names)
        for i, name in enumerate(names):
            if self.columns is None or name in self.columns:
                kept[i] = native.DISTINCT if name in self.distinct else native.TEXTS
                kept[i] = native.NUMBERS if name in self.numbers else kept[i]
        return kept


class UndecidedError(Exception):
    """Lines need not be rows, so that the file must be read from its beginning."""


def delimiter_of(path: Path, text: TextFormat) -> str:
    """Returns the delimiter of a file."""
    return text.delimiter or ("\t" if unpacked_name(path.name).endswith(".tsv") else ",")


def has_header(text: TextFormat) -> bool:
    """Returns whether the first line is a header."""
    return not text.columns if text.header is None else text.header


def read_csv(path: Path, reading: Reading) -> Iterator[Chunk]:
    """Yields the rows of a CSV, plain or compressed, some at a time.

    A file without rows yields its names once, with no rows, if they are known. Blank lines are no
    rows.

    Raises:
        FileNotFoundError: no such file.
        UndecidedError: rows of a range of lines may have several of them.
        ValueError: the file is not text of the format, a quote is not closed, or a row spans more
            than 100 lines or has a wrong number of cells.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    blocks = _Blocks(path, reading)
    if not (names := blocks.names()):
        return
    kept = [reading.columns is None or name in reading.columns for name in names]
    empty = [pa.array([], pa.string()) if keep else None for keep in kept]
    yield Chunk(names, np.empty(0, np.int64), empty)
    while (chunk := blocks.rows(names)) is not None:
        for begin in range(0, len(chunk.lines), CHUNK_ROWS):
            part = slice(begin, begin + CHUNK_ROWS)
            columns = [None if column is None else column[part] for column in chunk.columns]
            yield Chunk(names, chunk.lines[part], columns)


class _Blocks:
    """Reads rows block by block; `_pending` is the text that has been read and not split."""

    def __init__(self, path: Path, reading: Reading) -> None:
        self._path, self._reading, self._problems = path, reading, reading.problems
        text, within = reading.text, reading.within
        quote, escape = (None if m == NONE else m for m in (text.quote or '"', text.escape))
        self._marks = Marks(delimiter_of(path, text), quote, escape)
        self._spans = reading.spans or Spans()
        self._line = 0 if within is None else within.lines  # that have been read
        self._blank = 0  # a blank line after a row
        self._blocks = read_blocks(path, _BLOCK_BYTES, text, within, lambda: self._line)
        if reading.content is not None:
            self._blocks = iter([reading.content])
        self._pending, self._last = b"", False  # whether nothing follows

    def names(self) -> list[str]:
        """Returns the names of the columns, after the header; none of an empty file."""
        text = self._reading.text
        while not self._last and not self._pending:  # blank lines before the first row are nothing
            self._fetch()
            rows = self._pending.lstrip(b"\r\n")
            blank = len(self._pending[: len(self._pending) - len(rows)].splitlines())
            self._pass(len(self._pending) - len(rows), blank)
        names: Sequence[str] = text.columns
        if self._pending and (has_header(text) or not names):
            while True:
                head = native.read_csv_head(self._pending, self._marks, self._last)
                if head.outcome != native.PARTIAL:
                    break
                self._fetch()
            self._check(head)
            if has_header(text):
                self._pass(head.consumed, head.num_lines)
                names = names or head.cells
            else:
                names = list(map(str, range(len(head.cells))))
        return [name.strip() for name in names]

    def rows(self, names: list[str]) -> Chunk | None:
        """Returns the rows of the next block; None at the end."""
        reading, escape = self._reading, self._marks.escape
        self._fetch()
        if not self._pending:
            return None
        plain = not has_lone_returns(self._pending)
        plain = plain and (escape is None or escape.encode() not in self._pending)
        within = reading.within is not None
        split = native.read_csv(
            self._pending, self._marks, plain, within, self._last, reading.keep(names)
        )
        before, lines = self._line, self._line + split.lines
        for row, count, text in split.bad:
            problem = f"expected {len(names)} columns ({listed(names)}), got {count}"
            if self._problems is None:
                raise LineError(f"{self._path}, line {lines[row]}: {problem}")
            self._problems[int(lines[row])] = f"{problem}\t{text}"
        self._check(split)
        if len(names) == 1 and (self._blank or split.blank):
            self._blank = self._blank or before + split.blank
            if len(lines) and lines[-1] > self._blank:
                raise ValueError(
                    f"{self._path}, line {self._blank}: expected a value in a file of one column, "
                    'got a blank line; write "" for a missing value, and no line for none'
                )
        spans, (rows, of_rows, first) = self._spans, split.spans
        spans.rows, spans.lines = spans.rows + rows, spans.lines + of_rows
        spans.first = spans.first or (before + first if rows else 0)
        self._pass(split.consumed, split.num_lines)
        texts = {
            n for n, c in zip(names, split.columns, strict=True) if isinstance(c, native.Texts)
        }
        reading.numbers.difference_update(texts)
        columns = [None if column is None else array_of_cells(column) for column in split.columns]
        return Chunk(names, lines, columns)

    def _fetch(self) -> None:
        """Takes the next block, before which there may be the beginning of a row."""
        if len(self._pending) > LONGEST_LINE:
            raise too_long(self._path, self._line + 1)
        block = next(self._blocks, b"")
        self._last = not block
        self._pending += block if is_utf_8(block) else self._in_utf_8(block)

    def _pass(self, size: int, lines: int) -> None:
        self._pending = self._pending[size:]
        self._line += lines
        self._spans.read += lines

    def _check(self, split: native.CsvBlock | native.CsvHead) -> None:
        """Raises the error of a row that ended the reading of a block."""
        if split.outcome in (native.ROWS, native.PARTIAL):
            return
        if split.outcome == native.UNDECIDED:
            raise UndecidedError
        first = self._line + split.num_lines + 1
        last = first + split.failed_lines - 1
        if split.outcome == native.MANY_LINES:
            raise ValueError(
                f"{self._path}, line {first}: expected a row of at most {_MOST_LINES} lines, got "
                f"one that a quoted cell extends to line {last}, and perhaps further"
            )
        problem = "it ends within a row"
        if split.outcome == native.AFTER_QUOTE:
            problem = f"{self._marks.delimiter!r} expected after {self._marks.quote!r}"
        raise ValueError(
            f"{self._path}, line {first}: not CSV ({problem}, reading up to line {last}); is a "
            "quote not closed?"
        )

    def _in_utf_8(self, block: bytes) -> bytes:
        """Returns a block without bytes that are not UTF-8, whose lines are noted, or refused."""
        lines = block.splitlines(keepends=True)
        before = self._line + len(self._pending.splitlines())
        for number, raw in enumerate(lines, before + 1):
            if (problem := not_utf_8(raw.decode("utf-8", "surrogateescape"))) is None:
                continue
            if self._problems is None:
                problem = problem.replace("not", "not CSV in")
                raise ValueError(
                    f"{self._path}, line {number}, {problem}; --encoding names another"
                )
            shown = raw.decode("utf-8", "replace")
            self._problems[number] = f"{problem}\t{shown.rstrip()}"
            lines[number - before - 1] = shown.encode()
        return b"".join(lines)


def array_of_cells(cells: native.Texts | np.ndarray) -> pa.Array:
    """Returns a column of cells as numbers, as text, or as indices of distinct texts."""
    if not isinstance(cells, native.Texts):
        return pa.array(cells, mask=np.isnan(cells))
    buffers = pa.py_buffer(cells.offsets), pa.py_buffer(cells.data)
    array = pa.StringArray.from_buffers(len(cells.offsets) - 1, *buffers)
    if (codes := cells.codes) is None:
        return array
    missing = None if codes.size == 0 or codes.min() >= 0 else codes < 0
    return pa.DictionaryArray.from_arrays(pa.array(codes, mask=missing), array)


def check_names(
    file: Path, names: Sequence[str], text: TextFormat, wanted: Collection[str]
) -> None:
    """Raises ValueError if a wanted column is missing, or if two have its name."""

    def hint(missing: str) -> str:
        if text.columns:
            return ""
        if not has_header(text):
            return " (a file without a header; --columns or --noheader say otherwise)"
        other = delimiter_hint(file, text, missing)
        if other or len(names) < 2:  # a title, of which no flag makes a header
            return other
        return " (its header; --columns or --noheader say otherwise)"

    check_columns(file, names, wanted, hint)


def delimiter_hint(path: Path, text: TextFormat, column: str | None = None) -> str:
    """Returns advice to pass another `--delimiter`, or "" if none of `DELIMITERS` fits better.

    Args:
        path, text: a CSV, and the format that it was read with.
        column: a missing column, which the first line must have; None expects a first line that is
            one cell, or not CSV, and that another delimiter divides.
    """
    try:
        block = next(read_blocks(path, _HEAD_BYTES, text), b"").decode(errors="replace")
    except (*BROKEN, ValueError):
        block = ""
    line, delimiter = next(filter(str.strip, block.splitlines()), ""), delimiter_of(path, text)
    cells = {
        other: [
            cell.strip()
            for cell in native.read_csv_head(line.encode(), Marks(other, '"'), True).cells
        ]
        for other in (delimiter, *DELIMITERS)
    }
    if column is None and len(cells[delimiter]) > 1:
        return ""
    seen = "" if delimiter in line else f"; the delimiter {delimiter!r} is not in its first line"
    for other, named in cells.items():
        if other != delimiter and (len(named) > 1 if column is None else column in named):
            shown = "$'\\t'" if other == "\t" else f"'{other}'"
            return f"{seen}; try --delimiter {shown}"
    return seen if text.delimiter else ""
