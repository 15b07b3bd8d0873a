"""Layout of a prepared image dataset on disk; `dlrm prepare-images` writes it.

manifest.json                    size, class names, images of each shard, what was left out
<split>/images_00000.bin         uint8 [images, 3, size, size], row-major
<split>/labels_00000.bin         little-endian int32 [images]
bad_images.txt                   what was left out and why, if anything was
"""

import math
import reprlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlrm.files import MANIFEST
from dlrm.manifest import read_manifest
from dlrm.mapped_files import map_file

KIND = "image dataset"
CHANNELS = 3
LABEL_DTYPE = np.dtype("<i4")
BAD_IMAGES = "bad_images.txt"


def shard_files(directory: Path, split: str, shard: int) -> tuple[Path, Path]:
    """Returns the files of the images and of the labels of a shard."""
    folder = directory / split
    return folder / f"images_{shard:05}.bin", folder / f"labels_{shard:05}.bin"


class Contents(NamedTuple):
    """Contents of a dataset, as its manifest lists them.

    Attributes:
        size: height and width of the images.
        classes: names; a label is an index of it.
        splits: split -> images of each shard.
    """

    size: int
    classes: list[str]
    splits: dict[str, list[int]]


def read_contents(directory: Path, allow_links: bool = False) -> Contents:
    """Reads the manifest of a dataset; only `allow_links` lets its files be links out of it.

    Raises:
        FileNotFoundError: there is no manifest, or a file it names is missing.
        ValueError: an entry is missing or wrong, shards and files do not match, or a file has
            another size.
    """
    manifest = read_manifest(directory, KIND, allow_links=allow_links)
    entries: list[Any] = [manifest.get(name) for name in Contents._fields]
    size, classes, splits = entries
    for name, wanted, is_right in (
        ("size", "a number of 1 or more", _is_count(size) and size != 0),
        ("classes", "a list of names", bool(classes) and _is_list_of(classes, str)),
        ("splits", "shard sizes of each split", _are_shards(splits)),
    ):
        if not is_right:
            got = reprlib.repr(manifest.get(name))
            raise ValueError(f"{directory / MANIFEST}: {name}: expected {wanted}, got {got}")
    contents = Contents(size, classes, splits)
    shards = {
        path.relative_to(directory).as_posix()
        for split, counts in contents.splits.items()
        for shard in range(len(counts))
        for path in shard_files(directory, split, shard)
    }
    if wrong := sorted(shards ^ {name for name in manifest["files"] if "/" in name}):
        raise ValueError(
            f"{directory / MANIFEST}: splits: expected the shards that have files, differing: "
            f"{', '.join(wrong[:4])}"
        )
    return contents


def open_shard(
    directory: Path, contents: Contents, split: str, shard: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns images, mapped, and labels of a shard.

    Raises:
        ValueError: a file's size differs from the manifest, or a label is out of range.
    """
    count, num_classes = contents.splits[split][shard], len(contents.classes)
    images_file, labels_file = shard_files(directory, split, shard)
    images = _map(images_file, np.dtype("u1"), (count, CHANNELS, contents.size, contents.size))
    labels = np.array(_map(labels_file, LABEL_DTYPE, (count,)))
    wrong = (labels < 0) | (labels >= num_classes)
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(
            f"{labels_file}: row {row}: expected a label in [0, {num_classes}), got {labels[row]}"
        )
    return images, labels


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_list_of(values: Any, kind: type) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def _are_shards(splits: Any) -> bool:
    lists = splits.values() if isinstance(splits, dict) else [None]
    return all(isinstance(counts, list) and all(map(_is_count, counts)) for counts in lists)


def _map(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    expected = math.prod(shape) * dtype.itemsize
    if (size := path.stat().st_size) != expected:
        raise ValueError(f"{path}: expected {expected} bytes, got {size}")
    return map_file(path, dtype, shape)
