"""Turns stored uint8 images into inputs for training and tests, on their device.

All randomness comes from `ImageBatch.draws`, so the augmentation of a sample does not depend on the
world size or on the division of its batch.
"""

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dlrm.vision.config import AugmentationConfig
from dlrm.vision.loader import NUM_DRAWS, NUM_SHARED_DRAWS, ImageBatch

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_MEAN_OF_255 = (123.68, 116.78, 103.94)

# Uses of a sample's draws.
_TRIES = 10  # to find a random crop inside the image
_AREAS, _RATIOS = slice(0, _TRIES), slice(_TRIES, 2 * _TRIES)
_TOP, _LEFT, _FLIP = 2 * _TRIES, 2 * _TRIES + 1, 2 * _TRIES + 2
_LEAVE, _SHARE, _BOX_Y, _BOX_X = range(NUM_DRAWS - 4, NUM_DRAWS)  # cutmix: shared by the batch
_BETA = slice(NUM_DRAWS - 6, NUM_DRAWS - 4)
assert NUM_SHARED_DRAWS == 4


class Prepared(NamedTuple):
    """Inputs of a training step: images, and the classes that are mixed in each.

    Attributes:
        images: `[samples, 3, image_size, image_size]`, float32.
        labels: `[samples, classes per sample]`, int64.
        weights: weights of the labels, float32, of the same shape; each sample's sum to 1.
    """

    images: Tensor
    labels: Tensor
    weights: Tensor


class Augmentation(AugmentationConfig):
    """Turns images into inputs, as configured."""

    @property
    def num_partners(self) -> int:
        """Returns the rows before its own that a batch needs for `train`; see `ImageBatch`."""
        return (1 if self.mixup_alpha else 0) + (2 if self.cutmix_lambda < 1 else 0)

    def train(self, batch: ImageBatch) -> Prepared:
        """Returns the inputs of a training step: cropped, mirrored, normalized and mixed images.

        Raises:
            ValueError: the batch has too few partners to mix with.
        """
        if batch.num_partners < self.num_partners:
            raise ValueError(
                f"expected {self.num_partners} partners in the batch for mixup_alpha "
                f"{self.mixup_alpha} and cutmix_lambda {self.cutmix_lambda}, got "
                f"{batch.num_partners}"
            )
        draws, side = batch.draws, batch.images.shape[-1]
        boxes = self._random_boxes(draws, side) if self.random_crop else self._center_boxes(batch)
        flip = draws[:, _FLIP] < 0.5 if self.horizontal_flip else None
        images = self._normalize(crop(batch.images, boxes, self.image_size, flip))
        labels = batch.labels[:, None]
        prepared = Prepared(images, labels, torch.ones_like(labels, dtype=torch.float32))
        if self.mixup_alpha:
            prepared = _mix_up(prepared, draws, self.mixup_alpha)
        if self.cutmix_lambda < 1:
            shift = 2 if batch.global_size > 2 else 1
            prepared = _cut_mix(prepared, draws, self.cutmix_lambda, shift)
        return Prepared(*(rows[batch.num_partners :] for rows in prepared))

    def evaluate(self, batch: ImageBatch) -> Tensor:
        """Returns normalized center crops, `[samples, 3, image_size, image_size]`, float32."""
        prepared = batch.map(lambda rows: rows[batch.num_partners :])
        return self._normalize(crop(prepared.images, self._center_boxes(prepared), self.image_size))

    def _random_boxes(self, draws: Tensor, side: int) -> Tensor:
        """Draws boxes as torchvision's RandomResizedCrop does: the first of ten that fits."""
        area = side**2 * (self.min_area + (1 - self.min_area) * draws[:, _AREAS])
        ratio = torch.exp(math.log(self.max_ratio) * (2 * draws[:, _RATIOS] - 1))
        heights, widths = (area / ratio).sqrt().round(), (area * ratio).sqrt().round()
        fits = (heights <= side) & (widths <= side) & (heights > 0) & (widths > 0)
        first = fits.int().argmax(1, keepdim=True)
        has_box = fits.any(1)
        height, width = (
            torch.where(has_box, sizes.gather(1, first)[:, 0], side) for sizes in (heights, widths)
        )
        top = (draws[:, _TOP] * (side - height + 1)).floor()
        left = (draws[:, _LEFT] * (side - width + 1)).floor()
        return torch.stack([top, left, height, width], 1).long()

    def _center_boxes(self, batch: ImageBatch) -> Tensor:
        side = batch.images.shape[-1]
        size = max(1, round(side * self.center_crop))
        start = (side - size) // 2
        box = batch.labels.new_tensor([start, start, size, size])
        return box.expand(len(batch.labels), 4)

    def _normalize(self, images: Tensor) -> Tensor:
        images = images.float()
        if not self.normalize_input:
            return images.sub_(_of_channels(_MEAN_OF_255, images.device))
        mean, std = (_of_channels(values, images.device) for values in (_MEAN, _STD))
        return images.div_(255).sub_(mean).div_(std)


@cache  # a copy to a device waits for it
def _of_channels(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device).view(3, 1, 1)


def crop(images: Tensor, boxes: Tensor, size: int, flip: Tensor | None = None) -> Tensor:
    """Returns a box of each image, resized with a triangle filter like Pillow's and torchvision's.

    On the CPU, torch's kernel for uint8 resizes one image at a time: 12 times as fast as the two
    matrix products per batch on other devices (256 to 224 pixels, one thread of a Zen 4), whose
    values are the same up to rounding to integers.

    Args:
        images: `[rows, channels, height, width]`, uint8.
        boxes: `[rows, 4]`, int64: top, left, height and width.
        size: height and width of the result.
        flip: `[rows]`, bool: whether to mirror each.

    Returns:
        `[rows, channels, size, size]`, uint8 on the CPU, float32 elsewhere.
    """
    if images.device.type != "cpu":
        return _crop_in_batch(images, boxes, size, flip)
    # NumPy copies single images: torch would wake other threads for them, which takes longer.
    stored, cropped = images.numpy(), images.new_empty(*images.shape[:2], size, size)
    results, mirrored = cropped.numpy(), [False] * len(images) if flip is None else flip.tolist()
    for row, (top, left, height, width) in enumerate(boxes.tolist()):
        box = np.ascontiguousarray(stored[row, :, top : top + height, left : left + width])
        image = torch.from_numpy(box)[None]
        resized = F.interpolate(image, (size, size), mode="bilinear", antialias=True)[0].numpy()
        results[row] = resized[:, :, ::-1] if mirrored[row] else resized
    return cropped


def _crop_in_batch(images: Tensor, boxes: Tensor, size: int, flip: Tensor | None) -> Tensor:
    """Resizes with two matrix products per image: rows, then columns."""
    top, left, height, width = boxes.unbind(1)
    rows = _filter(top, height, images.shape[2], size)
    columns = _filter(left, width, images.shape[3], size)
    if flip is not None:
        columns = torch.where(flip[:, None, None], columns.flip(1), columns)
    return rows[:, None] @ images.float() @ columns.mT[:, None]


def _filter(start: Tensor, length: Tensor, pixels: int, size: int) -> Tensor:
    """Returns the weights `[rows, size, pixels]` of stored pixels in resized ones."""
    scale = (length / size)[:, None]
    centers = start[:, None] + (torch.arange(size, device=start.device) + 0.5) * scale
    places = torch.arange(pixels, device=start.device)
    weights = 1 - (places + 0.5 - centers[:, :, None]).abs() / scale.clamp(min=1)[:, :, None]
    inside = (places >= start[:, None]) & (places < (start + length)[:, None])
    weights = weights.clamp_(min=0) * inside[:, None]
    return weights / weights.sum(2, keepdim=True)


def _mix_up(prepared: Prepared, draws: Tensor, alpha: float) -> Prepared:
    """Mixes each sample with a smaller share of the one before it."""
    share = _larger_share(draws[:, _BETA], alpha)
    partner = _rows_before(prepared, 1)
    images = torch.lerp(partner.images, prepared.images, share[:, None, None, None])
    return _labeled(images, prepared, partner, share[:, None])


def _larger_share(draws: Tensor, alpha: float) -> Tensor:
    """Returns max(b, 1 - b), b from Beta(alpha, alpha) (Devroye, 1996, "in one line")."""
    spread = (draws[:, 0] ** (-1 / alpha) - 1) * torch.cos(2 * math.pi * draws[:, 1]) ** 2
    return (0.5 + 0.5 / (1 + 1 / spread).sqrt()).float()


def _cut_mix(prepared: Prepared, draws: Tensor, strength: float, shift: int) -> Prepared:
    """Pastes into each sample a box of the one `shift` rows before it; all use the same box."""
    size = prepared.images.shape[-1]
    least = math.exp(-4)
    share = -torch.log(least + (1 - least) * draws[:, _SHARE]) / 4
    share = torch.where(draws[:, _LEAVE] < max(0, 1.55 * strength - 0.96), 0, share)
    side = (share.sqrt() * size).round()
    inside = torch.ones_like(prepared.images[:, :1], dtype=torch.bool)
    for axis, draw in ((2, _BOX_Y), (3, _BOX_X)):
        begin = (draws[:, draw] * size - side / 2).round().clamp(min=0).minimum(size - side)
        places = torch.arange(size, device=side.device)
        within = (places >= begin[:, None]) & (places < (begin + side)[:, None])
        inside = inside & within[:, None, :, None].movedim(2, axis)
    partner = _rows_before(prepared, shift)
    images = torch.where(inside, partner.images, prepared.images)
    kept = (1 - (side / size) ** 2).float()
    return _labeled(images, prepared, partner, kept[:, None])


def _rows_before(prepared: Prepared, shift: int) -> Prepared:
    """Returns for each row the one `shift` rows before it; the first ones, partners, stay."""
    return Prepared(*(torch.cat([rows[:shift], rows[:-shift]]) for rows in prepared))


def _labeled(images: Tensor, first: Prepared, partner: Prepared, share: Tensor) -> Prepared:
    """Returns images with a share of their own labels, the rest being their partners'."""
    labels = torch.cat([first.labels, partner.labels], 1)
    return Prepared(
        images, labels, torch.cat([first.weights * share, partner.weights * (1 - share)], 1)
    )
