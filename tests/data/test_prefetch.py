"""Batches are copied to a GPU ahead of use: a simulated GPU checks the order of operations.

A simulated stream does nothing until it is waited for, and a thread is on device 0 until it sets
another. On a real GPU, `clicks/test_datasets.py` compares the batches themselves.
"""

import threading
import time
from contextlib import closing, contextmanager

import numpy as np
import pytest
import torch

from dlrm.data import prefetch as prefetching
from dlrm.data.prefetch import prefetch

DEVICE = torch.device("cuda", 1)


class Stream:
    """Queue of work that is done when waited for."""

    def __init__(self, index):
        self.device, self.queue, self.done = torch.device("cuda", index), [], 0
        self.waited = []

    def record_event(self):
        self.queue.append(lambda: None)
        return self, len(self.queue)

    def wait_event(self, event):
        stream, end = event
        self.waited.append(event)
        while stream.done < end:
            stream.queue[stream.done]()
            stream.done += 1


class Copied:
    """A tensor on the GPU: garbage until its stream reaches the copy."""

    def __init__(self, cuda, source):
        self.device, self.values = DEVICE, np.full(source.shape, -1, source.dtype)
        self.made_on, self.used_on = cuda.stream_here(), []
        cuda.stream_here().queue.append(lambda: np.copyto(self.values, source))

    def record_stream(self, stream):
        self.used_on.append(stream)


class Pinned:
    def __init__(self, cuda, shape, dtype):
        assert cuda.device_here() == DEVICE.index, "memory would be pinned for another device"
        self._cuda, self._values = cuda, np.empty(shape, torch.empty(0, dtype=dtype).numpy().dtype)

    def numpy(self):
        return self._values

    def to(self, device, non_blocking):
        assert (device, non_blocking) == (DEVICE, True)
        return Copied(self._cuda, self._values)


class Cuda(threading.local):
    """Stands in for torch and torch.cuda in the reader."""

    def __init__(self, streams, main):
        self.cuda, self.device, self.Tensor = self, torch.device, torch.Tensor
        self._streams, self._main, self._current = streams, main, None
        self._device = DEVICE.index if threading.current_thread() is threading.main_thread() else 0

    def empty(self, shape, dtype, pin_memory):
        assert pin_memory
        return Pinned(self, shape, dtype)

    def set_device(self, device):
        self._device = device.index

    def current_device(self):
        return self._device

    device_here = current_device

    def Stream(self, index):  # noqa: N802  # torch's name
        self._streams.append(Stream(index))
        return self._streams[-1]

    @contextmanager
    def stream(self, stream):
        assert self._device == stream.device.index, "it would come back to another device"
        self._current = stream
        yield
        self._current = None

    def stream_here(self):
        return self._current or self._main

    def current_stream(self, device):
        assert device == DEVICE
        return self.stream_here()


class Pair:
    """A batch of two tensors that is no tuple."""

    def __init__(self, left, right):
        self.left, self.right = left, right

    def map(self, function):
        return Pair(function(self.left), function(self.right))


class Numbers:
    """A dataset in which every third batch takes longer."""

    def batch(self, index):
        time.sleep(0.01 * (index % 3 == 0))
        if index == 7:
            raise OSError("batch 7")
        return Pair(torch.full((2, 3), index).short(), torch.full((4,), index).half())


@pytest.fixture
def main_stream(monkeypatch):
    """Yields the caller's stream and the other streams of a simulated GPU."""
    main, streams = Stream(DEVICE.index), []
    monkeypatch.setattr(prefetching, "torch", Cuda(streams, main))
    prefetching._copying_stream.cache_clear()
    yield main, streams
    prefetching._copying_stream.cache_clear()


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_batch_has_arrived_where_it_is_used_and_stays_until_it_was(main_stream, device):
    main, streams = main_stream
    for _ in range(2):
        for index, batch in zip(
            [5, 0, 3, 6], prefetch(Numbers(), [5, 0, 3, 6], device), strict=True
        ):
            for tensor, dtype in ((batch.left, np.int16), (batch.right, np.float16)):
                assert tensor.values.dtype == dtype
                assert (tensor.values == index).all()
                assert tensor.used_on == [main]
                assert [tensor.made_on] == streams, "one for all readers"
    assert len(main.waited) == 8


def test_an_error_of_a_reader_is_raised_at_its_batch(main_stream):
    with closing(prefetch(Numbers(), range(100), DEVICE)) as batches:
        assert [next(batches).left.values[0, 0] for _ in range(7)] == list(range(7))
        with pytest.raises(OSError, match="batch 7"):
            next(batches)
