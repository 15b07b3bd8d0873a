"""Records the kernels that a function launches for a batch as one CUDA graph, and replays it.

The host takes longer to launch the kernels of a DLRM's step than a large GPU takes to run them; a
graph is a single launch. Everything that the graph reads keeps its address, and everything that
changes from step to step (batch, learning rate, loss scale, overflow) is read on the device.
"""

import warnings
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dlrm.distributed import World, agreed, check_same, gather

T = TypeVar("T")
CALLS_BEFORE = 3  # by then libraries have chosen kernels, and optimizers have their state


class Recorder(Protocol):
    """Runs functions without arguments, and records them."""

    def run(self, function: Callable[[], T]) -> T:
        """Runs a function where it would be recorded."""
        ...

    def record(self, function: Callable[[], T]) -> tuple[Callable[[], object], T]:
        """Records a function without doing its work.

        Returns:
            A function that does the work each time it is called, and the place of its results.
        """
        ...


class CudaRecorder:
    """Records CUDA graphs that share memory: use the results of one before replaying the next."""

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
        # The outer block restores the stream if a capture cannot be ended; torch's does not.
        with (
            torch.cuda.stream(torch.cuda.current_stream(self._device)),
            torch.cuda.graph(
                graph, self._memory, self._stream, capture_error_mode="thread_local"
            ),  # readers of batches may allocate meanwhile
        ):
            result = function()
        return graph.replay, result


def make_capturable(optimizers: Iterable[Optimizer]) -> None:
    """Prepares torch's Adam for a recorded step; fused optimizers need no preparation."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True


def why_none_records(why_not: str | None, world: World) -> str | None:
    """Returns the reason why no rank may record, if one cannot: all ranks record or none does.

    Args:
        why_not: why this rank cannot; None if it can.
        world: the ranks; all of them call it and get the same answer.
    """
    reasons = gather(why_not, world)
    if all(reason == reasons[0] for reason in reasons):
        return why_not
    return next(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason)


class GraphedCallable:
    """A function that is recorded after some calls with batches of one shape, and then replayed.

    Earlier calls, and calls with a batch of an unusual shape, such as the short last batch of an
    epoch, run the function itself. The results are the same.

    All ranks record and replay the same calls, as NCCL requires for the transfers in them. They
    verify this on the host before each call (0.2 ms, 2 ranks on 2 busy cores), without waiting for
    a GPU.

    Args:
        function: batch -> tensor. Everything that it reads and writes besides the batch must keep
            its address on the device, and nothing in it may wait for the device.
        world: the ranks that call it together.

    Raises:
        ValueError: at the same call, batches change their shape on one rank and not on another.
        RuntimeError: the function cannot be recorded; the rank is named.
    """

    def __init__(
        self, function: Callable[[Any], Tensor], recorder: Recorder, world: World = World()
    ):
        self._function, self._recorder, self._world = function, recorder, world
        self._recordings: dict[Any, _Recording] = {}
        self._shapes: dict[Any, int] = {}  # by shape: how many others came before it
        self._latest, self._calls = None, 0  # shape of the latest calls, and their number

    def __call__(self, batch: Any) -> Tensor:
        shape = batch.map(lambda tensor: (tensor.shape, tensor.dtype))
        self._calls = self._calls + 1 if shape == self._latest else 1
        self._latest = shape
        self._check_in_step(self._shapes.setdefault(shape, len(self._shapes)))
        if shape not in self._recordings:
            if self._calls <= CALLS_BEFORE:
                return self._recorder.run(lambda: self._function(batch))
            with agreed(self._world, RuntimeError):
                self._recordings[shape] = _Recording(self._function, batch, self._recorder)
        return self._recordings[shape].replay(batch)

    def _check_in_step(self, shape: int) -> None:
        """Raises on all ranks if this call is not the same for each of them."""
        if self._world.size == 1:
            return
        place = torch.tensor([shape, self._calls])
        greatest = torch.cat([place, -place])
        dist.all_reduce(greatest, dist.ReduceOp.MAX, group=self._world.group)
        most, least = greatest.view(2, 2)
        if not torch.equal(most, -least):
            times = f"shape {shape} for the {self._calls}. time in a row"
            check_same({"shape of a recorded step's batch": times}, self._world)


class _Recording:
    def __init__(self, function: Callable[[Any], Tensor], batch: Any, recorder: Recorder):
        with torch.inference_mode(False):  # its tensors could not be written elsewhere
            self._batch = batch.map(torch.clone)
        self._replay, self._result = recorder.record(lambda: function(self._batch))

    def replay(self, batch: Any) -> Tensor:
        for own, given in zip(self._batch, batch, strict=True):
            if isinstance(given, Tensor):
                own.copy_(given)
        self._replay()
        return self._result.clone()
