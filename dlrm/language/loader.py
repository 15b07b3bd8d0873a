"""Token sequences for language models: batches, and the loader that trims their padding."""

from collections.abc import Callable, Generator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from dlrm.data.prefetch import Readable
from dlrm.data.row_loader import Epoch, RowLoader

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
        masked_positions: positions of tokens to predict, `[rows, predictions]`, int32, and 0.
        masked_ids: these tokens, `[rows, predictions]`, int32, and NO_TOKEN.
        global_size: rows of the global batch.
        global_masked: number of tokens to predict in the global batch.
        on_host: `lengths`, which a device need not be asked for.
        trims: whether parts of the batch are trimmed to their longest row.
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
    on_host: np.ndarray = _OF_OTHER_TASKS
    trims: bool = False

    @classmethod
    def of(cls, rows: np.ndarray, *tokens: np.ndarray, **others: np.ndarray) -> "TextBatch":
        """Returns rows of a source, given ids, segments, lengths, and further fields by name."""
        tensors = {name: torch.from_numpy(array) for name, array in others.items()}
        places = torch.from_numpy(np.asarray(rows, np.int64))
        return cls(*map(torch.from_numpy, tokens), indices=places, **tensors)  # type: ignore[arg-type, misc]

    @property
    def padded(self) -> bool:
        """Returns whether any row may be shorter than the batch."""
        return self.on_host is None or bool((self.on_host < self.ids.shape[1]).any())

    def map(self, function: Callable[[Tensor], Tensor]) -> "TextBatch":
        """Returns the batch with `function` applied to each tensor that it has."""
        return TextBatch(*(function(v) if isinstance(v, Tensor) else v for v in self))  # type: ignore[arg-type]

    def trimmed(self) -> "TextBatch":
        """Returns the batch without columns that are padding in all rows, if it is to be trimmed.

        Lengths are multiples of 8, for tensor cores, unless rows are shorter.
        """
        if not self.trims:
            return self
        length = -(-int(self.on_host.max(initial=1)) // _MULTIPLE) * _MULTIPLE
        return self._replace(ids=self.ids[:, :length], segments=self.segments[:, :length])

    def split(self, parts: int) -> list["TextBatch"]:
        """Splits the rows into `parts`, or one per row if there are fewer; sizes differ by one."""
        rows = len(self.ids)
        parts = max(1, min(parts, rows))
        bounds = [-(-rows * part // parts) for part in range(parts + 1)]
        return [
            self.map(lambda tensor, a=a, b=b: tensor[a:b])  # type: ignore[misc]
            ._replace(on_host=None if self.on_host is None else self.on_host[a:b])
            .trimmed()
            for a, b in pairwise(bounds)
        ]


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
        prefetch: whether to prefetch batches; otherwise each is read on request.
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
        prefetch: bool = True,
        **order: Any,
    ) -> None:
        super().__init__(source.num_samples, batch_size, **order)
        self.source, self._window, self._cut, self._parts = source, window, cut, parts
        self._prefetch = prefetch

    def batches(self, epoch: int = 0, start: int = 0) -> Generator[TextBatch, None, None]:
        """Yields the batches of an epoch from index `start` on."""
        if self._prefetch:
            return super().batches(epoch, start)
        read, device = self.epoch(epoch), self._world.device
        indices = range(start, len(self))
        return (read.batch(i).map(lambda tensor: tensor.to(device)) for i in indices)

    def epoch(self, epoch: int) -> "Readable[TextBatch]":
        """Returns the batches of an epoch, to be read in any order."""
        order = self._order(epoch)
        if self._window:
            order = self._of_like_length(order, epoch)
        return Epoch(partial(self._batch, epoch, order))

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

    def _batch(self, epoch: int, order: np.ndarray, index: int) -> TextBatch:
        rows, source = order[slice(*self._batches.rows(index))], self.source
        if self._window:  # rows sorted by length would give the last rank the longest
            mixed = np.random.SFC64([self._seed, epoch, index, _IN_BATCH]).random_raw(len(rows))
            rows = rows[np.argsort(mixed, kind="stable")]
        own_rows = rows[self._world.part(len(rows))]
        if self._cut and self._parts > 1:
            own_rows = own_rows[np.argsort(source.lengths[own_rows], kind="stable")]
        batch = source.read(own_rows)._replace(
            global_size=len(rows),
            global_masked=0 if source.num_masked is None else int(source.num_masked[rows].sum()),
            on_host=source.lengths[own_rows],
            trims=self._cut,
        )
        if self._cut and batch.masked_ids is not None:
            is_used = (batch.masked_ids != NO_TOKEN).any(dim=0)
            used = int((is_used * torch.arange(1, len(is_used) + 1)).amax())
            masked = batch.masked_positions[:, :used], batch.masked_ids[:, :used]
            batch = batch._replace(masked_positions=masked[0], masked_ids=masked[1])
        return batch.trimmed()
