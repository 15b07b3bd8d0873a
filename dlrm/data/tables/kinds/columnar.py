"""Files of columns, whose rows are in groups that are read on their own."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from dlrm.data.sources.csv_rows import Spans
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.kinds.cells import Cells
from dlrm.data.tables.kinds.kind import Kind, Locate, TableFile
from dlrm.data.tables.kinds.types import is_list

BATCH_VALUES = 1 << 20  # read at a time, of all columns: 15 MB as Arrow and as fields


class Group(NamedTuple):
    """Rows that are stored together: their number, and their bytes [begin, end) in the file."""

    rows: int
    begin: int
    end: int


class Groups:
    """An open file.

    Attributes:
        schema: its columns.
        num_groups: the number of groups of rows.
    """

    schema: pa.Schema
    num_groups: int
    _groups: Sequence[Group]

    def group(self, number: int) -> Group:
        """Returns a group's size and place."""
        return self._groups[number]

    def batches(self, number: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yields a group's rows, about `BATCH_VALUES` values at a time.

        Args:
            number: the group.
            columns: one or more columns of the file, which has each name once.
        """
        raise NotImplementedError


class Columnar(Kind):
    """A kind of files with columns in groups of rows.

    Attributes:
        magic: the first bytes of its files.
        group: the name of a group in messages.
    """

    magic: bytes
    group: str

    def begins(self, start: bytes) -> bool:
        """Returns whether a file begins with `magic`."""
        return start.startswith(self.magic)

    def groups_of(self, path: str | Path) -> Groups:
        """Opens a file; the caller names it in errors of Arrow."""
        raise NotImplementedError

    def problem(self, error: Exception) -> str:
        """Returns the problem of a group that could not be read."""
        return "damaged"

    def open(self, path: str | Path, source: str | Path) -> Groups:
        """Opens a file.

        Args:
            path: the file.
            source: its name for messages.

        Raises:
            ValueError: the file is of another kind, or damaged; the message names it.
        """
        try:
            return self.groups_of(path)
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise ValueError(
                f"{source}: no {self.title} file, or damaged ({first_line(error)})"
            ) from None

    def names(self, path: Path, text: TextFormat) -> list[str]:
        """Returns the names of the columns; see `Kind.names`."""
        return list(self.open(path, path).schema.names)

    def read(
        self,
        opened: Groups,
        source: str | Path,
        number: int,
        columns: Sequence[str],
        partition: Mapping[str, str | None],
    ) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a group, some at a time, with columns of text as Arrow has them.

        Args:
            opened, source: the file, and its name for messages.
            number: the group.
            columns: names of the columns to read; missing ones are left out.
            partition: columns with one value, which take precedence over those of the file.

        Raises:
            ValueError: the group is damaged, or the file has two columns of one name; the message
                has file and group.
        """
        names = opened.schema.names
        if twice := [name for name in columns if names.count(name) > 1]:
            raise ValueError(f"{source}: two columns are called {twice[0]!r}")
        added = {name: value for name, value in partition.items() if name in columns}
        wanted = [name for name in columns if name in names and name not in added]
        try:
            batches = (
                opened.batches(number, wanted) if wanted else _empty(opened.group(number).rows)
            )
            for batch in batches:
                yield _with_constants(batch, added)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise ValueError(
                f"{source}: {self.group} {number}: {self.problem(error)} ({first_line(error)})"
            ) from None

    def batches(
        self,
        file: TableFile,
        text: TextFormat,
        columns: Sequence[str],
        cells: Cells | None = None,
        spans: Spans | None = None,
        seen: set[str] | None = None,
    ) -> Iterator[tuple[pa.RecordBatch, Locate]]:
        """Yields the rows of a file; see `Kind.batches`."""
        opened, partition = self.open(file.path, file.path), file.partition
        if seen is not None:
            seen |= {*opened.schema.names, *partition}
        for number in range(opened.num_groups):
            done = 0
            for batch in self.read(opened, file.path, number, columns, partition):
                yield batch, partial(self.where, file.path, number, done)
                done += batch.num_rows

    def where(self, source: str | Path, number: int, done: int, row: int) -> str:
        """Returns the location of a row after `done` others of a group."""
        return f"{source}, {self.group} {number}, row {done + row}"


def rows_at_once(rows: int, values: int) -> int:
    """Returns the number of a group's rows to read at a time, given the number of their values."""
    return max(BATCH_VALUES * rows // max(values, 1), 1)


def slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yields a group's rows, about `BATCH_VALUES` values at a time."""
    values = sum(
        len(column.flatten()) if is_list(column.type) else len(column) for column in batch.columns
    )
    size = rows_at_once(batch.num_rows, values)
    for begin in range(0, batch.num_rows, size):
        yield batch.slice(begin, size)


def _empty(rows: int) -> Iterator[pa.RecordBatch]:
    if rows:
        yield pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))


def _with_constants(batch: pa.RecordBatch, values: Mapping[str, str | None]) -> pa.RecordBatch:
    for name, value in values.items():
        batch = batch.append_column(name, pa.array([value] * batch.num_rows, pa.string()))
    return batch


def first_line(error: BaseException) -> str:
    """Returns the beginning of an error of Arrow, which may have a traceback of its own."""
    return str(error).partition("\n")[0][:200]
