"""Token sequences for language models: batches, and the loader that trims their padding."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from dlrm.data.prefetch import BatchedRows
from dlrm.data.row_loader import RowLoader
from dlrm.distributed import World

_MULTIPLE = 8  # lengths of trimmed batches are multiples of it, for tensor cores
_OF_BATCHES, _IN_BATCH = 1, 2  # ends of keys: numpy does not distinguish [1, 2] from [1, 2, 0]
NO_TOKEN = -1  # in `masked_ids`: no masked token in this place
_OF_OTHER_TASKS: Any = None  # default of fields that rows of some tasks have


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
    labels: Tensor = _OF_OTHER_TASKS
    spans: Tensor = _OF_OTHER_TASKS
    masked_positions: Tensor = _OF_OTHER_TASKS
    masked_ids: Tensor = _OF_OTHER_TASKS
    global_size: int = 0
    global_masked: int = 0
    padded: bool = True
    parts: tuple[tuple[int, bool], ...] = ()

    @classmethod
    def of(cls, rows: np.ndarray, *tokens: np.ndarray, **others: np.ndarray | None) -> "TextBatch":
        """Returns rows of a source, given ids, segments, lengths, and further fields by name."""
        tensors = {name: torch.from_numpy(a) for name, a in others.items() if a is not None}
        places = torch.from_numpy(np.asarray(rows, np.int64))
        return cls(*map(torch.from_numpy, tokens), indices=places, **tensors)  # type: ignore[arg-type, misc]

    def map(self, function: Callable[[Tensor], Tensor]) -> "TextBatch":
        """Returns the batch with `function` applied to each tensor that it has."""
        return TextBatch(*(function(v) if isinstance(v, Tensor) else v for v in self))  # type: ignore[arg-type]

    def split(self, parts: int) -> list["TextBatch"]:
        """Splits the rows into `parts`, or one per row if there are fewer; sizes differ by one."""
        batches = [
            self.map(lambda tensor, part=part: tensor[part])._replace(parts=())  # type: ignore[misc]
            for part in _parts(len(self.ids), parts)
        ]
        if len(self.parts) != len(batches):
            return batches
        return [
            part._replace(
                ids=part.ids[:, :length], segments=part.segments[:, :length], padded=padded
            )
            for part, (length, padded) in zip(batches, self.parts, strict=True)
        ]


def _parts(rows: int, parts: int) -> list[slice]:
    parts = max(1, min(parts, rows))
    return [slice(-(-rows * n // parts), -(-rows * (n + 1) // parts)) for n in range(parts)]


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
        self.source, self._window, self._parts = source, window, parts if cut else 0

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
        random = np.random.SFC64([self._seed, epoch, 0, _OF_BATCHES])
        keys = random.random_raw(len(order) // size)
        narrow = np.min_scalar_type(self.source.length)  # which numpy sorts ten times as fast
        lengths, windows = self.source.lengths.astype(narrow), []
        for first in range(0, len(order), size * self._window):
            rows = order[first : first + size * self._window]
            rows = rows[np.argsort(lengths[rows], kind="stable")]
            if self._shuffle:
                whole = len(rows) // size
                mixed = np.argsort(keys[first // size : first // size + whole], kind="stable")
                batches = rows[: whole * size].reshape(whole, size)[mixed]
                rows = np.concatenate([batches.reshape(-1), rows[whole * size :]])
            windows.append(rows)
        return np.concatenate(windows)


class Epoch(NamedTuple):
    """The batches of one epoch of a `TextLoader`."""

    source: TextSource
    batches: BatchedRows
    order: np.ndarray
    keys: tuple[int, int] | None
    parts: int  # micro-batches to trim batches for; 0: no trimming
    world: World

    def batch(self, index: int) -> TextBatch:
        """Returns a batch, which depends on `index` and not on earlier reads."""
        rows, source = self.order[slice(*self.batches.rows(index))], self.source
        if self.keys is not None:  # rows sorted by length would give the last rank the longest
            mixed = np.random.SFC64([*self.keys, index, _IN_BATCH]).random_raw(len(rows))
            rows = rows[np.argsort(mixed, kind="stable")]
        own_rows = rows[self.world.part(len(rows))]
        if self.parts > 1:
            own_rows = own_rows[np.argsort(source.lengths[own_rows], kind="stable")]
        batch, lengths = source.read(own_rows), source.lengths[own_rows]
        parts: list[tuple[int, bool]] = []
        if self.parts:
            parts = [self._shape(lengths[part]) for part in _parts(len(own_rows), self.parts)]
            batch = _cut(batch, max(length for length, _ in parts))
        masked = 0 if source.num_masked is None else int(source.num_masked[rows].sum())
        padded = bool((lengths < batch.ids.shape[1]).any())
        return batch._replace(
            global_size=len(rows), global_masked=masked, padded=padded, parts=tuple(parts)
        )

    def _shape(self, lengths: np.ndarray) -> tuple[int, bool]:
        """Returns the length to trim rows of these lengths to, and whether any is shorter."""
        longest = int(lengths.max(initial=1))
        length = min(self.source.length, -(-longest // _MULTIPLE) * _MULTIPLE)
        return length, bool((lengths < length).any())


def _cut(batch: TextBatch, length: int) -> TextBatch:
    batch = batch._replace(ids=batch.ids[:, :length], segments=batch.segments[:, :length])
    if batch.masked_ids is None:
        return batch
    used = int((batch.masked_ids != NO_TOKEN).any(dim=0).sum())
    return batch._replace(
        masked_ids=batch.masked_ids[:, :used], masked_positions=batch.masked_positions[:, :used]
    )
