"""Parses lines of raw logs into columns of numbers, natively if `dlrm._host` loads.

A line is `label <tab> integers <tab> hexadecimal hashes`; it ends like lines of Unix or Windows.
Fields that are empty, or absent at the end of the line, are missing. The native parser and numpy's
give the same numbers and stop at the same line; `benchmarks/preprocess.py` times them.
"""

from typing import NamedTuple

import numpy as np

from dlrm.data.sources import native
from dlrm.data.sources.columns import (
    EXPECTED_HEXADECIMAL,
    EXPECTED_INTEGER,
    Parsed,
    TextColumn,
    cut_lines,
    read_hexadecimal,
    read_integer,
)
from dlrm.data.sources.row_error import RowError
from dlrm.data.sources.text_format import LogFormat

LONGEST_LINE = 1 << 20  # bytes; a longer line is refused, offline and when served


class Lines(NamedTuple):
    """Numbers of some lines: labels `[rows]`, False if there are none, and the columns."""

    labels: np.ndarray
    numerical: list[Parsed]
    categorical: list[Parsed]

    def part(self, begin: int, end: int) -> "Lines":
        """Returns the rows from `begin` to `end`."""
        if (begin, end) == (0, len(self.labels)):
            return self
        rows = slice(begin, end)
        numerical, categorical = (
            [column.take(rows) for column in columns]
            for columns in (self.numerical, self.categorical)
        )
        return Lines(self.labels[rows], numerical, categorical)


def parse_lines(text: bytes, log_format: LogFormat) -> tuple[Lines, int | None]:
    """Reads lines up to the first that cannot be read.

    Returns:
        The lines before that one, and its position in `text`; None if all are readable.
    """
    if native.host is None:
        return _parse_with_numpy(text, log_format)
    num_numerical, num_categorical = log_format.num_numerical, log_format.num_categorical
    labels, integers, hashes, missing, rows, bad_at = native.host.parse_lines(
        text, num_numerical, num_categorical, log_format.labeled
    )
    lines = Lines(
        labels[:rows],
        [Parsed(integers[i, :rows], missing[i, :rows]) for i in range(num_numerical)],
        [
            Parsed(hashes[i, :rows], missing[num_numerical + i, :rows])
            for i in range(num_categorical)
        ],
    )
    return lines, bad_at


def explain(line: bytes, log_format: LogFormat, row: int) -> RowError:
    """Returns the error of the line at which `parse_lines` stopped, given its index."""
    fields = line.removesuffix(b"\n").removesuffix(b"\r").split(b"\t")
    if fields == [b""]:
        return RowError(row, "expected a label and fields, got an empty line")
    if len(fields) > log_format.num_columns:
        expected = f"up to {log_format.num_columns} fields separated by tabs"
        return RowError(row, f"expected {expected}, got {len(fields)}")
    if log_format.labeled and fields[0] not in (b"0", b"1"):
        problem = f"expected the label 0 or 1, got {_shown(fields[0])}"
        return RowError(row, problem, log_format.describe(0))
    for column, field in enumerate(fields[log_format.labeled :], int(log_format.labeled)):
        text = TextColumn.from_bytes([field])
        is_number = column - log_format.labeled < log_format.num_numerical
        _, bad = read_integer(text) if is_number else read_hexadecimal(text)
        if bad[0]:
            expected = EXPECTED_INTEGER if is_number else EXPECTED_HEXADECIMAL
            problem = f"expected {expected}, got {_shown(field)}"
            return RowError(row, problem, log_format.describe(column))
    raise AssertionError(f"{line!r} can be read")


def _shown(field: bytes) -> str:
    return repr(TextColumn.from_bytes([field]).text(0))


def _parse_with_numpy(text: bytes, log_format: LogFormat) -> tuple[Lines, int | None]:
    fields, bad_at = _find_fields(text, log_format.num_columns)
    columns = [TextColumn(fields.data, *ends) for ends in zip(*fields[1:], strict=True)]
    rows = fields.starts.shape[1]
    labels, bad = np.zeros(rows, bool), np.zeros(rows, bool)
    if log_format.labeled:
        digits = fields.data[fields.starts[0]] - np.uint8(ord("0"))
        bad |= (digits > 1) | (fields.ends[0] - fields.starts[0] != 1)
        labels = digits == 1
        columns = columns[1:]
    integers: list[Parsed] = []
    hashes: list[Parsed] = []
    for i, column in enumerate(columns):
        read = read_integer if i < log_format.num_numerical else read_hexadecimal
        numbers, wrong = read(column)
        (integers if i < log_format.num_numerical else hashes).append(numbers)
        bad |= wrong
    lines = Lines(labels, integers, hashes)
    if bad.any():
        row = int(bad.argmax())
        return lines.part(0, row), int(fields.starts[0][row])
    return lines, bad_at


def _find_fields(text: bytes, num_columns: int) -> tuple[TextColumn, int | None]:
    """Returns the fields of lines, as `[columns, rows]`, and the start of the first bad line.

    A bad line is empty or has too many fields; the fields are those of the lines before it.
    """
    newline = b"" if text.endswith(b"\n") or not text else b"\n"
    data = np.frombuffer(text + newline + bytes(8), "u1")
    line_ends = np.flatnonzero(data[:-8] == ord("\n")).astype(np.int32)
    line_starts = np.concatenate([np.zeros(min(len(line_ends), 1), np.int32), line_ends[:-1] + 1])
    data, starts, ends = cut_lines(data, line_starts, line_ends, num_columns)
    empty = ends[-1] == starts[0]
    rows = int(empty.argmax()) if empty.any() else len(empty)
    bad_at = int(line_starts[rows]) if rows < len(line_starts) else None
    return TextColumn(data, starts[:, :rows], ends[:, :rows]), bad_at
