"""Files that ranks send each other, in blocks, and the nodes of ranks by the folders they see."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.distributed.collectives import agreed, gather
from dlrm.distributed.world import World
from dlrm.files import make_directories
from dlrm.locks import new_suffix

_BYTES = 64 << 20  # that arrive at a rank at a time
_TAG = 2  # other transfers may be pending


class Sent(NamedTuple):
    """A file to send.

    Attributes:
        unit: blocks of it are multiples of this, such as the bytes of a row.
    """

    size: int
    unit: int = 1


class Route(NamedTuple):
    """Files that one rank sends another.

    Attributes:
        files: the files by name; names are the source's.
    """

    source: int
    target: int
    files: Mapping[str, Sent]


class Block(NamedTuple):
    """Bytes of a file on their way.

    Attributes:
        size: number of bytes.
    """

    source: int
    name: str
    begin: int
    size: int


def transfer_files(
    routes: Sequence[Route],
    read: Callable[[Block, Tensor], object],
    write: Callable[[Block, Tensor], object],
    world: World,
    beat: Callable[[], object] = lambda: None,
) -> None:
    """Sends files on all routes at a time; every rank calls it with the same routes.

    Ranks agree after each block, so an error of one ends all, and none waits longer than for a
    block. A rank reads and writes files while the next block travels.

    Args:
        read: fills a tensor of bytes with a block of one of this rank's files.
        write: takes a block that has arrived; those of a file come in order, and there is one
            also for a file without bytes.
        beat: called after each block.

    Raises:
        OSError: a rank cannot read or write; see `agreed`.
    """
    size = max(_BYTES // max(len(routes), 1), 1)
    ways = [(route, [*_blocks(route, size)]) for route in routes]
    ready: dict[Block, Tensor] = {}
    arrived: list[tuple[Block, Tensor]] = []
    for turn in range(-1, max((len(blocks) for _, blocks in ways), default=-1) + 1):
        moving, pending, coming = ready, [], []
        for route, blocks in ways if turn >= 0 else ():
            for block in blocks[turn : turn + 1]:
                if world.rank == route.target:
                    coming.append((block, torch.empty(block.size, dtype=torch.uint8)))
                if block.size and world.rank in (route.source, route.target):
                    pending.append(_start(route, block, moving, coming, world))
        try:
            with agreed(world, OSError):
                for block, data in arrived:
                    write(block, data)
                ready = {}
                for route, blocks in ways:
                    for block in blocks[turn + 1 : turn + 2]:
                        if world.rank == route.source and block not in ready:
                            ready[block] = torch.empty(block.size, dtype=torch.uint8)
                            read(block, ready[block])
        except Exception:
            _wait(pending)
            raise
        _wait(pending)
        arrived = coming
        beat()


def _blocks(route: Route, size: int) -> Iterator[Block]:
    for name, sent in route.files.items():
        step = max(size // sent.unit, 1) * sent.unit
        for begin in range(0, max(sent.size, 1), step):
            yield Block(route.source, name, begin, min(step, sent.size - begin))


def _start(
    route: Route,
    block: Block,
    moving: Mapping[Block, Tensor],
    coming: Sequence[tuple[Block, Tensor]],
    world: World,
) -> dist.Work:
    if world.rank == route.source:
        work = dist.isend(moving[block], group=world.group, tag=_TAG, group_dst=route.target)
    else:
        work = dist.irecv(coming[-1][1], group=world.group, tag=_TAG, group_src=route.source)
    assert work is not None, "this rank is in the group"
    return work


def _wait(pending: Sequence[dist.Work]) -> None:
    for work in pending:
        work.wait()


def read_block(path: Path, block: Block, data: Tensor) -> None:
    """Reads a block of a file.

    Raises:
        OSError: the file cannot be read, or has become shorter.
    """
    with open(path, "rb", buffering=0) as file:
        file.seek(block.begin)
        left = data.numpy().data
        while len(left):
            count = file.readinto(left)
            if not count:
                raise OSError(f"{path}: expected {block.begin + block.size} bytes or more")
            left = left[count:]


def write_block(path: Path, block: Block, data: Tensor) -> None:
    """Writes a block of a file, whose folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "r+b" if block.begin else "wb", buffering=0) as file:
        file.seek(block.begin)
        left = data.numpy().data
        while len(left):
            left = left[file.write(left) :]


def leaders(folder: Path, ranks: Collection[int], world: World) -> dict[int, int]:
    """Returns, for some of the ranks, the first of these that sees the same folder.

    Every rank calls it; the given ones create their folder.

    Args:
        folder: a path, which may be another folder on each node.

    Raises:
        OSError: a rank cannot write there.
    """
    probe = folder / f".probe.partial-{new_suffix()}"
    asked = world.rank in ranks
    with agreed(world, OSError):
        if asked:
            make_directories(folder)
            probe.touch()
    names = gather(probe.name, world)
    first = None
    with agreed(world, OSError):
        if asked:
            first = next(rank for rank in sorted(ranks) if (folder / names[rank]).exists())
    found = gather(first, world)
    if asked:
        probe.unlink(missing_ok=True)
    return {rank: leader for rank, leader in enumerate(found) if leader is not None}
