"""Rows of all sources, scored by one model or two, and read once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from dlrm.data.schema.schema import Schema
from dlrm.metrics.judged import ScoredRows
from dlrm.serving.importance import Sample
from dlrm.serving.predictor import Predictor, field_names
from dlrm.serving.rows.inputs import Inputs
from dlrm.serving.rows.shares import Shares
from dlrm.serving.scoring import shares_of
from dlrm.serving.sources import SourceBlock, SourceConfig, iter_scored_blocks


@dataclass
class Collected:
    """Scored rows, and columns to divide them by.

    Attributes:
        rows: scores of each model, and labels.
        sources: files and datasets, in order.
        source: for each row, its index in `sources`.
        fields: name of a field that divides the rows -> its values: ids, numbers or, for lists, the
            number of ids in each row.
        lists: those of `fields` that have lists.
        unknown: for each row, the number of values without an id; None if the model has no
            transform.
        shares: shares of missing and unknown values of each field.
        extra: weight, groups and time of rows of tables, if they were read.
        kept: inputs of evenly spaced rows, and their labels.
    """

    rows: ScoredRows
    sources: list[str]
    source: np.ndarray
    fields: dict[str, np.ndarray]
    lists: set[str]
    unknown: np.ndarray | None
    shares: Shares
    extra: dict[str, np.ndarray]
    kept: tuple[Inputs, np.ndarray]


def collect(
    models: Sequence[Predictor],
    sources: Sequence[str],
    fields: Sequence[str],
    config: SourceConfig,
    schema: Schema | None = None,
    most_kept: int = 0,
) -> Collected:
    """Reads and scores all rows.

    Args:
        models: the first one's transform interprets the rows; the others take the same rows.
        sources: logs, CSVs or directories of datasets.
        fields: names of the fields whose values are kept.
        schema: for tables, the first model's schema, to read its weight, groups and time as well.
        most_kept: maximum number of rows whose inputs are kept.

    Raises:
        ValueError: a row cannot be read or scored, rows have no labels, or the models do not take
            the same rows; the message names the row or the field.
    """
    first = models[0]
    columns = _columns(first, fields)
    _check_same_columns(models)
    shares, transform = shares_of(first.transform), first.transform
    tables = slice(None) if transform is None else ~np.array(transform.of_ids, bool)
    scores: list[list[np.ndarray]] = [[] for _ in models]
    labels: list[np.ndarray] = []
    places: list[np.ndarray] = []
    unknown: list[np.ndarray] = []
    values: dict[str, list[np.ndarray]] = {name: [] for name in fields}
    extra: dict[str, list[np.ndarray]] = {}
    lists: set[str] = set()
    sample = Sample(most_kept)

    def take(place: int, block: SourceBlock) -> None:
        if block.labels is None:
            raise ValueError(f"{sources[place]}: expected rows with labels, got none (--label)")
        for model, parts in zip(models, scores, strict=True):
            parts.append(model.logits_of(_inputs(model, first, block)))
        labels.append(block.labels)
        places.append(np.full(len(block.labels), place, np.int32))
        unknown.append(block.inputs.without_id()[:, tables].sum(1))
        for name, index in columns.items():
            column, is_list = _values(first, block.inputs, index)
            values[name].append(column.copy())
            lists.update([name] * is_list)
        for name, column in (block.extra or {}).items():
            extra.setdefault(name, []).append(column)
        sample.add(block.inputs, block.labels)

    for place, source in enumerate(sources):
        for _ in iter_scored_blocks(first, source, config, shares, partial(take, place), schema):
            pass
    if not sum(map(len, labels)):
        raise ValueError(f"{', '.join(sources)}: expected rows, got none")
    logits = tuple(np.concatenate(parts) for parts in scores)
    return Collected(
        ScoredRows(logits, np.concatenate(labels)),
        list(sources),
        np.concatenate(places),
        {name: np.concatenate(parts) for name, parts in values.items()},
        lists,
        np.concatenate(unknown) if transform is not None else None,
        shares,
        {name: np.concatenate(parts) for name, parts in extra.items()},
        sample.rows(),
    )


def _columns(predictor: Predictor, fields: Sequence[str]) -> dict[str, int]:
    """Returns field name -> index among the numerical fields followed by the tables."""
    names = [name for kind in field_names(predictor) for name in kind]
    if unknown := [name for name in fields if name not in names]:
        raise ValueError(
            f"--slices {unknown[0]}: expected day, or a field of the model, one of "
            f"{', '.join(names)}"
        )
    return {name: names.index(name) for name in fields}


def _values(model: Predictor, inputs: Inputs, field: int) -> tuple[np.ndarray, bool]:
    """Returns values to divide rows by, `[rows]`, and whether these are numbers of ids."""
    table = field - inputs.numerical.shape[1]
    if table < 0:
        return inputs.numerical[:, field], False
    if inputs.lengths is None:
        return inputs.ids[:, table], False
    if model.transform is None or table in model.transform.longest:
        return inputs.lengths[:, table], True
    ends = np.cumsum(inputs.lengths, dtype=np.int64).reshape(inputs.lengths.shape)
    return inputs.ids[ends[:, table] - 1], False


def _check_same_columns(models: Sequence[Predictor]) -> None:
    first, *others = ([*field_names(model)[0], *field_names(model)[1]] for model in models)
    for other, model in zip(others, models[1:], strict=True):
        if other != first:
            raise ValueError(
                f"--against {model.path}: expected a model of the same columns, {first}, got "
                f"{other}"
            )


def _inputs(model: Predictor, first: Predictor, block: SourceBlock) -> Inputs:
    """Returns a model's inputs from a block that was read for the first model."""
    if model is first or block.inputs_of is None:
        return block.inputs
    return block.inputs_of(model)
