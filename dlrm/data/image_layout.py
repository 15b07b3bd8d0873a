"""Where a prepared image dataset has its files; `preproc/prepare_images.py` writes them.

manifest.json                    size, class names, images of each shard, what was left out
<split>/images_00000.bin         uint8 [images, 3, size, size], row-major
<split>/labels_00000.bin         little-endian int32 [images]
bad_images.txt                   what was left out and why, if anything was
"""

from pathlib import Path

import numpy as np

KIND = "image dataset"
SPLITS = ("train", "test", "validation")
CHANNELS = 3
LABEL_DTYPE = np.dtype("<i4")
BAD_IMAGES = "bad_images.txt"


def shard_files(directory: Path, split: str, shard: int) -> tuple[Path, Path]:
    """Returns the files of the images and of the labels of a shard."""
    folder = directory / split
    return folder / f"images_{shard:05}.bin", folder / f"labels_{shard:05}.bin"
