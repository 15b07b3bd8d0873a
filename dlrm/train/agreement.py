"""Decisions that the ranks take together: to stop, to publish files, to fail on a bad value."""

import torch
import torch.distributed as dist

from dlrm import ops
from dlrm.distributed import World, agreed


def raise_device_errors(world: World) -> None:
    """Raises on every rank the errors that kernels on any rank's GPU found; waits for the GPU.

    Raises:
        RuntimeError, OtherRankError: an id or a row was outside its range; see `agreed`.
    """
    if world.size > 1 and torch.device(world.device).type == "cpu":
        return  # on the CPU each call raises its own errors
    with agreed(world, RuntimeError):
        ops.raise_device_errors(world.device)


class Agreement:
    """Tells every rank at the same step what any of them, or all of them, reported.

    With several ranks the answer takes effect one step later, so that no rank blocks.
    """

    def __init__(self, world: World):
        self._world = world
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def exchange(self, stop: bool, written: bool) -> tuple[bool, bool]:
        """Reports whether this rank wants to stop and whether its files are written.

        Returns:
            Whether any rank wanted to stop, and whether all had written.
        """
        if self._world.size == 1:
            return stop, written
        any_stop, all_written = self.finish()
        said = torch.tensor([int(stop), int(written)])
        self._pending = dist.all_reduce(said, group=self._world.group, async_op=True), said
        return any_stop, all_written

    def finish(self) -> tuple[bool, bool]:
        """Returns the pending answer; every rank calls it when it leaves the loop."""
        if self._pending is None:
            return False, False
        work, said = self._pending
        self._pending = None
        work.wait()
        stops, writers = said.tolist()
        return stops > 0, writers == self._world.size
