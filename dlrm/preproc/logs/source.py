"""Raw logs as a source of rows for the stages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlrm.data.sources.log_lines import LogFormat
from dlrm.data.transform.dictionaries import Counts, count_values, merge_counts
from dlrm.preproc.logs.raw_log import Split, read_blocks
from dlrm.preproc.stages.source import Columns, Rejected, Target


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

        Every field is parsed here, so that no later stage meets an unreadable line.
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
        """Yields lines by the ranges of the targets; see `Source`."""
        for block in read_blocks(part, self.log_format, [] if quarantine else None):
            first, last = (part.first_row + block.first_row + n for n in (0, block.rows))
            for target in targets:
                begin, end = max(target.first_row, first), min(target.last_row, last)
                if begin < end:
                    lines = block.lines.part(begin - first, end - first)
                    yield target, np.arange(begin, end), lines

    def where(self, part: Split, number: int) -> str:
        """Returns the location of a row; see `Source`."""
        return f"{part.source}: row {number - part.first_row} from byte {part.begin}"
