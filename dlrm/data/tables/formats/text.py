"""Files of text, CSV among them: rows for tasks and drafts, and Arrow batches for scoring."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from dlrm.data.sources.csv_rows import Reading, Spans, check_names, delimiter_hint, read_csv
from dlrm.data.sources.text_files import without_mark
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.formats.base import FileFormat, Locate, TableFile
from dlrm.data.tables.formats.cells import Cells
from dlrm.data.transform.arrow_types import NUMBERS

LINE = " line"  # column of a copy of text: the line of the row
PROBLEM = " problem"  # another one: the problem of a row as a whole, a tab, and the row
Rows = tuple[list[str], np.ndarray, dict[str, pa.Array]]  # names, lines, and columns that are read


class Text(FileFormat):
    """A format of text files, plain or compressed, in the form that a `TextFormat` describes."""

    def read(self, path: Path, reading: Reading, cells: Cells, numbers: set[str]) -> Iterator[Rows]:
        """Yields the rows of a file, some at a time.

        Args:
            cells: the columns of lists and of numbers in text.
            numbers: names of columns, of which those are removed that have other values than
                numbers of JSON.

        Raises:
            ValueError: the file is damaged; the message has file and line.
        """
        raise NotImplementedError

    def check_names(
        self, path: Path, names: Sequence[str], text: TextFormat, wanted: Sequence[str]
    ) -> None:
        """Raises ValueError if a file lacks columns that all rows must have, or has one twice."""
        if not self.may_lack_columns:
            check_names(path, names, text, wanted)

    def batches(
        self,
        file: TableFile,
        text: TextFormat,
        columns: Sequence[str],
        cells: Cells | None = None,
        spans: Spans | None = None,
        seen: set[str] | None = None,
    ) -> Iterator[tuple[pa.RecordBatch, Locate]]:
        cells = cells or Cells()
        partition = {name: value for name, value in file.partition.items() if name in columns}
        in_file = [name for name in columns if name not in partition]
        reading, numbers = Reading(text, cells.separators, in_file, spans=spans), set(in_file)
        for names, lines, arrays in self.read(file.path, reading, cells, numbers):
            if twice := [name for name in in_file if names.count(name) > 1]:
                raise ValueError(f"{file.path}: two columns are called {twice[0]!r}")
            if seen is not None:
                seen |= {*names, *partition}
            absent = [name for name in in_file if name not in arrays and self.may_lack_columns]
            numbers -= partition.keys() | set(absent)
            texts = dict.fromkeys(absent) | partition
            made = arrays | {n: pa.array([v] * len(lines), pa.string()) for n, v in texts.items()}
            fields = [
                pa.field(name, array.type, metadata=NUMBERS if name in numbers else None)
                for name, array in made.items()
            ]
            batch = pa.RecordBatch.from_arrays([*made.values()], schema=pa.schema(fields))
            yield batch, partial(_line_of, file.path, lines)
            numbers |= set(in_file)  # of the next batch


def _line_of(path: Path, lines: np.ndarray, row: int) -> str:
    return f"{path}, line {lines[row]}"


class Csv(Text):
    """Lines of cells between delimiters."""

    name, title = "csv", "CSV"
    suffixes = (".csv", ".tsv", ".data", ".txt")
    delimited = True

    def begins(self, start: bytes) -> bool:
        """Returns whether a file is empty or begins with text other than that of JSON lines."""
        text = without_mark(start)
        return b"\0" not in start and (bool(text) or not start) and not text.startswith(b"{")

    def names(self, path: Path, text: TextFormat) -> list[str]:
        chunks = read_csv(path, Reading(text, columns=(), problems={}))
        return next((chunk.names for chunk in chunks), [])

    def read(self, path: Path, reading: Reading, cells: Cells, numbers: set[str]) -> Iterator[Rows]:
        text = reading.text
        try:
            for names, lines, columns in read_csv(path, reading):
                read = {n: c for n, c in zip(names, columns, strict=True) if c is not None}
                numbers.difference_update(read)
                yield names, lines, {n: cells.array(n, c, text) for n, c in read.items()}
        except ValueError as error:
            if hint := delimiter_hint(path, text):
                raise ValueError(f"{error}{hint}") from error
            raise
