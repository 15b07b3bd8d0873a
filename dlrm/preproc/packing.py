"""The second reading of rows: each transformed and packed, and sorted ones written to files."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dlrm.data import bags, layout
from dlrm.data.bags import Jagged, ids_in, starts_within, take_rows
from dlrm.data.sources.row_error import RowError
from dlrm.data.transform.rows import extra_dtypes, list_column, missing_features
from dlrm.data.transform.stored import facts_file
from dlrm.data.transform.transform import Transform, Transformed
from dlrm.documents import parse_json
from dlrm.manifest import Checksum
from dlrm.preproc.engine import FACTS, ROWS, facts_batch, slices
from dlrm.preproc.report.statistics import Periods, Statistics
from dlrm.preproc.source import Part, Read, Rejected, Source, Target
from dlrm.preproc.splits import Ranges, Splitter, readable, splitmix64

_WORD = np.dtype("<i4")


class PackJob(NamedTuple):
    """The arguments of `packed_rows` besides its part.

    Attributes:
        transform: directory of the fitted transform.
        lookups: directory of its lookups.
        targets: destinations of rows.
        statistics: whether to count them for the report.
        periods: periods that are counted separately, of rows with a time.
    """

    source: Source
    splitter: Splitter | Ranges
    transform: str
    lookups: str
    targets: Sequence[Target]
    output_format: str
    seed: int
    quarantine: bool
    statistics: bool
    periods: Periods | None = None


class Layout:
    """The files of a target, and the form of a packed row, which has their values.

    A packed row is a value of each file, in the order of `dtypes`, and then, for each list field,
    its values and their weights.

    Attributes:
        dtypes: file, relative to the dataset -> dtype of a row of it, or of the length of a list.
        lists: for each list field, the file of lengths, and those of values: file -> dtype.
        starts: for each list field, the file of the starts of its rows.
    """

    def __init__(self, fitted: Transform, target: Target, output_format: str) -> None:
        self.lists: list[tuple[str, dict[str, np.dtype]]] = []
        self.starts: list[str] = []
        if output_format == "binary":
            words = 1 + fitted.num_numerical + fitted.num_categorical
            self.dtypes = {target.binary_file: np.dtype((_WORD, (words,)))}
        else:
            files = layout.row_dtypes(fitted.num_numerical, fitted.cardinalities)
            if not target.labeled:
                del files[layout.LABEL_FILE]
            else:
                files |= {f"{name}.bin": d for name, d in extra_dtypes(fitted.schema).items()}
            for i, field in fitted.lists.items():
                del files[layout.categorical_name(i)]
                names = [target.folder + name for name in bags.file_names(i, field.weighted)]
                values, lengths, starts, *weights = names
                files[lengths.removeprefix(target.folder)] = field.lengths_dtype
                of_values = {values: layout.id_dtype(fitted.cardinalities[i])}
                of_values |= dict.fromkeys(weights, bags.WEIGHTS_DTYPE)
                self.lists.append((lengths, of_values))
                self.starts.append(starts)
            self.dtypes = {target.folder + name: dtype for name, dtype in files.items()}
        fields = [(name, d.base, d.shape) for name, d in self.dtypes.items()]
        self.row = np.dtype(fields)

    @property
    def widths(self) -> list[tuple[str, int, int | None]]:
        """Returns each file except starts, and the bytes of a row, or of a value of a list."""
        of_rows = [(name, dtype.itemsize, None) for name, dtype in self.dtypes.items()]
        lists = enumerate(files for _, files in self.lists)
        return of_rows + [(name, d.itemsize, i) for i, own in lists for name, d in own.items()]

    def bytes_of(self, target: Target) -> int:
        """Returns the bytes of a target's packed rows."""
        counts = [target.rows if i is None else target.num_ids[i] for *_, i in self.widths]
        return sum(n * width for n, (_, width, _) in zip(counts, self.widths, strict=True))

    def pack(self, columns: dict[str, np.ndarray]) -> pa.Array:
        """Returns rows, given by file: those of all files but starts."""
        rows = np.empty(len(next(iter(columns.values()))), self.row)
        for name in self.dtypes:
            rows[name] = columns[name]
        widths = np.full(len(rows), self.row.itemsize, np.int64)
        for lengths, values in self.lists:
            widths += columns[lengths].astype(np.int64) * sum(d.itemsize for d in values.values())
        ends = np.concatenate([[0], np.cumsum(widths)])
        if not self.lists:
            content = rows.view(np.uint8)
        else:
            content = np.empty(ends[-1], np.uint8)
            begins = ends[:-1].copy()
            _scatter(content, begins, np.full(len(rows), self.row.itemsize), rows.view(np.uint8))
            begins += self.row.itemsize
            for lengths, values in self.lists:
                for name, dtype in values.items():
                    sizes = columns[lengths].astype(np.int64) * dtype.itemsize
                    of_values = np.ascontiguousarray(columns[name], dtype).view(np.uint8)
                    _scatter(content, begins, sizes, of_values)
                    begins += sizes
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(content)]
        return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(rows), buffers)

    def unpack(self, rows: pa.Array) -> dict[str, np.ndarray]:
        """Returns what `pack` packed."""
        _, offsets, data = rows.buffers()
        ends = np.frombuffer(offsets, np.int64)[rows.offset : rows.offset + len(rows) + 1]
        content = np.frombuffer(data, np.uint8)[ends[0] : ends[-1]]
        if not self.lists:
            packed = content.view(self.row)
            return {name: np.ascontiguousarray(packed[name]) for name in self.dtypes}
        begins: Any = ends[:-1] - ends[0]
        sizes: Any = np.full(len(rows), self.row.itemsize)
        packed = _gather(content, begins, sizes).view(self.row)
        columns = {name: np.ascontiguousarray(packed[name]) for name in self.dtypes}
        begins = begins + self.row.itemsize
        for lengths, values in self.lists:
            for name, dtype in values.items():
                sizes = columns[lengths].astype(np.int64) * dtype.itemsize
                columns[name] = _gather(content, begins, sizes).view(dtype)
                begins = begins + sizes
        return columns


def _indices(begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    before = np.cumsum(sizes) - sizes
    return np.repeat(begins - before, sizes) + np.arange(sizes.sum())


def _scatter(
    content: np.ndarray, begins: np.ndarray, sizes: np.ndarray, values: np.ndarray
) -> None:
    content[_indices(begins, sizes)] = values


def _gather(content: np.ndarray, begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return content[_indices(begins, sizes)]


def packed_rows(item: tuple[int, Part], job: PackJob) -> Iterator[pa.RecordBatch]:
    """Yields the transformed rows of a part, some at a time, and last facts about it.

    The split is the number of the target; the key is the row's number in the input, or a hash of it
    where the target is shuffled. Facts are, for each target, rows, clicks, values clamped to 1, and
    for categorical fields the numbers of values and of those with an id; and the statistics of the
    report, which are arrays.
    """
    number, part = item
    fitted, layouts = _fitted(job.transform, job.lookups), layouts_of(job)
    half = job.output_format != "binary"
    dtype = layout.NUMERICAL_DTYPE if half else np.dtype("<f4")
    totals: dict[str, dict[str, int]] = {}
    shape = fitted.num_numerical, fitted.num_categorical, len(fitted.lists)
    statistics = defaultdict[str, Statistics](lambda: Statistics.empty(*shape))
    rejected: list[Rejected] | None = [] if job.quarantine else None
    for whole, splits in readable(job.source, job.splitter, part, rejected):
        whole = whole._replace(batch=None)  # which is not copied
        for index, target in enumerate(job.targets):
            if not len(chosen := np.flatnonzero(splits == target.split)):
                continue
            read = whole.take(chosen)
            try:
                rows = fitted.apply(read.rows.numerical, read.rows.categorical, dtype)
            except RowError as bad:
                bad.where = part.where(int(read.numbers[bad.row]) - part.first_row)
                raise
            missing = missing_features(read.rows.numerical, read.rows.categorical)
            keys = read.numbers.astype(np.uint64)
            if target.shuffled:
                keys = splitmix64(job.seed, read.numbers)
            columns = _columns(target, read, rows, job.output_format)
            of_split = np.full(len(keys), index, np.int32)
            arrays = [pa.array(of_split), pa.array(keys), layouts[index].pack(columns)]
            yield pa.RecordBatch.from_arrays(arrays, schema=ROWS)
            counts = _summary(read.labels, rows, missing)
            before = totals.setdefault(target.name, dict.fromkeys(counts, 0))
            totals[target.name] = {name: before[name] + counts[name] for name in counts}
            if job.statistics:
                _count(statistics, fitted, target, read, rows, missing, job.periods)
    facts = json.dumps(totals).encode() + b"\n"
    facts += Statistics.to_bytes(statistics) if job.statistics else b""
    yield facts_batch(ROWS, number, facts)


def layouts_of(job: PackJob) -> list[Layout]:
    """Returns the layouts of all targets."""
    fitted = _fitted(job.transform, job.lookups)
    return [Layout(fitted, target, job.output_format) for target in job.targets]


@lru_cache(maxsize=1)
def _load(directory: str, lookups: str, inode: int, changed: int) -> Transform:
    transform = Transform.load(directory)
    transform.use_lookups(lookups)
    return transform


def _fitted(directory: str, lookups: str) -> Transform:
    """Returns a transform, which a process loads once while its files are unchanged."""
    status = facts_file(Path(directory)).stat()
    return _load(directory, lookups, status.st_ino, status.st_mtime_ns)


def _columns(
    target: Target, read: Read, rows: Transformed, output_format: str
) -> dict[str, np.ndarray]:
    """Returns file -> its rows, or values of their lists."""
    labels = read.labels
    if output_format == "binary":
        words = [labels[:, None].astype(_WORD), rows.numerical.view(_WORD)]
        words += [column[:, None] for column in rows.ids if isinstance(column, np.ndarray)]
        return {target.binary_file: np.concatenate(words, axis=1, dtype=_WORD)}
    columns = {layout.LABEL_FILE: labels, layout.NUMERICAL_FILE: rows.numerical}
    columns |= {f"{name}.bin": values for name, values in read.rows.extra.items()}
    for i, column in enumerate(rows.ids):
        if isinstance(column, Jagged):
            names = bags.file_names(i, column.weights is not None)
            values, lengths, _, *weights = names
            columns |= {values: column.values, lengths: column.lengths}
            columns |= {name: np.asarray(column.weights) for name in weights}
        else:
            columns[layout.categorical_name(i)] = column
    return {target.folder + name: column for name, column in columns.items()}


def _summary(labels: np.ndarray, rows: Transformed, missing: np.ndarray) -> dict[str, int]:
    present = known = 0
    for absent, column in zip(missing[rows.numerical.shape[1] :], rows.ids, strict=True):
        ids = ids_in(column)
        present += len(ids) - (int(np.count_nonzero(absent)) if ids is column else 0)
        known += int(np.count_nonzero(ids))
    return {
        "rows": len(labels),
        "clicks": int(np.count_nonzero(labels)),
        "clamped": rows.clamped,
        "present": present,
        "known": known,
    }


def _count(
    statistics: dict[str, Statistics],
    fitted: Transform,
    target: Target,
    read: Read,
    rows: Transformed,
    missing: np.ndarray,
    periods: Periods | None,
) -> None:
    """Counts rows under the name of their target and of their period."""
    lists = fitted.lists.items()
    cut = np.array(
        [list_column(read.rows.categorical[i]).lengths > field.max_length for i, field in lists]
    )
    cut = cut.reshape(len(lists), len(read.labels))
    statistics[target.name].add(read.labels, rows, missing, fitted.own_ids, cut)
    if periods is not None:
        for name, chosen in periods.divide(read.rows.extra["time"]):
            ids = [take_rows(column, chosen) for column in rows.ids]
            part = Transformed(rows.numerical[chosen], ids, 0)
            some = missing[:, chosen], fitted.own_ids, cut[:, chosen]
            statistics[name].add(read.labels[chosen], part, *some)


class Written(NamedTuple):
    """Holds the results of writing rows.

    Attributes:
        totals: for each target, the counts of `packed_rows`.
        checksums: of each file, relative to the dataset.
    """

    totals: dict[str, dict[str, int]]
    checksums: dict[str, str]


def sum_facts(
    batches: Iterable[pa.RecordBatch],
    targets: Sequence[Target],
    on_facts: Callable[[int, dict[str, Statistics]], None],
    on_piece: Callable[[int, int, dict[str, Any]], None],
) -> dict[str, dict[str, int]]:
    """Returns the totals of each target.

    Args:
        batches: facts of `packed_rows`, and those about pieces; see `Engine.sorted_rows`.
        on_facts: called with the number of each part and the statistics of its rows.
        on_piece: called with the target, the first key and the facts of each piece.
    """
    totals = {target.name: Counter[str]() for target in targets}
    for index, rows in slices(batches):
        numbers, contents = rows.column(1).to_pylist(), rows.column(2).to_pylist()
        for number, content in zip(numbers, contents, strict=True):
            of_part, _, arrays = content.partition(b"\n")
            if index != FACTS:
                on_piece(index, number, parse_json(of_part, "facts", dict))
                continue
            for name, counts in parse_json(of_part, "facts", dict).items():
                totals[name].update(counts)
            on_facts(number, Statistics.from_bytes(arrays))
    return {name: dict(counts) for name, counts in totals.items()}


class Files:
    """The files of a dataset that have rows; each is open only while it is written to."""

    def __init__(self, dataset: Path, layouts: Sequence[Layout]) -> None:
        self._files = [_Files(dataset, layout) for layout in layouts]

    def write(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Writes the rows of all targets, in their order; yields the facts."""
        for index, rows in slices(batches):
            if index == FACTS:
                yield rows
            else:
                self._files[index].add(rows.column(2))

    def add(self, target: int, key: int, facts: dict[str, Any]) -> None:
        """Is not called, as there are no pieces; see `Pieces`."""

    def finish(self) -> dict[str, str]:
        """Returns the checksum of each file."""
        return {name: sums for one in self._files for name, sums in one.finish().items()}


class _Files:
    """The files of a target, which may be many."""

    def __init__(self, dataset: Path, layout: Layout) -> None:
        self._dataset, self._layout = dataset, layout
        names = [*layout.dtypes, *layout.starts, *(n for _, of in layout.lists for n in of)]
        self._sums = {name: Checksum() for name in names}
        self._rows, self._values = 0, [0] * len(layout.lists)
        for name in names:
            path = dataset / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")

    def add(self, rows: pa.Array) -> None:
        """Appends packed rows."""
        columns = self._layout.unpack(rows)
        for index, (lengths, _) in enumerate(self._layout.lists):
            of_rows, values = columns[lengths], self._values[index]
            columns[self._layout.starts[index]] = starts_within(of_rows, self._rows, values)[1]
            self._values[index] += int(of_rows.sum(dtype=np.int64))
        self._rows += len(rows)
        for name, column in columns.items():
            self._append(name, column)

    def _append(self, name: str, column: np.ndarray) -> None:
        with open(self._dataset / name, "ab", buffering=0) as file:
            left = np.ascontiguousarray(column).reshape(-1).view(np.uint8).data
            self._sums[name].update(left)
            while len(left):
                left = left[file.write(left) :]

    def finish(self) -> dict[str, str]:
        """Writes the ends of lists; returns the checksum of each file."""
        for name, total in zip(self._layout.starts, self._values, strict=True):
            self._append(name, np.array([total], bags.STARTS_DTYPE))
        return {name: str(checksum) for name, checksum in self._sums.items()}
