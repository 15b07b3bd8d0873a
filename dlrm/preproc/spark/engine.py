"""Sums and sorts with Spark what its executors make of parts.

Our functions run in `mapInArrow`, which sessions with a JVM and those of Spark Connect have. To the
driver come facts, and the values that get ids, as cells that have a batch each.
"""

import os
import pickle
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import groupby
from operator import itemgetter
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from dlrm.preproc.engine import COUNTS, FACTS, ROWS, Span, slices
from dlrm.preproc.packing import Layout, PackJob
from dlrm.preproc.spark.executors import error_of, sent
from dlrm.preproc.spark.pieces import Pieces
from dlrm.preproc.work_folder import WorkFolder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dlrm.preproc.spark.stored_files import StoredFiles

_ROWS_OF_CORES = 1 << 16  # more than there are cores
_PARTITIONS = 3  # for each core
_BUCKET_BYTES = 48 << 20  # of rows that are written at once
_SIGN = np.uint64(1 << 63)  # flipped, as Spark has only signed numbers
_CELL = "cell binary"
_COUNTS = "column int, key long, text binary, n long"
_ROWS = "bucket int, key long, row binary"
# Texts are compared once they are few, as Spark sorts to find the least of them. The last grouping
# leaves of the rare values of a column only their number, as a key whose sign is flipped.
_SUMS = """
    SELECT column, if(n > 0, key, others + (-9223372036854775807L - 1L)) AS key, text, n FROM (
        SELECT column, key, text, n, count(*) AS others FROM (
            SELECT column, if(n < least, NULL, key) AS key, if(n < least, 0L, n) AS n, if(
                    text <> other, raise_error(concat('hash of ', hex(text), ' and ', hex(other))),
                    if(n < least, NULL, text)
                ) AS text
            FROM (
                SELECT column, key, min(text) AS text, max(text) AS other, sum(n) AS n,
                    element_at(array({limits}), column + 2) AS least
                FROM (
                    SELECT column, key, text, sum(n) AS n FROM {given} GROUP BY column, key, text
                ) GROUP BY column, key
            )
        ) GROUP BY column, key, text, n
    )
"""
Batches = Iterable[pa.RecordBatch]


class SparkEngine:
    """An engine of a session of Spark; see `dlrm.preproc.engine.Engine`.

    Args:
        session: a session, also of Spark Connect.
        files: the files of executors that have no folder in common with this machine.
    """

    is_distributed = True

    def __init__(self, session: "SparkSession", files: "StoredFiles | None" = None) -> None:
        self.session, self.files = session, files
        os.umask(mask := os.umask(0o077))
        self._mask = mask
        # Spark divides rows by cores; the first tasks also tell whether executors have the package.
        rows = session.range(_ROWS_OF_CORES)
        self.cores = len(self._cells_of_few(rows, _one_cell))

    def map(self, task: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        """Yields results in the order of their items; see `Engine`."""
        cells = self._cells_of_few(*self._over(items, partial(_result, task)))
        found = dict(map(pickle.loads, cells))
        self.adopt_new()
        yield from (found[number] for number in range(len(items)))

    def counts(
        self,
        parts: Sequence[Any],
        partial_counts: Callable[[Any], Iterator[pa.RecordBatch]],
        limits: Sequence[int],
        has_texts: bool,
        on_part: Callable[[int], None],
    ) -> Iterator[pa.RecordBatch]:
        """Yields the sums of counts; see `Engine`."""
        given = self._mapped(*self._over(parts, partial(_counted, partial_counts)), _COUNTS)
        # A part has each value once: nothing can be summed before the values come together.
        given = given.repartition(self._partitions, "column", "key")
        least = ", ".join(f"{n}L" for n in [1, *limits])
        kept = self.session.sql(_SUMS.format(limits=least, given="{given}"), given=given)
        order: list[Any] = ["column", kept.n.desc(), *["text"] * has_texts, "key"]
        ordered = kept.repartitionByRange(self._partitions, *order).sortWithinPartitions(*order)
        for batch in self.batches(ordered, iter):
            keys = batch.column(1).to_numpy().view(np.uint64) ^ _SIGN
            texts = batch.column(2).cast(pa.large_binary())
            yield pa.record_batch([batch.column(0), keys, texts, batch.column(3)], schema=COUNTS)

    def sorted_rows(
        self,
        parts: Sequence[Any],
        packed_rows: Callable[[Any], Iterator[pa.RecordBatch]],
        spans: Sequence[Span],
        write: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
        on_part: Callable[[int], None],
    ) -> Iterator[pa.RecordBatch]:
        """Yields what is made of rows in their order; see `Engine`."""
        buckets = _Buckets(spans, 4 * self._partitions)
        made = partial(_in_buckets, packed_rows, buckets)
        given = self._mapped(*self._over(parts, made), _ROWS)
        given = given.repartition(self._partitions, "bucket")
        ordered = given.sortWithinPartitions("bucket", "key")
        yield from self.batches(ordered, partial(_written, write, buckets))

    def writer(self, job: PackJob, layouts: Sequence[Layout], work: WorkFolder) -> Pieces:
        """Returns the pieces of a dataset; see `Engine`."""
        folder = self.files.data if self.files else work.folder("pieces")
        return Pieces(self, job, layouts, folder, work.output)

    def adopt_new(self) -> None:
        """Has the files on this machine that tasks have written."""
        if self.files is not None:
            self.files.adopt_new()

    def batches(
        self, frame: "DataFrame", task: Callable[[Batches], Iterable[pa.RecordBatch]]
    ) -> Iterator[pa.RecordBatch]:
        """Yields the batches that a function makes of the partitions of a data frame, in order."""
        made: Callable = partial(_cells, task)
        if self.files is not None:
            made = self.files.call(made)
        cells = self._mapped(frame, made, _CELL).persist()
        try:
            self._done(cells.count)  # all partitions at a time, unlike the iterator
            for (cell,) in cells.toLocalIterator():
                yield from pa.ipc.open_stream(bytes(cell))
        finally:
            with suppress(Exception):  # a signal to the whole group ends the JVM as well
                cells.unpersist()

    @property
    def _partitions(self) -> int:
        return _PARTITIONS * self.cores

    def _over(self, items: Sequence[Any], make: Callable) -> tuple["DataFrame", Callable]:
        """Returns a row for each item, in a partition of its own, and a function of these rows."""
        rows = self.session.range(0, len(items), 1, max(len(items), 1))
        if self.files is not None:
            make, items = self.files.call(make), [*map(self.files.pack, items)]
        return rows, partial(_each, make, items)

    def _mapped(self, frame: "DataFrame", task: Callable, columns: str) -> "DataFrame":
        return frame.mapInArrow(sent(task, self._mask), columns)

    def _cells_of_few(self, frame: "DataFrame", task: Callable) -> list[bytes]:
        return [bytes(cell) for (cell,) in self._done(self._mapped(frame, task, _CELL).collect)]

    def _done(self, action: Callable[[], Any]) -> Any:
        """Returns the result of a job, which a signal ends.

        A thread waits for Spark: a signal that interrupts pyspark in the main thread would leave an
        answer to be read by the next call.
        """
        tag, result = f"dlrm-{uuid.uuid4().hex}", Future[Any]()

        def run() -> None:
            try:
                self.session.addTag(tag)
                result.set_result(action())
            except BaseException as error:
                result.set_exception(error)

        thread = Thread(target=run, daemon=True)
        thread.start()
        try:
            error = result.exception()
        except BaseException:
            with suppress(Exception):  # a signal to the whole group ends the JVM as well
                self.session.interruptTag(tag)
            thread.join(10)
            raise
        if error is not None:
            raise error_of(error) from None
        return result.result()


class _Buckets:
    """Ranges of keys of each split, which have about the same bytes; one of facts, which is -1."""

    def __init__(self, spans: Sequence[Span], least: int) -> None:
        total, ranges, self.splits = sum(span.size for span in spans), [], list[int]()
        for split, span in enumerate(spans):
            number = max(span.size * least // max(total, 1), span.size // _BUCKET_BYTES + 1, 2)
            ranges.append((span.first, -(-(span.end - span.first) // number), len(self.splits)))
            self.splits += [split] * number
        ranges.append((0, (1 << 64) - 1, FACTS))
        self.splits.append(FACTS)
        first, width, bucket = zip(*ranges, strict=True)
        self._first, self._width = np.array(first, np.uint64), np.array(width, np.uint64)
        self._bucket = np.array(bucket, np.int32)

    def of(self, splits: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Returns the bucket of each key of a split."""
        within = (keys - self._first[splits]) // self._width[splits]
        return within.astype(np.int32) + self._bucket[splits]


def _each(make: Callable, items: Sequence[Any], batches: Batches) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for number in batch.column(0).to_pylist():
            yield from make(number, items[number])


def _cell(content: bytes) -> pa.RecordBatch:
    return pa.record_batch({"cell": pa.array([content], pa.binary())})


def _cells(task: Callable, batches: Batches) -> Iterator[pa.RecordBatch]:
    for batch in task(batches):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        yield _cell(sink.getvalue().to_pybytes())


def _one_cell(batches: Batches) -> Iterator[pa.RecordBatch]:
    for _ in batches:
        pass
    yield _cell(b"")


def _result(task: Callable, number: int, item: Any) -> Iterator[pa.RecordBatch]:
    yield _cell(pickle.dumps((number, task(item))))


def _counted(partial_counts: Callable, number: int, item: Any) -> Iterator[pa.RecordBatch]:
    """Yields the sums of a part's counts, of which each value then is one record."""
    counts = pa.Table.from_batches(partial_counts(item), COUNTS)
    sums = counts.group_by(["column", "key", "text"], use_threads=False).aggregate([("n", "sum")])
    for batch in sums.to_batches():
        keys = (batch["key"].to_numpy() ^ _SIGN).view(np.int64)
        columns = [batch["column"], keys, batch["text"], batch["n_sum"]]
        yield pa.record_batch(columns, COUNTS.names)


def _in_buckets(
    packed_rows: Callable, buckets: _Buckets, number: int, item: Any
) -> Iterator[pa.RecordBatch]:
    for batch in packed_rows(item):
        keys = batch.column(1).to_numpy()
        of_rows = buckets.of(batch.column(0).to_numpy(), keys)
        columns = [of_rows, (keys ^ _SIGN).view(np.int64), batch.column(2)]
        yield pa.record_batch(columns, ["bucket", "key", "row"])


def _written(write: Callable, buckets: _Buckets, batches: Batches) -> Iterator[pa.RecordBatch]:
    """Yields what is made of the rows of each bucket."""

    def rows(split: int, pieces: Iterable[tuple[int, pa.RecordBatch]]) -> Iterator[Any]:
        for _, piece in pieces:
            keys = piece.column(1).to_numpy().view(np.uint64) ^ _SIGN
            splits = np.full(len(piece), split, np.int32)
            content = piece.column(2).cast(pa.large_binary())
            yield pa.record_batch([splits, keys, content], schema=ROWS)

    for bucket, pieces in groupby(slices(batches), key=itemgetter(0)):
        yield from write(rows(buckets.splits[bucket], pieces))
