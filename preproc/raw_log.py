"""Raw logs: day files of tab-separated lines, cut into splits that are read independently.

A line is `label <tab> integers <tab> hexadecimal hashes`; it ends as lines of Unix or of Windows
do. Fields that are empty, or that are cut off at the end of the line, are missing. A split is a
byte range of a file and owns the lines that start in it, so any set of splits that covers the files
gives the same rows.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from dlrm.data.transform import BadValueError, TextColumn

_BLOCK_BYTES = 4 << 20  # of text, whose columns then fit the caches
_LONGEST_LINE = 1 << 20


@dataclass(frozen=True)
class LogFormat:
    """Columns of a line: the label (column 0), integers, then hashes."""

    num_numerical: int = 13
    num_categorical: int = 26

    def __post_init__(self) -> None:
        if min(self.num_numerical, self.num_categorical) < 0 or self.num_columns < 2:
            raise ValueError(
                f"--num_numerical {self.num_numerical} --num_categorical {self.num_categorical}: "
                "expected 0 or more of each, and one in all"
            )

    @property
    def num_columns(self) -> int:
        """Fields of a line, the label included."""
        return 1 + self.num_numerical + self.num_categorical

    def describe(self, column: int) -> str:
        """Says which field of a line a column is."""
        if column == 0:
            return "column 0 (label)"
        if column <= self.num_numerical:
            return f"column {column} (numerical {column - 1})"
        return f"column {column} (categorical {column - 1 - self.num_numerical})"


@dataclass(frozen=True)
class Split:
    """The lines of a file that start in bytes [begin, end).

    Attributes:
        day: index of the file.
        first_row, rows: where these lines stand among those of all days; set by `number_rows`.
    """

    path: str
    day: int
    begin: int
    end: int
    first_row: int = -1
    rows: int = -1


class BadLineError(ValueError):
    """A line that cannot be read; the message names file, line and column."""


class Block(NamedTuple):
    """Some lines of a file: `first_row` counts the lines of the split before them."""

    first_row: int
    labels: np.ndarray
    columns: list[TextColumn]
    where: "_Where"


def find_days(folder: Path, num_days: int | None = None) -> list[Path]:
    """Returns `day_0`, `day_1`, ... of a folder, after checking that none is missing or empty.

    Args:
        folder: where they are; files of other names do not matter, but there may be no `day_N.*`
            whose `day_N` is missing: the last day is held out, so it must be known which is last.
        num_days: how many there must be; None takes what is there.

    Raises:
        FileNotFoundError: no folder, or a missing day.
        ValueError: a day that is compressed, or empty, fewer than 2, or not `num_days` of them.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder of day files (INPUT_PATH)")
    names = [m for m in (re.fullmatch(r"day_(0|[1-9]\d*)", p.name) for p in folder.iterdir()) if m]
    present = {int(name[1]) for name in names}
    for path in sorted(folder.glob("day_*.*")):
        day = re.match(r"day_(\d+)\.", path.name)
        if day and int(day[1]) not in present:
            raise ValueError(
                f"{path}: expected day_{int(day[1])} uncompressed beside it or instead; compressed "
                "days are not read in this version, and the last day is held out for testing"
            )
    last = max(present, default=-1)
    if missing := sorted(set(range(last + 1)) - present):
        raise FileNotFoundError(
            f"{folder / f'day_{missing[0]}'}: missing, though there is a day_{last}; expected "
            f"day_0 to day_{last} without a gap"
        )
    found = f"day_0 to day_{last}" if present else "none"
    if num_days is not None and len(present) != num_days:
        raise ValueError(f"{folder}: expected {num_days} day files (NUM_DAYS), got {found}")
    if len(present) < 2:
        raise ValueError(
            f"{folder}: expected day files day_0, day_1, ..., at least 2 since the last one is "
            f"held out for testing; got {found}"
        )
    days = [folder / f"day_{day}" for day in range(last + 1)]
    for path in days:
        if not path.is_file():
            raise ValueError(f"{path}: expected a file")
        if path.stat().st_size == 0:
            raise ValueError(f"{path}: empty; expected lines of a log")
    return days


def split_days(days: Sequence[Path], split_bytes: int, first_day: int = 0) -> list[Split]:
    """Cuts day files into splits of about equal size, in the order of their lines."""
    splits = []
    for day, path in enumerate(days, first_day):
        size = path.stat().st_size
        parts = -(-size // split_bytes)
        edges = [size * i // parts for i in range(parts + 1)]
        splits += [Split(str(path), day, *pair) for pair in zip(edges, edges[1:], strict=False)]
    return splits


def count_rows(split: Split) -> int:
    """Counts the lines that start in a split, which are the newlines before its bytes."""
    rows = 1 if split.begin == 0 else 0
    with open(split.path, "rb") as file:
        position = max(split.begin - 1, 0)
        file.seek(position)
        while position < split.end - 1:
            block = file.read(min(_BLOCK_BYTES, split.end - 1 - position))
            if not block:
                raise BadLineError(f"{split.path}: became shorter while it was read")
            rows += block.count(b"\n")
            position += len(block)
    return rows


def number_rows(splits: Sequence[Split], rows: Sequence[int]) -> list[Split]:
    """Tells each split how many rows it has and how many come before."""
    numbered, first = [], 0
    for split, count in zip(splits, rows, strict=True):
        numbered.append(replace(split, first_row=first, rows=count))
        first += count
    return numbered


def read_blocks(split: Split, log_format: LogFormat) -> Iterator[Block]:
    """Yields the lines of a split, a few megabytes at a time.

    Raises:
        BadLineError: an empty line, too many fields or an unknown label.
    """
    rows = 0
    with open(split.path, "rb") as file:
        position = _first_line(file, split)
        while position < split.end:
            file.seek(position)
            text = file.read(min(_BLOCK_BYTES, split.end - position))
            if not text.endswith(b"\n"):
                text += _rest_of_line(file, split, position + len(text))
            block = _parse_block(text, rows, _Where(split.path, position, log_format))
            yield block
            rows += len(block.labels)
            position += len(text)


def _first_line(file: BinaryIO, split: Split) -> int:
    if split.begin == 0:
        return 0
    file.seek(split.begin - 1)
    return split.begin - 1 + len(_rest_of_line(file, split, split.begin))


def _rest_of_line(file: BinaryIO, split: Split, position: int) -> bytes:
    rest = file.readline(_LONGEST_LINE)
    if len(rest) == _LONGEST_LINE and not rest.endswith(b"\n"):
        raise BadLineError(
            f"{split.path}: line {_line_number(split.path, position)}: longer than "
            f"{_LONGEST_LINE} bytes, so this is no log of lines"
        )
    return rest


class _Where(NamedTuple):
    """Where a block's text begins, to say which line an error is in."""

    path: str
    offset: int
    log_format: LogFormat

    def error(self, line_start: int, column: int | None, expected: str, got: str) -> BadLineError:
        line = _line_number(self.path, self.offset + line_start)
        field = "" if column is None else f", {self.log_format.describe(column)}"
        return BadLineError(f"{self.path}: line {line}{field}: expected {expected}, got {got}")


def bad_value(block: Block, error: BadValueError, column: int) -> BadLineError:
    """Returns the error of a field with its file, line and column (0 is the label)."""
    line_start = int(block.columns[0].starts[error.row]) - 2  # a label is one character
    return block.where.error(line_start, column, error.expected, repr(error.got))


def _line_number(path: str, offset: int) -> int:
    """Counts the lines up to the one at `offset`; reads the file, so for errors only."""
    lines = 1
    with open(path, "rb") as file:
        while offset > 0 and (block := file.read(min(_BLOCK_BYTES, offset))):
            lines += block.count(b"\n")
            offset -= len(block)
    return lines


def _parse_block(text: bytes, first_row: int, where: _Where) -> Block:
    if not text.endswith(b"\n"):
        text += b"\n"  # the last line of a file may end without
    data = np.frombuffer(text + bytes(8), np.uint8)
    starts, ends = _find_fields(data[: len(text)], where)
    label_text = TextColumn(data, starts[0], ends[0])
    labels = data[starts[0]] - np.uint8(ord("0"))
    bad = (labels > 1) | (ends[0] - starts[0] != 1)
    if bad.any():
        row = int(bad.argmax())
        got = repr(label_text.text(row))
        raise where.error(int(starts[0][row]), 0, "the label 0 or 1", got)
    columns = [
        TextColumn(data, start, end) for start, end in zip(starts[1:], ends[1:], strict=True)
    ]
    return Block(first_row, labels.astype(bool), columns, where)


def _find_fields(data: np.ndarray, where: _Where) -> tuple[np.ndarray, np.ndarray]:
    """Returns where each field starts and ends, as arrays `[columns, rows]`."""
    columns = where.log_format.num_columns
    marks = np.flatnonzero((data - np.uint8(ord("\t"))) < 2).astype(np.int32)  # tab, newline
    last_marks = np.flatnonzero(data[marks] == ord("\n"))
    line_ends = marks[last_marks]
    line_starts = np.concatenate([np.zeros(1, np.int32), line_ends[:-1] + 1])
    fields = np.diff(last_marks, prepend=-1)
    text_ends = line_ends - (data[line_ends - 1] == ord("\r"))  # at 0, data[-1] is a newline
    if (text_ends == line_starts).any():
        row = int((text_ends == line_starts).argmax())
        raise where.error(int(line_starts[row]), None, "a label and fields", "an empty line")
    if (fields > columns).any():
        row = int((fields > columns).argmax())
        wanted = f"up to {columns} fields separated by tabs"
        raise where.error(int(line_starts[row]), None, wanted, f"{fields[row]}")
    ends = np.empty((columns, len(fields)), np.int32)
    if (fields == columns).all():
        ends[:] = marks.reshape(-1, columns).T
    else:
        ends[:] = line_ends
        row_of_mark = np.repeat(np.arange(len(fields)), fields)
        column_of_mark = np.arange(len(marks)) - np.repeat(last_marks - fields + 1, fields)
        ends[column_of_mark, row_of_mark] = marks
    if (text_ends < line_ends).any():
        np.minimum(ends, text_ends, out=ends)
    starts = np.empty_like(ends)
    starts[0] = line_starts
    np.minimum(ends[:-1] + 1, ends[1:], out=starts[1:])  # a field that is cut off is empty
    return starts, ends
