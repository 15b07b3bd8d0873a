"""Makes rows with lists, and datasets of such rows."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from dlrm.data import layout
from dlrm.data.bags import Jagged, ListField
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.writer import SplitWriter

SIZES = {"tags": 60, "user": 5, "history": 400}
LONGEST = {"tags": 200, "history": 7}
MEAN = {"tags": "sum", "history": "mean"}


class Rows(NamedTuple):
    """Rows in memory: `ids[table][row]` are ids, `factors` their weights."""

    labels: np.ndarray
    numerical: np.ndarray
    ids: list[list[list[int]]]
    factors: list[list[list[float]]]
    weights: np.ndarray


def drawn(rows: int, seed: int, longest: dict[str, int] = LONGEST) -> Rows:
    """Draws random rows; some lists are empty, and the first is the longest."""
    random = np.random.default_rng(seed)
    ids, factors = [], []
    for name, size in SIZES.items():
        lengths = random.integers(0, 5, rows) if name in longest else np.ones(rows, np.int64)
        lengths[:1] = longest.get(name, 1)
        ids.append([random.integers(0, size, n).tolist() for n in lengths])
        counts = (np.ones(n, "f4") for n in lengths)
        if name == "history":
            counts = (random.normal(size=n).astype("f4") for n in lengths)
        factors.append([own.tolist() for own in counts])
    weights = random.choice([0.0, 0.25, 1.0, 3.0], rows).astype("f4")
    numerical = random.normal(size=(rows, 2)).astype(np.float16)
    return Rows(random.integers(0, 2, rows), numerical, ids, factors, weights)


def write(
    directory: Path, splits: dict[str, Rows], weights: bool = False, poolings: dict = MEAN
) -> FeatureSpec:
    """Writes them as a dataset."""
    lists = {
        name: ListField(longest, name == "history", poolings.get(name))
        for name, longest in LONGEST.items()
    }
    path = directory / layout.FEATURE_SPEC
    spec = FeatureSpec.named(path, "label", ["a", "b"], SIZES, splits, lists=lists)
    for split, rows in splits.items():
        columns = [
            bags_of(ids, factors if name == "history" else None)
            if name in lists
            else np.array([own[0] for own in ids], np.int64)
            for name, ids, factors in zip(SIZES, rows.ids, rows.factors, strict=True)
        ]
        with SplitWriter(spec, split) as writer:
            writer.write(rows.labels, rows.numerical, columns)
        if weights:
            rows.weights.tofile(directory / split / "weight.bin")
    spec.save()
    counts = {split: len(rows.labels) for split, rows in splits.items()}
    layout.write_dataset_manifest(directory, counts, spec.cardinalities, {})
    return spec


def bags_of(ids: list[list[int]], factors: list[list[float]] | None = None) -> Jagged:
    """Returns Python lists as bags."""
    flat = np.array([value for row in ids for value in row], np.int64)
    lengths = np.array([len(row) for row in ids], np.int64)
    if factors is None:
        return Jagged(flat, lengths)
    return Jagged(flat, lengths, np.array([f for row in factors for f in row], np.float32))
