"""Tasks that fit the dictionaries: count in splits, merge in buckets of values, sort in columns.

A task holds at most its split, its bucket or `_SORTED_AT_ONCE` values of a column; larger data are
in mapped files.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.sources.columns import Parsed
from dlrm.data.transform.cells import KEYS_OF_NAN
from dlrm.data.transform.dictionaries import (
    Counts,
    bytes_of_texts,
    frequent,
    merge_counts,
    open_dictionary,
    reserve,
    text_array,
)
from dlrm.data.transform.lookup import IdLookup, directory_parts, spread
from dlrm.data.transform.numbers import bin_edges
from dlrm.data.transform.transform import Transform
from dlrm.data.transform.values import NUMBER_OR_NAN
from dlrm.files import staged_file, write_array
from dlrm.locks import sync
from dlrm.mapped_files import map_npy
from dlrm.preproc.stages.division import bucket_of
from dlrm.preproc.stages.shuffle_files import read_bucket, write_buckets
from dlrm.remote.task_files import read_ranges, shared

_SORTED_AT_ONCE = 1 << 22  # values, of texts of up to
_USUAL_TEXT = 32  # bytes on average
_CHECKED_AT_ONCE = 1 << 12  # texts that are compared with numbers: the first ones mostly decide
_VALUE_BYTES = 8 + 8  # of a key and its count


def write_counts(path: Path, columns: list[Counts], buckets: int) -> None:
    """Writes the counts of columns by buckets of their values."""
    owners = [bucket_of(spread(column.keys), buckets) for column in columns]
    contents, counts = [], np.zeros((buckets, len(columns), 3), np.int64)
    for bucket in range(buckets):
        pieces = []
        for i, (column, owner) in enumerate(zip(columns, owners, strict=True)):
            mine = owner == bucket
            keys, occurrences = column.keys[mine], column.counts[mine].astype(np.uint32)
            lengths, texts = _text_bytes(column.texts, np.flatnonzero(mine))
            text_bytes = -1 if column.texts is None else len(texts)
            counts[bucket, i] = len(keys), keys.itemsize, text_bytes
            pieces += [keys.tobytes(), occurrences.tobytes(), lengths, texts]
        contents.append(b"".join(pieces))
    write_buckets(path, contents, counts)


class Known(NamedTuple):
    """The values that a parent has ids for.

    Attributes:
        lookups: folder of the parent's lookups.
        sizes: number of values of each dictionary; 0 if it has none, or has ids.
    """

    lookups: str
    sizes: Sequence[int]

    def without(self, column: int, counts: Counts) -> Counts:
        """Returns the counts of the other values."""
        if column >= len(self.sizes) or not (size := self.sizes[column]):
            return counts
        lookup = IdLookup.load(shared(self.lookups), column, layout.id_dtype(size + 1))
        return counts.take(lookup(Parsed.present(counts.keys)) == 0)


def merge_bucket(
    bucket: int,
    sources: Sequence[str],
    limits: Sequence[int],
    folder: str,
    known: Known | None = None,
) -> dict[str, Any]:
    """Adds up a bucket's counts of all splits, and keeps the values that are frequent enough.

    Args:
        sources: files of the splits' counts.
        limits: for each counted column, the minimum count of a value.
        known: values of the parent, of which none is kept.
    """
    parts = [_read_counts(*entry) for entry in read_bucket([Path(s) for s in sources], bucket)]
    distinct, kept, nan, numbers = [], [], [], []
    with staged_file(Path(folder, str(bucket))) as partial, open(partial, "wb") as file:
        for column, counts in enumerate(zip(*parts, strict=True)):
            merged = merge_counts(counts)
            distinct.append(len(merged.keys))
            new = merged if known is None else known.without(column, merged)
            enough = frequent(new, limits[column])
            nan.append(int(np.isin(merged.keys, KEYS_OF_NAN).sum()))
            numbers.append(enough.texts is not None and _are_numbers(enough.texts))
            order = np.argsort(spread(enough.keys))
            lengths, texts = _text_bytes(enough.texts, order)
            kept.append([len(enough.keys), lengths.nbytes + len(texts)])
            file.write(enough.keys[order].astype(np.uint64).data)
            file.write(enough.counts[order].astype(np.int64).data)
            file.write(lengths.data)
            file.write(texts.data)
    return {"distinct": distinct, "kept": kept, "nan": nan, "numbers": numbers}


def _are_numbers(texts: Any) -> bool:
    """Returns whether texts are those of numbers and of NaN alone."""
    import pyarrow.compute as pc

    parts = (
        texts.slice(begin, _CHECKED_AT_ONCE) for begin in range(0, len(texts), _CHECKED_AT_ONCE)
    )
    pattern = f"^{NUMBER_OR_NAN.pattern}$"
    return all(pc.all(pc.match_substring_regex(part, pattern)).as_py() for part in parts)


def _text_bytes(texts: Any, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lengths, int32, and the bytes of some texts; nothing for no texts."""
    ends, content = bytes_of_texts(None if texts is None else texts.take(order))
    return np.diff(ends, prepend=0).astype(np.int32), content


def texts_of(contents: bytes, entries: int, place: int, size: int) -> Any:
    """Returns the texts whose lengths begin at `place` and have `size` bytes themselves."""
    lengths = np.frombuffer(contents, np.int32, entries, place)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    begin = place + 4 * entries
    return text_array(ends, contents[begin : begin + size])


def _read_counts(contents: bytes, counts: np.ndarray) -> list[Counts]:
    columns, place = [], 0
    for entries, width, text_bytes in counts.tolist():
        keys = np.frombuffer(contents, f"u{width}" if width else "u4", entries, place)
        place += entries * width
        occurrences, texts = np.frombuffer(contents, np.uint32, entries, place), None
        place += occurrences.nbytes
        if text_bytes >= 0:
            texts = texts_of(contents, entries, place, text_bytes)
            place += 4 * entries + text_bytes
        columns.append(Counts(keys, occurrences, texts))
    return columns


class CountedColumn(NamedTuple):
    """The product of a counted column's values.

    Attributes:
        kind: "numbers" and "texts" become a dictionary, "bins" edges, and "ids" their greatest;
            "kept" becomes nothing.
        limit: minimum count of a value.
        most: maximum number of values with ids; None for all. Of ids, the greatest possible one.
        bins: number of bins.
        missing: a pattern of texts that turned out to mean "missing": those with NaN in a field
            whose other values are numbers. None if there are none.
    """

    kind: str = "numbers"
    limit: int = 1
    most: int | None = None
    bins: int = 0
    missing: str | None = None


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
        By column, the number of its values; for bins, their edges and shares, in hexadecimal.
    """
    fits = {"numbers": _fit_column, "texts": _fit_column, "bins": _fit_bins}
    fits |= {"ids": _fit_ids, "kept": lambda column, job: None}
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


def _save(path: Path, array: np.ndarray) -> None:
    with staged_file(path, one_of_many=True) as partial:
        write_array(partial, array)


def _write_lookup(dictionary: np.ndarray, column: int, folder: str) -> None:
    lookup = IdLookup.from_dictionary(dictionary)
    for array, path in zip(lookup, IdLookup.paths(folder, column), strict=True):
        with staged_file(path, one_of_many=True) as partial:
            partial.write_bytes(np.ascontiguousarray(array).data)


def _fit_column(column: int, job: FitJob) -> int:
    """Writes a column's dictionary, by descending count and then value, and its lookup.

    The buckets arrive in the order of their hashes, which is that of the lookup.
    """
    names = ["dictionary", *(["texts", "ends"] if job.columns[column].kind == "texts" else [])]
    arrays = [Path(job.transform, f"{name}_{column}.npy") for name in names]
    with ExitStack() as stack:
        final = [*IdLookup.paths(job.lookups, column), *arrays]
        hashes, ids, directory, *targets = (
            stack.enter_context(staged_file(path, one_of_many=True)) for path in final
        )
        values = _Values.collect(_merged(column, job), hashes)
        write_directory(directory, _mapped(hashes, np.uint64, values.size))
        values.number(targets, _mapped(ids, layout.id_dtype(values.size + 1), values.size, "w+"))
        values.remove()
    most = job.columns[column].most
    if most is None or most >= values.size:
        return values.size
    kept = [map_npy(path) for path in arrays]
    ends = kept[2][:most] if len(kept) > 1 else np.empty(0, np.int64)
    size = int(ends[-1]) if len(ends) else 0
    for path, array, count in zip(arrays, kept, (most, size, most), strict=False):
        _save(path, array[:count])
    _write_lookup(map_npy(arrays[0]), column, job.lookups)
    return most


def write_directory(path: Path, hashes: np.ndarray) -> None:
    """Writes the directory of a lookup."""
    with open(path, "wb") as file:
        for part in directory_parts(hashes):
            file.write(part.data)


@dataclass(frozen=True)
class _Values:
    """The values of a column in mapped files, in the order of their hashes."""

    keys: np.ndarray
    counts: np.ndarray
    ends: np.ndarray | None  # of texts, int64 `[values + 1]`, from 0
    content: np.ndarray | None
    files: list[Path]

    @classmethod
    def collect(
        cls, parts: Iterator[tuple[np.ndarray, np.ndarray, Any]], hashes: Path
    ) -> "_Values":
        """Writes values beside the file of their hashes, which it writes as well."""
        ends = ("keys", "counts", "ends", "content")
        paths = [hashes.with_name(f"{hashes.name}.{end}") for end in ends]
        size, text_bytes, has_texts = 0, 0, False
        with ExitStack() as stack:
            file, *others = (stack.enter_context(open(path, "wb")) for path in [hashes, *paths])
            others[2].write(np.zeros(1, np.int64).data)
            for keys, counts, texts in parts:
                file.write(spread(keys).data)
                others[0].write(keys.data)
                others[1].write(counts.data)
                size += len(keys)
                if texts is not None:
                    has_texts = True
                    own, content = bytes_of_texts(texts)
                    others[2].write((own + text_bytes).data)
                    others[3].write(content.data)
                    text_bytes += len(content)
        keys, counts = _mapped(paths[0], np.uint64, size), _mapped(paths[1], np.int64, size)
        if not has_texts:
            return cls(keys, counts, None, None, paths)
        every = _mapped(paths[2], np.int64, size + 1), _mapped(paths[3], np.uint8, text_bytes)
        return cls(keys, counts, *every, paths)

    @property
    def size(self) -> int:
        """Returns the number of values."""
        return len(self.keys)

    def remove(self) -> None:
        """Removes the files."""
        for path in self.files:
            path.unlink()

    @property
    def at_once(self) -> int:
        """Returns the number of values that are sorted at once: fewer, if texts are long."""
        if self.content is None or not self.size:
            return _SORTED_AT_ONCE
        mean = max(len(self.content) // self.size, _USUAL_TEXT)
        return max(_SORTED_AT_ONCE * _USUAL_TEXT // mean, 1)

    @cached_property
    def texts(self) -> Any:
        """Returns an Arrow array over the file of the texts; None for numbers."""
        return None if self.ends is None else text_array(self.ends, self.content)

    def number(self, targets: Sequence[Path], ids: np.ndarray) -> None:
        """Writes the dictionary, the values in the order of their ids, and fills in the ids."""
        largest = max((int(part.max()) for part in _parts(self.keys)), default=0)
        narrow = self.ends is None and largest <= np.iinfo(np.uint32).max
        dictionary = open_dictionary(targets[0], np.dtype("u4" if narrow else "u8"), self.size)
        done = 0
        if self.content is not None:
            content = open_dictionary(targets[1], np.dtype(np.uint8), len(self.content))
            ends, end = open_dictionary(targets[2], np.dtype(np.int64), self.size), 0
        for places in self.in_order():
            own = slice(done, done + len(places))
            dictionary[own] = self.keys[places]
            ids[places] = np.arange(done + 1, done + len(places) + 1)
            if self.content is not None:
                own_ends, texts = bytes_of_texts(self.texts.take(places))
                content[end : end + len(texts)] = texts
                ends[own] = own_ends + end
                end += len(texts)
            done += len(places)
        assert done == self.size

    def in_order(self) -> Iterator[np.ndarray]:
        """Yields indices by descending count, then key or text, some at a time."""
        for lowest, highest, values in _count_ranges(self.counts, self.at_once):
            if values <= self.at_once:
                yield self._sorted(np.concatenate(list(self._places(lowest, highest))))
                continue
            cuts = self._cuts(lowest, values)
            paths = [self.files[0].with_suffix(f".{number}") for number in range(len(cuts) + 1)]
            for path in paths:
                path.touch()
            for places in self._places(lowest, highest):
                owners = self._ranges_of(places, cuts)
                order = np.argsort(owners, kind="stable")
                edges = np.searchsorted(owners[order], np.arange(len(paths) + 1))
                for path, begin, end in zip(paths, edges, edges[1:], strict=False):
                    with open(path, "ab") as file:
                        file.write(places[order[begin:end]].data)
            for path in paths:
                yield self._sorted(np.fromfile(path, np.int64))
                path.unlink()

    def _places(self, lowest: int, highest: int) -> Iterator[np.ndarray]:
        """Yields the indices of values with counts from a lowest to a highest one."""
        for number, count in enumerate(_parts(self.counts)):
            mine = (lowest <= count) & (count <= highest)
            yield np.flatnonzero(mine) + number * _SORTED_AT_ONCE

    def _sorted(self, places: np.ndarray) -> np.ndarray:
        if self.texts is None:
            return places[np.lexsort((self.keys[places], -self.counts[places]))]
        import pyarrow as pa
        import pyarrow.compute as pc

        table = pa.table({"count": self.counts[places], "text": self.texts.take(places)})
        order = pc.sort_indices(table, [("count", "descending"), ("text", "ascending")])
        return places[order.to_numpy()]

    def _cuts(self, count: int, values: int) -> Any:
        """Returns keys or texts that divide the values of a count into ranges to sort at once."""
        stride = max(values >> 16, 1)
        sampled = np.concatenate([p[::stride].copy() for p in self._places(count, count)])
        ranges = -(-2 * values // self.at_once)  # half full on average: a sample is not exact
        chosen = np.arange(1, ranges) * len(sampled) // ranges
        if self.texts is None:
            return np.unique(np.sort(self.keys[sampled])[chosen])
        import pyarrow.compute as pc

        texts = self.texts.take(sampled)
        return texts.take(pc.sort_indices(texts).take(chosen)).unique()

    def _ranges_of(self, places: np.ndarray, cuts: Any) -> np.ndarray:
        """Returns the number of the cuts that are not above each of some values."""
        if self.texts is None:
            return np.searchsorted(cuts, self.keys[places], side="right")
        import pyarrow.compute as pc

        texts = self.texts.take(places)
        least: np.ndarray = np.zeros(len(places), np.int64)
        most: np.ndarray = np.full(len(places), len(cuts))
        for _ in range(len(cuts).bit_length()):  # bisects
            middle = np.minimum((least + most) // 2, max(len(cuts) - 1, 0))
            above = pc.greater_equal(texts, cuts.take(middle)).to_numpy(zero_copy_only=False)
            is_open = least < most
            least = np.where(is_open & above, middle + 1, least)
            most = np.where(is_open & ~above, middle, most)
        return least


def _merged(column: int, job: FitJob) -> Iterator[tuple[np.ndarray, np.ndarray, Any]]:
    """Yields keys, counts and, for a column of texts, the texts, bucket by bucket."""
    is_text, missing = job.columns[column].kind == "texts", job.columns[column].missing
    for (entries, text_bytes), content in zip(
        (kept[column] for kept in job.kept), read_ranges(_places(column, job)), strict=True
    ):
        keys = np.frombuffer(content, np.uint64, entries)
        counts = np.frombuffer(content, np.int64, entries, 8 * entries)
        place = _VALUE_BYTES * entries, text_bytes - 4 * entries
        values = Counts(keys, counts, texts_of(content, entries, *place) if is_text else None)
        yield values if missing is None else values.take(~_are_missing(values, missing))


def _are_missing(values: Counts, missing: str) -> np.ndarray:
    if values.texts is None:
        return np.isin(values.keys, KEYS_OF_NAN)
    import pyarrow.compute as pc

    return pc.match_substring_regex(values.texts, missing).to_numpy(zero_copy_only=False)


def _places(column: int, job: FitJob) -> Iterator[tuple[str, int, int]]:
    """Yields the files of all buckets with the places of a column's values."""
    for bucket, kept in enumerate(job.kept):
        sizes = [_VALUE_BYTES * values + texts for values, texts in kept]
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


def _count_ranges(counts: np.ndarray, at_once: int) -> Iterator[tuple[int, int, int]]:
    """Yields ranges of counts, descending, with the number of values in each.

    The number is at most `at_once`, unless a single count has more.
    """
    histogram: Counter[int] = Counter()
    for part in _parts(counts):
        unique = np.unique(part, return_counts=True)
        histogram.update(dict(zip(*(array.tolist() for array in unique), strict=True)))
    values, lowest, highest = 0, 0, 0
    for count in sorted(histogram, reverse=True):
        if values and values + histogram[count] > at_once:
            yield lowest, highest, values
            values = 0
        highest = highest if values else count
        lowest, values = count, values + histogram[count]
    if values:
        yield lowest, highest, values


def write_lookups(columns: Sequence[int], transform: str, folder: str) -> dict[str, Any]:
    """Writes the lookups of columns of a fitted transform."""
    fitted = Transform.load(shared(transform))
    for column in columns:
        fitted.check(column)
        _write_lookup(fitted.dictionaries[column].keys, column, folder)
    sync(Path(folder))
    return {}
