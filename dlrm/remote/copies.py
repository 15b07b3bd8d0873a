"""Former names, until their callers call `dlrm.remote.localize`."""

import os
import weakref
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from dlrm.remote.localize import check_path, errors_shown, local_path, output_at  # noqa: F401
from dlrm.remote.uri import Local, Uri, is_uri

is_fetched = is_uri


class Copies:
    """Local copies of what URIs name, within a block, or for as long as an object lives."""

    def __init__(self) -> None:
        self._held: list[str] = []
        self._errors = ExitStack()

    def __enter__(self) -> "Copies":
        self._errors.enter_context(errors_shown())
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._errors.__exit__(kind, error, trace)

    def path_of(self, path: str | os.PathLike, name: str) -> Path:
        """Returns the path of a local file or folder, or of the copy of a URI."""
        self._held.append(local_path(path, name))
        return Path(self._held[-1])

    def keep_for(self, owner: Any) -> None:
        """Keeps the copies until an object is collected, instead of the block's end."""
        weakref.finalize(owner, self._held.clear)


def path_in(folder: str | os.PathLike, uri: Uri) -> Path:
    """Returns a path in a folder, of which `shown` makes the URI."""
    return Path(Local.within(folder, uri))
