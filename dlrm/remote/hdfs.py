"""Hadoop's file system behind the interface of `Store`, by pyarrow and Hadoop's own library.

It has neither ETags nor conditional writes: versions are sizes and times, and two writers to one
place are not told apart.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.fs

from dlrm.locks import new_suffix
from dlrm.remote.store import Entry, Store, read_slices
from dlrm.remote.uri import Uri

_COPY_BYTES = 1 << 23


class ArrowStore:
    """Files of one of pyarrow's file systems; see `Store`.

    Args:
        base: the folder that keys are below.
    """

    protects = False

    def __init__(self, root: Uri, files: "pyarrow.fs.FileSystem", base: str = "/") -> None:
        self.root, self._files, self._base = root, files, base.rstrip("/")

    def entries(self, prefix: str) -> list[Entry]:
        folder = f"{self._base}/{prefix.rpartition('/')[0]}"
        with self._named(prefix):
            selector = pyarrow.fs.FileSelector(folder, allow_not_found=True, recursive=True)
            infos = self._files.get_file_info(selector)
        found = (self._entry(info) for info in infos if info.is_file)
        return sorted(entry for entry in found if entry.key.startswith(prefix))

    def entry(self, key: str) -> Entry:
        with self._named(key):
            info = self._files.get_file_info(self._path(key))
        if not info.is_file:
            raise FileNotFoundError(f"{replace(self.root, key=key)}: no such object")
        return self._entry(info)

    def read(self, entry: Entry, begin: int = 0, end: int | None = None) -> Any:
        end = entry.size if end is None else end
        if entry.slices:
            return read_slices(self, entry, begin, end)
        with self._named(entry.key), self._files.open_input_file(self._path(entry.key)) as file:
            content = file.read_at(end - begin, begin)
        if len(content) != end - begin or self.entry(entry.key).version != entry.version:
            place = replace(self.root, key=entry.key)
            raise OSError(f"{place}: was replaced by another object while it was read")
        return content

    def write(self, key: str, content: bytes | Path, only_if: str | None = None) -> str:
        path = self._path(key)
        partial = f"{path}.partial-{new_suffix()}"
        with self._named(key):
            self._files.create_dir(path.rpartition("/")[0], recursive=True)
            with self._files.open_output_stream(partial) as stream:
                if isinstance(content, bytes):
                    stream.write(content)
                else:
                    with open(content, "rb") as file:
                        while part := file.read(_COPY_BYTES):
                            stream.write(part)
            if self._files.get_file_info(path).is_file:  # which Hadoop does not replace
                self._files.delete_file(path)
            self._files.move(partial, path)
        return self.entry(key).version

    def remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            with self._named(key):
                if self._files.get_file_info(self._path(key)).is_file:
                    self._files.delete_file(self._path(key))

    def _path(self, key: str) -> str:
        return f"{self._base}/{key}"

    def _entry(self, info: "pyarrow.fs.FileInfo") -> Entry:
        modified = info.mtime_ns or 0
        version = f"size {info.size}, time {modified}"
        return Entry(info.path[len(self._base) :].lstrip("/"), info.size, version, modified / 1e9)

    @contextmanager
    def _named(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise type(error)(f"{replace(self.root, key=key)}: {error}") from error


def open_hdfs(root: Uri) -> Store:
    """Returns the store of a URI of Hadoop; without a host it is that of Hadoop's configuration.

    Raises:
        ValueError: Hadoop's library, or Java, cannot be loaded.
    """
    try:
        files = pyarrow.fs.HadoopFileSystem.from_uri(str(root))
    except OSError as error:
        raise ValueError(
            f"{root}: {error}; it needs HADOOP_HOME, JAVA_HOME and CLASSPATH"
        ) from error
    return ArrowStore(root, files)
