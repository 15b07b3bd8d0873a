"""Rows of files of any format for a draft, and what such files have besides."""

from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from dlrm.data.sources.column_names import check_columns
from dlrm.data.sources.csv_rows import Reading, Spans
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.formats.base import TableFile
from dlrm.data.tables.formats.cells import Cells
from dlrm.data.tables.formats.text import Text

_MOST_SKIPPED = 0.01  # share of a file's lines; where more are no rows, the format is wrong


@dataclass
class Seen:
    """Observations from reading the files of a draft, besides the values."""

    unusable: dict[str, str] = field(default_factory=dict)  # column -> why no field can use it
    nested: dict[str, str] = field(default_factory=dict)  # column of JSON -> its first map
    mixed: dict[str, None] = field(default_factory=dict)  # columns of JSON with values and lists
    spans: dict[Path, Spans] = field(default_factory=dict)  # rows of several lines
    skipped: dict[Path, tuple[int, str]] = field(default_factory=dict)  # how many, and the first

    @property
    def left_out(self) -> dict[str, str]:
        """Returns the columns that no field can use, and why."""
        reasons = {name: f"nested, such as {value}" for name, value in self.nested.items()}
        reasons |= dict.fromkeys(self.mixed, "values in some rows, lists in others")
        return reasons | self.unusable


def batches_of(
    files: Sequence[TableFile],
    text: TextFormat,
    needed: Collection[str] = (),
    seen: Seen | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of files with all their columns, those of folders included.

    Lines of text that are no rows are skipped, unless they are more than a hundredth of a file's.

    Args:
        files, text: files of one format, and the form of their text, if they are CSV.
        needed: columns that every CSV file must have.
        seen: receives what is not in the batches.

    Raises:
        ValueError: a file is damaged, or lacks a column; the message names it.
    """
    seen = seen or Seen()
    if len(files) > 1 and not files[0].format.may_lack_columns:
        _note_lacking(files, text, needed, seen)
    for file in files:
        if isinstance(file.format, Text):
            yield from _text_batches(file, text, needed, seen)
        else:
            names = _once(file.columns(text), seen)
            yield from (batch for batch, _ in file.format.batches(file, text, names))


def _text_batches(
    file: TableFile, text: TextFormat, needed: Collection[str], seen: Seen
) -> Iterator[pa.RecordBatch]:
    assert isinstance(file.format, Text)
    path, partition, problems = file.path, file.partition, dict[int, str]()
    spans = seen.spans.setdefault(path, Spans())
    reading = Reading(text, spans=spans, nested=seen.nested, mixed=seen.mixed, problems=problems)
    rows = skipped = 0
    in_file = [name for name in needed if name not in partition]
    for names, lines, columns in file.format.read(path, reading, Cells(), set()):
        file.format.check_names(path, names, text, in_file)
        once = {*_once(names, seen)} - partition.keys()
        arrays = {name: column for name, column in columns.items() if name in once}
        arrays |= {n: pa.array([v] * len(lines), pa.string()) for n, v in partition.items()}
        batch = pa.record_batch(arrays)
        rows += len(lines)
        if bad := [line for line in lines.tolist() if line in problems] if problems else []:
            skipped += len(bad)
            if skipped > _MOST_SKIPPED * rows:  # which a second reading raises
                deque(file.format.read(path, reading._replace(problems=None), Cells(), set()), 0)
            problem = problems[bad[0]].partition("\t")[0]  # without the row
            _, first = seen.skipped.get(path, (0, f"line {bad[0]}, {problem}"))
            seen.skipped[path] = skipped, first
            batch = batch.filter(pa.array(~np.isin(lines, bad)))
        yield batch


def _once(names: Sequence[str], seen: Seen) -> list[str]:
    """Returns the names that occur once, and notes the others."""
    counts = Counter(names)
    twice = [name for name, count in counts.items() if count > 1]
    seen.unusable |= dict.fromkeys(twice, "several columns have this name")
    return [name for name in counts if name not in twice]


def _note_lacking(
    files: Sequence[TableFile], text: TextFormat, needed: Collection[str], seen: Seen
) -> None:
    """Notes columns that a file does not have, though others do; empty files have none."""
    named = {file.path: names for file in files if (names := file.columns(text))}
    for name in dict.fromkeys(name for names in named.values() for name in names):
        path = next((path for path, names in named.items() if name not in names), None)
        if path is not None:
            check_columns(path, named[path], [name] if name in needed else [])
            seen.unusable[name] = f"{path} does not have it; prepare needs it in every file"
