"""Edges of the bins of numerical fields, in the model's input space: after the transform."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dlrm.data.clicks.batch import ClickDataset
from dlrm.data.layout import field_names
from dlrm.data.schema.numbers import bin_edges, ordered
from dlrm.data.sources.columns import Parsed
from dlrm.data.transform.stored import facts_file
from dlrm.data.transform.transform import Transform
from dlrm.distributed import World, agreed, from_first
from dlrm.model.dlrm import DLRM

ROWS = 1 << 17  # training rows from which missing edges are fitted


def fit_edges(
    model: DLRM, train: ClickDataset, transform: Path | None = None, world: World = World()
) -> str | None:
    """Sets the edges of a new model's bins, if it has any; all processes get those of the first.

    A field has the edges that the dataset's transform fitted, or those of `bin_edges` over the
    first `ROWS` training rows.

    Args:
        train: the training rows, whole in each process.
        transform: folder of the dataset's fitted transform, or None.

    Returns:
        A line about fields with a single value, and therefore no bins; None if there are none.

    Raises:
        ValueError: a file of the dataset is damaged; the message names it.
    """
    if (embedding := model.numerical_embedding) is None:
        return None
    names, _ = field_names(embedding.num_fields, 0)
    edges: list[np.ndarray] = []
    with agreed(world, ValueError, OSError):
        if world.rank == 0:
            known: Sequence[np.ndarray] = [np.empty(0)] * len(names)
            if transform is not None and facts_file(transform).is_file():
                fitted = Transform.load(transform)
                names, known = fitted.schema.numerical_names, _transformed_edges(fitted)
            edges = _edges(train, known, embedding.bins)
    names, edges = from_first((names, edges), world)
    embedding.set_edges(edges)
    constant = [name for name, own in zip(names, edges, strict=True) if len(own) == 1]
    if not constant:
        return None
    return (
        f"note: without bins, and with one vector for all rows: "
        f"{', '.join(constant)}, which has one value only"
    )


def _edges(train: ClickDataset, known: Sequence[np.ndarray], bins: int) -> list[np.ndarray]:
    """Returns the known edges, at most `bins + 1`, and fits the missing ones."""
    result, rows = [], None
    for field, edges in enumerate(known):
        if len(edges) < 2:
            rows = _first_rows(train) if rows is None else rows
            values = rows[:, field].astype(np.float64)
            distinct, counts = np.unique(values[np.isfinite(values)] + 0.0, return_counts=True)
            found, _ = bin_edges(ordered(distinct), counts, bins)
            result.append(found if len(found) else np.zeros(1))
        elif len(edges) > bins + 1:
            chosen = np.linspace(0, len(edges) - 1, bins + 1)
            result.append(edges[np.round(chosen).astype(int)])
        else:
            result.append(edges)
    return result


def _transformed_edges(transform: Transform) -> list[np.ndarray]:
    """Returns the fitted edges of each field in the space of the model's inputs."""
    result = []
    for field, fitted in zip(transform.schema.numerical, transform.numerical, strict=True):
        values, _ = field.rule.apply(Parsed.present(fitted.edges), fitted)
        finite = values[np.isfinite(values)].astype(np.float64)
        result.append(np.unique(finite + 0.0))  # float16 may have merged two of them
    return result


def _first_rows(train: ClickDataset) -> np.ndarray:
    """Returns the numericals of the first `ROWS` rows, or of all rows if there are fewer."""
    count = min(-(-ROWS // train.batch_size), len(train))
    parts = [train.batch(index).numerical.cpu().numpy() for index in range(count)]
    return np.concatenate(parts)[:ROWS]
