"""Parts of text files, which are read where they are: files, or ranges of their lines."""

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

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
from dlrm.data.tables.formats.base import TableFile
from dlrm.data.tables.formats.cells import Cells
from dlrm.data.tables.formats.text import LINE, PROBLEM, Text
from dlrm.data.tables.parts import Part
from dlrm.data.transform.arrays import floats_of

_PACKED = 8  # times the size of a compressed file that its text may have


class TextColumns(NamedTuple):
    """Says what to read of text."""

    text: TextFormat
    columns: Sequence[str]
    quarantine: bool  # accept rows that cannot be read
    cells: Cells
    floats: Sequence[str]  # may become float64, in batches without other texts


class Measured(NamedTuple):
    """Numbers of the rows and lines of a part, and names of its columns."""

    rows: int
    lines: int
    names: list[str]
    notes: list[str]  # about rows of several lines
    numbers: list[str]  # columns that were read, of nothing but numbers of JSON


class TextPart(NamedTuple):
    """A file, or a range of its lines."""

    table: TableFile
    file: int  # its number among all files
    how: TextColumns
    within: ByteRange | None = None
    names: tuple[str, ...] = ()  # of a CSV's range, of which only the first can have a header
    rows: int = 0  # once their number is known

    @property
    def source(self) -> str:
        """The file."""
        return str(self.table.path)

    @property
    def content(self) -> str:
        """Returns what the part is of the file."""
        return "the lines" if self.within is None else f"the lines in bytes {self.within.begin} on"

    @property
    def byte_range(self) -> tuple[str, int, int]:
        """The file, and begin and end of the bytes that the part was cut from."""
        begin, end = self.within[:2] if self.within else (0, self.table.path.stat().st_size)
        return self.source, begin, end

    @property
    def size(self) -> int:
        """Number of these bytes."""
        _, begin, end = self.byte_range
        return end - begin

    @property
    def is_plain(self) -> bool:
        """Returns whether the file is not compressed."""
        return "none" in (self.how.text.compression, compression_of(self.table.path))

    @property
    def text_size(self) -> int:
        """Approximate bytes of text."""
        return self.size * (1 if self.is_plain else _PACKED)

    def where(self, row: int) -> str:
        """Returns the location of a row of the part, from 0: the file and the line."""
        for batch in _read(self, [LINE]):
            if row < batch.num_rows:
                return f"{self.source}, line {batch.column(0)[row].as_py()}"
            row -= batch.num_rows
        raise IndexError(row)

    def ranges(self) -> list[tuple[str, int, int, bool]]:
        """Returns the bytes that reading needs: file, begin, end, and whether to a line's end."""
        path, begin, end = self.byte_range
        return [(path, max(begin - 1, 0), end, self.within is not None)]

    def read(
        self, columns: Sequence[str], facts: dict[str, Any] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yields the rows, some at a time.

        Args:
            columns: columns of `how`, and `PROBLEM`, the problem of a row as a whole.
            facts: receives, at the end, the `numbers`, columns of nothing but numbers of JSON.
        """
        measured = yield from _read(self, columns)
        if facts is not None:
            facts["numbers"] = measured.numbers

    def read_together(
        self, parts: "Sequence[TextPart]", columns: Sequence[str], facts: dict[str, Any] | None
    ) -> list[pa.RecordBatch] | None:
        """Returns the rows of small files that are read as one; None if that is impossible."""
        if (content := _content(parts)) is None:
            return None
        batches: list[pa.RecordBatch] = []
        try:
            measured = _drain(_read(self, columns, content), batches.append)
        except (ValueError, UndecidedError):
            return None
        if measured.rows != sum(part.rows for part in parts):
            return None
        if facts is not None:
            facts["numbers"] = measured.numbers
        return batches


def _content(parts: Sequence[TextPart]) -> bytes | None:
    """Returns the text of plain files with one header; None if they cannot be read as one."""
    first = parts[0]
    text, partition = first.how.text, first.table.partition
    if other_encoding(text) is not None:
        return None
    contents, header = list[bytes](), b""
    for part in parts:
        content = read_plain(part.table.path)
        if content is None or part.within is not None or part.table.partition != partition:
            return None
        if content and first.table.format.delimited and has_header(text):
            header = header or content[: content.index(b"\n") + 1]
            if not content.startswith(header):
                return None
            content = content[len(header) :]
        contents.append(content)
    return header + b"".join(contents)


def copy(part: TextPart, path: str) -> Measured:
    """Copies a file to a stream of Arrow, with the columns `LINE` and `PROBLEM`.

    Raises:
        ValueError: the file is damaged, or a column is missing; the message has file and line.
    """
    how = part.how._replace(floats=())  # which batches have in different types
    batches = _read(part._replace(how=how), [*how.columns, LINE, PROBLEM])
    writer = None

    def write(batch: pa.RecordBatch) -> None:
        nonlocal writer
        writer = writer or pa.ipc.new_stream(path, batch.schema)
        writer.write_batch(batch)

    measured = _drain(batches, write)
    if writer is not None:
        writer.close()
    return measured


def measure(part: Part) -> list[Measured | None]:
    """Counts the rows of files; None if rows of a range of lines may have several of them.

    Raises:
        ValueError: a file is damaged, or a column is missing; the message has file and line.
    """
    return list(map(_measure, part.parts))


def _measure(part: TextPart) -> Measured | None:
    try:
        return _drain(_read(part, []))
    except UndecidedError:
        return None
    except ValueError:
        if part.within is None or not part.within.begin or part.within.lines:
            raise
        lines = count_lines(part.table.path, ByteRange(0, part.within.begin))
        return _measure(part._replace(within=part.within._replace(lines=lines)))


def text_parts(
    files: Sequence[tuple[int, TableFile]], how: TextColumns, part_bytes: int
) -> list[TextPart]:
    """Divides text files into parts, in their order, as far as they can be divided.

    Args:
        part_bytes: approximate maximum size of a part.
    """
    wholes = (TextPart(file, number, how) for number, file in files)
    return [part for whole in wholes for part in _divided(whole, part_bytes)]


def _divided(part: TextPart, part_bytes: int) -> list[TextPart]:
    """Returns parts of the lines of a file, or the file if they cannot be read on their own."""
    file_format, text = part.table.format, part.how.text
    names: tuple[str, ...] = ()
    if part.size <= part_bytes or not part.is_plain or other_encoding(text) is not None:
        return [part]
    if file_format.delimited:
        names = tuple(file_format.names(part.table.path, text))
        of_lines = not any("\n" in name or "\r" in name for name in names)
        # Blank lines of one column are errors, which others decide on.
        if len(names) < 2 or not of_lines or text.escape not in (None, NONE):
            return [part]
    count = -(-part.size // part_bytes)
    ends = [part.size * i // count for i in range(count + 1)]
    ranges = itertools.starmap(ByteRange, itertools.pairwise(ends))
    return [part._replace(within=within, names=names) for within in ranges]


def _drain(
    batches: Generator[pa.RecordBatch, None, Measured],
    use: Callable[[pa.RecordBatch], object] = lambda batch: None,
) -> Measured:
    while True:
        try:
            use(next(batches))
        except StopIteration as end:
            return end.value


def _read(
    part: TextPart, columns: Sequence[str], content: bytes | None = None
) -> Generator[pa.RecordBatch, None, Measured]:
    """Yields the rows of a part, some at a time, and returns what was read; see `TextPart.read`.

    Args:
        content: the text to read in place of the file; None is that of the file.
    """
    how, path, file_format = part.how, part.table.path, part.table.format
    assert isinstance(file_format, Text)
    partition, text, spans = part.table.partition, how.text, Spans()
    in_file = [name for name in how.columns if name not in partition]
    read = [name for name in in_file if name in columns]
    problems: dict[int, str] | None = {} if how.quarantine else None
    numbers, floats, known, num_rows = set(in_file), set(how.floats), dict[str, None](), 0
    if part.names and part.within is not None and part.within.begin:
        text = replace(text, columns=part.names, header=False)
    reading = Reading(
        text,
        how.cells.separators,
        read,
        problems,
        spans,
        distinct={name for name in read if name not in how.cells.plain},
        within=part.within,
        numbers=floats,
        content=content,
    )
    try:
        for names, lines, arrays in file_format.read(path, reading, how.cells, numbers):
            file_format.check_names(path, names, how.text, in_file)
            known |= dict.fromkeys([*names, *partition])
            num_rows += len(lines)
            if not len(lines) or not columns:
                continue
            arrays |= {name: pa.array([value] * len(lines)) for name, value in partition.items()}
            arrays |= {
                LINE: pa.array(lines, pa.int64()),
                PROBLEM: pa.nulls(len(lines), pa.string()),
            }
            if problems:
                wrong = map(problems.get, lines.tolist())
                arrays[PROBLEM] = pa.array(list(wrong), pa.string())
            for name in columns:
                if name not in (LINE, PROBLEM):
                    array = arrays.get(name, pa.nulls(len(lines)))
                    arrays[name] = _typed(name, array, how.cells, floats)
            yield pa.RecordBatch.from_arrays([arrays[name] for name in columns], [*columns])
    except LineError as error:
        raise ValueError(f"{error}{LEAVES_OUT}") from error
    note = spans.note(part.source, how.text)
    notes = [] if note is None else [note]
    return Measured(num_rows, spans.read, [*known], notes, sorted(numbers))


def _typed(name: str, array: pa.Array, cells: Cells, floats: set[str]) -> pa.Array:
    """Returns a column in the type that it has in every batch, unless it is of numbers."""
    if name in floats:
        if (values := floats_of(array)) is not None:
            return values
        floats.remove(name)
    dtype = cells.type_of(name)
    if pa.types.is_string(dtype) and name not in cells.plain:
        dtype = pa.dictionary(pa.int32(), dtype)
    if array.type == dtype:
        return array
    if pa.types.is_dictionary(dtype):
        return array.cast(dtype.value_type).dictionary_encode()
    return array.cast(dtype)
