"""What a dataset is to the rest of the package: batches, each a pure function of its index."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Batch(NamedTuple):
    """Samples as the model takes them; ids and numericals stay as narrow as they were stored.

    Attributes:
        numerical: `[batch, num_numerical]`, float16 (as on disk) or float32.
        categorical: `[batch, tables]`, int8 to int64, one id for each table; with `lengths`,
            `[total]`, the ids bag after bag as `ops.joint_embedding_bag` takes them.
        labels: `[batch]`, float32, 0 or 1.
        lengths: ids of each sample and table, `[batch, tables]`, int8 to int64; None is one each.
        global_size: samples of the batch that this is a part of; None: it is a whole one.
    """

    numerical: Tensor
    categorical: Tensor
    labels: Tensor
    lengths: Tensor | None = None
    global_size: int | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """Returns the batch with `function` applied to each tensor that it has."""
        return Batch(*(function(v) if isinstance(v, Tensor) else v for v in self))  # type: ignore[arg-type]

    def split(self, parts: int) -> list["Batch"]:
        """Cuts the batch in `parts` or, where it has fewer samples, in samples.

        With `lengths` this waits for the device, since where ids are cut depends on them.
        """
        size = len(self.labels)
        parts = min(parts, size)
        if parts <= 1:
            return [self]
        split = [t.tensor_split(parts) for t in (self.numerical, self.labels)]
        lengths: Sequence[Tensor | None] = [None] * parts
        if self.lengths is None:
            ids = self.categorical.tensor_split(parts)
        else:
            lengths = self.lengths.tensor_split(parts)
            totals = [part.sum(dtype=torch.int64) for part in lengths]  # type: ignore[union-attr]
            ids = self.categorical.split(torch.stack(totals).tolist())
        whole = self.global_size or size
        return [
            Batch(numerical, categorical, labels, part, whole)
            for numerical, categorical, labels, part in zip(
                split[0], ids, split[1], lengths, strict=True
            )
        ]


class Dataset(Protocol):
    """One split of a dataset.

    Attributes:
        table_sizes: rows of each table, in feature order.
        categorical_names: the tables' features, in the same order.
        num_numerical: numerical features of a sample.
        num_samples: samples in all batches together.
        batch_size: samples of every batch but possibly the last.
    """

    table_sizes: list[int]
    categorical_names: list[str]
    num_numerical: int
    num_samples: int
    batch_size: int

    def __len__(self) -> int:
        """Returns the number of batches, the short last one included."""
        ...

    def batch(self, index: int) -> Batch:
        """Returns a batch, which depends on `index` and on nothing that was read before."""
        ...


class BatchedRows:
    """Divides rows into batches; the datasets inherit their length from it.

    Args:
        num_rows: rows that there are.
        batch_size: rows of a batch.
        subset: use only this fraction of the batches, in (0, 1], rounded up.
    """

    def __init__(self, num_rows: int, batch_size: int, subset: float = 1.0) -> None:
        self.batch_size = batch_size
        self._num_batches = math.ceil(math.ceil(num_rows / batch_size) * subset)
        self.num_samples = min(num_rows, self._num_batches * batch_size)

    def __len__(self) -> int:
        return self._num_batches

    def rows(self, index: int) -> tuple[int, int]:
        """Returns the first row of a batch and the one after its last.

        Raises:
            IndexError: there is no such batch.
        """
        if not 0 <= index < self._num_batches:
            raise IndexError(f"batch {index}: expected one of 0 to {self._num_batches - 1}")
        start = index * self.batch_size
        return start, min(start + self.batch_size, self.num_samples)
