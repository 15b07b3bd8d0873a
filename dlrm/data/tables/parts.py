"""Parts of files that tasks read: measured, found again and read a batch at a time."""

import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from dlrm.data.tables.files import PARQUET, kind_named
from dlrm.data.tables.kinds.columnar import Columnar, Groups
from dlrm.data.tables.kinds.kind import TableFile
from dlrm.data.tables.kinds.text import LINE

_BLOCK_BYTES = 1 << 20
_BATCH_ROWS = 1 << 16  # of small files


class FilePart(NamedTuple):
    """Groups [begin, end) of the rows of a file, such as row groups of Parquet.

    Attributes:
        path: the file to read.
        source: the user's file, from which another one was staged, or `path`.
        file: its number among all files.
        begin, end: its groups.
        first_row: number of rows before the part's first, in all files on disk.
        first_of_file: number of these rows in this file.
        rows: number of rows.
        size: bytes of the groups on disk.
        partition: columns from the names of folders, such as `day=2026-11-20`.
        staged: whether the file is a copy: of text, with the lines in `LINE`, or of a table in
            memory.
        crc: CRC-32 of the bytes of the groups when they were counted, which later reads verify;
            None if unknown.
        kind: the name of the kind of the file; see `kind_named`.
    """

    path: str
    source: str
    file: int
    begin: int
    end: int
    first_row: int
    first_of_file: int
    rows: int
    size: int
    partition: dict[str, str | None]
    staged: bool
    crc: int | None = None
    kind: str = PARQUET.name

    def file_of(self, row: int) -> int:
        """Returns the number of the file."""
        return self.file

    def source_of(self, row: int) -> str:
        """Returns the user's file."""
        return self.source

    def where(self, row: int) -> str:
        """Returns the location of a row of the part, from 0: the file, and its group or line.

        For a table in memory it is the row of the table.
        """
        opened = self._open()
        group, of_group = _group_of(opened, self.begin, row)
        if LINE in opened.schema.names:
            batches = self._kind.read(opened, self.source, group, [LINE], {})
            line = pa.Table.from_batches(batches).column(0)[of_group].as_py()
            if isinstance(line, str):  # with the files of a specification
                return f"{Path(self.source).parent}/{line}"
            return f"{self.source}, line {line}"
        if self.staged:
            return f"{self.source}, row {self.first_of_file + row}"
        return self._kind.where(self.source, group, 0, of_group)

    def checksum(self) -> int:
        """Returns the CRC-32 of the bytes of the groups."""
        places = self._places()
        return checksum(self.path, min(places)[0], max(end for _, end in places))

    def check(self) -> None:
        """Raises ValueError if the groups have changed since they were counted."""
        if self.crc is not None and (crc := self.checksum()) != self.crc:
            groups = f"{self._kind.group}s {self.begin} to {self.end - 1}"
            raise changed(self.source, self.crc, groups, crc)

    def read(
        self, columns: Sequence[str], facts: dict[str, Any] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yields the rows, some at a time; see `Columnar.read`."""
        opened = self._open()
        for group in range(self.begin, self.end):
            yield from self._kind.read(opened, self.source, group, columns, self.partition)

    def together(self, parts: Any, columns: Any, facts: Any) -> None:
        """Returns None: the files are read one by one; see `TextPart.together`."""

    def ranges(self) -> list[tuple[str, int, int]]:
        """Returns the bytes that reading needs: file, begin and end."""
        size = os.path.getsize(self.path)
        if self._kind is not PARQUET:
            return [(self.path, 0, size)]
        places = [(0, 4), (footer_begin(self.path), size), *self._places()]
        return [(self.path, begin, end) for begin, end in places]

    def _places(self) -> list[tuple[int, int]]:
        opened = self._open()
        return [opened.place(number) for number in range(self.begin, self.end)]

    @property
    def _kind(self) -> Columnar:
        kind = kind_named(self.kind)
        assert isinstance(kind, Columnar), "others are staged"
        return kind

    def _open(self) -> Groups:
        return self._kind.open(self.path, self.source)


def checksum(path: str | Path, begin: int, end: int) -> int:
    """Returns the CRC-32 of bytes of a file."""
    crc = 0
    with open(path, "rb") as file:
        file.seek(begin)
        while begin < end and (block := file.read(min(_BLOCK_BYTES, end - begin))):
            crc, begin = zlib.crc32(block, crc), begin + len(block)
    return crc


def changed(source: str, expected: int, content: str, got: int) -> ValueError:
    """Returns the error for a file that has changed."""
    return ValueError(
        f"{source}: expected CRC-32 {expected:08x} of {content}, as when they were counted, got "
        f"{got:08x}: the file has changed; --restart begins anew"
    )


class JoinedPart(NamedTuple):
    """Parts of small files, which one task reads; see `FilePart` and `TextPart`."""

    parts: Sequence[Any]
    first_row: int = 0
    crc: list[int] | None = None

    @property
    def staged(self) -> bool:
        """Returns whether batches have the column `PROBLEM`."""
        return self.parts[0].staged

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
        """Returns the checksum of each part."""
        return [part.checksum() for part in self.parts]

    def check(self) -> None:
        """Raises ValueError if a file has changed since it was counted."""
        for part, crc in zip(self.parts, self.crc or (), strict=False):
            part._replace(crc=crc).check()

    def ranges(self) -> list[tuple[str, int, int]]:
        """Returns the bytes that reading needs; see `FilePart`."""
        return [one for part in self.parts for one in part.ranges()]

    def read(
        self, columns: Sequence[str], facts: dict[str, Any] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yields the rows, some at a time; see `FilePart` and `TextPart`."""
        if (made := self.parts[0].together(self.parts, columns, facts)) is not None:
            yield from made
            return
        of_parts: list[dict[str, Any]] = [{} for _ in self.parts]
        pairs = zip(self.parts, of_parts, strict=True)
        yield from _together(b for part, found in pairs for b in part.read(columns, found))
        numbers = [set(found["numbers"]) for found in of_parts if "numbers" in found]
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
) -> list[list[Any]]:
    """Returns parts, of which consecutive small ones of other files are together.

    Args:
        sizes: those of the parts.
        part_bytes: approximate maximum size of parts that are together.
        groups: files in one part have the same of these.
    """
    made: list[list[Any]] = []
    together = 0
    for part, size in zip(parts, sizes, strict=True):
        last = made[-1][0] if made else part
        follows = made and together + size <= part_bytes and groups[last.file] == groups[part.file]
        if follows:
            made[-1].append(part)
        else:
            made.append([part])
            together = 0
        together += size
    return made


def part_of(parts: Sequence[Any]) -> Any:
    """Returns parts as one."""
    return parts[0] if len(parts) == 1 else JoinedPart(parts)


def _group_of(opened: Groups, group: int, row: int) -> tuple[int, int]:
    """Returns the group of a row, and its number there, from that after the begin of a group."""
    while row >= (rows := opened.rows(group)):
        group, row = group + 1, row - rows
    return group, row


def footer_begin(path: str | Path) -> int:
    """Returns the place of the footer of a file of Parquet."""
    with open(path, "rb") as file:
        file.seek(-8, os.SEEK_END)
        return max(file.tell() - int.from_bytes(file.read(4), "little"), 0)


def parts_of_file(
    number: int, file: TableFile, part_bytes: int, copy: tuple[Path, Columnar] | None = None
) -> Iterator[FilePart]:
    """Yields parts of whole groups of a file, with 0 as the number of rows before all.

    Args:
        number: number of the file among all files.
        part_bytes: approximate maximum size of a part on disk.
        copy: the copy to read in its place, which has the columns of folders, and its kind.

    Raises:
        ValueError: a file is of another kind, or damaged; the message names it.
    """
    path, kind = (file.path.resolve(), file.kind) if copy is None else copy
    partition = file.partition if copy is None else {}
    assert isinstance(kind, Columnar), "others are staged"
    opened = kind.open(path, file.path)
    begin, size, rows, of_file = 0, 0, 0, 0
    for group in range(opened.num_groups):
        place = opened.place(group)
        size += place[1] - place[0]
        rows += kind.rows(opened, file.path, group)
        if size >= part_bytes or group + 1 == opened.num_groups:
            facts = (number, begin, group + 1, 0, of_file, rows, size)
            yield FilePart(
                str(path), str(file.path), *facts, partition, copy is not None, kind=kind.name
            )
            of_file += rows
            begin, size, rows = group + 1, 0, 0
