"""Interface of a source of rows, which only reads: stages count, divide and write what it reads."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from dlrm.data.schema.schema import Schema
from dlrm.data.sources.row_error import RowError
from dlrm.data.transform.rows import FieldRows


class Rejected(NamedTuple):
    """A row that was left out: its index in the part, the reason, and its text."""

    line: int
    reason: str
    text: str


class Read(NamedTuple):
    """Some rows of a part.

    Attributes:
        rows: their fields.
        numbers: their numbers among all rows, int64 `[rows]`.
        batch: the rows as they were read; None for logs.
        bad: the first bad value of each bad row, by its index; the fields of these rows have no
            meaning.
    """

    rows: FieldRows
    numbers: np.ndarray
    batch: Any = None
    bad: tuple[RowError, ...] = ()

    @property
    def labels(self) -> np.ndarray:
        """Labels, bool `[rows]`; of rows without labels all are False."""
        assert self.rows.labels is not None
        return self.rows.labels

    def texts_of(self, column: str) -> tuple[Sequence[str], np.ndarray]:
        """Returns a column's distinct values as text, and the index of each row's, or -1."""
        from dlrm.data.transform.arrays import column_of, texts_of  # imports Arrow, unlike logs

        return texts_of(column, column_of(self.batch, column))

    def text(self, row: int) -> str:
        """Returns a row as text, for lists of rows that were left out."""
        import pyarrow as pa

        from dlrm.data.tables.formats.text import PROBLEM
        from dlrm.data.transform.arrays import column_of, texts_of

        values = []
        for name, column in zip(self.batch.schema.names, self.batch.columns, strict=True):
            if name == PROBLEM:
                if column[row].is_valid:
                    return column[row].as_py().partition("\t")[2]
            elif pa.types.is_nested(column.type):
                values.append(f"{name}={column[row].as_py()}")
            else:
                texts, codes = texts_of(name, column_of(self.batch, name).slice(row, 1))
                values.append(f"{name}={texts[codes[0]] if codes[0] >= 0 else None}")
        return "\t".join(values).replace("\n", "\\n")

    def take(self, rows: np.ndarray) -> "Read":
        """Returns the rows selected by indices."""
        if len(rows) == len(self.numbers):
            return self
        batch = None if self.batch is None else self.batch.take(rows)
        return Read(self.rows.take(rows), self.numbers[rows], batch)


class Part(Protocol):
    """Some rows of a file that one task reads."""

    @property
    def file(self) -> int:
        """Number of the file."""

    @property
    def source(self) -> str:
        """The user's file."""

    @property
    def first_row(self) -> int:
        """Number of rows before the part's first."""

    @property
    def rows(self) -> int:
        """Number of rows, once they are known."""

    @property
    def size(self) -> int:
        """Bytes to read."""

    def ranges(self) -> list[Any]:
        """Returns the bytes that reading needs: file, begin and end, and of text whether to the end
        of a line.
        """

    def file_of(self, row: int) -> int:
        """Returns the number of the file of a row, given its index in the part."""

    def source_of(self, row: int) -> str:
        """Returns the user's file of a row, given its index in the part."""

    def where(self, row: int) -> str:
        """Returns the location of a row, given its index in the part."""


class Source(Protocol):
    """Reads rows in parts; the rows do not depend on the division into parts."""

    @property
    def schema(self) -> Schema:
        """The meaning of the columns."""

    def read(
        self, part: Any, rejected: list[Rejected] | None, facts: dict[str, Any] | None = None
    ) -> Iterator[Read]:
        """Yields the rows of a part, some at a time.

        Args:
            part: part to read.
            rejected: receives rows that are no rows at all, which are left out; None raises the
                first.
            facts: receives, at the end of the first reading, facts about the part as JSON: `crc`,
                by which later readings notice a change, and the `types` of values of each
                categorical field.
        """


class Target(NamedTuple):
    """A part of a dataset: a split, or rows without labels.

    Attributes:
        name: name of its directory; "" writes into the directory of the dataset itself.
        rows: number of rows.
        split: index that a splitter returns for its rows.
        shuffled: whether the rows come in random order.
        labeled: whether the rows have labels.
        num_ids: number of ids of the rows, for each list field.
    """

    name: str
    rows: int
    split: int = 0
    shuffled: bool = False
    labeled: bool = True
    num_ids: tuple[int, ...] = ()

    @property
    def folder(self) -> str:
        """Returns the prefix of the names of its split-binary files."""
        return f"{self.name}/" if self.name else ""

    @property
    def binary_file(self) -> str:
        """Returns the name of its file in NVIDIA's binary format."""
        name = "val" if self.name == "validation" else self.name
        return f"{name}_data.bin" if name else "data.bin"
