"""Former names, until their callers call `dlrm.remote.localize`."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from dlrm.remote.cache import Cache
from dlrm.remote.localize import localize, localized, run_locally, show_uris  # noqa: F401
from dlrm.remote.uri import Local, Uri


class Role:
    """The words after the first of a role."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    @classmethod
    def parse(cls, text: str) -> "Role":
        """Returns the words of a role."""
        return cls(text.split(", ")[1:])


def local_value(stack: ExitStack, cache: Cache, value: Any, patterns: Sequence[str] = ()) -> Any:
    """Returns a value with local paths in place of URIs, which stay until `stack` ends."""
    held: list[Local] = []
    stack.callback(held.clear)
    return localized(value, cache, held, patterns)


@contextmanager
def fetched(cache: Cache, uri: Uri, patterns: Sequence[str] = ()) -> Iterator[Path]:
    """Yields the file or folder of a URI."""
    local = localize(uri, cache, patterns)
    yield Path(local)
