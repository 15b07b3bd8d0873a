import json
from typing import NamedTuple

import numpy as np
import pytest
import torch

from dlrm.distributed import World
from dlrm.manifest import sealed_json, write_manifest
from dlrm.vision import layout as image_layout
from dlrm.vision.loader import (
    NUM_DRAWS,
    NUM_SHARED_DRAWS,
    GeneratedImages,
    ImageDataset,
    ImageLoader,
    SyntheticImages,
)

SIZE = 4
SHARDS = [3, 0, 5]


class Numbered(NamedTuple):
    """A source of images; image i is all i, with label i."""

    num_samples: int
    num_classes: int = 1000
    size: int = SIZE

    def read(self, rows):
        images = torch.from_numpy(rows.astype(np.uint8)).view(-1, 1, 1, 1)
        return images.expand(-1, 3, SIZE, SIZE), torch.from_numpy(rows.astype(np.int64))


@pytest.fixture
def dataset(tmp_path):
    """Writes two classes; image i is all i, with label i % 2."""
    (tmp_path / "train").mkdir()
    row = 0
    for shard, count in enumerate(SHARDS):
        images_file, labels_file = image_layout.shard_files(tmp_path, "train", shard)
        rows = np.arange(row, row + count)
        images_file.write_bytes(np.repeat(rows, 3 * SIZE**2).astype(np.uint8).tobytes())
        labels_file.write_bytes((rows % 2).astype(image_layout.LABEL_DTYPE).tobytes())
        row += count
    facts = {"size": SIZE, "classes": ["cat", "dog"], "splits": {"train": SHARDS}}
    write_manifest(tmp_path, image_layout.KIND, **facts)
    return tmp_path


def test_images_are_read_in_any_order_from_any_shard(dataset):
    split = ImageDataset(dataset, "train")
    assert (split.num_samples, split.num_classes, split.size) == (8, 2, SIZE)
    rows = np.array([7, 0, 3, 2, 7])
    images, labels = split.read(rows)
    assert (images.dtype, images.shape) == (torch.uint8, (5, 3, SIZE, SIZE))
    assert torch.equal(images, torch.tensor(rows, dtype=torch.uint8).view(5, 1, 1, 1) + 0 * images)
    assert labels.tolist() == [1, 0, 1, 0, 1]


def test_what_is_wrong_with_a_dataset_is_named(dataset):
    with pytest.raises(FileNotFoundError, match="expected a split test, has train"):
        ImageDataset(dataset, "test")
    labels = image_layout.shard_files(dataset, "train", 2)[1]
    values = np.fromfile(labels, image_layout.LABEL_DTYPE)
    values[3] = 2
    values.tofile(labels)
    with pytest.raises(ValueError, match="labels_00002.bin: expected CRC-32 .*: damaged"):
        ImageDataset(dataset, "train")
    with pytest.raises(ValueError, match=r"labels_00002.bin: row 3: .* in \[0, 2\), got 2"):
        ImageDataset(dataset, "train", verify_data="never")
    labels.write_bytes(b"")
    with pytest.raises(ValueError, match="labels_00002.bin: expected 20 bytes, got 0"):
        ImageDataset(dataset, "train")
    (dataset / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match="not a complete image dataset"):
        ImageDataset(dataset, "train")


def test_a_manifest_that_disagrees_with_the_files_is_refused(dataset):
    manifest = json.loads((dataset / "manifest.json").read_text())
    manifest["splits"]["train"] = [4, 0, 4]
    (dataset / "manifest.json").write_text(sealed_json(manifest))
    with pytest.raises(ValueError, match="images_00000.bin: expected 192 bytes, got 144"):
        ImageDataset(dataset, "train")


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("splits", None, "splits: expected shard sizes of each split, got None"),
        ("splits", {"train": [3.0, 0, 5]}, "splits: expected shard sizes of each split, got"),
        ("splits", {"train": [3, 0]}, "splits: expected .* files, differing: .*_00002.bin"),
        ("splits", {"train": [3, 0, 5, 0]}, "splits: expected .* differing: .*_00003.bin"),
        ("size", "32", "size: expected a number of 1 or more, got '32'"),
        ("size", 0, "size: expected a number of 1 or more, got 0"),
        ("classes", "abcdef", "classes: expected a list of names, got 'abcdef'"),
        ("classes", [], r"classes: expected a list of names, got \[\]"),
        ("classes", ["cat", 7], r"classes: expected a list of names, got \['cat', 7\]"),
    ],
)
def test_a_wrong_entry_of_the_manifest_is_named(dataset, field, value, expected):
    path = dataset / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest[field] = value
    path.write_text(sealed_json(manifest))
    with pytest.raises(ValueError, match=f"manifest.json: {expected}"):
        ImageDataset(dataset, "train")
    if value is None:
        del manifest[field]
        path.write_text(sealed_json(manifest))
        with pytest.raises(ValueError, match=f"manifest.json: {expected}"):
            ImageDataset(dataset, "train")


def test_a_link_out_of_the_directory_needs_a_flag(dataset, tmp_path_factory):
    labels = next((dataset / "train").glob("labels*"))
    elsewhere = labels.rename(tmp_path_factory.mktemp("other") / "elsewhere")
    labels.symlink_to(elsewhere)
    with pytest.raises(ValueError, match=f"{labels.name}.*symbolic link to .*; --allow_links"):
        ImageDataset(dataset, "train")
    assert ImageDataset(dataset, "train", allow_links=True).num_samples == 8


def test_a_batch_depends_on_its_index_alone():
    epoch = ImageLoader(Numbered(23), 5, shuffle=True).epoch(2)
    first = epoch.batch(3)
    epoch.batch(0)
    assert_same(first, epoch.batch(3))
    assert not torch.equal(first.draws, epoch.batch(2).draws)


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


def test_partners_are_the_rows_before_the_own_ones():
    loader = ImageLoader(Numbered(10), 10, num_partners=3, world=World(1, 2))
    (batch,) = loader.batches()
    assert batch.labels.tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    assert batch.num_samples == 5
    (first,) = ImageLoader(Numbered(10), 10, num_partners=3, world=World(0, 2)).batches()
    assert first.labels.tolist() == [7, 8, 9, 0, 1, 2, 3, 4]
    parts = batch.split(2)
    assert [part.labels.tolist() for part in parts] == [[2, 3, 4, 5, 6, 7], [5, 6, 7, 8, 9]]
    assert [part.num_samples for part in parts] == [3, 2]
    assert {part.global_size for part in parts} == {10}
    assert len(batch.split(9)) == 5


def test_draws_are_uniform_and_the_last_are_shared():
    (batch,) = ImageLoader(Numbered(4000), 4000).batches()
    own, shared = batch.draws[:, :-NUM_SHARED_DRAWS], batch.draws[:, -NUM_SHARED_DRAWS:]
    assert batch.draws.shape == (4000, NUM_DRAWS)
    assert (shared == shared[0]).all()
    histogram = torch.histc(own, 10, 0, 1) / own.numel()
    torch.testing.assert_close(histogram, torch.full((10,), 0.1).double(), atol=0.005, rtol=0)
    assert len(own.unique()) == own.numel()


def test_generated_images_are_made_once_and_copied_for_each_row():
    source = GeneratedImages(100, 64, num_classes=7)
    images, labels = source.read(np.array([5, 6, 5]))
    assert images.shape == (3, 3, 64, 64)
    assert torch.equal(images[0], images[1])
    assert images[0].float().mean().item() == pytest.approx(127, abs=2)
    assert images[0].float().std().item() == pytest.approx(57, abs=3)  # 60 before clamping
    assert labels[0] == labels[2]
    assert set(source.read(np.arange(100))[1].tolist()) == set(range(7))
    images.zero_()
    assert source.read(np.array([0]))[0].any()


def test_synthetic_images_are_one_constant_batch():
    loader = SyntheticImages(100, 8, size=16, world=World(1, 3))
    batches = list(loader.batches(0, start=9))
    assert (len(loader), loader.num_samples, len(batches)) == (12, 96, 3)
    assert batches[0] is batches[2]
    assert batches[0].images.shape == (3, 3, 16, 16)
    with pytest.raises(
        ValueError, match="--batch_size 8: expected at least one whole batch, got 7"
    ):
        SyntheticImages(7, 8)
