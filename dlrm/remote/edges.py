"""Commands that read and write by URI: local paths in place of URIs, and output published."""

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from dlrm.files import MANIFEST
from dlrm.remote.cache import Cache, with_uris
from dlrm.remote.config import CacheConfig
from dlrm.remote.publish import check_publishable, fetched_directory, find_published, publish
from dlrm.remote.store import find_entries, open_store
from dlrm.remote.transfer import upload
from dlrm.remote.uri import Uri, is_uri

READ, WRITE = "read", "write"  # of `setting(uri=...)`
_TOLD_SECONDS = 1.0


def uris_among(values: Mapping[str, Any], roles: Mapping[str, str]) -> dict[str, list[Uri]]:
    """Returns the URIs among values, by name.

    Args:
        values: flags or keyword arguments.
        roles: names of those that may be URIs, with `READ` or `WRITE`.

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
            raise ValueError(f"--{name}: {error}") from None
    return found


def run_locally(
    values: Mapping[str, Any],
    roles: Mapping[str, str],
    act: Callable[[dict[str, Any]], int | None],
) -> int | None:
    """Runs a command with local paths in place of URIs, and publishes its output if it succeeds.

    What it prints has the URIs again.

    Args:
        values: the flags, with `cache_dir` and `cache_gib`.
        roles: names of flags that may be URIs, with `READ` or `WRITE`.
        act: the command; called with the flags that change. 0 and None are success.

    Returns:
        The result of `act`.

    Raises:
        OSError, ValueError: an object cannot be read or written; the message has its URI.
    """
    show_uris()
    config = CacheConfig(values.get("cache_dir"), values.get("cache_gib"))
    cache = Cache.open(config.cache_dir, config.limit)
    with ExitStack() as stack:
        changed: dict[str, Any] = {}
        outputs: list[Output] = []
        for name, uris in uris_among(values, roles).items():
            if roles[name] == WRITE:
                path = stack.enter_context(cache.output(uris[0]))
                outputs.append(Output(uris[0], path, values.get("overwrite")))
                changed[name] = _like(values[name], path)
            else:
                changed[name] = _local(stack, cache, values[name])
        code = act(changed)
        if not code:
            for output in outputs:
                output.publish()
        return code


def _local(stack: ExitStack, cache: Cache, value: Any) -> Any:
    """Returns a value with local paths in place of URIs."""
    if not isinstance(value, list | tuple):
        return _like(value, stack.enter_context(fetched(cache, Uri.parse(value))))
    paths: list[Any] = []
    for item in value:
        if not is_uri(item):
            paths.append(item)
            continue
        uri = Uri.parse(item)
        path = stack.enter_context(fetched(cache, uri))
        if uri.has_pattern:  # its folders have names that may encode columns
            paths += [_like(item, file) for file in sorted(path.rglob("*")) if file.is_file()]
        else:
            paths.append(_like(item, path))
    return type(value)(paths)


def _like(value: Any, path: Path) -> Any:
    return str(path) if isinstance(value, str) else path


@contextmanager
def fetched(cache: Cache, uri: Uri) -> Iterator[Path]:
    """Yields the file or folder of a URI: an object, a published directory, or many objects.

    Raises:
        OSError, ValueError: see `Cache.fetched` and `find_published`.
    """
    began, size = time.monotonic(), 0

    def done(more: int) -> None:
        nonlocal size
        size += more

    with ExitStack() as stack:
        if not uri.has_pattern and uri.scheme not in ("http", "https") and find_published(uri):
            path = stack.enter_context(fetched_directory(cache, uri, done))
        else:
            path = stack.enter_context(cache.fetched(uri, find_entries(uri), done=done))
        if (seconds := time.monotonic() - began) >= _TOLD_SECONDS:
            print(f"{uri}: {size:,} bytes fetched in {seconds:.1f} s", file=sys.stderr, flush=True)
        yield path


class Output:
    """Output that is written to a local path and published under a URI.

    Args:
        uri: where to publish it.
        path: the local path.
        replace: whether it may replace what is there, see `check_publishable`; None lets a file
            replace a file.

    Raises:
        FileExistsError: there is something that may not be replaced.
        OSError: the store cannot be read.
    """

    def __init__(self, uri: Uri, path: Path, replace: bool | str | None = None) -> None:
        self.uri, self.path = uri, path
        hint = "; --overwrite replaces it" if replace is False else ""
        try:
            self._version = check_publishable(uri, replace or False)
        except FileExistsError as error:
            raise FileExistsError(f"{error}{hint}") from error
        if hint and _is_object(uri):
            raise FileExistsError(f"{uri}: exists{hint}")
        if path.is_dir():  # complete, of a run that was killed before it was published
            shutil.rmtree(path)
        path.unlink(missing_ok=True)

    def publish(self) -> None:
        """Publishes what was written, if anything was.

        Raises:
            FileExistsError: another process has published there meanwhile.
            OSError: an object cannot be written; what was published before still is.
        """
        began = time.monotonic()
        if self.path.is_file():
            open_store(self.uri).write(self.uri.key, self.path)
        elif (self.path / MANIFEST).is_file():
            publish(self.path, self.uri, self._version)
        elif self.path.is_dir():
            files = (path for path in sorted(self.path.rglob("*")) if path.is_file())
            base = self.uri.folder
            keys = {f"{base}{path.relative_to(self.path).as_posix()}": path for path in files}
            upload(open_store(self.uri), keys)
        else:
            return
        if (seconds := time.monotonic() - began) >= _TOLD_SECONDS:
            print(f"{self.uri}: published in {seconds:.1f} s", file=sys.stderr, flush=True)


def _is_object(uri: Uri) -> bool:
    try:
        return bool(uri.key) and bool(open_store(uri).entry(uri.key))
    except FileNotFoundError:
        return False


class _WithUris:
    """A stream that has URIs in place of paths in a cache."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(with_uris(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def show_uris() -> None:
    """Lets what this process prints have URIs in place of paths in a cache."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _WithUris):
            setattr(sys, name, _WithUris(stream))
