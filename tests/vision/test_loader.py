from typing import NamedTuple

import numpy as np
import pytest
import torch

from dlrm.distributed import World
from dlrm.tasks.networks.work import SameBatch
from dlrm.vision.loader import NUM_DRAWS, NUM_SHARED_DRAWS, GeneratedImages, ImageLoader

SIZE = 4


class Numbered(NamedTuple):
    """A source of images; image i is all i, with label i."""

    num_samples: int
    num_classes: int = 1000
    size: int = SIZE

    def read(self, rows):
        images = torch.from_numpy(rows.astype(np.uint8)).view(-1, 1, 1, 1)
        return images.expand(-1, 3, SIZE, SIZE), torch.from_numpy(rows.astype(np.int64))


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


def test_one_batch_is_repeated():
    def loader(images):
        return ImageLoader(GeneratedImages(images, 16), 8, drop_last=True, world=World(1, 3))

    same = SameBatch(loader(100), "cpu")
    batches = list(same.batches(0, start=9))
    assert (len(same), same.num_samples, len(batches)) == (12, 96, 3)
    assert batches[0] is batches[2]
    assert batches[0].images.shape == (3, 3, 16, 16)
    with pytest.raises(ValueError, match="--batch_size 8: expected at least one whole batch"):
        loader(7)
