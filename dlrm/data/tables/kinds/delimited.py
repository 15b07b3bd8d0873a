"""Files of CSV."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from dlrm.data.sources.csv_rows import (
    Chunk,
    Reading,
    check_names,
    delimiter_hint,
    read_csv,
)
from dlrm.data.sources.text_files import without_mark
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.kinds.cells import Cell, Cells
from dlrm.data.tables.kinds.text import Rows, Text


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
        """Returns the columns; none of an empty file."""
        chunks = read_csv(path, Reading(text, columns=(), problems={}))
        return next((chunk.names for chunk in chunks), [])

    def read(self, path: Path, reading: Reading) -> Iterator[Rows]:
        """Yields the rows of a file; see `Text.read`."""
        try:
            yield from map(_rows_of, read_csv(path, reading))
        except ValueError as error:
            if hint := delimiter_hint(path, reading.text):
                raise ValueError(f"{error}{hint}") from error
            raise

    def array(
        self,
        name: str,
        column: pa.Array | list[Cell],
        cells: Cells,
        text: TextFormat,
        numbers: set[str],
    ) -> pa.Array:
        """Returns the cells of a column; see `Text.array`."""
        numbers.discard(name)
        return cells.array(name, column, text)

    def check_names(
        self, path: Path, names: Sequence[str], text: TextFormat, wanted: Sequence[str]
    ) -> None:
        """Raises ValueError if a file lacks columns or has one twice; see `Text.check_names`."""
        check_names(path, names, text, wanted)


def _rows_of(chunk: Chunk) -> Rows:
    pairs = zip(chunk.names, chunk.columns, strict=True)
    return chunk.names, chunk.lines, [(name, cells) for name, cells in pairs if cells is not None]
