"""Divides the training rows of a dataset into rows to fit and held-out rows.

Each fold is a dataset of its own, with the held-out rows as its test split. The test and validation
rows of the divided dataset are never opened. Rows keep their order, and the transform is that of
all training rows.
"""

import shutil
from pathlib import Path

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.clicks.bags import taken
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.list_columns import ListColumn
from dlrm.data.clicks.writer import SplitWriter
from dlrm.files import staged_directory
from dlrm.mapped_files import map_file
from dlrm.scripts.tune.flags import TuneConfig

_BLOCK_ROWS = 1 << 18


def held_out(options: TuneConfig, fold: int, begin: int, rows: int) -> np.ndarray:
    """Returns which of the `_BLOCK_ROWS` rows from `begin` on are held out in a fold.

    Args:
        rows: number of all training rows.
    """
    count = min(_BLOCK_ROWS, rows - begin)
    if options.order == "last":
        return begin + np.arange(count) >= rows - round(options.held_out * rows)
    place = np.random.default_rng([options.seed, begin // _BLOCK_ROWS]).permutation(count)
    if options.folds > 1:
        return place % options.folds == fold
    return place < round(options.held_out * count)


def write_fold(options: TuneConfig, fold: int, directory: Path) -> None:
    """Writes a fold of a dataset's training rows as a dataset.

    Raises:
        ValueError: the fold has no rows to fit, or holds none out.
    """
    spec = FeatureSpec.load(options.dataset)
    rows = spec.num_rows("train")
    sizes = dict(zip(spec.categorical, spec.cardinalities, strict=True))
    labels = map_file(spec.file("train", spec.label), np.dtype(np.uint8), (rows,))
    if labels.max(initial=0) > 1:
        row = int((labels > 1).argmax())
        file = spec.file("train", spec.label)
        raise ValueError(f"{file}: row {row}: expected a label of 0 or 1, got {labels[row]}")
    numerical = np.empty((rows, 0), layout.NUMERICAL_DTYPE)
    if spec.numerical:
        dense = spec.file("train", spec.numerical[0])
        numerical = map_file(dense, layout.NUMERICAL_DTYPE, (rows, len(spec.numerical)))
    columns = [
        ListColumn(spec, "train", name, rows, None)
        if name in spec.lists
        else map_file(spec.file("train", name), spec.dtype(name), (rows,))
        for name in spec.categorical
    ]
    weighted = spec.weights_file("train")
    weights = None if weighted is None else map_file(weighted, layout.WEIGHT_DTYPE, (rows,))
    with staged_directory(directory) as staging:
        counts = {}
        new = FeatureSpec.named(
            staging / layout.FEATURE_SPEC,
            spec.label,
            spec.numerical,
            sizes,
            ["train", "test"],
            lists=spec.lists,
            tables=spec.shared_tables,
        )
        for split in ("train", "test"):
            folder = new.file(split, new.label).parent
            with SplitWriter(new, split) as writer:
                for begin in range(0, rows, _BLOCK_ROWS):
                    own = slice(begin, min(begin + _BLOCK_ROWS, rows))
                    chosen = held_out(options, fold, begin, rows) == (split == "test")
                    blocks = [
                        one.read(own.start, own.stop) if isinstance(one, ListColumn) else one[own]
                        for one in columns
                    ]
                    ids = [taken(block, chosen) for block in blocks]
                    writer.write(labels[own][chosen], numerical[own][chosen], ids)
                    if weights is not None:
                        with open(folder / layout.WEIGHT_FILE, "ab") as weight_file:
                            weight_file.write(weights[own][chosen].tobytes())
            counts[split] = writer.num_rows
            if not writer.num_rows:
                raise ValueError(
                    f"{options.dataset}: {rows:,} training rows are too few to fit and to hold out"
                )
        new.save()
        layout.write_model_size(staging, spec.cardinalities)
        if (spec.directory / layout.TRANSFORM).is_dir():
            shutil.copytree(spec.directory / layout.TRANSFORM, staging / layout.TRANSFORM)
        layout.write_dataset_manifest(staging, counts, spec.cardinalities, {"fold": fold})
