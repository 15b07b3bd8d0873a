"""Parquet files as parts of rows that tasks read: found, measured and read a batch at a time."""

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from dlrm.data.tables.columns import is_text
from dlrm.data.tables.lists import is_list

BATCH_VALUES = 1 << 20  # read at a time, of all columns: 15 MB as Arrow and as fields
LINE = " line"  # column of a staged text file: the line of the row in the source
_BLOCK_BYTES = 1 << 20
PROBLEM = " problem"  # another one: the problem of a row as a whole, a tab, and the row
_NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"


class Part(NamedTuple):
    """Row groups [begin, end) of a Parquet file.

    Attributes:
        path: the file to read.
        source: the user's file, from which another one was staged, or `path`.
        file: its number among all files.
        begin, end: its row groups.
        first_row: number of rows before the part's first, in all files on disk.
        first_of_file: number of these rows in this file.
        rows: number of rows.
        size: bytes of the row groups on disk.
        partition: columns from the names of folders, such as `day=2026-11-20`.
        staged: whether the file is a copy: of text, with the lines in `LINE`, or of a table in
            memory.
        crc: CRC-32 of the bytes of the row groups when they were counted, which later reads
            verify; None if unknown.
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

    def where(self, row: int) -> str:
        """Returns the location of a row of the part, from 0: the file, and row group or line.

        For a table in memory it is the row of the table.
        """
        file = _open(self.path, self.source)
        if self.staged and LINE not in file.schema_arrow.names:
            return f"{self.source}, row {self.first_of_file + row}"
        if self.staged:
            return f"{self.source}, line {_line(self, file, row)}"
        for group in range(self.begin, self.end):
            rows = file.metadata.row_group(group).num_rows
            if row < rows:
                break
            row -= rows
        return f"{self.source}, row group {group}, row {row}"

    def checksum(self) -> int:
        """Returns the CRC-32 of the bytes of the row groups."""
        begin, end = self._range()
        crc = 0
        with open(self.path, "rb") as file:
            file.seek(begin)
            while begin < end and (block := file.read(min(_BLOCK_BYTES, end - begin))):
                crc, begin = zlib.crc32(block, crc), begin + len(block)
        return crc

    def check(self) -> None:
        """Raises ValueError if the row groups have changed since they were counted."""
        if self.crc is not None and (found := self.checksum()) != self.crc:
            raise ValueError(
                f"{self.source}: expected CRC-32 {self.crc:08x} of row groups {self.begin} to "
                f"{self.end - 1}, as when they were counted, got {found:08x}: the file has "
                "changed; --restart begins anew"
            )

    def _range(self) -> tuple[int, int]:
        """Returns the range of the row groups' bytes, from their first to last column chunk."""
        metadata, places = _open(self.path, self.source).metadata, [0]
        for group in range(self.begin, self.end):
            facts = metadata.row_group(group)
            for i in range(facts.num_columns):
                chunk = facts.column(i)
                begin = chunk.data_page_offset
                if chunk.has_dictionary_page:
                    begin = min(begin, chunk.dictionary_page_offset)
                places += [begin, begin + chunk.total_compressed_size]
        return min(places[1:], default=0), max(places)


def _line(part: Part, file: pq.ParquetFile, row: int) -> int:
    groups = list(range(part.begin, part.end))
    return file.read_row_groups(groups, columns=[LINE]).column(0)[row].as_py()


def parts_of(
    files: Sequence[tuple[Path, Path, Path | None]], part_bytes: int, least: int = 1
) -> list[Part]:
    """Divides files into parts of whole row groups, in the order of their rows.

    Args:
        files: the file, the user's file, and the folder below which folder names encode columns;
            None for no such columns.
        part_bytes: approximate maximum size of a part on disk.
        least: minimum number of parts, if there are as many row groups.

    Raises:
        ValueError: a file is not Parquet, or damaged; the message names it.
    """
    opened = [_open(path, source).metadata for path, source, _ in files]
    total = sum(_size(file, group) for file in opened for group in range(file.num_row_groups))
    part_bytes = max(min(part_bytes, -(-total // max(least, 1))), 1)
    parts: list[Part] = []
    first_row = 0
    for number, ((path, source, root), file) in enumerate(zip(files, opened, strict=True)):
        partition = partition_of(source, root)
        begin, size, rows, of_file = 0, 0, 0, 0
        for group in range(file.num_row_groups):
            size += _size(file, group)
            rows += file.row_group(group).num_rows
            if size >= part_bytes or group + 1 == file.num_row_groups:
                place = (number, begin, group + 1, first_row, of_file, rows, size)
                staged = path.resolve() != source.resolve()
                parts.append(Part(str(path), str(source), *place, partition, staged))
                first_row, of_file = first_row + rows, of_file + rows
                begin, size, rows = group + 1, 0, 0
    return parts


def _size(file: pq.FileMetaData, group: int) -> int:
    facts = file.row_group(group)
    return sum(facts.column(i).total_compressed_size for i in range(facts.num_columns))


def schema_of(path: Path) -> pa.Schema:
    """Returns the columns of a Parquet file.

    Raises:
        ValueError: the file is not Parquet; the message names it.
    """
    return _open(path, path).schema_arrow


def read_part(part: Part, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a part, some at a time, with columns of text as indices of values.

    Args:
        part: the part to read.
        columns: names of the columns to read; missing ones are left out.

    Raises:
        ValueError: the file is damaged, or has two columns of one name; the message has file and
            row group.
    """
    file = _open(part.path, part.source)
    names = file.schema_arrow.names
    if twice := [name for name in columns if names.count(name) > 1]:
        raise ValueError(f"{part.source}: two columns are called {twice[0]!r}")
    text = [path for field in file.schema_arrow for path in _text_paths(file, field)]
    added = {name: value for name, value in part.partition.items() if name in columns}
    wanted = [name for name in columns if name in names and name not in added]
    file = _open(part.path, part.source, text)
    for group in range(part.begin, part.end):
        rows = file.metadata.row_group(group).num_rows
        try:
            if not wanted:
                batches = iter([_empty(rows)] if rows else [])
            else:
                size = max(BATCH_VALUES * rows // max(_values(file, group, wanted), 1), 1)
                batches = file.iter_batches(size, [group], wanted, use_threads=False)
            for batch in batches:
                yield _with_constants(batch, added)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            problem = "damaged"
            if "lists to be of size" in str(error):
                problem = "null lists of a fixed size, which pyarrow reads in memory alone"
            raise ValueError(
                f"{part.source}: row group {group}: {problem} ({_first_line(error)})"
            ) from None


def _text_paths(file: pq.ParquetFile, field: pa.Field) -> list[str]:
    """Returns Parquet's paths of a column's text, or of the text in its lists."""
    if is_text(field.type):
        return [field.name]
    if not is_list(field.type) or not is_text(field.type.value_type):
        return []
    paths = (file.metadata.schema.column(i).path for i in range(file.metadata.num_columns))
    return [path for path in paths if path.startswith(f"{field.name}.")]


def _values(file: pq.ParquetFile, group: int, columns: Sequence[str]) -> int:
    """Returns the number of values of columns in a row group, including those of lists."""
    facts, found = file.metadata.row_group(group), 0
    for i in range(facts.num_columns):
        path = facts.column(i).path_in_schema
        if path in columns or any(path.startswith(f"{name}.") for name in columns):
            found += facts.column(i).num_values
    return found


def _empty(rows: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))


def _with_constants(batch: pa.RecordBatch, values: dict[str, str | None]) -> pa.RecordBatch:
    for name, value in values.items():
        batch = batch.append_column(name, pa.array([value] * batch.num_rows, pa.string()))
    return batch


def _open(path: str | Path, source: str | Path, dictionaries: Sequence[str] = ()) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, read_dictionary=list(dictionaries), memory_map=True)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"{source}: no Parquet file, or damaged ({_first_line(error)})") from None


def _first_line(error: Any) -> str:
    return str(error).partition("\n")[0][:200]


def partition_of(path: Path, root: Path | None) -> dict[str, str | None]:
    """Returns the columns that folder names between a root and a file encode."""
    found: dict[str, str | None] = {}
    for folder in () if root is None else path.relative_to(root).parts[:-1]:
        name, mark, value = folder.partition("=")
        if mark and name:
            found[name] = None if value == _NO_PARTITION else unquote(value)
    return found
