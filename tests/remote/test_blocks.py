"""Files of datasets at URIs, whose blocks are fetched when they are read."""

import json
import os
import sys
import threading
import time
import zlib
from pathlib import Path

import list_testing
import numpy as np
import pytest
import torch

from dlrm import manifest
from dlrm.data import verification
from dlrm.data.clicks import published
from dlrm.data.clicks.batch import Shard
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.layout import read_model_size, write_dataset_manifest
from dlrm.data.clicks.published import local_dataset
from dlrm.data.clicks.synthetic import write_synthetic_dataset
from dlrm.data.prefetch import batch_order, prefetch
from dlrm.distributed import World
from dlrm.mapped_files import map_file
from dlrm.remote import blocks, transfer
from dlrm.remote.blocks import StreamedDirectory, fetched_ahead, find_streamed
from dlrm.remote.cache import Cache
from dlrm.remote.publish import check_publishable, publish
from dlrm.remote.store import Entry, open_store
from dlrm.remote.uri import Uri
from dlrm.train.checkpoints.checkpoint import read_config
from dlrm.train.checkpoints.directory import find_checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

BLOCK = 4096  # a page, the least that can be freed
ROWS, BATCH = 5_000, 250


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    for module in (manifest, verification, published, blocks, transfer):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)


class Memory:
    """A store with objects in memory, which counts what is read."""

    root = Uri("s3", "bucket")

    def __init__(self, objects):
        self.objects, self.reads, self.seconds = objects, [], 0.0

    def read(self, entry, begin=0, end=None):
        self.reads.append((entry.key, begin // BLOCK))
        time.sleep(self.seconds)
        return self.objects[entry.key][begin:end]


@pytest.fixture
def opened(tmp_path):
    """Opens streamed files of random bytes: their directory, their content and their store."""
    directories = []

    def opened(limit, sizes=(7 * BLOCK + 5, 4 * BLOCK)):
        random = np.random.default_rng(0)
        objects = {f"f{number}": random.bytes(size) for number, size in enumerate(sizes)}
        store = Memory(objects)
        directories.append(directory := StreamedDirectory(store, limit))
        for key, content in objects.items():
            parts = (content[k : k + BLOCK] for k in range(0, len(content), BLOCK))
            sums = "".join(f"{zlib.crc32(part):08x}" for part in parts)
            directory.add(tmp_path / key, Entry(key, len(content), "1", 0.0), sums)
        return directory, {tmp_path / key: content for key, content in objects.items()}, store

    yield opened
    for directory in directories:
        directory.close()


def on_disk(paths):
    return sum(path.stat().st_blocks * 512 for path in paths) // BLOCK


def test_threads_read_in_any_order_with_room_for_two_blocks(opened):
    directory, contents, store = opened(2 * BLOCK, sizes=(60 * BLOCK + 5, 40 * BLOCK))
    maps = {path: map_file(path, np.uint8) for path in contents}
    store.seconds = 0.0002
    wrong = []

    def read(seed):
        random = np.random.default_rng(seed)
        for _ in range(150):
            spans = []
            for path, content in contents.items():
                begin = int(random.integers(0, len(content)))
                spans.append((path, begin, min(begin + BLOCK, len(content))))
                directory.file(path).touch(*spans[-1][1:])
            time.sleep(0.0002)  # others free blocks meanwhile
            for path, begin, end in spans:
                if maps[path][begin:end].tobytes() != contents[path][begin:end]:
                    wrong.append((path, begin))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(store.reads) > 1000  # blocks were freed, and fetched again
    del threads, thread  # as they hold nothing any more, there is room again
    for path in contents:
        directory.file(path).touch(0, 1)
        directory.release()
    directory.file(path).touch(BLOCK, BLOCK + 1)
    assert on_disk(contents) == 2


def test_no_more_blocks_stay_than_the_limit(opened):
    directory, contents, store = opened(limit=3 * BLOCK)
    path, content = next(iter(contents.items()))
    for _ in range(2):
        for begin in range(0, len(content), 1000):
            directory.file(path).touch(begin, begin + 1)
            assert on_disk(contents) <= 3
    assert len(store.reads) == 2 * 7
    rows = np.array([7, 0, 700])
    directory.file(path).touch_rows(rows, 10)
    found = map_file(path, np.uint8)
    assert all(found[10 * r : 10 * r + 10].tobytes() == content[10 * r : 10 * r + 10] for r in rows)


def test_a_block_is_fetched_once_for_all_who_wait(opened):
    directory, contents, store = opened(limit=100 * BLOCK)
    store.seconds = 0.02
    file = directory.file(next(iter(contents)))
    threads = [threading.Thread(target=file.touch, args=(0, 2 * BLOCK)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(store.reads) == [("f0", 0), ("f0", 1)]


def test_blocks_of_the_next_batches_are_fetched_before_their_turn(opened):
    directory, contents, store = opened(limit=100 * BLOCK)
    file = directory.file(next(iter(contents)))
    order = fetched_ahead([5, 2, 0, 1], lambda k: [(file, k * BLOCK, k * BLOCK + 9)], blocks=2)
    assert next(order) == 5
    directory.hold(file, [5])
    until = time.monotonic() + 60
    while len(store.reads) < 3 and time.monotonic() < until:
        time.sleep(0.001)
    assert sorted(store.reads) == [("f0", 0), ("f0", 2), ("f0", 5)]
    assert list(order) == [2, 0, 1]


def test_a_damaged_block_is_fetched_again_and_then_named(opened):
    directory, contents, store = opened(limit=100 * BLOCK)
    right = store.objects["f0"]
    store.objects["f0"] = right[: BLOCK + 1] + bytes([right[BLOCK + 1] ^ 1]) + right[BLOCK + 2 :]
    file = directory.file(next(iter(contents)))
    with pytest.raises(ValueError, match=r"s3://bucket/f0: .*expected CRC-32"):
        file.touch(0, 2 * BLOCK)
    assert store.reads.count(("f0", 1)) == 2
    store.objects["f0"] = right  # a later touch asks again
    file.touch(0, 2 * BLOCK)


def test_a_full_disk_is_named_and_the_block_is_not_present(opened, monkeypatch):
    directory, contents, _ = opened(limit=100 * BLOCK)
    path, content = next(iter(contents.items()))
    written = os.pwrite

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match=r"s3://bucket/f0: .*\(No space left.*--cache_dir"):
        directory.file(path).touch(0, 9)
    monkeypatch.setattr(os, "pwrite", written)
    directory.file(path).touch(0, 9)
    assert map_file(path, np.uint8)[:9].tobytes() == content[:9]


def split(path):
    spec = FeatureSpec.default(path, 5, [300, 70_000])
    return write_synthetic_dataset(path, spec, ROWS, seed=1).directory


def lists(path):
    path.mkdir()
    rows = {name: list_testing.drawn(ROWS, seed) for seed, name in enumerate(("train", "test"))}
    list_testing.write(path, rows, weights=True)
    return path


def binary(path):
    made = split(path.with_name("columns"))
    path.mkdir()
    sizes = (made / "model_size.json").read_text()
    (path / "model_size.json").write_text(sizes)
    random = np.random.default_rng(0)
    for name in ("train", "test"):
        rows = random.integers(0, 2, (ROWS, 8), np.int32)
        rows.tofile(path / f"{name}_data.bin")
    write_dataset_manifest(path, {"train": ROWS, "test": ROWS}, read_model_size(path), {})
    return path


def batches(directory, kind, shard=None, order=(), **options):
    options |= {"dataset_type": kind, "batch_size": BATCH, "num_numerical_features": 5}
    config = DataConfig(dataset=str(directory), **options)
    train = open_datasets(config, shard).train
    order = list(order) or range(len(train))
    for batch in prefetch(train, train.ahead(order)):
        yield [value for value in batch if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("make", [split, lists, binary])
def test_batches_are_those_of_the_disk(bucket, tmp_path, make):
    directory, uri = make(tmp_path / "made"), bucket.below("d")
    publish(directory, uri, check_publishable(uri, False))
    kind = "binary" if make is binary else "split"
    order = batch_order(ROWS // BATCH, 0, 3, shuffle=True).tolist()
    small = sum(
        file.stat().st_size
        for file in directory.rglob("*")
        if file.suffix != ".bin" or file.stat().st_size <= BLOCK or "starts" in file.name
    )
    lines = []
    cache = Cache.open(limit=small + 12 * BLOCK)
    with local_dataset(cache, uri, say=lines.append) as copy:
        streamed = find_streamed(copy)
        for verify in ("first", "never"):
            expected = batches(directory, kind, order=order)
            found = batches(copy, kind, order=order, verify_data=verify)
            for one, other in zip(expected, found, strict=True):
                assert all(map(torch.equal, one, other))
        assert streamed.fetched_blocks > 12
        assert copy.name == "d"
    assert not copy.exists()
    assert "streamed: its " in lines[0]
    assert lines[0].endswith("that the cache may have (--cache_gib)")


def test_a_process_fetches_its_share_only(bucket, tmp_path):
    directory, uri = split(tmp_path / "made"), bucket.below("d")
    publish(directory, uri, check_publishable(uri, False))
    shard = Shard(World(1, 2), tables=(0,))
    with local_dataset(Cache.open(limit=150_000), uri) as copy:
        assert len(list(batches(copy, "split", shard))) == ROWS // BATCH
        present = {file.name: on_disk([file]) for file in (copy / "train").iterdir()}
    files = (directory / "train").iterdir()
    sizes = {file.name: -(-file.stat().st_size // BLOCK) for file in files}
    assert present["cat_1.bin"] == 0
    assert present["cat_0.bin"] == sizes["cat_0.bin"]
    assert sizes["numerical.bin"] > ROWS // BATCH // 2  # of each batch the second half


def test_a_dataset_that_fits_is_fetched_whole(bucket, tmp_path):
    directory, uri = split(tmp_path / "made"), bucket.below("d")
    publish(directory, uri, check_publishable(uri, False))
    with local_dataset(Cache.open(), uri) as copy:
        assert find_streamed(copy) is None
        files = [file for file in directory.rglob("*") if file.is_file()]
        assert all((copy / f.relative_to(directory)).read_bytes() == f.read_bytes() for f in files)


@pytest.mark.parametrize("gone", [False, True])
def test_an_object_that_changes_while_it_is_read_is_named(bucket, tmp_path, gone):
    directory, uri = split(tmp_path / "made"), bucket.below("d")
    publish(directory, uri, check_publishable(uri, False))
    store = open_store(uri)
    with local_dataset(Cache.open(limit=150_000), uri) as copy:
        found = batches(copy, "split")
        next(found)
        for entry in store.entries("d/"):
            if entry.key.endswith("train/numerical.bin"):
                if gone:
                    store.remove([entry.key])
                else:
                    store.write(entry.key, bytes(entry.size))
        what = "no such object" if gone else "was replaced by another object"
        with pytest.raises(OSError, match=rf"{uri.root}d/data-.*/train/numerical.bin: {what}"):
            list(batches(copy, "split"))


def test_files_of_a_killed_process_are_removed(bucket, tmp_path):
    directory, uri = split(tmp_path / "made"), bucket.below("d")
    publish(directory, uri, check_publishable(uri, False))
    left = Cache.open().folder / "streams" / ("0" * 16)
    left.mkdir(parents=True)
    (left / "lock").touch()
    with local_dataset(Cache.open(limit=150_000), uri):
        assert not left.exists()


def test_what_cannot_be_streamed_and_does_not_fit_is_refused(bucket, tmp_path):
    directory, uri = split(tmp_path / "made"), bucket.below("d")
    publish(directory, uri, check_publishable(uri, False))
    with (
        pytest.raises(OSError, match=rf"{uri}: expected rows to stream, .*--cache_gib"),
        local_dataset(Cache.open(limit=1000), uri),
    ):
        pass


@pytest.mark.long
def test_a_training_is_that_of_the_disk_and_is_resumed(bucket, tmp_path, monkeypatch, capsys):
    from small_dataset import MODEL, RUN, write_dataset

    from dlrm.scripts import main
    from dlrm.scripts.common import dlrm_flags

    monkeypatch.chdir(tmp_path)
    directory, uri = write_dataset(tmp_path / "made"), bucket.below("d")
    publish(directory, uri, check_publishable(uri, False))

    def train(data, *arguments):
        given = [f"--dataset={data}", "--base_device=cpu", "--shuffle_batch_order"]
        return main.run(dlrm_flags.parse([*given, *MODEL, *RUN, *arguments]))

    train(directory, "--epochs=2", "--save_checkpoint_path=local")
    small = ["--save_checkpoint_path=remote", f"--cache_gib={70_000 / 2**30}"]
    for length in (["--max_steps=7"], ["--epochs=2", "--resume"]):
        train(uri, *small, *length)
    assert f"note: {uri}: streamed" in capsys.readouterr().out
    local, remote = (find_checkpoint(tmp_path / name) for name in ("local", "remote"))
    weights = (".bin", ".safetensors")
    files = [file.relative_to(local) for file in local.rglob("*") if file.suffix in weights]
    assert len(files) > 3
    for file in files:
        assert (remote / file).read_bytes() == (local / file).read_bytes(), file
    assert read_config(remote)["flags"]["dataset"] == str(uri)
    written = (tmp_path / "remote").rglob("*")
    texts = [file.read_text() for file in written if file.suffix in (".json", ".md")]
    assert not any("/streams/" in text or "secret" in text for text in texts)
    first = json.loads((tmp_path / "remote" / "log.json").read_text().splitlines()[0][5:])
    assert first["data"]["dataset"] == str(uri)
