"""The documented path of `dlrm.vision.augmentation`."""

from dlrm.vision.augmentation import Augmentation

__all__ = ["Augmentation"]
