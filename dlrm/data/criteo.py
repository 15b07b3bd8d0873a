"""Readers of click datasets on disk: split-binary (one file a feature) and binary (one file)."""

from pathlib import Path

import numpy as np
import torch

from dlrm.data import layout
from dlrm.data.batch import Batch, BatchedRows, Shard
from dlrm.data.feature_spec import FeatureSpec

BINARY_FILES = {  # the names of 2020 and, for validation, of 2021
    "train": ("train_data.bin",),
    "test": ("test_data.bin",),
    "validation": ("validation_data.bin", "val_data.bin"),
}
_WORD = np.dtype("<i4")


class SplitDataset(BatchedRows):
    """One split of a split-binary dataset, memory-mapped.

    The ids of a batch come as one matrix of the widest id dtype that the split has. Filling it
    column by column from the mapped files reads each byte once (48 M samples/s at batch 4096, 33 M
    at 32768, on one thread of a Zen 4; nine int32, nine int16 and eight int8 tables).

    Args:
        spec: the dataset's features; `FeatureSpec.load(directory)`.
        split: "train", "test" or "validation".
        batch_size: samples of a batch.
        subset: fraction of the batches to use.
        shard: what this process reads; by default everything.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is longer or shorter than the label file says.
    """

    def __init__(
        self,
        spec: FeatureSpec,
        split: str,
        batch_size: int,
        subset: float = 1.0,
        shard: Shard = Shard(),
    ) -> None:
        num_rows = spec.num_rows(split)
        super().__init__(num_rows, batch_size, subset)
        self._world = shard.world
        self.table_sizes = spec.cardinalities
        self.categorical_names = list(spec.categorical)
        self.num_numerical = len(spec.numerical)
        self._label_file = spec.file(split, spec.label)
        self._labels = _map(self._label_file, np.dtype(np.uint8), (num_rows,))
        self._numerical = (
            _map(
                spec.file(split, spec.numerical[0]),
                layout.NUMERICAL_DTYPE,
                (num_rows, self.num_numerical),
            )
            if spec.numerical
            else np.empty((num_rows, 0), layout.NUMERICAL_DTYPE)
        )
        tables = range(len(spec.categorical)) if shard.tables is None else shard.tables
        self._ids = [
            _map(spec.file(split, name), spec.dtype(name), (num_rows,))
            for name in (self.categorical_names[table] for table in tables)
        ]
        self._id_dtype = np.result_type(np.int8, *(ids.dtype for ids in self._ids))

    def batch(self, index: int) -> Batch:
        """Returns a batch; see `Dataset.batch`."""
        start, stop = self.rows(index)
        ids = np.empty((stop - start, len(self._ids)), self._id_dtype)
        for table, column in enumerate(self._ids):
            ids[:, table] = column[start:stop]
        own = self._world.part(stop - start)
        first, last = start + own.start, start + own.stop
        return Batch(
            torch.from_numpy(self._numerical[first:last].copy()),
            torch.from_numpy(ids),
            _labels(self._labels[first:last], self._label_file, first),
        )


class BinaryDataset(BatchedRows):
    """A file of NVIDIA's "binary" datasets, memory-mapped.

    A row is 1 + num_numerical + tables little-endian words of four bytes: the label as int32, the
    numericals as float32 (already transformed), the ids as int32.

    Args:
        path: the file.
        num_numerical: numerical features of a row; the file does not say.
        table_sizes: rows of each table.
        batch_size: samples of a batch.
        subset: fraction of the batches to use.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: its size is no whole number of rows.
    """

    def __init__(
        self,
        path: Path,
        num_numerical: int,
        table_sizes: list[int],
        batch_size: int,
        subset: float = 1.0,
    ) -> None:
        if not path.is_file():
            raise FileNotFoundError(f"{path}: missing")
        width = 1 + num_numerical + len(table_sizes)
        row_bytes, size = width * _WORD.itemsize, path.stat().st_size
        if size % row_bytes:
            raise ValueError(
                f"{path}: expected a multiple of {row_bytes} bytes (a label, {num_numerical} "
                f"numerical and {len(table_sizes)} categorical features of 4 bytes each), got "
                f"{size}: truncated, or --num_numerical_features is wrong"
            )
        super().__init__(size // row_bytes, batch_size, subset)
        self.table_sizes = table_sizes
        self.categorical_names = [layout.categorical_name(i) for i in range(len(table_sizes))]
        self.num_numerical = num_numerical
        self._path = path
        self._rows = _map(path, _WORD, (size // row_bytes, width))

    def batch(self, index: int) -> Batch:
        """Returns a batch; see `Dataset.batch`."""
        start, stop = self.rows(index)
        rows, first_id = self._rows[start:stop], 1 + self.num_numerical
        return Batch(
            torch.from_numpy(rows[:, 1:first_id].copy().view(np.float32)),
            torch.from_numpy(rows[:, first_id:].copy()),
            _labels(rows[:, 0], self._path, start),
        )


def open_binary(
    directory: Path, split: str, num_numerical: int, batch_size: int, subset: float = 1.0
) -> BinaryDataset | None:
    """Opens a split of a binary dataset; returns None where there is no validation file.

    Raises:
        FileNotFoundError: the split's file or `model_size.json` is missing.
    """
    if not (directory / layout.MODEL_SIZE).is_file():
        raise FileNotFoundError(
            f"{directory / layout.MODEL_SIZE}: missing; a binary dataset has its table sizes there"
        )
    names = BINARY_FILES[split]
    path = next((directory / name for name in names if (directory / name).is_file()), None)
    if path is None:
        if split == "validation":
            return None
        raise FileNotFoundError(f"{directory / names[0]}: missing; a binary dataset needs it")
    sizes = layout.read_model_size(directory)
    return BinaryDataset(path, num_numerical, sizes, batch_size, subset)


def _map(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    if 0 in shape:
        return np.empty(shape, dtype)  # an empty file cannot be mapped
    # A plain array: a slice of np.memmap itself costs 1 µs more, 26 times a batch.
    return np.memmap(path, dtype, mode="r", shape=shape).view(np.ndarray)


def _labels(raw: np.ndarray, path: Path, first_row: int) -> torch.Tensor:
    wrong = (raw != 0) & (raw != 1)
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(
            f"{path}: row {first_row + row}: expected a label of 0 or 1, got {raw[row]}"
        )
    return torch.from_numpy(raw.astype(np.float32))
