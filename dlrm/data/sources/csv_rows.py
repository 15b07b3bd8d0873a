"""Rows of CSV as columns of text, with the line of each row.

The compiled host code splits blocks in which every row is one line. Python's csv module, which
knows the lines of rows, splits the others, in which quoted cells have line ends or blanks before
them, and those with rows of a wrong length; with an escape character, `EscapedReader` does.
"""

import csv
import io
import itertools
import re
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dlrm.data.sources import native
from dlrm.data.sources.column_names import check_columns, listed
from dlrm.data.sources.row_error import LineError
from dlrm.data.sources.text_files import (
    BROKEN,
    LONGEST_LINE,
    UTF_8_BOM,
    ByteRange,
    is_plain,
    not_utf_8,
    open_text,
    read_blocks,
    read_plain,
    too_long,
    unpacked_name,
)
from dlrm.data.sources.text_format import NONE, TextFormat

DELIMITERS = (",", ";", "\t", "|")
_BLOCK_BYTES = 4 << 20
_HEAD_BYTES = 1 << 14  # of a block whose first row is wanted
_BLANK_LINE = re.compile(rb"(?:^|\n)(?=\r?\n)")
_MOST_LINES = 100  # lines of a record; a stray pair of quotes joins all rows between them


class Chunk(NamedTuple):
    """Some rows of a text file.

    Attributes:
        names: names of all columns.
        lines: number of the line on which each row ends.
        columns: the cells of each column as text, as indices of distinct texts or as float64; None
            for columns that were not asked for.
    """

    names: list[str]
    lines: np.ndarray
    columns: list[pa.Array | None]


@dataclass
class Spans:
    """The lines of a file that are read, and rows that quoted cells extend over several of them.

    Attributes:
        read: number of lines that have been read.
        rows: number of such rows.
        lines: number of their lines.
        first: the line at which the first begins; 0 if there is none.
    """

    read: int = 0
    rows: int = 0
    lines: int = 0
    first: int = 0

    def add(self, first: int, last: int) -> None:
        """Counts a row."""
        self.rows, self.lines = self.rows + 1, self.lines + last - first + 1
        self.first = self.first or first

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
        text: format of the file.
        lists: the columns of lists, where cells can be lists; None allows lists anywhere.
        columns: the columns to read; None is all. Missing ones are left out.
        problems: receives the problem of a row as a whole, by line, with a tab and the row, whose
            cells are then empty; None raises the first.
        spans: counts lines, and rows of several lines.
        nested: receives the columns of JSON that are neither values nor lists, which have no cells,
            with the first line of each; None refuses them.
        distinct: the columns that may be indices of distinct texts, where this is cheap.
        within: the lines to read, of which the first may be a header; None is all.
        numbers: the columns that may be float64, from which those with other texts than usual
            numbers are removed.
    """

    text: TextFormat
    lists: Collection[str] | None = None
    columns: Collection[str] | None = None
    problems: dict[int, str] | None = None
    spans: Spans | None = None
    nested: dict[str, str] | None = None
    distinct: Collection[str] = ()
    within: ByteRange | None = None
    numbers: set[str] = set()  # of none, which nothing is removed from


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
    text, rows = reading.text, _Rows(path, reading)
    ends, records = rows.records(1)
    names = [name.strip() for name in text.columns or (records[0] if records else ())]
    if records and not has_header(text):
        names = names if text.columns else list(map(str, range(len(records[0]))))
    else:
        ends, records = [], []
    first = [rows.chunk_of(names, ends, records)] if names else []
    for chunk in itertools.chain(first, iter(partial(rows.chunk, names), None)):
        for begin in range(0, max(len(chunk.lines), 1), text.chunk_rows):
            part = slice(begin, begin + text.chunk_rows)
            columns = [None if column is None else column[part] for column in chunk.columns]
            yield Chunk(names, chunk.lines[part], columns)


def read_together(paths: Sequence[Path], reading: Reading) -> tuple[Chunk, list[int]] | None:
    """Returns the rows of small files with the same header, and the number of each file's rows.

    None if they have to be read one by one.
    """
    text = reading.text
    delimiters = {delimiter_of(path, text) for path in paths}
    escaped = text.escape not in (None, NONE)
    if native.host is None or escaped or len(delimiters) > 1 or not has_header(text):
        return None
    if (contents := read_plain(paths)) is None or not all(contents):
        return None
    (delimiter,), quote = delimiters, None if text.quote == NONE else text.quote or '"'
    header = contents[0][: contents[0].index(b"\n") + 1]
    named = cells_of(header.decode("latin-1"), delimiter) if quote == '"' else []
    names = [name.strip() for name in text.columns or named]
    if len(names) < 2 or not named or not header.isascii():
        return None
    if not all(content.startswith(header) for content in contents):
        return None
    bodies = [content[len(header) :] for content in contents]
    block = b"".join(bodies)
    if not is_plain(block):
        return None
    split = native.read_csv(block, delimiter, quote, LONGEST_LINE, _kept(names, reading))
    if split.outcome != native.ROWS:
        return None
    ends = np.cumsum([body.count(b"\n") for body in bodies])  # lines before those of the next file
    lines, begins = split.lines, ends - np.diff(ends, prepend=0)
    file = np.searchsorted(ends, lines)
    rows = np.bincount(file, minlength=len(paths)).tolist()
    columns = _columns_of(split, names, reading.numbers)
    return Chunk(names, lines - begins[file] + 1, columns), rows


class _Rows:
    """Reads rows block by block, each in the fastest way that gives every row its line."""

    def __init__(self, path: Path, reading: Reading) -> None:
        text, within = reading.text, reading.within
        self._path, self._reading, self._problems = path, reading, reading.problems
        self._spans, self._in_range = reading.spans or Spans(), within is not None
        self._delimiter = delimiter_of(path, text)
        self._quote = None if text.quote == NONE else text.quote or '"'
        self._escape = None if text.escape == NONE else text.escape
        self._blocks = read_blocks(path, _BLOCK_BYTES, text.encoding, text.compression, within)
        self._pending = b""  # lines of a block that are still to be read
        self._line = 0 if within is None else within.lines  # that have been read
        self._blank = 0  # a blank line, if no row has followed it yet

    def chunk(self, names: list[str]) -> Chunk | None:
        """Returns the rows of the next block; None at the end."""
        block = self._pending = self._pending or next(self._blocks, b"")
        if not block:
            return None
        one_column = len(names) == 1
        if native.host is not None and self._is_plain(block):
            if one_column:
                self._check_blank_lines(block)
            marks, kept = (self._delimiter, self._quote), _kept(names, self._reading)
            split = native.read_csv(block, *marks, LONGEST_LINE, kept)
            if split.outcome == native.ROWS:
                self._line += split.num_lines
                self._spans.read += split.num_lines
                self._pending = b""
                lines = self._line - split.num_lines + split.lines
                return Chunk(names, lines, _columns_of(split, names, self._reading.numbers))
            if split.outcome == native.UNDECIDED and self._in_range:
                raise UndecidedError
        elif self._in_range:
            raise UndecidedError
        return self.chunk_of(names, *self.records(one_column=one_column))

    def chunk_of(self, names: list[str], ends: list[int], records: list[list[str]]) -> Chunk:
        """Returns records as a chunk, after checking their lengths."""
        for i, (line, record) in enumerate(zip(ends, records, strict=True)):
            if len(record) != len(names):
                problem = f"expected {len(names)} columns ({listed(names)}), got {len(record)}"
                if self._problems is None:
                    raise LineError(f"{self._path}, line {line}: {problem}")
                self._problems[line] = f"{problem}\t{self._delimiter.join(record)}"
                records[i] = [""] * len(names)
        columns: list[pa.Array | None] = [None] * len(names)
        for i in _places(names, self._reading.columns):
            columns[i] = pa.array([record[i] for record in records], pa.string())
        return Chunk(names, np.array(ends, np.int64), columns)

    def _check_blank_lines(self, block: bytes) -> None:
        """Raises ValueError if there is a blank line between rows of one column."""
        blank = _BLANK_LINE.search(block)
        if blank is not None and not self._blank:
            self._blank = self._line + block.count(b"\n", 0, blank.end()) + 1
        if self._blank and not block[blank.start() if blank else 0 :].isspace():
            raise self._blank_line()

    def _blank_line(self) -> ValueError:
        """Returns the error for a blank line, which may be a missing value, as Polars writes it."""
        return ValueError(
            f"{self._path}, line {self._blank}: expected a value in a file of one column, got a "
            'blank line; write "" for a missing value, and no line for none'
        )

    def _is_plain(self, block: bytes) -> bool:
        """Returns whether a block has nothing but quotes that needs a decision."""
        if self._escape is not None and self._escape.encode() in block:
            return False
        if block.startswith(UTF_8_BOM):  # of a file appended to another
            return False
        return is_plain(block)

    def records(
        self, most: int | None = None, one_column: bool = False
    ) -> tuple[list[int], list[list[str]]]:
        """Returns the last lines and the cells of rows, to the end of a block or of `most` rows."""
        block = self._pending or next(self._blocks, b"")
        end = block.find(b"\n", _HEAD_BYTES) + 1 if most else 0
        end = end or len(block)
        self._left, self._rest = self._lines_of(block[:end]), block[end:]
        reader = self._reader()
        ends: list[int] = []
        records: list[list[str]] = []
        before = self._line
        while (self._left or (most and self._next_lines())) and len(records) != most:
            first = before + reader.line_num + 1
            try:
                record = next(reader)
            except (csv.Error, StopIteration) as error:
                raise ValueError(
                    f"{self._path}, line {first}: not CSV ({str(error) or 'it ends within a row'}, "
                    f"reading up to line {before + reader.line_num}); is a quote not closed?"
                ) from None
            last = before + reader.line_num
            if last - first >= _MOST_LINES:
                raise ValueError(
                    f"{self._path}, line {first}: expected a row of at most {_MOST_LINES} lines, "
                    f"got one that a quoted cell extends to line {last}"
                )
            if last > first and record:
                self._spans.add(first, last)
            if not record:
                self._blank = self._blank or last
            elif one_column and self._blank:
                raise self._blank_line()
            else:
                ends.append(last)
                records.append(record)
        self._blank = self._blank if one_column else 0  # those before a header are nothing
        self._line = before + reader.line_num
        self._spans.read += reader.line_num
        self._pending = "".join(self._left).encode("utf-8", "surrogateescape") + self._rest
        return ends, records

    def _reader(self) -> Any:
        """Returns an iterator of records with the attribute `line_num`."""
        if self._escape is not None:
            return EscapedReader(self._fed(), self._delimiter, self._quote, self._escape)
        csv.field_size_limit(max(csv.field_size_limit(), LONGEST_LINE * _MOST_LINES))
        options: dict[str, Any] = {"delimiter": self._delimiter, "quotechar": self._quote or '"'}
        options["quoting"] = csv.QUOTE_MINIMAL if self._quote else csv.QUOTE_NONE
        return csv.reader(self._fed(), skipinitialspace=True, strict=True, **options)

    def _next_lines(self) -> bool:
        """Takes the lines of the next block; returns whether there is one."""
        self._left, self._rest = self._lines_of(self._rest or next(self._blocks, b"")), b""
        return bool(self._left)

    def _fed(self) -> Iterator[str]:
        """Yields the lines of the block, and of further ones for a row that does not end in it."""
        number = self._line
        while self._left or self._next_lines():
            number += 1
            line = self._left.popleft()
            if len(line) >= LONGEST_LINE and line[-1] not in "\r\n":
                raise too_long(self._path, number)
            if not line.isascii() and (problem := not_utf_8(line)):
                line = self._without_bytes(line, number, problem)
            yield line

    def _without_bytes(self, line: str, number: int, problem: str) -> str:
        if self._problems is None:
            where = problem.replace("not", "not CSV in")
            raise ValueError(f"{self._path}, line {number}, {where}; --encoding names another")
        line = line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        self._problems[number] = f"{problem}\t{line.rstrip()}"
        return line

    @staticmethod
    def _lines_of(block: bytes) -> "deque[str]":
        text = block.decode("utf-8", "surrogateescape")
        return deque(io.StringIO(text, newline=""))


class EscapedReader:
    """Splits lines into records, of which an escape character takes the meaning of characters.

    Within quotes, or anywhere if there are none, it makes a quote, a delimiter or itself that
    follows a part of the cell; before other characters it is one itself.

    Attributes:
        line_num: number of lines that were read.
    """

    def __init__(
        self, lines: Iterator[str], delimiter: str, quote: str | None, escape: str
    ) -> None:
        self.line_num, self._lines = 0, lines
        d, e, q = (re.escape(mark) for mark in (delimiter, escape, quote or delimiter))
        self._delimiter, self._quote = delimiter, quote
        plain = rf"[^{d}]*" if quote else rf"(?:{e}.|[^{d}{e}])*"
        self._plain = re.compile(plain, re.DOTALL)
        self._quoted = re.compile(rf"{q}((?:{e}.|[^{q}{e}])*){q} *", re.DOTALL)
        self._escapes = re.compile(rf"{e}([{d}{e}{q}])")

    def __iter__(self) -> "EscapedReader":
        return self

    def __next__(self) -> list[str]:
        text, place, cells = self._line(), 0, list[str]()
        if not text:
            return []
        while True:
            place += len(text[place:]) - len(text[place:].lstrip(" "))
            if self._quote and text.startswith(self._quote, place):
                while (match := self._quoted.match(text, place)) is None:
                    text += self._end + self._line()  # StopIteration: the quote is not closed
                cells.append(self._escapes.sub(r"\1", match[1]))
            else:
                match = self._plain.match(text, place)
                assert match is not None
                cells.append(match[0] if self._quote else self._escapes.sub(r"\1", match[0]))
            place = match.end()
            if place == len(text):
                return cells
            if text[place] != self._delimiter:
                raise csv.Error(f"{self._delimiter!r} expected after {self._quote!r}")
            place += 1

    def _line(self) -> str:
        line = next(self._lines)
        self.line_num += 1
        text = line.rstrip("\r\n")
        self._end = line[len(text) :]
        return text


def _columns_of(
    block: native.TextBlock, names: Sequence[str], numbers: set[str]
) -> list[pa.Array | None]:
    """Returns the columns of a block, and removes those of text from `numbers`."""
    pairs = zip(names, block.columns, strict=True)
    numbers -= {name for name, column in pairs if isinstance(column, native.Texts)}
    return [None if column is None else array_of_cells(column) for column in block.columns]


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


def _kept(names: Sequence[str], reading: Reading) -> list[int]:
    """Returns what to keep of each column."""
    kept = [native.NOTHING] * len(names)
    for i in _places(names, reading.columns):
        kept[i] = native.DISTINCT if names[i] in reading.distinct else native.TEXTS
        kept[i] = native.NUMBERS if names[i] in reading.numbers else kept[i]
    return kept


def _places(names: Sequence[str], wanted: Collection[str] | None) -> list[int]:
    return [i for i, name in enumerate(names) if wanted is None or name in wanted]


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
        return other or " (its header; --columns or --noheader say otherwise)"

    check_columns(file, names, wanted, hint)


def delimiter_hint(path: Path, text: TextFormat, column: str | None = None) -> str:
    """Returns advice to pass another `--delimiter`, or "" if none of `DELIMITERS` fits better.

    Args:
        path: a CSV.
        text: the format that it was read with.
        column: a missing column, which the first line must have; None expects a first line that is
            one cell, or not CSV, and that another delimiter divides.
    """
    delimiter = delimiter_of(path, text)
    line = first_line(path, text)
    named_cells = cells_of(line, delimiter)
    if column is None and len(named_cells) > 1:
        return ""
    seen = "" if delimiter in line else f"; the delimiter {delimiter!r} is not in its first line"
    for other in DELIMITERS:
        cells = cells_of(line, other)
        if other != delimiter and (len(cells) > 1 if column is None else column in cells):
            shown = "$'\\t'" if other == "\t" else f"'{other}'"
            return f"{seen}; try --delimiter {shown}"
    return seen if text.delimiter else ""


def first_line(path: Path, text: TextFormat) -> str:
    """Returns the first line of a file that is not blank; "" if there is none or it is damaged."""
    try:
        with open_text(path, text.encoding, text.compression) as file:
            lines = iter(lambda: file.readline(LONGEST_LINE), "")
            return next(filter(str.strip, lines), "")
    except (*BROKEN, ValueError):
        return ""


def cells_of(line: str, delimiter: str) -> list[str]:
    """Returns the cells of a line, without blanks around them; none if it is not CSV."""
    try:
        (cells,) = csv.reader([line], delimiter=delimiter, skipinitialspace=True, strict=True)
    except (csv.Error, ValueError):
        return []
    return [cell.strip() for cell in cells]
