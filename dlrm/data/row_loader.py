"""Batches of each epoch, of rows that can be read in any order: images or texts."""

from collections.abc import Generator
from typing import Generic

import numpy as np

from dlrm.data.prefetch import BatchedRows, BatchT, Readable, batch_order, prefetch
from dlrm.distributed import World


class RowLoader(Generic[BatchT]):
    """Batches in a new order each epoch, prefetched by background threads.

    `TextLoader` and `ImageLoader` describe the arguments; `num_rows` is their source's.
    """

    row = "row"  # a row's name in messages

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        shuffle: bool,
        drop_last: bool,
        seed: int,
        world: World,
        depth: int,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"--batch_size: expected 1 or more, got {batch_size}")
        self.num_samples = num_rows - (num_rows % batch_size if drop_last else 0)
        if not self.num_samples:
            raise ValueError(
                f"--batch_size {batch_size}: expected at least one "
                f"{'whole batch' if drop_last else self.row}, got {num_rows} {self.row}s "
                "(a batch is --batch_size times accumulation and replicas)"
            )
        self._batches = BatchedRows(self.num_samples, batch_size)
        self._num_rows, self._shuffle, self._seed = num_rows, shuffle, seed
        self._world, self._depth = world, depth

    def __len__(self) -> int:
        return len(self._batches)

    def epoch(self, epoch: int) -> Readable[BatchT]:
        """Returns the batches of an epoch, to be read in any order."""
        raise NotImplementedError

    def batches(self, epoch: int = 0, start: int = 0) -> Generator[BatchT, None, None]:
        """Yields the batches of an epoch from index `start` on."""
        return prefetch(self.epoch(epoch), range(start, len(self)), self._world.device, self._depth)

    def _order(self, epoch: int) -> np.ndarray:
        """Returns the rows of an epoch, `[num_samples]`."""
        return batch_order(self._num_rows, epoch, self._seed, self._shuffle)[: self.num_samples]
