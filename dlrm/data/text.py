"""Token sequences for language models: batches, and the loader that cuts their padding off."""

from collections.abc import Callable, Generator
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from dlrm.data.batch import BatchedRows
from dlrm.data.loader import batch_order, prefetch
from dlrm.distributed import World

_MULTIPLE = 8  # batches are cut to a multiple of it, as tensor cores like
NO_TOKEN = -1  # in `masked_ids`: nothing is masked in this place


class TextBatch(NamedTuple):
    """A process's rows of a global batch; integers are as narrow as they were stored.

    Attributes:
        ids: tokens, `[rows, length]`, int32; [CLS] A [SEP] B [SEP] and padding.
        segments: 0 in A, 1 in B, `[rows, length]`, int8.
        lengths: tokens of each row that are no padding, `[rows]`, int32.
        indices: the source's number of each row, `[rows]`, int64.
        labels: of the row, `[rows]`, int64: its class, or whether B comes from elsewhere.
        spans: first and last token of an answer, `[rows, 2]`, int64; 0 and 0 where there is none.
        masked_positions: of tokens to be predicted, `[rows, predictions]`, int32, 0 where fewer.
        masked_ids: these tokens, `[rows, predictions]`, int32, NO_TOKEN where fewer.
        global_size: rows of the global batch.
        global_masked: tokens to be predicted in the global batch.
        padded: whether any row is shorter than `length`.
    """

    ids: Tensor
    segments: Tensor
    lengths: Tensor
    indices: Tensor
    labels: Tensor | None = None
    spans: Tensor | None = None
    masked_positions: Tensor | None = None
    masked_ids: Tensor | None = None
    global_size: int = 0
    global_masked: int = 0
    padded: bool = True

    def map(self, function: Callable[[Tensor], Tensor]) -> "TextBatch":
        """Returns the batch with `function` applied to each tensor that it has."""
        return TextBatch(*(function(v) if isinstance(v, Tensor) else v for v in self))  # type: ignore[arg-type]

    def split(self, parts: int) -> list["TextBatch"]:
        """Cuts the rows in `parts`, or one a row where there are fewer; sizes differ by one."""
        rows = len(self.ids)
        parts = max(1, min(parts, rows))
        bounds = [-(-rows * part // parts) for part in range(parts + 1)]
        return [
            self.map(lambda tensor, a=a, b=b: tensor[a:b])  # type: ignore[misc]
            for a, b in zip(bounds[:-1], bounds[1:], strict=True)
        ]


class TextSource(Protocol):
    """Rows that can be read in any order.

    Attributes:
        num_samples: rows that there are.
        length: tokens of a row with its padding.
        lengths: tokens of each row without it, `[num_samples]`.
        num_masked: tokens to be predicted in each row, `[num_samples]`; None: there are none.
    """

    num_samples: int
    length: int
    lengths: np.ndarray
    num_masked: np.ndarray | None

    def read(self, rows: np.ndarray) -> TextBatch:
        """Returns rows, padded to `length`, on the host."""
        ...


class TextLoader:
    """Batches of a source, in a new order each epoch, read ahead by background threads.

    Rank r of W takes `World.part` of each batch and reads no others. What a batch holds depends on
    the arguments, the epoch and its index alone.

    Args:
        source: what to read.
        batch_size: rows of a global batch.
        shuffle: whether each epoch takes the rows in a new order.
        drop_last: leave out the last batch of an epoch where it has fewer rows.
        window: batches whose rows are sorted by length, so that those of a batch have about the
            same: less padding. 0 sorts nothing.
        cut: cut batches after their longest row; else all have the source's length, as graphs
            want it.
        seed: of the order.
        world: which rows are this process's, and the device on which batches are wanted.
        depth: batches read ahead.

    Attributes:
        num_samples: rows of an epoch, all ranks together.

    Raises:
        ValueError: there is not one batch; the sizes are named.
    """

    def __init__(
        self,
        source: TextSource,
        batch_size: int,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        window: int = 0,
        cut: bool = True,
        seed: int = 0,
        world: World = World(),
        depth: int = 4,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"--batch_size: expected 1 or more, got {batch_size}")
        num_rows = source.num_samples
        if drop_last:
            num_rows -= num_rows % batch_size
        if not num_rows:
            raise ValueError(
                f"--batch_size {batch_size}: expected at least one "
                f"{'whole batch' if drop_last else 'row'}, got {source.num_samples} rows"
            )
        self.source, self.num_samples = source, num_rows
        self._batches = BatchedRows(num_rows, batch_size)
        self._shuffle, self._window, self._cut, self._seed = shuffle, window, cut, seed
        self._world, self._depth = world, depth

    def __len__(self) -> int:
        return len(self._batches)

    def batches(self, epoch: int = 0, start: int = 0) -> Generator[TextBatch, None, None]:
        """Yields the batches of an epoch from the one with index `start` on."""
        return prefetch(self.epoch(epoch), range(start, len(self)), self._world.device, self._depth)

    def epoch(self, epoch: int) -> "Epoch":
        """Returns the batches of an epoch, to be read in any order."""
        order = batch_order(self.source.num_samples, epoch, self._seed, self._shuffle)
        rows = [order[slice(*self._batches.rows(i))] for i in range(len(self))]
        if self._window:
            rows = self._of_like_length(rows, epoch)
        return Epoch(self.source, rows, self._cut, self._world)

    def _of_like_length(self, rows: list[np.ndarray], epoch: int) -> list[np.ndarray]:
        """Sorts the rows of each window by length, and puts its batches in their old order."""
        result = []
        for begin in range(0, len(rows), self._window):
            window = rows[begin : begin + self._window]
            mixed = np.concatenate(window)
            by_length = mixed[np.argsort(self.source.lengths[mixed], kind="stable")]
            ends = np.cumsum([len(batch) for batch in window])
            parts = np.split(by_length, ends[:-1])
            if self._shuffle:
                keys = np.random.SFC64([self._seed, epoch, begin]).random_raw(len(parts))
                # The short last batch of an epoch stays last, since batches are of equal size.
                last = len(parts) if ends[-1] % len(window[0]) == 0 else len(parts) - 1
                parts = [parts[i] for i in np.argsort(keys[:last])] + parts[last:]
            result += parts
        return result


class Epoch(NamedTuple):
    """The batches of one epoch of a `TextLoader`."""

    source: TextSource
    rows: list[np.ndarray]
    cut: bool
    world: World

    def batch(self, index: int) -> TextBatch:
        """Returns a batch, which depends on `index` and on nothing that was read before."""
        rows, source = self.rows[index], self.source
        own = rows[self.world.part(len(rows))]
        batch = source.read(own)
        masked = 0 if source.num_masked is None else int(source.num_masked[rows].sum())
        longest = int(source.lengths[own].max(initial=0))
        length = min(source.length, -(-max(longest, 1) // _MULTIPLE) * _MULTIPLE)
        if self.cut:
            batch = _cut(batch, length)
        padded = bool((source.lengths[own] < batch.ids.shape[1]).any())
        return batch._replace(global_size=len(rows), global_masked=masked, padded=padded)


def _cut(batch: TextBatch, length: int) -> TextBatch:
    batch = batch._replace(ids=batch.ids[:, :length], segments=batch.segments[:, :length])
    if batch.masked_ids is None or batch.masked_positions is None:
        return batch
    used = int((batch.masked_ids != NO_TOKEN).any(dim=0).sum())
    return batch._replace(
        masked_ids=batch.masked_ids[:, :used], masked_positions=batch.masked_positions[:, :used]
    )
