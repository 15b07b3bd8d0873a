"""Readers of click datasets on disk: split-binary (one file per feature) and binary (one file)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from dlrm.data.clicks import layout
from dlrm.data.clicks.bags import interleave
from dlrm.data.clicks.batch import Batch, Shard
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.list_columns import ListColumn, SampleWeights
from dlrm.data.prefetch import BatchedRows
from dlrm.data.verification import Verifier
from dlrm.files import within
from dlrm.mapped_files import map_file

BINARY_FILES = {  # the names of 2020 and, for validation, of 2021
    "train": ("train_data.bin",),
    "test": ("test_data.bin",),
    "validation": ("validation_data.bin", "val_data.bin"),
}
_WORD = np.dtype("<i4")


class SplitDataset(BatchedRows):
    """One split of a split-binary dataset, memory-mapped.

    The ids of a batch are one matrix of the widest id dtype of the split. Filling it
    column by column from the mapped files reads each byte once (48 M samples/s at batch 4096, 33 M
    at 32768, on one thread of a Zen 4; nine int32, nine int16 and eight int8 tables). If a feature
    has several ids per row, the ids of a batch are concatenated, with lengths.

    Args:
        spec: the dataset's features; `FeatureSpec.load(directory)`.
        subset: fraction of the batches to use.
        shard: part that this process reads; by default everything.
        verifier: compares data that are read with the dataset's checksums; by default nothing is.
        sample_weights: whether batches have the weights of `weight.bin`, if the split has it.
        part: see `BatchedRows`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file does not have as many rows as the label file.
    """

    def __init__(
        self,
        spec: FeatureSpec,
        split: str,
        batch_size: int,
        subset: float = 1.0,
        shard: Shard = Shard(),
        verifier: Verifier | None = None,
        sample_weights: bool = True,
        part: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        num_rows = spec.num_rows(split)
        super().__init__(num_rows, batch_size, subset, part)
        self._world = shard.world
        self.table_sizes = spec.cardinalities
        self.categorical_names = list(spec.categorical)
        self.num_numerical = len(spec.numerical)
        self._label_file = spec.file(split, spec.label)
        self._labels = map_file(self._label_file, np.dtype(np.uint8), (num_rows,))
        self._numerical_names, self._numerical_file = spec.numerical, self._label_file
        self._numerical = np.empty((num_rows, 0), layout.NUMERICAL_DTYPE)
        self._files = [self._label_file]
        if spec.numerical:
            self._numerical_file = spec.file(split, spec.numerical[0])
            shape = (num_rows, self.num_numerical)
            self._numerical = map_file(self._numerical_file, layout.NUMERICAL_DTYPE, shape)
            self._files.append(self._numerical_file)
        tables = range(len(spec.categorical)) if shard.tables is None else shard.tables
        names = [self.categorical_names[table] for table in tables]
        self.one_id_each, self.poolings = not spec.lists, spec.poolings
        self.field_tables, self.targets = spec.field_tables, spec.targets
        self._id_dtype = np.result_type(np.int8, *(spec.dtype(name) for name in names))
        self._ids: list[np.ndarray | ListColumn] = []
        for name in names:
            if name in spec.lists:
                self._ids.append(column := ListColumn(spec, split, name, num_rows))
                self._files += filter(None, column.files)
            else:
                path = spec.file(split, name)
                self._ids.append(map_file(path, spec.dtype(name), (num_rows,)))
                self._files.append(path)
        self._weights = None
        weights = spec.weights_file(split) if sample_weights else None
        if weights is not None:
            self._weights = SampleWeights(weights, num_rows, verifier)
        self._verifier = verifier

    def batch(self, index: int) -> Batch:
        """Returns a batch; see `ClickDataset.batch`.

        Raises:
            ValueError: a file is damaged, a label is neither 0 nor 1, a numerical is NaN or
                infinite, or a weight is not a number of 0 or more; file and row are named.
        """
        start, stop = self.rows(index)
        samples = self._world.part(stop - start)
        first, last = start + samples.start, start + samples.stop
        self._verify()
        numerical = self._numerical[first:last].copy()
        _check_finite(numerical, self._numerical_file, first, self._numerical_names)
        ids, lengths, id_weights = self._read_ids(start, stop)
        weights = None if self._weights is None else self._weights.read(start, stop)
        total = None if weights is None else weights.sum(dtype=np.float64)
        return Batch(
            torch.from_numpy(numerical),
            torch.from_numpy(ids),
            _labels(self._labels[first:last], self._label_file, first),
            None if lengths is None else torch.from_numpy(lengths),
            id_weights=None if id_weights is None else torch.from_numpy(id_weights),
            weights=None if weights is None else torch.from_numpy(weights[samples].copy()),
            total_weight=None if total is None else torch.tensor(total),
        )

    def _verify(self) -> None:
        """Compares the files with their checksums, before their first batch."""
        if (verifier := self._verifier) is not None:
            verifier.check(self._files)
            self._verifier = None

    def _read_ids(
        self, start: int, stop: int
    ) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Returns ids, lengths and id weights of rows `start` to `stop`, in the form of a batch."""
        if not self.one_id_each:
            columns = [
                ids.read(start, stop) if isinstance(ids, ListColumn) else ids[start:stop]
                for ids in self._ids
            ]
            return interleave(columns, stop - start, self._id_dtype)
        ids = np.empty((stop - start, len(self._ids)), self._id_dtype)
        for table, column in enumerate(self._ids):
            assert isinstance(column, np.ndarray)
            ids[:, table] = column[start:stop]
        return ids, None, None


class BinaryDataset(BatchedRows):
    """A file of NVIDIA's "binary" datasets, memory-mapped.

    A row is 1 + num_numerical + tables little-endian words of four bytes: the label as int32, the
    numericals as float32 (already transformed), the ids as int32.

    Args:
        num_numerical: numerical features of a row, which the file does not state.
        subset: fraction of the batches to use.
        verifier: compares data that are read with the dataset's checksums; by default nothing is.
        part: see `BatchedRows`.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: its size is not a whole number of rows.
    """

    one_id_each = True
    poolings: tuple[str | None, ...] | None = None
    field_tables: tuple[int, ...] | None = None
    targets: tuple[int | None, ...] | None = None

    def __init__(
        self,
        path: Path,
        num_numerical: int,
        table_sizes: list[int],
        batch_size: int,
        subset: float = 1.0,
        verifier: Verifier | None = None,
        part: tuple[float, float] = (0.0, 1.0),
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
        super().__init__(size // row_bytes, batch_size, subset, part)
        self.table_sizes = table_sizes
        self.categorical_names = [layout.categorical_name(i) for i in range(len(table_sizes))]
        self.num_numerical = num_numerical
        self._path = path
        self._rows = map_file(path, _WORD, (size // row_bytes, width))
        self._verifier = verifier

    def batch(self, index: int) -> Batch:
        """Returns a batch; see `SplitDataset.batch`."""
        start, stop = self.rows(index)
        if (verifier := self._verifier) is not None:
            verifier.check([self._path])
            self._verifier = None
        rows, first_id = self._rows[start:stop], 1 + self.num_numerical
        numerical = rows[:, 1:first_id].copy().view(np.float32)
        _check_finite(numerical, self._path, start, layout.default_names(self.num_numerical, 0)[1])
        return Batch(
            torch.from_numpy(numerical),
            torch.from_numpy(rows[:, first_id:].copy()),
            _labels(rows[:, 0], self._path, start),
        )


def open_binary(
    directory: Path,
    split: str,
    num_numerical: int,
    batch_size: int,
    subset: float = 1.0,
    verifier: Verifier | None = None,
    allow_links: bool = False,
    part: tuple[float, float] = (0.0, 1.0),
) -> BinaryDataset | None:
    """Opens a split of a binary dataset; returns None if there is no validation file.

    Raises:
        FileNotFoundError, ValueError: see `binary_file`, or the file has another size.
    """
    if (path := binary_file(directory, split, allow_links)) is None:
        return None
    sizes = layout.read_model_size(directory)
    return BinaryDataset(path, num_numerical, sizes, batch_size, subset, verifier, part)


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
    names = BINARY_FILES[split]
    name = next((name for name in names if (directory / name).is_file()), None)
    if name is None:
        if split == "validation":
            return None
        raise FileNotFoundError(f"{directory / names[0]}: missing; a binary dataset needs it")
    return within(directory, name, directory, allow_links)


def _check_finite(numerical: np.ndarray, path: Path, first_row: int, names: Sequence[str]) -> None:
    """Raises ValueError if numericals `[rows, num_numerical]` are NaN or infinite."""
    exponent, word = {2: (0x7C00, np.uint16), 4: (0x7F800000, np.uint32)}[numerical.itemsize]
    bits = numerical.view(word) & word(exponent)  # numpy's isfinite is slow for float16
    if bits.max(initial=0) == exponent:
        row, column = np.argwhere(~np.isfinite(numerical))[0]
        raise ValueError(
            f"{path}: row {first_row + row}, field {layout.field_of(names[column], column)}: "
            f"expected a finite number, got {numerical[row, column]}"
        )


def _labels(raw: np.ndarray, path: Path, first_row: int) -> torch.Tensor:
    wrong = (raw != 0) & (raw != 1)
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(
            f"{path}: row {first_row + row}: expected a label of 0 or 1, got {raw[row]}"
        )
    return torch.from_numpy(raw.astype(np.float32))
