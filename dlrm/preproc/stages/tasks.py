"""What one task does to transform a split or to write a bucket: functions that know no engine.

Rows are numbered from 0 over all days. Files of a dataset are created at their final size, and
every task writes its rows at their place: what is written does not depend on how the work was cut.
"""

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.transform.cells import BadRowError
from dlrm.data.transform.fitted import Fitted, facts_file, load_transform
from dlrm.data.transform.transform import Transformed
from dlrm.preproc.stages.column_statistics import Periods, Statistics
from dlrm.preproc.stages.dictionary_merge import bucket_of
from dlrm.preproc.stages.hashing import splitmix64
from dlrm.preproc.stages.shuffle_files import read_bucket, write_buckets
from dlrm.preproc.stages.source import Columns, Source, Target, missing_fields

OUTPUT_FORMATS = ("split_binary", "binary")
_WORD = np.dtype("<i4")
_HELD_ROWS = 1 << 17  # 14 MB of Criteo's rows
_PACKED_ROWS = 1 << 14


class Job(NamedTuple):
    """What the tasks of a transform need besides their split or bucket."""

    source: Source
    transform: str  # directory of the fitted transform
    lookups: str  # directory of its lookups
    dataset: str  # directory to write to
    output_format: str
    targets: list[Target]
    shuffle: str  # directory of the rows on their way, by bucket
    buckets: int
    seed: int
    quarantine: bool
    statistics: str | None  # directory for them
    extra: dict[str, np.dtype] = {}  # columns beside the model's inputs: name -> type
    starts: list[list[int]] | None = None  # first row of each part in each target
    periods: Periods | None = None  # counted separately in the statistics, of rows with a time

    def fitted(self) -> Fitted:
        """The transform, loaded once a process as long as its files stay the same."""
        status = facts_file(self.transform).stat()
        return _load(self.transform, self.lookups, status.st_ino, status.st_mtime_ns)

    def start(self, number: int, split: Any, target: Target) -> int:
        """Returns which row of a target is the first that a part has of it."""
        if self.starts is None:
            return max(split.first_row - target.first_row, 0)
        return self.starts[number][self.targets.index(target)]

    def files(self, target: Target) -> dict[str, np.dtype]:
        """File, relative to the dataset -> dtype of its rows."""
        fitted = self.fitted()
        if self.output_format == "binary":
            words = 1 + fitted.num_numerical + fitted.num_categorical
            return {target.binary_file: np.dtype((_WORD, (words,)))}
        files = layout.row_dtypes(fitted.num_numerical, fitted.cardinalities)
        if not target.labelled:
            del files[layout.LABEL_FILE]
        files |= {f"{name}.bin": dtype for name, dtype in self.extra.items()}
        return {target.folder + file: dtype for file, dtype in files.items()}

    def columns(self, target: Target, read: Columns, rows: Transformed) -> dict[str, np.ndarray]:
        """File -> its rows; `rows` has what `numerical_dtype` says."""
        labels = read.labels
        if self.output_format == "binary":
            words = [labels[:, None].astype(_WORD), rows.numerical.view(_WORD)]
            words += [ids[:, None] for ids in rows.ids]
            return {target.binary_file: np.concatenate(words, axis=1, dtype=_WORD)}
        columns = {layout.LABEL_FILE: labels} if target.labelled else {}
        if rows.numerical.shape[1]:
            columns[layout.NUMERICAL_FILE] = rows.numerical
        columns |= {layout.categorical_name(i): ids for i, ids in enumerate(rows.ids)}
        columns |= {f"{name}.bin": read.extra[name] for name in self.extra}
        return {target.folder + file: column for file, column in columns.items()}

    @property
    def numerical_dtype(self) -> np.dtype:
        """Of logarithms in this output format: NVIDIA's binary rows have them as float32."""
        return np.dtype("<f4") if self.output_format == "binary" else layout.NUMERICAL_DTYPE


@lru_cache(maxsize=1)
def _load(directory: str, lookups: str, inode: int, changed: int) -> Fitted:
    transform = load_transform(directory)
    transform.use_lookups(lookups)
    return transform


def create_files(job: Job) -> None:
    """Creates the files of all targets at their final size."""
    for target in job.targets:
        for name, dtype in job.files(target).items():
            path = Path(job.dataset, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "ab") as file:
                file.truncate(target.rows * dtype.itemsize)


def transform_split(item: tuple[int, Any], job: Job) -> dict[str, Any]:
    """Transforms a split: rows of targets in file order are written, others put into buckets.

    Returns:
        For each target that the split has rows of: rows, clicks, values raised to 1, and of the
        categorical fields how many are there and how many have an id.
    """
    number, split = item
    held = {target.name: _Held(number, split, target, job) for target in job.targets}
    summary: dict[str, dict[str, int]] = {}
    statistics = Statistics.empty_by_name(job.fitted()) if job.statistics else None
    fitted = job.fitted()
    for target, numbers, read in job.source.divide(split, job.targets, job.quarantine):
        try:
            rows = fitted.apply(read.numerical, read.categorical, job.numerical_dtype)
        except BadRowError as bad:
            where = job.source.where(split, int(numbers[bad.row]))
            raise ValueError(f"{where}, column {bad.column}: {bad.problem}") from None
        labels, missing = read.labels, missing_fields(read)
        columns = job.columns(target, read, rows)
        if target.shuffled:
            columns = {"key": splitmix64(job.seed, numbers), **columns}
        held[target.name].add(columns, len(numbers))
        counts = _summary(labels, rows, missing)
        before = summary.setdefault(target.name, dict.fromkeys(counts, 0))
        summary[target.name] = {name: before[name] + counts[name] for name in counts}
        if statistics is not None:
            _count(statistics, target, read, rows, missing, job)
    for one in held.values():
        one.write()
    if statistics is not None:
        Statistics.save(Path(job.statistics or "", str(number)), statistics)
    return summary


def _count(
    statistics: dict[str, Statistics],
    target: Target,
    read: Columns,
    rows: Transformed,
    missing: np.ndarray,
    job: Job,
) -> None:
    """Counts rows under the name of their target and of their period."""
    own_ids = job.fitted().own_ids
    statistics[target.name].add(read.labels, rows, missing, own_ids)
    if job.periods is not None:
        for name, chosen in job.periods.divide(read.extra["time"]):
            ids = [column[chosen] for column in rows.ids]
            part = Transformed(rows.numerical[chosen], ids, 0)
            statistics[name].add(read.labels[chosen], part, missing[:, chosen], own_ids)


class _Held:
    """Rows of a target that a task transformed, until there are enough to be written at once."""

    def __init__(self, number: int, split: Any, target: Target, job: Job) -> None:
        self._target, self._job = target, job
        self._first_row = 0 if target.shuffled else job.start(number, split, target)
        self._number, self._pieces, self._rows = number, 0, 0
        self._blocks: list[dict[str, np.ndarray]] = []

    def add(self, columns: dict[str, np.ndarray], rows: int) -> None:
        """Adds rows, by file; writes when there are many."""
        self._blocks.append(columns)
        self._rows += rows
        if self._rows >= _HELD_ROWS:
            self.write()

    def write(self) -> None:
        """Writes what is held: rows in file order to the dataset, others into buckets."""
        if not self._blocks:
            return
        if self._target.shuffled:
            path = Path(self._job.shuffle, f"{self._number}-{self._pieces}")
            _write_to_buckets(path, self._blocks, self._target, self._job)
        else:
            by_file = {name: [block[name] for block in self._blocks] for name in self._blocks[0]}
            write_rows(self._job.dataset, self._first_row, by_file)
        self._first_row += self._rows
        self._pieces, self._rows, self._blocks = self._pieces + 1, 0, []


def _summary(labels: np.ndarray, rows: Transformed, missing: np.ndarray) -> dict[str, int]:
    hashes = missing[rows.numerical.shape[1] :]
    return {
        "rows": len(labels),
        "clicks": int(np.count_nonzero(labels)),
        "clamped": rows.clamped,
        "present": int(hashes.size - np.count_nonzero(hashes)),
        "known": sum(int(np.count_nonzero(ids)) for ids in rows.ids),
    }


def _packed_dtype(target: Target, job: Job) -> np.dtype:
    """A row while it is shuffled: its hash, and what will be written by file name."""
    return np.dtype([("key", np.uint64), *job.files(target).items()])


def _write_to_buckets(
    path: Path, blocks: list[dict[str, np.ndarray]], target: Target, job: Job
) -> None:
    """Rows are sorted by a hash of seed and row number; a bucket is a range of hashes.

    `blocks` is emptied, so that the rows are in memory once.
    """
    dtype, columns = _packed_dtype(target, job), {}
    for name in list(blocks[0]):
        columns[name] = np.concatenate([block.pop(name) for block in blocks])
    owners = bucket_of(columns["key"], job.buckets)
    counts = np.bincount(owners, minlength=job.buckets)
    narrow = np.uint16 if job.buckets < 1 << 16 else np.uint32  # the former is sorted by digits
    order = np.argsort(owners.astype(narrow), kind="stable")

    def packed() -> Iterator[memoryview]:
        for begin in range(0, len(order), _PACKED_ROWS):
            rows = order[begin : begin + _PACKED_ROWS]
            records = np.empty(len(rows), dtype)
            for name, column in columns.items():
                records[name] = column[rows]
            yield records.data.cast("B")

    write_buckets(path, packed(), counts, counts * dtype.itemsize)


def write_bucket(item: tuple[int, int], sources: Sequence[str], job: Job) -> dict[str, Any]:
    """Sorts the rows of a bucket by their hash and writes them from a row of the target on.

    Args:
        item: the bucket and its first row.
        sources: what `transform_split` put into buckets.
        job: has one shuffled target.
    """
    bucket, first_row = item
    (target,) = (target for target in job.targets if target.shuffled)
    dtype = _packed_dtype(target, job)
    parts = [
        np.frombuffer(content, dtype)
        for content, _ in read_bucket([Path(source) for source in sources], bucket)
    ]
    order = np.argsort(np.concatenate([part["key"] for part in parts]))
    for name in job.files(target):  # one at a time, so that the rows are in memory once
        column = np.concatenate([part[name] for part in parts])[order]
        write_rows(job.dataset, first_row, {name: [column]})
    return {"rows": len(order)}


def write_rows(dataset: str, first_row: int, columns: dict[str, list[np.ndarray]]) -> None:
    """Writes rows into a dataset's files, from `first_row` of these on; `columns` is by file."""
    for name, parts in columns.items():
        width = parts[0].dtype.itemsize * int(np.prod(parts[0].shape[1:]))
        path = Path(dataset, name)
        try:
            with open(path, "r+b", buffering=0) as file:
                file.seek(first_row * width)
                for part in filter(np.size, parts):
                    _write_all(file, np.ascontiguousarray(part).data.cast("B"))
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None


def _write_all(file: Any, data: memoryview) -> None:
    while len(data):
        data = data[file.write(data) :]
