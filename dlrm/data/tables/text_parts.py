"""Parts of text files: ranges of lines, or small files together, which are read where they are."""

import itertools
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import pyarrow as pa

from dlrm.data.sources.csv_rows import Reading, Spans, UndecidedError
from dlrm.data.sources.row_error import LEAVES_OUT, LineError
from dlrm.data.sources.text_files import ByteRange, compression_of, count_lines, other_encoding
from dlrm.data.sources.text_format import NONE, TextFormat
from dlrm.data.tables.columns import floats_of
from dlrm.data.tables.kinds.cells import Cells
from dlrm.data.tables.kinds.kind import TableFile
from dlrm.data.tables.kinds.text import LINE, PROBLEM, Rows, Text

_PACKED = 8  # times the size of a compressed file that its text may have
_BLOCK_BYTES = 1 << 20


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


class Origin(NamedTuple):
    """The rows of a part from a file: the user's file, its number among all, and their number."""

    source: str
    file: int
    rows: int


class TextPart(NamedTuple):
    """Whole files, or a range of the lines of one.

    Attributes:
        files: files of one kind, with their numbers among all files.
        how: what is read of them.
        within: the lines of the only file; None is all.
        names: columns of the CSV whose lines these are, of which only the first can be a header.
        origins: the rows of each file, once they are known.
        first_row: number of rows before the part's first, in all files.
        crc: CRC-32 of the bytes when they were counted, which later reads verify.
    """

    files: Sequence[tuple[int, TableFile]]
    how: TextColumns
    within: ByteRange | None = None
    names: tuple[str, ...] = ()
    origins: Sequence[Origin] = ()
    first_row: int = 0
    crc: int | None = None

    @property
    def staged(self) -> bool:
        """Returns whether batches have the column `PROBLEM`."""
        return True

    @property
    def file(self) -> int:
        """Number of the first file."""
        return self.files[0][0]

    @property
    def source(self) -> str:
        """The first file."""
        return str(self.files[0][1].path)

    @property
    def rows(self) -> int:
        """Number of rows, once they are known."""
        return sum(origin.rows for origin in self.origins)

    @property
    def size(self) -> int:
        """Bytes to read."""
        if self.within is not None:
            return self.within.end - self.within.begin
        return sum(file.path.stat().st_size for _, file in self.files)

    @property
    def text_size(self) -> int:
        """Approximate bytes of text."""
        packed = [1 if _is_plain(file, self.how.text) else _PACKED for _, file in self.files]
        sizes = [file.path.stat().st_size for _, file in self.files]
        return sum(size * times for size, times in zip(sizes, packed, strict=True))

    def is_alone(self, part_bytes: int) -> bool:
        """Returns whether it is a file beyond the size of a part, which was not divided."""
        return self.within is None and len(self.files) == 1 and self.text_size > part_bytes

    def _origin(self, row: int) -> Origin:
        for origin in self.origins:
            if row < origin.rows:
                return origin
            row -= origin.rows
        raise IndexError(row)

    def file_of(self, row: int) -> int:
        """Returns the number of the file that a row of the part, from 0, is of."""
        return self._origin(row).file

    def source_of(self, row: int) -> str:
        """Returns the file that a row of the part, from 0, is of."""
        return self._origin(row).source

    def where(self, row: int) -> str:
        """Returns the location of a row of the part, from 0: the file and the line."""
        place = row
        for batch in TextReader(self).batches([LINE]):
            if place < batch.num_rows:
                return f"{self._origin(row).source}, line {batch.column(0)[place].as_py()}"
            place -= batch.num_rows
        raise IndexError(row)

    def checksum(self) -> int:
        """Returns the CRC-32 of the bytes that the part was cut from."""
        crc = 0
        for _, file in self.files:
            begin, end = (0, file.path.stat().st_size) if self.within is None else self.within[:2]
            with open(file.path, "rb") as opened:
                opened.seek(begin)
                while begin < end and (block := opened.read(min(_BLOCK_BYTES, end - begin))):
                    crc, begin = zlib.crc32(block, crc), begin + len(block)
        return crc

    def ranges(self) -> list[tuple[str, int, int, bool]]:
        """Returns the bytes that reading needs: file, begin, end, and whether to a line's end."""
        if self.within is not None:
            begin, end = max(self.within.begin - 1, 0), self.within.end
            return [(str(self.files[0][1].path), begin, end, True)]
        paths = [file.path for _, file in self.files]
        return [(str(path), 0, path.stat().st_size, False) for path in paths]

    def check(self) -> None:
        """Raises ValueError if the files have changed since they were counted."""
        if self.crc is not None and (crc := self.checksum()) != self.crc:
            place = "" if self.within is None else f" in bytes {self.within.begin} on"
            raise ValueError(
                f"{self.source}: expected CRC-32 {self.crc:08x} of the lines{place}, as when they "
                f"were counted, got {crc:08x}: the file has changed; --restart begins anew"
            )

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


class Measured(NamedTuple):
    """The rows of a part.

    Attributes:
        rows: of each file.
        lines: number of lines of the last file.
        names: names of the columns that were found.
        notes: lines about rows of several lines.
        numbers: columns of nothing but numbers of JSON, of a copy.
    """

    rows: list[int]
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
    numbers = sorted(reader.numbers)
    return Measured([*reader.rows.values()], reader.lines, [*reader.names], reader.notes, numbers)


def measure(part: TextPart) -> Measured | None:
    """Counts the rows of a part; None if rows of a range of lines may have several of them.

    Raises:
        ValueError: a file is damaged, or a column is missing; the message has file and place.
    """
    try:
        return _measure(part)
    except UndecidedError:
        return None
    except ValueError:
        if part.within is None or not part.within.begin:
            raise
        lines = count_lines(part.files[0][1].path, ByteRange(0, part.within.begin))
        return _measure(part._replace(within=part.within._replace(lines=lines)))


def _measure(part: TextPart) -> Measured:
    reader = TextReader(part)
    for _ in reader.batches([]):
        pass
    rows = [reader.rows.get(number, 0) for number, _ in part.files]
    return Measured(rows, reader.lines, [*reader.names], reader.notes)


def text_parts(
    files: Sequence[tuple[int, TableFile]],
    how: TextColumns,
    part_bytes: int,
    groups: Sequence[Any],
) -> list[TextPart]:
    """Divides text files into parts, in their order.

    Args:
        part_bytes: approximate maximum size of a part.
        groups: whole files in one part have the same of these.
    """
    parts: list[TextPart] = []
    size = 0
    for number, file in files:
        whole = TextPart([(number, file)], how)
        if whole.is_alone(part_bytes):
            ranges = _ranges(whole, part_bytes) if _is_plain(file, how.text) else []
            parts += ranges or [whole]
            continue
        of_file, last = whole.text_size, parts[-1] if parts else whole
        follows = last.within is None and last.files[-1][0] == number - 1
        follows = follows and not last.is_alone(part_bytes) and size + of_file <= part_bytes
        if follows and groups[number - 1] == groups[number]:
            parts[-1] = last._replace(files=[*last.files, (number, file)])
        else:
            parts.append(whole)
            size = 0
        size += of_file
    return parts


def _is_plain(file: TableFile, text: TextFormat) -> bool:
    return text.compression == "none" or compression_of(file.path) == "none"


def _ranges(part: TextPart, part_bytes: int) -> list[TextPart]:
    """Returns parts of the lines of a file; none if they cannot be read on their own."""
    ((_, file),), text = part.files, part.how.text
    if other_encoding(text.encoding) is not None:
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

    Attributes:
        rows: file -> number of its rows.
        lines: number of lines of the last file.
        names: names of the columns that were found.
        numbers: columns of nothing but numbers of JSON, so far.
        notes: lines about rows of several lines.
    """

    def __init__(self, part: TextPart) -> None:
        self._part, self._how = part, part.how
        self.rows: dict[int, int] = {}
        self.lines = 0
        self.names: dict[str, None] = {}
        self.numbers = set(part.how.columns)
        self.notes: list[str] = []
        self._floats = set(part.how.floats)

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yields the rows, some at a time; see `TextPart.read`."""
        by_partition = itertools.groupby(self._part.files, lambda one: one[1].partition)
        for partition, files in by_partition:
            yield from self._of_files(list(files), partition, columns)

    def _of_files(
        self,
        files: list[tuple[int, TableFile]],
        partition: dict[str, str | None],
        columns: Sequence[str],
    ) -> Iterator[pa.RecordBatch]:
        how, kind = self._how, files[0][1].kind
        assert isinstance(kind, Text)
        self.numbers -= partition.keys()
        in_file = [name for name in how.columns if name not in partition]
        read = [name for name in in_file if name in columns]
        distinct = {name for name in read if name not in how.cells.plain}
        lists = how.cells.separators
        reading = Reading(how.text, lists, read, distinct=distinct, numbers=self._floats)
        paths = [file.path for _, file in files]
        together = kind.read_together(paths, reading) if len(files) > 1 else None
        if together is not None:
            found, rows = together
            kind.check_names(paths[0], found[0], how.text, in_file)
            counts = zip((number for number, _ in files), rows, strict=True)
            yield from self._batch(kind, found, partition, dict(counts), columns)
            return
        for number, file in files:
            yield from self._of_file(number, file, kind, reading, in_file, partition, columns)

    def _of_file(
        self,
        number: int,
        file: TableFile,
        kind: Text,
        reading: Reading,
        in_file: Sequence[str],
        partition: dict[str, str | None],
        columns: Sequence[str],
    ) -> Iterator[pa.RecordBatch]:
        spans, within, names = Spans(), self._part.within, self._part.names
        problems: dict[int, str] | None = {} if self._how.quarantine else None
        reading = reading._replace(problems=problems, spans=spans, within=within)
        if names and within is not None and within.begin:
            text = replace(reading.text, columns=names, header=False)
            reading = reading._replace(text=text)
        try:
            for read in kind.read(file.path, reading):
                kind.check_names(file.path, read[0], self._how.text, in_file)
                rows = {number: len(read[1])}
                yield from self._batch(kind, read, partition, rows, columns, problems)
        except LineError as error:
            raise ValueError(f"{error}{LEAVES_OUT}") from error
        self.lines = spans.read
        self.notes += filter(None, [spans.note(file.path, self._how.text)])

    def _batch(
        self,
        kind: Text,
        read: Rows,
        partition: dict[str, str | None],
        counts: dict[int, int],
        columns: Sequence[str],
        problems: dict[int, str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yields rows as `Text.read` does, if there are any."""
        names, lines, found = read
        how, rows = self._how, len(lines)
        self.names |= dict.fromkeys([*names, *partition])
        for number, count in counts.items():
            self.rows[number] = self.rows.get(number, 0) + count
        if not rows or not columns:
            return
        arrays = {name: kind.array(name, c, how.cells, how.text, self.numbers) for name, c in found}
        arrays |= {name: pa.array([value] * rows) for name, value in partition.items()}
        made: list[pa.Array] = []
        for name in columns:
            if name == LINE:
                made.append(pa.array(lines, pa.int64()))
            elif name == PROBLEM:
                wrong = [problems.get(line) for line in lines.tolist()] if problems else None
                made.append(pa.array(wrong, pa.string()) if wrong else pa.nulls(rows, pa.string()))
            else:
                made.append(self._typed(name, arrays.get(name, pa.nulls(rows))))
        yield pa.RecordBatch.from_arrays(made, [*columns])

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
