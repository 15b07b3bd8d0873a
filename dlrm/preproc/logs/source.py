"""Where rows come from, as the tasks see it: counted once, then divided among the splits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from dlrm.data.sources.columns import Coded, Parsed
from dlrm.data.sources.log_lines import LogFormat
from dlrm.data.transform.dictionaries import Counts, count_values, merge_counts
from dlrm.preproc.logs.raw_log import Rejected, Split, read_blocks


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
        """Keys, `Parsed` or `Coded`, a column a field."""

    @property
    def extra(self) -> dict[str, np.ndarray]:
        """Columns of a dataset beside the model's inputs, by name."""


def missing_fields(rows: Columns) -> np.ndarray:
    """Returns which fields have no value, bool `[columns, rows]`."""
    return np.array(
        [
            column.codes < 0 if isinstance(column, Coded) else column.missing
            for column in (*rows.numerical, *rows.categorical)
        ]
    )


class Target(NamedTuple):
    """A split of the dataset, and which rows it gets.

    Attributes:
        name: of the split: "train", "test", ...; or "" for one that is the whole output.
        first_row, last_row: of a log, the rows [first_row, last_row) of all days; else 0 and how
            many there are.
        shuffled: whether the rows come in random order.
        labelled: whether the rows have labels.
    """

    name: str
    first_row: int
    last_row: int
    shuffled: bool = False
    labelled: bool = True

    @property
    def rows(self) -> int:
        """How many rows that are."""
        return self.last_row - self.first_row

    @property
    def folder(self) -> str:
        """What the names of its split-binary files begin with."""
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


@dataclass(frozen=True)
class LogSource:
    """Reads lines of raw logs.

    Attributes:
        log_format: the columns of a line.
        days: first and last day whose values get ids.
    """

    log_format: LogFormat
    days: tuple[int, int] = (-1, -1)

    def count(
        self, part: Split, rejected: list[Rejected] | None
    ) -> tuple[dict[str, Any], list[Counts] | None]:
        """Reads a split once; see `Source`.

        Every field is parsed here, so that no later stage meets a line that cannot be read.
        """
        counted = self.days[0] <= part.day <= self.days[1]
        parts: list[list[Counts]] = [[] for _ in range(self.log_format.num_categorical)]
        rows, crcs = 0, list[int]()
        for block in read_blocks(part, self.log_format, rejected, crcs):
            rows += len(block.lines.labels)
            if counted:
                for counts, numbers in zip(parts, block.lines.categorical, strict=True):
                    counts.append(count_values(numbers))
        columns = [merge_counts(counts) for counts in parts] if counted else None
        return {"rows": rows, "crc": crcs[0]}, columns

    def divide(
        self, part: Split, targets: Sequence[Target], quarantine: bool
    ) -> Iterator[tuple[Target, np.ndarray, Columns]]:
        """Yields lines as the ranges of the targets divide them; see `Source`."""
        for block in read_blocks(part, self.log_format, [] if quarantine else None):
            first, last = (part.first_row + block.first_row + n for n in (0, block.rows))
            for target in targets:
                begin, end = max(target.first_row, first), min(target.last_row, last)
                if begin < end:
                    lines = block.lines.part(begin - first, end - first)
                    yield target, np.arange(begin, end), lines

    def where(self, part: Split, number: int) -> str:
        """Says where a row is; see `Source`."""
        return f"{part.source}: row {number - part.first_row} from byte {part.begin}"
