"""Checks a dataset on disk, of clicks, images or pre-training rows."""

import itertools
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.clicks.bags import first_problem
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.list_columns import ListColumn, SampleWeights
from dlrm.data.transform.transform import Transform
from dlrm.data.verification import MEMORY, Verifier
from dlrm.documents import one_line, read_json
from dlrm.files import MANIFEST
from dlrm.flags import Values
from dlrm.language.data import layout as text_layout
from dlrm.manifest import check_file, read_manifest
from dlrm.scripts.verify_dataset.flags import VerifyConfig
from dlrm.vision import layout as image_layout

_BLOCK_BYTES = 1 << 24
_BLOCK_IDS = 1 << 20  # of list fields
_BINARY_FILES = ("train_data.bin", "test_data.bin", "validation_data.bin", "val_data.bin")


def run(values: Values) -> None:
    own = values.config(VerifyConfig)
    if not own.directory.is_dir():
        raise FileNotFoundError(f"{own.directory}: no such directory")
    problems = 0
    for problem in verify(own.directory, own.num_numerical_features, own.allow_links):
        problems += 1
        print(f"WRONG  {one_line(problem)}", flush=True)
    if problems:
        raise ValueError(f"{own.directory}: {problems} problem{'s' * (problems > 1)}")
    print(f"{own.directory}: nothing wrong")


def verify(directory: Path, num_numerical: int = 13, allow_links: bool = False) -> Iterator[str]:
    """Yields the errors of a dataset, as sentences.

    The manifest states the kind of dataset: images, pre-training rows, or rows of numbers and ids,
    split-binary or binary. One of the latter without a manifest, from other software, is checked
    without sizes and checksums.

    Args:
        num_numerical: numbers in a row of a binary dataset that has no transform.
        allow_links: whether files may be symbolic links out of the directory.
    """
    kind = _kind(directory)
    if kind in _OF_KIND:
        problems = list(_of_manifest(directory, kind, allow_links))
        yield from problems
        yield from (
            problem for problem in _OF_KIND[kind](directory, allow_links) if problem not in problems
        )
        return
    binary = [directory / name for name in _BINARY_FILES if (directory / name).is_file()]
    yield from _of_manifest(directory, "dataset", allow_links)
    cardinalities: list[int] = []
    try:
        if binary:
            cardinalities = layout.read_model_size(directory)
        else:
            spec = FeatureSpec.load(directory, allow_links)
            cardinalities = spec.cardinalities
            for split in spec.splits:
                yield from _of_split(spec, split)
            if not spec.file("train", spec.label).stat().st_size:
                yield f"{spec.file('train', spec.label)}: expected training rows, got none"
    except (OSError, ValueError) as error:
        yield str(error)
    if (directory / layout.TRANSFORM).is_dir():
        try:
            num_numerical, fitted = _fitted(directory)
            if fitted != cardinalities:
                yield (
                    f"{directory / layout.TRANSFORM}: expected the transform of this dataset, with "
                    f"tables of {cardinalities} rows, got one with {fitted}"
                )
        except (OSError, ValueError) as error:
            yield str(error)
    for path in binary if cardinalities else []:
        yield from _of_binary(path, num_numerical, cardinalities)


def _fitted(directory: Path) -> tuple[int, list[int]]:
    """Returns the numbers in a row and the rows of each table, from the dataset's transform."""
    transform = Transform.load(directory / layout.TRANSFORM)
    if not (directory / MANIFEST).is_file():  # otherwise they are checked with all other files
        transform.check_all()
    return transform.num_numerical, transform.cardinalities


def _kind(directory: Path) -> str | None:
    with suppress(OSError, ValueError, KeyError, TypeError):  # reported by `_of_manifest`
        return str(read_json(directory / MANIFEST)["kind"])
    return None


def _of_manifest(directory: Path, kind: str, allow_links: bool) -> Iterator[str]:
    if not (directory / MANIFEST).is_file():
        print(f"{directory}: no {MANIFEST}; sizes and checksums are not checked", flush=True)
        return
    try:
        manifest = read_manifest(directory, kind, allow_links=allow_links)
    except (OSError, ValueError) as error:
        yield str(error)
        return
    for name, expected in manifest["files"].items():
        try:
            check_file(directory / name, expected["crc32"])
        except ValueError as error:
            yield str(error)
    yield from _of_extra_files(
        directory, {directory / name for name in manifest["files"]}, allow_links
    )


def _of_extra_files(directory: Path, named: set[Path], allow_links: bool) -> Iterator[str]:
    """Prints files that the manifest does not list; those that readers would use are errors."""
    taken = {directory / name for name in (layout.FEATURE_SPEC, layout.MODEL_SIZE, *_BINARY_FILES)}
    with suppress(OSError, ValueError):  # reported elsewhere
        spec = FeatureSpec.load(directory, allow_links)
        features = [spec.label, *spec.numerical, *spec.categorical]
        taken |= {spec.file(split, name) for split in spec.splits for name in features}
        for split, name in itertools.product(spec.splits, spec.lists):
            taken.update(filter(None, spec.list_files(split, name)))
    files = {path for path in directory.rglob("*") if path.is_file()}
    for path in sorted(files - named - {directory / MANIFEST, directory / MEMORY}):
        if path in taken or directory / layout.TRANSFORM in path.parents:
            yield f"{path}: not in {MANIFEST}, though readers would take it for a part"
        else:
            print(
                f"{path}: an extra file, not in {MANIFEST}; readers do not look at it", flush=True
            )


def _of_images(directory: Path, allow_links: bool) -> Iterator[str]:
    try:
        contents = image_layout.read_contents(directory, allow_links)
    except (OSError, ValueError) as error:
        yield str(error)
        return
    for split, counts in contents.splits.items():
        print(f"{split}: {sum(counts):,} rows", flush=True)
        for shard in range(len(counts)):
            try:
                image_layout.open_shard(directory, contents, split, shard)
            except (OSError, ValueError) as error:
                yield str(error)


def _of_texts(directory: Path, allow_links: bool) -> Iterator[str]:
    try:
        manifest = text_layout.read_text_manifest(directory, allow_links)
        if manifest.get("output_format") != "hdf5":  # their files have no size to compare
            text_layout.open_shards(
                directory, Verifier(directory, text_layout.KIND, "never", allow_links), allow_links
            )
        rows = sum(manifest["rows"])
    except (OSError, ValueError) as error:
        yield str(error)
    else:
        print(f"{rows:,} rows", flush=True)


_OF_KIND = {image_layout.KIND: _of_images, text_layout.KIND: _of_texts}


def _of_split(spec: FeatureSpec, split: str) -> Iterator[str]:
    try:
        rows = spec.num_rows(split)
    except (OSError, ValueError) as error:
        yield str(error)
        return
    print(f"{split}: {rows:,} rows", flush=True)
    for name, size in zip(spec.categorical, spec.cardinalities, strict=True):
        if name in spec.lists:
            yield from _of_list(spec, split, name, rows)
            continue
        path, dtype, place = spec.file(split, name), spec.dtype(name), 0
        for block in _blocks(path, dtype.itemsize):
            ids = block.view(dtype)
            yield from _outside(path, f"an id in [0, {size})", ids, place, size)
            place += len(ids)
    path, place = spec.file(split, spec.label), 0
    for block in _blocks(path, 1):
        yield from _outside(path, "a label of 0 or 1", block, place, 2)
        place += len(block)
    if (path_of_weights := spec.weights_file(split)) is not None:
        yield from _of_weights(path_of_weights, rows)
    if spec.numerical:
        path, place = spec.file(split, spec.numerical[0]), 0
        width = len(spec.numerical)
        for block in _blocks(path, width * layout.NUMERICAL_DTYPE.itemsize):
            numbers = block.view(layout.NUMERICAL_DTYPE).reshape(-1, width)
            yield from _not_finite(path, numbers, place)
            place += len(numbers)


def _of_weights(path: Path, rows: int) -> Iterator[str]:
    try:
        weights = SampleWeights(path, rows, None)
        for begin in range(0, rows, _BLOCK_IDS):
            weights.read(begin, min(begin + _BLOCK_IDS, rows))
    except ValueError as error:
        yield str(error)


def _of_list(spec: FeatureSpec, split: str, name: str, rows: int) -> Iterator[str]:
    column, size = ListColumn(spec, split, name, rows, None), spec.feature_spec[name]["cardinality"]
    step = max(_BLOCK_IDS // max(column.num_ids // max(rows, 1), 1), 1)
    for begin in range(0, rows, step):
        try:
            lists = column.read(begin, min(begin + step, rows))
        except ValueError as error:
            yield str(error)
            continue
        if (problem := first_problem(lists, spec.lists[name], size)) is not None:
            row, why = problem
            outside = (lists.values < 0) | (lists.values >= size)
            more = _and_more(int(np.count_nonzero(outside)))
            yield f"{column.files.values}: row {begin + row}, {why}{more}"


def _of_binary(path: Path, num_numerical: int, cardinalities: list[int]) -> Iterator[str]:
    words = 1 + num_numerical + len(cardinalities)
    if path.stat().st_size % (4 * words):
        yield (
            f"{path}: expected a multiple of {4 * words} bytes ({num_numerical} numbers and "
            f"{len(cardinalities)} ids), got {path.stat().st_size}"
        )
        return
    print(f"{path.name}: {path.stat().st_size // (4 * words):,} rows", flush=True)
    place = 0
    for block in _blocks(path, 4 * words):
        rows = block.view("<i4").reshape(-1, words)
        yield from _outside(path, "a label of 0 or 1", rows[:, 0], place, 2)
        numbers = rows[:, 1 : 1 + num_numerical].copy().view("<f4")
        yield from _not_finite(path, numbers, place)
        for i, size in enumerate(cardinalities):
            ids = rows[:, 1 + num_numerical + i]
            expected = f"an id in [0, {size}) of table {i}"
            yield from _outside(path, expected, ids, place, size)
        place += len(rows)


def _outside(path: Path, expected: str, values: np.ndarray, place: int, end: int) -> Iterator[str]:
    if len(values) and (values.min() < 0 or values.max() >= end):
        wrong = (values < 0) | (values >= end)
        row = int(wrong.argmax())
        yield (
            f"{path}: row {place + row}: expected {expected}, got {values[row]}"
            f"{_and_more(int(np.count_nonzero(wrong)))}"
        )


def _not_finite(path: Path, numbers: np.ndarray, place: int) -> Iterator[str]:
    wrong = ~np.isfinite(numbers)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        yield (
            f"{path}: row {place + row}, number {column}: expected a finite one, got "
            f"{numbers[row, column]}{_and_more(int(np.count_nonzero(wrong)))}"
        )


def _and_more(wrong: int) -> str:
    return f" (and {wrong - 1} more in this part of the file)" if wrong > 1 else ""


def _blocks(path: Path, row_bytes: int) -> Iterator[np.ndarray]:
    """Yields a file as bytes, some megabytes of whole rows at a time."""
    size = max(_BLOCK_BYTES // row_bytes, 1) * row_bytes
    with open(path, "rb") as file:
        while block := file.read(size):
            yield np.frombuffer(block, np.uint8)
