"""Divides the training rows of a dataset into rows to fit and held-out rows.

Each part is a dataset of its own, with the judged rows as its test split. The test and validation
rows of the divided dataset are never opened. Rows keep their order, and the transform is that of
all training rows.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.clicks.bags import Jagged
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.list_columns import ListColumn
from dlrm.data.clicks.writer import SplitWriter
from dlrm.files import MANIFEST, staged_directory
from dlrm.manifest import checksum, damaged, read_manifest, read_sealed
from dlrm.mapped_files import map_file

_BLOCK_ROWS = 1 << 18
_LEFT_OUT, _FIT, _JUDGE = range(3)


class FoldPart(NamedTuple):
    """Some training rows to fit, and others to judge by.

    Attributes:
        fold: index of the fold to judge.
        folds: number of folds; 1 judges by a single split.
        held_out: share of the rows to judge, if `folds` is 1.
        order: "random", or "last" for the last rows, if `folds` is 1.
        share: share of the other rows to fit.
        seed: seed of the random choices.
    """

    fold: int
    folds: int
    held_out: float
    order: str
    share: float
    seed: int

    @property
    def name(self) -> str:
        """Returns a name of the part, unique within a search."""
        return f"fold-{self.fold}-share-{self.share:.4f}"

    def roles(self, rows: int) -> Iterator[np.ndarray]:
        """Yields whether rows are left out, fitted or judged, `_BLOCK_ROWS` rows at a time."""
        for block, begin in enumerate(range(0, rows, _BLOCK_ROWS)):
            count = min(_BLOCK_ROWS, rows - begin)
            random = np.random.default_rng([self.seed, block])
            place = random.permutation(count)
            if self.folds > 1:
                judged = place % self.folds == self.fold
            elif self.order == "random":
                judged = place < round(self.held_out * count)
            else:
                judged = begin + np.arange(count) >= rows - round(self.held_out * rows)
            fitted = random.random(count) < self.share
            yield np.where(judged, _JUDGE, np.where(fitted, _FIT, _LEFT_OUT))


def read_checksums(dataset: Path) -> dict[str, str]:
    """Returns the checksums of the files of a dataset that a search reads, by relative path.

    Raises:
        FileNotFoundError: there is no such dataset.
        ValueError: a file is damaged according to the dataset's manifest.
    """
    spec = FeatureSpec.load(dataset)
    spec.num_rows("train")
    folders = {spec.file("train", spec.label).parent, spec.directory / layout.TRANSFORM}
    paths = [spec.path, *(p for folder in sorted(folders) for p in sorted(folder.rglob("*")))]
    manifest = spec.directory / MANIFEST
    expected = read_sealed(manifest).get("files", {}) if manifest.is_file() else {}
    found = {}
    for path in filter(Path.is_file, paths):
        name = path.relative_to(spec.directory).as_posix()
        found[name] = checksum(path)
        known = expected.get(name, {}).get("crc32", found[name])
        if known != found[name]:
            raise damaged(path, known, found[name])
    return found


def write_part(
    dataset: Path, part: FoldPart, directory: Path, say: Callable[[str], None] = print
) -> None:
    """Writes a part of a dataset's training rows as a dataset, unless it exists undamaged.

    Raises:
        ValueError: the part has no rows to fit, or none to judge.
    """
    if directory.is_dir():
        if _is_whole(directory, say):
            return
        shutil.rmtree(directory)
    spec = FeatureSpec.load(dataset)
    columns, rows = _Columns(spec), spec.num_rows("train")
    with staged_directory(directory) as staging:
        sizes = dict(zip(spec.categorical, spec.cardinalities, strict=True))
        splits = {"train": _FIT, "test": _JUDGE}
        new = FeatureSpec.named(
            staging / layout.FEATURE_SPEC,
            spec.label,
            spec.numerical,
            sizes,
            splits,
            lists=spec.lists,
            tables=spec.shared_tables,
            dims=spec.embedding_dims,
        )
        counts = {}
        for split, role in splits.items():
            with SplitWriter(new, split) as writer:
                for begin, roles in zip(range(0, rows, _BLOCK_ROWS), part.roles(rows), strict=True):
                    columns.copy(begin, roles == role, writer)
            columns.copy_weights(part, role, new.file(split, new.label).parent)
            counts[split] = writer.num_rows
            if not writer.num_rows:
                raise ValueError(
                    f"{dataset}: {rows:,} training rows are too few to fit and to judge by"
                )
        new.save()
        layout.write_model_size(staging, spec.cardinalities)
        transform = spec.directory / layout.TRANSFORM
        if transform.is_dir():
            shutil.copytree(transform, staging / layout.TRANSFORM)
        facts = {"part_of": dataset.name, "part": part.name}
        layout.write_dataset_manifest(staging, counts, spec.cardinalities, facts)


def _is_whole(part: Path, say: Callable[[str], None]) -> bool:
    """Returns whether the files of a part are those of its manifest; reports a damaged one."""
    try:
        read_manifest(part, layout.KIND, check_crc=True)
    except (FileNotFoundError, ValueError) as error:
        say(f"  rows written again, since a file of them is damaged: {error}")
        return False
    return True


class _Columns:
    """The columns of the training rows, memory-mapped."""

    def __init__(self, spec: FeatureSpec) -> None:
        rows = spec.num_rows("train")
        self.label_file = spec.file("train", spec.label)
        self.labels = map_file(self.label_file, np.dtype(np.uint8), (rows,))
        self.numerical = np.empty((rows, 0), layout.NUMERICAL_DTYPE)
        if spec.numerical:
            path = spec.file("train", spec.numerical[0])
            self.numerical = map_file(path, layout.NUMERICAL_DTYPE, (rows, len(spec.numerical)))
        self.ids = [
            ListColumn(spec, "train", name, rows, None)
            if name in spec.lists
            else map_file(spec.file("train", name), spec.dtype(name), (rows,))
            for name in spec.categorical
        ]
        weights = spec.weights_file("train")
        self.weights = None
        if weights is not None:
            self.weights = map_file(weights, layout.WEIGHT_DTYPE, (rows,))

    def copy(self, begin: int, chosen: np.ndarray, writer: SplitWriter) -> None:
        """Writes the chosen rows of those from `begin` on."""
        own = slice(begin, begin + len(chosen))
        labels = self.labels[own]
        if labels.max(initial=0) > 1:
            row = int((labels > 1).argmax())
            raise ValueError(
                f"{self.label_file}: row {begin + row}: expected a label of 0 or 1, got "
                f"{labels[row]}"
            )
        ids: list[np.ndarray | Jagged] = [
            column.read(own.start, own.stop).take(chosen)
            if isinstance(column, ListColumn)
            else column[own][chosen]
            for column in self.ids
        ]
        writer.write(labels[chosen], self.numerical[own][chosen], ids)

    def copy_weights(self, part: FoldPart, role: int, folder: Path) -> None:
        """Writes the weights of the rows of a role, if the dataset has weights."""
        if self.weights is None:
            return
        with open(folder / layout.WEIGHT_FILE, "xb") as file:
            begin = 0
            for roles in part.roles(len(self.weights)):
                chosen = self.weights[begin : begin + len(roles)][roles == role]
                file.write(np.ascontiguousarray(chosen).tobytes())
                begin += len(roles)
