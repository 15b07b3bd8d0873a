"""Raw logs on disk: their files, the splits of these, and the reading of lines.

A split is a byte range of a file and owns the lines that start in it, so that any set of splits
that covers the files gives the same rows.
"""

import itertools
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlrm.data.schema.schema import Schema
from dlrm.data.sources import text_files
from dlrm.data.sources.log_lines import LONGEST_LINE, LogFormat, explain, parse_lines
from dlrm.data.sources.row_error import LEAVES_OUT, RowError
from dlrm.data.sources.text_files import BROKEN, ByteRange, open_bytes
from dlrm.data.transform.rows import FieldRows
from dlrm.files import atomic_file
from dlrm.preproc.source import Read, Rejected

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}  # by the suffix of a file
_BLOCK_BYTES = 4 << 20  # of text, small enough for its columns to fit the caches


class Split(NamedTuple):
    """The lines of a file that start in bytes [begin, end).

    Attributes:
        path, source: the file to read, and the user's, which is compressed if the other is not.
        file: number of its day.
        first_row, rows: position and number of its rows among all days; set by `number_rows`.
        crc: CRC-32 of its lines when they were counted, which later reads verify; None if unknown.
        first_line: number of the file's lines before it, including those that were left out.
    """

    path: str
    source: str
    file: int
    begin: int
    end: int
    first_row: int = -1
    rows: int = -1
    crc: int | None = None
    first_line: int = 0

    def file_of(self, row: int) -> int:
        """Returns the number of the day."""
        return self.file

    def source_of(self, row: int) -> str:
        """Returns the user's file."""
        return self.source

    def where(self, row: int) -> str:
        """Returns the location of a line, given its index among the lines of the split."""
        return f"{self.source}, line {self.first_line + row + 1}"

    @property
    def size(self) -> int:
        """Bytes of text."""
        return self.end - self.begin

    def ranges(self) -> list[tuple[str, int, int, bool]]:
        """Returns the bytes that reading needs: file, begin, end, and whether to a line's end."""
        return [(self.path, max(self.begin - 1, 0), self.end, True)]


def find_days(
    folder: Path,
    num_days: int | None = None,
    days: tuple[int, int] | None = None,
    hold_out: bool = True,
) -> list[Path]:
    """Returns `day_0`, `day_1`, ... of a folder, each plain, `.gz` or `.zst`.

    Args:
        folder: their directory. Files with other names are ignored, except unknown forms `day_N.*`,
            which are errors, since the last day is held out and must be known.
        num_days: expected number of days; None takes all.
        days: first and last day to return; the folder need not have others. None returns all,
            which must be 2 or more, without a gap.
        hold_out: whether the last day is held out; otherwise there may be one only.

    Raises:
        FileNotFoundError: the folder or a day is missing.
        ValueError: a day has an unknown form, occurs twice or is empty; there are fewer than 2, or
            not `num_days`.
    """
    if folder.is_file():
        raise NotADirectoryError(
            f"{folder}: expected a folder of day files (INPUT_PATH), got a file"
        )
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder of day files (INPUT_PATH)")
    present, others = set[int](), list[tuple[Path, int]]()
    for path in sorted(folder.glob("day_*")):
        if name := re.fullmatch(r"day_(0|[1-9]\d*)(\.gz|\.zst)?", path.name):
            present.add(int(name[1]))
        elif name := re.match(r"day_(\d+)\.", path.name):
            others.append((path, int(name[1])))
    last = max(present, default=-1)
    wanted = range(last + 1) if days is None else range(days[0], days[1] + 1)
    for path, day in others:
        if day not in present and (days is None or day in wanted):
            raise ValueError(
                f"{path}: expected day_{day}, plain or as .gz or .zst, beside it or instead: the "
                "last day is held out for testing, so no day may be overlooked"
            )
    if missing := [day for day in wanted if day not in present]:
        expected = f"expected day_{wanted[0]} to day_{wanted[-1]}"
        there = f", though there is a day_{last}; {expected} without a gap"
        why = there if days is None else f"; {expected} (--days)"
        raise FileNotFoundError(f"{folder / f'day_{missing[0]}'}: missing{why}")
    got = f"got day_0 to day_{last}" if present else "got none"
    if num_days not in (None, len(present)):
        raise ValueError(f"{folder}: expected {num_days} day files (NUM_DAYS), {got}")
    if days is None and len(present) < 1 + hold_out:
        raise ValueError(
            f"{folder}: expected day files day_0, day_1, ..., at least 2 since the last one is "
            f"held out for testing, or train.txt; {got}"
        )
    return [*filter(None, (find_file(folder, f"day_{day}") for day in wanted))]


def find_file(folder: Path, name: str) -> Path | None:
    """Returns a file of a folder, plain, `.gz` or `.zst`, or None if there is none.

    Raises:
        ValueError: it has several forms, whose rows may differ, or is no file, or empty.
    """
    forms = [folder / (name + suffix) for suffix in ("", *COMPRESSIONS)]
    present = [path for path in forms if path.exists()]
    if len(present) > 1:
        raise ValueError(f"{present[1]}: expected one of the two, got {present[0].name} too")
    for path in present:
        if not path.is_file():
            raise ValueError(f"{path}: expected a file")
        if path.stat().st_size == 0:
            raise ValueError(f"{path}: empty; expected lines of a log")
    return present[0] if present else None


def split_days(days: Sequence[Split], split_bytes: int) -> list[Split]:
    """Cuts days into splits of about equal size, in the order of their lines."""
    splits = []
    for number, day in enumerate(days):
        parts = -(-day.size // split_bytes)
        edges = [day.begin + day.size * i // parts for i in range(parts + 1)]
        for begin, end in itertools.pairwise(edges):
            splits.append(day._replace(file=number, begin=begin, end=end))
    return splits


def number_rows(splits: Sequence[Split], counted: Sequence[dict[str, Any]]) -> list[Split]:
    """Returns splits with what was counted: rows, the rows before, and the checksum."""
    numbered, first_row, lines = [], 0, dict[str, int]()
    for split, facts in zip(splits, counted, strict=True):
        rows, line = sum(facts["rows"]), lines.get(split.source, 0)
        numbered.append(
            split._replace(first_row=first_row, rows=rows, crc=facts["crc"], first_line=line)
        )
        first_row += rows
        lines[split.source] = line + rows + len(facts["rejected"])
    return numbered


def count_lines(split: Split) -> int:
    """Counts the lines that start in a split."""
    return text_files.count_lines(Path(split.path), ByteRange(split.begin, split.end))


def start_of_line(split: Split, line: int) -> int:
    """Returns the position in the file of a split's line, given its index."""
    with open(split.path, "rb") as file:
        file.seek(max(split.begin - 1, 0))
        for _ in itertools.islice(iter(file.readline, b""), line + (split.begin > 0)):
            pass
        return file.tell()


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
        """Yields the lines of a split; see `Source`. Lines that are left out have no numbers.

        Raises:
            RowError: a line is unreadable and `rejected` is None.
            ValueError: a line is too long, or the lines differ from those that were counted.
        """
        texts = [None] * self.log_format.num_categorical
        rows = skipped = crc = 0
        for text, end in _blocks(part):
            crc = zlib.crc32(text, crc)
            while text:
                lines, bad_at = parse_lines(text, self.log_format)
                if count := len(lines.labels):
                    columns = FieldRows(lines.labels, lines.numerical, lines.categorical, texts, {})
                    yield Read(columns, part.first_row + rows + np.arange(count))
                    rows += count
                if bad_at is None:
                    break
                begin, after = end - len(text) + bad_at, text.find(b"\n", bad_at) + 1 or len(text)
                line, text = text[bad_at:after], text[after:]
                error = explain(line, self.log_format, rows + skipped)
                if rejected is None or len(line) > LONGEST_LINE:
                    raise _located(error, part, line, begin)
                shown = line.rstrip(b"\r\n").decode("utf-8", "backslashreplace")
                rejected.append(Rejected(error.row, error.reason, shown))
                skipped += 1
        if facts is not None:
            facts |= {"crc": crc, "types": [[]] * self.log_format.num_categorical}
        if part.crc not in (None, crc):
            raise ValueError(
                f"{part.source}: expected CRC-32 {part.crc:08x} of the lines in bytes {part.begin} "
                f"to {part.end}, as when they were counted, got {crc:08x}: the file has changed; "
                "--restart begins anew"
            )


def _blocks(split: Split) -> Iterator[tuple[bytes, int]]:
    """Yields whole lines, a few megabytes at a time, and the position in the file after them."""
    with open(split.path, "rb") as file:
        if split.begin:
            file.seek(split.begin - 1)
            file.readline(LONGEST_LINE + 1)
        while (begin := file.tell()) < split.end:
            text = file.read(min(_BLOCK_BYTES, split.end - begin))
            if not text:
                raise ValueError(f"{split.source}: became shorter while it was read")
            yield (
                text if text.endswith(b"\n") else text + file.readline(LONGEST_LINE + 1),
                file.tell(),
            )


def _located(error: RowError, split: Split, line: bytes, begin: int) -> ValueError:
    """Returns the error of a line with its number, for which the file is read."""
    number = text_files.count_lines(Path(split.path), ByteRange(0, begin)) + 1
    error.where, error.problem = f"{split.source}, line {number}", error.problem + LEAVES_OUT
    if len(line) <= LONGEST_LINE:
        return error
    return ValueError(
        f"{error.where}: longer than {LONGEST_LINE} bytes, so this is no log of lines"
    )


def unpack(paths: tuple[str, str]) -> int:
    """Unpacks a `.gz` or `.zst` file into another, which appears when it is complete.

    Returns:
        The bytes of text.

    Raises:
        ValueError: the file is damaged or truncated; the message names it.
    """
    source, target = map(Path, paths)
    size = 0
    with atomic_file(target) as partial, open(partial, "wb") as file:
        try:
            with open_bytes(source, COMPRESSIONS[source.suffix]) as packed:
                while block := packed.read(_BLOCK_BYTES):
                    size += file.write(block)
        except (*BROKEN, ValueError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise ValueError(
                f"{source}: damaged or cut off after {size} bytes of text ({error})"
            ) from error
        if size == 0:
            raise ValueError(f"{source}: empty; expected lines of a log")
    return size
