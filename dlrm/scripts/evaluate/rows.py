"""Rows of all sources, scored by one model or two: read once, by the code of predict."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from dlrm.data.transform.schema import Schema
from dlrm.metrics.judged import ScoredRows
from dlrm.scripts import predict
from dlrm.serving.predictor import Predictor, field_names
from dlrm.serving.rows import Inputs
from dlrm.serving.shares import Shares


@dataclass
class Collected:
    """Scored rows, and what they may be divided by.

    Attributes:
        rows: scores of each model, and labels.
        sources: files and datasets, in order.
        source: of each row, its place in `sources`.
        fields: name of a field that divides the rows -> its values, ids or numbers.
        unknown: of each row, how many values have no id; None where the model has no transform.
        shares: of missing and unknown values of each field.
        extra: weight, groups and time of rows of tables, where they were read.
        kept: inputs of rows at even distances, and their labels.
    """

    rows: ScoredRows
    sources: list[str]
    source: np.ndarray
    fields: dict[str, np.ndarray]
    unknown: np.ndarray | None
    shares: Shares
    extra: dict[str, np.ndarray]
    kept: tuple[Inputs, np.ndarray]


def collect(
    models: Sequence[Predictor],
    sources: Sequence[str],
    fields: Sequence[str],
    schema: Schema | None = None,
    most_kept: int = 0,
) -> Collected:
    """Reads and scores all rows.

    Args:
        models: the first one's transform says what the rows are; the others take the same rows.
        sources: logs, CSVs or directories of datasets.
        fields: names of those whose values are kept.
        schema: of tables, the first model's, whose weight, groups and time are read as well.
        most_kept: rows whose inputs are kept, at most.

    Raises:
        ValueError: a row cannot be read or scored, rows have no labels, or the models do not take
            the same rows; the row, or the field, is named.
    """
    first = models[0]
    columns = _columns(first, fields)
    _check_same_columns(models)
    shares = predict.value_shares(first)
    scores: list[list[np.ndarray]] = [[] for _ in models]
    labels: list[np.ndarray] = []
    places: list[np.ndarray] = []
    unknown: list[np.ndarray] = []
    values: dict[str, list[np.ndarray]] = {name: [] for name in fields}
    extra: dict[str, list[np.ndarray]] = {}
    sample = _Sample(most_kept)

    def take(place: int, block: predict.Block) -> None:
        if block.labels is None:
            raise ValueError(f"{sources[place]}: expected rows with labels, got none (--label)")
        for model, parts in zip(models, scores, strict=True):
            parts.append(model.logits_of(_inputs(model, first, block)))
        labels.append(block.labels)
        places.append(np.full(len(block.labels), place, np.int32))
        unknown.append((block.inputs.ids == 0).sum(1))
        for name, (index, of_inputs) in columns.items():
            values[name].append(of_inputs(block.inputs)[:, index].copy())
        for name, column in (block.extra or {}).items():
            extra.setdefault(name, []).append(column)
        sample.add(block.inputs, block.labels)

    for place, source in enumerate(sources):
        for _ in predict.taken(first, source, shares, partial(take, place), schema):
            pass
    if not sum(map(len, labels)):
        raise ValueError(f"{', '.join(sources)}: expected rows, got none")
    logits = tuple(np.concatenate(parts) for parts in scores)
    return Collected(
        ScoredRows(logits, np.concatenate(labels)),
        list(sources),
        np.concatenate(places),
        {name: np.concatenate(parts) for name, parts in values.items()},
        np.concatenate(unknown) if first.transform is not None else None,
        shares,
        {name: np.concatenate(parts) for name, parts in extra.items()},
        sample.rows(),
    )


def _columns(predictor: Predictor, fields: Sequence[str]) -> dict:
    """Name of a field -> its column, and which of a model's inputs it is in."""
    numerical, categorical = field_names(predictor)
    found = {}
    for name in fields:
        if name in numerical:
            found[name] = (numerical.index(name), _numerical)
        elif name in categorical:
            found[name] = (categorical.index(name), _ids)
        else:
            known = ", ".join([*numerical, *categorical])
            raise ValueError(
                f"--slices {name}: expected day, or a field of the model, one of {known}"
            )
    return found


def _numerical(inputs: Inputs) -> np.ndarray:
    return inputs.numerical


def _ids(inputs: Inputs) -> np.ndarray:
    return inputs.ids


def _check_same_columns(models: Sequence[Predictor]) -> None:
    first, *others = ([*field_names(model)[0], *field_names(model)[1]] for model in models)
    for other, model in zip(others, models[1:], strict=True):
        if other != first:
            raise ValueError(
                f"--against {model.path}: expected a model of the same columns, {first}, got "
                f"{other}"
            )


def _inputs(model: Predictor, first: Predictor, block: predict.Block) -> Inputs:
    """What a model takes of a block that was read for the first model."""
    if model is first or block.inputs_of is None:
        return block.inputs
    return block.inputs_of(model)


class _Sample:
    """Rows at even distances, `most` at most, of blocks whose number is not known."""

    def __init__(self, most: int) -> None:
        self._most, self._stride, self._seen = most, 1, 0
        self._parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def add(self, inputs: Inputs, labels: np.ndarray) -> None:
        chosen = np.arange(-self._seen % self._stride, len(labels), self._stride)
        self._seen += len(labels)
        self._parts.append((inputs.numerical[chosen], inputs.ids[chosen], labels[chosen]))
        while sum(len(part[2]) for part in self._parts) > self._most:
            self._stride *= 2
            joined = tuple(np.concatenate(arrays)[::2] for arrays in zip(*self._parts, strict=True))
            self._parts = [joined]  # type: ignore[list-item]

    def rows(self) -> tuple[Inputs, np.ndarray]:
        numerical, ids, labels = (
            np.concatenate(arrays) for arrays in zip(*self._parts, strict=True)
        )
        return Inputs(numerical, ids), labels
