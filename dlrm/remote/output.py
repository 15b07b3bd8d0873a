"""Output of commands at URIs: files and directories, and models added to a repository."""

import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from dlrm.files import MANIFEST
from dlrm.remote.publish import (
    StrangersError,
    check_folder,
    check_publishable,
    publish,
    publish_plain,
)
from dlrm.remote.store import NEW, open_store
from dlrm.remote.transfer import Wanted, download, upload
from dlrm.remote.uri import Uri

TOLD_SECONDS = 1.0  # transfers that take longer are reported
_CONFIG = "config.pbtxt"  # of a model that Triton serves


class Output:
    """Output that is written to a local path and published under a URI.

    Args:
        replace: whether it may replace what is there, see `check_publishable`; None lets a file
            replace a file.
        plain: whether other programs read the directory, see `publish_plain`.

    Raises:
        FileExistsError: there is something that may not be replaced.
        OSError: the store cannot be read.
    """

    def __init__(
        self, uri: Uri, path: Path, replace: bool | str | None = None, plain: bool = False
    ) -> None:
        uri.check_writable()
        self.uri, self.path, self._plain = uri, path, plain
        hint = "; --overwrite replaces it" if replace is False else ""
        try:
            self._version, self._within = self._versions(replace or False)
        except StrangersError:
            raise
        except FileExistsError as error:
            raise FileExistsError(f"{error}{hint}") from error
        if hint and _is_object(uri):
            raise FileExistsError(f"{uri}: exists{hint}")
        # What a run that was killed has left: its unfinished work stays, for the next one.
        for complete in (path, *(manifest.parent for manifest in path.glob(f"*/{MANIFEST}"))):
            if (complete / MANIFEST).is_file():
                shutil.rmtree(complete)
        if path.is_file():
            path.unlink()

    def _versions(self, replace: bool | str) -> tuple[str | None, dict[str, str]]:
        """Returns the version of what is published there, and those of directories within."""
        try:
            return check_publishable(self.uri, replace), {}
        except StrangersError:
            return None, check_folder(self.uri, replace)

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
            if self._within:
                check_publishable(self.uri, False)
            (publish_plain if self._plain else publish)(self.path, self.uri, self._version)
        elif self.path.is_dir():
            self._publish_folder()
        else:
            return
        _tell_published(self.uri, began)

    def _publish_folder(self) -> None:
        """Publishes each directory within that has a manifest, then the other files."""
        files = {path for path in self.path.rglob("*") if path.is_file()}
        for manifest in sorted(self.path.glob(f"*/{MANIFEST}")):
            inside = manifest.parent
            publish(inside, self.uri.below(inside.name), self._within.get(inside.name))
            files -= {path for path in files if path.is_relative_to(inside)}
        upload(open_store(self.uri), {_key(self, path): path for path in sorted(files)})


class Addition:
    """A repository of models for Triton, at a URI, and what is added to it.

    The objects have the names that Triton reads. A version begins with its manifest, which no other
    writer may have written, and `config.pbtxt`, without which there is no model, is the last one.

    Args:
        path: a local folder, which gets its folders and the files that an export compares.

    Raises:
        OSError: the store cannot be read.
    """

    def __init__(self, uri: Uri, path: Path) -> None:
        uri.check_writable()
        self.uri, self.path = uri, path
        store = open_store(uri)
        self._there = {entry.key: entry for entry in store.entries(uri.folder)}
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        models = {PurePosixPath(key).parent for key in self._there if key.endswith(f"/{_CONFIG}")}
        self._kept: set[str] = set()
        wanted = []
        for key, entry in self._there.items():
            if models.isdisjoint(PurePosixPath(key).parents):
                continue  # of an export that was killed
            self._kept |= {key, *map(str, PurePosixPath(key).parents)}
            file = path / key.removeprefix(uri.folder)
            file.parent.mkdir(parents=True, exist_ok=True)
            if file.name == _CONFIG or "_transform/" in key:
                wanted.append(Wanted(entry, str(file)))
        download(store, wanted)

    def publish(self) -> None:
        """Publishes what was added.

        Raises:
            FileExistsError: another process has added the same meanwhile.
            OSError: an object cannot be written.
        """
        began, store = time.monotonic(), open_store(self.uri)
        found = {_key(self, path): path for path in sorted(self.path.rglob("*"), reverse=True)}
        new = {key: path for key, path in found.items() if key not in self._kept}
        files = {key: path for key, path in new.items() if path.is_file()}
        claims = [key for key in files if key.endswith(f"/{MANIFEST}")]
        last = [key for key in files if key.endswith(f"/{_CONFIG}")]
        self._claim(files, claims)
        upload(store, {key: files[key] for key in files.keys() - {*claims, *last}})
        for key, path in new.items():  # of ensembles, whose versions have no files
            if path.is_dir() and not any(path.iterdir()):
                store.write(f"{key}/.keep", b"")
        self._claim(files, last)
        _tell_published(self.uri, began)

    def _claim(self, files: Mapping[str, Path], keys: Iterable[str]) -> None:
        store = open_store(self.uri)
        for key in keys:
            before = self._there.get(key)
            store.write(key, files[key].read_bytes(), before.version if before else NEW)


def _key(output: Output | Addition, path: Path) -> str:
    """Returns the key of a file of an output."""
    return f"{output.uri.folder}{path.relative_to(output.path).as_posix()}"


def _tell_published(uri: Uri, began: float) -> None:
    if (seconds := time.monotonic() - began) >= TOLD_SECONDS:
        print(f"{uri}: published in {seconds:.1f} s", file=sys.stderr, flush=True)


def _is_object(uri: Uri) -> bool:
    try:
        return bool(uri.key) and bool(open_store(uri).entry(uri.key))
    except FileNotFoundError:
        return False
