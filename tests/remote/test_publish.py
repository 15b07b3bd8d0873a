"""Directories published under URIs, and fetched from there."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from dlrm.files import MANIFEST
from dlrm.manifest import BLOCK_BYTES, sealed_json, write_manifest
from dlrm.remote.cache import Cache
from dlrm.remote.localize import localize
from dlrm.remote.objects import open_store
from dlrm.remote.publish import check_publishable, find_published, publish
from dlrm.remote.uri import origin, shown


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


def fetched(uri, cache=None):
    """Returns the files of a copy, which may be removed from the cache then."""
    copy = localize(uri, cache)
    return content(Path(copy))


def published(path, uri, replace=False):
    publish(path, uri, check_publishable(uri, replace)[""])


def test_what_was_published_is_fetched(bucket, tmp_path):
    path, uri = made(tmp_path / "made"), bucket.below("a/dataset")
    published(path, uri)
    copy = localize(uri)
    assert fetched(uri) == content(path)
    first = {file: file.stat().st_ino for file in Path(copy).rglob("*")}
    assert localize(uri) == copy
    assert {file: file.stat().st_ino for file in Path(copy).rglob("*")} == first
    assert shown(f"{copy}/train/label.bin: bad") == f"{uri}/train/label.bin: bad"
    assert origin(Path(copy, "train")) == f"{uri}/train"


def test_a_replaced_version_is_gone_and_the_new_one_whole(bucket, tmp_path):
    uri = bucket.below("d")
    published(made(tmp_path / "old"), uri)
    with pytest.raises(FileExistsError, match=f"{uri}: exists"):
        check_publishable(uri, replace=False)
    with pytest.raises(FileExistsError, match="an earlier checkpoint to replace, got a 'dataset'"):
        check_publishable(uri, replace="checkpoint")
    new = made(tmp_path / "new", seed=1)
    published(new, uri, replace="dataset")
    assert fetched(uri) == content(new)
    keys = [entry.key for entry in open_store(uri).entries("")]
    assert len(keys) == 5  # four files and the manifest that names their folder


def test_a_second_writer_is_refused(bucket, tmp_path):
    uri = bucket.below("d")
    version = check_publishable(uri, replace=True)[""]
    published(made(tmp_path / "first"), uri)
    with pytest.raises(FileExistsError, match="another process has written it meanwhile"):
        publish(made(tmp_path / "second", seed=1), uri, version)
    assert fetched(uri) == content(tmp_path / "first")


def test_an_upload_that_was_cut_leaves_nothing_to_read_and_goes_on(bucket, tmp_path):
    path, uri = made(tmp_path / "made"), bucket.below("d")
    published(path, uri)
    store, manifest = open_store(uri), uri.below(MANIFEST)
    folder = json.loads(bytes(store.read(store.entry(manifest.key))))["stored_in"]
    store.remove(manifest.key)
    store.remove(uri.below(f"{folder}/train/label.bin").key)
    with pytest.raises(FileNotFoundError, match=f"{uri}: has nothing that is complete"):
        localize(uri)
    large = store.entry(uri.below(f"{folder}/large.bin").key)
    published(path, uri)
    assert store.entry(large.key).modified == large.modified  # not uploaded again
    assert fetched(uri) == content(path)


def test_a_directory_copied_by_other_tools_is_read(bucket, tmp_path):
    path, uri = made(tmp_path / "made"), bucket.below("copied")
    for file in filter(os.path.isfile, path.rglob("*")):
        open_store(uri).write(uri.below(file.relative_to(path).as_posix()).key, file)
    assert fetched(uri) == content(path)


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
    with pytest.raises(ValueError, match=f"{place}.*expected CRC-32"):
        localize(uri)


def test_a_missing_object_is_named(bucket, tmp_path):
    path, uri = made(tmp_path / "made"), bucket.below("d")
    published(path, uri)
    (key,) = (e.key for e in open_store(uri).entries("") if e.key.endswith("empty"))
    open_store(uri).remove(key)
    with pytest.raises(FileNotFoundError, match=f"{uri.root}{key}: missing"):
        localize(uri)


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
        assert fetched(bucket.below(f"d{seed}"), cache) == content(tmp_path / f"made{seed}")
    assert sum(file.stat().st_size for file in (cache.folder / "objects").rglob("*")) < 30 << 20
    with pytest.raises(OSError, match=r"and 1,000 may be used \(--cache_gib\)"):
        localize(bucket.below("d0"), Cache.open(tmp_path / "other", limit=1000))


def test_what_other_uploads_left_is_deleted(bucket, tmp_path):
    uri, store = bucket.below("d"), open_store(bucket)
    for name in ("d/data-0123456789abcdef/a", "d/data-unfinished/a", "d/data-2024/a"):
        store.write(name, b"left")
    publish(made(tmp_path / "made"), uri, None)
    left = {entry.key.split("/")[1] for entry in store.entries("d/data-")}
    assert left == {"data-2024", find_published(uri).manifest["stored_in"]}
