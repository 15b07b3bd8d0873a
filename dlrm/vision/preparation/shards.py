"""Decodes images and writes the shards of a dataset; one task writes one shard."""

import io
import json
import re
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

from dlrm.documents import read_json
from dlrm.files import errors_named
from dlrm.manifest import Checksum
from dlrm.vision import layout as image_layout
from dlrm.vision.preparation.sources import Item, read


class Shard(NamedTuple):
    """The images that one task writes.

    Attributes:
        directory: directory of the dataset.
        number: number of the shard in its split.
        size: height and width, in pixels.
        first_label: lowest label of TFRecords.
        skip_bad: leave bad images out; otherwise the first one ends the run.
    """

    items: list[Item]
    directory: Path
    split: str
    number: int
    size: int
    first_label: int
    skip_bad: bool

    @property
    def report_file(self) -> Path:
        """Returns the path of the task's report."""
        return self.directory / f"{self.split}_{self.number:05}.json"


class Report(NamedTuple):
    """Counts of a task's output.

    Attributes:
        images: number of images.
        class_names: label -> name, if the source has names.
        bad: names and reasons of images that were left out.
        checksums: checksums of the two files; see `dlrm.manifest.Checksum`.
    """

    images: int
    class_names: dict[int, str | None]
    bad: list[str]
    checksums: dict[str, str]

    @classmethod
    def load(cls, path: Path) -> "Report":
        """Reads a report."""
        report = read_json(path)
        names = {int(label): name for label, name in report.pop("class_names").items()}
        return cls(class_names=names, **report)


def write_shard(shard: Shard) -> None:
    """Writes a shard's images, labels and report.

    Raises:
        ValueError: an image cannot be used and `skip_bad` is not set; the message names it.
    """
    images_file, labels_file = image_layout.shard_files(shard.directory, shard.split, shard.number)
    labels: list[int] = []
    names: dict[int, str | None] = {}
    bad: list[str] = []
    sums = {images_file: Checksum(), labels_file: Checksum()}
    with errors_named(images_file), open(images_file, "wb") as file:
        for item in shard.items:
            try:
                encoded = read(item, shard.first_label)
                pixels = decode(encoded.data, shard.size)
            except ValueError as error:
                if not shard.skip_bad:
                    raise ValueError(
                        f"{item.name}: {error}; --bad_images skip leaves such images out"
                    ) from error
                bad.append(f"{item.name}: {error}")
                continue
            file.write(pixels.data)
            sums[images_file].update(pixels.data)
            labels.append(encoded.label)
            names[encoded.label] = encoded.class_name
    label_bytes = np.array(labels, image_layout.LABEL_DTYPE).tobytes()
    with errors_named(labels_file):
        labels_file.write_bytes(label_bytes)
    sums[labels_file].update(label_bytes)
    checksums = {
        path.relative_to(shard.directory).as_posix(): str(value) for path, value in sums.items()
    }
    report = Report(len(labels), names, bad, checksums)
    with errors_named(shard.report_file):
        shard.report_file.write_text(json.dumps(report._asdict()), encoding="utf-8")


def decode(data: bytes, size: int) -> np.ndarray:
    """Returns the largest centered square of an encoded image as uint8 `[3, size, size]`.

    The image is rotated by its EXIF orientation. Gray, palette and CMYK become RGB, 16 bits become
    8, and transparent pixels become white. The first picture of an animation is used.

    Raises:
        ValueError: it is not an image, is truncated, has more pixels than Pillow accepts, or has
            floating-point or 32-bit pixels, whose white level is undefined.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # damaged EXIF, which Pillow ignores
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data)) as image:
                image.draft("RGB", (2 * size, 2 * size))  # JPEG: decode at a lower resolution
                _check_range(image)
                rgb = _to_rgb(ImageOps.exif_transpose(image))
    except Exception as error:  # Pillow's decoders raise errors of any type
        # Pillow's message has the address of an object, which differs from run to run.
        reason = re.sub(r" <_io\.BytesIO object at \w+>", "", str(error)) or type(error).__name__
        raise ValueError(f"not a readable image: {reason}") from error
    side = min(rgb.size)
    left, top = (rgb.width - side) / 2, (rgb.height - side) / 2
    square = rgb.resize(
        (size, size), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side)
    )
    return np.ascontiguousarray(np.asarray(square).transpose(2, 0, 1))


def _check_range(image: Image.Image) -> None:
    sixteen_bits = image.mode == "I" and image.format in ("PNG", "PPM")
    if image.mode in ("I", "F") and not sixteen_bits:
        raise ValueError(
            f"expected 8 or 16 bits a channel, got Pillow's mode {image.mode} ({image.format}), "
            "whose white is not known"
        )


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits, which Pillow would clip
        image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")
