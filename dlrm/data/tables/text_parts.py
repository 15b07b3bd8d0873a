"""Parts of text files, which are read where they are: files, or ranges of their lines."""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dlrm.data.sources.csv_rows import Reading, Spans, UndecidedError, has_header
from dlrm.data.sources.row_error import LEAVES_OUT, LineError
from dlrm.data.sources.text_files import (
    ByteRange,
    compression_of,
    count_lines,
    other_encoding,
    read_plain,
)
from dlrm.data.sources.text_format import NONE, TextFormat
from dlrm.data.tables.columns import floats_of
from dlrm.data.tables.kinds.cells import Cells
from dlrm.data.tables.kinds.kind import TableFile
from dlrm.data.tables.kinds.text import LINE, PROBLEM, Text
from dlrm.data.tables.parts import JoinedPart, changed, checksum

_PACKED = 8  # times the size of a compressed file that its text may have


class TextColumns(NamedTuple):
    """Says what to read of text.

    Attributes:
        text: its format.
        columns: the columns to read.
        quarantine: whether to accept rows that cannot be read.
        cells: the columns of lists and of numbers in text.
        floats: columns of text that may become float64, in batches without other texts.
    """

    text: TextFormat
    columns: Sequence[str]
    quarantine: bool
    cells: Cells
    floats: Sequence[str]


class TextPart(NamedTuple):
    """A file, or a range of its lines.

    Attributes:
        table: the file.
        file: its number among all files.
        how: what is read of it.
        within: the lines; None is all.
        names: columns of the CSV whose lines these are, of which only the first can be a header.
        rows: number of rows, once it is known.
        first_row: number of rows before the part's first, in all files.
        crc: CRC-32 of the bytes when they were counted, which later reads verify.
    """

    table: TableFile
    file: int
    how: TextColumns
    within: ByteRange | None = None
    names: tuple[str, ...] = ()
    rows: int = 0
    first_row: int = 0
    crc: int | None = None

    @property
    def staged(self) -> bool:
        """Returns whether batches have the column `PROBLEM`."""
        return True

    @property
    def source(self) -> str:
        """The file."""
        return str(self.table.path)

    @property
    def size(self) -> int:
        """Bytes to read."""
        begin, end = self._bytes
        return end - begin

    @property
    def _bytes(self) -> tuple[int, int]:
        if self.within is not None:
            return self.within.begin, self.within.end
        return 0, self.table.path.stat().st_size

    @property
    def is_plain(self) -> bool:
        """Returns whether the file is not compressed."""
        path = self.table.path
        return self.how.text.compression == "none" or compression_of(path) == "none"

    @property
    def text_size(self) -> int:
        """Approximate bytes of text."""
        return self.size * (1 if self.is_plain else _PACKED)

    def file_of(self, row: int) -> int:
        """Returns the number of the file."""
        return self.file

    def source_of(self, row: int) -> str:
        """Returns the file."""
        return self.source

    def where(self, row: int) -> str:
        """Returns the location of a row of the part, from 0: the file and the line."""
        place = row
        for batch in TextReader(self).batches([LINE]):
            if place < batch.num_rows:
                return f"{self.source}, line {batch.column(0)[place].as_py()}"
            place -= batch.num_rows
        raise IndexError(row)

    def checksum(self) -> int:
        """Returns the CRC-32 of the bytes that the part was cut from."""
        return checksum(self.table.path, *self._bytes)

    def ranges(self) -> list[tuple[str, int, int, bool]]:
        """Returns the bytes that reading needs: file, begin, end, and whether to a line's end."""
        begin, end = self._bytes
        return [(self.source, max(begin - 1, 0), end, self.within is not None)]

    def check(self) -> None:
        """Raises ValueError if the file has changed since it was counted."""
        if self.crc is not None and (crc := self.checksum()) != self.crc:
            place = "" if self.within is None else f" in bytes {self.within.begin} on"
            raise changed(self.source, self.crc, f"the lines{place}", crc)

    def read(
        self, columns: Sequence[str], facts: dict[str, Any] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yields the rows, some at a time.

        Args:
            columns: columns of `how`, and `PROBLEM`, the problem of a row as a whole.
            facts: receives, at the end, the `numbers`, columns of nothing but numbers of JSON.
        """
        reader = TextReader(self)
        yield from reader.batches(columns)
        if facts is not None:
            facts["numbers"] = sorted(reader.numbers)

    def together(
        self, parts: "Sequence[TextPart]", columns: Sequence[str], facts: dict[str, Any] | None
    ) -> list[pa.RecordBatch] | None:
        """Returns the rows of small files that are read as one; None if that is impossible."""
        if (content := _content(parts)) is None:
            return None
        reader = TextReader(self, content)
        try:
            batches = list(reader.batches(columns))
        except (ValueError, UndecidedError):
            return None
        if reader.measured().rows != sum(part.rows for part in parts):
            return None
        if facts is not None:
            facts["numbers"] = sorted(reader.numbers)
        return batches


def _content(parts: Sequence[TextPart]) -> bytes | None:
    """Returns the text of plain files with one header; None if they cannot be read as one."""
    first = parts[0]
    text, partition = first.how.text, first.table.partition
    if other_encoding(text.encoding) is not None:
        return None
    contents, header = list[bytes](), b""
    for part in parts:
        content = read_plain(part.table.path)
        if content is None or part.within is not None or part.table.partition != partition:
            return None
        if content and first.table.kind.delimited and has_header(text):
            header = header or content[: content.index(b"\n") + 1]
            if not content.startswith(header):
                return None
            content = content[len(header) :]
        contents.append(content)
    return header + b"".join(contents)


class Measured(NamedTuple):
    """The rows of a part.

    Attributes:
        rows: their number.
        lines: number of lines.
        names: names of the columns that were found.
        notes: lines about rows of several lines.
        numbers: columns of nothing but numbers of JSON, of a copy.
    """

    rows: int
    lines: int
    names: list[str]
    notes: list[str]
    numbers: Sequence[str] = ()


def copy(part: TextPart, path: str) -> Measured:
    """Copies a file to a stream of Arrow, with the columns `LINE` and `PROBLEM`.

    Raises:
        ValueError: the file is damaged, or a column is missing; the message has file and place.
    """
    how = part.how._replace(floats=())  # which batches have in different types
    reader = TextReader(part._replace(how=how))
    with ExitStack() as stack:
        writer = None
        for batch in reader.batches([*how.columns, LINE, PROBLEM]):
            if writer is None:
                writer = stack.enter_context(pa.ipc.new_stream(path, batch.schema))
            writer.write_batch(batch)
    return reader.measured()._replace(numbers=sorted(reader.numbers))


def measure(part: TextPart | JoinedPart) -> list[Measured | None]:
    """Counts the rows of files; None if rows of a range of lines may have several of them.

    Raises:
        ValueError: a file is damaged, or a column is missing; the message has file and place.
    """
    return list(map(_measure, part.parts if isinstance(part, JoinedPart) else [part]))


def _measure(part: TextPart) -> Measured | None:
    reader = TextReader(part)
    try:
        deque(reader.batches([]), 0)
    except UndecidedError:
        return None
    except ValueError:
        if part.within is None or not part.within.begin or part.within.lines:
            raise
        lines = count_lines(part.table.path, ByteRange(0, part.within.begin))
        return _measure(part._replace(within=part.within._replace(lines=lines)))
    return reader.measured()


def text_parts(
    files: Sequence[tuple[int, TableFile]], how: TextColumns, part_bytes: int
) -> list[TextPart]:
    """Divides text files into parts, in their order, as far as they can be divided.

    Args:
        part_bytes: approximate maximum size of a part.
    """
    parts: list[TextPart] = []
    for number, file in files:
        whole = TextPart(file, number, how)
        parts += (whole.text_size > part_bytes and _ranges(whole, part_bytes)) or [whole]
    return parts


def _ranges(part: TextPart, part_bytes: int) -> list[TextPart]:
    """Returns parts of the lines of a file; none if they cannot be read on their own."""
    file, text = part.table, part.how.text
    if other_encoding(text.encoding) is not None or not part.is_plain:
        return []
    names: tuple[str, ...] = ()
    if file.kind.delimited:
        if text.escape not in (None, NONE):
            return []
        names = tuple(file.kind.names(file.path, text))
        if len(names) < 2 or any("\n" in name or "\r" in name for name in names):
            return []  # blank lines of one column are errors, which others decide on
    size = file.path.stat().st_size
    count = -(-size // part_bytes)
    ends = [size * (i + 1) // count for i in range(count)]
    ranges = itertools.starmap(ByteRange, itertools.pairwise([0, *ends]))
    return [part._replace(within=within, names=names) for within in ranges]


class TextReader:
    """Reads a part once.

    Args:
        content: the text to read in place of the file; None is that of the file.

    Attributes:
        numbers: columns of nothing but numbers of JSON, so far.
    """

    def __init__(self, part: TextPart, content: bytes | None = None) -> None:
        self._content = content
        self._part, self._how, self._kind = part, part.how, part.table.kind
        self._partition = part.table.partition
        self.numbers = set(part.how.columns) - self._partition.keys()
        self._names: dict[str, None] = {}
        self._spans, self._rows = Spans(), 0
        self._floats = set(part.how.floats)

    def measured(self) -> Measured:
        """Returns what has been read."""
        note = self._spans.note(self._part.source, self._how.text)
        notes = [] if note is None else [note]
        return Measured(self._rows, self._spans.read, [*self._names], notes)

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yields the rows, some at a time; see `TextPart.read`."""
        part, how, kind = self._part, self._how, self._kind
        assert isinstance(kind, Text)
        in_file = [name for name in how.columns if name not in self._partition]
        read = [name for name in in_file if name in columns]
        distinct = {name for name in read if name not in how.cells.plain}
        problems: dict[int, str] | None = {} if how.quarantine else None
        text = how.text
        if part.names and part.within is not None and part.within.begin:
            text = replace(text, columns=part.names, header=False)
        reading = Reading(
            text,
            how.cells.separators,
            read,
            problems,
            self._spans,
            distinct=distinct,
            within=part.within,
            numbers=self._floats,
            content=self._content,
        )
        try:
            read_rows = kind.read(part.table.path, reading, how.cells, self.numbers)
            for names, lines, found in read_rows:
                kind.check_names(part.table.path, names, how.text, in_file)
                self._names |= dict.fromkeys([*names, *self._partition])
                self._rows += len(lines)
                if len(lines) and columns:
                    yield self._batch(lines, found, columns, problems)
        except LineError as error:
            raise ValueError(f"{error}{LEAVES_OUT}") from error

    def _batch(
        self,
        lines: np.ndarray,
        found: dict[str, pa.Array],
        columns: Sequence[str],
        problems: dict[int, str] | None,
    ) -> pa.RecordBatch:
        rows, partition = len(lines), self._partition.items()
        arrays = found | {name: pa.array([value] * rows) for name, value in partition}
        made: list[pa.Array] = []
        for name in columns:
            if name == LINE:
                made.append(pa.array(lines, pa.int64()))
            elif name == PROBLEM:
                wrong = [problems.get(line) for line in lines.tolist()] if problems else None
                made.append(pa.array(wrong, pa.string()) if wrong else pa.nulls(rows, pa.string()))
            else:
                made.append(self._typed(name, arrays.get(name, pa.nulls(rows))))
        return pa.RecordBatch.from_arrays(made, [*columns])

    def _typed(self, name: str, array: pa.Array) -> pa.Array:
        """Returns a column in the type that it has in every batch, unless it is of numbers."""
        cells = self._how.cells
        if name in self._floats:
            if (floats := floats_of(array)) is not None:
                return floats
            self._floats.remove(name)
        kind = cells.type_of(name)
        if pa.types.is_string(kind) and name not in cells.plain:
            kind = pa.dictionary(pa.int32(), kind)
        if array.type == kind:
            return array
        if pa.types.is_dictionary(kind):
            return array.cast(kind.value_type).dictionary_encode()
        return array.cast(kind)
