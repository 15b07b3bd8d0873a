"""Local files in place of URIs: what a command or a function reads, and what it writes.

`localize` fetches what a URI names at the start, and `Output.publish` publishes what was written at
the end. Between them there are only local paths, of which messages and records show the URIs.
"""

import errno
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TextIO

from dlrm.files import MANIFEST
from dlrm.manifest import parse_sealed
from dlrm.remote.cache import Cache, Listing
from dlrm.remote.objects import open_store
from dlrm.remote.publish import Addition, Output, listing_of
from dlrm.remote.uri import Local, Uri, check_path, is_uri, shown

BEST = "best.json"
READ, OWN = "read", "own"
_NEWEST = "newest"
_STEP = re.compile(rf"(step-[0-9]{{9}})/{re.escape(MANIFEST)}")
_FULL = os.strerror(errno.ENOSPC)
_TOLD_SECONDS = 1.0  # transfers that take longer are reported


def localize(uri: Uri, cache: Cache | None = None, wanted: Sequence[str] = ()) -> Local:
    """Fetches an object, a published directory, or many objects; of a run, its best checkpoint.

    Args:
        cache: place of the copy, which stays as long as the result; None is the default one.
        wanted: patterns of the names of files: others get their size and no content, and a run all
            its checkpoints. "newest" is the newest checkpoint of a run.

    Raises:
        OSError: there is nothing, it cannot be read, or the disk is full; the message has the URI.
        ValueError: an object is damaged.
    """
    began, cache = time.monotonic(), cache or Cache.open()
    place, listing = _found(uri, wanted)
    try:
        local = cache.fetched(place, listing)
    except FileNotFoundError:
        if place == uri:
            raise
        place, listing = _found(uri, wanted)  # a better one is there, and that one pruned
        local = cache.fetched(place, listing)
    _tell(uri, f"{sum(e.size for e in listing.files.values()):,} bytes fetched", began)
    return local


def _found(uri: Uri, wanted: Sequence[str]) -> tuple[Uri, Listing]:
    """Returns the objects to fetch, after the URI that has them."""
    listing, newest = listing_of(uri), [*wanted] == [_NEWEST]
    if wanted and not newest:
        matches = (n for n in listing.files if any(fnmatch(Path(n).name, one) for one in wanted))
        return uri, listing._replace(hollow=frozenset(listing.files) - {*matches})
    if not uri.has_pattern and (best := checkpoint_among(uri, listing.files, newest)):
        return best, listing_of(best)
    return uri, listing


def _tell(uri: Uri, what: str, began: float) -> None:
    if (seconds := time.monotonic() - began) >= _TOLD_SECONDS:
        print(f"{uri}: {what} in {seconds:.1f} s", file=sys.stderr, flush=True)


def checkpoint_among(uri: Uri, names: Iterable[str], newest: bool = False) -> Uri | None:
    """Returns the URI of the checkpoint of a run that `best.json` names, or else of its newest.

    Args:
        names: paths below the bucket; None is returned if they have no whole checkpoint.
        newest: the newest, even if another is the best.

    Raises:
        ValueError: the record is damaged, or the best checkpoint is missing.
    """
    if not (steps := whole_steps(uri, names)):
        return None
    best, place = steps[-1], uri.below(BEST)
    try:
        if not newest:
            record = parse_sealed(open_store(uri).content(place.key), str(place))
            best = f"step-{int(record['step']):09d}"
    except FileNotFoundError:  # before the first test
        pass
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{place}: expected the best step: damaged") from error
    if best not in steps:
        raise ValueError(
            f"{uri}: expected the best checkpoint, {best}, as {place} says, got none; name a "
            f"checkpoint instead, as {uri.below(steps[-1])}"
        )
    return uri.below(best)


def whole_steps(uri: Uri, names: Iterable[str]) -> list[str]:
    """Returns the names of the whole checkpoints of a run, by step."""
    found = (_STEP.fullmatch(name.removeprefix(uri.folder)) for name in names)
    return sorted(match[1] for match in found if match)


def uris_among(values: Mapping[str, Any], roles: Mapping[str, str]) -> dict[str, list[Uri]]:
    """Returns the URIs among flags, by name."""
    found: dict[str, list[Uri]] = {}
    for name in roles:
        own = values.get(name)
        items: Iterable[Any] = own if isinstance(own, list | tuple) else [own]
        if uris := [Uri.parse(item) for item in items if is_uri(item)]:
            found[name] = uris
    return found


def run_locally(
    values: Mapping[str, Any],
    roles: Mapping[str, str],
    act: Callable[[dict[str, Any]], int | None],
) -> int | None:
    """Runs a command with local paths in place of URIs, and publishes its output if it succeeds.

    What it prints has the URIs again. The role of a flag has words with commas between: "read"
    fetches, and the words after it are those of `localize`. "write" may replace another of its kind
    with --overwrite. "replace, evaluation" may replace an earlier evaluation, and "replace"
    anything; "plain" is that of `publish`. "add" adds models to a repository, see `Addition`. An
    "own" URI is left to the command.

    Args:
        values: the flags, with those of `CacheConfig`.
        roles: names of flags that may be URIs, with their roles.
        act: the command, called with the flags that change, whose result is returned. 0 and None
            are success.

    Raises:
        OSError, ValueError: an object cannot be read or written; the message has its URI.
    """
    show_uris()
    cache, held, outputs = Cache.of_flags(values), list[Local](), list[Output | Addition]()
    changed: dict[str, Any] = {}
    found = uris_among(values, roles)
    with ExitStack() as stack:
        # Output first, so that what may not be replaced is refused before anything is fetched.
        for name in sorted(found, key=lambda name: roles[name].startswith(READ)):
            verb, *words = roles[name].split(", ")
            if verb == READ:
                changed[name] = localized(values[name], cache, held, words)
            elif verb != OWN:
                (uri,) = found[name]
                path = stack.enter_context(cache.output(uri))
                replace = values.get("overwrite")
                if replace or verb == "replace":
                    replace = next((word for word in words if word != "plain"), True)
                if verb == "add":
                    outputs.append(Addition(uri, path))
                else:
                    outputs.append(Output(uri, path, replace, "plain" in words))
                changed[name] = type(values[name])(path)
        if not (code := act(changed)):
            for output in outputs:
                began = time.monotonic()
                output.publish()
                _tell(output.uri, "published", began)
        return code


def localized(value: Any, cache: Cache, held: list[Local], wanted: Sequence[str] = ()) -> Any:
    """Returns a value with local paths in place of URIs; a pattern among several has its files.

    Args:
        value: a URI or a path, as text or `Path`, or several.
        held: gets what is fetched, and so keeps it.
        wanted: see `localize`, also for errors.
    """
    paths: list[Any] = []
    for item in value if (many := isinstance(value, list | tuple)) else [value]:
        if not is_uri(item):
            paths.append(item)
            continue
        held.append(local := localize(Uri.parse(item), cache, wanted))
        if many and local.uri.has_pattern:  # its folders have names that may encode columns
            files = (path for path in sorted(Path(local).rglob("*")) if path.is_file())
            paths += [type(item)(file) for file in files]
        else:
            paths.append(local if isinstance(item, str) else type(item)(local))
    return type(value)(paths) if many else paths[0]


def local_path(path: str | os.PathLike, name: str) -> str:
    """Returns a path, or the `Local` copy of a URI; for errors see `check_path` and `localize`."""
    check_path(path, name)
    return localize(Uri.parse(path)) if is_uri(path) else os.fspath(path)


@contextmanager
def output_at(
    path: str | os.PathLike, name: str, replace: bool | str | None = None, folder: str | None = None
) -> Iterator[Path]:
    """Yields the path of output within a block, at whose end what is for a URI is published.

    Args:
        name, replace: see `check_path` and `Output`, also for errors.
        folder: directory for output that is published; by default one that ends with the block.
    """
    check_path(path, name)
    if not is_uri(path):
        yield Path(path)
        return
    with tempfile.TemporaryDirectory(prefix="dlrm-") as temporary:
        local = Local.within(folder or temporary, Uri.parse(path))
        output = Output(local.uri, Path(local), replace)
        output.path.parent.mkdir(parents=True)
        yield output.path
        output.publish()


@contextmanager
def errors_shown() -> Iterator[None]:
    """Puts URIs in place of local paths into the messages of errors that leave the block."""
    try:
        yield
    except BaseException as error:
        error.args = tuple(shown(one) if isinstance(one, str) else one for one in error.args)
        if isinstance(error, OSError) and isinstance(error.filename, str | os.PathLike):
            error.filename = shown(os.fspath(error.filename))
        raise


class _Shown:
    """A stream that has URIs in place of local paths."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        found = shown(text)
        if found != text and _FULL in text:  # which the URI would be blamed for
            found = found.replace(_FULL, f"{_FULL} of the cache, which --cache_dir moves")
        return self._stream.write(found)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def show_uris() -> None:
    """Lets what this process prints have URIs in place of local paths."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Shown):
            setattr(sys, name, _Shown(stream))
