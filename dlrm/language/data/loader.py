"""Token sequences for language models: batches, and the loader that trims their padding."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from dlrm.data.prefetch import BatchedRows
from dlrm.data.row_loader import RowLoader
from dlrm.distributed import World

_MULTIPLE = 8  # lengths of trimmed batches are multiples of it, for tensor cores
_OF_BATCHES, _IN_BATCH = 1, 2  # ends of keys: numpy does not distinguish [1, 2] from [1, 2, 0]
NO_TOKEN = -1  # in `masked_ids`: no masked token in this place


class TextBatch(NamedTuple):
    """A process's rows of a global batch; integers keep the dtypes they are stored in.

    Attributes:
        ids: tokens, `[rows, length]`, int32; [CLS] A [SEP] B [SEP] and padding.
        segments: 0 in A, 1 in B, `[rows, length]`, int8.
        lengths: tokens of each row without padding, `[rows]`, int32.
        indices: the source's number of each row, `[rows]`, int64.
        labels: class of each row, or whether B is from another document, `[rows]`, int64.
        spans: first and last token of an answer, `[rows, 2]`, int64; 0 and 0 if there is none.
        masked_positions: positions of tokens to predict, `[rows, predictions]`, int32, then 0.
        masked_ids: these tokens, `[rows, predictions]`, int32, then NO_TOKEN.
        global_size: rows of the global batch.
        global_masked: number of tokens to predict in the global batch.
        padded: whether any row is shorter than `length`.
        parts: for each part of a split batch, its length, and whether any of its rows is shorter.
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
    parts: tuple[tuple[int, bool], ...] = ()

    def map(self, function: Callable[[Tensor], Tensor]) -> "TextBatch":
        """Returns the batch with `function` applied to each tensor that it has."""
        return TextBatch(*(function(v) if isinstance(v, Tensor) else v for v in self))  # type: ignore[arg-type]

    def split(self, parts: int) -> list["TextBatch"]:
        """Splits the rows into `parts`, or one per row if there are fewer; sizes differ by one."""
        bounds = _bounds(len(self.ids), parts)
        batches = [
            self.map(lambda tensor, a=a, b=b: tensor[a:b])._replace(parts=())  # type: ignore[misc]
            for a, b in zip(bounds[:-1], bounds[1:], strict=True)
        ]
        if len(self.parts) != len(batches):
            return batches
        return [
            part._replace(
                ids=part.ids[:, :length], segments=part.segments[:, :length], padded=padded
            )
            for part, (length, padded) in zip(batches, self.parts, strict=True)
        ]


def _bounds(rows: int, parts: int) -> list[int]:
    """Returns the first row of each part, and the end of the last."""
    parts = max(1, min(parts, rows))
    return [-(-rows * part // parts) for part in range(parts + 1)]


class TextSource(Protocol):
    """Rows that can be read in any order.

    Attributes:
        num_samples: number of rows.
        length: tokens of a row with padding.
        lengths: tokens of each row without padding, `[num_samples]`.
        num_masked: number of tokens to predict in each row, `[num_samples]`; None for none.
    """

    num_samples: int
    length: int
    lengths: np.ndarray
    num_masked: np.ndarray | None

    def read(self, rows: np.ndarray) -> TextBatch:
        """Returns rows, padded to `length`, on the host."""
        ...


class TextLoader(RowLoader[TextBatch]):
    """Batches of a source, in a new order each epoch, prefetched by background threads.

    Each rank reads only `World.part` of a batch. The content of a batch depends only on the
    arguments, the epoch and its index.

    Args:
        window: number of batches within which rows are sorted by length, for less padding. Rows
            within a batch are in random order. 0: no sorting.
        cut: trim batches to their longest row; otherwise all have the source's length, as graphs
            require.
        parts: number of micro-batches that a process's rows will be split into. If batches are
            trimmed, these rows are sorted by length, so that each micro-batch is trimmed to its own
            longest row.
        order: see `RowLoader`, also for errors.
    """

    def __init__(
        self,
        source: TextSource,
        batch_size: int,
        *,
        window: int = 0,
        cut: bool = True,
        parts: int = 1,
        **order: Any,
    ) -> None:
        super().__init__(source.num_samples, batch_size, **order)
        if window < 0:
            raise ValueError(f"window: expected 0 or more batches, got {window}")
        if parts < 1:
            raise ValueError(f"parts: expected 1 or more, got {parts}")
        self.source, self._window = source, window
        self._parts = parts if cut else 0

    def epoch(self, epoch: int) -> "Epoch":
        """Returns the batches of an epoch, to be read in any order."""
        order, keys = self._order(epoch), None
        if self._window:
            order, keys = self._of_like_length(order, epoch), (self._seed, epoch)
        return Epoch(self.source, self._batches, order, keys, self._parts, self._world)

    def _of_like_length(self, order: np.ndarray, epoch: int) -> np.ndarray:
        """Sorts the rows of each window by length, and puts its batches in a random order.

        A short last batch stays where it is, since batches are of equal size.
        """
        size = self._batches.batch_size
        of_window = size * self._window
        whole = len(order) - len(order) % of_window
        windows = self._by_length(order[:whole].reshape(-1, of_window))
        rest = self._by_length(order[None, whole:])[0]
        whole_rest = len(rest) - len(rest) % size
        if self._shuffle:
            random = np.random.SFC64([self._seed, epoch, 0, _OF_BATCHES])
            keys = random.random_raw(len(order) // size)
            num_whole = whole // size
            windows = _permuted(windows, keys[:num_whole].reshape(-1, self._window), size)
            rest[:whole_rest] = _permuted(rest[None, :whole_rest], keys[None, num_whole:], size)[0]
        return np.concatenate([windows.reshape(-1), rest])

    def _by_length(self, windows: np.ndarray) -> np.ndarray:
        lengths = self.source.lengths[windows]
        if self.source.length < 1 << 16:
            lengths = lengths.astype(np.uint16)  # numpy sorts them ten times as fast
        return np.take_along_axis(windows, np.argsort(lengths, axis=1, kind="stable"), axis=1)


def _permuted(windows: np.ndarray, keys: np.ndarray, size: int) -> np.ndarray:
    """Sorts the batches of each window, `[windows, batches * size]`, by their keys."""
    batches = windows.reshape(*keys.shape, size)
    order = np.argsort(keys, axis=1, kind="stable")
    return np.take_along_axis(batches, order[:, :, None], axis=1).reshape(windows.shape)


class Epoch(NamedTuple):
    """The batches of one epoch of a `TextLoader`."""

    source: TextSource
    batches: BatchedRows
    order: np.ndarray
    keys: tuple[int, int] | None
    parts: int  # micro-batches to trim batches for; 0: no trimming
    world: World

    def rows(self, index: int) -> np.ndarray:
        """Returns the rows of a global batch."""
        rows = self.order[slice(*self.batches.rows(index))]
        if self.keys is None:
            return rows
        # They are sorted by length, which would give the last rank the longest ones.
        mixed = np.random.SFC64([*self.keys, index, _IN_BATCH]).random_raw(len(rows))
        return rows[np.argsort(mixed, kind="stable")]

    def batch(self, index: int) -> TextBatch:
        """Returns a batch, which depends on `index` and not on earlier reads."""
        rows, source = self.rows(index), self.source
        own_rows = rows[self.world.part(len(rows))]
        if self.parts > 1:
            own_rows = own_rows[np.argsort(source.lengths[own_rows], kind="stable")]
        batch = source.read(own_rows)
        masked = 0 if source.num_masked is None else int(source.num_masked[rows].sum())
        lengths: np.ndarray = source.lengths[own_rows]
        parts: tuple[tuple[int, bool], ...] = ()
        if self.parts:
            bounds = _bounds(len(own_rows), self.parts)
            parts = tuple(
                self._shape(lengths[a:b]) for a, b in zip(bounds[:-1], bounds[1:], strict=True)
            )
            batch = _cut(batch, max(length for length, _ in parts))
        padded = bool((lengths < batch.ids.shape[1]).any())
        return batch._replace(
            global_size=len(rows), global_masked=masked, padded=padded, parts=parts
        )

    def _shape(self, lengths: np.ndarray) -> tuple[int, bool]:
        """Returns the length to trim rows of these lengths to, and whether any is shorter."""
        longest = int(lengths.max(initial=1))
        length = min(self.source.length, -(-longest // _MULTIPLE) * _MULTIPLE)
        return length, bool((lengths < length).any())


def _cut(batch: TextBatch, length: int) -> TextBatch:
    batch = batch._replace(ids=batch.ids[:, :length], segments=batch.segments[:, :length])
    if batch.masked_ids is None or batch.masked_positions is None:
        return batch
    used = int((batch.masked_ids != NO_TOKEN).any(dim=0).sum())
    return batch._replace(
        masked_ids=batch.masked_ids[:, :used], masked_positions=batch.masked_positions[:, :used]
    )
