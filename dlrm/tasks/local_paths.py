"""Local paths in place of the URIs among the flags of a training command."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from dlrm.distributed import World
from dlrm.flags import Values
from dlrm.remote.cache import Cache
from dlrm.remote.config import CacheConfig
from dlrm.remote.edges import OWN, READ, Role, local_value, show_uris, uris_among
from dlrm.remote.mirror import Mirror, mirrored
from dlrm.remote.store import open_store
from dlrm.remote.transfer import upload
from dlrm.remote.uri import Uri
from dlrm.settings import settings_of
from dlrm.train.log import StoppedError

_CHECKPOINTS, _LOG = "save_checkpoint_path", "log_path"


def enter_local_paths(
    stack: ExitStack, values: Values, roles: Mapping[str, str], trains: bool, world: World
) -> tuple[Values, Mirror | None]:
    """Fetches what the flags read by URI, and gives what they write there a local place.

    Checkpoints are uploaded during the training, see `mirrored`, and other files as `stack` ends,
    if the run has not failed.

    Args:
        stack: ends after the log and the checkpoints are closed.
        roles: flags that may be URIs, see `dlrm.remote.edges`.
        world: the processes, which call it together; the first one writes.

    Returns:
        The flags, without those of the cache, and the mirror of the directory of checkpoints on the
        first rank, if its flag is a URI.

    Raises:
        ValueError, OSError: an object cannot be read, or a place may not be written.
    """
    own_values, mirror = values.without(settings_of(CacheConfig)), None
    uris = uris_among(values, roles)
    if not uris:
        return own_values, mirror
    show_uris()
    cache = Cache.of_flags(values)
    changed: dict[str, Any] = {}
    first = world.rank == 0
    if _CHECKPOINTS in uris and trains:
        (uri,) = uris[_CHECKPOINTS]
        changed[_CHECKPOINTS] = str(cache.output_path(uri))
        if first:
            made = mirrored(
                cache, uri, values["keep_checkpoints"], values["resume"], (StoppedError,)
            )
            mirror = stack.enter_context(made)
    for name, own in uris.items():
        role = Role.parse(roles[name])
        if role.act == OWN:
            continue
        if role.act == READ:
            changed[name] = local_value(stack, cache, values[name], role.words)
        elif name not in changed:
            run = uris[_CHECKPOINTS][0] if _CHECKPOINTS in changed else None
            if run and own[0].root == run.root and own[0].key.startswith(run.folder):
                inside = own[0].key.removeprefix(run.folder)
                path = cache.output_path(run) / inside  # uploaded with the run
                changed[name] = str(path)
                if first and name == _LOG:
                    _fetch_log(own[0], path)
                continue
            changed[name] = str(cache.output_path(own[0]))
            if first:
                stack.enter_context(_uploaded(cache, own[0], name == _LOG))
    return own_values.replaced(changed), mirror


def _fetch_log(uri: Uri, path: Path) -> None:
    """Fetches the lines of earlier runs, which a log keeps, unless they are there."""
    if path.exists():
        return
    with suppress(FileNotFoundError):
        store = open_store(uri)
        content = store.read(store.entry(uri.key))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


@contextmanager
def _uploaded(cache: Cache, uri: Uri, is_file: bool) -> Iterator[None]:
    """Uploads a local folder at the end, or a file with those beside it."""
    with cache.output(uri) as path:
        store, base = open_store(uri), uri.folder
        folder = path
        if is_file:
            folder, base = path.parent, uri.key.removesuffix(uri.name)
            _fetch_log(uri, path)

        def put() -> None:
            files = (file for file in sorted(folder.rglob("*")) if file.is_file())
            upload(store, {f"{base}{f.relative_to(folder).as_posix()}": f for f in files})

        try:
            yield
        except Exception:
            with suppress(OSError):
                put()
            raise
        put()


def local_checkpoints(values: Values) -> str | None:
    """Returns the local directory of a command's checkpoints, if it saves any."""
    found = uris_among(values, {_CHECKPOINTS: ""})
    if _CHECKPOINTS in found:
        return str(Cache.of_flags(values).output_path(found[_CHECKPOINTS][0]))
    return values[_CHECKPOINTS]
