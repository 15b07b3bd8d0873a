"""Tables as a source of rows, by a schema."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dlrm.data.schema.schema import Schema
from dlrm.data.sources.row_error import RowError
from dlrm.data.tables.formats.text import PROBLEM
from dlrm.data.tables.parts import Part
from dlrm.data.transform.row_reader import RowReader
from dlrm.data.transform.stored import facts_file
from dlrm.data.transform.transform import Transform
from dlrm.preproc.source import Read, Rejected


@dataclass(frozen=True)
class TableSource:
    """Reads parts of files of Parquet and other columnar formats.

    Attributes:
        schema: the meaning of the columns.
        others: columns to read besides, which divide the rows.
        known: directories of the parent's transform and of its lookups, whose values these rows may
            have in other types; None without a parent.
        fitted: directory of the transform that is fitted to these rows, for later readings.
    """

    schema: Schema
    others: Sequence[str] = ()
    known: tuple[str, str] | None = None
    fitted: str | None = None

    def read(
        self, part: Part, rejected: list[Rejected] | None, facts: dict[str, Any] | None = None
    ) -> Iterator[Read]:
        """Yields the rows of a part; see `Source`."""
        part.check()
        earlier = None if self.known is None else _loaded(*self.known)
        own = None
        if facts is None and self.fitted is not None:
            own = _fitted(self.fitted, facts_file(Path(self.fitted)).stat().st_mtime_ns)
        only_numbers = None if own is None else own.only_numbers
        reader = RowReader(
            self.schema, fitted=earlier, texts=facts is not None, only_numbers=only_numbers
        )
        columns = [*dict.fromkeys([*reader.columns, *self.others]), PROBLEM]
        first_row = part.first_row
        for batch in part.read(columns, facts):
            try:
                rows, bad = reader.read(batch)
            except ValueError as error:
                raise ValueError(f"{part.source}: {error}") from None
            numbers = np.arange(first_row, first_row + batch.num_rows)
            yield Read(rows, numbers, batch, (*_wrong(batch), *bad))
            first_row += batch.num_rows
        if facts is not None:
            facts |= {"crc": part.checksum(), "types": [sorted(types) for types in reader.types]}


@lru_cache(maxsize=1)
def _loaded(directory: str, lookups: str) -> Transform:
    transform = Transform.load(directory)
    transform.use_lookups(lookups)
    return transform


@lru_cache(maxsize=1)
def _fitted(directory: str, changed: int) -> Transform:
    """Returns a transform, which a process loads once while its files are unchanged."""
    return Transform.load(directory)


def _wrong(batch: pa.RecordBatch) -> list[RowError]:
    """Returns the rows of text that could not be read at all; other copies have none."""
    named = PROBLEM in batch.schema.names and batch.column(PROBLEM).null_count < batch.num_rows
    problems = enumerate(batch.column(PROBLEM).to_pylist() if named else ())
    return [RowError(row, one.partition("\t")[0]) for row, one in problems if one is not None]
