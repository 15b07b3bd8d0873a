"""Parts of files that tasks read: measured, found again and read a batch at a time."""

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from dlrm.data.tables.files import PARQUET, kind_named
from dlrm.data.tables.kinds.columnar import Columnar, Groups
from dlrm.data.tables.kinds.kind import TableFile
from dlrm.data.tables.kinds.text import LINE
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

    def where(self, row: int) -> str:
        """Returns the location of a row of the part, from 0: the file, and its group or line.

        For a table in memory it is the row of the table.
        """
        kind, opened, of_part = self._kind, self._open(), row
        for group in range(self.begin, self.end):
            rows = opened.group(group).rows
            if row < rows:
                break
            row -= rows
        if not self.staged:
            return kind.where(self.source, group, 0, row)
        if LINE not in opened.schema.names:
            return f"{self.source}, row {self.first_of_file + of_part}"
        batches = kind.read(opened, self.source, group, [LINE], {})
        lines = pa.Table.from_batches(batches).column(0)
        line = lines[row].as_py()
        named = isinstance(line, str)  # with the files of a specification
        return f"{Path(self.source).parent}/{line}" if named else f"{self.source}, line {line}"

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


def parts_of(files: Sequence[tuple[Path, TableFile]], part_bytes: int) -> list[FilePart]:
    """Divides files into parts of whole groups, in the order of their rows.

    Args:
        files: the file to read, which is one of Parquet if it is a copy, and the user's file.
        part_bytes: approximate maximum size of a part on disk.

    Raises:
        ValueError: a file is of another kind, or damaged; the message names it.
    """
    parts: list[FilePart] = []
    first_row = 0
    for number, (path, file) in enumerate(files):
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
                place = (number, begin, group + 1, first_row, of_file, rows, size)
                parts.append(
                    FilePart(str(path), str(file.path), *place, partition, staged, kind=kind.name)
                )
                first_row, of_file = first_row + rows, of_file + rows
                begin, size, rows = group + 1, 0, 0
    return parts
