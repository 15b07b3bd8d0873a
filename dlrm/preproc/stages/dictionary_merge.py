"""Tasks that fit the dictionaries: count in splits, merge in buckets of values, sort in columns.

A task holds at most its split, its bucket or `_SORTED_AT_ONCE` values of a column; larger data are
in mapped files.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.transform.dictionaries import (
    Counts,
    dictionary_path,
    frequent,
    merge_counts,
    open_dictionary,
    reserve,
)
from dlrm.data.transform.lookup import IdLookup, lookup_directory, spread
from dlrm.data.transform.numbers import bin_edges
from dlrm.data.transform.transform import Transform
from dlrm.files import staged_file, write_array
from dlrm.locks import sync
from dlrm.mapped_files import map_npy
from dlrm.preproc.stages.division import bucket_of
from dlrm.preproc.stages.encodings import EncodedColumn, fit_encodings
from dlrm.preproc.stages.shuffle_files import read_bucket, write_buckets
from dlrm.remote.task_files import read_ranges

_SORTED_AT_ONCE = 1 << 22


def write_counts(path: Path, columns: list[Counts], buckets: int) -> None:
    """Writes the counts of columns by buckets of their values."""
    owners = [bucket_of(spread(column.keys), buckets) for column in columns]
    contents, counts = [], np.zeros((buckets, len(columns), 4), np.int64)
    for bucket in range(buckets):
        pieces = []
        for i, (column, owner) in enumerate(zip(columns, owners, strict=True)):
            mine = owner == bucket
            keys, occurrences = column.keys[mine], column.counts[mine]
            cells = 0 if occurrences.ndim == 1 else occurrences.shape[1]
            occurrences = occurrences.astype(np.int64 if cells else np.uint32)
            lengths, texts = _text_bytes(column.texts, np.flatnonzero(mine))
            text_bytes = -1 if column.texts is None else len(texts)
            counts[bucket, i] = len(keys), keys.itemsize, text_bytes, cells
            pieces += [keys.tobytes(), occurrences.tobytes(), lengths, texts]
        contents.append(b"".join(pieces))
    write_buckets(path, contents, counts)


def merge_bucket(
    bucket: int, sources: Sequence[str], limits: Sequence[int], folder: str
) -> dict[str, Any]:
    """Adds up a bucket's counts of all splits, and keeps the values that are frequent enough.

    Args:
        bucket: its number.
        sources: files of the splits' counts.
        limits: for each counted column, the minimum count of a value.
        folder: folder of the result.
    """
    parts = [_read_counts(*entry) for entry in read_bucket([Path(s) for s in sources], bucket)]
    distinct, kept, occurrences = [], [], []
    with staged_file(Path(folder, str(bucket))) as partial, open(partial, "wb") as file:
        for column, counts in enumerate(zip(*parts, strict=True)):
            merged = merge_counts(counts)
            enough = frequent(merged, limits[column]) if merged.counts.ndim == 1 else merged
            distinct.append(len(merged.keys))
            occurrences.append([int(merged.counts.sum()), int(enough.counts.sum())])
            order = np.argsort(spread(enough.keys))
            lengths, texts = _text_bytes(enough.texts, order)
            kept.append([len(enough.keys), len(lengths) + len(texts)])
            file.write(enough.keys[order].astype(np.uint64).data)
            file.write(enough.counts[order].astype(np.int64).data)
            file.write(lengths)
            file.write(texts)
    return {"distinct": distinct, "kept": kept, "occurrences": occurrences}


def _text_bytes(texts: Any, order: np.ndarray) -> tuple[bytes, bytes]:
    """Returns the lengths, int32, and the bytes of some texts; nothing for no texts."""
    if texts is None:
        return b"", b""
    chosen = texts.take(order)
    _, offsets, data = chosen.buffers()
    ends = np.frombuffer(offsets, np.int64)[: len(chosen) + 1]
    content = b"" if data is None else data.to_pybytes()[ends[0] : ends[-1]]
    return np.diff(ends).astype(np.int32).tobytes(), content


def _texts_of(contents: bytes, entries: int, place: int, size: int) -> Any:
    """Returns the texts whose lengths begin at `place` and have `size` bytes themselves."""
    import pyarrow as pa

    lengths = np.frombuffer(contents, np.int32, entries, place)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    begin = place + 4 * entries
    data = pa.py_buffer(contents[begin : begin + size])
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), entries, [None, pa.py_buffer(ends), data]
    )


def _read_counts(contents: bytes, counts: np.ndarray) -> list[Counts]:
    columns, place = [], 0
    for entries, width, text_bytes, cells in counts.tolist():
        keys = np.frombuffer(contents, f"u{width}" if width else "u4", entries, place)
        place += entries * width
        kind, shape = (np.int64, (entries, cells)) if cells else (np.uint32, (entries,))
        occurrences, texts = np.frombuffer(contents, kind, math.prod(shape), place), None
        place += occurrences.nbytes
        occurrences = occurrences.reshape(shape)
        if text_bytes >= 0:
            texts = _texts_of(contents, entries, place, text_bytes)
            place += 4 * entries + text_bytes
        columns.append(Counts(keys, occurrences, texts))
    return columns


class CountedColumn(NamedTuple):
    """The product of a counted column's values.

    Attributes:
        kind: "numbers" and "texts" become a dictionary, "bins" edges, "encodings" numbers of
            the values, and "ids" their greatest.
        limit: minimum count of a value.
        most: maximum number of values with ids; None for all. Of ids, the greatest possible one.
        bins: number of bins.
        encoded: the field of encodings.
    """

    kind: str = "numbers"
    limit: int = 1
    most: int | None = None
    bins: int = 0
    encoded: EncodedColumn | None = None

    @property
    def width(self) -> int:
        """Returns the bytes of a value and its counts."""
        return 8 + 8 * (1 if self.encoded is None else self.encoded.cells.size)


class FitJob(NamedTuple):
    """The arguments of `fit_columns` besides its columns."""

    merged: str  # folder of the results of `merge_bucket`
    kept: list[list[tuple[int, int]]]  # values and bytes of texts, by bucket and column
    transform: str
    lookups: str
    columns: Sequence[CountedColumn]


def fit_columns(columns: Sequence[int], job: FitJob) -> dict[str, Any]:
    """Writes dictionaries and lookups of columns.

    Returns:
        By column, the number of its values; for bins, their edges and shares, in hexadecimal; for
        encodings, the result of `fit_encodings`.
    """
    fits = {"numbers": _fit_column, "texts": _fit_texts, "bins": _fit_bins}
    fits |= {"encodings": _fit_encodings, "ids": _fit_ids}
    sizes = {}
    for column in columns:
        kind = job.columns[column].kind
        sizes[str(column)] = fits[kind](column, job)
    for folder in (job.transform, job.lookups):
        sync(Path(folder))
    return sizes


def _fit_bins(column: int, job: FitJob) -> list[list[str]]:
    """Returns the edges of bins, after sorting the distinct values of a column."""
    parts = [(keys, counts) for keys, counts, _ in _merged(column, job)]
    keys, counts = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    order = np.argsort(keys)
    fitted = bin_edges(keys[order], counts[order], job.columns[column].bins)
    return [[value.hex() for value in values.tolist()] for values in fitted]


def _fit_ids(column: int, job: FitJob) -> int:
    """Returns the greatest id that a column may have, or else the greatest that it has."""
    greatest = (int(keys.max(initial=0)) for keys, _, _ in _merged(column, job))
    most = job.columns[column].most
    return max(greatest, default=0) if most is None else most


def _fit_encodings(column: int, job: FitJob) -> dict[str, Any]:
    """Writes the encodings of a field, and the lookup of its values."""
    encoded = job.columns[column].encoded
    assert encoded is not None
    size = sum(kept[column][0] for kept in job.kept)
    parts = ((keys, counts) for keys, counts, _ in _merged(column, job))
    facts = fit_encodings(encoded, size, parts, job.transform, job.lookups)
    keys = np.load(Path(job.transform, f"encoded_keys_{encoded.place}.npy"))
    _write_lookup(keys, column, job.lookups)
    return facts


def _fit_texts(column: int, job: FitJob) -> int:
    """Writes a dictionary of texts, by descending count and then text, and its lookup.

    The values of the column are in memory, unlike those of a column of numbers.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    parts = list(_merged(column, job))
    keys, counts = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    texts = pa.concat_arrays([part[2] for part in parts])
    table = pa.table({"count": counts, "text": texts})
    order = pc.sort_indices(table, [("count", "descending"), ("text", "ascending")])
    order = order.to_numpy()[: job.columns[column].most]
    lengths, content = _text_bytes(texts, order)
    ends = np.cumsum(np.frombuffer(lengths, np.int32), dtype=np.int64)
    arrays = {"texts": np.frombuffer(content, np.uint8), "ends": ends, "dictionary": keys[order]}
    for name, array in arrays.items():
        _save(Path(job.transform, f"{name}_{column}.npy"), array)
    _write_lookup(keys[order], column, job.lookups)
    return len(order)


def _save(path: Path, array: np.ndarray) -> None:
    with staged_file(path, one_of_many=True) as partial:
        write_array(partial, array)


def _write_lookup(dictionary: np.ndarray, column: int, folder: str) -> None:
    for array, path in zip(
        IdLookup.from_dictionary(dictionary), IdLookup.paths(folder, column), strict=True
    ):
        with staged_file(path, one_of_many=True) as partial:
            partial.write_bytes(np.ascontiguousarray(array).data)


def _fit_column(column: int, job: FitJob) -> int:
    """Writes a column's dictionary, by descending count and then number, and its lookup.

    The buckets arrive in the order of their hashes, which is that of the lookup.
    """
    final = [*IdLookup.paths(job.lookups, column), dictionary_path(job.transform, column)]
    with ExitStack() as stack:
        hashes, ids, directory, dictionary = (
            stack.enter_context(staged_file(path, one_of_many=True)) for path in final
        )
        keys, counts = (hashes.with_name(hashes.name + end) for end in (".keys", ".counts"))
        with open(hashes, "wb") as file1, open(keys, "wb") as file2, open(counts, "wb") as file3:
            for values, occurrences, _ in _merged(column, job):
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
    most = job.columns[column].most
    if most is not None and most < size:
        kept = np.array(map_npy(final[-1])[:most])
        _save(final[-1], kept)
        _write_lookup(kept, column, job.lookups)
        return most
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


def _merged(column: int, job: FitJob) -> Iterator[tuple[np.ndarray, np.ndarray, Any]]:
    """Yields keys, counts and, for a column of texts, the texts, bucket by bucket."""
    is_text, width = job.columns[column].kind == "texts", job.columns[column].width
    for (entries, text_bytes), content in zip(
        (kept[column] for kept in job.kept), read_ranges(_places(column, job)), strict=True
    ):
        keys = np.frombuffer(content, np.uint64, entries)
        counts, texts = (
            np.frombuffer(content, np.int64, (width // 8 - 1) * entries, 8 * entries),
            None,
        )
        if job.columns[column].encoded is not None:
            counts = counts.reshape(entries, width // 8 - 1)
        if is_text:
            texts = _texts_of(content, entries, width * entries, text_bytes - 4 * entries)
        yield keys, counts, texts


def _places(column: int, job: FitJob) -> Iterator[tuple[str, int, int]]:
    """Yields the files of all buckets with the places of a column's values."""
    for bucket, kept in enumerate(job.kept):
        sizes = [
            made.width * values + texts
            for made, (values, texts) in zip(job.columns, kept, strict=True)
        ]
        begin = sum(sizes[:column])
        yield str(Path(job.merged, str(bucket))), begin, begin + sizes[column]


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
    """Yields indices in the order of descending counts, then ascending keys, some at a time."""
    for lowest, highest, values in _count_ranges(counts):
        for first, last in _key_ranges(keys, counts, lowest, values):
            orders: list[np.ndarray] = [np.empty(0, np.int64)]
            for number, (key, count) in enumerate(zip(_parts(keys), _parts(counts), strict=True)):
                mine = (lowest <= count) & (count <= highest)
                if first is not None:
                    mine &= key >= first
                if last is not None:
                    mine &= key < last
                orders.append(np.flatnonzero(mine) + number * _SORTED_AT_ONCE)
            places = np.concatenate(orders)
            yield places[np.lexsort((keys[places], -counts[places]))]


def _key_ranges(
    keys: np.ndarray, counts: np.ndarray, count: int, values: int
) -> Iterator[tuple[Any, Any]]:
    """Divides the values of a count into ranges of keys, if they are too many to sort at once."""
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
    """Yields ranges of counts, descending, with the number of values in each.

    The number is at most `_SORTED_AT_ONCE`, unless a single count has more.
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
        _write_lookup(fitted.dictionaries[column].keys, column, folder)
    sync(Path(folder))
    return {}
