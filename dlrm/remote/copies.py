"""Python functions that take URIs: local copies of what they read, and output published."""

import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from dlrm.files import check_local
from dlrm.remote.cache import Cache, with_uris
from dlrm.remote.edges import fetched
from dlrm.remote.output import Output
from dlrm.remote.uri import Uri, is_uri


class Copies:
    """Local copies of what URIs name, within a block, or for as long as an object lives.

    Errors that leave the block have URIs in place of the paths of copies.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> "Copies":
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if error is not None:
            name_uris(error)

    def path_of(self, path: str | os.PathLike, name: str) -> Path:
        """Returns the path of a local file or folder, or of the copy of a URI.

        Raises:
            OSError, ValueError: a URI cannot be read; the message has it.
        """
        check_path(path, name)
        if not is_fetched(path):
            return Path(path)
        return self._stack.enter_context(fetched(Cache.open(), Uri.parse(path)))

    def keep_for(self, owner: Any) -> None:
        """Keeps the copies until an object is collected, instead of the block's end."""
        weakref.finalize(owner, self._stack.pop_all().close)


def is_fetched(path: Any) -> bool:
    """Returns whether a value is a URI; `file://` is refused as a path."""
    return is_uri(path) and not os.fspath(path).lower().startswith("file:")


def check_path(path: Any, name: str) -> None:
    """Refuses a path that is no path of this machine, and a URI that is wrong.

    Args:
        path: a path or a URI; other values pass.

    Raises:
        ValueError: it is refused.
    """
    if not isinstance(path, str | os.PathLike):
        return
    if not is_fetched(path):
        check_local(path, name)
        return
    try:
        Uri.parse(path)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None


def name_uris(error: BaseException) -> None:
    """Puts URIs in place of the paths of copies into the message of an error."""
    error.args = tuple(with_uris(one) if isinstance(one, str) else one for one in error.args)
    if isinstance(error, OSError) and isinstance(error.filename, str | os.PathLike):
        error.filename = with_uris(os.fspath(error.filename))


def path_in(folder: str | os.PathLike, uri: Uri) -> Path:
    """Returns a path in a folder, of which `with_uris` makes the URI."""
    return Path(folder, "outputs", "0" * 16, uri.scheme, uri.authority, uri.key.rstrip("/"))


@contextmanager
def output_at(
    path: str | os.PathLike,
    name: str,
    replace: bool | str | None = None,
    folder: str | None = None,
) -> Iterator[Path]:
    """Yields the path of output within a block, at whose end what is for a URI is published.

    Args:
        replace: content of a URI that may be replaced, see `Output`.
        folder: directory for output that is published; by default one that ends with the block.

    Raises:
        OSError, ValueError: the output cannot be written at the URI, or may not be.
    """
    check_path(path, name)
    if not is_fetched(path):
        yield Path(path)
        return
    uri = Uri.parse(path)
    with ExitStack() as stack:
        if folder is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dlrm-"))
        output = Output(uri, path_in(folder, uri), replace)
        output.path.parent.mkdir(parents=True)
        yield output.path
        output.publish()
