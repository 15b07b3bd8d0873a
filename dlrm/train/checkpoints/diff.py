"""Statistics of weights on disk, and differences between two sets of them.

Tables are read some megabytes at a time.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlrm.train.checkpoints.saved_model import SavedModel, SavedRows


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


@dataclass(frozen=True)
class TensorDifference:
    """Difference between two tensors of one shape.

    Attributes:
        rows: number of rows that differ.
        of: number of rows in all.
        first: the first row that differs.
        max_abs: the largest absolute difference; infinite if one side is not finite.
        max_rel: the largest difference relative to the larger of the two values.
    """

    rows: int
    of: int
    first: int
    max_abs: float
    max_rel: float


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


def difference(
    a: SavedRows | np.ndarray, b: SavedRows | np.ndarray, rtol: float = 0.0, atol: float = 0.0
) -> TensorDifference | None:
    """Returns the difference of two tables or tensors of one shape, or None if they are equal.

    Values differ if |a - b| > atol + rtol * |b|; NaN is equal to NaN.
    """
    rows, count, first, max_abs, max_rel = 0, 0, -1, 0.0, 0.0
    for x, y in zip(_blocks(a), _blocks(b), strict=True):
        unequal = ~((x == y) | (np.isnan(x) & np.isnan(y)))
        if unequal.any():
            x, y = x.astype(np.float64), y.astype(np.float64)
            with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
                apart = np.where(unequal, np.abs(x - y), 0.0)
                apart[~np.isfinite(apart)] = np.inf
                size = np.maximum(np.abs(x), np.abs(y))
                relative = np.where(apart > 0, apart / size, 0.0)
                unequal &= ~(apart <= atol + rtol * np.abs(y))
            relative[~np.isfinite(relative)] = np.inf
            max_abs = max(max_abs, float(apart.max()))
            max_rel = max(max_rel, float(relative.max()))
            wrong = unequal.any(axis=1)
            if wrong.any() and first < 0:
                first = rows + int(wrong.argmax())
            count += int(wrong.sum())
        rows += len(x)
    return TensorDifference(count, rows, first, max_abs, max_rel) if count else None


def weights_of(saved: SavedModel, with_state: bool = True) -> dict[str, SavedRows | np.ndarray]:
    """Returns all tensors of a checkpoint, by name.

    Args:
        with_state: include the state of its optimizers.
    """
    found: dict[str, SavedRows | np.ndarray] = {
        name: tensor.float().numpy() for name, tensor in sorted(saved.dense.items())
    }
    for index, table in enumerate(saved.tables):
        found[f"table {index}"] = table
        state = saved.table_state[index] if with_state and saved.table_state else {}
        found |= {f"table {index}, {name}": rows for name, rows in state.items()}
    if with_state:
        for name, tensor in sorted(saved.optimizer.items()):
            found[f"optimizer {name}"] = tensor.float().numpy()
    return found


def shape_of(weights: SavedRows | np.ndarray) -> list[int]:
    """Returns the shape of a table or a tensor."""
    return [weights.rows, weights.dim] if isinstance(weights, SavedRows) else list(weights.shape)


def map_differences(
    a: dict[str, Any], b: dict[str, Any], common: bool = False, name: str = ""
) -> Iterator[str]:
    """Yields the differences of two maps of JSON values, as sentences.

    Args:
        common: compare only the keys that both have.
        name: prefix of the keys in a sentence.
    """
    for key in sorted(a.keys() & b.keys() if common else a.keys() | b.keys()):
        one, other = a.get(key, "absent"), b.get(key, "absent")
        if isinstance(one, dict) and isinstance(other, dict):
            yield from map_differences(one, other, common, f"{name}{key}: ")
        elif one != other:
            yield f"{name}{key}: {one} and {other}"


def _blocks(weights: SavedRows | np.ndarray) -> Iterator[np.ndarray]:
    if isinstance(weights, SavedRows):
        yield from weights.blocks()
    else:
        yield weights.reshape(len(weights) if weights.ndim else 1, -1)
