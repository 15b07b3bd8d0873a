"""Readers of click datasets on disk: split-binary (one file per feature) and binary (one file)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data import layout
from dlrm.data.bags import check_values, interleave
from dlrm.data.clicks.batch import Batch, ClickDataset, Shard
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.list_columns import ListColumn
from dlrm.data.layout import map_rows
from dlrm.data.verification import Verifier
from dlrm.files import within

BINARY_FILES = {  # the names of 2020 and, for validation, of 2021
    "train": ("train_data.bin",),
    "test": ("test_data.bin",),
    "validation": ("validation_data.bin", "val_data.bin"),
}
_ROWS_AT_ONCE = 1 << 20
Ids = tuple[np.ndarray, np.ndarray | None, np.ndarray | None]  # with lengths and weights


class _FileDataset(ClickDataset):
    """Rows of memory-mapped files, checked when they are read; subclasses know the layout.

    Args:
        num_rows, batch_size, subset, part: see `BatchedRows`.
        shard: part that this process reads; by default everything.
        verifier: compares files with the dataset's checksums before the first batch; by default
            nothing does.
    """

    _files: list[Path]  # that are read; first that of the labels, then that of the numericals
    _numerical_names: Sequence[str]
    _weights: np.ndarray | None = None

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        subset: float = 1.0,
        part: tuple[float, float] = (0.0, 1.0),
        shard: Shard = Shard(),
        verifier: Verifier | None = None,
    ) -> None:
        super().__init__(num_rows, batch_size, subset, part)
        self._shard, self._verifier = shard, verifier

    def batch(self, index: int) -> Batch:
        """Returns a batch; see `ClickDataset.batch`.

        Raises:
            ValueError: a file is damaged, a label is neither 0 nor 1, a numerical is NaN or
                infinite, or a weight is not a number of 0 or more; file and row are named.
        """
        start, stop = self.rows(index)
        if (verifier := self._verifier) is not None:
            verifier.check(self._files)
            self._verifier = None
        samples = self._shard.world.part(stop - start)
        first = start + samples.start
        labels, numerical = self._read_samples(first, start + samples.stop)
        valid = (labels == 0) | (labels == 1)
        check_values(labels, valid, self._files[0], first, "a label of 0 or 1")
        exponent, word = {2: (0x7C00, np.uint16), 4: (0x7F800000, np.uint32)}[numerical.itemsize]
        bits = numerical.view(word) & word(exponent)  # numpy's isfinite is slow for float16
        if bits.max(initial=0) == exponent:
            row, column = np.argwhere(~np.isfinite(numerical))[0]
            field = layout.field_of(self._numerical_names[column], column)
            expected = f"field {field}: expected a finite number, got {numerical[row, column]}"
            raise ValueError(f"{self._files[1]}: row {first + row}, {expected}")
        ids, lengths, id_weights = self._read_ids(start, stop)
        weights = total = None
        if self._weights is not None:
            weights = self._weights[start:stop]
            valid, expected = np.isfinite(weights) & (weights >= 0), "a weight of 0 or more"
            path = self._files[0].with_name(layout.WEIGHT_FILE)
            check_values(weights, valid, path, start, expected)
            total = np.asarray(weights.sum(dtype=np.float64))
            weights = weights[samples].copy()
        columns = numerical, ids, labels.astype(np.float32), lengths
        if id_weights is weights is None:
            return Batch.from_numpy(*columns)
        factors = {"id_weights": id_weights, "weights": weights, "total_weight": total}
        return Batch.from_numpy(*columns, **factors)

    def _read_samples(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the labels of some rows, and a copy of their numericals."""
        raise NotImplementedError

    def _read_ids(self, start: int, stop: int) -> Ids:
        """Returns the ids of some rows in the form of a batch."""
        raise NotImplementedError


class SplitDataset(_FileDataset):
    """One split of a split-binary dataset.

    The ids of a batch are one matrix of the widest id dtype of the split. Filling it
    column by column from the mapped files reads each byte once (48 M samples/s at batch 4096, 33 M
    at 32768, on one thread of a Zen 4; nine int32, nine int16 and eight int8 tables). If a feature
    has several ids per row, the ids of a batch are concatenated, with lengths.

    Args:
        spec: the dataset's features; `FeatureSpec.load(directory)`.
        sample_weights: whether batches have the weights of `weight.bin`, if the split has it.
        options: see `_FileDataset`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file does not have as many rows as the label file.
    """

    def __init__(
        self,
        spec: FeatureSpec,
        split: str,
        batch_size: int,
        sample_weights: bool = True,
        **options: Any,
    ) -> None:
        rows = spec.num_rows(split)
        super().__init__(rows, batch_size, **options)
        self.table_sizes, self.categorical_names = spec.cardinalities, list(spec.categorical)
        self.num_numerical, self._numerical_names = len(spec.numerical), spec.numerical
        self.one_id_each, self.poolings = not spec.lists, spec.poolings
        self.field_tables, self.targets = spec.field_tables, spec.targets
        self._files = [spec.file(split, name) for name in [spec.label, *spec.numerical[:1]]]
        self._labels = map_rows(self._files[0], np.dtype(np.uint8), (rows,))
        self._numerical = np.empty((rows, 0), layout.NUMERICAL_DTYPE)
        if spec.numerical:
            shape = (rows, self.num_numerical)
            self._numerical = map_rows(self._files[1], layout.NUMERICAL_DTYPE, shape)
        names = self.categorical_names
        if (tables := self._shard.tables) is not None:
            names = [names[table] for table in tables]
        self._id_dtype = np.result_type(np.int8, *(spec.dtype(name) for name in names))
        self._columns: list[np.ndarray | ListColumn] = []
        for name in names:
            files = spec.files(split, name)
            self._files += files
            if name in spec.lists:
                self._columns.append(ListColumn(spec, split, name, rows))
            else:
                self._columns.append(map_rows(files[0], spec.dtype(name), (rows,)))
        path = spec.weights_file(split) if sample_weights else None
        if path is not None:
            self._weights = self._map_weights(path, rows)

    def _map_weights(self, path: Path, rows: int) -> np.ndarray:
        weights = map_rows(path, layout.WEIGHT_DTYPE, (rows,))
        if self._verifier is not None:
            self._verifier.check([path])
        blocks = range(0, rows, _ROWS_AT_ONCE)
        if rows and not any(weights[row : row + _ROWS_AT_ONCE].any() for row in blocks):
            raise ValueError(f"{path}: expected a weight above 0, got {rows:,} zeros")
        return weights

    def _read_samples(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        return self._labels[start:stop], self._numerical[start:stop].copy()

    def _read_ids(self, start: int, stop: int) -> Ids:
        if not self.one_id_each:
            columns = [
                ids.read(start, stop) if isinstance(ids, ListColumn) else ids[start:stop]
                for ids in self._columns
            ]
            return interleave(columns, stop - start, self._id_dtype)
        ids = np.empty((stop - start, len(self._columns)), self._id_dtype)
        for table, column in enumerate(self._columns):
            assert isinstance(column, np.ndarray)
            ids[:, table] = column[start:stop]
        return ids, None, None


class BinaryDataset(_FileDataset):
    """A file of NVIDIA's "binary" datasets; see `layout.map_binary_rows`, also for errors.

    Args:
        num_numerical: numerical features of a row, which the file does not state.
        options: see `_FileDataset`.
    """

    def __init__(
        self,
        path: Path,
        num_numerical: int,
        table_sizes: list[int],
        batch_size: int,
        **options: Any,
    ) -> None:
        sizes = num_numerical, len(table_sizes)
        self._rows = layout.map_binary_rows(path, *sizes, "--num_numerical_features")
        super().__init__(len(self._rows), batch_size, **options)
        _, self._numerical_names, self.categorical_names = layout.default_names(*sizes)
        self.table_sizes, self.num_numerical, self._files = table_sizes, num_numerical, [path] * 2

    def _read_samples(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self._rows[start:stop]
        return rows[:, 0], rows[:, 1 : 1 + self.num_numerical].copy().view(np.float32)

    def _read_ids(self, start: int, stop: int) -> Ids:
        ids, tables = self._rows[start:stop, 1 + self.num_numerical :], self._shard.tables
        return (ids if tables is None else ids[:, tables]).copy(), None, None


def open_binary(
    directory: Path,
    split: str,
    num_numerical: int,
    batch_size: int,
    allow_links: bool = False,
    **options: Any,
) -> BinaryDataset | None:
    """Opens a split of a binary dataset; returns None if there is no validation file.

    Args:
        options: further arguments of `BinaryDataset`.

    Raises:
        FileNotFoundError, ValueError: see `binary_file`, or the file has another size.
    """
    if (path := binary_file(directory, split, allow_links)) is None:
        return None
    sizes = layout.read_model_size(directory)
    return BinaryDataset(path, num_numerical, sizes, batch_size, **options)


def binary_file(directory: Path, split: str, allow_links: bool = False) -> Path | None:
    """Returns the file of a split of a binary dataset; None if there is no validation file.

    Raises:
        FileNotFoundError: the split's file or `model_size.json` is missing.
        ValueError: the file is a symbolic link out of the directory.
    """
    if not (directory / layout.MODEL_SIZE).is_file():
        raise FileNotFoundError(
            f"{directory / layout.MODEL_SIZE}: missing; a binary dataset has its table sizes there"
        )
    names = [name for name in BINARY_FILES[split] if (directory / name).is_file()]
    if names:
        return within(directory, names[0], directory, allow_links)
    if split == "validation":
        return None
    path = directory / BINARY_FILES[split][0]
    raise FileNotFoundError(f"{path}: missing; a binary dataset needs it")
