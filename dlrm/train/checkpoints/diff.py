"""Statistics of weights on disk. Tables are read some megabytes at a time."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dlrm.train.checkpoints.saved_model import SavedRows


@dataclass(frozen=True)
class RowStatistics:
    """Statistics of a tensor's rows.

    Attributes:
        norm_min, norm_mean, norm_max: Euclidean norms of the finite rows.
        max_abs: the largest finite absolute value.
        num_nan, num_inf: number of NaN and of infinite values.
    """

    norm_min: float
    norm_mean: float
    norm_max: float
    max_abs: float
    num_nan: int
    num_inf: int


def statistics(weights: SavedRows | np.ndarray) -> RowStatistics:
    """Returns the statistics of a table or tensor, whose first dimension counts rows."""
    low, total, high, largest, rows, nan, inf = math.inf, 0.0, 0.0, 0.0, 0, 0, 0
    for block in _blocks(weights):
        values = block.astype(np.float64)
        finite = np.isfinite(values)
        if not finite.all():
            nan, inf = nan + int(np.isnan(values).sum()), inf + int(np.isinf(values).sum())
            largest = max(largest, float(np.abs(values[finite]).max(initial=0)))
            values = values[finite.all(axis=1)]
        norms = np.sqrt(np.einsum("ij,ij->i", values, values))
        largest = max(largest, float(np.abs(values).max(initial=0)))
        if len(norms):
            low, high = min(low, float(norms.min())), max(high, float(norms.max()))
        total, rows = total + float(norms.sum()), rows + len(norms)
    return RowStatistics(low if rows else 0.0, total / max(rows, 1), high, largest, nan, inf)


def _blocks(weights: SavedRows | np.ndarray) -> Iterator[np.ndarray]:
    if isinstance(weights, SavedRows):
        yield from weights.blocks()
    else:
        yield weights.reshape(len(weights) if weights.ndim else 1, -1)
