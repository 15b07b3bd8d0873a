"""The former path of `dlrm.vision`; the next version removes it."""

from dlrm.vision import ImageDataset, ImageLoader

__all__ = ["ImageDataset", "ImageLoader"]
