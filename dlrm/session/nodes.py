"""Several nodes in one training: copies of checkpoints, and what nodes must have in common."""

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dlrm.distributed import World, agreed, check_same, from_first, gather, rank_names
from dlrm.files import MANIFEST
from dlrm.flags import Values
from dlrm.locks import in_use
from dlrm.remote.cache import values_with_uris, with_uris
from dlrm.train.checkpoints.directory import checkpoint_in_use, last_checkpoint
from dlrm.train.checkpoints.nodes import on_all_nodes

_SAVED, _LOADED, _CONTINUED, _TEACHER = PLACES = (
    "save_checkpoint_path",
    "load_checkpoint_path",
    "continue_from",
    "distill",
)
_DATA = ("dataset", "test_dataset")
_LATE = 60.0  # seconds by which clocks may differ


class Copies(NamedTuple):
    """The flags of a node that does not see the checkpoints of the first rank.

    Attributes:
        values: the flags, with paths at which this node has copies.
    """

    values: Values
    paths: list[Path]


def enter_copies(stack: ExitStack, values: Values, trains: bool, world: World) -> Copies:
    """Copies checkpoints of the first rank to nodes that do not see them.

    These are the checkpoint from which the first rank resumes, and those of
    `--load_checkpoint_path`, `--continue_from` and `--distill`.

    Args:
        stack: removes the copies as it ends.
        values: the flags, with local paths.
        world: the ranks, which call it together.

    Raises:
        FileNotFoundError, ValueError, OSError: the first rank has no such checkpoint, a copy does
            not fit, or `--resume` finds checkpoints on another node only.
    """
    found = Copies(values, [])
    if world.size == 1:
        return found
    named = values_with_uris(values)
    check_same({f"--{name}": named.get(name) for name in (*PLACES, "mode", "resume")}, world)
    saved, loaded = values[_SAVED] if trains else None, values[_LOADED]
    place, held = Path(saved or tempfile.gettempdir()), {}
    if saved and values["resume"]:
        held[_SAVED] = _last_in_use(saved)
    one = trains or values["mode"] == "test"  # other modes may read all checkpoints of a run
    if loaded and from_first(one or Path(loaded, MANIFEST).is_file(), world):
        held[_LOADED] = checkpoint_in_use(loaded)
    if continued := values.get(_CONTINUED):
        held[_CONTINUED] = checkpoint_in_use(continued, newest=True)
    if teacher := values.get(_TEACHER):
        held[_TEACHER] = checkpoint_in_use(teacher)
    for name, first in held.items():
        path, copy = _enter_copy(stack, values[name], first, place, world)
        if name == _SAVED:
            _check_last(values[name], path, world)
        if copy is not None:
            found = Copies(found.values.replaced({name: path}), [*found.paths, copy])
    return found


def _enter_copy(
    stack: ExitStack,
    path: str,
    held: AbstractContextManager[Path | None],
    place: Path,
    world: World,
) -> tuple[str | None, Path | None]:
    """Copies what the first rank finds at `path` to nodes that do not see it, below `place`.

    Returns what this rank is to use as `path`, or None if the first rank finds nothing, and the
    copy of the checkpoint, which `stack` removes, or None without one.
    """
    with ExitStack() as holding:
        inside = None
        with agreed(world, ValueError, OSError):
            if world.rank == 0 and (found := holding.enter_context(held)):
                inside = os.path.relpath(found, path)
        inside = from_first(inside, world)
        if inside is None:
            return None, None
        own = Path(path, inside)
        copy = stack.enter_context(on_all_nodes(own, place, world))
    if copy is None or copy == own:
        return path, None
    return str(copy if inside == os.curdir else copy.parent), copy


@contextmanager
def _last_in_use(path: str) -> Iterator[Path | None]:
    """Yields the newest checkpoint of a run, or None; it is not pruned within the block."""
    while last := last_checkpoint(path):
        with in_use(last) as stays:
            if stays:
                yield last
                return
    yield None


def _check_last(path: str, found: str | None, world: World) -> None:
    """Raises ValueError if only other nodes than the first rank's have checkpoints."""
    with agreed(world, ValueError):
        if found is None and (last := last_checkpoint(path)):
            raise ValueError(
                f"{last}: a checkpoint on this node, and the node of rank 0, which decides where "
                "to resume, has none: start this node as the first (--node_rank 0), copy the "
                "checkpoint to the first, or remove it"
            )


def check_data(values: Mapping[str, Any], world: World) -> None:
    """Checks that all ranks have copies of the same dataset, by its manifest.

    Raises:
        ValueError: on rank 0, with the path on each rank that has another.
        OtherRankError: on other ranks.
    """
    paths = {name: values[name] for name in _DATA if values.get(name)}
    own = {name: (_digest(Path(path)), with_uris(str(path))) for name, path in paths.items()}
    names, everyone = rank_names(world), gather(own, world)
    different = [
        f"--{name} {path}: {digest} on {names[rank]}, {everyone[0][name][0]} on {names[0]}"
        for rank, theirs in enumerate(everyone)
        for name, (digest, path) in theirs.items()
        if digest != everyone[0][name][0]
    ]
    with agreed(world, ValueError):
        if different and world.rank == 0:
            raise ValueError(
                "the ranks of a run must read copies of one dataset:\n  " + "\n  ".join(different)
            )


def _digest(dataset: Path) -> str:
    manifest = dataset / MANIFEST
    if not manifest.is_file():
        return f"no {MANIFEST}"
    return f"{MANIFEST} with SHA-256 {hashlib.sha256(manifest.read_bytes()).hexdigest()[:16]}"


def clock_notes(world: World) -> list[str]:
    """Returns lines about ranks whose clock differs from that of the first rank."""
    names = rank_names(world)  # all ranks are here
    clocks = gather(time.time(), world)
    return [
        f"note: the clock of {name} is {abs(clock - clocks[0]):.0f} s "
        f"{'ahead of' if clock > clocks[0] else 'behind'} that of {names[0]}; stores refuse "
        "requests with a wrong time"
        for name, clock in zip(names, clocks, strict=True)
        if abs(clock - clocks[0]) > _LATE
    ]
