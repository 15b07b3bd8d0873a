"""Files of CSV."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from dlrm.data.sources.csv_rows import (
    check_names,
    delimiter_hint,
    read_csv,
    read_together,
)
from dlrm.data.sources.text_files import without_mark
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.kinds.cells import Cell, Cells
from dlrm.data.tables.kinds.text import Column, Reading, Text


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
        return next((chunk.names for chunk in read_csv(path, text, {}, ())), [])

    def read(
        self, path: Path, reading: Reading
    ) -> Iterator[tuple[list[str], np.ndarray, list[Column]]]:
        """Yields the rows of a file; see `Text.read`."""
        text, _, columns, problems, spans, _, distinct, within, numbers = reading
        try:
            rows = read_csv(path, text, problems, columns, spans, distinct, within, numbers)
            for names, lines, cells in rows:
                there = [(n, c) for n, c in zip(names, cells, strict=True) if c is not None]
                yield names, lines, there
        except ValueError as error:
            if hint := delimiter_hint(path, text):
                raise ValueError(f"{error}{hint}") from error
            raise

    def read_together(
        self, paths: Sequence[Path], reading: Reading
    ) -> tuple[list[str], np.ndarray, list[Column], list[int]] | None:
        """Returns the rows of small files; see `Text.read_together`."""
        columns, distinct, numbers = reading.columns or (), reading.distinct, reading.numbers
        if (read := read_together(paths, reading.text, columns, distinct, numbers)) is None:
            return None
        (names, lines, cells), rows = read
        there = [(n, c) for n, c in zip(names, cells, strict=True) if c is not None]
        return names, lines, there, rows

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
