"""Turns stored uint8 images into what a network trains on and is tested on, on their device.

All randomness comes from `ImageBatch.draws`, so a sample is augmented in the same way at any world
size and however its batch is cut.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm.data.images import NUM_DRAWS, ImageBatch

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_MEAN_OF_255 = (123.68, 116.78, 103.94)

# Which of a sample's draws decides what. Those of cutmix are the first sample's, for all.
_TRIES = 10
_AREAS = slice(0, _TRIES)
_RATIOS = slice(_TRIES, 2 * _TRIES)
_TOP, _LEFT, _FLIP, _MIXUP_U, _MIXUP_V, _CUT, _CUT_SHARE, _CUT_Y, _CUT_X = range(20, 29)
assert _CUT_X < NUM_DRAWS


class Prepared(NamedTuple):
    """What a network is trained on: images and the classes that they are made of.

    Attributes:
        images: `[samples, 3, image_size, image_size]`, float32.
        labels: `[samples, classes of one]`, int64.
        weights: of the labels, float32, of the same shape; they sum to 1.
    """

    images: Tensor
    labels: Tensor
    weights: Tensor

    def targets(self, num_classes: int) -> Tensor:
        """Returns the labels as probabilities, `[samples, num_classes]`."""
        zeros = self.weights.new_zeros(len(self.labels), num_classes)
        return zeros.scatter_add_(1, self.labels, self.weights)


@dataclass(frozen=True)
class Augmentation:
    """How images become inputs; the fields are the flags of the same names.

    Attributes:
        image_size: height and width of the network's input.
        random_crop: train on random crops of random area and ratio, resized; else on centre crops.
        min_area: least share of an image that a random crop has.
        max_ratio: greatest ratio of a random crop's sides; the least is its inverse.
        horizontal_flip: train on mirrored images half of the time.
        centre_crop: side of the centre crop, as a share of the stored image's.
        normalise_input: (x - 255 mean) / (255 deviation) of ImageNet's channels; else only the mean
            (123.68, 116.78, 103.94) is subtracted.
        mixup_alpha: of the Beta distribution of mixup's shares (Zhang et al., 2017); 0 is none.
        cutmix_lambda: 1 is no cutmix (Yun et al., 2019). For less, c, a batch is left as it is with
            probability max(0, 1.55 c - 0.96); else a box replaces the share -ln(u) / 4 of each
            image, u uniform in [e**-4, 1). These are Graphcore's rules.

    Raises:
        ValueError: an impossible value; flag and value are named.
    """

    image_size: int = 224
    random_crop: bool = True
    min_area: float = 0.08
    max_ratio: float = 4 / 3
    horizontal_flip: bool = True
    centre_crop: float = 0.875
    normalise_input: bool = True
    mixup_alpha: float = 0.0
    cutmix_lambda: float = 1.0

    def __post_init__(self) -> None:
        if self.image_size < 1:
            raise ValueError(f"--image_size: expected 1 or more, got {self.image_size}")
        for flag in ("min_area", "centre_crop", "cutmix_lambda"):
            if not 0 < getattr(self, flag) <= 1:
                raise ValueError(
                    f"--{flag}: expected more than 0 and at most 1, got {getattr(self, flag)}"
                )
        if not self.max_ratio >= 1:
            raise ValueError(f"--max_ratio: expected 1 or more, got {self.max_ratio}")
        if not self.mixup_alpha >= 0:
            raise ValueError(f"--mixup_alpha: expected 0 or more, got {self.mixup_alpha}")

    @property
    def num_partners(self) -> int:
        """Rows before its own that a batch needs for `train`; see `ImageBatch`."""
        return (1 if self.mixup_alpha else 0) + (2 if self.cutmix_lambda < 1 else 0)

    def train(self, batch: ImageBatch) -> Prepared:
        """Returns what to train on: cropped, mirrored, normalised and mixed.

        Raises:
            ValueError: the batch has fewer partners than mixing needs.
        """
        if batch.num_partners < self.num_partners:
            raise ValueError(
                f"expected {self.num_partners} partners in the batch for mixup_alpha "
                f"{self.mixup_alpha} and cutmix_lambda {self.cutmix_lambda}, got "
                f"{batch.num_partners}"
            )
        draws, side = batch.draws, batch.images.shape[-1]
        boxes = self._random_boxes(draws, side) if self.random_crop else self._centre_boxes(batch)
        flip = draws[:, _FLIP] < 0.5 if self.horizontal_flip else None
        images = self._normalise(crop(batch.images, boxes, self.image_size, flip))
        labels = batch.labels[:, None]
        prepared = Prepared(images, labels, torch.ones_like(labels, dtype=torch.float32))
        if self.mixup_alpha:
            prepared = _mix_up(prepared, draws, self.mixup_alpha)
        if self.cutmix_lambda < 1:
            shift = 2 if batch.global_size > 2 else 1
            prepared = _cut_mix(prepared, draws, self.cutmix_lambda, shift)
        return Prepared(*(rows[batch.num_partners :] for rows in prepared))

    def evaluate(self, batch: ImageBatch) -> Tensor:
        """Returns normalised centre crops, `[samples, 3, image_size, image_size]`, float32."""
        own = batch.map(lambda rows: rows[batch.num_partners :])
        return self._normalise(crop(own.images, self._centre_boxes(own), self.image_size))

    def _random_boxes(self, draws: Tensor, side: int) -> Tensor:
        raise NotImplementedError

    def _centre_boxes(self, batch: ImageBatch) -> Tensor:
        raise NotImplementedError

    def _normalise(self, images: Tensor) -> Tensor:
        raise NotImplementedError


def crop(images: Tensor, boxes: Tensor, size: int, flip: Tensor | None = None) -> Tensor:
    """Returns a box of each image, resized to `[rows, channels, size, size]`, uint8 or float32."""
    raise NotImplementedError


def _mix_up(prepared: Prepared, draws: Tensor, alpha: float) -> Prepared:
    raise NotImplementedError


def _cut_mix(prepared: Prepared, draws: Tensor, strength: float, shift: int) -> Prepared:
    raise NotImplementedError
