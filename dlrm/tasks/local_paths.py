"""Local paths in place of the URIs among the flags of a training command."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from dlrm.distributed import World
from dlrm.flags import Values
from dlrm.remote.cache import Cache
from dlrm.remote.config import CacheConfig
from dlrm.remote.localize import OWN, READ, localized, show_uris, uris_among
from dlrm.remote.mirror import Mirror, mirrored
from dlrm.remote.objects import open_store, upload
from dlrm.remote.uri import Local, Uri, is_uri
from dlrm.settings import settings_of
from dlrm.train.log import StoppedError

_CHECKPOINTS, _LOG = "save_checkpoint_path", "log_path"


def enter_local_paths(
    stack: ExitStack, values: Values, roles: Mapping[str, str], trains: bool, world: World
) -> tuple[Values, Mirror | None]:
    """Fetches what the flags read by URI, and gives what they write there a local place.

    Checkpoints are uploaded during the training, see `mirrored`, and other files as `stack` ends.

    Args:
        stack: ends after the log and the checkpoints are closed.
        roles: flags that may be URIs, see `dlrm.remote.localize.run_locally`.
        world: the processes, which call it together; the first one writes.

    Returns:
        The flags, without those of the cache, and the mirror of the directory of checkpoints on the
        first rank, if its flag is a URI.

    Raises:
        ValueError, OSError: an object cannot be read, or a place may not be written.
    """
    own_values, mirror = values.without(settings_of(CacheConfig)), None
    if not (uris := uris_among(values, roles)):
        return own_values, mirror
    show_uris()
    cache, held, changed = Cache.of_flags(values), list[Local](), dict[str, Any]()
    stack.callback(held.clear)
    run = uris[_CHECKPOINTS][0] if _CHECKPOINTS in uris and trains else None
    if run and world.rank == 0:
        how = values["keep_checkpoints"], values["resume"], (StoppedError,)
        mirror = stack.enter_context(mirrored(cache, run, *how))
    for name, (uri, *_) in uris.items():
        act, *words = roles[name].split(", ")
        if act == READ:
            changed[name] = localized(values[name], cache, held, words)
        elif act != OWN:
            inside = run and f"{uri}/".startswith(f"{run.below('')}")  # uploaded with the run
            path = Local.within(cache.output_folder(run if run and inside else uri), uri)
            if world.rank == 0:
                if not inside:
                    stack.enter_context(_uploaded(cache, uri))
                if name == _LOG and not Path(path).exists():
                    _fetch_log(uri, Path(path))
            changed[name] = path
    return own_values.replaced(changed), mirror


def _fetch_log(uri: Uri, path: Path) -> None:
    """Fetches the lines of earlier runs, which a log keeps."""
    with suppress(FileNotFoundError):
        content = open_store(uri).content(uri.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


@contextmanager
def _uploaded(cache: Cache, uri: Uri) -> Iterator[None]:
    """Uploads the output for a URI, with what is written beside it, also after an error."""
    with cache.output(uri):
        root = Path(Local.within(cache.output_folder(uri), uri.root))

        def put() -> None:
            files = (file for file in sorted(root.rglob("*")) if file.is_file())
            upload(open_store(uri), {file.relative_to(root).as_posix(): file for file in files})

        try:
            yield
        except Exception:
            with suppress(OSError):
                put()
            raise
        put()


def local_checkpoints(values: Values) -> str | None:
    """Returns the local directory of a command's checkpoints, if it saves any."""
    path = values[_CHECKPOINTS]
    return str(Cache.of_flags(values).output_path(Uri.parse(path))) if is_uri(path) else path
