"""Datasets at URIs, as local directories: fetched whole, or streamed while they are read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dlrm.data.clicks import layout
from dlrm.manifest import BLOCK_BYTES
from dlrm.remote.blocks import streamed_directory
from dlrm.remote.cache import Cache
from dlrm.remote.edges import fetched
from dlrm.remote.publish import Published, find_published
from dlrm.remote.store import total_bytes
from dlrm.remote.uri import Uri

_GIB = 1 << 30


@contextmanager
def local_dataset(
    cache: Cache, uri: Uri, processes: int = 1, say: Callable[[str], object] = lambda line: None
) -> Iterator[Path]:
    """Yields the directory of a dataset at a URI, for this process.

    A dataset that fits in the cache is fetched whole first. The rows of a larger one are streamed:
    readers with a `Verifier` fetch blocks as they read them.

    Args:
        processes: processes of this machine that share the cache.
        say: called with the line that says which, and why.

    Raises:
        OSError, ValueError: the dataset cannot be read, or does not fit; the message has the URI.
    """
    is_folder = uri.scheme not in ("http", "https") and not uri.has_pattern
    capacity, found = cache.capacity(), find_published(uri) if is_folder else None
    if found is None or (size := total_bytes([*found.entries.values()])) <= capacity:
        with fetched(cache, uri) as path:
            yield path
        return
    bound = f"{_gib(capacity)} that the cache may have"
    bound += " (--cache_gib)" if cache.limit is not None else ", half of what the disk has left"
    streamed = {name for name in found.entries if _is_streamed(found, name)}
    kept = capacity - sum(e.size for name, e in found.entries.items() if name not in streamed)
    if not streamed or kept <= 0:
        raise OSError(
            f"{uri}: expected rows to stream, and files besides them that fit in the {bound}, got "
            f"{_gib(size)}, of which {_gib(size - capacity + kept)} can be streamed"
        )
    say(f"{uri}: streamed: its {_gib(size)} are more than the {bound}")
    if cache.limit is not None:
        cache.make_room(capacity, uri)
    with streamed_directory(cache, found, streamed, kept // processes) as path:
        yield path


def _is_streamed(found: Published, name: str) -> bool:
    """Returns whether a file has rows, and more than one block."""
    file = found.manifest["files"].get(name, {})
    folder = name.partition("/")[0]
    return (
        file.get("bytes", 0) > BLOCK_BYTES
        and folder != layout.TRANSFORM
        and name.endswith(".bin")
        and not name.endswith(".starts.bin")  # of lists, read as they are opened
    )


def _gib(size: int) -> str:
    return f"{size / _GIB:,.2f} GiB" if size >= _GIB / 10 else f"{size / (1 << 20):,.1f} MiB"
