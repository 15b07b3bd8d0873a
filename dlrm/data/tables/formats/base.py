"""The base of all formats of table files, and a file of a table."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import pyarrow as pa

from dlrm.data.sources.csv_rows import Spans
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.formats.cells import Cells

Locate = Callable[[int], str]
_NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"


class FileFormat:
    """A format of files, of `Columnar` or of `Text`: their names, and how their rows are read."""

    name: str  # in flags
    title: str  # in messages
    suffixes: tuple[str, ...] = ()  # of files, in lower case, the most usual one first
    delimited = False  # rows are lines of cells, with names in the first line if anywhere
    may_lack_columns = False  # a row may leave out a value that it does not have

    def __str__(self) -> str:
        return self.name

    def begins(self, start: bytes) -> bool:
        """Returns whether the first bytes of a file are those of this format."""
        raise NotImplementedError

    def names(self, path: Path, text: TextFormat) -> list[str]:
        """Returns the columns of a file, of JSON those of its first rows; none if it is empty."""
        raise NotImplementedError

    def batches(
        self,
        file: "TableFile",
        text: TextFormat,
        columns: Sequence[str],
        cells: Cells | None = None,
        spans: Spans | None = None,
        seen: set[str] | None = None,
    ) -> Iterator[tuple[pa.RecordBatch, Locate]]:
        """Yields the rows of a file some at a time, and a function that locates a row of them.

        Args:
            columns: names of the columns to read; missing ones are left out, and those that rows
                may lack are missing values.
            cells: the columns of lists and of numbers in text; None for none.
            spans: counts rows of several lines; see `read_csv`.
            seen: receives the names of the columns that the file has.

        Raises:
            ValueError: the file is damaged, or two columns have one name.
        """
        raise NotImplementedError


class TableFile(NamedTuple):
    """A file of rows, or a table in memory.

    Attributes:
        path: the file; of a table in memory, its name for messages.
        format: one of `dlrm.data.tables.files.FORMATS`, or `FRAME`.
        root: the folder below which folder names encode columns, which is above the folder that was
            named if that encodes one; None for no such columns.
        frame: the table in memory; see `dlrm.data.tables.frames`.
    """

    path: Path
    format: FileFormat
    root: Path | None = None
    frame: Any = None

    @property
    def partition(self) -> dict[str, str | None]:
        """Returns the columns that the names of folders encode, such as `day=2026-11-20`."""
        values: dict[str, str | None] = {}
        for folder in () if self.root is None else self.path.relative_to(self.root).parts[:-1]:
            name, mark, value = folder.partition("=")
            if mark and name:
                values[name] = None if value == _NO_PARTITION else unquote(value)
        return values

    def columns(self, text: TextFormat) -> list[str]:
        """Returns the columns; of JSON lines, those of the first 1,000 rows.

        An empty file has none.

        Raises:
            ValueError: the file is damaged; the message names it.
        """
        names = self.format.names(self.path, text)
        return names + [name for name in self.partition if names and name not in names]
