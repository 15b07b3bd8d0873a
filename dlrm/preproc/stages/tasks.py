"""Tasks that transform a split or write a bucket, as functions that are independent of the engine.

Rows are numbered from 0 over all days. Files of a dataset are created at their final size, and
every task writes its rows at their place, so the result does not depend on how work was divided.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data.clicks.bags import ids_in, places_of, taken
from dlrm.data.sources.row_error import RowError
from dlrm.data.transform.lists import list_column, missing_features
from dlrm.data.transform.transform import Transformed
from dlrm.files import sync
from dlrm.preproc.stages.column_statistics import Statistics
from dlrm.preproc.stages.dataset_files import TransformJob, write_rows
from dlrm.preproc.stages.division import bucket_of, readable, splitmix64
from dlrm.preproc.stages.shuffle_files import read_bucket, write_buckets
from dlrm.preproc.stages.source import Part, Read, Rejected, Target

_HELD_ROWS = 1 << 17  # 14 MB of Criteo's rows
_HELD_IDS = 1 << 22  # of list fields: 50 MB with weights


def create_files(job: TransformJob) -> None:
    """Creates the files of all targets at their final size."""
    for target in job.targets:
        for name, dtype in job.files(target).items():
            path = Path(job.dataset, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "ab") as file:
                file.truncate(target.rows * dtype.itemsize)
        for field, num_ids in zip(job.lists(target), target.num_ids, strict=True):
            field.create(job.dataset, target.rows, num_ids)


def transform_split(item: tuple[int, Any], job: TransformJob) -> dict[str, Any]:
    """Transforms a split: writes rows of targets in file order, and puts others into buckets.

    Returns:
        For each target with rows of the split: rows, clicks, values clamped to 1, and for
        categorical fields the numbers of values and of those with an id.
    """
    number, part = item
    held = {target.name: _Held(number, target, job) for target in job.targets}
    summary: dict[str, dict[str, int]] = {}
    statistics = Statistics.empty_by_name(job.fitted()) if job.statistics else None
    for target, read in _divided(part, job):
        try:
            rows = job.fitted().apply(
                read.rows.numerical, read.rows.categorical, job.numerical_dtype
            )
        except RowError as bad:
            bad.where = part.where(int(read.numbers[bad.row]) - part.first_row)
            raise
        labels = read.labels
        missing = missing_features(read.rows.numerical, read.rows.categorical)
        columns = job.columns(target, read, rows)
        if target.shuffled:
            columns = {"key": splitmix64(job.seed, read.numbers), **columns}
        held[target.name].add(columns, len(read.numbers))
        counts = _summary(labels, rows, missing)
        before = summary.setdefault(target.name, dict.fromkeys(counts, 0))
        summary[target.name] = {name: before[name] + counts[name] for name in counts}
        if statistics is not None:
            _count(statistics, target, read, rows, missing, job)
    for rows_held in held.values():
        rows_held.finish()
    if statistics is not None:
        Statistics.save(Path(job.statistics or "", str(number)), statistics)
    return summary


def _divided(part: Part, job: TransformJob) -> Iterator[tuple[Target, Read]]:
    """Yields rows of a part some at a time, with their target."""
    rejected: list[Rejected] | None = [] if job.quarantine else None
    for read, splits in readable(job.source, job.divider, part, rejected):
        read = read._replace(batch=None)  # which is not copied
        for target in job.targets:
            if len(chosen := np.flatnonzero(splits == target.split)):
                yield target, read.take(chosen)


def _count(
    statistics: dict[str, Statistics],
    target: Target,
    read: Read,
    rows: Transformed,
    missing: np.ndarray,
    job: TransformJob,
) -> None:
    """Counts rows under the name of their target and of their period."""
    own_ids, lists = job.fitted().own_ids, job.fitted().lists.items()
    cut = np.array(
        [list_column(read.rows.categorical[i]).lengths > field.max_length for i, field in lists]
    )
    cut = cut.reshape(len(lists), len(read.labels))
    statistics[target.name].add(read.labels, rows, missing, own_ids, cut)
    if job.periods is not None:
        for name, chosen in job.periods.divide(read.rows.extra["time"]):
            ids = [taken(column, chosen) for column in rows.ids]
            part = Transformed(rows.numerical[chosen], ids, 0)
            some = missing[:, chosen], own_ids, cut[:, chosen]
            statistics[name].add(read.labels[chosen], part, *some)


class _Held:
    """Transformed rows of a target, kept until there are enough to write."""

    def __init__(self, number: int, target: Target, job: TransformJob) -> None:
        self._target, self._job = target, job
        self._first_row = 0 if target.shuffled else job.start(number, target)
        self._lists = job.lists(target)
        self._first_ids = [] if target.shuffled else list(job.list_start(number, target))
        self._number, self._pieces, self._rows, self._ids = number, 0, 0, 0
        self._blocks: list[dict[str, np.ndarray]] = []

    def add(self, columns: dict[str, np.ndarray], rows: int) -> None:
        """Adds rows, by file; writes them when there are many."""
        self._blocks.append(columns)
        self._rows += rows
        self._ids += sum(len(columns[field.values]) for field in self._lists)
        if self._rows >= _HELD_ROWS or self._ids >= _HELD_IDS:
            self.write()

    def write(self) -> None:
        """Writes the rows: those in file order to the dataset, others into buckets."""
        if not self._blocks:
            return
        if self._target.shuffled:
            path = Path(self._job.shuffle, f"{self._number}-{self._pieces}")
            _write_to_buckets(path, self._blocks, self._target, self._job)
        else:
            self._write_in_order()
        self._first_row += self._rows
        self._pieces, self._rows, self._ids, self._blocks = self._pieces + 1, 0, 0, []

    def finish(self) -> None:
        """Writes the last rows, and waits until all are on the disk."""
        self.write()
        if not self._pieces:
            return
        if self._target.shuffled:
            sync(Path(self._job.shuffle))
        else:
            self._job.sync(self._target)

    def _write_in_order(self) -> None:
        dataset = self._job.dataset
        by_file = {name: [block[name] for block in self._blocks] for name in self._blocks[0]}
        for i, field in enumerate(self._lists):
            payload = {name: by_file.pop(name) for name in field.payload}
            lengths = np.concatenate(by_file[field.lengths])
            first = self._first_row, self._first_ids[i]
            self._first_ids[i] = field.write(dataset, *first, lengths, payload)
        write_rows(dataset, self._first_row, by_file)


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


def _shuffled_dtypes(target: Target, job: TransformJob) -> dict[str, np.dtype]:
    """Returns the dtypes of a row in the shuffle: of its hash, and of its fields by file name."""
    return {"key": np.dtype(np.uint64), **job.files(target)}


def _write_to_buckets(
    path: Path, blocks: list[dict[str, np.ndarray]], target: Target, job: TransformJob
) -> None:
    """Writes rows into buckets, which are ranges of a hash of seed and row number.

    A bucket has its rows column by column, and then the values and weights of their lists, field
    by field. `blocks` is emptied, so that the rows are in memory once.
    """
    lists, columns = job.lists(target), {}
    for name in list(blocks[0]):
        columns[name] = np.concatenate([block.pop(name) for block in blocks])
    owners = bucket_of(columns["key"], job.buckets)
    rows = np.bincount(owners, minlength=job.buckets)
    narrow = np.uint16 if job.buckets < 1 << 16 else np.uint32  # the former is sorted by digits
    order = np.argsort(owners.astype(narrow), kind="stable")
    edges = np.cumsum(np.r_[0, rows])
    counts, sizes = [rows], np.zeros(job.buckets, np.int64)
    payload: list[tuple[np.ndarray, np.ndarray]] = []  # in the order of the buckets, and edges
    for field in lists:
        places, lengths = places_of(columns[field.lengths], order)
        ends = np.cumsum(np.r_[0, lengths])[edges]
        counts.append(np.diff(ends))
        payload += [(columns.pop(name)[places], ends) for name in field.payload]
    for name, dtype in reversed(_shuffled_dtypes(target, job).items()):
        payload.insert(0, (columns.pop(name)[order].astype(dtype.base, copy=False), edges))
    for values, ends in payload:
        sizes += np.diff(ends) * values[:1].nbytes

    def packed() -> Iterator[memoryview]:
        for bucket in range(job.buckets):
            for values, ends in payload:
                yield values[ends[bucket] : ends[bucket + 1]].reshape(-1).view(np.uint8).data

    write_buckets(path, packed(), np.stack(counts, 1), sizes)


def write_bucket(
    item: tuple[int, int, Sequence[int]], sources: Sequence[str], job: TransformJob
) -> dict[str, Any]:
    """Sorts the rows of a bucket by their hash, and writes them from a row of the target on.

    Args:
        item: the bucket, its first row, and its first id of each list field.
        sources: files of buckets that `transform_split` wrote.
    """
    bucket, first_row, first_ids = item
    (target,) = (target for target in job.targets if target.shuffled)
    dtypes, lists = _shuffled_dtypes(target, job), job.lists(target)
    columns: dict[str, list[np.ndarray]] = {}
    for content, counts in read_bucket([Path(source) for source in sources], bucket):
        rows, *num_ids = counts.tolist()
        sized = [(name, dtype, rows) for name, dtype in dtypes.items()]
        for field, number in zip(lists, num_ids, strict=True):
            sized += [(name, field.dtypes[name], number) for name in field.payload]
        place = 0
        for name, dtype, number in sized:
            values = np.frombuffer(content, dtype, number, place)
            columns.setdefault(name, []).append(values)
            place += values.nbytes
    order = np.argsort(np.concatenate(columns.pop("key")))
    for field, first_id in zip(lists, first_ids, strict=True):
        places, lengths = places_of(np.concatenate(columns[field.lengths]), order)
        in_order = {name: [np.concatenate(columns.pop(name))[places]] for name in field.payload}
        field.write(job.dataset, first_row, first_id, lengths, in_order)
    for name in job.files(target):  # one at a time, so that the rows are in memory once
        column = np.concatenate(columns.pop(name))[order]
        write_rows(job.dataset, first_row, {name: [column]})
    job.sync(target)
    return {"rows": len(order)}
