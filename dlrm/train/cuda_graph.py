"""Records the kernels that a function launches for a batch as one CUDA graph, and replays it.

The host takes longer to launch the kernels of a DLRM's step than a large GPU takes to run them; a
graph is a single launch. Everything that the graph reads keeps its address, and everything that
changes from step to step (batch, learning rate, loss scale, overflow) is read on the device.
"""

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
CALLS_BEFORE = 3  # by then libraries have chosen kernels, and optimizers have their state


class CudaRecorder:
    """Records CUDA graphs that share memory: use the results of one before replaying the next."""

    def __init__(self, device: str):
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)
        self._memory = torch.cuda.graph_pool_handle()

    def run(self, function: Callable[[], T]) -> T:
        """Runs a function where it would be recorded."""
        # On the recording's stream: autograd remembers on which one a parameter was first used.
        outside = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This instance was constructed with capturable=True")
            result = function()
        outside.wait_stream(self._stream)
        return result

    def record(self, function: Callable[[], T]) -> tuple[Callable[[], object], T]:
        """Records a function without doing its work.

        Returns:
            A function that does the work each time it is called, and the place of its results.
        """
        graph = torch.cuda.CUDAGraph()
        # The outer block restores the stream if a capture cannot be ended; torch's does not.
        with (
            torch.cuda.stream(torch.cuda.current_stream(self._device)),
            torch.cuda.graph(
                graph, self._memory, self._stream, capture_error_mode="thread_local"
            ),  # readers of batches may allocate meanwhile
        ):
            result = function()
        return graph.replay, result


class GraphedCallable:
    """A function that is recorded after some calls with batches of one shape, and then replayed.

    Earlier calls, and calls with a batch of an unusual shape, such as the short last batch of an
    epoch, run the function itself. The results are the same.

    Args:
        function: batch -> tensor. Everything that it reads and writes besides the batch must keep
            its address on the device, and nothing in it may wait for the device.

    Raises:
        RuntimeError: the function cannot be recorded.
    """

    def __init__(self, function: Callable[[Any], Tensor], recorder: CudaRecorder):
        self._function, self._recorder = function, recorder
        self._recordings: dict[Any, tuple[Any, Callable[[], object], Tensor]] = {}
        self._latest, self._calls = None, 0  # shape of the latest calls, and their number

    def __call__(self, batch: Any) -> Tensor:
        shape = batch.map(lambda tensor: (tensor.shape, tensor.dtype))
        self._calls = self._calls + 1 if shape == self._latest else 1
        self._latest = shape
        if shape not in self._recordings:
            if self._calls <= CALLS_BEFORE:
                return self._recorder.run(lambda: self._function(batch))
            with torch.inference_mode(False):  # its tensors could not be written elsewhere
                own = batch.map(torch.clone)
            self._recordings[shape] = own, *self._recorder.record(lambda: self._function(own))
        own, replay, result = self._recordings[shape]
        for into, given in zip(own, batch, strict=True):
            if isinstance(given, Tensor):
                into.copy_(given)
        replay()
        return result.clone()
