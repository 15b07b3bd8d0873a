"""Records what a function of a batch launches on a GPU, as one CUDA graph, and replays it.

The launches of a DLRM's step take the host longer than their work takes a large GPU. A graph is
launched at once: what it reads lies where it lay when it was recorded, and whatever changes from
step to step (batch, learning rate, loss scale, overflow) is read on the device.
"""

import warnings
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

T = TypeVar("T")
CALLS_BEFORE = 3  # until libraries have chosen their kernels and optimizers have their state


class Recorder(Protocol):
    """Runs functions without arguments, and records them."""

    def run(self, function: Callable[[], T]) -> T:
        """Runs a function where it would be recorded."""
        ...

    def record(self, function: Callable[[], T]) -> tuple[Callable[[], object], T]:
        """Runs a function without doing its work.

        Returns:
            What does the work, each time that it is called, and where its results then are.
        """
        ...


class CudaRecorder:
    """Records CUDA graphs, all with the same memory: their results are to be used before the next.

    Args:
        device: the GPU.
    """

    def __init__(self, device: str):
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)
        self._memory = torch.cuda.graph_pool_handle()

    def run(self, function: Callable[[], T]) -> T:
        # On the recording's stream: autograd remembers on which one a parameter was first used.
        outside = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This instance was constructed with capturable=True")
            result = function()
        outside.wait_stream(self._stream)
        return result

    def record(self, function: Callable[[], T]) -> tuple[Callable[[], object], T]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, self._memory, self._stream, capture_error_mode="thread_local"
        ):  # readers of batches allocate meanwhile, which is none of its business
            result = function()
        return graph.replay, result


def make_capturable(optimizers: Iterable[Optimizer]) -> None:
    """Tells torch's Adam that its step may be recorded; what it needs for that, fused ones have."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True


class GraphedCallable:
    """A function that is recorded after some calls with batches of one shape, and then replayed.

    Calls before that, and those with batches of a shape that did not come often in a row, run the
    function as it is: as the short last batch of an epoch. The results are the same.

    Args:
        function: batch -> tensor. Whatever it reads and writes besides the batch keeps its place on
            the device, and nothing in it waits for the device.
        recorder: of what is recorded.
    """

    def __init__(self, function: Callable[[Any], Tensor], recorder: Recorder):
        self._function, self._recorder = function, recorder
        self._recordings: dict[Any, _Recording] = {}
        self._latest, self._calls = None, 0  # shape of the latest calls, and how many they are

    def __call__(self, batch: Any) -> Tensor:
        shape = batch.map(lambda tensor: (tensor.shape, tensor.dtype))
        self._calls = self._calls + 1 if shape == self._latest else 1
        self._latest = shape
        if shape not in self._recordings:
            if self._calls <= CALLS_BEFORE:
                return self._recorder.run(lambda: self._function(batch))
            self._recordings[shape] = _Recording(self._function, batch, self._recorder)
        return self._recordings[shape].replay(batch)


class _Recording:
    def __init__(self, function: Callable[[Any], Tensor], batch: Any, recorder: Recorder):
        with torch.inference_mode(False):  # whose tensors could not be written to elsewhere
            self._batch = batch.map(torch.clone)
        self._replay, self._result = recorder.record(lambda: function(self._batch))

    def replay(self, batch: Any) -> Tensor:
        for own, given in zip(self._batch, batch, strict=True):
            if isinstance(given, Tensor):
                own.copy_(given)
        self._replay()
        return self._result.clone()
