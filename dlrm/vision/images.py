"""Images in files: a folder with a folder for each class, or TFRecords; decoded when read."""

import io
import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from dlrm.vision.config import ImagesConfig
from dlrm.vision.tfrecord import Record, find_records, parse_example, read_record

_TRAIN, _TESTS = "train", ("test", "validation", "val")
_SPLIT_SEED = 12345  # of --test_fraction
_KEPT_BYTES = 2 << 30  # of decoded images


class Item(NamedTuple):
    """An encoded image: a file and its label, or a record of a file, which has its own label."""

    path: str
    label: int = -1
    record: Record | None = None

    def __str__(self) -> str:
        return f"{self.path}: record {self.record.number}" if self.record else self.path


class ImageDataset:
    """Images of one split; the first 2 GiB of those that are read stay decoded in memory.

    Args:
        items: the images.
        classes: names of the classes; a label is an index of it. None: they have no names.
        num_classes: labels are in [0, num_classes).
    """

    def __init__(
        self, items: list[Item], classes: list[str] | None, num_classes: int, config: ImagesConfig
    ) -> None:
        self.num_samples, self.size = len(items), config.load_size
        self.classes, self.num_classes = classes, num_classes
        self._items, self._first_label = items, config.first_label
        self._kept: dict[int, tuple[np.ndarray, int]] = {}

    def read(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Returns images and labels; see `ImageSource.read`.

        Raises:
            ValueError: an image cannot be used; the message names it.
        """
        images = np.empty((len(rows), 3, self.size, self.size), np.uint8)
        labels = np.empty(len(rows), np.int64)
        for place, row in enumerate(rows.tolist()):
            found = self._kept.get(row) or self._decoded(self._items[row])
            if len(self._kept) * images[place].nbytes < _KEPT_BYTES:
                self._kept[row] = found
            images[place], labels[place] = found
        return torch.from_numpy(images), torch.from_numpy(labels)

    def _decoded(self, item: Item) -> tuple[np.ndarray, int]:
        try:
            if item.record is None:
                return decode(_read_file(item.path), self.size), item.label
            data, label = self._of_example(read_record(item.path, item.record))
            return decode(data, self.size), label
        except OSError as error:
            raise ValueError(f"{item}: cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise ValueError(f"{item}: {error}") from error

    def _of_example(self, example: bytes) -> tuple[bytes, int]:
        features, first = parse_example(example), self._first_label
        images, labels = (features.get(f"image/{name}", []) for name in ("encoded", "class/label"))
        if len(images) != 1 or not isinstance(images[0], bytes):
            raise ValueError(f"expected one image/encoded, got {len(images)}")
        if len(labels) != 1 or not isinstance(labels[0], int):
            raise ValueError(f"expected one image/class/label, got {len(labels)}")
        if not first <= labels[0] < first + self.num_classes:
            raise ValueError(
                f"expected an image/class/label in [{first}, {first + self.num_classes}), of "
                f"--num_classes from --first_label on, got {labels[0]}"
            )
        return images[0], labels[0] - first


def open_images(
    directory: str | Path, config: ImagesConfig, num_classes: int = 1000
) -> dict[str, ImageDataset]:
    """Returns the splits "train" and "test" of a folder of images.

    Class folders, or TFRecords with names such as train-00000-of-01024. Class folders may be in
    `train` and in `test`, `validation` or `val`. Names that begin with a dot are skipped.

    Args:
        num_classes: number of classes of TFRecords.

    Raises:
        FileNotFoundError: there is no folder, or it has no image.
        ValueError: a class has images in another split but none in `train`, a class folder holds
            only folders, some of the TFRecords are missing, or there are no images for testing.
    """
    folder, classes = Path(directory), None
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder (--dataset)")
    splits = _records(folder)
    if not splits:
        splits, classes = _class_folders(folder)
    if _TRAIN not in splits or ("test" in splits) == (config.test_fraction is not None):
        raise ValueError(
            f"{folder}: expected train and test images and no --test_fraction, or one of these; "
            f"found {', '.join(splits)}, --test_fraction {config.test_fraction}"
        )
    if config.test_fraction is not None:
        splits = _drawn(splits[_TRAIN], config.test_fraction)
    if empty := [name for name, items in splits.items() if not items]:
        raise ValueError(f"{folder}: expected images in {empty[0]}, there are none")
    number = len(classes) if classes else num_classes
    return {name: ImageDataset(items, classes, number, config) for name, items in splits.items()}


def _records(folder: Path) -> dict[str, list[Item]]:
    splits: dict[str, list[Item]] = {}
    for name in (_TRAIN, *_TESTS):
        paths = sorted(map(str, folder.glob(f"{name}-?????-of-?????")))
        if not paths or (split := _TRAIN if name == _TRAIN else "test") in splits:
            continue
        if len(paths) != int(paths[-1][-5:]):
            raise ValueError(
                f"{folder}: expected {int(paths[-1][-5:])} files, as the name of "
                f"{Path(paths[-1]).name} says, got {len(paths)}"
            )
        splits[split] = [Item(path, record=rec) for path in paths for rec in find_records(path)]
    return splits


def _class_folders(folder: Path) -> tuple[dict[str, list[Item]], list[str]]:
    places = {_TRAIN: folder}
    if (folder / _TRAIN).is_dir():
        named = [folder / name for name in (_TRAIN, *_TESTS) if (folder / name).is_dir()]
        places = dict(zip((_TRAIN, "test"), named, strict=False))
    found = {split: _files_by_class(place) for split, place in places.items()}
    labels = {name: label for label, name in enumerate(found[_TRAIN])}
    if not labels:
        raise FileNotFoundError(
            f"{folder}: expected folders of images, one a class; there are none"
        )
    splits: dict[str, list[Item]] = {}
    for split, classes in found.items():
        for name, files in classes.items():
            if name not in labels:
                raise ValueError(f"{files[0]}: class {name} has no images in {folder}/{_TRAIN}")
            splits.setdefault(split, []).extend(Item(file, labels[name]) for file in files)
    return splits, list(labels)


def _files_by_class(folder: Path) -> dict[str, list[str]]:
    """Returns the files of each class folder that has some, by the name of the class."""
    classes: dict[str, list[str]] = {}
    for name in sorted(entry.name for entry in os.scandir(folder) if entry.is_dir()):
        files: list[str] = []
        for parent, folders, names in os.walk(folder / name, followlinks=True):
            folders[:] = sorted(one for one in folders if one[0] != ".")
            files += [os.path.join(parent, one) for one in sorted(names) if one[0] != "."]
        if files and name[0] != ".":
            classes[name] = files
            if os.path.dirname(files[0]) != str(folder / name):
                raise ValueError(
                    f"{folder}: expected images in {name}/, a class folder, got only folders; the "
                    "folders at the top are the classes, or are train/ and val/"
                )
    return classes


def _drawn(items: list[Item], fraction: float) -> dict[str, list[Item]]:
    keys = np.random.SFC64([_SPLIT_SEED]).random_raw(len(items))
    tested = {*np.argsort(keys, kind="stable")[: round(len(items) * fraction)].tolist()}
    splits: dict[str, list[Item]] = {_TRAIN: [], "test": []}
    for row, item in enumerate(items):
        splits["test" if row in tested else _TRAIN].append(item)
    return splits


def _read_file(path: str) -> bytes:
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait forever
        raise ValueError("expected a regular file, got a pipe, socket or device")
    return Path(path).read_bytes()


def decode(data: bytes, size: int) -> np.ndarray:
    """Returns the largest centered square of an encoded image as uint8 `[3, size, size]`.

    The image is rotated by its EXIF orientation. Gray, palette and CMYK become RGB, 16 bits become
    8, and transparent pixels become white. The first picture of an animation is used.

    Raises:
        ValueError: it is not an image, is truncated, has more pixels than Pillow accepts, or has
            floating-point or 32-bit pixels, whose white level is undefined.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.draft("RGB", (2 * size, 2 * size))  # JPEG: decode at a lower resolution
            sixteen_bits = image.mode == "I" and image.format in ("PNG", "PPM")
            if image.mode in ("I", "F") and not sixteen_bits:
                raise ValueError(
                    f"expected 8 or 16 bits a channel, got Pillow's mode {image.mode} "
                    f"({image.format}), whose white is not known"
                )
            rgb = _to_rgb(ImageOps.exif_transpose(image))
    except Exception as error:  # Pillow's decoders raise errors of any type
        # Pillow's message has the address of an object, which differs from run to run.
        reason = re.sub(r" <_io\.BytesIO object at \w+>", "", str(error)) or type(error).__name__
        raise ValueError(f"not a readable image: {reason}") from error
    side = min(rgb.size)
    left, top = (rgb.width - side) / 2, (rgb.height - side) / 2
    box = (left, top, left + side, top + side)
    square = rgb.resize((size, size), Image.Resampling.BICUBIC, box=box)
    return np.ascontiguousarray(np.asarray(square).transpose(2, 0, 1))


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits, which Pillow would clip
        image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")
