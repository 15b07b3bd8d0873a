"""Finished directories published under a URI, whole or not at all, and read from there.

    URI/manifest.json           names the folder with the files; written last
    URI/data-<digest>/...       a published directory, complete in itself

The digest is that of the directory's manifest, so a killed upload continues where it stopped, two
versions never mix, and the one conditional write of `URI/manifest.json` changes
from the old to the new. A directory that was copied to a URI by other tools, with its files
beside its manifest, is read too. `publish_plain` writes that layout, which other programs read: its
manifest says that it is unfinished until all objects are there.

Files that several machines have written are in slices: `slices.json` in the folder, which then has
the name of the run that wrote it, says which bytes of which object are which bytes of which file.
Readers have them as one file.
"""

import hashlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlrm.documents import brief, parse_json
from dlrm.files import MANIFEST, check_relative
from dlrm.manifest import files_of, parse_sealed, read_manifest, read_sealed, sealed_json
from dlrm.remote.cache import Cache, Listing
from dlrm.remote.store import NEW, Entry, Slice, Store, find_entries, open_store
from dlrm.remote.transfer import remove_all, upload
from dlrm.remote.uri import Uri

_STORED_IN, _UNFINISHED, _SLICED = "stored_in", "unfinished", "sliced"
PREFIX, RUN = "data-", "data-unfinished"  # the latter has files of tasks, see `dlrm.preproc`
_DATA = re.compile(rf"((?:.*/)?){PREFIX}([0-9a-f]{{16}}|unfinished)/")  # key of a published file
_SLICES, _SLICES_VERSION = "slices.json", 1
_ABANDONED_SECONDS = 24 * 3600  # after its last object, a folder that no manifest names


@dataclass(frozen=True)
class Published:
    """A directory at a URI.

    Attributes:
        uri: its place.
        manifest: its manifest.
        version: version of the manifest's object.
        entries: path in the directory -> object or file in slices, the manifest among them.
        objects: keys of all its objects, except the manifest at the URI.
    """

    uri: Uri
    manifest: dict[str, Any]
    version: str
    entries: dict[str, Entry]
    objects: Sequence[str]

    @property
    def checksums(self) -> dict[str, str]:
        """Key -> checksum of each object that the manifest lists."""
        files = self.manifest["files"]
        return {e.key: files[name]["crc32"] for name, e in self.entries.items() if name in files}

    def listing(self) -> Listing:
        """Returns the objects of its files, as files below its place."""
        names = {entry.key: f"{self.uri.folder}{name}" for name, entry in self.entries.items()}
        return Listing([*self.entries.values()], names, self.checksums)


def find_published(uri: Uri) -> Published | None:
    """Returns the directory at a URI, or None where there is no manifest.

    Raises:
        OSError: the store cannot be read, or a listed file is missing.
        ValueError: the manifest is damaged, or a file has another size.
    """
    entry, manifest = _manifest_at(uri)
    if entry is None or not {"kind", "files"} <= manifest.keys():  # of another program
        return None
    if _UNFINISHED in manifest:
        raise ValueError(f"{uri}: is not complete: it is being written, or its writer was killed")
    return _checked(uri, manifest, entry)


def _checked(uri: Uri, manifest: dict[str, Any], entry: Entry) -> Published:
    """Returns the directory that a manifest lists, after checks; see `find_published`."""
    store, place = open_store(uri), str(uri.below(MANIFEST))
    folder = manifest.get(_STORED_IN, "")
    if folder:
        check_relative(folder, place)
    files = files_of(manifest, place)
    base = uri.below(folder).folder if folder else uri.folder
    listed = {e.key.removeprefix(base): e for e in store.entries(base)}
    objects = [f"{base}{name}" for name in listed if folder or name in files]
    if _SLICED in manifest:
        listed |= _in_slices(store, base, manifest[_SLICED], listed)
    for name, (size, _) in files.items():
        check_relative(name, place)
        if name not in listed:
            raise FileNotFoundError(f"{uri.root}{base}{name}: missing, though {place} names it")
        if listed[name].size != size:
            raise ValueError(
                f"{uri.root}{base}{name}: expected {size} bytes, got {listed[name].size}"
            )
    entries = {name: listed[name] for name in files}
    entries[MANIFEST] = listed.get(MANIFEST, entry)
    return Published(uri, manifest, entry.version, entries, objects)


def _in_slices(store: Store, base: str, name: Any, listed: dict[str, Entry]) -> dict[str, Entry]:
    """Returns the files in slices of a folder, given the name of the object that lists them.

    Raises:
        OSError: an object is missing, or is shorter than its slices.
        ValueError: the list is damaged, or of a later version.
    """
    check_relative(name, f"{store.root}{base}")
    place = f"{store.root}{base}{name}"
    if name not in listed:
        raise FileNotFoundError(f"{place}: no such object")
    record = parse_sealed(bytes(store.read(listed[name])), place, required=True)
    if record.get("version") != _SLICES_VERSION:
        raise ValueError(
            f"{place}: expected slices of version {_SLICES_VERSION}, got "
            f"{brief(record.get('version'))}; a later version of dlrm reads them"
        )
    found: dict[str, list[Slice]] = {}
    for key, slices in record["objects"].items():
        entry, begin = listed.get(key), 0
        if entry is None:
            raise FileNotFoundError(f"{store.root}{base}{key}: missing, though {place} names it")
        for text in slices:
            file, first, size = text.rsplit(" ", 2)
            found.setdefault(file, []).append(Slice(int(first), int(size), entry, begin))
            begin += int(size)
        if begin != entry.size:
            raise ValueError(f"{store.root}{base}{key}: expected {begin} bytes, got {entry.size}")
    return {file: _joined(f"{base}{file}", sorted(slices)) for file, slices in found.items()}


def _joined(key: str, slices: Sequence[Slice]) -> Entry:
    """Returns a file in slices, without gaps or overlaps up to its last byte."""
    end = 0
    for one in slices:
        if one.place != end:
            raise ValueError(f"{key}: expected the bytes from {end} on, got those from {one.place}")
        end += one.size
    versions = [f"{one.entry.key} {one.entry.version} {one.begin} {one.size}" for one in slices]
    version = hashlib.sha256("\n".join(versions).encode()).hexdigest()
    return Entry(key, end, version, max(one.entry.modified for one in slices), tuple(slices))


def _manifest_at(uri: Uri) -> tuple[Entry | None, dict[str, Any]]:
    """Returns the object of the manifest at a URI, and its content; None where there is none."""
    store, place = open_store(uri), uri.below(MANIFEST)
    try:
        entry = store.entry(place.key)
    except FileNotFoundError as error:
        if "no such bucket" in str(error):
            raise
        return None, {}
    return entry, parse_sealed(bytes(store.read(entry)), str(place))


class StrangersError(FileExistsError):
    """There are objects where nothing was published."""


def listing_of(uri: Uri) -> Listing:
    """Returns the content of a URI: an object, a published directory, or many objects.

    The files of published directories below the URI, such as the checkpoints of a run, are in the
    folders where they were published; those that are not complete are left out.

    Raises:
        OSError, ValueError: see `find_published` and `find_entries`.
    """
    if uri.has_pattern or uri.scheme in ("http", "https"):
        return Listing(find_entries(uri))
    if uri.key and not uri.key.endswith("/"):  # first, as others may not be permitted
        with suppress(FileNotFoundError):
            return Listing([open_store(uri).entry(uri.key)])
    if (found := find_published(uri)) is not None:
        return found.listing()
    listing, bases = Listing([], {}, {}), set()
    for entry in find_entries(uri):
        if inside := _DATA.match(entry.key):
            bases.add(inside[1])
        else:
            listing.entries.append(entry)
    for base in sorted(bases):
        pointer = f"{base}{MANIFEST}"
        if not any(entry.key == pointer for entry in listing.entries):
            continue
        found = find_published(replace(uri, key=base))
        assert found is not None
        listing.entries[:] = [e for e in listing.entries if e.key != pointer]
        more = found.listing()
        listing.entries.extend(more.entries)
        listing.names.update(more.names)
        listing.checksums.update(more.checksums)
    if not listing.entries:
        raise FileNotFoundError(f"{uri}: has nothing that is complete, only what a run has begun")
    return listing


@contextmanager
def fetched_directory(cache: Cache, uri: Uri) -> Iterator[Path]:
    """Yields a local directory with the files of a published one, whose checksums are right.

    Raises:
        FileNotFoundError: there is no manifest at the URI.
        OSError, ValueError: see `find_published` and `Cache.fetched`.
    """
    found = find_published(uri)
    if found is None:
        raise FileNotFoundError(f"{uri.below(MANIFEST)}: no such object, so {uri} is not complete")
    with cache.fetched(replace(uri, key=uri.folder), found.listing()) as path:
        yield path


def check_publishable(uri: Uri, replace: bool | str) -> str | None:
    """Returns the version of the manifest that a publication will replace, or None.

    Call it before any work: `publish` refuses to replace another version.

    Args:
        replace: whether to replace a published directory; a kind, as in a manifest, allows only
            directories of that kind.

    Raises:
        FileExistsError: there is something that may not be replaced.
        OSError: the store cannot be read.
    """
    entry, manifest = _manifest_at(uri)
    if entry is not None:
        kind = manifest.get("kind")
        if not replace and _UNFINISHED not in manifest:
            raise FileExistsError(f"{uri}: exists and is not empty; name another or remove it")
        if isinstance(replace, str) and kind != replace:
            raise FileExistsError(
                f"{uri}: expected nothing, or an earlier {replace} to replace, got a "
                f"{brief(kind)}; name another"
            )
        return entry.version
    folder = uri.folder
    keys = (entry.key for entry in open_store(uri).entries(folder))
    if others := [key for key in keys if not key.removeprefix(folder).startswith(PREFIX)]:
        raise _strangers(uri, others[0])
    return None


def _strangers(uri: Uri, key: str) -> StrangersError:
    return StrangersError(
        f"{uri}: has objects, such as {key}, but no {MANIFEST}, so it was not written by this "
        "program and is not replaced; name another"
    )


def check_folder(uri: Uri, replace: bool | str) -> dict[str, str]:
    """Returns the versions of published directories in a folder, which are all that it has.

    For `replace` and errors see `check_publishable`.
    """
    entries = (e for e in open_store(uri).entries(uri.folder) if not _DATA.match(e.key))
    keys = [entry.key.removeprefix(uri.folder) for entry in entries]
    names = {
        name for name in {key.partition("/")[0] for key in keys} if f"{name}/{MANIFEST}" in keys
    }
    if others := [key for key in keys if key.partition("/")[0] not in names]:
        raise _strangers(uri, others[0])
    found = {name: check_publishable(uri.below(name), replace) for name in names if "/" not in name}
    return {name: version for name, version in found.items() if version is not None}


def publish(directory: Path, uri: Uri, version: str | None) -> None:
    """Publishes a finished directory with a manifest.

    Args:
        version: result of `check_publishable`.

    Raises:
        FileExistsError: another process has published there meanwhile.
        OSError: an object cannot be written; what was published before still is.
    """
    store = open_store(uri)
    content = (directory / MANIFEST).read_bytes()
    manifest = parse_json(content, directory / MANIFEST)
    read_manifest(directory, manifest["kind"])
    name, sliced = _sliced_files(directory)
    name = name or PREFIX + hashlib.sha256(content).hexdigest()[:16]
    base, before = uri.below(name).folder, find_published(uri)
    there = {entry.key: entry.size for entry in store.entries(base)}
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    names = [path.relative_to(directory).as_posix() for path in paths]
    files = {f"{base}{n}": p for n, p in zip(names, paths, strict=True) if n not in sliced}
    left = {key: path for key, path in files.items() if there.get(key) != path.stat().st_size}
    left.pop(f"{base}{MANIFEST}", None)
    upload(store, left)
    store.write(f"{base}{MANIFEST}", content)  # makes the folder complete in itself
    entries = {**manifest, _STORED_IN: name} | ({_SLICED: _SLICES} if sliced else {})
    _point_to(store, uri, entries, version)
    _tidy(store, uri, name, before)
    remove_all(store, [entry.key for entry in store.entries(uri.below(RUN).folder)])


def write_slices(directory: Path, objects: Mapping[str, Sequence[tuple[str, int, int]]]) -> None:
    """Writes the list of the files in slices of a directory, for `publish`, if there are any.

    Args:
        directory: the directory, in which these files have their sizes and no content.
        objects: folder of the URI, and name of an object in it -> its slices: file, place in it,
            and size.
    """
    if objects:
        (folder,) = {name.partition("/")[0] for name in objects}
        lines = {
            name.partition("/")[2]: [" ".join(map(str, one)) for one in own]
            for name, own in objects.items()
        }
        record = {"version": _SLICES_VERSION, _STORED_IN: folder, "objects": lines}
        (directory / _SLICES).write_text(sealed_json(record), encoding="utf-8")


def _sliced_files(directory: Path) -> tuple[str, set[str]]:
    """Returns the folder of the URI with the files in slices of a directory, and their names."""
    if not (directory / _SLICES).is_file():
        return "", set()
    record = read_sealed(directory / _SLICES, required=True)
    lines = (line for own in record["objects"].values() for line in own)
    return record[_STORED_IN], {line.rsplit(" ", 2)[0] for line in lines}


def read_object(store: Store, key: str) -> bytes:
    """Returns the bytes of an object."""
    return bytes(store.read(store.entry(key)))


def _point_to(store: Store, uri: Uri, manifest: dict[str, Any], version: str | None) -> None:
    content = sealed_json(manifest).encode()
    store.write(uri.below(MANIFEST).key, content, version or NEW)


def publish_plain(directory: Path, uri: Uri, version: str | None) -> None:
    """Publishes a finished directory as objects with the names of its files.

    What it replaces cannot be read from the first object on until the last; a killed one leaves a
    manifest which says so, and the next one replaces it. For arguments and errors see `publish`.
    """
    store = open_store(uri)
    content = (directory / MANIFEST).read_bytes()
    manifest = parse_json(content, directory / MANIFEST)
    _, before = _manifest_at(uri)
    place, folder = uri.below(MANIFEST).key, before.get(_STORED_IN)
    old = {f"{folder}/{name}" if folder else name for name in before.get("files", {})}
    old |= {*before.get(_UNFINISHED, ()), *([f"{folder}/{MANIFEST}"] if folder else [])}
    text = sealed_json({**manifest, _UNFINISHED: sorted(old)})
    claim = store.write(place, text.encode(), version or NEW)
    upload(store, {uri.below(name).key: directory / name for name in manifest["files"]})
    store.write(place, content, claim)
    remove_all(store, [uri.below(name).key for name in sorted(old - manifest["files"].keys())])


def _tidy(store: Store, uri: Uri, current: str, before: Published | None) -> None:
    """Deletes the version that was replaced, and what killed uploads left long ago."""
    gone: list[str] = []
    if before is not None and before.manifest.get(_STORED_IN, "") != current:
        gone = [key for key in before.objects if key != uri.below(MANIFEST).key]
    folders: dict[str, list[Entry]] = {}
    for entry in store.entries(f"{uri.folder}{PREFIX}"):
        folder = entry.key.removeprefix(uri.folder).partition("/")[0]
        folders.setdefault(folder, []).append(entry)
    for folder, entries in folders.items():
        newest = max(entry.modified for entry in entries)
        if folder != current and newest < time.time() - _ABANDONED_SECONDS:
            gone += [entry.key for entry in entries]
    remove_all(store, gone)
