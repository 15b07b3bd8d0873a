"""Errors of kernels, which all ranks raise together."""

import torch

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
