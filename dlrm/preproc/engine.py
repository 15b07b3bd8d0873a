"""The interface of engines, which sum and sort what functions over parts of the input return."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

FACTS = -1  # the column, or split, of facts about a part; its key is the part's number
# A value of a column and its number of occurrences; texts also have their bytes.
COUNTS = pa.schema(
    [
        ("column", pa.int32()),
        ("key", pa.uint64()),
        ("text", pa.large_binary()),
        ("n", pa.int64()),
    ]
)
ROWS = pa.schema([("split", pa.int32()), ("key", pa.uint64()), ("row", pa.large_binary())])


def facts_batch(schema: pa.Schema, number: int, facts: Any) -> pa.RecordBatch:
    """Returns facts about a part, JSON or bytes, in the form of counts or rows."""
    content = facts if isinstance(facts, bytes) else json.dumps(facts).encode()
    values = [[FACTS], [number], [content], [1]]
    arrays = [pa.array(value, field.type) for value, field in zip(values, schema, strict=False)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def slices(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yields consecutive rows of one column or split, with its number."""
    for batch in batches:
        numbers = batch.column(0).to_numpy()
        edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        for begin, end in zip(edges, edges[1:], strict=False):
            if begin < end:
                yield int(numbers[begin]), batch.slice(begin, end - begin)


class Span(NamedTuple):
    """The rows of a split before they are sorted.

    Attributes:
        size: their bytes.
        first, end: least key, and the one after the greatest.
    """

    size: int
    first: int
    end: int


class Engine(Protocol):
    """Sums and sorts, with as much memory as it is allowed, what functions make of parts.

    A function may be called more than once with a part. All methods raise TaskError if it raises a
    ValueError or OSError, and EngineError if it could not be run.
    """

    @property
    def is_distributed(self) -> bool:
        """Returns whether rows are written in pieces, by many processes."""

    @property
    def cores(self) -> int:
        """Returns the number of parts that are read at a time."""

    def map(self, task: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        """Yields the results of a function for some items, in their order."""

    def counts(
        self,
        parts: Sequence[Any],
        partial_counts: Callable[[Any], Iterator[pa.RecordBatch]],
        limits: Sequence[int],
        has_texts: bool,
        on_part: Callable[[int], None],
    ) -> Iterator[pa.RecordBatch]:
        """Yields the sums of the counts of all parts, by column, then descending, then by value.

        Args:
            parts: parts of the input.
            partial_counts: yields batches of `COUNTS` for a part.
            limits: for each column, the least sum of a value that is kept. The last entry of a
                column has in place of a key the number of other values, and 0 occurrences.
            has_texts: whether values of a column are texts, whose order is that of their bytes.
            on_part: called with the number of a part that has been read, unless the engine has
                pages of its own.
        """

    def sorted_rows(
        self,
        parts: Sequence[Any],
        packed_rows: Callable[[Any], Iterator[pa.RecordBatch]],
        spans: Sequence[Span],
        write: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
        on_part: Callable[[int], None],
    ) -> Iterator[pa.RecordBatch]:
        """Yields what a function makes of the rows of all parts, by split and key.

        Args:
            packed_rows: yields batches of `ROWS` for a part.
            spans: the rows of each split.
            write: called with all batches or, if the engine is distributed, with those of some
                consecutive keys of a split, or of facts; returns other batches of `ROWS`.
        """

    def writer(self, job: Any, layouts: Sequence[Any], work: Any) -> Any:
        """Returns what writes the rows of a `PackJob` in a `WorkFolder`: `Files` or `Pieces`."""
