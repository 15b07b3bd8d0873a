"""What one task does with one split or one bucket: plain functions that know no engine.

Rows are numbered from 0 over all days. A stage transforms a range of rows into a directory of
split-binary files that were created at their final size, and every task writes its rows at their
place: what is written does not depend on how the work was cut.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dlrm.data import layout
from dlrm.data.transform import (
    BadValueError,
    Counts,
    FrequencyLimit,
    Transform,
    Transformed,
    count_values,
    fit_dictionary,
    frequent,
    merge_counts,
    parse_hexadecimal,
    save_dictionary,
)
from preproc.hashing import splitmix64
from preproc.raw_log import Block, LogFormat, Split, bad_value, read_blocks

_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class Target(NamedTuple):
    """Where a stage's rows go: `directory` gets the rows [first_row, last_row) of all days."""

    directory: str
    first_row: int
    last_row: int

    @property
    def rows(self) -> int:
        """How many rows that are."""
        return self.last_row - self.first_row


class Written(NamedTuple):
    """What a task, or a stage, has written."""

    rows: int = 0
    clicks: int = 0
    clamped: int = 0

    def __add__(self, other: "Written") -> "Written":  # type: ignore[override]
        return Written(*(a + b for a, b in zip(self, other, strict=True)))


# Dictionary: count in splits, merge in buckets of values, sort in columns.


def count_split(
    split: Split, log_format: LogFormat, buckets: int
) -> Iterator[tuple[int, list[Counts]]]:
    """Yields (bucket, counts of each categorical column's values in that bucket)."""
    parts: list[list[Counts]] = [[] for _ in range(log_format.num_categorical)]
    first = 1 + log_format.num_numerical
    for block in read_blocks(split, log_format):
        for i, counts in enumerate(parts):
            try:
                counts.append(count_values(parse_hexadecimal(block.columns[first - 1 + i])))
            except BadValueError as error:
                raise bad_value(block, error, first + i) from None
    columns = [merge_counts(counts) for counts in parts]
    owners = [_bucket_of_value(counts.keys, buckets) for counts in columns]
    for bucket in range(buckets):
        mine = [owner == bucket for owner in owners]
        yield bucket, [Counts(c.keys[m], c.counts[m]) for c, m in zip(columns, mine, strict=True)]


def _bucket_of_value(keys: np.ndarray, buckets: int) -> np.ndarray:
    spread = (keys.astype(np.uint64) * _HASH_FACTOR) >> np.uint64(32)
    return (spread * np.uint64(buckets)) >> np.uint64(32)


def merge_bucket(
    parts: Sequence[list[Counts]], limit: FrequencyLimit
) -> Iterator[tuple[int, Counts]]:
    """Yields (column, the bucket's values that are frequent enough), out of every split's part."""
    for column, counts in enumerate(zip(*parts, strict=True)):
        yield column, frequent(merge_counts(counts), limit.of(column))


def fit_column(parts: Sequence[Counts], column: int, directory: str) -> tuple[int, int]:
    """Writes a column's dictionary out of its buckets; returns the column and how many values."""
    dictionary = fit_dictionary(merge_counts(parts))
    save_dictionary(directory, column, dictionary)
    return column, len(dictionary)


# Transform.


def create_files(target: Target, transform: Transform) -> None:
    """Creates a split's files at their final size."""
    Path(target.directory).mkdir()
    for name, dtype in _files(transform).items():
        with open(Path(target.directory, name), "wb") as file:
            file.truncate(target.rows * dtype.itemsize)


def write_in_order(split: Split, log_format: LogFormat, transform: str, target: Target) -> Written:
    """Transforms the rows of a split that belong to a target, and writes them in file order."""
    fitted = load_transform(transform)
    written = Written()
    for first_row, labels, rows in _transform_split(split, log_format, fitted, target):
        write_rows(target, first_row - target.first_row, _by_file(labels, rows))
        written += Written(len(labels), int(np.count_nonzero(labels)), rows.clamped)
    return written


def shuffle_split(
    split: Split, log_format: LogFormat, transform: str, target: Target, seed: int, buckets: int
) -> Iterator[tuple[int, tuple[int, bytes]]]:
    """Yields (bucket, (values raised to 1, packed rows)): transformed rows by where they go.

    Rows are sorted by a hash of seed and row number, and a bucket is a range of hashes.
    """
    fitted = load_transform(transform)
    dtype, clamped = _packed_dtype(fitted), 0
    packed: list[np.ndarray] = [np.empty(0, dtype)]
    for first_row, labels, rows in _transform_split(split, log_format, fitted, target):
        records: np.ndarray = np.empty(len(labels), dtype)
        records["key"] = splitmix64(seed, np.arange(first_row, first_row + len(labels)))
        for name, column in _by_file(labels, rows).items():
            records[name] = column
        packed.append(records)
        clamped += rows.clamped
    records = np.concatenate(packed)
    owners = bucket_of_row(records["key"], buckets)
    order = np.argsort(owners, kind="stable")
    edges = np.searchsorted(owners[order], np.arange(buckets + 1))
    records = records[order]
    for bucket in range(buckets):
        yield bucket, (clamped, records[edges[bucket] : edges[bucket + 1]].tobytes())
        clamped = 0


def write_bucket(
    parts: Iterable[tuple[int, bytes]], transform: str, target: Target, first_row: int
) -> Written:
    """Sorts the rows of a bucket by their hash and writes them from `first_row` of the target."""
    parts = list(parts)
    fitted = load_transform(transform)
    records = np.frombuffer(b"".join(rows for _, rows in parts), _packed_dtype(fitted))
    records = records[np.argsort(records["key"])]
    columns = {name: records[name] for name in _files(fitted)}
    write_rows(target, first_row, columns)
    clicks = int(np.count_nonzero(columns[layout.LABEL_FILE]))
    return Written(len(records), clicks, sum(clamped for clamped, _ in parts))


def bucket_sizes(split: Split, target: Target, seed: int, buckets: int) -> np.ndarray:
    """Counts the rows of a split in each bucket; no line is read, only row numbers are hashed."""
    first = max(split.first_row, target.first_row)
    last = min(split.first_row + split.rows, target.last_row)
    keys = splitmix64(seed, np.arange(first, max(first, last)))
    return np.bincount(bucket_of_row(keys, buckets), minlength=buckets)


def bucket_of_row(keys: np.ndarray, buckets: int) -> np.ndarray:
    """Cuts the range of 64-bit hashes into buckets that ascend with the hash."""
    return (((keys >> np.uint64(32)) * np.uint64(buckets)) >> np.uint64(32)).astype(np.int64)


def write_rows(target: Target, first_row: int, columns: dict[str, np.ndarray]) -> None:
    """Writes rows into a split's files, from `first_row` of these on; `columns` is by file name."""
    for name, column in columns.items():
        width = column.dtype.itemsize * int(np.prod(column.shape[1:]))
        with open(Path(target.directory, name), "r+b") as file:
            file.seek(first_row * width)
            file.write(np.ascontiguousarray(column).data)


def _by_file(labels: np.ndarray, rows: Transformed) -> dict[str, np.ndarray]:
    """File name -> its rows."""
    columns = {layout.LABEL_FILE: labels}
    if rows.numerical.shape[1]:
        columns[layout.NUMERICAL_FILE] = rows.numerical
    return columns | {layout.categorical_name(i): ids for i, ids in enumerate(rows.ids)}


def load_transform(directory: str) -> Transform:
    """Loads a fitted transform, once a process as long as its files stay the same."""
    status = Path(directory, "transform.json").stat()
    return _load_transform(directory, status.st_ino, status.st_mtime_ns)


@lru_cache(maxsize=1)
def _load_transform(directory: str, inode: int, changed: int) -> Transform:
    return Transform.load(directory)


def _transform_split(
    split: Split, log_format: LogFormat, transform: Transform, target: Target
) -> Iterator[tuple[int, np.ndarray, Transformed]]:
    """Yields (row number, labels, inputs) of the blocks of a split, as far as the target goes."""
    for block in read_blocks(split, log_format):
        first_row = split.first_row + block.first_row
        begin = max(target.first_row - first_row, 0)
        end = min(target.last_row - first_row, len(block.labels))
        if begin < end:
            block = _slice(block, begin, end)
            try:
                rows = transform(block.columns)
            except BadValueError as error:
                raise bad_value(block, error, 1 + (error.column or 0)) from None
            yield first_row + begin, block.labels, rows


def _slice(block: Block, begin: int, end: int) -> Block:
    if (begin, end) == (0, len(block.labels)):
        return block
    columns = [
        c._replace(starts=c.starts[begin:end], ends=c.ends[begin:end]) for c in block.columns
    ]
    return block._replace(labels=block.labels[begin:end], columns=columns)


def _files(transform: Transform) -> dict[str, np.dtype]:
    return layout.row_dtypes(transform.num_numerical, transform.cardinalities)


def _packed_dtype(transform: Transform) -> np.dtype:
    """A row while it is shuffled: its hash, and what will be written by file name."""
    return np.dtype([("key", np.uint64), *_files(transform).items()])
