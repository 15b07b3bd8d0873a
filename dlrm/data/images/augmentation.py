"""The former path of `dlrm.vision.augmentation`; the next version removes it."""

from dlrm.vision.augmentation import Augmentation

__all__ = ["Augmentation"]
