"""Files of a dataset as tasks write them: rows in place, and the values of their lists."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dlrm.data.clicks import bags, layout
from dlrm.data.clicks.bags import Jagged, ListField, lists_in, starts_within
from dlrm.data.transform.stored import facts_file
from dlrm.data.transform.transform import Transform, Transformed
from dlrm.files import sync_files
from dlrm.preproc.stages.column_statistics import Periods
from dlrm.preproc.stages.division import Divider, Ranges
from dlrm.preproc.stages.source import Read, Source, Target
from dlrm.remote.task_files import is_active, shared, write_slice

_WORD = np.dtype("<i4")


class ListColumns(NamedTuple):
    """A list field in a split of a dataset.

    Attributes:
        values, lengths, starts: files, relative to the dataset.
        weights: another file; None if the values have none.
        dtypes: file -> dtype.
    """

    values: str
    lengths: str
    starts: str
    weights: str | None
    dtypes: dict[str, np.dtype]

    @classmethod
    def from_field(
        cls, folder: str, index: int, field: ListField, cardinality: int
    ) -> "ListColumns":
        """Returns the files of table `index` in a folder of the dataset."""
        names = [folder + name for name in bags.file_names(index, field.weighted)]
        dtypes = [layout.id_dtype(cardinality), field.lengths_dtype, bags.STARTS_DTYPE]
        dtypes += [bags.WEIGHTS_DTYPE] * field.weighted
        values, lengths, starts, *weights = names
        of_file = dict(zip(names, dtypes, strict=True))
        return cls(values, lengths, starts, weights[0] if weights else None, of_file)

    @property
    def payload(self) -> list[str]:
        """Returns the files with an entry for each value."""
        return [self.values, *([self.weights] if self.weights else [])]

    def columns(self, rows: Jagged) -> dict[str, np.ndarray]:
        """Returns file -> entries of rows, for all files except the starts."""
        by_file = {self.values: rows.values, self.lengths: rows.lengths}
        if self.weights is not None:
            assert rows.weights is not None
            by_file[self.weights] = rows.weights
        return by_file

    def create(self, dataset: str, rows: int, num_ids: int) -> None:
        """Creates all files except the lengths, at full size, and writes the end of the starts."""
        starts = bags.num_starts(rows)
        for name in [*self.payload, self.starts]:
            count = starts if name == self.starts else num_ids
            with open(Path(dataset, name), "ab") as file:
                file.truncate(count * self.dtypes[name].itemsize)
        last = np.array([num_ids], bags.STARTS_DTYPE)
        write_rows(dataset, starts - 1, {self.starts: [last]})

    def write(
        self,
        dataset: str,
        first_row: int,
        first_value: int,
        lengths: np.ndarray,
        payload: dict[str, list[np.ndarray]],
    ) -> int:
        """Writes consecutive rows to all files except the lengths.

        Args:
            first_row: the first row in the split.
            first_value: the index of its first value in the split.
            lengths: lengths of all these rows.
            payload: file -> values, in parts.

        Returns:
            The index after the last value.
        """
        entry, starts = starts_within(lengths, first_row, first_value)
        write_rows(dataset, first_value, {name: payload[name] for name in self.payload})
        write_rows(dataset, entry, {self.starts: [starts]})
        return first_value + int(lengths.sum(dtype=np.int64))


def write_rows(dataset: str, first_row: int, columns: dict[str, list[np.ndarray]]) -> None:
    """Writes rows, given by file in `columns`, into a dataset's files, from `first_row` on.

    The task that writes them waits for the disk at its end; see `TransformJob.sync`.
    """
    for name, parts in columns.items():
        width = parts[0].dtype.itemsize * int(np.prod(parts[0].shape[1:]))
        path = Path(dataset, name)
        contents = (np.ascontiguousarray(p).data.cast("B") for p in parts if p.size)
        if write_slice(path, first_row * width, contents):
            continue
        try:
            with open(path, "r+b", buffering=0) as file:
                file.seek(first_row * width)
                for content in contents:
                    while len(content):
                        content = content[file.write(content) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None


class TransformJob(NamedTuple):
    """The arguments of a transform's tasks besides their split or bucket."""

    source: Source
    divider: Divider | Ranges
    transform: str  # directory of the fitted transform
    lookups: str  # directory of its lookups
    dataset: str  # directory to write to
    output_format: str
    targets: list[Target]
    shuffle: str  # directory of intermediate rows, by bucket
    buckets: int
    seed: int
    quarantine: bool
    statistics: str | None  # directory for them
    extra: dict[str, np.dtype] = {}  # columns besides the model's inputs: name -> type
    starts: Sequence[Sequence[int]] = ()  # first row of each part in each target
    list_starts: Sequence[Sequence[Sequence[int]]] = ()  # first id of each, and list field
    periods: Periods | None = None  # counted separately in the statistics, of rows with a time

    def fitted(self) -> Transform:
        """Returns the transform, loaded once per process while its files are unchanged."""
        directory, lookups = shared(self.transform), shared(self.lookups)
        status = facts_file(Path(directory)).stat()
        return _load(directory, lookups, status.st_ino, status.st_mtime_ns)

    def start(self, number: int, target: Target) -> int:
        """Returns the index, in a target, of a part's first row of it."""
        return self.starts[number][self.targets.index(target)]

    def list_start(self, number: int, target: Target) -> Sequence[int]:
        """Returns the index, in a target, of a part's first id of each list field."""
        return self.list_starts[number][self.targets.index(target)] if target.num_ids else []

    def lists(self, target: Target) -> list[ListColumns]:
        """Returns the files of the list fields."""
        fitted = self.fitted()
        return [
            ListColumns.from_field(target.folder, i, field, fitted.cardinalities[i])
            for i, field in fitted.lists.items()
        ]

    def files(self, target: Target) -> dict[str, np.dtype]:
        """Returns file, relative to the dataset -> dtype of its rows, or of lengths of lists."""
        fitted = self.fitted()
        if self.output_format == "binary":
            words = 1 + fitted.num_numerical + fitted.num_categorical
            return {target.binary_file: np.dtype((_WORD, (words,)))}
        files = layout.row_dtypes(fitted.num_numerical, fitted.cardinalities)
        if not target.labeled:
            del files[layout.LABEL_FILE]
        for i in fitted.lists:
            del files[layout.categorical_name(i)]
        files |= {f"{name}.bin": dtype for name, dtype in self.extra.items()}
        by_file = {target.folder + file: dtype for file, dtype in files.items()}
        return by_file | {f.lengths: f.dtypes[f.lengths] for f in self.lists(target)}

    def sync(self, target: Target) -> None:
        """Waits until what was written of a target is on the disk, if it was written there."""
        if is_active():
            return
        names = {
            *self.files(target),
            *(name for field in self.lists(target) for name in field.dtypes),
        }
        sync_files([Path(self.dataset, name) for name in sorted(names)])

    def columns(self, target: Target, read: Read, rows: Transformed) -> dict[str, np.ndarray]:
        """Returns file -> its rows, or values of their lists; numericals have `numerical_dtype`."""
        labels = read.labels
        ids = {i: c for i, c in enumerate(rows.ids) if isinstance(c, np.ndarray)}
        if self.output_format == "binary":
            words = [labels[:, None].astype(_WORD), rows.numerical.view(_WORD)]
            words += [column[:, None] for column in ids.values()]
            return {target.binary_file: np.concatenate(words, axis=1, dtype=_WORD)}
        columns = {layout.LABEL_FILE: labels} if target.labeled else {}
        if rows.numerical.shape[1]:
            columns[layout.NUMERICAL_FILE] = rows.numerical
        columns |= {layout.categorical_name(i): column for i, column in ids.items()}
        columns |= {f"{name}.bin": read.rows.extra[name] for name in self.extra}
        by_file = {target.folder + file: column for file, column in columns.items()}
        for field, column in zip(self.lists(target), lists_in(rows.ids), strict=True):
            by_file |= field.columns(column)
        return by_file

    @property
    def numerical_dtype(self) -> np.dtype:
        """Returns the dtype of numerical features in the output: float32 for NVIDIA's rows."""
        return np.dtype("<f4") if self.output_format == "binary" else layout.NUMERICAL_DTYPE


@lru_cache(maxsize=1)
def _load(directory: str, lookups: str, inode: int, changed: int) -> Transform:
    transform = Transform.load(directory)
    if any(Path(lookups).iterdir()):  # a driver may have none
        transform.use_lookups(lookups)
    return transform
