"""The documented path of `dlrm.data.images.augmentation`."""

from dlrm.data.images.augmentation import Augmentation

__all__ = ["Augmentation"]
