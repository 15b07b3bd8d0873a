"""Local paths in place of the URIs among the flags of a training command."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from dlrm.distributed import World
from dlrm.flags import Values
from dlrm.remote.cache import Cache, with_uris
from dlrm.remote.config import CacheConfig
from dlrm.remote.edges import READ, local_value, show_uris, upload_folder, uris_among
from dlrm.remote.mirror import Mirror, mirrored
from dlrm.remote.uri import Uri
from dlrm.settings import settings_of
from dlrm.train.log import StoppedError

_CHECKPOINTS = "save_checkpoint_path"


@dataclass
class LocalPaths:
    """The flags of a command with local paths.

    Attributes:
        values: the flags, without those of the cache.
        mirror: the directory of checkpoints on the first rank, if its flag is a URI.
    """

    values: Values
    mirror: Mirror | None = None


def enter_local_paths(
    stack: ExitStack, values: Values, roles: Mapping[str, str], trains: bool, world: World
) -> LocalPaths:
    """Fetches what the flags read by URI, and gives what they write there a local place.

    Output is uploaded as `stack` ends: checkpoints while the training goes on, see `mirrored`, and
    other files after the end of a run that has not failed.

    Args:
        stack: ends after the log and the checkpoints are closed.
        values: the flags.
        roles: flags that may be URIs, see `dlrm.remote.edges`.
        trains: whether the command trains.
        world: the processes, which call it together; the first one writes.

    Raises:
        ValueError, OSError: an object cannot be read, or a place may not be written.
    """
    kept = {name: own for name, own in values.items() if name not in settings_of(CacheConfig)}
    found = LocalPaths(Values(kept, values.given & kept.keys()))
    uris = uris_among(values, roles)
    if not uris:
        return found
    show_uris()
    cache = _cache(values)
    changed: dict[str, Any] = {}
    first = world.rank == 0
    if _CHECKPOINTS in uris and trains:
        (uri,) = uris[_CHECKPOINTS]
        changed[_CHECKPOINTS] = str(cache.output_path(uri))
        if first:
            made = mirrored(
                cache, uri, values["keep_checkpoints"], values["resume"], (StoppedError,)
            )
            found.mirror = stack.enter_context(made)
    for name, own in uris.items():
        if roles[name] == READ:
            changed[name] = local_value(stack, cache, values[name])
        elif name not in changed:
            inside = _inside(own[0], uris.get(_CHECKPOINTS, []) if trains else [])
            changed[name] = str(
                Path(changed[_CHECKPOINTS], inside)
                if inside
                else _output(stack, cache, own[0], name, first)
            )
    found.values = found.values.replaced(changed)
    return found


def local_checkpoints(values: Values) -> str | None:
    """Returns the local directory of a command's checkpoints, if it saves any."""
    found = uris_among(values, {_CHECKPOINTS: ""})
    if _CHECKPOINTS in found:
        return str(_cache(values).output_path(found[_CHECKPOINTS][0]))
    return values[_CHECKPOINTS]


def with_uris_shown(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns flags with URIs in place of paths in the cache, to record them."""
    return {name: with_uris(own) if isinstance(own, str) else own for name, own in values.items()}
