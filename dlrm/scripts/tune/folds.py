"""Writes the training rows of a dataset as a dataset whose test rows are those held out."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from dlrm.data import layout
from dlrm.data.bags import take_rows
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.readers import SplitDataset
from dlrm.data.clicks.writer import SplitWriter
from dlrm.data.verification import Verifier
from dlrm.scripts.tune.flags import TuneConfig

_BLOCK_ROWS = 1 << 18


def write_fold(options: TuneConfig, fold: int, directory: Path) -> None:
    """Writes a fold of a dataset's training rows, with the transform of all of them.

    Raises:
        ValueError: a file is damaged, or the fold has no rows to fit, or holds none out.
    """
    spec = FeatureSpec.load(options.dataset)
    verifier = Verifier(spec.directory, layout.KIND, "first")
    verifier.check_names(spec.path.name, layout.TRANSFORM)
    rows = SplitDataset(spec, "train", _BLOCK_ROWS, verifier=verifier)
    files = {split: spec.source_spec[split] for split in ("train", "test")}
    own = replace(spec, path=directory / layout.FEATURE_SPEC, source_spec=files)
    with SplitWriter(own, "train") as fitted, SplitWriter(own, "test") as judged:
        for index in range(len(rows)):
            batch = rows.batch(index)
            columns = batch.columns(spec)
            held_out = _held_out(options, fold, index, rows.num_samples)
            for split, writer, chosen in (("train", fitted, ~held_out), ("test", judged, held_out)):
                ids = [take_rows(column, chosen) for column in columns]
                writer.write(batch.labels.numpy()[chosen], batch.numerical.numpy()[chosen], ids)
                if batch.weights is not None:
                    weights_file = own.file(split, own.label).with_name(layout.WEIGHT_FILE)
                    with open(weights_file, "ab") as file:
                        file.write(batch.weights.numpy()[chosen].tobytes())
    counts = {"train": fitted.num_rows, "test": judged.num_rows}
    if not all(counts.values()):
        raise ValueError(f"{options.dataset}: too few training rows to fit and to hold out")
    own.save()
    if (spec.directory / layout.TRANSFORM).is_dir():
        shutil.copytree(spec.directory / layout.TRANSFORM, directory / layout.TRANSFORM)
    layout.write_dataset_manifest(directory, counts, spec.cardinalities, {"fold": fold})


def _held_out(options: TuneConfig, fold: int, block: int, rows: int) -> np.ndarray:
    """Returns which rows of a block of a dataset's `rows` are held out in a fold."""
    begin = block * _BLOCK_ROWS
    count = min(_BLOCK_ROWS, rows - begin)
    if options.order == "last":
        return begin + np.arange(count) >= rows - round(options.held_out * rows)
    place = np.random.default_rng([options.seed, block]).permutation(count)
    if options.folds > 1:
        return place % options.folds == fold
    return place < round(options.held_out * count)
