import math
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dlrm.distributed import World
from dlrm.vision.augmentation import Augmentation, Prepared, _crop_in_batch, crop
from dlrm.vision.loader import NUM_DRAWS, ImageBatch, ImageLoader

MEAN, STD = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
PLAIN = {"random_crop": False, "horizontal_flip": False, "center_crop": 1.0}


class Noise:
    """Smooth noise images, 40 pixels wide; image i has the label i."""

    num_classes, size = 1000, 40

    def __init__(self, num_samples: int):
        self.num_samples = num_samples
        random = torch.Generator().manual_seed(1)
        coarse = torch.rand(num_samples, 3, 6, 6, generator=random) * 255
        self._images = F.interpolate(coarse, (40, 40), mode="bilinear").to(torch.uint8)

    def read(self, rows):
        return self._images[torch.from_numpy(rows)], torch.from_numpy(rows.astype(np.int64))


def one_batch(
    rows: int, augmentation: Augmentation, world: World = World(), device: str = "cpu"
) -> ImageBatch:
    partners = augmentation.num_partners
    (batch,) = ImageLoader(Noise(rows), rows, num_partners=partners, world=world).batches()
    return batch.map(lambda tensor: tensor.to(device))


def test_center_crops_are_normalized_in_either_way(device):
    batch = one_batch(2, Augmentation(), device=device)
    images = batch.images.float().cpu()
    raw = Augmentation(image_size=40, center_crop=1.0, normalize_input=False).evaluate(batch).cpu()
    torch.testing.assert_close(raw, images - torch.tensor((123.68, 116.78, 103.94)).view(3, 1, 1))
    scaled = Augmentation(image_size=20, center_crop=0.5).evaluate(batch).cpu()
    torch.testing.assert_close(scaled, (images[:, :, 10:30, 10:30] / 255 - MEAN) / STD)


def test_crops_are_the_boxes_resized_and_mirrored(device):
    images = Noise(3).read(np.arange(3))[0]
    boxes = torch.tensor([[0, 5, 30, 20], [3, 0, 11, 40], [7, 9, 24, 24]])
    flip = torch.tensor([False, True, True])
    cropped = crop(images.to(device), boxes.to(device), 24, flip.to(device)).cpu()
    for row, (top, left, height, width) in enumerate(boxes.tolist()):
        box = images[row : row + 1, :, top : top + height, left : left + width].double()
        expected = F.interpolate(box, (24, 24), mode="bilinear", antialias=True)[0]
        expected = expected.flip(2) if flip[row] else expected
        torch.testing.assert_close(cropped[row].double(), expected, atol=1.01, rtol=0)


def test_a_thread_that_begins_during_a_crop_has_all_threads_of_torch(monkeypatch):
    images, seen, resize = Noise(1).read(np.arange(1))[0], [], F.interpolate

    def interpolate(*args, **options):
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
        return resize(*args, **options)

    monkeypatch.setattr(F, "interpolate", interpolate)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        crop(images, torch.tensor([[0, 5, 30, 20]]), 24)
    finally:
        torch.set_num_threads(before)
    assert seen == [3]


def test_other_devices_crop_the_same(device):
    batch = one_batch(64, Augmentation())
    there = batch.map(lambda tensor: tensor.to(device))
    boxes = Augmentation()._random_boxes(batch.draws, 40)
    flip = batch.draws[:, 0] < 0.5
    for size in (24, 48):
        on_cpu = crop(batch.images, boxes, size, flip).float()
        in_batch = _crop_in_batch(there.images, boxes.to(device), size, flip.to(device))
        torch.testing.assert_close(on_cpu, in_batch.cpu(), atol=1.01, rtol=0)


def test_random_crops_lie_inside_and_have_the_asked_areas_and_ratios():
    draws = torch.rand(20_000, NUM_DRAWS, dtype=torch.float64)
    top, left, height, width = Augmentation(min_area=0.25)._random_boxes(draws, 400).unbind(1)
    assert min(top.min(), left.min()) == 0
    assert (top + height).max() == (left + width).max() == 400
    areas, ratios = height * width / 400**2, width / height
    assert areas.min().item() == pytest.approx(0.25, abs=0.01)
    assert areas.max() <= 1
    assert ratios.max().item() == pytest.approx(4 / 3, abs=0.01)
    assert ratios.min().item() == pytest.approx(3 / 4, abs=0.01)
    assert ratios.log().mean().item() == pytest.approx(0, abs=0.01)
    small = areas[areas < 0.7]  # where every ratio fits, areas are uniform
    assert small.mean().item() == pytest.approx(0.475, abs=0.01)


def test_a_crop_that_never_fits_is_the_whole_image():
    draws = torch.full((1, NUM_DRAWS), 0.9999, dtype=torch.float64)
    assert Augmentation()._random_boxes(draws, 40).tolist() == [[0, 0, 40, 40]]


def test_half_of_the_images_are_mirrored():
    augmentation = Augmentation(image_size=40, **PLAIN | {"horizontal_flip": True})
    batch = one_batch(400, augmentation)
    prepared = augmentation.train(batch).images
    straight = Augmentation(image_size=40, **PLAIN).train(batch).images
    same = (prepared == straight).flatten(1).all(1)
    assert (prepared == straight.flip(3)).flatten(1).all(1).logical_xor(same).all()
    assert 150 < same.sum() < 250


MIXES = [{"mixup_alpha": 0.2}, {"cutmix_lambda": 0.85}, {"mixup_alpha": 1.0, "cutmix_lambda": 0.5}]


@pytest.mark.parametrize("mix", MIXES)
def test_labels_have_a_mass_of_one(mix, device):
    augmentation, ones = Augmentation(image_size=16, **mix), torch.ones(16, device=device)
    prepared = augmentation.train(one_batch(16, augmentation, device=device))
    assert prepared.labels.shape == (16, 2 ** len(mix))
    torch.testing.assert_close(prepared.weights.sum(1), ones)
    assert (prepared.weights >= 0).all()


@pytest.mark.parametrize("mix", [{}, *MIXES])
def test_a_sample_is_augmented_the_same_in_any_world_and_split(mix, device):
    augmentation = Augmentation(image_size=16, **mix)
    whole = augmentation.train(one_batch(11, augmentation, device=device))
    parts: list[Prepared] = []
    for rank in range(3):
        batch = one_batch(11, augmentation, World(rank, 3), device)
        parts += [augmentation.train(part) for part in batch.split(2)]
    assert len(parts) == 6
    same = 0 if device == "cpu" else 1e-5  # a GPU uses another matrix product for fewer rows
    for name, expected in whole._asdict().items():
        actual = torch.cat([getattr(part, name) for part in parts])
        torch.testing.assert_close(actual, expected, atol=same, rtol=same)


def test_mixup_mixes_each_image_with_the_one_before_it(device):
    mixing = Augmentation(image_size=40, mixup_alpha=0.4, **PLAIN)
    batch = one_batch(8, mixing, device=device)
    prepared = mixing.train(batch)
    pure = Augmentation(image_size=40, **PLAIN).train(batch)
    assert prepared.labels.tolist() == [[i, (i - 1) % 8] for i in range(8)]
    share = prepared.weights[:, 0].view(8, 1, 1, 1)
    assert (share >= 0.5).all()
    assert len(share.unique()) == 8
    expected = share * pure.images + (1 - share) * pure.images.roll(1, 0)
    torch.testing.assert_close(prepared.images, expected)


@pytest.mark.parametrize("alpha", [0.2, 0.5, 1.0, 3.0])
def test_shares_of_mixup_are_distributed_as_beta(alpha):
    stats = pytest.importorskip("scipy.stats")
    mixing = Augmentation(image_size=1, mixup_alpha=alpha)
    draws = torch.rand(20_001, NUM_DRAWS, dtype=torch.float64)
    images = torch.zeros(20_001, 3, 1, 1, dtype=torch.uint8)
    labels = torch.zeros(20_001, dtype=torch.int64)
    shares = mixing.train(ImageBatch(images, labels, draws, 20_000, 1)).weights[:, 0].double()
    beyond = torch.where(draws[1:, 0] < 0.5, shares, 1 - shares).clamp(1e-6, 1 - 1e-6)
    expected = np.random.default_rng(1).beta(alpha, alpha, 20_000).clip(1e-6, 1 - 1e-6)
    assert stats.ks_2samp(beyond.numpy(), expected).statistic < 0.02


def test_cutmix_pastes_one_box_from_two_rows_before(device):
    cutting = Augmentation(image_size=40, cutmix_lambda=0.5, **PLAIN)  # always cuts
    batch = one_batch(8, cutting, device=device)
    prepared, pure = cutting.train(batch), Augmentation(image_size=40, **PLAIN).train(batch)
    assert prepared.labels.tolist() == [[i, (i - 2) % 8] for i in range(8)]
    changed = (prepared.images != pure.images).any(1)
    pasted = torch.where(changed[:, None], pure.images.roll(2, 0), pure.images)
    assert torch.equal(prepared.images, pasted)
    box = changed.any(0)
    rows, columns = box.any(1).nonzero(), box.any(0).nonzero()
    side = rows.max() - rows.min() + 1
    assert side == columns.max() - columns.min() + 1
    assert box.sum() == side**2
    kept = 1 - (side / 40) ** 2
    torch.testing.assert_close(prepared.weights, torch.stack([kept, 1 - kept]).expand(8, 2))


def test_cutmix_leaves_batches_as_often_as_its_rule_says():
    cutting = Augmentation(image_size=20, cutmix_lambda=0.85, **PLAIN)
    draws = torch.rand(30_002, NUM_DRAWS, dtype=torch.float64)  # treats each row as a batch
    images = torch.zeros(30_002, 3, 1, 1, dtype=torch.uint8)
    labels = torch.zeros(30_002, dtype=torch.int64)
    kept = cutting.train(ImageBatch(images, labels, draws, 30_000, 2)).weights[:, 0]
    # The pasted share is -ln(u) / 4, u uniform in [e**-4, 1), rounded to pixels.
    assert kept.mean().item() == pytest.approx(
        1 - (1 - 0.3575) * (1 - 5 * math.exp(-4)) / (1 - math.exp(-4)) / 4, abs=0.01
    )
    untouched = (kept == 1).float().mean().item()
    rounded_away = (1 - 0.3575) * (1 - math.exp(-4 * 0.025**2)) / (1 - math.exp(-4))
    assert untouched == pytest.approx(0.3575 + rounded_away, abs=0.01)


def test_too_few_partners_are_named():
    batch = one_batch(4, Augmentation(mixup_alpha=0.2))
    with pytest.raises(ValueError, match="expected 3 partners .* cutmix_lambda 0.85, got 1"):
        Augmentation(mixup_alpha=0.2, cutmix_lambda=0.85).train(batch)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("image_size", 0),
        ("min_area", 0.0),
        ("max_ratio", 0.5),
        ("center_crop", 1.5),
        ("cutmix_lambda", 0.0),
        ("mixup_alpha", -1.0),
        ("mixup_alpha", math.nan),
    ],
)
def test_impossible_values_are_named(flag, value):
    with pytest.raises(ValueError, match=rf"--{flag} {value}: expected "):
        Augmentation(**{flag: value})


def test_constants_serve_inference_and_training(device):
    augmentation = Augmentation(image_size=8)
    batch = one_batch(2, augmentation, device=device)
    with torch.inference_mode():
        tested = augmentation.evaluate(batch)
    trained = augmentation.train(batch).images.requires_grad_()
    trained.sum().backward()
    assert tested.shape == trained.shape == (2, 3, 8, 8)
