"""Parts of files that tasks read: measured, found again and read a batch at a time."""

import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from dlrm.data.tables.files import ARROW, PARQUET, kind_named
from dlrm.data.tables.kinds.columnar import Columnar, Groups
from dlrm.data.tables.kinds.kind import TableFile
from dlrm.data.tables.kinds.text import LINE
from dlrm.data.tables.pieces import Copied
from dlrm.remote import task_files

_BLOCK_BYTES = 1 << 20


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
        origins: of a copy of several files, or of lines of one, the rows of each.
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
    origins: Sequence["Origin"] = ()

    @classmethod
    def from_list(cls, values: list[Any]) -> "FilePart":
        """Returns a part whose values were stored as JSON."""
        part = cls(*values)
        return part._replace(origins=[Origin(*origin) for origin in part.origins])

    def file_of(self, row: int) -> int:
        """Returns the number of the file that a row of the part, from 0, is of."""
        return self._origin(row)[0].file if self.origins else self.file

    def source_of(self, row: int) -> str:
        """Returns the user's file that a row of the part, from 0, is of."""
        return self._origin(row)[0].source if self.origins else self.source

    def _origin(self, row: int) -> tuple["Origin", int]:
        """Returns the origin of a row, and the row's number among those of it."""
        for origin in self.origins:
            if row < origin.rows:
                return origin, row
            row -= origin.rows
        raise IndexError(row)

    def where(self, row: int) -> str:
        """Returns the location of a row of the part, from 0: the file, and its group or line.

        For a table in memory it is the row of the table.
        """
        kind, opened, of_part = self._kind, self._open(), row
        if self.origins:
            origin, row = self._origin(row)
            if LINE in opened.schema.names:
                batches = kind.read(opened, self.source, self.begin, [LINE], {})
                line = pa.Table.from_batches(batches).column(0)[of_part].as_py()
                if isinstance(line, str):  # with the files of a specification
                    return f"{Path(origin.source).parent}/{line}"
                return f"{origin.source}, line {origin.lines + line}"
            of_file = kind_named(origin.kind)
            assert isinstance(of_file, Columnar), "text has lines"
            opened = of_file.open(origin.source, origin.source)
            group, row = _group_of(opened, 0, row)
            return of_file.where(origin.source, group, 0, row)
        group, row = _group_of(opened, self.begin, row)
        if self.staged:
            return f"{self.source}, row {self.first_of_file + of_part}"
        return kind.where(self.source, group, 0, row)

    def checksum(self) -> int:
        """Returns the CRC-32 of the bytes of the groups."""
        opened = self._open()
        groups = [opened.group(number) for number in range(self.begin, self.end)]
        begin, end = min(group.begin for group in groups), max(group.end for group in groups)
        crc = 0
        with open(self.path, "rb") as file:
            file.seek(begin)
            while begin < end and (block := file.read(min(_BLOCK_BYTES, end - begin))):
                crc, begin = zlib.crc32(block, crc), begin + len(block)
        return crc

    def check(self) -> None:
        """Raises ValueError if the groups have changed since they were counted."""
        if self.crc is not None and (crc := self.checksum()) != self.crc:
            raise ValueError(
                f"{self.source}: expected CRC-32 {self.crc:08x} of {self._kind.group}s "
                f"{self.begin} to {self.end - 1}, as when they were counted, got {crc:08x}: the "
                "file has changed; --restart begins anew"
            )

    def read(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yields the rows, some at a time; see `Columnar.read`."""
        opened = self._open()
        for group in range(self.begin, self.end):
            yield from self._kind.read(opened, self.source, group, columns, self.partition)

    @property
    def _kind(self) -> Columnar:
        kind = kind_named(self.kind)
        assert isinstance(kind, Columnar), "others are staged"
        return kind

    def _open(self) -> Groups:
        if not task_files.is_active():
            return self._kind.open(self.path, self.source)
        if self._kind is not PARQUET:
            task_files.fetch(self.path)
            return self._kind.open(self.path, self.source)
        task_files.fetch_ends(self.path)
        opened = self._kind.open(self.path, self.source)
        groups = [opened.group(number) for number in range(self.begin, self.end)]
        task_files.fetch(self.path, [(group.begin, group.end) for group in groups])
        return opened


class Origin(NamedTuple):
    """The rows of a part from a file.

    Attributes:
        source: the user's file.
        file: its number among all files.
        rows: number of rows.
        lines: number of lines of text before them, and before those that the part's lines count.
        kind: the name of the kind of the file.
    """

    source: str
    file: int
    rows: int
    lines: int
    kind: str


def _group_of(opened: Groups, group: int, row: int) -> tuple[int, int]:
    """Returns the group of a row, and its number there, from that after the begin of a group."""
    while row >= (rows := opened.group(group).rows):
        group, row = group + 1, row - rows
    return group, row


def parts_of(files: Sequence[tuple[Path, TableFile]], part_bytes: int) -> list[FilePart]:
    """Divides files into parts of whole groups, in the order of their rows.

    Args:
        files: the file to read, which is one of Parquet if it is a copy, and the user's file.
        part_bytes: approximate maximum size of a part on disk.

    Raises:
        ValueError: a file is of another kind, or damaged; the message names it.
    """
    return in_order([parts_of_file(n, *file, part_bytes) for n, file in enumerate(files)])


def in_order(parts: Iterable[Iterable[FilePart]]) -> list[FilePart]:
    """Returns parts with the number of rows before each."""
    rows, placed = 0, []
    for part in itertools.chain.from_iterable(parts):
        placed.append(part._replace(first_row=rows))
        rows += part.rows
    return placed


def parts_of_file(number: int, path: Path, file: TableFile, part_bytes: int) -> Iterator[FilePart]:
    """Yields the parts of a file, with 0 as the number of rows before all; see `parts_of`."""
    staged = path.resolve() != file.path.resolve()
    kind, partition = PARQUET if staged else file.kind, file.partition
    assert isinstance(kind, Columnar), "others are staged"
    opened = kind.open(path, file.path)
    begin, size, rows, of_file = 0, 0, 0, 0
    for group in range(opened.num_groups):
        facts = opened.group(group)
        size += facts.end - facts.begin
        rows += facts.rows
        if size >= part_bytes or group + 1 == opened.num_groups:
            place = (number, begin, group + 1, 0, of_file, rows, size)
            yield FilePart(str(path), str(file.path), *place, partition, staged, kind=kind.name)
            of_file += rows
            begin, size, rows = group + 1, 0, 0


def parts_of_copies(
    files: Sequence[TableFile], copies: Iterable[tuple[str, Copied]]
) -> Iterator[FilePart]:
    """Yields a part for each copy, in the order of their rows, with 0 rows before all."""
    lines: dict[int, int] = {}
    for path, copy in copies:
        origins = []
        for number, rows, of_range in copy.origins:
            before, file = lines.get(number, 0), files[number]
            origins.append(Origin(str(file.path), number, rows, before, file.kind.name))
            lines[number] = before + of_range
        first = origins[0]
        place = (first.file, 0, 1, 0, 0, copy.rows, copy.size)
        yield FilePart(path, first.source, *place, {}, True, kind=ARROW.name, origins=origins)
