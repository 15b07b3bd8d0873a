"""Rows of files of any kind for a draft, and what such files have besides."""

from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from dlrm.data.sources.column_names import check_columns
from dlrm.data.sources.csv_rows import Reading, Spans
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.kinds.cells import Cells
from dlrm.data.tables.kinds.kind import TableFile
from dlrm.data.tables.kinds.text import Text

_MOST_SKIPPED = 0.01  # share of a file's lines; where more are no rows, the format is wrong


@dataclass
class Seen:
    """Observations from reading the files of a draft, besides the values.

    Attributes:
        nested: column of JSON -> its first value that is a map or a list of them.
        mixed: columns of JSON with values in some rows and lists in others.
        twice: columns whose name occurs several times, of which none is read.
        lacking: column -> a file that does not have it.
        spans: file -> rows that quoted cells extend over several lines.
        skipped: file -> number of its rows that are no rows, and the first of them.
    """

    nested: dict[str, str] = field(default_factory=dict)
    mixed: dict[str, None] = field(default_factory=dict)
    twice: dict[str, None] = field(default_factory=dict)
    lacking: dict[str, Path] = field(default_factory=dict)
    spans: dict[Path, Spans] = field(default_factory=dict)
    skipped: dict[Path, tuple[int, str]] = field(default_factory=dict)

    @property
    def left_out(self) -> dict[str, str]:
        """Returns the columns that no field can use, and why."""
        reasons = {name: f"nested, such as {value}" for name, value in self.nested.items()}
        reasons |= dict.fromkeys(self.mixed, "values in some rows, lists in others")
        reasons |= dict.fromkeys(self.twice, "several columns have this name")
        for name, path in self.lacking.items():
            reasons[name] = f"{path} does not have it; prepare needs it in every file"
        return reasons


def batches_of(
    files: Sequence[TableFile],
    text: TextFormat,
    needed: Collection[str] = (),
    seen: Seen | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of files with all their columns, those of folders included.

    Lines of text that are no rows are skipped, unless they are more than a hundredth of a file's.

    Args:
        files, text: files of one kind, and the format of CSV.
        needed: columns that every CSV file must have.
        seen: receives what is not in the batches.

    Raises:
        ValueError: a file is damaged, or lacks a column; the message names it.
    """
    seen = seen or Seen()
    if len(files) > 1:
        _note_lacking(files, text, needed, seen)
    for file in files:
        kind, partition = file.kind, file.partition
        if not isinstance(kind, Text):
            for batch, _ in kind.batches(file, text, _once(file.columns(text), seen)):
                yield batch
            continue
        spans = seen.spans.setdefault(file.path, Spans())
        problems: dict[int, str] = {}
        reading = Reading(
            text, spans=spans, nested=seen.nested, mixed=seen.mixed, problems=problems
        )
        rows = skipped = 0
        for names, lines, read in kind.read(file.path, reading, Cells(), set()):
            wanted = [name for name in needed if name not in partition]
            kind.check_names(file.path, names, text, wanted)
            once = [name for name in _once(names, seen) if name not in partition]
            arrays = {name: column for name, column in read.items() if name in once}
            arrays |= {
                name: pa.array([value] * len(lines), pa.string())
                for name, value in partition.items()
            }
            batch = pa.record_batch(list(arrays.values()), names=list(arrays))
            rows += len(lines)
            if bad := [line for line in lines.tolist() if line in problems] if problems else []:
                skipped += len(bad)
                if skipped > _MOST_SKIPPED * rows:
                    reading = reading._replace(problems=None)
                    deque(kind.read(file.path, reading, Cells(), set()), 0)  # raises
                problem = problems[bad[0]].partition("\t")[0]  # without the row
                first = f"line {bad[0]}, {problem}"
                seen.skipped[file.path] = skipped, seen.skipped.get(file.path, (0, first))[1]
                batch = batch.filter(pa.array(~np.isin(lines, bad)))
            yield batch


def _once(names: Sequence[str], seen: Seen) -> list[str]:
    """Returns the names that occur once, and notes the others."""
    counts = Counter(names)
    seen.twice |= {name: None for name, count in counts.items() if count > 1}
    return [name for name, count in counts.items() if count == 1]


def _note_lacking(
    files: Sequence[TableFile], text: TextFormat, needed: Collection[str], seen: Seen
) -> None:
    """Notes columns that a file does not have, though others do."""
    if files[0].kind.may_lack_columns:
        return
    every = {file.path: file.columns(text) for file in files}
    known = dict.fromkeys(name for names in every.values() for name in names)
    for path, names in every.items():
        if not names:  # an empty file
            continue
        for name in known:
            if name in names or name in seen.lacking:
                continue
            if name in needed:
                check_columns(path, names, [name])
            seen.lacking[name] = path
