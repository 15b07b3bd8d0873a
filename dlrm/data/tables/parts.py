"""Parts of tables that tasks read: files, groups of their rows or ranges of their lines."""

import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from dlrm.data.tables.formats.base import TableFile
from dlrm.data.tables.formats.columnar import Columnar, Parquet
from dlrm.data.tables.formats.text import LINE

_BLOCK_BYTES = 1 << 20
_BATCH_ROWS = 1 << 16  # of small files


class FilePart(NamedTuple):
    """Groups [begin, end) of the rows of a file, such as row groups of Parquet.

    A staged file is a copy of the source: of text, with the lines in `LINE`, or of a table in
    memory.
    """

    path: str
    source: str  # the user's file
    format: Columnar
    staged: bool
    file: int  # its number among all files
    partition: dict[str, str | None]  # columns from names of folders, such as day=2026-11-20
    begin: int
    end: int
    first_of_file: int  # number of rows before these in the file
    rows: int
    size: int  # bytes of the groups on disk

    @property
    def content(self) -> str:
        """Returns what the part is of the file."""
        return f"{self.format.group}s {self.begin} to {self.end - 1}"

    @property
    def byte_range(self) -> tuple[str, int, int]:
        """The file, and begin and end of the bytes of the groups."""
        ranges = self._byte_ranges()
        return self.path, min(ranges)[0], max(end for _, end in ranges)

    def where(self, row: int) -> str:
        """Returns the location of a row of the part, from 0: the file, and its group or line.

        For a table in memory it is the row of the table.
        """
        opened, group, of_group = self.format.open(self.path, self.source), self.begin, row
        while of_group >= (rows := opened.rows(group)):
            group, of_group = group + 1, of_group - rows
        if LINE in opened.schema.names:
            lines = pa.Table.from_batches(opened.read(group, [LINE], {})).column(0)
            return f"{self.source}, line {lines[of_group]}"
        if self.staged:
            return f"{self.source}, row {self.first_of_file + row}"
        return opened.where(group, of_group)

    def read(
        self, columns: Sequence[str], facts: dict[str, Any] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yields the rows, some at a time; see `Groups.read`."""
        opened = self.format.open(self.path, self.source)
        for group in range(self.begin, self.end):
            yield from opened.read(group, columns, self.partition)

    def read_together(self, parts: Any, columns: Any, facts: Any) -> None:
        """Returns None: the files are read one by one; see `TextPart.read_together`."""

    def ranges(self) -> list[tuple[str, int, int]]:
        """Returns the bytes that reading needs: file, begin and end."""
        size = os.path.getsize(self.path)
        if not isinstance(self.format, Parquet):
            return [(self.path, 0, size)]
        ranges = [(0, 4), (footer_begin(self.path), size), *self._byte_ranges()]
        return [(self.path, begin, end) for begin, end in ranges]

    def _byte_ranges(self) -> list[tuple[int, int]]:
        opened = self.format.open(self.path, self.source)
        return list(map(opened.byte_range, range(self.begin, self.end)))


def parts_of_file(
    number: int, file: TableFile, part_bytes: int, copy: tuple[Path, Columnar] | None = None
) -> Iterator[FilePart]:
    """Yields parts of whole groups of a file.

    Args:
        number: number of the file among all files.
        part_bytes: approximate maximum size of a part on disk.
        copy: the copy to read in its place, which has the columns of folders, and its format.

    Raises:
        ValueError: a file is of another format, or damaged; the message names it.
    """
    path, file_format = (file.path.resolve(), file.format) if copy is None else copy
    assert isinstance(file_format, Columnar), "others are staged"
    partition = file.partition if copy is None else {}
    facts = str(path), str(file.path), file_format, copy is not None, number, partition
    opened = file_format.open(path, file.path)
    begin, size, rows, of_file = 0, 0, 0, 0
    for group in range(opened.num_groups):
        first, last = opened.byte_range(group)
        size += last - first
        rows += opened.count(group)
        if size >= part_bytes or group + 1 == opened.num_groups:
            yield FilePart(*facts, begin, group + 1, of_file, rows, size)
            of_file += rows
            begin, size, rows = group + 1, 0, 0


def _checksum(path: str, begin: int, end: int) -> int:
    crc = 0
    with open(path, "rb") as file:
        file.seek(begin)
        while begin < end and (block := file.read(min(_BLOCK_BYTES, end - begin))):
            crc, begin = zlib.crc32(block, crc), begin + len(block)
    return crc


def footer_begin(path: str | Path) -> int:
    """Returns the position of the footer of a file of Parquet."""
    with open(path, "rb") as file:
        file.seek(-8, os.SEEK_END)
        return max(file.tell() - int.from_bytes(file.read(4), "little"), 0)


class Part(NamedTuple):
    """Rows that one task reads: a part of a file, or small files together."""

    parts: Sequence[Any]  # each a `FilePart` or a `TextPart`
    first_row: int = 0  # number of rows before these, in all files
    crc: list[int] | None = None  # CRC-32 of each when it was counted, which later reads verify

    @property
    def file(self) -> int:
        """Number of the first file."""
        return self.parts[0].file

    @property
    def source(self) -> str:
        """The first file."""
        return self.parts[0].source

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(part.rows for part in self.parts)

    @property
    def size(self) -> int:
        """Bytes to read."""
        return sum(part.size for part in self.parts)

    def _part(self, row: int) -> tuple[Any, int]:
        for part in self.parts:
            if row < part.rows:
                return part, row
            row -= part.rows
        raise IndexError(row)

    def file_of(self, row: int) -> int:
        """Returns the number of the file that a row of the part, from 0, is of."""
        return self._part(row)[0].file

    def source_of(self, row: int) -> str:
        """Returns the file that a row of the part, from 0, is of."""
        return self._part(row)[0].source

    def where(self, row: int) -> str:
        """Returns the location of a row of the part, from 0."""
        part, row = self._part(row)
        return part.where(row)

    def checksum(self) -> list[int]:
        """Returns the checksum of each file's part."""
        return [_checksum(*part.byte_range) for part in self.parts]

    def check(self) -> None:
        """Raises ValueError if a file has changed since it was counted."""
        checked = zip(self.parts, self.crc, self.checksum(), strict=True) if self.crc else ()
        for part, crc, actual in checked:
            if actual != crc:
                raise ValueError(
                    f"{part.source}: expected CRC-32 {crc:08x} of {part.content}, as when they "
                    f"were counted, got {actual:08x}: the file has changed; --restart begins anew"
                )

    def ranges(self) -> list[Any]:
        """Returns the bytes that reading needs; see `FilePart`."""
        return [each for part in self.parts for each in part.ranges()]

    def read(
        self, columns: Sequence[str], facts: dict[str, Any] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yields the rows, some at a time; see `FilePart` and `TextPart`."""
        first, *others = self.parts
        if not others:
            yield from first.read(columns, facts)
            return
        if (batches := first.read_together(self.parts, columns, facts)) is not None:
            yield from batches
            return
        of_parts: list[dict[str, Any]] = [{} for _ in self.parts]
        pairs = zip(self.parts, of_parts, strict=True)
        yield from _together(b for part, own in pairs for b in part.read(columns, own))
        numbers = [set(own["numbers"]) for own in of_parts if "numbers" in own]
        if facts is not None and numbers:
            facts["numbers"] = sorted(set.intersection(*numbers))


def _together(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields batches, of which consecutive small ones with one schema are one."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        rows = sum(one.num_rows for one in held) + batch.num_rows
        if held and (rows > _BATCH_ROWS or not batch.schema.equals(held[0].schema, True)):
            yield pa.concat_batches(held)
            held = []
        held.append(batch)
    if held:
        yield pa.concat_batches(held)


def joined(
    parts: Sequence[Any], sizes: Sequence[int], part_bytes: int, groups: Sequence[Any]
) -> list[Part]:
    """Returns parts of files, of which consecutive small ones of other files are together.

    Args:
        sizes: those of the parts.
        part_bytes: approximate maximum size of parts that are together.
        groups: files in one part have the same of these.
    """
    joined: list[list[Any]] = []
    together = 0
    for part, size in zip(parts, sizes, strict=True):
        fits = joined and together + size <= part_bytes
        if fits and groups[joined[-1][0].file] == groups[part.file]:
            joined[-1].append(part)
        else:
            joined.append([part])
            together = 0
        together += size
    return list(map(Part, joined))
