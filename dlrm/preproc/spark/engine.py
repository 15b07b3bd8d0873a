"""Sums and sorts with Spark what its executors make of parts.

Our functions run in `mapInArrow`, which sessions with a JVM and those of Spark Connect have. To the
driver come facts, and the values that get ids, packed into few cells.
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
from dlrm.preproc.spark.executors import LocalFiles, each, error_of, opened_task, sent

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ROWS_OF_CORES = 1 << 16  # more than there are cores
_PARTITIONS = 3  # for each core
_BUCKET_BYTES = 48 << 20  # of rows that are written at once
_CELL_BYTES = 4 << 20
_SIGN = np.uint64(1 << 63)  # flipped, as Spark has only signed numbers
_CELL = "cell binary"
_COUNTS = "column int, key long, text binary, n long"
_ROWS = "bucket int, key long, row binary"
Batches = Iterable[pa.RecordBatch]


class SparkEngine:
    """An engine of a session of Spark; see `dlrm.preproc.engine.Engine`.

    Args:
        session: a session, also of Spark Connect.
        files: gives executors their files: `LocalFiles` or `StoredFiles`.
    """

    is_distributed = True

    def __init__(self, session: "SparkSession", files: Any = None) -> None:
        self.session, self.files = session, files or LocalFiles()
        os.umask(mask := os.umask(0o077))
        self._mask = mask
        # Spark divides rows by cores; the first tasks also tell whether executors have the package.
        rows = session.range(_ROWS_OF_CORES)
        self.cores = sum(1 for _ in self.cells(rows, _one_cell, few=True))

    def map(self, task: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        """Yields results in the order of their items; see `Engine`."""
        cells = self.cells(*self._over(items, partial(_result, task)), few=True)
        found = dict(map(pickle.loads, cells))
        self.files.adopt_new()
        yield from (found[number] for number in range(len(items)))

    def counts(
        self,
        parts: Sequence[Any],
        partial_counts: Callable[[Any], Iterator[pa.RecordBatch]],
        limits: Sequence[int],
        has_texts: bool,
        on_part: Callable[[int], None],
    ) -> Iterator[pa.RecordBatch]:
        """Yields the sums of counts; see `Engine`.

        The last grouping leaves of the rare values of a column only their number.
        """
        given = self._mapped(*self._over(parts, partial(_counted, partial_counts)), _COUNTS)
        # A part has each value once: nothing can be summed before the values come together.
        given = given.repartition(self._partitions, "column", "key")
        summed = given.groupBy("column", "key", "text").agg({"n": "sum"})
        # Texts are compared once they are few, as Spark sorts to find the least of them.
        summed = summed.selectExpr("column", "key", "text", "text AS other", "`sum(n)` AS n")
        summed = summed.groupBy("column", "key").agg({"text": "min", "other": "max", "n": "sum"})
        names = "`min(text)` AS text", "`max(other)` AS other", "`sum(n)` AS n"
        summed = summed.selectExpr("column", "key", *names)
        least = f"element_at(array({', '.join(f'{n}L' for n in [1, *limits])}), column + 2)"
        two = "raise_error(concat('hash of ', hex(text), ' and ', hex(other)))"
        folded = summed.selectExpr(
            "column",
            f"if(n < {least}, NULL, key) AS key",
            f"if(text <> other, {two}, if(n < {least}, NULL, text)) AS text",
            f"if(n < {least}, 0L, n) AS n",
        )
        folded = folded.groupBy("column", "key", "text", "n").count()
        number = "`count` + (-9223372036854775807L - 1L)"
        kept = folded.selectExpr("column", f"if(n > 0, key, {number}) AS key", "text", "n")
        order: list[Any] = ["column", kept.n.desc(), *["text"] * has_texts, "key"]
        ordered = kept.repartitionByRange(self._partitions, *order).sortWithinPartitions(*order)
        for cell in self.cells(ordered, packed):
            for batch in pa.ipc.open_stream(cell):
                keys = batch.column(1).to_numpy().view(np.uint64) ^ _SIGN
                texts = batch.column(2).cast(pa.large_binary())
                yield _batch([batch.column(0), keys, texts, batch.column(3)], COUNTS)

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
        task = self.opened(partial(_written, write, buckets))
        for cell in self.cells(ordered, task):
            yield from pa.ipc.open_stream(cell)

    def opened(self, task: Callable) -> Callable:
        """Returns a task of batches that has its files."""
        return partial(opened_task, self.files.opened, *self.files.pack(task))

    @property
    def _partitions(self) -> int:
        return _PARTITIONS * self.cores

    def _over(self, items: Sequence[Any], make: Callable) -> tuple["DataFrame", Callable]:
        """Returns a row for each item, in a partition of its own, and a function of these rows."""
        rows = self.session.range(0, len(items), 1, max(len(items), 1))
        content, inputs = self.files.pack(make)
        packed = [self.files.pack(item) for item in items]
        return rows, partial(each, self.files.opened, content, inputs, packed)

    def _mapped(self, frame: "DataFrame", task: Callable, columns: str) -> "DataFrame":
        return frame.mapInArrow(sent(task, self._mask), columns)

    def cells(
        self,
        frame: "DataFrame",
        task: Callable[[Batches], Iterator[pa.RecordBatch]],
        few: bool = False,
    ) -> Iterator[bytes]:
        """Yields the cells that a function makes of the partitions of a data frame, in order.

        Args:
            few: whether memory holds all cells.
        """
        mapped = self._mapped(frame, task, _CELL)
        if few:
            yield from (bytes(cell) for (cell,) in self._done(mapped.collect))
            return
        mapped.persist()
        try:
            self._done(mapped.count)  # all partitions at a time, unlike the iterator
            yield from (bytes(cell) for (cell,) in mapped.toLocalIterator())
        finally:
            with suppress(Exception):  # a signal to the whole group ends the JVM as well
                mapped.unpersist()

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
            if (error := result.exception()) is not None:
                raise error_of(error) from None
            return result.result()
        finally:
            if not result.done():
                with suppress(Exception):  # a signal to the whole group ends the JVM as well
                    self.session.interruptTag(tag)
                thread.join(10)


class _Buckets:
    """Ranges of keys of each split, which have about the same bytes."""

    def __init__(self, spans: Sequence[Span], least: int) -> None:
        total, self.splits = sum(span.size for span in spans), list[int]()
        self._first, self._places, self._widths = list[int](), list[int](), list[int]()
        for split, span in enumerate(spans):
            share = span.size * least // max(total, 1)
            number = max(share, -(-span.size // _BUCKET_BYTES), 1)
            self._places.append(len(self.splits))
            self._first.append(span.first)
            self._widths.append(-(-(span.end - span.first) // number))
            self.splits += [split] * number

    def of(self, split: int, keys: np.ndarray) -> np.ndarray:
        """Returns the bucket of each key of a split; that of facts is -1."""
        if split == FACTS:
            return np.full(len(keys), FACTS, np.int32)
        first, width = self._first[split], self._widths[split]
        if width >= 1 << 64:
            return np.full(len(keys), self._places[split], np.int32)
        found = (keys - np.uint64(first)) // np.uint64(width)
        return (found + np.uint64(self._places[split])).astype(np.int32)


def _batch(arrays: Sequence[Any], schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([*map(pa.array, arrays)], schema=schema)


def cells_of(contents: Iterable[bytes]) -> Iterator[pa.RecordBatch]:
    for content in contents:
        yield pa.record_batch({"cell": pa.array([content], pa.binary())})


def packed(batches: Batches) -> Iterator[pa.RecordBatch]:
    """Packs batches into cells."""

    def contents() -> Iterator[bytes]:
        held, size = list[pa.RecordBatch](), 0
        for batch in batches:
            held.append(batch)
            size += batch.nbytes
            if size >= _CELL_BYTES:
                yield _stream(held)
                held, size = [], 0
        if held:
            yield _stream(held)

    yield from cells_of(contents())


def _stream(batches: Sequence[pa.RecordBatch]) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def _one_cell(batches: Batches) -> Iterator[pa.RecordBatch]:
    for _ in batches:
        pass
    yield from cells_of([b""])


def _result(task: Callable, number: int, item: Any) -> Iterator[pa.RecordBatch]:
    yield from cells_of([pickle.dumps((number, task(item)))])


def _counted(partial_counts: Callable, number: int, item: Any) -> Iterator[pa.RecordBatch]:
    for batch in partial_counts(item):
        keys = (batch.column(1).to_numpy() ^ _SIGN).view(np.int64)
        texts = batch.column(2).cast(pa.binary())
        yield pa.record_batch(
            {"column": batch.column(0), "key": keys, "text": texts, "n": batch.column(3)}
        )


def _in_buckets(
    packed_rows: Callable, buckets: _Buckets, number: int, item: Any
) -> Iterator[pa.RecordBatch]:
    for batch in packed_rows(item):
        for split, rows in slices([batch]):
            keys = rows.column(1).to_numpy()
            of_rows, ordered = buckets.of(split, keys), (keys ^ _SIGN).view(np.int64)
            packed = rows.column(2).cast(pa.binary())
            yield pa.record_batch({"bucket": of_rows, "key": ordered, "row": packed})


def _written(write: Callable, buckets: _Buckets, batches: Batches) -> Iterator[pa.RecordBatch]:
    """Writes the rows of each bucket; returns cells of what is made of them."""

    def rows(bucket: int, pieces: Iterable[tuple[int, pa.RecordBatch]]) -> Iterator[Any]:
        split = FACTS if bucket == FACTS else buckets.splits[bucket]
        for _, piece in pieces:
            keys = piece.column(1).to_numpy().view(np.uint64) ^ _SIGN
            splits = np.full(len(piece), split, np.int32)
            yield _batch([splits, keys, piece.column(2).cast(pa.large_binary())], ROWS)

    for bucket, pieces in groupby(slices(batches), key=itemgetter(0)):
        yield from packed(write(rows(bucket, pieces)))
