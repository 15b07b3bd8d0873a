"""Communication between the ranks of a run: sums, values, and errors that end all ranks."""

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.distributed.world import World

T = TypeVar("T")


class OtherRankError(RuntimeError):
    """Raised on a rank when another rank reports an error, which that rank describes."""


def all_sum(tensor: Tensor, world: World) -> Tensor:
    """Sums a tensor over the ranks, in place, and returns it."""
    if world.size > 1:
        dist.all_reduce(tensor, group=world.group)
    return tensor


def gather(value: T, world: World) -> list[T]:
    """Returns every rank's value, in the order of the ranks, on every rank."""
    if world.size == 1:
        return [value]
    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value, group=world.group)
    return values


def gather_to_first(value: T, world: World) -> list[T]:
    """Returns every rank's value, in the order of the ranks, on rank 0, and nothing on others."""
    if world.size == 1:
        return [value]
    values: list[Any] | None = [None] * world.size if world.rank == 0 else None
    dist.gather_object(value, values, group=world.group, group_dst=0)
    return values or []


def from_first(value: T, world: World) -> T:
    """Returns rank 0's value on every rank."""
    values = [value]
    if world.size > 1:
        device = torch.device("cpu")
        dist.broadcast_object_list(values, group=world.group, device=device, group_src=0)
    return values[0]


@contextmanager
def agreed(world: World, *errors: type[Exception]) -> Iterator[None]:
    """Raises an error on every rank if any rank raises one, so that no rank waits for the others.

    The lowest rank with an error raises its own, and names the ranks with errors, and their hosts,
    unless only rank 0 or all have one; the others raise `OtherRankError`.

    Args:
        world: the ranks, all of which enter the block.
        errors: the types of errors to share; others propagate unchanged.
    """
    mine: Exception | None = None
    try:
        yield
    except errors as error:
        mine = error
    if world.size == 1:
        if mine:
            raise mine
        return
    told = gather((mine and str(mine), socket.gethostname()), world)
    failed = [rank for rank, (text, _) in enumerate(told) if text is not None]
    if not failed:
        return
    if mine is None or world.rank != failed[0]:
        raise OtherRankError(f"rank {failed[0]} met an error") from mine
    if len(failed) == world.size or failed == [0]:
        raise mine
    names = _with_hosts([host for _, host in told])
    ranks = f"rank{'s' * (len(failed) > 1)} {', '.join(names[rank] for rank in failed)}"
    kind = next(kind for kind in errors if isinstance(mine, kind))
    raise kind(f"{ranks}: {mine}") from mine


def _with_hosts(hosts: Sequence[str]) -> list[str]:
    """Returns the numbers of the ranks, with their hosts if these differ."""
    several = len({*hosts}) > 1
    return [f"{rank} ({host})" if several else str(rank) for rank, host in enumerate(hosts)]


def check_same(values: Mapping[str, Any], world: World) -> None:
    """Checks that all ranks have the same values.

    Raises:
        ValueError: on rank 0, naming the differences and the ranks.
        OtherRankError: on the other ranks.
    """
    told = {name: repr(value) for name, value in values.items()}
    everyone, hosts = zip(*gather((told, socket.gethostname()), world), strict=True)
    names, first = _with_hosts(hosts), everyone[0]
    different = [
        f"{name}: {first.get(name, 'none')} on rank {names[0]}, "
        f"{theirs.get(name, 'none')} on {names[rank]}"
        for rank, theirs in enumerate(everyone)
        for name in sorted(first.keys() | theirs.keys())
        if first.get(name) != theirs.get(name)
    ]
    if not different:
        return
    if world.rank:
        raise OtherRankError("rank 0 names what differs")
    raise ValueError("the ranks of a run must agree:\n  " + "\n  ".join(different))
