"""Files of Parquet, ORC and Arrow, whose rows are in groups that are read on their own."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dlrm.data.sources.csv_rows import Spans
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.formats.base import FileFormat, Locate, TableFile
from dlrm.data.tables.formats.cells import Cells
from dlrm.data.transform.arrow_types import (
    is_list,
    is_text,
    plain_array,
    plain_field,
    text_as_bytes,
)

BATCH_VALUES = 1 << 20  # read at a time, of all columns: 15 MB as Arrow and as fields
_NO_TEXT = re.compile(rb"[\0-\x08\x0e-\x1f]")
_STREAM = b"\xff\xff\xff\xff"  # before each message of Arrow


@contextmanager
def arrow_errors(problem: str) -> Iterator[None]:
    """Raises errors of Arrow as ValueError with a problem, whose message names the file."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        if "lists to be of size" in str(error):
            problem = problem.replace(
                "damaged", "null lists of a fixed size, which pyarrow reads in memory alone"
            )
        raise ValueError(f"{problem} ({first_line(error)})") from None


def first_line(error: BaseException) -> str:
    """Returns the beginning of an error of Arrow, which may have a traceback of its own."""
    return str(error).partition("\n")[0][:200]


class Groups:
    """An open file, whose name for messages is `source`."""

    schema: pa.Schema
    num_groups: int
    size: int  # bytes of the file
    format: "Columnar"
    source: str

    def rows(self, number: int) -> int:
        """Returns the number of rows of a group."""
        raise NotImplementedError

    def byte_range(self, number: int) -> tuple[int, int]:
        """Returns the bytes of a group, its begin and end; the bytes of all have every value.

        Where pyarrow does not tell them they are a share of the file, as here.
        """
        return self.size * number // self.num_groups, self.size * (number + 1) // self.num_groups

    def batches(self, number: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yields rows of a group with one or more columns, about `BATCH_VALUES` at a time."""
        raise NotImplementedError

    def where(self, number: int, row: int, done: int = 0) -> str:
        """Returns the location of a row of a group, after `done` others."""
        return f"{self.source}, {self.format.group} {number}, row {done + row}"

    def count(self, number: int) -> int:
        """Returns the number of rows of a group, or raises ValueError with its name."""
        with arrow_errors(f"{self.source}: {self.format.group} {number}: damaged"):
            return self.rows(number)

    def read(
        self, number: int, columns: Sequence[str], partition: Mapping[str, str | None]
    ) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a group, some at a time, with columns of text as Arrow has them.

        Args:
            columns: names of the columns to read; missing ones are left out.
            partition: columns with one value, which take precedence over those of the file.

        Raises:
            ValueError: the group is damaged, or the file has two columns of one name.
        """
        names = self.schema.names
        if twice := [name for name in columns if names.count(name) > 1]:
            raise ValueError(f"{self.source}: two columns are called {twice[0]!r}")
        added = {name: value for name, value in partition.items() if name in columns}
        wanted = [name for name in columns if name in names and name not in added]
        with arrow_errors(f"{self.source}: {self.format.group} {number}: damaged"):
            for batch in self.batches(number, wanted) if wanted else _empty(self.rows(number)):
                for name, value in added.items():
                    constant = pa.array([value] * batch.num_rows, pa.string())
                    batch = batch.append_column(name, constant)
                yield batch


class Columnar(FileFormat):
    """A format of files with columns in groups of rows."""

    magic: bytes  # begins its files
    group: str  # in messages

    def begins(self, start: bytes) -> bool:
        return start.startswith(self.magic)

    def groups_of(self, path: str | Path) -> Groups:
        """Opens a file; the caller names it in errors of Arrow."""
        raise NotImplementedError

    def open(self, path: str | Path, source: str | Path) -> Groups:
        """Opens a file; `source` names it in messages.

        Raises:
            ValueError: the file is of another format, or damaged.
        """
        with arrow_errors(f"{source}: no {self.title} file, or damaged"):
            opened = self.groups_of(path)
        opened.format, opened.source = self, str(source)
        return opened

    def names(self, path: Path, text: TextFormat) -> list[str]:
        return list(self.open(path, path).schema.names)

    def batches(
        self,
        file: TableFile,
        text: TextFormat,
        columns: Sequence[str],
        cells: Cells | None = None,
        spans: Spans | None = None,
        seen: set[str] | None = None,
    ) -> Iterator[tuple[pa.RecordBatch, Locate]]:
        opened, partition = self.open(file.path, file.path), file.partition
        if seen is not None:
            seen |= {*opened.schema.names, *partition}
        for number in range(opened.num_groups):
            done = 0
            for batch in opened.read(number, columns, partition):
                yield batch, partial(opened.where, number, done=done)
                done += batch.num_rows


def _empty(rows: int) -> list[pa.RecordBatch]:
    """Returns rows of no columns."""
    structs = pa.array([{}] * rows, pa.struct([]))
    return [pa.RecordBatch.from_struct_array(structs)] if rows else []


def _rows_at_once(rows: int, values: int) -> int:
    return max(BATCH_VALUES * rows // max(values, 1), 1)


def _slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yields a group's rows, about `BATCH_VALUES` values at a time."""
    values = sum(
        len(column.flatten()) if is_list(column.type) else len(column) for column in batch.columns
    )
    size = _rows_at_once(batch.num_rows, values)
    return (batch.slice(begin, size) for begin in range(0, batch.num_rows, size))


class Parquet(Columnar):
    """Parquet, of which text is read as indices of values."""

    name, title, group, magic = "parquet", "Parquet", "row group", b"PAR1"
    suffixes = (".parquet", ".pq", ".parq")

    def groups_of(self, path: str | Path) -> Groups:
        return _RowGroups(path)


class _RowGroups(Groups):
    def __init__(self, path: str | Path) -> None:
        self._path, file = path, pq.ParquetFile(path, memory_map=True)
        self.schema, self._metadata = file.schema_arrow, file.metadata
        self.num_groups = self._metadata.num_row_groups

    def rows(self, number: int) -> int:
        return self._metadata.row_group(number).num_rows

    def byte_range(self, number: int) -> tuple[int, int]:
        offsets = []
        for chunk in self._chunks(number):
            begin = chunk.data_page_offset
            if chunk.has_dictionary_page:
                begin = min(begin, chunk.dictionary_page_offset)
            offsets += [begin, begin + chunk.total_compressed_size]
        return min(offsets, default=0), max(offsets, default=0)

    def batches(self, number: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        below, values = tuple(f"{name}." for name in columns), 0  # including those of lists
        for chunk in self._chunks(number):
            if (path := chunk.path_in_schema) in columns or path.startswith(below):
                values += chunk.num_values
        size = _rows_at_once(self.rows(number), values)
        yield from self._with_indices.iter_batches(size, [number], columns, use_threads=False)

    def _chunks(self, number: int) -> Iterator[Any]:
        group = self._metadata.row_group(number)
        return map(group.column, range(group.num_columns))

    @cached_property
    def _with_indices(self) -> pq.ParquetFile:
        """The file with columns of text, or lists of it, as indices of values."""
        columns = self._metadata.schema
        paths = [columns.column(i).path for i in range(self._metadata.num_columns)]
        text = [field.name for field in self.schema if is_text(field.type)]
        for field in self.schema:
            if is_list(field.type) and is_text(field.type.value_type):
                text += [path for path in paths if path.startswith(f"{field.name}.")]
        return pq.ParquetFile(
            self._path, metadata=self._metadata, read_dictionary=text, memory_map=True
        )


class Orc(Columnar):
    """ORC, as Hive, Trino and Spark write it, of which a stripe is read at a time."""

    name, title, group, magic = "orc", "ORC", "stripe", b"ORC"
    suffixes = (".orc",)

    def begins(self, start: bytes) -> bool:
        """Returns whether a file begins as ORC, and not as text with these letters."""
        return super().begins(start) and _NO_TEXT.search(start) is not None

    def groups_of(self, path: str | Path) -> Groups:
        try:
            from pyarrow.orc import ORCFile
        except ImportError as error:  # some builds of pyarrow leave it out
            raise ValueError(f"{path}: expected a pyarrow with ORC, got none ({error})") from error
        return _Stripes(ORCFile(str(path)))


class _Stripes(Groups):
    def __init__(self, file: Any) -> None:
        self._file, self.schema, self.num_groups = file, file.schema, file.nstripes
        self.size = file.file_length

    def rows(self, number: int) -> int:
        # pyarrow does not tell it. Times may be beyond those of Arrow.
        of_time = [pa.types.is_temporal(dtype) for dtype in self.schema.types]
        column = of_time.index(min(of_time))
        return self._file.read_stripe(number, [column]).num_rows

    def batches(self, number: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        stripe = self._file.read_stripe(number, list(columns))
        arrays = [a.dictionary_encode() if is_text(a.type) else a for a in stripe.columns]
        yield from _slices(pa.RecordBatch.from_arrays(arrays, stripe.schema.names))


class ArrowIpc(Columnar):
    """Files and streams of Arrow, as Polars and pandas write them, which are mapped into memory."""

    name, title, group, magic = "arrow", "Arrow", "record batch", b"ARROW1"
    suffixes = (".arrow", ".feather", ".ipc", ".arrows")

    def begins(self, start: bytes) -> bool:
        """Returns whether a file begins as a file or a stream."""
        return start.startswith((self.magic, _STREAM))

    def groups_of(self, path: str | Path) -> Groups:
        mapped = pa.memory_map(str(path))
        if not mapped.size():
            raise pa.ArrowInvalid("0 bytes")
        is_file = mapped.size() > 10 and mapped.read_at(len(self.magic), 0) == self.magic
        return _File(mapped) if is_file else _Stream(mapped)


class _Batches(Groups):
    def __init__(self, mapped: pa.MemoryMappedFile, schema: pa.Schema) -> None:
        self._mapped, self.schema, self.size = mapped, schema, mapped.size()

    def batches(self, number: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        batch = self._batch(number, [self.schema.get_field_index(name) for name in columns])
        for array in batch.columns:  # whose offsets and indices nothing has checked yet
            array.view(text_as_bytes(array.type)).validate(full=True)
        schema = pa.schema([plain_field(field) for field in batch.schema])
        for part in _slices(batch):
            arrays = map(plain_array, part.columns, schema.types)
            yield pa.RecordBatch.from_arrays(list(arrays), schema=schema)

    def rows(self, number: int) -> int:
        return self._batch(number, [0]).num_rows

    def _batch(self, number: int, columns: list[int]) -> pa.RecordBatch:
        raise NotImplementedError


class _File(_Batches):
    def __init__(self, mapped: pa.MemoryMappedFile) -> None:
        reader = pa.ipc.open_file(mapped)
        super().__init__(mapped, reader.schema)
        self.num_groups = reader.num_record_batches
        self._open: tuple[list[int], pa.RecordBatchFileReader] | None = None

    def _batch(self, number: int, columns: list[int]) -> pa.RecordBatch:
        if self._open is None or self._open[0] != columns:
            options = pa.ipc.IpcReadOptions(included_fields=columns)
            self._open = columns, pa.ipc.open_file(self._mapped, options=options)
        return self._open[1].get_batch(number)


class _Stream(_Batches):
    """A stream, whose messages are found by reading it once.

    A record batch is read from a stream of its own, with the dictionaries before it.
    """

    def __init__(self, mapped: pa.MemoryMappedFile) -> None:
        super().__init__(mapped, pa.ipc.open_stream(mapped).schema)
        heads: list[tuple[int, int]] = []  # bytes of the schema and of dictionaries
        self._messages: list[list[tuple[int, int]]] = []  # what is read for each record batch
        mapped.seek(0)
        last = 0
        for message in pa.ipc.MessageReader.open_stream(mapped):
            span = (last, last := mapped.tell())
            if message.type == "record batch":
                self._messages.append([*heads, span])
            else:
                heads.append(span)
        self.num_groups = len(self._messages)
        if mapped.tell() == last:
            raise pa.ArrowInvalid("the stream has no end; its writer was not closed")
        if mapped.tell() < mapped.size():
            raise pa.ArrowInvalid(f"{mapped.size() - mapped.tell()} bytes after the stream's end")

    def _batch(self, number: int, columns: list[int]) -> pa.RecordBatch:
        ranges = self._messages[number]
        stream = b"".join(self._mapped.read_at(end - begin, begin) for begin, end in ranges)
        options = pa.ipc.IpcReadOptions(included_fields=columns)
        return pa.ipc.open_stream(stream, options=options).read_next_batch()
