"""Sources of images: class folders, on disk or in a tar file, and ImageNet's TFRecords."""

import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from dlrm.vision.preparation.tfrecord import Record, find_records, parse_example, read_record

_TRAIN, _OTHERS = "train", ("test", "val", "validation")
_DIGITS = "[0-9]" * 5
_MAX_CLASSES = 1 << 20  # of TFRecords, so that one wrong label does not make millions
_TAR_BLOCK = 512


class Item(NamedTuple):
    """An encoded image: a file, or part of one.

    Attributes:
        name: name in messages.
        record: position in the file; None if it is the file.
        label: its class; None for a tf.train.Example, which contains it.
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


# Name, file, and position in the file, or the reason for leaving it out.
_Found = Iterator[tuple[PurePosixPath, Path, Record | str | None]]


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
    """Finds the images of a folder or tar file.

    Class folders may be in `train` and in `val`, `validation` or `test`. Names that begin with a
    dot are skipped.

    Raises:
        FileNotFoundError: `path` does not exist, or has no image.
        ValueError: a class has images in another split but none in `train`, a class folder holds
            only folders, a tar file is damaged, or some of the TFRecords are missing.
    """
    if path.is_dir():
        records = _find_record_files(path)
        source = _from_records(records) if records else _from_paths(_files(path), path)
    elif path.is_file():
        source = _from_paths(_members(path), path)
    else:
        raise FileNotFoundError(f"{path}: no such folder or tar file (--source)")
    return source


def read(item: Item, first_label: int) -> Encoded:
    """Reads an encoded image.

    Raises:
        ValueError: a file is unreadable, or a record is damaged or lacks its image or label.
    """
    if item.record is None:
        assert item.label is not None
        return Encoded(_read_file(item.path), item.label)
    if item.label is not None:
        with open(item.path, "rb") as file:
            file.seek(item.record.offset)
            return Encoded(file.read(item.record.length), item.label)
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


def _files(folder: Path) -> _Found:
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders.sort()
        for name in names:
            path = Path(parent, name)
            yield PurePosixPath(path.relative_to(folder).as_posix()), path, None


def _members(path: Path) -> _Found:
    members: dict[
        PurePosixPath, Record | str
    ] = {}  # as in unpacking, the last file of a name counts
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                if not member.isdir():
                    members[_name_in_tar(member.name)] = _content(member, members)
    except tarfile.TarError as error:
        raise ValueError(f"{path}: expected a tar file that is not compressed ({error})") from error
    _check_end(path, archive.offset)
    for name, content in members.items():
        yield name, path, content


def _name_in_tar(name: str) -> PurePosixPath:
    return PurePosixPath(name.lstrip("/"))


def _content(member: tarfile.TarInfo, before: dict[PurePosixPath, Record | str]) -> Record | str:
    if member.islnk():
        missing = f"a hard link to {member.linkname}, which does not come before it"
        return before.get(_name_in_tar(member.linkname), missing)
    if member.isreg() and not member.issparse():
        return Record(member.offset_data, member.size)
    kind = "a symbolic link" if member.issym() else f"a member of type {member.type!r}"
    return f"expected a file or a hard link, got {kind}"


def _check_end(path: Path, offset: int) -> None:
    expected = f"{path}: byte {offset}: expected a member or the end of the archive"
    with open(path, "rb") as file:
        file.seek(offset)
        header = file.read(_TAR_BLOCK)
        if len(header) < _TAR_BLOCK:
            raise ValueError(f"{expected}, the file ends: cut off")
        if any(header):  # tarfile stops there without an error
            raise ValueError(f"{expected}, what is there is damaged")
        while block := file.read(1 << 20):
            if any(block):
                raise ValueError(
                    f"{expected}, got the end and other data follow it: damaged, or archives "
                    "that were joined"
                )


def _from_paths(images: _Found, source: Path) -> FoundImages:
    files = [entry for entry in images if not any(p.startswith(".") for p in entry[0].parts)]
    files.sort(key=lambda entry: entry[0].parts)
    tops = {name.parts[0] for name, _, _ in files if len(name.parts) > 1}
    depth = 1 if _TRAIN in tops and tops <= {_TRAIN, *_OTHERS} else 0
    with_files = {name.parent for name, _, _ in files}
    splits: dict[str, list[tuple[str, Item]]] = {}
    left_out = []
    for place, path, record in files:
        name, parts = str(path) if record is None else f"{path}: {place}", place.parts
        if isinstance(record, str):
            left_out.append(f"{name}: {record}")
            continue
        if len(parts) < depth + 2:
            left_out.append(f"{name}: in no class folder")
            continue
        folder = PurePosixPath(*parts[: depth + 1])
        if folder not in with_files:
            raise ValueError(
                f"{source}: expected images in {folder}/, a class folder, got only folders; the "
                "folders at the top are the classes, or are train/ and val/ and nothing else"
            )
        split = parts[0] if depth else _TRAIN
        splits.setdefault(split, []).append((parts[depth], Item(name, path, record, 0)))
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
