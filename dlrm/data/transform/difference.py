"""Finds differences between two fitted transforms, so that no model receives ids of other values.

A checkpoint keeps the transform of its training data. Every command that combines a checkpoint and
a dataset calls `compare_transforms`. Only numpy and the standard library are imported.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.transform.dictionaries import Dictionary
from dlrm.data.transform.logs import rule_of
from dlrm.data.transform.schema import CategoricalField, NumericalField, Schema
from dlrm.data.transform.transform import Transform
from dlrm.data.verification import Verifier

_ENTRIES = ("table", "max_length", "kept", "ordered", "weights", "pooling", "target")
_MOST_FIELDS, _MOST_IDS = 3, 2  # named in a message
_BLOCK = 1 << 20  # numbers of a dictionary that are compared at once


def compare_transforms(
    checkpoint: str | os.PathLike,
    dataset: str | os.PathLike | None,
    allowed: bool = False,
    verify_data: str = "first",
    allow_links: bool = False,
    source_kind: str = "checkpoint",
) -> str | None:
    """Compares the transform of a checkpoint with that of a dataset, both in their `transform/`.

    Dictionaries with equal checksums are not read.

    Args:
        dataset: the dataset to use it with; None is data without files.
        allowed: continue in spite of differences.
        verify_data: when to verify the checksums of the dataset's transform; see `Verifier`.
        allow_links: whether the dataset's files may be symbolic links that lead out of it.
        source_kind: kind of `checkpoint` in its manifest; `layout.KIND` if the model has no
            transform of its own and uses that of a dataset.

    Returns:
        A line about what could not be compared or differs by permission, or None.

    Raises:
        ValueError: the transforms differ, or a file of one is damaged; the message has the details.
        FileNotFoundError: a file of a transform is missing.
    """
    model = _load(Path(checkpoint), source_kind, "always", None)
    here = None if dataset is None else _load(Path(dataset), layout.KIND, verify_data, allow_links)
    if model is None:
        return None
    if dataset is None or here is None:
        return _nothing_tells(dataset, checkpoint, dataset)
    differences = list(_differences(model, here))
    if not differences:
        return None
    shown = _listed_fields(differences)
    differ = f"{dataset}: its transform is not that of {checkpoint}"
    if allowed:
        return f"note: {differ} ({shown}); --allow_other_transform continues"
    advice = "--allow_other_transform continues where the tables have the same sizes"
    if _num_inputs(model) != _num_inputs(here):
        advice = (
            "A model takes the fields that it was trained on, in their order: prepare the rows "
            "with the schema of its training data, or train a new model"
        )
    raise ValueError(f"{differ}, so the same ids and numbers mean other values: {shown}. {advice}")


def check_extends(checkpoint: str | os.PathLike, dataset: str | os.PathLike) -> str | None:
    """Checks that a dataset's transform is a checkpoint's with further values in its dictionaries.

    Then every id of the checkpoint means the same in the dataset, and new values have new ids.

    Returns:
        A line about a transform that is missing, so that nothing could be compared; None if both or
        none are there.

    Raises:
        ValueError: an old id has another value, or anything but the ends of dictionaries differs,
            or a file is damaged; the message names fields, ids and both values.
        FileNotFoundError: a file of a transform is missing.
    """
    model = _load(Path(checkpoint), "checkpoint", "always", None)
    here = _load(Path(dataset), layout.KIND, "always", None)
    if model is None or here is None:
        without = checkpoint if model is None else dataset
        return None if model is here else _nothing_tells(without, checkpoint, dataset)
    if differences := list(_differences(model, here, extended=True)):
        raise ValueError(
            f"{dataset}: expected the transform of {checkpoint} with further values at the ends of "
            f"its dictionaries, got another one: {_listed_fields(differences)}. Trained rows and "
            "weights would get other values; train a new model on this dataset"
        )
    return None


def _nothing_tells(
    without: str | os.PathLike | None, checkpoint: str | os.PathLike, dataset: object
) -> str:
    return (
        f"note: {without or 'the data'} has no fitted transform, so nothing tells whether the ids "
        f"and numbers of {dataset or 'the data'} mean what they do for {checkpoint}"
    )


def _listed_fields(differences: Sequence[str]) -> str:
    """Returns the first differences, and the number of the others."""
    shown = "; ".join(differences[:_MOST_FIELDS])
    if (more := len(differences) - _MOST_FIELDS) > 0:
        shown += f"; {more} more field{'s' * (more > 1)} differ{'s' * (more == 1)}"
    return shown


def _num_inputs(transform: Transform) -> tuple[int, int]:
    """Returns the number of numerical and of categorical fields."""
    return transform.num_numerical, transform.num_categorical


def _load(
    directory: Path, kind: str, verify_data: str, allow_links: bool | None
) -> Transform | None:
    """Reads `transform/` as listed in its manifest, or returns None if there is none."""
    folder = directory / layout.TRANSFORM
    if not folder.is_dir():
        return None
    Verifier(directory, kind, verify_data, allow_links).check_names(layout.TRANSFORM)
    return Transform.load(folder)


def _differences(model: Transform, here: Transform, extended: bool = False) -> Iterator[str]:
    """Yields the differences, one per field; with `extended`, dictionaries may be longer here."""
    if model.is_log != here.is_log:
        kinds = {False: "named columns", True: "fields of a log"}
        yield from _unequal("kind", kinds[model.is_log], kinds[here.is_log])
        return
    yield from _of_schemas(model, here)
    if extended:  # the model's scores are corrected for its share
        yield from _unequal("keep_negatives", model.keep_negatives, here.keep_negatives)
    checksums = model.checksums(), here.checksums()
    for index, place in _common_fields(model, here):
        field, number = model.fields[index], model.dictionary_of[index]
        values = model.dictionaries[number], here.dictionaries[place]
        if checksums[0][number] == checksums[1][place] and len(values[0]) == len(values[1]):
            continue
        fixed = not extended or field.hash_buckets > 0
        lines = list(_of_dictionaries(_name("categorical", field.column), *values, fixed))
        if lines and extended and len(values[1]) > len(values[0]) and fixed:
            lines = [f"{lines[0]} (its hash buckets follow its dictionary, so their ids change)"]
        yield from lines


def _name(kind: str, column: str) -> str:
    """Returns the name of a field in messages; those of logs begin with their kind."""
    return column if column.startswith(f"{kind} ") else f"{kind} {column}"


def _common_fields(model: Transform, here: Transform) -> Iterator[tuple[int, int]]:
    """Yields the model's fields that both have, with the index of the dictionary here."""
    places = dict(zip(here.schema.categorical_names, here.dictionary_of, strict=True))
    for index, name in enumerate(model.schema.categorical_names):
        if name in places:
            yield index, places[name]


def _of_schemas(model: Transform, here: Transform) -> Iterator[str]:
    first, second = model.schema, here.schema
    labels = [
        f"{s.label.column!r}"
        + (f" being {', '.join(map(repr, s.label.positives))}" if s.label.positives else "")
        for s in (first, second)
    ]
    yield from _unequal("label", *labels)
    yield from _of_meanings(first, second)
    yield from _of_columns("numerical", first.numerical_names, second.numerical_names)
    yield from _of_numbers(model, here)
    yield from _of_columns("categorical", first.categorical_names, second.categorical_names)
    crosses = {cross.column: cross for cross in second.crosses}
    for cross in first.crosses:
        if (same := crosses.get(cross.column)) is not None:
            lists = [", ".join(side.fields) for side in (cross, same)]
            yield from _unequal(f"cross {cross.column}: fields", *lists)
    theirs = {field.column: field for field in here.fields}
    for field in model.fields:
        if (other := theirs.get(field.column)) is not None:
            name = _name("categorical", field.column)
            yield from _unequal(f"{name}: type", field.type, other.type)
            yield from _unequal(f"{name}: hash buckets", field.hash_buckets, other.hash_buckets)
            for entry in _ENTRIES:
                values = getattr(field, entry), getattr(other, entry)
                yield from _unequal(f"{name}: {entry}", *values)


def _of_numbers(model: Transform, here: Transform) -> Iterator[str]:
    """Yields the numerical fields of both that are transformed in different ways."""
    fields = [
        {
            field.column: (field, fitted)
            for field, fitted in zip(side.schema.numerical, side.numerical, strict=True)
        }
        for side in (model, here)
    ]
    names = [name for name in fields[0] if name in fields[1]]
    rules = [(fields[0][name][0].transform, fields[1][name][0].transform) for name in names]
    if model.is_log:
        yield from _unequal("numeric transform", rule_of(model.schema), rule_of(here.schema))
        rules = []
    for name, both in zip(names, rules, strict=False):
        yield from _unequal(f"{_name('numerical', name)}: transform", *both)
    for name in names:
        (field, theirs), (_, ours) = fields[0][name], fields[1][name]
        name = _name("numerical", name)
        scales = [f"mean {side.mean!r}, deviation {side.deviation!r}" for side in (theirs, ours)]
        yield from _unequal(name, *scales)
        if field.rule.bins and not all(map(np.array_equal, theirs[2:], ours[2:])):
            edges = [
                f"{len(side.edges)} edges {side.edges[:3].tolist()}..." for side in (theirs, ours)
            ]
            yield f"{name}: {edges[0]} for the model and {edges[1]} here"


def _of_meanings(first: Schema, second: Schema) -> Iterator[str]:
    """Yields the fields of both schemas in which texts have other meanings."""
    numerical = {field.column: field for field in second.numerical}
    categorical = {field.column: field for field in second.categorical}
    pairs: list[tuple[NumericalField | CategoricalField, NumericalField | CategoricalField]] = []
    pairs += [(f, numerical[f.column]) for f in first.numerical if f.column in numerical]
    pairs += [(f, categorical[f.column]) for f in first.categorical if f.column in categorical]
    for theirs, ours in pairs:
        missing = first.missing_of(theirs), second.missing_of(ours)
        yield from _unequal(f"{theirs.column}: missing values", *map(_listed, missing))
        for name in ("true_values", "false_values"):
            texts = getattr(theirs, name), getattr(ours, name)
            yield from _unequal(f"{theirs.column}: {name}", *map(_listed, texts))


def _listed(texts: Sequence[str]) -> str:
    return ", ".join(map(repr, sorted(set(texts)))) or "none"


def _unequal(field: str, model: Any, here: Any) -> Iterator[str]:
    if model != here:
        shown = ["none" if value is None else value for value in (model, here)]
        yield f"{field}: {shown[0]} for the model and {shown[1]} here"


def _of_columns(kind: str, model: Sequence[str], here: Sequence[str]) -> Iterator[str]:
    """Yields differences between the columns, which are the model's inputs in order."""
    alone = [name for name in model if name not in here], [n for n in here if n not in model]
    if len(model) == len(here):
        for index, (theirs, ours) in enumerate(zip(model, here, strict=True)):
            yield from _unequal(f"{kind} {index}", theirs, ours)
    elif any(alone):
        pairs = zip(alone, ("of the model alone", "here alone"), strict=True)
        yield f"{kind} fields: " + "; ".join(f"{', '.join(n)} {of}" for n, of in pairs if n)


def _of_dictionaries(field: str, model: Dictionary, here: Dictionary, fixed: bool) -> Iterator[str]:
    """Yields the first ids with different values, on one line, or nothing.

    Unless `fixed`, there may be more values here.
    """
    common, longest = sorted([len(model), len(here)])
    places: list[int] = []
    for begin in range(0, common, _BLOCK):
        end = min(begin + _BLOCK, common)
        unequal = model.keys[begin:end] != here.keys[begin:end]
        places += (begin + np.flatnonzero(unequal)[:_MOST_IDS]).tolist()
        if len(places) >= _MOST_IDS:
            break
    if fixed or len(model) > len(here):
        places += range(common, longest)[:_MOST_IDS]
    meanings = [
        f"id {place + 1} is {_shown(model, place)} for the model and {_shown(here, place)} here"
        for place in places[:_MOST_IDS]
    ]
    if meanings:
        yield f"{field}: {', '.join(meanings)}"


def _shown(dictionary: Dictionary, place: int) -> str:
    if place >= len(dictionary):
        return "no value"
    value = dictionary.value(place + 1)
    return str(value) if dictionary.kind == "hexadecimal" else repr(value)
