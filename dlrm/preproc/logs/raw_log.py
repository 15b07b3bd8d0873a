"""Raw logs on disk: their files, the splits of these, and the reading of lines.

A split is a byte range of a file and owns the lines that start in it, so that any set of splits
that covers the files gives the same rows.
"""

import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from dlrm.data.sources.log_lines import LONGEST_LINE, Lines, LogFormat, explain, parse_lines
from dlrm.data.sources.row_error import LEAVES_OUT
from dlrm.files import sync
from dlrm.locks import new_suffix
from dlrm.preproc.source import Rejected

SUFFIXES = (".gz", ".zst")  # of compressed files
_BLOCK_BYTES = 4 << 20  # of text, small enough for its columns to fit the caches


class Day(NamedTuple):
    """The lines of a day: those that start in bytes [begin, end) of `path`.

    `source` is the user's file, which is compressed if `path` was unpacked.
    """

    path: str
    begin: int
    end: int
    source: str


@dataclass(frozen=True)
class Split:
    """The lines of a day that start in bytes [begin, end).

    Attributes:
        day: index of the day.
        first_row, rows: position and number of its rows among all days; set by `number_rows`.
        crc: CRC-32 of its lines when they were counted, which later reads verify; None if unknown.
        first_line: number of the file's lines before it, including those that were left out.
    """

    path: str
    source: str
    day: int
    begin: int
    end: int
    first_row: int = -1
    rows: int = -1
    crc: int | None = None
    first_line: int = 0

    @property
    def file(self) -> int:
        """Number of the day's file."""
        return self.day

    def file_of(self, row: int) -> int:
        """Returns the number of the day's file."""
        return self.day

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
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder of day files (INPUT_PATH)")
    present: dict[int, list[Path]] = {}
    unknown = []
    for path in sorted(folder.glob("day_*")):
        name = re.fullmatch(r"day_(0|[1-9]\d*)(\.gz|\.zst)?", path.name)
        if name:
            present.setdefault(int(name[1]), []).append(path)
        elif other := re.match(r"day_(\d+)\.", path.name):
            unknown.append((int(other[1]), path))
    last = max(present, default=-1)
    wanted = range(last + 1) if days is None else range(days[0], days[1] + 1)
    for day, path in unknown:
        if day not in present and (days is None or day in wanted):
            raise ValueError(
                f"{path}: expected day_{day}, plain or as .gz or .zst, beside it or instead: the "
                "last day is held out for testing, so no day may be overlooked"
            )
    if missing := sorted(set(wanted) - set(present)):
        expected = (
            f"missing, though there is a day_{last}; expected day_0 to day_{last} without a gap"
            if days is None
            else f"missing; expected day_{days[0]} to day_{days[1]} (--days)"
        )
        raise FileNotFoundError(f"{folder / f'day_{missing[0]}'}: {expected}")
    present_days = f"day_0 to day_{last}" if present else "none"
    if num_days is not None and len(present) != num_days:
        raise ValueError(f"{folder}: expected {num_days} day files (NUM_DAYS), got {present_days}")
    if days is None and len(present) < 1 + hold_out:
        raise ValueError(
            f"{folder}: expected day files day_0, day_1, ..., at least 2 since the last one is "
            f"held out for testing, or train.txt; got {present_days}"
        )
    return [_one_form(present[day]) for day in wanted]


def find_file(folder: Path, name: str) -> Path | None:
    """Returns a file of a folder, plain, `.gz` or `.zst`, or None if there is none."""
    forms = [folder / (name + suffix) for suffix in ("", *SUFFIXES)]
    present = [path for path in forms if path.exists()]
    return _one_form(present) if present else None


def _one_form(forms: list[Path]) -> Path:
    """Returns the only form of a file; several are an error, since their rows may differ."""
    path = forms[0]
    if len(forms) > 1:
        raise ValueError(f"{forms[1]}: expected one of the two, got {path.name} too")
    if not path.is_file():
        raise ValueError(f"{path}: expected a file")
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: empty; expected lines of a log")
    return path


def split_days(days: Sequence[Day], split_bytes: int) -> list[Split]:
    """Cuts days into splits of about equal size, in the order of their lines."""
    splits = []
    for number, day in enumerate(days):
        size = day.end - day.begin
        parts = -(-size // split_bytes)
        edges = [day.begin + size * i // parts for i in range(parts + 1)]
        pairs = zip(edges, edges[1:], strict=False)
        splits += [Split(day.path, day.source, number, *pair) for pair in pairs]
    return splits


def number_rows(splits: Sequence[Split], counted: Sequence[dict[str, Any]]) -> list[Split]:
    """Returns splits with what was counted: rows, the rows before, and the checksum."""
    numbered, first_row, lines = [], 0, dict[str, int]()
    for split, facts in zip(splits, counted, strict=True):
        rows, first_line = sum(facts["rows"]), lines.get(split.source, 0)
        places = {"first_row": first_row, "rows": rows, "first_line": first_line}
        numbered.append(replace(split, crc=facts["crc"], **places))
        first_row += rows
        lines[split.source] = first_line + rows + len(facts["rejected"])
    return numbered


def count_lines(split: Split) -> int:
    """Counts the lines that start in a split, which are the newlines before its bytes."""
    lines = 1 if split.begin == 0 else 0
    with open(split.path, "rb") as file:
        position = max(split.begin - 1, 0)
        file.seek(position)
        while position < split.end - 1:
            block = _read(file, min(_BLOCK_BYTES, split.end - 1 - position), split)
            lines += block.count(b"\n")
            position += len(block)
    return lines


def start_of_line(split: Split, line: int) -> int:
    """Returns the position in the file of a split's line, given its index."""
    if line == 0 and split.begin == 0:
        return 0
    wanted = line if split.begin == 0 else line + 1  # newlines up to it
    with open(split.path, "rb") as file:
        position = max(split.begin - 1, 0)
        file.seek(position)
        while True:
            block = _read(file, _BLOCK_BYTES, split)
            newlines = block.count(b"\n")
            if newlines >= wanted:
                place = -1
                for _ in range(wanted):
                    place = block.index(b"\n", place + 1)
                return position + place + 1
            wanted -= newlines
            position += len(block)


def read_blocks(
    split: Split,
    log_format: LogFormat,
    rejected: list[Rejected] | None = None,
    crcs: list[int] | None = None,
) -> Iterator[tuple[int, Lines]]:
    """Yields lines of a split, a few megabytes at a time, and the index of the first one.

    Args:
        split, log_format: what to read.
        rejected: receives unreadable lines, which are left out.
        crcs: receives the CRC-32 of all lines once they are read.

    Raises:
        RowError: a line is unreadable and `rejected` is None.
        ValueError: the lines differ from those that were counted.
    """
    rows = skipped = crc = 0
    with open(split.path, "rb") as file:
        position = _first_line(file, split)
        while position < split.end:
            file.seek(position)
            text = _read(file, min(_BLOCK_BYTES, split.end - position), split)
            if not text.endswith(b"\n"):
                text += _rest_of_line(file, split, position + len(text))
            position += len(text)
            crc = zlib.crc32(text, crc)
            while text:
                lines, bad_at = parse_lines(text, log_format)
                if len(lines.labels):
                    yield rows, lines
                    rows += len(lines.labels)
                if bad_at is None:
                    break
                end = text.find(b"\n", bad_at) + 1 or len(text)
                line, start = text[bad_at:end], position - len(text) + bad_at
                error = explain(line, log_format, rows + skipped)
                if rejected is None:
                    error.where = f"{split.source}, line {_line_number(split.path, start)}"
                    error.problem += LEAVES_OUT
                    raise error
                shown = line.rstrip(b"\r\n").decode("utf-8", "backslashreplace")
                rejected.append(Rejected(error.row, error.reason, shown))
                skipped += 1
                text = text[end:]
    if crcs is not None:
        crcs.append(crc)
    if split.crc not in (None, crc):
        raise ValueError(
            f"{split.source}: expected CRC-32 {split.crc:08x} of the lines in bytes {split.begin} "
            f"to {split.end}, as when they were counted, got {crc:08x}: the file has changed; "
            "--restart begins anew"
        )


def _read(file: BinaryIO, size: int, split: Split) -> bytes:
    block = file.read(size)
    if not block:
        raise ValueError(f"{split.source}: became shorter while it was read")
    return block


def _first_line(file: BinaryIO, split: Split) -> int:
    if split.begin == 0:
        return 0
    file.seek(split.begin - 1)
    return split.begin - 1 + len(_rest_of_line(file, split, split.begin))


def _rest_of_line(file: BinaryIO, split: Split, position: int) -> bytes:
    rest = file.readline(LONGEST_LINE)
    if len(rest) == LONGEST_LINE and not rest.endswith(b"\n"):
        raise ValueError(
            f"{split.source}, line {_line_number(split.path, position)}: longer than "
            f"{LONGEST_LINE} bytes, so this is no log of lines"
        )
    return rest


def _line_number(path: str, offset: int) -> int:
    """Counts the lines up to the one at `offset`; reads the file, so used for errors only."""
    lines = 1
    with open(path, "rb") as file:
        while offset > 0 and (block := file.read(min(_BLOCK_BYTES, offset))):
            lines += block.count(b"\n")
            offset -= len(block)
    return lines


def unpack(source: str, target: str) -> int:
    """Unpacks a `.gz` or `.zst` file; returns its bytes. `target` appears when it is complete.

    Raises:
        ValueError: the file is damaged or truncated; the message names it.
    """
    partial, size = Path(f"{target}.{new_suffix()}"), 0  # of one of several attempts
    try:
        with _open_compressed(source) as packed, open(partial, "wb") as file:
            while block := packed.read(_BLOCK_BYTES):
                file.write(block)
                size += len(block)
    except (EOFError, OSError, ValueError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(
            f"{source}: damaged or cut off after {size} bytes of text ({error})"
        ) from error
    if size == 0:
        raise ValueError(f"{source}: empty; expected lines of a log")
    sync(partial)
    partial.replace(target)
    sync(partial.parent)
    return size


def _open_compressed(source: str) -> Any:
    if source.endswith(".gz"):
        return gzip.open(source, "rb")
    import pyarrow as pa

    return pa.CompressedInputStream(source, "zstd")
