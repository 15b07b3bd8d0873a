"""CSV of NVIDIA's feature specifications, whose columns are in several files side by side."""

from collections.abc import Collection, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dlrm.data.sources.csv_rows import Reading, read_csv
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.kinds.delimited import Csv
from dlrm.data.tables.kinds.text import Rows


class Chunk(NamedTuple):
    """Some columns of all rows: their names, and CSV files without headers, one after another."""

    features: tuple[str, ...]
    files: tuple[str, ...]


class CsvChunks(Csv):
    """The chunks of a split; a row consists of the rows of all chunks with its number.

    Args:
        chunks: chunks, whose files are named relative to it.
    """

    name, title = "csv chunks", "CSV of a feature specification"
    delimited, line_type, in_pieces = False, pa.string(), False

    def __init__(self, folder: Path, chunks: Sequence[Chunk]) -> None:
        self._folder, self._chunks = folder, chunks
        self.files = [folder / file for chunk in chunks for file in chunk.files]

    def read(self, path: Path, reading: Reading) -> Iterator[Rows]:
        """Yields the rows; `lines` are texts with the file and line of each chunk."""
        names = [name for chunk in self._chunks for name in chunk.features]
        text, problems = reading.text, reading.problems
        wanted, wrong = reading.columns or names, None if problems is None else dict[str, str]()
        parts = [self._read_chunk(chunk, text, wanted, wrong) for chunk in self._chunks]
        tables = list(map(next, parts, repeat(None)))
        done = 0
        while all(table is not None for table in tables):
            there = [table for table in tables if table is not None]
            rows = min(table.num_rows for table in there)
            of_chunks = (table.column(0).slice(0, rows).to_pylist() for table in there)
            lines = _joined(list(zip(*of_chunks, strict=True)), wrong, problems)
            columns = [
                (name, table.column(name).slice(0, rows))
                for table in there
                for name in table.schema.names[1:]
            ]
            yield names, np.array(lines, object), columns
            tables = [
                table.slice(rows) if table.num_rows > rows else next(part, None)
                for table, part in zip(there, parts, strict=True)
            ]
            done += rows
        totals = [
            done + (0 if table is None else table.num_rows) + sum(more.num_rows for more in part)
            for table, part in zip(tables, parts, strict=True)
        ]
        for chunk, total in zip(self._chunks, totals, strict=True):
            if total != totals[0]:
                raise ValueError(
                    f"{self._folder / chunk.files[0]}: expected {totals[0]} rows, as the files of "
                    f"the features before it have, got {total}"
                )

    def _read_chunk(
        self,
        chunk: Chunk,
        text: TextFormat,
        wanted: Collection[str],
        problems: dict[str, str] | None,
    ) -> Iterator[pa.RecordBatch]:
        """Yields the wanted columns of a chunk, after one with files and lines."""
        chunk_format = TextFormat(chunk.features, False, ",", chunk_rows=text.chunk_rows)
        columns = [name for name in chunk.features if name in wanted]
        for file in chunk.files:
            wrong: dict[int, str] | None = None if problems is None else {}
            own = Reading(chunk_format, columns=columns, problems=wrong)
            for names, lines, cells in read_csv(self._folder / file, own):
                where = {line: f"{file}, line {line}" for line in lines.tolist()}
                if problems is not None and wrong:
                    there = [line for line in wrong if line in where]
                    problems |= {where[line]: wrong.pop(line) for line in there}
                arrays = [pa.array(list(where.values()), pa.string())]
                arrays += [cells[names.index(name)] for name in columns]
                yield pa.RecordBatch.from_arrays(arrays, ["", *columns])


def _joined(lines: list[tuple[str, ...]], wrong: dict[str, str] | None, problems: Any) -> list[str]:
    """Returns one text for the lines of each row, with which it adds their problems."""
    joined = [" and ".join(of_row) for of_row in lines]
    if wrong:
        for of_row, line in zip(lines, joined, strict=True):
            for place in filter(wrong.__contains__, of_row):
                problems[line] = wrong.pop(place)
    return joined
