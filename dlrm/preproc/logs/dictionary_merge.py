"""Tasks that fit the dictionaries: count in splits, merge in buckets of values, sort in columns.

No task holds more than its split, its bucket or, of a column, `_SORTED_AT_ONCE` values: what is
larger lies in files that are mapped.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.sources.log_lines import LogFormat
from dlrm.data.transform.dictionaries import (
    Counts,
    FrequencyLimit,
    count_values,
    dictionary_path,
    frequent,
    merge_counts,
    open_dictionary,
    reserve,
)
from dlrm.data.transform.lookup import IdLookup, lookup_directory, spread
from dlrm.data.transform.transform import Transform
from dlrm.files import staged_file
from dlrm.preproc.logs.raw_log import Rejected, Split, read_blocks
from dlrm.preproc.logs.shuffle_files import read_bucket, write_buckets

_SORTED_AT_ONCE = 1 << 22


class CountJob(NamedTuple):
    """What `count_split` needs besides its split."""

    log_format: LogFormat
    folder: str  # for the counts
    buckets: int
    days: tuple[int, int]  # whose values get ids, inclusive
    quarantine: bool


def count_split(item: tuple[int, Split], job: CountJob) -> dict[str, Any]:
    """Reads a split once: its rows, the lines that cannot be read, how often each value occurs.

    Every field is parsed here, so that no later stage meets a line that cannot be read.
    """
    number, split = item
    rejected: list[Rejected] | None = [] if job.quarantine else None
    counted = job.days[0] <= split.day <= job.days[1]
    parts: list[list[Counts]] = [[] for _ in range(job.log_format.num_categorical)]
    rows = 0
    for block in read_blocks(split, job.log_format, rejected):
        rows += len(block.lines.labels)
        if counted:
            for counts, numbers in zip(parts, block.lines.hashes, strict=True):
                counts.append(count_values(numbers))
    if counted:
        columns = [merge_counts(counts) for counts in parts]
        _write_counts(Path(job.folder, str(number)), columns, job.buckets)
    return {"rows": rows, "rejected": rejected or []}


def _write_counts(path: Path, columns: list[Counts], buckets: int) -> None:
    owners = [bucket_of(spread(column.keys), buckets) for column in columns]
    contents, counts = [], np.zeros((buckets, len(columns), 2), np.int64)
    for bucket in range(buckets):
        pieces = []
        for i, (column, owner) in enumerate(zip(columns, owners, strict=True)):
            mine = owner == bucket
            keys, occurrences = column.keys[mine], column.counts[mine].astype(np.uint32)
            counts[bucket, i] = len(keys), keys.itemsize
            pieces += [keys.tobytes(), occurrences.tobytes()]
        contents.append(b"".join(pieces))
    write_buckets(path, contents, counts)


def bucket_of(hashes: np.ndarray, buckets: int) -> np.ndarray:
    """Cuts the range of 64-bit hashes into buckets that ascend with the hash."""
    return (((hashes >> np.uint64(32)) * np.uint64(buckets)) >> np.uint64(32)).astype(np.int64)


def merge_bucket(
    bucket: int, sources: Sequence[str], limit: FrequencyLimit, folder: str
) -> dict[str, Any]:
    """Adds up a bucket's counts of all splits, and keeps the values that are frequent enough."""
    parts = [_read_counts(*entry) for entry in read_bucket([Path(s) for s in sources], bucket)]
    distinct, kept, occurrences = [], [], []
    with staged_file(Path(folder, str(bucket))) as partial, open(partial, "wb") as file:
        for column, counts in enumerate(zip(*parts, strict=True)):
            merged = merge_counts(counts)
            enough = frequent(merged, limit.of(column))
            distinct.append(len(merged.keys))
            kept.append(len(enough.keys))
            occurrences.append([int(merged.counts.sum()), int(enough.counts.sum())])
            order = np.argsort(spread(enough.keys))
            file.write(enough.keys[order].astype(np.uint64).data)
            file.write(enough.counts[order].astype(np.int64).data)
    return {"distinct": distinct, "kept": kept, "occurrences": occurrences}


def _read_counts(contents: bytes, counts: np.ndarray) -> list[Counts]:
    columns, place = [], 0
    for entries, width in counts.tolist():
        keys = np.frombuffer(contents, f"u{width}" if width else "u4", entries, place)
        place += entries * width
        columns.append(Counts(keys, np.frombuffer(contents, np.uint32, entries, place)))
        place += 4 * entries
    return columns


class FitJob(NamedTuple):
    """What `fit_columns` needs besides its columns."""

    merged: str  # folder of what `merge_bucket` wrote
    kept: list[list[int]]  # by bucket and column
    transform: str
    lookups: str


def fit_columns(columns: Sequence[int], job: FitJob) -> dict[str, Any]:
    """Writes dictionaries and lookups of columns; returns how many values each has."""
    return {str(column): _fit_column(column, job) for column in columns}


def _fit_column(column: int, job: FitJob) -> int:
    """Writes a column's dictionary, by descending count and then number, and its lookup.

    The buckets come in the order of their hashes, which is that of the lookup.
    """
    final = [*IdLookup.paths(job.lookups, column), dictionary_path(job.transform, column)]
    with ExitStack() as stack:
        hashes, ids, directory, dictionary = (
            stack.enter_context(staged_file(path)) for path in final
        )
        keys, counts = (hashes.with_name(hashes.name + end) for end in (".keys", ".counts"))
        with open(hashes, "wb") as file1, open(keys, "wb") as file2, open(counts, "wb") as file3:
            for values, occurrences in _merged(column, job):
                file1.write(spread(values).data)
                file2.write(values.data)
                file3.write(occurrences.data)
        size = keys.stat().st_size // 8
        directory.write_bytes(lookup_directory(_mapped(hashes, np.uint64, size)).data)
        _number(
            _mapped(keys, np.uint64, size),
            _mapped(counts, np.int64, size),
            dictionary,
            _mapped(ids, layout.id_dtype(size + 1), size, "w+"),
        )
        keys.unlink()
        counts.unlink()
    return size


def _number(keys: np.ndarray, counts: np.ndarray, path: Path, ids: np.ndarray) -> None:
    """Writes the dictionary, the keys in the order of their ids, and fills in the ids."""
    largest = max((int(part.max()) for part in _parts(keys)), default=0)
    dtype = np.dtype(np.uint32 if largest <= np.iinfo(np.uint32).max else np.uint64)
    dictionary = open_dictionary(path, dtype, len(keys))
    done = 0
    for places in _by_count_and_key(keys, counts):
        dictionary[done : done + len(places)] = keys[places]
        ids[places] = np.arange(done + 1, done + len(places) + 1)
        done += len(places)
    assert done == len(keys)


def _merged(column: int, job: FitJob) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for bucket, kept in enumerate(job.kept):
        entries = kept[column]
        with open(Path(job.merged, str(bucket)), "rb") as file:
            file.seek(16 * sum(kept[:column]))
            yield (
                np.frombuffer(file.read(8 * entries), np.uint64),
                np.frombuffer(file.read(8 * entries), np.int64),
            )


def _mapped(path: Path, dtype: Any, size: int, mode: Any = "r") -> np.ndarray:
    if size == 0:
        path.touch()
        return np.empty(0, dtype)  # an empty file cannot be mapped
    array = np.memmap(path, dtype, mode, shape=(size,))
    if mode == "w+":
        reserve(path)
    return array


def _parts(array: np.ndarray) -> Iterator[np.ndarray]:
    for begin in range(0, len(array), _SORTED_AT_ONCE):
        yield array[begin : begin + _SORTED_AT_ONCE]


def _by_count_and_key(keys: np.ndarray, counts: np.ndarray) -> Iterator[np.ndarray]:
    """Yields places in the order of descending counts, then ascending keys, some at a time."""
    for lowest, highest, values in _count_ranges(counts):
        for first, last in _key_ranges(keys, counts, lowest, values):
            found: list[np.ndarray] = [np.empty(0, np.int64)]
            for number, (key, count) in enumerate(zip(_parts(keys), _parts(counts), strict=True)):
                mine = (lowest <= count) & (count <= highest)
                if first is not None:
                    mine &= key >= first
                if last is not None:
                    mine &= key < last
                found.append(np.flatnonzero(mine) + number * _SORTED_AT_ONCE)
            places = np.concatenate(found)
            yield places[np.lexsort((keys[places], -counts[places]))]


def _key_ranges(
    keys: np.ndarray, counts: np.ndarray, count: int, values: int
) -> Iterator[tuple[Any, Any]]:
    """Cuts the values of a count into ranges of keys, if they are too many to sort at once."""
    if values <= _SORTED_AT_ONCE:
        yield None, None
        return
    stride = max(values >> 16, 1)
    samples = [
        key[counted == count][::stride]
        for key, counted in zip(_parts(keys), _parts(counts), strict=True)
    ]
    sample = np.sort(np.concatenate(samples))
    ranges = -(-2 * values // _SORTED_AT_ONCE)  # half full on average: a sample is not exact
    cuts = np.unique(sample[np.arange(1, ranges) * len(sample) // ranges])
    yield from zip([None, *cuts], [*cuts, None], strict=True)


def _count_ranges(counts: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yields ranges of counts, descending, and how many values each has.

    These are at most `_SORTED_AT_ONCE`, but where a single count has more.
    """
    histogram: Counter[int] = Counter()
    for part in _parts(counts):
        unique = np.unique(part, return_counts=True)
        histogram.update(dict(zip(*(array.tolist() for array in unique), strict=True)))
    values, lowest, highest = 0, 0, 0
    for count in sorted(histogram, reverse=True):
        if values and values + histogram[count] > _SORTED_AT_ONCE:
            yield lowest, highest, values
            values = 0
        highest = highest if values else count
        lowest, values = count, values + histogram[count]
    if values:
        yield lowest, highest, values


def write_lookups(columns: Sequence[int], transform: str, folder: str) -> dict[str, Any]:
    """Writes the lookups of columns of a fitted transform."""
    fitted = Transform.load(transform)
    for column in columns:
        fitted.check(column)
        lookup = IdLookup.of(fitted.dictionaries[column])
        for array, path in zip(lookup, IdLookup.paths(folder, column), strict=True):
            with staged_file(path) as partial:
                partial.write_bytes(np.ascontiguousarray(array).data)
    return {}
