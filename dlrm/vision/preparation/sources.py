"""Sources of images: class folders, and ImageNet's TFRecords."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from dlrm.vision.preparation.tfrecord import Record, find_records, parse_example, read_record

_TRAIN, _OTHERS = "train", ("test", "val", "validation")
_DIGITS = "[0-9]" * 5
_MAX_CLASSES = 1 << 20  # of TFRecords, so that one wrong label does not make millions


class Item(NamedTuple):
    """An encoded image: a file of a class, or a record with a tf.train.Example.

    Attributes:
        name: name in messages.
        record: position in the file; None if the image is the file.
        label: its class; None for a record, which contains it.
    """

    name: str
    path: Path
    record: Record | None
    label: int | None


class Encoded(NamedTuple):
    """The bytes of an image file, its label, and the label's name if a record has it."""

    data: bytes
    label: int
    class_name: str | None = None


class FoundImages(NamedTuple):
    """The images found.

    Attributes:
        splits: split -> images; only "train" if the source is not split.
        classes: names of the labels; None if the records have them.
        left_out: names of files that are not images of a class, with reasons.
    """

    splits: dict[str, list[Item]]
    classes: list[str] | None
    left_out: list[str]


def find_images(path: Path) -> FoundImages:
    """Finds the images of a folder.

    Class folders may be in `train` and in `val`, `validation` or `test`. Names that begin with a
    dot are skipped.

    Raises:
        FileNotFoundError: `path` does not exist, or has no image.
        ValueError: a class has images in another split but none in `train`, a class folder holds
            only folders, or some of the TFRecords are missing.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such folder (--source)")
    records = _find_record_files(path)
    return _from_records(records) if records else _from_paths(_files(path), path)


def read(item: Item, first_label: int) -> Encoded:
    """Reads an encoded image.

    Raises:
        ValueError: a file is unreadable, or a record is damaged or lacks its image or label.
    """
    if item.record is None:
        assert item.label is not None
        return Encoded(_read_file(item.path), item.label)
    features = parse_example(read_record(item.path, item.record))
    images, labels = (features.get(f"image/{name}", []) for name in ("encoded", "class/label"))
    if len(images) != 1 or not isinstance(images[0], bytes):
        raise ValueError(f"expected one image/encoded, got {len(images)}")
    if len(labels) != 1 or not isinstance(labels[0], int):
        raise ValueError(f"expected one image/class/label, got {len(labels)}")
    if labels[0] < first_label:
        raise ValueError(
            f"expected an image/class/label of {first_label} or more (--first_label), got "
            f"{labels[0]}"
        )
    if labels[0] > (most := first_label + _MAX_CLASSES - 1):
        raise ValueError(f"expected an image/class/label of {most} or less, got {labels[0]}")
    names = features.get("image/class/synset", [])
    name = names[0].decode("utf-8", "replace") if len(names) == 1 else None
    return Encoded(images[0], labels[0] - first_label, name)


def _read_file(path: Path) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait forever
            raise ValueError("expected a regular file, got a pipe, socket or device")
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror or error}") from error


def _find_record_files(folder: Path) -> dict[str, list[Path]]:
    """Returns split -> files such as train-00000-of-01024, by name."""
    pattern = f"-{_DIGITS}-of-{_DIGITS}"
    files = {split: sorted(folder.glob(split + pattern)) for split in (_TRAIN, *_OTHERS)}
    for paths in filter(None, files.values()):
        expected = int(paths[-1].name.rpartition("-")[2])
        if len(paths) != expected:
            raise ValueError(
                f"{folder}: expected {expected} files, as the name of {paths[-1].name} says, got "
                f"{len(paths)}"
            )
    return {split: paths for split, paths in files.items() if paths}


def _from_records(files: dict[str, list[Path]]) -> FoundImages:
    splits = {}
    for split, paths in files.items():
        splits[split] = [
            Item(f"{path}: record {number}", path, record, None)
            for path in paths
            for number, record in enumerate(find_records(path))
        ]
    return FoundImages(_named(splits), None, [])


def _files(folder: Path) -> Iterator[tuple[PurePosixPath, Path]]:
    """Yields the files below a folder, with their names in it."""
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders.sort()
        for name in names:
            path = Path(parent, name)
            yield PurePosixPath(path.relative_to(folder).as_posix()), path


def _from_paths(images: Iterator[tuple[PurePosixPath, Path]], source: Path) -> FoundImages:
    files = [entry for entry in images if not any(p.startswith(".") for p in entry[0].parts)]
    files.sort(key=lambda entry: entry[0].parts)
    tops = {name.parts[0] for name, _ in files if len(name.parts) > 1}
    depth = 1 if _TRAIN in tops and tops <= {_TRAIN, *_OTHERS} else 0
    with_files = {name.parent for name, _ in files}
    splits: dict[str, list[tuple[str, Item]]] = {}
    left_out = []
    for place, path in files:
        parts = place.parts
        if len(parts) < depth + 2:
            left_out.append(f"{path}: in no class folder")
            continue
        folder = PurePosixPath(*parts[: depth + 1])
        if folder not in with_files:
            raise ValueError(
                f"{source}: expected images in {folder}/, a class folder, got only folders; the "
                "folders at the top are the classes, or are train/ and val/ and nothing else"
            )
        split = parts[0] if depth else _TRAIN
        splits.setdefault(split, []).append((parts[depth], Item(str(path), path, None, 0)))
    if not splits:
        raise FileNotFoundError(
            f"{source}: expected folders of images, one a class; there are none"
        )
    classes = sorted({name for name, _ in splits.get(_TRAIN, [])})
    labels = {name: label for label, name in enumerate(classes)}
    for items in splits.values():
        for name, item in items:
            if name not in labels:
                raise ValueError(f"{item.name}: class {name} has no images in {source}/{_TRAIN}")
    labeled = {
        split: [item._replace(label=labels[name]) for name, item in items]
        for split, items in splits.items()
    }
    return FoundImages(_named(labeled), classes, left_out)


def _named(splits: dict[str, list[Item]]) -> dict[str, list[Item]]:
    """Names the splits; our test split is `test` or, without it, the other one."""
    if "val" in splits and "validation" in splits:
        raise ValueError("expected a split val or validation, got both")
    renamed = {("validation" if name == "val" else name): items for name, items in splits.items()}
    if "validation" in renamed and "test" not in renamed:
        renamed["test"] = renamed.pop("validation")
    return renamed
