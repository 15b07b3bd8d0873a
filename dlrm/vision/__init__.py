"""Image networks, their data, task, flags and command; the loader is imported when it is used."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrm.vision.loader import ImageDataset as ImageDataset, ImageLoader as ImageLoader


def __getattr__(name: str) -> Any:
    if name in ("ImageDataset", "ImageLoader"):
        return getattr(importlib.import_module("dlrm.vision.loader"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
