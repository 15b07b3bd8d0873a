"""URIs of objects and of prefixes of their keys, and the local paths of what they name."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from dlrm.documents import brief
from dlrm.files import check_local

# Scheme -> store: S3 or a service with its interface, Google Cloud Storage, Azure Blob Storage, or
# a web server, to read single files.
SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
SCHEMES |= {"https": "http", "http": "http"}
# Also the form "s3:/bucket", which pathlib makes of a URI.
_URI = re.compile(
    r"^([a-z][a-z0-9+.-]*):(?://|/(?!/))([^/]*)(?:/(.*))?\Z", re.IGNORECASE | re.DOTALL
)
_UNREADABLE = re.compile(r"/\.{0,2}/|[\0-\x1f\x7f]")  # by obstore
_PATTERN = re.compile(r"[*?\[]")
_VARIABLE = "DLRM_LOCAL_PATHS"  # of a process that reads what its parent has fetched
# Beginnings of local paths -> of the URIs that they stand for.
_begins: dict[str, str] = json.loads(os.environ.get(_VARIABLE, "{}"))


@dataclass(frozen=True)
class Uri:
    """An object, or all objects whose keys begin with a prefix."""

    scheme: str  # of `SCHEMES`
    authority: str  # bucket or container, with the account or the host where the scheme has one
    key: str = ""  # without a slash at the start

    @classmethod
    def parse(cls, text: str | os.PathLike) -> "Uri":
        """Returns the parts of a URI.

        Raises:
            ValueError: it is none that can be read; the message has it, without credentials.
        """
        shown = os.fspath(text)
        found = _URI.match(shown)
        if found is None:
            raise ValueError(f"{brief(shown)}: expected a URI, such as s3://bucket/folder")
        scheme, authority, key = found[1].lower(), found[2], found[3] or ""
        if "@" in authority and (scheme not in ("abfs", "abfss") or ":" in authority):
            place = f"{scheme}://...@{authority.rpartition('@')[2]}/{key}"
            raise ValueError(
                f"{place}: expected no user or password; credentials come from the environment"
            )
        if scheme not in SCHEMES:
            known = ", ".join(f"{name}://" for name in SCHEMES)
            raise ValueError(f"{shown}: expected a URI of {known}, or a path, got {scheme}://")
        if not authority:
            raise ValueError(f"{shown}: expected a bucket, as in {scheme}://bucket/{key}, got none")
        if "?" in key and SCHEMES[scheme] == "http":
            raise ValueError(f"{shown.partition('?')[0]}: expected a URI without a query")
        if _UNREADABLE.search(f"/{key.rstrip('/')}/") and key.strip("/"):
            expected = "a key without empty parts, as in a//b, parts . and .., control characters"
            raise ValueError(f"{brief(shown)}: expected {expected}")
        return cls(scheme, authority, key)

    def check_writable(self) -> None:
        """Raises ValueError for a URI of a web server, where nothing can be written."""
        if self.kind == "http":
            raise ValueError(f"{self}: expected a store to write to, got a web server")

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}/{self.key}"

    @property
    def kind(self) -> str:
        """The kind of store: "s3", "gs", "az" or "http"."""
        return SCHEMES[self.scheme]

    @property
    def root(self) -> "Uri":
        """The bucket."""
        return replace(self, key="")

    @property
    def name(self) -> str:
        """The last part of the key, or else the bucket."""
        return PurePosixPath(self.key).name or self.authority

    @property
    def folder(self) -> str:
        """The prefix of the keys below this one: empty, or with a slash at the end."""
        return f"{self.key.rstrip('/')}/" if self.key.strip("/") else ""

    @property
    def has_pattern(self) -> bool:
        """Says whether the key has `*`, `?` or `[`, as in the shell."""
        return _PATTERN.search(self.key) is not None

    def below(self, name: str) -> "Uri":
        """Returns the URI of a name below this one."""
        return replace(self, key=f"{self.folder}{name}")

    def before_pattern(self) -> str:
        """Returns the folders of the key before the first part with a pattern."""
        found = _PATTERN.search(self.key)
        return self.key if found is None else self.key[: self.key.rfind("/", 0, found.start()) + 1]


def is_uri(text: object) -> bool:
    """Returns whether a text or path is a URI, also of an unknown scheme, other than `file:`."""
    if not isinstance(text, str | os.PathLike):
        return False
    found = _URI.match(os.fspath(text))
    return found is not None and found[1].lower() != "file"


def check_path(path: Any, name: str) -> None:
    """Raises ValueError, with the name of a flag or argument, for a wrong URI or path."""
    if is_uri(path):
        try:
            Uri.parse(path)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
    elif isinstance(path, str | os.PathLike):
        check_local(path, name)


class Local(str):
    """The local path of what a URI names; what was fetched stays as long as this object."""

    uri: Uri

    @classmethod
    def within(cls, folder: str | os.PathLike, uri: Uri) -> "Local":
        """Returns the path for a URI in a folder, of which `shown` makes the URI from now on.

        A pattern has that of the folder above its matches.
        """
        folder = os.path.realpath(folder)
        _begins[f"{folder}/{uri.scheme}/"] = f"{uri.scheme}://"
        local = cls(Path(folder, uri.scheme, uri.authority, uri.before_pattern()))
        local.uri = uri
        return local


def shown(text: str) -> str:
    """Returns a text with URIs in place of the local paths of what they name."""
    for begin, of_uri in [*_begins.items()]:
        text = text.replace(begin, of_uri)
    return text


def origin(path: str | os.PathLike) -> str:
    """Returns the URI of a path that stands for one, and the absolute path of others."""
    return os.fspath(path).rstrip("/") if is_uri(path) else shown(str(Path(path).resolve()))


def values_with_uris(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns flags with URIs in place of local paths, as records have them."""
    return {name: shown(own) if isinstance(own, str) else own for name, own in values.items()}


def variables() -> dict[str, str]:
    """Returns environment variables with which a command shows the URIs that this process does."""
    return {_VARIABLE: json.dumps(_begins)}
