"""Interface of a source of rows: counted once, then divided among the splits."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from dlrm.data.sources.columns import Parsed
from dlrm.data.transform.dictionaries import Counts


class Rejected(NamedTuple):
    """A line that was left out: its index in the split, the reason, and its text."""

    line: int
    reason: str
    text: str


class Columns(Protocol):
    """Rows that were read: labels, and one column per field."""

    @property
    def labels(self) -> Any:
        """Labels, bool `[rows]`."""

    @property
    def numerical(self) -> list[Parsed]:
        """Numbers, one column per field."""

    @property
    def categorical(self) -> Any:
        """Keys, `Parsed` or `Coded`, or a `ListValues` of these, one column per field."""

    @property
    def extra(self) -> dict[str, np.ndarray]:
        """Columns of a dataset besides the model's inputs, by name."""


class Target(NamedTuple):
    """A split of the dataset, and its rows.

    Attributes:
        name: name of the split: "train", "test", ...; or "" if it is the whole output.
        first_row, last_row: for a log, the rows [first_row, last_row) of all days; otherwise 0 and
            the number of rows.
        shuffled: whether the rows come in random order.
        labelled: whether the rows have labels.
        num_ids: number of ids of the rows, for each list field.
    """

    name: str
    first_row: int
    last_row: int
    shuffled: bool = False
    labelled: bool = True
    num_ids: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Returns the number of rows."""
        return self.last_row - self.first_row

    @property
    def folder(self) -> str:
        """Returns the prefix of the names of its split-binary files."""
        return f"{self.name}/" if self.name else ""

    @property
    def binary_file(self) -> str:
        """Returns the name of its file in NVIDIA's binary format."""
        name = "val" if self.name == "validation" else self.name
        return f"{name}_data.bin" if name else "data.bin"


class Source(Protocol):
    """Reads rows in parts; the result does not depend on the division into parts."""

    def count(
        self, part: Any, rejected: list[Rejected] | None
    ) -> tuple[dict[str, Any], list[Counts] | None]:
        """Reads a part once.

        Args:
            part: part to read.
            rejected: receives unreadable rows, which are left out; None raises the first.

        Returns:
            Facts as JSON, including `rows`, and the counts of the values of each counted column;
            None if the part is not counted for dictionaries.
        """

    def divide(
        self, part: Any, targets: Sequence[Target], quarantine: bool
    ) -> Iterator[tuple[Target, np.ndarray, Columns]]:
        """Yields the rows of a part some at a time, with their target and indices among all."""

    def where(self, part: Any, number: int) -> str:
        """Returns the location of a row, given its index among all."""
