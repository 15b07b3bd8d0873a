"""Directories published under URIs, and fetched from there."""

import json
import os
import time

import numpy as np
import pytest

from dlrm.files import MANIFEST
from dlrm.manifest import BLOCK_BYTES, sealed_json, write_manifest
from dlrm.remote.cache import Cache, with_uris
from dlrm.remote.publish import (
    check_publishable,
    fetched_directory,
    find_published,
    publish,
    write_slices,
)
from dlrm.remote.store import open_store


def made(path, seed=0, kind="dataset"):
    """Returns a directory with a small, an empty and a large file, and a manifest."""
    (path / "train").mkdir(parents=True)
    random = np.random.default_rng(seed)
    (path / "train" / "label.bin").write_bytes(random.bytes(1000))
    (path / "empty").touch()
    (path / "large.bin").write_bytes(random.bytes(3 * BLOCK_BYTES + 5))
    write_manifest(path, kind)
    return path


def content(path):
    return {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and file.name != MANIFEST
    }


def published(path, uri, replace=False):
    publish(path, uri, check_publishable(uri, replace))


def test_what_was_published_is_fetched(bucket, tmp_path):
    path, uri = made(tmp_path / "made"), bucket.below("a/dataset")
    published(path, uri)
    cache = Cache.open()
    with fetched_directory(cache, uri) as copy:
        assert content(copy) == content(path)
        first = {file: file.stat().st_ino for file in copy.rglob("*")}
    with fetched_directory(cache, uri) as copy:
        assert {file: file.stat().st_ino for file in copy.rglob("*")} == first
        assert with_uris(f"{copy}/train/label.bin: bad") == f"{uri}/train/label.bin: bad"


def test_a_replaced_version_is_gone_and_the_new_one_whole(bucket, tmp_path):
    uri = bucket.below("d")
    published(made(tmp_path / "old"), uri)
    with pytest.raises(FileExistsError, match=f"{uri}: exists"):
        check_publishable(uri, replace=False)
    with pytest.raises(FileExistsError, match="an earlier checkpoint to replace, got a 'dataset'"):
        check_publishable(uri, replace="checkpoint")
    new = made(tmp_path / "new", seed=1)
    published(new, uri, replace="dataset")
    with fetched_directory(Cache.open(), uri) as copy:
        assert content(copy) == content(new)
    keys = [entry.key for entry in open_store(uri).entries("")]
    assert len(keys) == 5  # four files and the manifest that names their folder


def test_a_second_writer_is_refused(bucket, tmp_path):
    uri = bucket.below("d")
    version = check_publishable(uri, replace=True)
    published(made(tmp_path / "first"), uri)
    with pytest.raises(FileExistsError, match="another process has written it meanwhile"):
        publish(made(tmp_path / "second", seed=1), uri, version)
    with fetched_directory(Cache.open(), uri) as copy:
        assert content(copy) == content(tmp_path / "first")


def test_an_upload_that_was_cut_leaves_nothing_to_read_and_goes_on(bucket, tmp_path):
    path, uri = made(tmp_path / "made"), bucket.below("d")
    published(path, uri)
    store, manifest = open_store(uri), uri.below(MANIFEST)
    folder = json.loads(bytes(store.read(store.entry(manifest.key))))["stored_in"]
    store.remove(manifest.key)
    store.remove(uri.below(f"{folder}/train/label.bin").key)
    with (
        pytest.raises(FileNotFoundError, match=f"{manifest}: no such object"),
        fetched_directory(Cache.open(), uri),
    ):
        pass
    large = store.entry(uri.below(f"{folder}/large.bin").key)
    published(path, uri)
    assert store.entry(large.key).modified == large.modified  # not uploaded again
    with fetched_directory(Cache.open(), uri) as copy:
        assert content(copy) == content(path)


def test_a_directory_copied_by_other_tools_is_read(bucket, tmp_path):
    path, uri = made(tmp_path / "made"), bucket.below("copied")
    for file in filter(os.path.isfile, path.rglob("*")):
        open_store(uri).write(uri.below(file.relative_to(path).as_posix()).key, file)
    with fetched_directory(Cache.open(), uri) as copy:
        assert content(copy) == content(path)


@pytest.mark.parametrize("name", ["train/label.bin", "large.bin"])
def test_a_damaged_object_is_named(bucket, tmp_path, name):
    path, uri = made(tmp_path / "made"), bucket.below("d")
    published(path, uri)
    store = open_store(uri)
    (entry,) = (entry for entry in store.entries("") if entry.key.endswith(name))
    wrong = bytearray(store.read(entry))
    wrong[-1] ^= 1
    store.write(entry.key, bytes(wrong))
    place = f"{uri.root}{entry.key}"
    with (
        pytest.raises(ValueError, match=f"{place}.*expected CRC-32"),
        fetched_directory(Cache.open(), uri),
    ):
        pass


def test_a_missing_object_is_named(bucket, tmp_path):
    path, uri = made(tmp_path / "made"), bucket.below("d")
    published(path, uri)
    (key,) = (e.key for e in open_store(uri).entries("") if e.key.endswith("empty"))
    open_store(uri).remove(key)
    with (
        pytest.raises(FileNotFoundError, match=f"{uri.root}{key}: missing"),
        fetched_directory(Cache.open(), uri),
    ):
        pass


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ({"a": 7}, "not a manifest"),
        ({"a": {"bytes": 1}}, "not a manifest"),
        ({"a": {"bytes": "1", "crc32": "0" * 8}}, "a: expected a number of bytes"),
        ({"../a": {"bytes": 1, "crc32": "0" * 8}}, r"without \.\., got '../a'"),
    ],
)
def test_a_manifest_that_is_no_list_of_files_is_named(bucket, listed, message):
    uri = bucket.below("d")
    text = sealed_json({"kind": "dataset", "version": 2, "files": listed})
    open_store(uri).write("d/manifest.json", text.encode())
    with pytest.raises(ValueError, match=f"^{uri}/manifest.json: .*{message}"):
        find_published(uri)


def test_a_cache_is_bounded(bucket, tmp_path):
    for seed in range(3):
        published(made(tmp_path / f"made{seed}", seed), bucket.below(f"d{seed}"))
    cache = Cache.open(limit=30 << 20)  # of two directories
    for seed in range(3):
        with fetched_directory(cache, bucket.below(f"d{seed}")) as copy:
            assert content(copy) == content(tmp_path / f"made{seed}")
    assert sum(file.stat().st_size for file in (cache.folder / "objects").rglob("*")) < 30 << 20
    with (
        pytest.raises(OSError, match=r"of which 1,000 may be used \(--cache_gib\)"),
        fetched_directory(Cache.open(tmp_path / "other", limit=1000), bucket.below("d0")),
    ):
        pass


def test_what_an_upload_left_long_ago_is_deleted(bucket, tmp_path, monkeypatch):
    uri, store = bucket.below("d"), open_store(bucket)
    store.write("d/data-0123456789abcdef/large.bin", b"left")
    published(made(tmp_path / "old"), uri)
    assert store.entries("d/data-0123456789abcdef/")  # another writer's, who may still be there
    later = time.time() + 2 * 24 * 3600
    monkeypatch.setattr(time, "time", lambda: later)
    published(made(tmp_path / "new", seed=1), uri, replace=True)
    assert not store.entries("d/data-0123456789abcdef/")


@pytest.fixture
def sliced(bucket, tmp_path):
    """A published directory whose large file is in slices of two objects, and its URI."""
    path, uri = made(tmp_path / "made"), bucket.below("d")
    large, first = (path / "large.bin").read_bytes(), BLOCK_BYTES + 7
    slices = {"one": [("large.bin", 0, 100), ("large.bin", first, len(large) - first)]}
    slices["two"] = [("large.bin", 100, first - 100)]
    os.truncate(path / "large.bin", 0)
    os.truncate(path / "large.bin", len(large))  # as the driver has it
    folder = "data-0123456789abcdef"
    for name, own in slices.items():
        data = b"".join(large[place : place + size] for _, place, size in own)
        open_store(uri).write(uri.below(f"{folder}/{name}").key, data)
    write_slices(path, {f"{folder}/{name}": own for name, own in slices.items()})
    published(path, uri)
    (path / "slices.json").unlink()
    (path / "large.bin").write_bytes(large)
    return path, uri


def test_slices_are_read_as_one_file(sliced):
    path, uri = sliced
    with fetched_directory(Cache.open(), uri) as copy:
        assert content(copy) == content(path)
    entry, whole = find_published(uri).entries["large.bin"], (path / "large.bin").read_bytes()
    for begin, end in ((0, 1), (50, 150), (99, BLOCK_BYTES + 8), (BLOCK_BYTES, len(whole))):
        assert bytes(open_store(uri).read(entry, begin, end)) == whole[begin:end]


def test_objects_of_slices_that_are_missing_or_short_are_named(sliced):
    _, uri = sliced
    store, place = open_store(uri), uri.below("data-0123456789abcdef/two")
    data = bytes(store.read(store.entry(place.key)))
    store.write(place.key, data[:-1])
    with pytest.raises(ValueError, match=f"{place}: expected {len(data)} bytes, got"):
        find_published(uri)
    store.remove(place.key)
    with pytest.raises(FileNotFoundError, match=f"{place}: missing"):
        find_published(uri)
    place = uri.below("data-0123456789abcdef/slices.json")
    record = json.loads(bytes(store.read(store.entry(place.key))))
    store.write(place.key, sealed_json(record | {"version": 2}).encode())
    with pytest.raises(ValueError, match=f"{place}: expected slices of version 1, got 2"):
        find_published(uri)
