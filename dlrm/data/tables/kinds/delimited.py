"""Files of CSV."""

from collections.abc import Iterator
from pathlib import Path

from dlrm.data.sources.csv_rows import Reading, delimiter_hint, read_csv
from dlrm.data.sources.text_files import without_mark
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.kinds.cells import Cells
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

    def read(self, path: Path, reading: Reading, cells: Cells, numbers: set[str]) -> Iterator[Rows]:
        """Yields the rows of a file; see `Text.read`."""
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
