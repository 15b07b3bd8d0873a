"""Nodes that do not see the first rank's folder: how their files reach it, and copies for them."""

import hashlib
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from dlrm.distributed import World, agreed, from_first, gather
from dlrm.distributed.transfers import (
    Block,
    Route,
    Sent,
    leaders,
    read_block,
    transfer_files,
    write_block,
)
from dlrm.files import MANIFEST
from dlrm.locks import OwnedDirectory, remove_abandoned

NODE_PREFIX = ".node-"  # of temporary folders, which `tidy_leftovers` leaves alone


@dataclass(frozen=True)
class Nodes:
    """The ranks that do not see the folder in which the first rank saves checkpoints.

    Attributes:
        senders: these ranks; they send their files to the first one.
        folder: on these ranks a temporary folder of their node, otherwise None.
    """

    senders: tuple[int, ...] = ()
    folder: Path | None = None


class NodeFolders:
    """A temporary folder on the node of each of some ranks, until `remove`.

    Args:
        place: where to create it: a path, which may be another folder on each node.
        ranks: the ranks that need one; all call it.
        world: all ranks.

    Attributes:
        leaders: rank -> the first of these ranks on its node.
        folder: of this rank's node; None if this rank needs none.
    """

    def __init__(self, place: Path, ranks: Collection[int], world: World) -> None:
        self.leaders = leaders(place, ranks, world)
        self._place = place
        self._owned: OwnedDirectory | None = None
        with agreed(world, OSError):
            if self.leaders.get(world.rank) == world.rank:
                remove_abandoned(place, NODE_PREFIX)
                self._owned = OwnedDirectory(place, NODE_PREFIX)
        paths = gather(self._owned and self._owned.path.name, world)
        leader = self.leaders.get(world.rank)
        self.folder = None if leader is None else place / str(paths[leader])

    def remove(self) -> None:
        """Removes the folder, on the first rank of each node."""
        if self._owned is not None:
            self._owned.remove()


@contextmanager
def on_all_nodes(
    checkpoint: Path | None,
    place: Path,
    world: World,
    beat: Callable[[], object] = lambda: None,
) -> Iterator[Path | None]:
    """Yields the first rank's checkpoint, or a copy of it where a rank does not see it.

    A rank sees it if it has one with the same manifest. Each other node gets one copy, in a
    temporary folder of its own, which is removed with the block.

    Args:
        checkpoint: its path; the first rank's decides, and None there is None everywhere.
        place: where temporary folders may be created.
        world: the ranks, all of which enter the block.
        beat: called after each block of a copy.

    Raises:
        OSError: it cannot be copied, or does not fit.
    """
    known = None
    with agreed(world, OSError):
        known = _identity(checkpoint) if checkpoint else None
    wanted = from_first(known, world)
    if wanted is None:
        yield None
        return
    missing = [rank for rank, sees in enumerate(gather(known == wanted, world)) if not sees]
    if not missing:
        yield checkpoint
        return
    folders = NodeFolders(place, missing, world)
    try:
        name = from_first(checkpoint and checkpoint.name, world)
        copy = folders.folder / str(name) if folders.folder else None
        _copy(checkpoint, copy, sorted({*folders.leaders.values()}), world, beat)
        yield copy or checkpoint
        gather(None, world)  # a rank of the node may still read
    finally:
        folders.remove()


def _identity(checkpoint: Path) -> str | None:
    """Returns what two copies of a checkpoint share; None if there is none."""
    if (checkpoint / MANIFEST).is_file():
        return hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()
    files = _files(checkpoint)  # NVIDIA's has no manifest
    return repr(sorted(files.items())) if files else None


def _files(directory: Path) -> dict[str, Sent]:
    """Returns the files of a directory, the manifest last."""
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    paths.sort(key=lambda path: path.name == MANIFEST)
    return {path.relative_to(directory).as_posix(): Sent(path.stat().st_size) for path in paths}


def _copy(
    source: Path | None,
    target: Path | None,
    receivers: list[int],
    world: World,
    beat: Callable[[], object],
) -> None:
    """Sends a directory of the first rank to the receivers, which write it to `target`."""
    files: dict[str, Sent] = {}
    with agreed(world, OSError):
        if world.rank == 0 and source is not None:
            files = _files(source)
    files, shown = from_first((files, str(source)), world)
    with agreed(world, OSError):
        if world.rank in receivers and target is not None:
            need = sum(sent.size for sent in files.values())
            check_room(target.parent, need, f"a copy of {shown}, which this node does not see")
            target.mkdir(parents=True)

    def read(block: Block, data: Tensor) -> None:
        assert source is not None
        read_block(source / block.name, block, data)

    def write(block: Block, data: Tensor) -> None:
        assert target is not None
        write_block(target / block.name, block, data)

    routes = [Route(0, receiver, files) for receiver in receivers]
    transfer_files(routes, read, write, world, beat)


def check_room(folder: Path, need: int, what: str) -> None:
    """Raises OSError if fewer than `need` bytes are free in a folder."""
    free = shutil.disk_usage(folder).free
    if free < need:
        raise OSError(
            f"{folder}: expected {need:,} bytes free for {what}, got {free:,}; make room, or name "
            "a folder that all nodes see, or a URI"
        )
