"""A run whose folders are in a store of objects, for machines that share none.

    URI/data-unfinished/run.json       the options, the input, and the name of the run
    URI/data-unfinished/<name>/...     one object per finished task, and the tasks' files
    URI/data-<name>/...                the dataset, which the manifest at URI publishes

The driver plans, reads the results of tasks and writes the small files. Rows and counts do not pass
through it; see `task_files`.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from dlrm.documents import parse_json
from dlrm.files import link_or_copy
from dlrm.flags import Values
from dlrm.locks import OwnedDirectory, new_suffix, remove_abandoned
from dlrm.manifest import JoinedChecksum
from dlrm.preproc.engine import Engine
from dlrm.preproc.errors import TaskError
from dlrm.preproc.work_folder import (
    FACTS,
    KIND,
    WorkFolder,
    check_memory,
    check_same,
    has_results,
)
from dlrm.remote import task_files
from dlrm.remote.cache import STREAMS, Cache, Listing, with_uris
from dlrm.remote.config import CacheConfig
from dlrm.remote.edges import show_uris
from dlrm.remote.publish import (
    PREFIX,
    RUN,
    check_publishable,
    find_published,
    listing_of,
    publish_folder,
    read_object,
    write_slices,
)
from dlrm.remote.store import NEW, Entry, open_store, total_bytes
from dlrm.remote.task_files import NodeFiles, RunFiles
from dlrm.remote.transfer import remove_all, upload
from dlrm.remote.uri import Uri, is_uri
from dlrm.settings import settings_of

_WHOLE = (b"ORC", b"ARROW1", b"\xff\xff\xff\xff")  # begin inputs that the driver reads whole
_ROOT = b"<root>"  # of the driver's files, in results that have paths
_RESULT = re.compile(r"(.*)\.tasks/(\d+)\.json")


class StoredWork(WorkFolder):
    """The folders of a run in a store; see `open_stored_work`.

    Args:
        uri: place of the finished output.
        version: version of the published manifest that the output replaces.
    """

    watched_seconds = 5.0  # as each look lists objects

    def __init__(
        self,
        uri: Uri,
        files: NodeFiles,
        name: str,
        resumed: bool,
        version: str | None,
    ) -> None:
        self.uri, self.name, self._files = uri, name, files
        self._version, self._store = version, open_store(uri)
        self._state, self._data = uri.below(f"{RUN}/{name}"), uri.below(f"{PREFIX}{name}")
        self._told = RunFiles(
            files.root,
            task_files.path_of(self._state),
            task_files.path_of(self._data),
            f"{files.root}/nodes",
            name,
        )
        self._there = {e.key.removeprefix(self._state.folder) for e in self._entries()}
        self._records: dict[str, list[dict[str, Any]]] = {}
        path = Path(files.root, self._told.state)
        super().__init__(path, Path(files.root, task_files.path_of(uri)), resumed)
        self.output.mkdir(parents=True, exist_ok=True)

    @property
    def output(self) -> Path:
        """Directory of the driver's files of the output, with the sizes of all others."""
        return Path(self._files.root, self._told.data)

    @property
    def shown(self) -> str:
        """The place of the unfinished run, for messages."""
        return str(self.uri.below(RUN))

    def result(self, stage: str) -> Any:
        """Returns the result passed to `finish` for a stage, or None; see `WorkFolder`."""
        if f"{stage}.done" not in self._there:
            return None
        place = self._state.below(f"{stage}.done")
        content = read_object(self._store, place.key)
        return parse_json(content.replace(_ROOT, self._files.root.encode()), str(place), object)

    def finish(self, stage: str, result: Any) -> None:
        """Marks a stage as finished."""
        key = self._state.below(f"{stage}.done").key
        content = json.dumps(result).encode().replace(self._files.root.encode(), _ROOT)
        self._store.write(key, content)
        self._there.add(f"{stage}.done")

    def _run(
        self,
        engine: Engine,
        stage: str,
        task: Callable[[Any], dict[str, Any]],
        items: Sequence[tuple[int, Any]],
    ) -> None:
        told = self._told._replace(node=None if engine.is_distributed else self._told.node)
        root, entries = self._files.root, self._files.entries
        function, common = task_files.packed(task, root, entries)
        work = []
        for number, item in items:
            content, inputs = task_files.packed(item, root, entries)
            work.append((number, content, common | inputs))
        engine.run(stage, partial(task_files.run_task, told, stage, function), work)

    def _results(self, stage: str) -> list[dict[str, Any]]:
        self._records[stage] = self._read(stage)
        return [record["result"] for record in self._records[stage]]

    @property
    def packed(self) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
        """Returns what makes a function upload what it writes; see `WorkFolder.packed`."""

        def packed(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
            content, _ = task_files.packed(function, self._files.root, {})
            return partial(task_files.run_function, self._told._replace(node=None), content)

        return packed

    def keep(self, folder: Path, names: Sequence[str]) -> None:
        """Removes the files of attempts that do not count; see `WorkFolder.keep`."""
        store, key = self._files.store_of(str(folder))
        keys = {entry.key for entry in store.entries(f"{key}/")}
        remove_all(store, sorted(keys - {f"{key}/{name}" for name in names}))

    def _entries(self) -> list[Entry]:
        return self._store.entries(self._state.folder)

    def _results_of(self, stage: str) -> dict[int, Entry]:
        """Returns the objects of the results of finished items, by number."""
        entries = self._store.entries(self._state.below(f"{stage}.tasks").folder)
        found = ((_RESULT.fullmatch(entry.key), entry) for entry in entries)
        return {int(match[2]): entry for match, entry in found if match}

    def _done(self, stage: str) -> dict[int, int]:
        return {number: entry.size for number, entry in self._results_of(stage).items()}

    def _read(self, stage: str) -> list[dict[str, Any]]:
        """Returns the results of a stage, with the slices of each; see `WorkFolder._results`."""
        entries = [entry for _, entry in sorted(self._results_of(stage).items())]
        check_memory(str(self._state.below(f"{stage}.tasks")), [entry.size for entry in entries])

        def read(entry: Entry) -> dict[str, Any]:
            return parse_json(bytes(self._store.read(entry)), f"{self.uri.root}{entry.key}")

        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(read, entries))

    def _begin(self, stage: str) -> None:
        """Uploads the slices that the driver itself has written before a stage."""
        if self._files.slices:
            pack = Path(self._files.root, "pack")
            self._store.write(self._data.below(f"{stage}.driver").key, pack)
            pack.unlink()
            slices = [
                (os.path.relpath(name, self._told.data), *rest)
                for name, *rest in self._files.slices
            ]
            key = self._state.below(f"{stage}.driver.tasks/0.json").key
            record = {"result": None, "object": f"{stage}.driver", "slices": slices}
            self._store.write(key, json.dumps(record).encode())
            self._files.slices.clear()

    def fetch(self, folder: Path, ending: str = "") -> None:
        """Has the files that tasks have written to a folder; see `WorkFolder.fetch`."""
        store, key = self._files.store_of(str(folder))
        found = [e for e in store.entries(f"{key}/") if e.key.endswith(ending)]
        if (needed := total_bytes(found)) > (free := shutil.disk_usage(self._files.root).free):
            raise OSError(
                f"{self.uri.root}{key}: needs {needed:,} bytes in {self._files.root}, which has "
                f"{free:,} left; name a larger disk by --cache_dir"
            )
        paths = [folder / entry.key.removeprefix(f"{key}/") for entry in found]
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(partial(self._files.fetch, ranges=None), map(str, paths)))

    def outline(self, folder: Path) -> None:
        """Has the sizes and the ends of such files; see `WorkFolder.outline`."""
        _, key = self._files.store_of(str(folder))
        uri = Uri.parse(f"{self.uri.root}{key}/")
        outline(self._files, uri, Listing(open_store(uri).entries(uri.folder)))

    def lend(self, name: str, folder: Path) -> Path:
        """Returns where tasks read a folder, which is uploaded once; see `WorkFolder.lend`."""
        place = self.folder(name)
        for path in filter(Path.is_file, folder.iterdir()):
            link_or_copy(str(path.resolve()), str(place / path.name))
        if self.result(f"{name}.lent") is None:
            self.share(place)
            self.finish(f"{name}.lent", True)
        return place

    def share(self, folder: Path) -> None:
        """Lets tasks read what the driver has written to a folder; see `WorkFolder.share`."""
        upload(self._store, self._written(folder))

    def _written(self, folder: Path) -> dict[str, Path]:
        """Returns the files below a folder that the driver has written, by key."""
        files = (path for path in folder.rglob("*") if path.is_file())
        sliced = {self.output / name for name, _ in self._slices()}
        return {
            self._files.store_of(str(path))[1]: path
            for path in files
            if str(path) not in self._files.fetched and path not in sliced
        }

    def _slices(self) -> list[tuple[str, tuple[int, int, list[int], str]]]:
        """Returns the slices of all files: name, and place, size, sums and object."""
        return [
            (name, (place, size, sums, record["object"]))
            for records in self._records.values()
            for record in records
            for name, place, size, sums in record.get("slices", ())
        ]

    def checksums(self) -> dict[str, str]:
        """Returns the checksums of the files in slices; see `WorkFolder.checksums`.

        Raises:
            ValueError: a file has a gap, or rows twice.
        """
        keys = (e.key.removeprefix(self._state.folder) for e in self._entries())
        stages = {found[1] for found in map(_RESULT.fullmatch, keys) if found}
        for stage in sorted(stages - self._records.keys()):  # of an earlier driver
            self._records[stage] = self._read(stage)
        of_file: dict[str, list[tuple[int, int, list[int], str]]] = {}
        for name, facts in self._slices():
            of_file.setdefault(name, []).append(facts)
        sums = {}
        for name, own in of_file.items():
            joined = JoinedChecksum(str(self._data.below(name)))
            for place, size, parts, _ in sorted(own, key=itemgetter(0)):
                joined.add(place, size, parts)
            if joined.size != (expected := (self.output / name).stat().st_size):
                raise ValueError(
                    f"{self._data.below(name)}: expected {expected} bytes, got {joined.size}"
                )
            sums[name] = str(joined)
        return sums

    def finish_output(self, result: Any) -> None:
        """Uploads the driver's files of the output, and marks it as complete."""
        objects: dict[str, list[tuple[str, int, int]]] = {}
        for name, (place, size, _, made) in self._slices():
            objects.setdefault(made, []).append((name, place, size))
        write_slices(self._store, self._data, objects)
        upload(self._store, self._written(self.output))
        self.finish("described", result)

    def is_published(self) -> bool:
        """Returns whether what is at the URI is the output of this run, with all its objects."""
        try:
            found = find_published(self.uri)
        except (OSError, ValueError):
            return False
        return found is not None and found.manifest.get("stored_in") == f"{PREFIX}{self.name}"

    def publish(self) -> None:
        """Publishes the output and removes what is left of the run."""
        if not self.is_published():
            publish_folder(self.uri, f"{PREFIX}{self.name}", self._version)
        _remove_run(self.uri, self.name)

    def discard(self) -> None:
        """Removes the run, and its output unless that is published."""
        _discard(self.uri, self.name)


def _keys(uri: Uri) -> list[str]:
    return [entry.key for entry in open_store(uri).entries(uri.folder)]


def _remove_run(uri: Uri, name: str) -> None:
    """Removes what a run has written for itself, and last the object that marks it as one."""
    store = open_store(uri)
    remove_all(store, _keys(uri.below(f"{RUN}/{name}")))
    store.remove(uri.below(f"{RUN}/{FACTS}").key)


@contextmanager
def open_stored_work(
    uri: Uri, facts: dict[str, Any], replace: bool | str, restart: bool
) -> Iterator[StoredWork]:
    """Opens a new or resumed run at a URI.

    It needs the driver's files, see `driver_folder`. In `facts` paths below them count as their
    URIs. The other arguments are those of `open_work_folder`.

    Raises:
        FileExistsError: the output may not be replaced, or another driver has begun a run there.
        ValueError: an unfinished run has other facts, which the message names.
    """
    files = task_files.of_driver()
    uri.check_writable()
    store, place = open_store(uri), uri.below(f"{RUN}/{FACTS}")
    facts = json.loads(with_uris(json.dumps(facts)))
    record = _record(uri)
    if record is not None and (restart or not _is_to_go_on(uri, record, facts)):
        _discard(uri, record["name"])
        record = None
    if record is not None:
        check_same(place, record, facts)
    name = new_suffix() if record is None else record["name"]
    version = None
    try:
        version = check_publishable(uri, replace)
    except FileExistsError:
        work = StoredWork(uri, files, name, True, None)
        if record is None or not work.is_published():
            raise
    if record is None:
        text = json.dumps({"kind": KIND, "name": name, "facts": facts})
        store.write(place.key, text.encode(), NEW)
    with _advice_on_objects(uri.below(f"{RUN}/{name}"), record is not None):
        yield StoredWork(uri, files, name, record is not None, version)


@contextmanager
def _advice_on_objects(run: Uri, resumed: bool) -> Iterator[None]:
    """Adds to errors about objects of a resumed run, such as a lost one, how to begin anew."""
    try:
        yield
    except (TaskError, FileNotFoundError) as error:
        if not resumed or str(run) not in str(error):
            raise
        raise type(error)(f"{error}; --restart begins the run anew") from error


def _record(uri: Uri) -> dict[str, Any] | None:
    """Returns the facts of an unfinished run at a URI."""
    place = uri.below(f"{RUN}/{FACTS}")
    try:
        content = read_object(open_store(uri), place.key)
    except FileNotFoundError:
        return None
    record = parse_json(content, str(place))
    if record.get("kind") != KIND or not re.fullmatch("[0-9a-f]{16}", str(record.get("name"))):
        raise ValueError(f"{place}: not the facts of a run")
    return record


def _is_to_go_on(uri: Uri, record: dict[str, Any], facts: dict[str, Any]) -> bool:
    """Returns whether a run has finished a task other than dividing its work."""
    folder = uri.below(f"{RUN}/{record['name']}").folder
    names = [key.removeprefix(folder) for key in _keys(uri.below(f"{RUN}/{record['name']}"))]
    return record["facts"] == facts or has_results(names)


def _discard(uri: Uri, name: str) -> None:
    """Removes an unfinished run, and its output unless that is published."""
    found = None
    with suppress(ValueError, OSError):
        found = find_published(uri)
    if found is None or found.manifest.get("stored_in") != f"{PREFIX}{name}":
        remove_all(open_store(uri), _keys(uri.below(f"{PREFIX}{name}")))
    _remove_run(uri, name)


@contextmanager
def driver_folder(cache: Cache) -> Iterator[NodeFiles]:
    """Has a directory for the driver's files within the block."""
    parent = cache.folder / STREAMS
    parent.mkdir(exist_ok=True)
    remove_abandoned(parent, "")
    owned = OwnedDirectory(parent.resolve(), "")
    try:
        with task_files.driver_files(str(owned.path)) as files:
            yield files
    finally:
        owned.remove()


@contextmanager
def outlined_inputs(values: Values, names: Sequence[str]) -> Iterator[Values]:
    """Has the driver's files, and flags with paths in place of URIs, within the block.

    The files have their sizes, and the first and last bytes, by which the driver plans.

    Args:
        values: the flags, with those of `CacheConfig`.
        names: flags with input, which are URIs.

    Raises:
        OSError, ValueError: an object cannot be read, or a value is a path of this machine.
    """
    show_uris()
    with driver_folder(Cache.of_flags(values)) as files:
        found = {name: outlined(files, values[name], name) for name in names if values[name]}
        yield values.without(settings_of(CacheConfig)).replaced(found)


def outlined(files: NodeFiles, value: Any, flag: str) -> Any:
    """Returns a flag's value with paths in place of URIs; see `outlined_inputs`.

    Raises:
        OSError, ValueError: an object cannot be read; or a value is a path of this machine.
    """
    if isinstance(value, list | tuple):
        return type(value)(path for item in value for path in _outlined(files, item, flag))
    (path,) = _outlined(files, value, flag)
    return path if isinstance(value, str) else Path(path)


def _outlined(files: NodeFiles, value: Any, flag: str) -> list[str]:
    if not is_uri(value):
        raise ValueError(
            f"--{flag} {value}: expected a URI, as the tasks of this run share no folder; "
            "--nothrough_store, and a --cache_dir that all nodes see, reads local files"
        )
    uri = Uri.parse(value)
    paths = outline(files, uri, listing_of(uri))
    if uri.has_pattern:
        return sorted(paths)
    return [f"{files.root}/{task_files.path_of(uri)}"]


def outline(files: NodeFiles, uri: Uri, listing: Listing) -> list[str]:
    """Makes files of the size of objects, with their first and last bytes; returns their paths."""

    def make(entry: Entry) -> str:
        own = Uri(uri.scheme, uri.authority, listing.name_of(entry))
        path = f"{files.root}/{task_files.path_of(own)}"
        files.entries[os.path.relpath(path, files.root)] = entry
        files.fetch_ends(path)
        with open(path, "rb") as file:
            if file.read(6).startswith(_WHOLE):
                files.fetch(path, [(task_files.END_BYTES, entry.size)])
        os.utime(path, (entry.modified, entry.modified))
        return path

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(make, listing.entries))
