"""Finished directories published under a URI, whole or not at all, and what is at a URI.

    URI/manifest.json           names the folder with the files; written last
    URI/data-<digest>/...       a published directory, complete in itself

The digest is that of the directory's manifest, so a killed upload continues where it stopped, two
versions never mix, and the one conditional write of `URI/manifest.json` changes from the old to the
new. A plain directory, which other programs read or have copied, has its files beside its manifest.
"""

import hashlib
import re
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from dlrm.documents import brief, parse_json
from dlrm.files import MANIFEST, check_relative
from dlrm.manifest import files_of, parse_sealed, sealed_json
from dlrm.remote.cache import Listing
from dlrm.remote.objects import (
    NEW,
    Entry,
    Wanted,
    download,
    find_entries,
    open_store,
    remove_all,
    upload,
)
from dlrm.remote.uri import Uri

_STORED_IN = "stored_in"
_PREFIX, RUN = "data-", "data-unfinished"  # the latter has files of tasks, see `dlrm.preproc`
_DATA = re.compile(rf"((?:.*/)?){_PREFIX}([0-9a-f]{{16}}|unfinished)/")  # key of a published file
_CONFIG = "config.pbtxt"  # of a model that Triton serves
_FACTS = "model.json"  # of a version, which the next one must match


def find_published(uri: Uri) -> Listing | None:
    """Returns the files of the directory at a URI, or None where there is no manifest.

    Raises:
        OSError: the store cannot be read, or a listed file is missing.
        ValueError: the manifest is damaged, or a file has another size.
    """
    entry, manifest = _manifest_at(uri)
    if entry is None or not {"kind", "files"} <= manifest.keys():  # of another program
        return None
    place, folder = str(uri.below(MANIFEST)), manifest.get(_STORED_IN, "")
    if folder:
        check_relative(folder, place)
    base = uri.below(folder).folder if folder else uri.folder
    there = {e.key.removeprefix(base): e for e in open_store(uri).entries(base)}
    found = Listing({uri.below(MANIFEST).key: there.get(MANIFEST, entry)}, {}, manifest=manifest)
    for name, (size, checksum) in files_of(manifest, place).items():
        check_relative(name, place)
        if name not in there:
            raise FileNotFoundError(f"{uri.root}{base}{name}: missing, though {place} names it")
        if (got := there[name].size) != size:
            raise ValueError(f"{uri.root}{base}{name}: expected {size} bytes, got {got}")
        found.files[uri.below(name).key] = there[name]
        found.checksums[uri.below(name).key] = checksum
    return found


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


def listing_of(uri: Uri) -> Listing:
    """Returns the content of a URI: an object, a published directory, or many objects.

    The files of published directories below the URI, such as the checkpoints of a run, are in the
    folders where they were published; those that are not complete are left out. For errors see
    `find_published` and `find_entries`.
    """
    if uri.has_pattern or uri.kind == "http":
        return Listing({entry.key: entry for entry in find_entries(uri)})
    if uri.key and not uri.key.endswith("/"):  # first, as others may not be permitted
        with suppress(FileNotFoundError):
            return Listing({uri.key: open_store(uri).entry(uri.key)})
    if (found := find_published(uri)) is not None:
        return found
    listing, bases = Listing({}, {}), set()
    for entry in find_entries(uri):
        if inside := _DATA.match(entry.key):
            bases.add(inside[1])
        else:
            listing.files[entry.key] = entry
    for base in sorted(bases):
        if f"{base}{MANIFEST}" in listing.files:
            found = find_published(replace(uri, key=base))
            assert found is not None
            listing.files.update(found.files)
            listing.checksums.update(found.checksums)
    if not listing.files:
        raise FileNotFoundError(f"{uri}: has nothing that is complete, only what a run has begun")
    return listing


def check_publishable(uri: Uri, replace: bool | str | None) -> dict[str, str | None]:
    """Returns the versions of the manifests that a publication will replace, before any work.

    Args:
        replace: whether to replace a published directory; a kind, as in a manifest, allows only
            directories of that kind.

    Returns:
        The version of the directory's manifest by "", None if there is nothing; or those of the
        directories in a folder of published directories, by name.

    Raises:
        FileExistsError: there is something that may not be replaced.
    """
    entry, manifest = _manifest_at(uri)
    if entry is not None:
        if not replace:
            hint = "; --overwrite replaces it" if replace is False else ""
            message = f"{uri}: exists and is not empty; name another or remove it{hint}"
            raise FileExistsError(message)
        if isinstance(replace, str) and (kind := manifest.get("kind")) != replace:
            raise FileExistsError(
                f"{uri}: expected nothing, or an earlier {replace} to replace, got a "
                f"{brief(kind)}; name another"
            )
        return {"": entry.version}
    entries = (e for e in open_store(uri).entries(uri.folder) if not _DATA.match(e.key))
    keys = [entry.key.removeprefix(uri.folder) for entry in entries]
    names = {key.partition("/")[0] for key in keys}
    if strange := [key for key in keys if f"{key.partition('/')[0]}/{MANIFEST}" not in keys]:
        raise FileExistsError(
            f"{uri}: has objects, such as {strange[0]}, but no {MANIFEST}, so it was not written "
            "by this program and is not replaced; name another"
        )
    return {n: check_publishable(uri.below(n), replace)[""] for n in names} or {"": None}


def publish(directory: Path, uri: Uri, version: str | None, plain: bool = False) -> None:
    """Publishes a finished directory with a manifest.

    Args:
        version: result of `check_publishable`.
        plain: whether the objects have the names of the files, for other programs. What they
            replace is damaged until the last is there.

    Raises:
        FileExistsError: another process has published there meanwhile.
        OSError: an object cannot be written; unless `plain`, what was published before still is.
    """
    store, pointer = open_store(uri), uri.below(MANIFEST).key
    content = (directory / MANIFEST).read_bytes()
    manifest = parse_json(content, directory / MANIFEST)
    folder = "" if plain else f"{_PREFIX}{hashlib.sha256(content).hexdigest()[:16]}"
    base = uri.below(folder).folder if folder else uri.folder
    files = {f"{base}{name}": directory / name for name in manifest["files"]}
    # Versions: earlier, of a killed upload, or of writers who will be refused now.
    listed = store.entries(uri.below(_PREFIX).key)
    there = {e.key: e.size for e in listed if _DATA.match(e.key.removeprefix(uri.folder))}
    before = _manifest_at(uri)[1]
    beside = {} if _STORED_IN in before else before.get("files", {})
    upload(store, {k: path for k, path in files.items() if there.get(k) != path.stat().st_size})
    if folder:
        store.write(f"{base}{MANIFEST}", content)  # makes the folder complete in itself
        content = sealed_json({**manifest, _STORED_IN: folder}).encode()
    store.write(pointer, content, version or NEW)
    old = {*there, *(uri.below(name).key for name in beside)} - files.keys()
    remove_all(store, sorted(old - {f"{base}{MANIFEST}"}))


class Output:
    """Output that is written to a local path and published under a URI: a file or directories.

    Args:
        replace: see `check_publishable`, also for errors; None lets a file replace a file.
        plain: see `publish`.
    """

    def __init__(
        self, uri: Uri, path: Path, replace: bool | str | None = None, plain: bool = False
    ) -> None:
        uri.check_writable()
        self.uri, self.path, self._plain = uri, path, plain
        self._versions = check_publishable(uri, replace)
        if replace is False and uri.key:
            with suppress(FileNotFoundError):
                open_store(uri).entry(uri.key)
                raise FileExistsError(f"{uri}: exists; --overwrite replaces it")
        # What a run that was killed has left: its unfinished work stays, for the next one.
        for complete in (path, *(manifest.parent for manifest in path.glob(f"*/{MANIFEST}"))):
            if (complete / MANIFEST).is_file():
                shutil.rmtree(complete)
        if path.is_file():
            path.unlink()

    def publish(self) -> None:
        """Publishes what was written, if anything was; for errors see `publish`."""
        if self.path.is_file():
            open_store(self.uri).write(self.uri.key, self.path)
        elif (self.path / MANIFEST).is_file():
            if "" not in self._versions:
                raise FileExistsError(f"{self.uri}: has directories of others; name another")
            publish(self.path, self.uri, self._versions[""], self._plain)
        else:
            files = {path for path in self.path.rglob("*") if path.is_file()}
            for inside in sorted(one.parent for one in self.path.glob(f"*/{MANIFEST}")):
                publish(inside, self.uri.below(inside.name), self._versions.get(inside.name))
                files -= {*inside.rglob("*")}
            upload(open_store(self.uri), {_key(self, path): path for path in sorted(files)})


class Addition:
    """A repository of models for Triton, at a URI, and what is added to it.

    The objects have the names that Triton reads. A version begins with its manifest, which no other
    writer may have written, and `config.pbtxt`, without which there is no model, is the last one.

    Args:
        path: a local folder, which gets its folders and the files that an export compares.
    """

    def __init__(self, uri: Uri, path: Path) -> None:
        uri.check_writable()
        self.uri, self.path = uri, path
        store, wanted = open_store(uri), []
        self._there = {PurePosixPath(entry.key): entry for entry in store.entries(uri.folder)}
        models = {key.parent for key in self._there if key.name == _CONFIG}
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        for key, entry in self._there.items():
            if not models.isdisjoint(key.parents):  # others are of exports that were killed
                file = path / entry.key.removeprefix(uri.folder)
                file.parent.mkdir(parents=True, exist_ok=True)
                if key.name in (_CONFIG, _FACTS) or "_transform/" in entry.key:
                    wanted.append(Wanted(entry, str(file)))
        download(store, wanted)
        self._before = {*path.rglob("*")}

    def publish(self) -> None:
        """Publishes what was added; FileExistsError if another process has added the same."""
        store, new = open_store(self.uri), sorted({*self.path.rglob("*")} - self._before)
        for path in new:
            if path.is_dir() and not any(path.iterdir()):  # of ensembles: versions without files
                store.write(f"{_key(self, path)}/.keep", b"")
        files = {_key(self, path): path for path in new if path.is_file()}
        first, last = ([k for k, p in files.items() if p.name == n] for n in (MANIFEST, _CONFIG))
        last.sort(key=lambda key: f"_raw/{_CONFIG}" in key)  # an ensemble after its parts
        self._claim({key: files[key] for key in first})
        upload(store, {key: files[key] for key in files.keys() - {*first, *last}})
        self._claim({key: files[key] for key in last})

    def _claim(self, files: dict[str, Path]) -> None:
        for key, path in files.items():
            before = self._there.get(PurePosixPath(key))
            open_store(self.uri).write(key, path, before.version if before else NEW)


def _key(output: Output | Addition, path: Path) -> str:
    """Returns the key of a file of an output."""
    return f"{output.uri.folder}{path.relative_to(output.path).as_posix()}"
