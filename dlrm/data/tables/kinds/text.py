"""Files of text as Arrow batches, for scoring and drafts, and as Parquet, for tasks."""

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dlrm.data.sources.csv_rows import Spans
from dlrm.data.sources.text_files import ByteRange
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.kinds.cells import Cell, Cells
from dlrm.data.tables.kinds.kind import Kind, Locate, TableFile
from dlrm.files import staged_file

LINE = " line"  # column of a staged text file: the line of the row, of `line_type`
PROBLEM = " problem"  # another one: the problem of a row as a whole, a tab, and the row
NUMBERS = {b"kind": b"number"}  # metadata of a column of text that was numbers
_STAGED_ROWS = 1 << 16  # of a row group
Column = tuple[str, pa.Array | list[Cell]]  # name and cells


class Reading(NamedTuple):
    """Columns to read of a file of text, and what is noted meanwhile.

    Attributes:
        text: format of the file.
        lists: the columns of lists, where cells can be lists; None allows lists anywhere.
        columns: the columns to read; None is all. Missing ones are left out.
        problems: receives the problem of a row as a whole, by line, with a tab and the row, whose
            cells are then empty; None raises the first.
        spans: counts lines, and rows of several lines.
        nested: receives columns that are neither values nor lists; see `JsonLines`.
        distinct: the columns that may be indices of distinct texts.
        within: the lines to read; None is all.
        numbers: the columns that may be float64, from which those with other texts than usual
            numbers are removed.
    """

    text: TextFormat
    lists: Collection[str] | None = None
    columns: Sequence[str] | None = None
    problems: dict[int, str] | None = None
    spans: Spans | None = None
    nested: dict[str, str] | None = None
    distinct: Collection[str] = ()
    within: ByteRange | None = None
    numbers: set[str] = set()  # of none, which nothing is removed from


class Text(Kind):
    """A kind of text files, plain or compressed, in the form that a `TextFormat` describes.

    Attributes:
        line_type: type of the lines of rows: numbers, or texts that name the files as well.
        in_pieces: whether files can be copied in pieces; see `dlrm.data.tables.pieces`.
    """

    line_type: pa.DataType = pa.int64()
    in_pieces = True

    def read(
        self, path: Path, reading: Reading
    ) -> Iterator[tuple[list[str], np.ndarray, list[Column]]]:
        """Yields names, lines and the cells of columns of a file, some rows at a time.

        Raises:
            ValueError: the file is damaged; the message has file and line.
        """
        raise NotImplementedError

    def read_together(
        self, paths: Sequence[Path], reading: Reading
    ) -> tuple[list[str], np.ndarray, list[Column], list[int]] | None:
        """Returns names, lines and columns of small files in UTF-8, and the rows of each file.

        None if they have to be read one by one, as when one of them is bad.
        """
        return None

    def array(
        self,
        name: str,
        column: pa.Array | list[Cell],
        cells: Cells,
        text: TextFormat,
        numbers: set[str],
    ) -> pa.Array:
        """Returns the cells of a column.

        Args:
            name: the column.
            column: its cells, from `read`.
            cells: the columns of lists and of numbers.
            text: the format of the file.
            numbers: the column is removed from it if it has other values than numbers of JSON.
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

    def stage(
        self,
        file: TableFile,
        target: str,
        text: TextFormat,
        columns: Sequence[str],
        quarantine: bool = False,
        cells: Cells | None = None,
    ) -> dict[str, Any]:
        """Copies the columns of a file into a Parquet file, which appears once it is complete.

        Every cell stays text, and a list becomes a list of texts. A column `LINE` has the lines,
        and a column `PROBLEM` the problem of a row as a whole.

        Args:
            file: the file.
            target: the Parquet file.
            text: its format.
            columns: the columns to copy.
            quarantine: whether to accept bad rows.
            cells: the columns of lists and of numbers; None for none.

        Returns:
            The number of `rows`, the `names` of the file's columns, those of `numbers` in JSON, and
            a `note` about rows of several lines, or None.

        Raises:
            ValueError: the text is damaged, or a column is missing; the message has file and line.
        """
        rows, spans, cells = 0, Spans(), cells or Cells()
        problems: dict[int, str] | None = {} if quarantine else None
        file_names: dict[str, None] = {}
        numbers = set(columns)
        notes = [(LINE, self.line_type), (PROBLEM, pa.string())]
        schema = pa.schema([*((name, cells.type_of(name)) for name in columns), *notes])
        options: dict[str, Any] = {"compression": "none", "write_statistics": False}
        with (
            staged_file(Path(target)) as partial_file,
            pq.ParquetWriter(partial_file, schema, **options) as writer,
        ):
            reading = Reading(text, cells.separators, columns, problems, spans)
            parts = self.read(file.path, reading)
            for names, lines, read in parts:
                file_names |= dict.fromkeys(names)
                self.check_names(file.path, names, text, columns)
                if not len(lines):
                    continue
                by_name = {name: self.array(name, c, cells, text, numbers) for name, c in read}
                arrays = [
                    by_name[name] if name in by_name else pa.nulls(len(lines), cells.type_of(name))
                    for name in columns
                ]
                wrong = [(problems or {}).get(line) for line in lines.tolist()]
                arrays += [pa.array(lines, self.line_type), pa.array(wrong, pa.string())]
                writer.write_table(pa.table(arrays, schema=schema), _STAGED_ROWS)
                rows += len(lines)
        of_json = [name for name in columns if name in numbers]
        note = spans.note(file.path, text)
        return {"rows": rows, "names": [*file_names], "numbers": of_json, "note": note}


def _constant(name: str, value: str | None, rows: int) -> tuple[pa.Field, pa.Array]:
    return pa.field(name, pa.string()), pa.array([value] * rows, pa.string())


def _line_of(path: Path, lines: np.ndarray, row: int) -> str:
    return f"{path}, line {lines[row]}"
