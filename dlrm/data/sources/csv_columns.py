"""Columns of CSV files, read once, parsed, and each kept in a temporary file."""

import bisect
import csv
import gzip
import io
import itertools
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data.sources.csv_cells import MOST_LISTED, BadCellError, Parser

DELIMITERS = (",", ";", "\t", "|")
_LONGEST_LINE = 1 << 24  # characters
_MOST_LINES = 100  # lines of a record; a stray pair of quotes joins all rows between them


@dataclass(frozen=True)
class CsvFormat:
    """The format of a file's records.

    Attributes:
        columns: names of the columns; by default those of the header, or 0, 1, ...
        header: whether the first line is a header.
    """

    columns: Sequence[str] = ()
    header: bool = False
    delimiter: str = ","
    chunk_size: int = 65536

    def chunks(
        self, path: Path, problems: dict[int, str] | None = None
    ) -> Iterator[tuple[list[str], list[int], list[list[str]]]]:
        """Yields the columns' names, and the line numbers and cells of up to `chunk_size` rows.

        A file without rows yields its names once, with no rows, if they are known.

        Args:
            path: plain, `.gz` or `.zst`.
            problems: receives the problem of a row as a whole, by line, with a tab and the row,
                whose cells are then empty; None raises the first.

        Raises:
            FileNotFoundError: no such file.
            ValueError: the file is not text, a quote is not closed, or a row spans more than 100
                lines or has a wrong number of cells.
        """
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file")
        with open_text(path) as file:
            reader = csv.reader(
                _lines(path, file, problems),
                delimiter=self.delimiter,
                skipinitialspace=True,
                strict=True,
            )
            records = _records(path, reader)
            try:
                first = next(records, None) if self.header else None
                names = [name.strip() for name in self.columns or (first[1] if first else ())]
                while rows := list(islice(records, self.chunk_size)):
                    names = names or [str(index) for index in range(len(rows[0][1]))]
                    for i, (line, record) in enumerate(rows):
                        if len(record) != len(names):
                            problem = (
                                f"expected {len(names)} columns ({_listed(names)}), got "
                                f"{len(record)}"
                            )
                            if problems is None:
                                raise ValueError(f"{path}, line {line}: {problem}")
                            problems[line] = f"{problem}\t{self.delimiter.join(record)}"
                            rows[i] = (line, [""] * len(names))
                    yield names, [line for line, _ in rows], [record for _, record in rows]
            except (EOFError, OSError, zlib.error) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise
                kind = "gzip" if path.suffix == ".gz" else "zstd"
                raise ValueError(
                    f"{path}, after line {reader.line_num}: not a whole {kind} file ({error})"
                ) from error


def open_text(path: Path) -> io.TextIOBase:
    """Opens a text file, plain, `.gz` or `.zst`; bytes that are not UTF-8 become surrogates."""
    options: Any = {"encoding": "utf-8-sig", "errors": "surrogateescape", "newline": ""}
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path, "rb"), **options)
    if path.suffix == ".zst":
        import pyarrow as pa

        stream: Any = pa.CompressedInputStream(str(path), "zstd")
        return io.TextIOWrapper(io.BufferedReader(stream), **options)
    return open(path, **options)


def not_utf_8(line: str) -> str | None:
    """Returns the position of a byte that is not UTF-8, in a line from `open_text`, or None."""
    try:
        line.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start + 1}: not UTF-8 (byte {ord(line[error.start]) - 0xDC00:#x})"
    return None


def delimiter_hint(path: Path, delimiter: str, column: str | None = None) -> str:
    """Returns advice to pass another `--delimiter`, or "" if none of `DELIMITERS` fits better.

    Args:
        path: a CSV.
        delimiter: the one that it was read with.
        column: a missing column, which the first line must have; None expects a first line that is
            one cell, or not CSV, and that another delimiter divides.
    """
    try:
        with open_text(path) as file:
            lines = iter(lambda: file.readline(_LONGEST_LINE), "")
            line = next(filter(str.strip, lines), "")
    except (EOFError, OSError, zlib.error):  # a damaged .gz or .zst
        return ""
    if column is None and len(_cells(line, delimiter)) > 1:
        return ""
    for other in DELIMITERS:
        cells = _cells(line, other)
        if other != delimiter and (len(cells) > 1 if column is None else column in cells):
            shown = "$'\\t'" if other == "\t" else f"'{other}'"
            return f"; try --delimiter {shown}"
    return ""


def _cells(line: str, delimiter: str) -> list[str]:
    """Returns the cells of a line, without blanks around them; none if it is not CSV."""
    try:
        (cells,) = csv.reader([line], delimiter=delimiter, skipinitialspace=True, strict=True)
    except csv.Error:
        return []
    return [cell.strip() for cell in cells]


class Columns:
    """Parsed columns of a split, each in a file of its own.

    Args:
        directory: directory for these files; it must not exist.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self.num_rows = 0
        self._directory = directory
        self._parts: list[tuple[str, list[int], list[Path]]] = []  # lines, first rows, their files
        self._stored: dict[str, tuple[Path, np.dtype]] = {}
        self._part_of: dict[str, int] = {}

    def append_part(
        self, files: Sequence[Path], csv_format: CsvFormat, parsers: Mapping[str, Parser]
    ) -> None:
        """Parses the columns that `parsers` name; a later part must have as many rows.

        Raises:
            ValueError: a column or a cell is wrong; the message has file, line and column.
        """
        lines_name, first_rows, num_rows = f"lines of part {len(self._parts)}", [], 0
        for file in files:
            first_rows.append(num_rows)
            for names, lines, records in csv_format.chunks(file):
                check_names(file, names, csv_format, parsers)
                columns = dict(zip(names, zip(*records, strict=True), strict=True))
                for name, parse in parsers.items():
                    cells = [cell.strip() for cell in columns[name]]
                    try:
                        self._append(name, parse(cells))
                    except BadCellError as error:
                        raise ValueError(
                            f"{file}, line {lines[error.index]}, column {name}: expected "
                            f"{error.expected}, got {cells[error.index]!r}"
                        ) from None
                self._append(lines_name, np.array(lines))
                num_rows += len(lines)
        if self._parts and num_rows != self.num_rows:
            raise ValueError(
                f"{files[0]}: expected {self.num_rows} rows, as the files of the features before "
                f"it have, got {num_rows}"
            )
        self.num_rows = num_rows
        self._part_of |= dict.fromkeys(parsers, len(self._parts))
        self._parts.append((lines_name, first_rows, list(files)))

    def _append(self, name: str, values: np.ndarray) -> None:
        path, _ = self._stored.setdefault(
            name, (self._directory / f"{len(self._stored)}.bin", values.dtype)
        )
        with open(path, "ab") as file:
            values.tofile(file)

    def load(self, name: str) -> np.ndarray:
        """Returns the values of a column in all rows."""
        return np.fromfile(*self._stored[name]) if name in self._stored else np.empty(0)

    def where(self, name: str, row: int) -> str:
        """Returns the file and line of a row of a column."""
        lines, first_rows, files = self._parts[self._part_of[name]]
        file = files[bisect.bisect_right(first_rows, row) - 1]
        return f"{file}, line {self.load(lines)[row]}, column {name}"


def _lines(path: Path, file: Any, problems: dict[int, str] | None) -> Iterator[str]:
    """Yields the lines of a file, with bytes that are not UTF-8 as surrogates."""
    for number in itertools.count(1):
        line = file.readline(_LONGEST_LINE)
        if not line:
            return
        if len(line) == _LONGEST_LINE and line[-1] not in "\r\n":
            raise ValueError(f"{path}, line {number}: longer than {_LONGEST_LINE} characters")
        if not line.isascii() and (problem := not_utf_8(line)):
            if problems is None:
                raise ValueError(f"{path}, line {number}, {problem.replace('not', 'not CSV in')}")
            line = line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            problems[number] = f"{problem}\t{line.rstrip()}"
        yield line


def _records(path: Path, reader: Any) -> Iterator[tuple[int, list[str]]]:
    """Yields the last line and the cells of each record, without blank lines."""
    line = 0
    try:
        for record in reader:
            if reader.line_num - line > _MOST_LINES:
                raise ValueError(
                    f"{path}, line {line + 1}: expected a row of at most {_MOST_LINES} lines, got "
                    f"one that a quoted cell extends to line {reader.line_num}"
                )
            line = reader.line_num
            if record:
                yield line, record
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {line + 1}: not CSV ({error}, reading up to line {reader.line_num}); "
            "is a quote not closed?"
        ) from error


def _listed(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > MOST_LISTED else ""
    return ", ".join(names[:MOST_LISTED]) + more


def check_names(
    file: Path, names: Sequence[str], csv_format: CsvFormat, wanted: Collection[str]
) -> None:
    if missing := [name for name in wanted if name not in names]:
        source = "its header" if csv_format.header else "a file without a header"
        hint = "" if csv_format.columns else f" ({source}; --columns or --noheader say otherwise)"
        if csv_format.header and not csv_format.columns:
            hint = delimiter_hint(file, csv_format.delimiter, missing[0]) or hint
        raise ValueError(
            f"{file}: no column {missing[0]!r}; the columns are {_listed(names)}{hint}"
        )
    if repeated := [name for name in wanted if list(names).count(name) > 1]:
        raise ValueError(f"{file}: two columns are called {repeated[0]!r}")
