"""Files of text as rows, for tasks and drafts, and as Arrow batches, for scoring."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from dlrm.data.sources.csv_rows import Reading, Spans
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.kinds.cells import Cell, Cells
from dlrm.data.tables.kinds.kind import Kind, Locate, TableFile

LINE = " line"  # column of a copy of text: the line of the row
PROBLEM = " problem"  # another one: the problem of a row as a whole, a tab, and the row
NUMBERS = {b"kind": b"number"}  # metadata of a column of text that was numbers
Column = tuple[str, pa.Array | list[Cell]]  # name and cells
Rows = tuple[list[str], np.ndarray, list[Column]]  # names and lines, and cells of columns


class Text(Kind):
    """A kind of text files, plain or compressed, in the form that a `TextFormat` describes."""

    def read(self, path: Path, reading: Reading) -> Iterator[Rows]:
        """Yields the rows of a file, some at a time.

        Raises:
            ValueError: the file is damaged; the message has file and line.
        """
        raise NotImplementedError

    def array(
        self,
        name: str,
        column: pa.Array | list[Cell],
        cells: Cells,
        text: TextFormat,
        numbers: set[str],
    ) -> pa.Array:
        """Returns the cells of a column, from `read`.

        Its name is removed from `numbers` if it has other values than numbers of JSON.
        """
        raise NotImplementedError

    def check_names(
        self, path: Path, names: Sequence[str], text: TextFormat, wanted: Sequence[str]
    ) -> None:
        """Raises ValueError if a file lacks columns that all rows must have, or has one twice."""

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
        cells = cells or Cells()
        partition = {name: value for name, value in file.partition.items() if name in columns}
        in_file = [name for name in columns if name not in partition]
        reading = Reading(text, cells.separators, in_file, spans=spans)
        for names, lines, read in self.read(file.path, reading):
            if twice := [name for name in in_file if names.count(name) > 1]:
                raise ValueError(f"{file.path}: two columns are called {twice[0]!r}")
            if seen is not None:
                seen |= {*names, *partition}
            made = [self._with_field(*column, cells, text) for column in read]
            if self.may_lack_columns:
                there = {field.name for field, _ in made}
                made += [_constant(name, None, len(lines)) for name in in_file if name not in there]
            made += [_constant(name, value, len(lines)) for name, value in partition.items()]
            schema = pa.schema([field for field, _ in made])
            batch = pa.RecordBatch.from_arrays([array for _, array in made], schema=schema)
            yield batch, partial(_line_of, file.path, lines)

    def _with_field(
        self, name: str, column: pa.Array | list[Cell], cells: Cells, text: TextFormat
    ) -> tuple[pa.Field, pa.Array]:
        """Returns a column and its field, which says whether text was numbers in JSON."""
        numbers = {name}
        array = self.array(name, column, cells, text, numbers)
        return pa.field(name, array.type, metadata=NUMBERS if numbers else None), array


def _constant(name: str, value: str | None, rows: int) -> tuple[pa.Field, pa.Array]:
    return pa.field(name, pa.string()), pa.array([value] * rows, pa.string())


def _line_of(path: Path, lines: np.ndarray, row: int) -> str:
    return f"{path}, line {lines[row]}"
