"""Raw logs as a source of rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlrm.data.sources.log_lines import LogFormat
from dlrm.data.transform.rows import FieldRows
from dlrm.data.transform.schema import Schema
from dlrm.preproc.logs.raw_log import Split, read_blocks
from dlrm.preproc.source import Read, Rejected


@dataclass(frozen=True)
class LogSource:
    """Reads lines of raw logs.

    Attributes:
        schema: the schema of logs.
        log_format: the columns of a line.
    """

    schema: Schema
    log_format: LogFormat

    def read(
        self, part: Split, rejected: list[Rejected] | None, facts: dict[str, Any] | None = None
    ) -> Iterator[Read]:
        """Yields the lines of a split; see `Source`. Lines that are left out have no numbers."""
        crcs: list[int] = []
        texts = [None] * self.log_format.num_categorical
        for first, lines in read_blocks(part, self.log_format, rejected, crcs):
            numbers = part.first_row + first + np.arange(len(lines.labels))
            rows = FieldRows(lines.labels, lines.numerical, lines.categorical, texts, {})
            yield Read(rows, numbers)
        if facts is not None:
            facts["crc"], facts["kinds"] = crcs[0], [[]] * self.log_format.num_categorical
