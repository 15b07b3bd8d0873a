"""What the ranks find out together: that one wants to stop, has written, or met a bad value."""

import torch
import torch.distributed as dist

from dlrm import ops
from dlrm.distributed import World, agreed


def raise_device_errors(world: World) -> None:
    """Raises on every rank what the kernels on any rank's GPU have found; waits for the GPU.

    Raises:
        RuntimeError, OtherRankError: an id or a row was outside its range, as `agreed` has them.
    """
    if world.size > 1 and torch.device(world.device).type == "cpu":
        return  # each call raises its own errors there
    with agreed(world, RuntimeError):
        ops.raise_device_errors(world.device)


class Agreement:
    """Tells every rank at the same step what any of them, or all, have said.

    The answer comes a step late, so that nobody waits for it: it travels during a step.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World):
        self._world = world
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def exchange(self, stop: bool, written: bool) -> tuple[bool, bool]:
        """Says of this rank whether it wants to stop and whether its files are written.

        Returns:
            Whether any rank wanted to stop, and whether all had written, a step ago.
        """
        if self._world.size == 1:
            return stop, written
        any_stop, all_written = self.finish()
        said = torch.tensor([int(stop), int(written)])
        self._pending = dist.all_reduce(said, group=self._world.group, async_op=True), said
        return any_stop, all_written

    def finish(self) -> tuple[bool, bool]:
        """Returns what was on its way; every rank calls it when it leaves the loop."""
        if self._pending is None:
            return False, False
        work, said = self._pending
        self._pending = None
        work.wait()
        stops, writers = said.tolist()
        return stops > 0, writers == self._world.size
