"""Batches of any kind in the order of an epoch, prefetched."""

import math
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import islice
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from dlrm.data.workers import in_order

BatchT = TypeVar("BatchT", covariant=True)


class Readable(Protocol[BatchT]):
    """Batches that can be prefetched: each is a pure function of its index.

    They hold tensors, and `map(function)` of a batch returns it with each tensor replaced.
    """

    def batch(self, index: int) -> BatchT:
        """Returns a batch, which depends on `index` and not on earlier reads."""
        ...


def batch_order(num_batches: int, epoch: int, seed: int, shuffle: bool) -> np.ndarray:
    """Returns the order in which an epoch takes its batches; a random one moves whole batches.

    It depends only on the arguments, so a resumed run can start in the middle of an epoch. A
    shuffled order sorts random keys, since numpy guarantees those across versions, but not its
    permutations.
    """
    if not shuffle:
        return np.arange(num_batches)
    keys = np.random.SFC64([seed, epoch]).random_raw(num_batches)
    return np.argsort(keys, kind="stable")


def prefetch(
    dataset: Readable[BatchT],
    indices: Iterable[int],
    device: str | torch.device = "cpu",
    depth: int = 4,
    at_once: int = 1,
) -> Generator[BatchT, None, None]:
    """Yields batches in the order of `indices`, prefetched by background threads.

    An error in a reader is raised here, at its batch. Threads end with the generator: exhaust it,
    or close it (`contextlib.closing`). Reading starts at the first `next`.

    On CUDA the readers also copy, through pinned memory and on a stream of their own. They allocate
    while the caller computes, so a CUDA graph captured meanwhile needs
    `capture_error_mode="thread_local"`.

    Args:
        indices: batches to read; consumed as reading advances.
        depth: number of reads that are done, or under way, ahead of the batch in use.
        at_once: batches of one read. Waking a reader costs more than reading a small batch.
    """
    for name, value in (("depth", depth), ("at_once", at_once)):
        if value < 1:
            raise ValueError(f"{name}: expected 1 or more, got {value}")
    device = torch.device(device)
    if device.type == "cuda":
        return _prefetched(*_cuda_reader(dataset, device), indices, depth, at_once)

    def read(index: int) -> Any:
        batch: Any = dataset.batch(index)
        return batch.map(lambda tensor: tensor.to(device))  # or is there already

    return _prefetched(read, lambda batch: batch, indices, depth, at_once)


def _prefetched(
    read: Callable, take: Callable, indices: Iterable[int], depth: int, at_once: int
) -> Generator[Any, None, None]:
    remaining = iter(indices)
    groups = iter(lambda: list(islice(remaining, at_once)), [])
    readers = ThreadPoolExecutor(depth, thread_name_prefix="dlrm-reader")
    try:
        for batches, error in in_order(readers, partial(_read_some, read), groups, depth):
            yield from map(take, batches)
            if error is not None:
                raise error
    finally:
        readers.shutdown(wait=True, cancel_futures=True)


def _read_some(read: Callable, indices: list[int]) -> tuple[list[Any], Exception | None]:
    """Reads batches up to the first error, which belongs to the batch after them."""
    batches: list[Any] = []
    try:
        for index in indices:
            batches.append(read(index))
    except Exception as error:
        return batches, error
    return batches, None


def _cuda_reader(dataset: Readable, device: torch.device) -> tuple[Callable, Callable]:
    """Returns functions for a reader's thread and for the caller's, which both return at once.

    The first reads a batch, starts its copy to the device and marks the end of the copy; the second
    makes the caller's stream wait for that.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    device, side = torch.device("cuda", index), _copying_stream(index)

    def move(tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            return tensor
        # numpy copies on this thread only; torch would start a team of threads for each reader.
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        np.copyto(pinned.numpy(), tensor.numpy())
        return pinned.to(device, non_blocking=True)  # torch keeps it until it is copied

    def read(index: int) -> Any:
        # By default a thread has the first device, and leaving the stream would use memory there.
        torch.cuda.set_device(device)
        with torch.cuda.stream(side):
            batch: Any = dataset.batch(index)
            return batch.map(move), side.record_event()

    def take(result: Any) -> Any:
        batch, copied = result
        stream = torch.cuda.current_stream(device)
        stream.wait_event(copied)

        def used(tensor: Tensor) -> Tensor:
            tensor.record_stream(stream)
            return tensor

        return batch.map(used)

    return read, take


@cache
def _copying_stream(index: int) -> torch.cuda.Stream:
    """The one of a device for all readers: freed memory serves the same stream only, and of 32
    streams the 33rd is the first again, on which somebody may record a graph."""
    return torch.cuda.Stream(index)


class BatchedRows:
    """Divides rows into batches; the base of the datasets.

    Args:
        subset: use only this fraction of the batches, in (0, 1], rounded up.
        part: use only the rows between these two shares of all of them.

    Attributes:
        batch_size: rows of every batch but possibly the last.
        num_samples: rows in all batches together.
    """

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        subset: float = 1.0,
        part: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        self.batch_size = batch_size
        self._first, end = (round(share * num_rows) for share in part)
        num_rows = end - self._first
        self._num_batches = math.ceil(math.ceil(num_rows / batch_size) * subset)
        self.num_samples = min(num_rows, self._num_batches * batch_size)

    def __len__(self) -> int:
        return self._num_batches

    def rows(self, index: int) -> tuple[int, int]:
        """Returns the first row of a batch, and the row after its last.

        Raises:
            IndexError: there is no such batch.
        """
        if not 0 <= index < self._num_batches:
            raise IndexError(f"batch {index}: expected one of 0 to {self._num_batches - 1}")
        start = index * self.batch_size
        stop = min(start + self.batch_size, self.num_samples)
        return self._first + start, self._first + stop
