"""Turns images into a dataset that training maps into memory.

    dlrm prepare-images --source IMAGES --output DATASET --test_fraction 0.2

IMAGES is a folder of class folders, or of ImageNet's TFRecords (train-00000-of-01024, ...,
validation-00000-of-00128, ...). If the class folders are in train/ and val/ (or validation/, or
test/), these are the splits; otherwise --test_fraction of the images, drawn with --seed, are for
testing.

Each image is stored as the largest centered square, resized to --size. Any number of --cores writes
the same bytes. The dataset appears when it is complete; an earlier one is replaced.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dlrm.command_line import missing_extra
from dlrm.data.workers import workers
from dlrm.files import atomic_directory, check_outside
from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.limits import check_processes
from dlrm.manifest import write_manifest
from dlrm.settings import REQUIRED, check_settings, setting
from dlrm.vision.preparation.sources import FoundImages, Item, find_images

if TYPE_CHECKING:
    from dlrm.vision.preparation.shards import Shard

BAD_IMAGES = ("error", "skip")
_MAX_SIZE = 4096


@dataclass(frozen=True)
class ImageOptions:
    """Options of preparing images; field names are those of the flags."""

    size: int = setting(
        256, "height and width of the stored images, in pixels", least=1, most=_MAX_SIZE
    )
    test_fraction: float | None = setting(
        None,
        "share of the images to choose for testing, if the source is not split",
        above=0,
        below=1,
    )
    seed: int = setting(12345, "seed of the split", least=0)
    first_label: int = setting(1, "lowest label of TFRecords, which becomes 0")
    bad_images: str = setting(
        "error",
        "error: an unusable image ends the run; skip: it is left out",
        choices=BAD_IMAGES,
    )
    shard_images: int = setting(1024, "images per file", least=1)
    cores: int = setting(1, "number of decoding processes", least=1)

    def __post_init__(self) -> None:
        check_settings(self)
        check_processes("--cores", self.cores)


@dataclass(frozen=True)
class PlacesConfig:
    """The images, and the place of the dataset; field names are those of the flags."""

    source: Path = setting(REQUIRED, "directory of images", uri="read")
    output: Path = setting(REQUIRED, "directory to write the dataset to", uri="replace")


class ImageSummary(NamedTuple):
    """Results: images of each split; classes, and the number without images; unreadable files."""

    images: dict[str, int]
    classes: list[str]
    empty_classes: int
    bad: list[str]


def prepare(source: Path, output: Path, options: ImageOptions) -> ImageSummary:
    """Writes a dataset of images.

    Raises:
        FileNotFoundError: there are no images.
        ValueError: an image cannot be used, the source is invalid, or contains the output; the
            message names file and reason.
        FileExistsError: `output` exists and may not be replaced.
        ImportError: Pillow is missing.
    """
    try:
        from dlrm.vision.preparation.shards import write_shard
    except ImportError as error:
        raise ImportError(missing_extra(error, "images")) from error
    check_outside(output, source)  # the next run would read it
    images = find_images(source)
    splits = _split(images, source, options)
    with atomic_directory(output, replace=True) as staging:
        shards = list(_shards(splits, staging, options))
        for split in splits:
            (staging / split).mkdir()
        with workers(min(options.cores, len(shards))) as in_order:
            for _ in in_order(write_shard, shards):
                pass
        return _finish(staging, shards, images, source, options)


def _split(images: FoundImages, source: Path, options: ImageOptions) -> dict[str, list[Item]]:
    fraction, names = options.test_fraction, ", ".join(images.splits)
    if len(images.splits) > 1 or "train" not in images.splits:
        if fraction is not None or "train" not in images.splits:
            raise ValueError(
                f"{source}: expected train and test images and no --test_fraction, or one of "
                f"these; found {names}, --test_fraction {fraction}"
            )
        return images.splits
    if fraction is None:
        raise ValueError(f"--test_fraction: expected a number in (0, 1), as {source} is not split")
    import numpy as np

    items = images.splits["train"]
    num_test = round(len(items) * fraction)
    order = np.argsort(np.random.SFC64([options.seed]).random_raw(len(items)), kind="stable")
    is_test = np.zeros(len(items), bool)
    is_test[order[:num_test]] = True
    return {
        split: [item for item, chosen in zip(items, is_test == wanted, strict=True) if chosen]
        for split, wanted in (("train", False), ("test", True))
    }


def _shards(
    splits: dict[str, list[Item]], directory: Path, options: ImageOptions
) -> Iterator["Shard"]:
    from dlrm.vision.preparation.shards import Shard

    for split, items in splits.items():
        for number, start in enumerate(range(0, len(items), options.shard_images)):
            yield Shard(
                items[start : start + options.shard_images],
                directory,
                split,
                number,
                options.size,
                options.first_label,
                options.bad_images == "skip",
            )


def _finish(
    staging: Path, shards: "list[Shard]", given: FoundImages, source: Path, options: ImageOptions
) -> ImageSummary:
    """Gathers the reports of the tasks and writes the manifest."""
    from dlrm.vision import layout as image_layout
    from dlrm.vision.preparation.shards import Report

    counts: dict[str, list[int]] = {shard.split: [] for shard in shards}
    names: dict[int, str | None] = {}
    bad = [*given.left_out]
    checksums: dict[str, str] = {}
    for shard in shards:
        report = Report.load(shard.report_file)
        shard.report_file.unlink()
        counts[shard.split].append(report.images)
        names |= report.class_names
        bad += report.bad
        checksums |= report.checksums
    images = {split: sum(in_shards) for split, in_shards in counts.items()}
    for split in ("train", "test"):
        if not images.get(split):
            raise ValueError(f"{source}: expected images in {split}, none are left; {len(bad)} bad")
    classes = given.classes or [names.get(i) or str(i) for i in range(max(names) + 1)]
    if bad:
        text = "\n".join(bad) + "\n"
        file = staging / image_layout.BAD_IMAGES
        file.write_text(text, encoding="utf-8", errors="backslashreplace")
    write_manifest(
        staging,
        image_layout.KIND,
        checksums,
        prepared_from=source.name,
        size=options.size,
        classes=classes,
        splits=counts,
        test_fraction=options.test_fraction,
        seed=options.seed,
        bad_images=len(bad),
    )
    return ImageSummary(images, classes, len(classes) - len(names), bad)


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    line = ConfigFlags(
        [("Flags", PlacesConfig), ("Flags", ImageOptions)],
        defaults={"cores": None},
        helps={"cores": "number of decoding processes; default: all cores of this process"},
    )
    errors = (ValueError, OSError, ImportError)
    return run_command(line, _run, __doc__, arguments, usage=2, errors=errors)


def _run(values: Values) -> None:
    from dlrm.vision.layout import BAD_IMAGES as LIST

    cores = values["cores"] or len(os.sched_getaffinity(0))
    output: Path = values["output"]
    summary = prepare(values["source"], output, values.config(ImageOptions, cores=cores))
    if summary.bad:
        print(f"left out: {len(summary.bad)} files, {output / LIST} says why")
    if summary.empty_classes:
        print(f"without images: {summary.empty_classes:,} of {len(summary.classes):,} classes")
    shown = "  ".join(f"{split} {count:,}" for split, count in summary.images.items())
    print(f"{output}: {shown} images of {len(summary.classes)} classes; complete")


if __name__ == "__main__":
    sys.exit(main())


if __name__ == "__main__":
    sys.exit(main())
