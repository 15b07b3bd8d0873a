"""The source of rows as the tasks see it: counted once, then divided among the splits."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from dlrm.data.sources.columns import Parsed
from dlrm.data.transform.dictionaries import Counts


class Rejected(NamedTuple):
    """A line that was left out: its number in the split, from 0, why, and its text."""

    line: int
    reason: str
    text: str


class Columns(Protocol):
    """Rows that are read: labels, and a column a field."""

    @property
    def labels(self) -> Any:
        """Labels, bool `[rows]`."""

    @property
    def numerical(self) -> list[Parsed]:
        """Numbers, a column a field."""

    @property
    def categorical(self) -> Any:
        """Keys, `Parsed` or `Coded`, or a `ListValues` of these, a column a field."""

    @property
    def extra(self) -> dict[str, np.ndarray]:
        """Columns of a dataset beside the model's inputs, by name."""


class Target(NamedTuple):
    """A split of the dataset, and which rows it gets.

    Attributes:
        name: of the split: "train", "test", ...; or "" for one that is the whole output.
        first_row, last_row: of a log, the rows [first_row, last_row) of all days; else 0 and how
            many there are.
        shuffled: whether the rows come in random order.
        labelled: whether the rows have labels.
        num_ids: of each list field, how many ids the rows have.
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
        """Name of its file of NVIDIA's binary format."""
        return f"{self.name}_data.bin" if self.name else "data.bin"


class Source(Protocol):
    """Reads rows in parts; what it gives does not depend on how they were cut."""

    def count(
        self, part: Any, rejected: list[Rejected] | None
    ) -> tuple[dict[str, Any], list[Counts] | None]:
        """Reads a part once.

        Args:
            part: what to read.
            rejected: gets the rows that cannot be read, which are left out; None refuses the first.

        Returns:
            Facts as JSON, `rows` among them, and how often each value of each counted column
            occurs; None where the part counts for no dictionary.
        """

    def divide(
        self, part: Any, targets: Sequence[Target], quarantine: bool
    ) -> Iterator[tuple[Target, np.ndarray, Columns]]:
        """Yields the rows of a part some at a time: their target, and their numbers among all."""

    def where(self, part: Any, number: int) -> str:
        """Says where a row is, by its number among all."""
