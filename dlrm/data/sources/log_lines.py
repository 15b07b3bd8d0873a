"""Parses lines of raw logs into columns of numbers, by `dlrm._host`.

A line is `label <tab> integers <tab> hexadecimal hashes`; it ends like lines of Unix or Windows.
Fields that are empty, or absent at the end of the line, are missing.
"""

from typing import NamedTuple

import numpy as np

from dlrm.data.sources import native
from dlrm.data.sources.columns import (
    EXPECTED_HEXADECIMAL,
    EXPECTED_INTEGER,
    HEXADECIMAL,
    INTEGER,
    Parsed,
    TextColumn,
)
from dlrm.data.sources.row_error import RowError
from dlrm.data.sources.text_format import LogFormat

LONGEST_LINE = 1 << 20  # bytes; a longer line is refused, offline and when served


class Lines(NamedTuple):
    """Numbers of some lines: labels `[rows]`, False if there are none, and the columns."""

    labels: np.ndarray
    numerical: list[Parsed]
    categorical: list[Parsed]


def parse_lines(text: bytes, log_format: LogFormat) -> tuple[Lines, int | None]:
    """Reads lines up to the first that cannot be read.

    Returns:
        The lines before that one, and its position in `text`; None if all are readable.
    """
    num_numerical = log_format.num_numerical
    labels, integers, hashes, missing, rows, bad_at = native.compiled().parse_lines(
        text, num_numerical, log_format.num_categorical, log_format.labeled
    )
    missing = missing[:, :rows]
    numerical = map(Parsed, integers[:, :rows], missing[:num_numerical])
    categorical = map(Parsed, hashes[:, :rows], missing[num_numerical:])
    return Lines(labels[:rows], list(numerical), list(categorical)), bad_at


def explain(line: bytes, log_format: LogFormat, row: int) -> RowError:
    """Returns the error of the line at which `parse_lines` stopped, given its index."""
    fields = line.removesuffix(b"\n").removesuffix(b"\r").split(b"\t")
    if fields == [b""]:
        return RowError(row, "expected a label and fields, got an empty line")
    if len(fields) > log_format.num_columns:
        expected = f"up to {log_format.num_columns} fields separated by tabs"
        return RowError(row, f"expected {expected}, got {len(fields)}")
    if log_format.labeled and fields[0] not in (b"0", b"1"):
        problem = f"expected the label 0 or 1, got {TextColumn.from_bytes(fields[:1]).text(0)!r}"
        return RowError(row, problem, log_format.describe(0))
    for column, field in enumerate(fields[log_format.labeled :], int(log_format.labeled)):
        is_number = column - log_format.labeled < log_format.num_numerical
        if field and not (INTEGER if is_number else HEXADECIMAL).fullmatch(field):
            expected = EXPECTED_INTEGER if is_number else EXPECTED_HEXADECIMAL
            problem = f"expected {expected}, got {TextColumn.from_bytes([field]).text(0)!r}"
            return RowError(row, problem, log_format.describe(column))
    raise AssertionError(f"{line!r} can be read")
