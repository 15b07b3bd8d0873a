"""Commands that read and write by URI: local paths in place of URIs, and output published."""

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from dlrm.remote.cache import Cache, Listing, with_uris
from dlrm.remote.output import TOLD_SECONDS, Addition, Output
from dlrm.remote.publish import listing_of
from dlrm.remote.runs import checkpoint_among
from dlrm.remote.store import total_bytes
from dlrm.remote.uri import Uri, is_uri

_FULL = os.strerror(errno.ENOSPC)
READ, WRITE, REPLACE, ADD, OWN = "read", "write", "replace", "add", "own"
_NEWEST = "newest"


class Role(NamedTuple):
    """The use of a URI by a command, parsed from `setting(uri=...)`: words with commas between.

    "read" fetches everything, and of a run the best checkpoint, "read, newest" the newest one.
    "read, *.json" fetches the objects with such names, and makes files
    of the right size without content for the others. "write" may replace another of its kind with
    --overwrite. "replace, evaluation" may replace an earlier evaluation, and "replace" anything.
    With "plain" a directory has the layout that other programs read, see `publish_plain`. "add"
    adds models to a repository, see `Addition`. An "own" URI is left to the command.

    Attributes:
        act: one of the above.
        words: the other words.
    """

    act: str
    words: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Role":
        act, *words = text.split(", ")
        return cls(act, tuple(words))

    def output(self, uri: Uri, path: Path, overwrite: bool | None) -> Output | Addition:
        """Returns the output at a URI that is written to a local path."""
        if self.act == ADD:
            return Addition(uri, path)
        replace: bool | str | None = overwrite
        if overwrite or self.act == REPLACE:
            replace = next((word for word in self.words if word != "plain"), True)
        return Output(uri, path, replace, "plain" in self.words)


def uris_among(values: Mapping[str, Any], roles: Mapping[str, str]) -> dict[str, list[Uri]]:
    """Returns the URIs among values, by name.

    Args:
        roles: names of those that may be URIs, with the texts of `Role`.

    Raises:
        ValueError: a URI is wrong; the message has the name.
    """
    found = {}
    for name in roles:
        own = values.get(name)
        items = own if isinstance(own, list | tuple) else [own]
        try:
            if uris := [Uri.parse(str(item)) for item in items if is_uri(item)]:
                found[name] = uris
        except ValueError as error:
            raise ValueError(f"--{name} {error}") from None
    return found


def run_locally(
    values: Mapping[str, Any],
    roles: Mapping[str, str],
    act: Callable[[dict[str, Any]], int | None],
) -> int | None:
    """Runs a command with local paths in place of URIs, and publishes its output if it succeeds.

    What it prints has the URIs again.

    Args:
        values: the flags, with those of `CacheConfig`.
        roles: names of flags that may be URIs, with the texts of `Role`.
        act: the command; called with the flags that change. 0 and None are success.

    Returns:
        The result of `act`.

    Raises:
        OSError, ValueError: an object cannot be read or written; the message has its URI.
    """
    show_uris()
    cache = Cache.of_flags(values)
    with ExitStack() as stack:
        changed: dict[str, Any] = {}
        outputs: list[Output | Addition] = []
        found = uris_among(values, roles)
        for name in sorted(found, key=lambda name: Role.parse(roles[name]).act == READ):
            role = Role.parse(roles[name])
            if role.act == OWN:
                continue
            if role.act == READ:
                changed[name] = local_value(stack, cache, values[name], role.words)
            else:  # first, so that what may not be replaced is refused before anything is fetched
                (uri,) = found[name]
                path = stack.enter_context(cache.output(uri))
                outputs.append(role.output(uri, path, values.get("overwrite")))
                changed[name] = _like(values[name], path)
        code = act(changed)
        if not code:
            for output in outputs:
                output.publish()
        return code


def local_value(stack: ExitStack, cache: Cache, value: Any, patterns: Sequence[str] = ()) -> Any:
    """Returns a value with local paths in place of URIs, which stay until `stack` ends.

    Args:
        stack: ends when the files are no longer needed.
        cache, patterns: see `fetched`.
        value: a URI or a path, or several.

    Raises:
        OSError, ValueError: see `fetched`.
    """
    if not isinstance(value, list | tuple):
        return _like(value, stack.enter_context(fetched(cache, Uri.parse(value), patterns)))
    paths: list[Any] = []
    for item in value:
        if not is_uri(item):
            paths.append(item)
            continue
        uri = Uri.parse(item)
        path = stack.enter_context(fetched(cache, uri, patterns))
        if uri.has_pattern:  # its folders have names that may encode columns
            paths += [_like(item, file) for file in sorted(path.rglob("*")) if file.is_file()]
        else:
            paths.append(_like(item, path))
    return type(value)(paths)


def _like(value: Any, path: Path) -> Any:
    return str(path) if isinstance(value, str) else path


@contextmanager
def fetched(cache: Cache, uri: Uri, patterns: Sequence[str] = ()) -> Iterator[Path]:
    """Yields the file or folder of a URI: an object, a published directory, or many objects.

    The URI of a run yields its best checkpoint, or the newest if none is best. The pattern "newest"
    yields the newest, and other patterns the files that they name.

    Args:
        patterns: names of the files that are wanted; all, if there are none.

    Raises:
        OSError, ValueError: see `Cache.fetched` and `listing_of`.
    """
    began = time.monotonic()
    with ExitStack() as stack:
        listing, place = _listing(uri, patterns)
        try:
            path = stack.enter_context(cache.fetched(place, listing))
        except FileNotFoundError:
            if place == uri:
                raise
            listing, place = _listing(uri, patterns)  # a better one is there, and that one pruned
            path = stack.enter_context(cache.fetched(place, listing))
        if (seconds := time.monotonic() - began) >= TOLD_SECONDS:
            size = total_bytes(listing.entries)
            print(f"{uri}: {size:,} bytes fetched in {seconds:.1f} s", file=sys.stderr, flush=True)
        yield path


def _listing(uri: Uri, patterns: Sequence[str]) -> tuple[Listing, Uri]:
    """Returns the objects to fetch, and the URI that has them."""
    listing, newest = listing_of(uri), [*patterns] == [_NEWEST]
    if patterns and not newest:
        return listing.only(patterns), uri
    if not uri.has_pattern and (best := checkpoint_among(uri, *listing[:2], newest)):
        return listing_of(best), best
    return listing, uri


class _WithUris:
    """A stream that has URIs in place of paths in a cache."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        shown = with_uris(text)
        if shown != text and _FULL in text:  # which the URI would be blamed for
            shown = shown.replace(_FULL, f"{_FULL} of the cache, which --cache_dir moves")
        return self._stream.write(shown)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def show_uris() -> None:
    """Lets what this process prints have URIs in place of paths in a cache."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _WithUris):
            setattr(sys, name, _WithUris(stream))
