"""Batches of each epoch, of rows that can be read in any order: images or texts."""

from collections.abc import Callable, Generator
from typing import Any, Generic, NamedTuple

import numpy as np

from dlrm.data.prefetch import BatchedRows, BatchT, Readable, batch_order, prefetch
from dlrm.distributed import World


class Epoch(NamedTuple):
    """The batches of an epoch: a function of their index; see `Readable`."""

    batch: Callable[[int], Any]


class RowLoader(Generic[BatchT]):
    """Batches of each epoch, prefetched by background threads.

    Args:
        num_rows: rows of the source.
        batch_size: rows of a global batch.
        shuffle: whether each epoch takes the rows in a new order.
        drop_last: leave out the last batch of an epoch if it has fewer rows.
        seed: seed of the order, and of what a subclass draws.
        world: determines this process's rows, and the device of the batches.
        depth: number of batches to prefetch.

    Attributes:
        num_samples: rows of an epoch, all ranks together.

    Raises:
        ValueError: there is less than one batch; the message has the sizes.
    """

    row = "row"  # a row's name in messages

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        world: World = World(),
        depth: int = 4,
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
