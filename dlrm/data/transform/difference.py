"""Finds differences between two fitted transforms, so that no model receives ids of other values.

A checkpoint keeps the transform of its training data. Every command that combines a checkpoint and
a dataset calls `compare_transforms`. Only numpy and the standard library are imported.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.transform.dictionaries import Dictionary
from dlrm.data.transform.fitted import Fitted, load_transform
from dlrm.data.transform.schema import CategoricalField, NumericalField, Schema
from dlrm.data.transform.table_transform import TableTransform
from dlrm.data.transform.transform import Transform
from dlrm.data.verification import Verifier
from dlrm.documents import read_json

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
        checkpoint: the model's checkpoint.
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
    found = list(_differences(*model, *here))
    if not found:
        return None
    shown = _listed_fields(found)
    differ = f"{dataset}: its transform is not that of {checkpoint}"
    if allowed:
        return f"note: {differ} ({shown}); --allow_other_transform goes on"
    advice = "--allow_other_transform goes on where the tables have the same sizes"
    if _num_inputs(model[0]) != _num_inputs(here[0]):
        advice = (
            "A model takes the fields that it was trained on, in their order: prepare the rows "
            "with the schema of its training data, or train a new model"
        )
    raise ValueError(f"{differ}, so the same ids and numbers mean other values: {shown}. {advice}")


def check_extends(checkpoint: str | os.PathLike, dataset: str | os.PathLike) -> str | None:
    """Checks that a dataset's transform is a checkpoint's with further values in its dictionaries.

    Then every id of the checkpoint means the same in the dataset, and new values have new ids.

    Args:
        checkpoint: the model's checkpoint.
        dataset: the dataset with the longer dictionaries.

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
    if found := list(_differences(*model, *here, extended=True)):
        raise ValueError(
            f"{dataset}: expected the transform of {checkpoint} with further values at the ends of "
            f"its dictionaries, got another one: {_listed_fields(found)}. Trained rows and weights "
            "would get other values; train a new model on this dataset"
        )
    return None


def _nothing_tells(
    without: str | os.PathLike | None, checkpoint: str | os.PathLike, dataset: object
) -> str:
    return (
        f"note: {without or 'the data'} has no fitted transform, so nothing tells whether the ids "
        f"and numbers of {dataset or 'the data'} mean what they do for {checkpoint}"
    )


def _listed_fields(found: Sequence[str]) -> str:
    """Returns the first differences, and the number of the others."""
    shown = "; ".join(found[:_MOST_FIELDS])
    if (more := len(found) - _MOST_FIELDS) > 0:
        shown += f"; {more} more field{'s' * (more > 1)} differ{'s' * (more == 1)}"
    return shown


_Loaded = tuple[Fitted, list[Any]]  # with the checksums of the dictionaries


def _num_inputs(transform: Fitted) -> tuple[int, int]:
    """Returns the number of numerical and of categorical fields."""
    if isinstance(transform, TableTransform):
        schema = transform.schema
        return len(schema.numerical_names), len(schema.categorical_names)
    return transform.num_numerical, transform.num_categorical


def _load(directory: Path, kind: str, verify_data: str, allow_links: bool | None) -> _Loaded | None:
    """Reads `transform/` as listed in its manifest, or returns None if there is none."""
    folder = directory / layout.TRANSFORM
    if not folder.is_dir():
        return None
    Verifier(directory, kind, verify_data, allow_links).check_names(layout.TRANSFORM)
    transform = load_transform(folder)
    if isinstance(transform, TableTransform):
        return transform, transform.checksums()
    facts = read_json(folder / "transform.json")
    return transform, facts.get("dictionary_crc32", [])


def _differences(
    model: Fitted,
    model_checksums: list[Any],
    here: Fitted,
    checksums: list[Any],
    extended: bool = False,
) -> Iterator[str]:
    """Yields the differences, one per field; with `extended`, dictionaries may be longer here."""
    if isinstance(model, TableTransform) and isinstance(here, TableTransform):
        yield from _of_encodings(model, model_checksums, here, checksums)
        yield from _of_tables(model, here)
        if extended:  # the model's scores are corrected for its share
            yield from _unequal("keep_negatives", model.keep_negatives, here.keep_negatives)
        fields = list(_common_fields(model, here))
        show: Callable[[Any], str] = repr
        buckets = {f"categorical {field.column}": field.hash_buckets for field in model.fields}
    elif isinstance(model, Transform) and isinstance(here, Transform):
        yield from _unequal("numeric transform", model.numeric_transform, here.numeric_transform)
        yield from _unequal("numerical columns", model.num_numerical, here.num_numerical)
        yield from _unequal("categorical columns", model.num_categorical, here.num_categorical)
        both = range(min(model.num_categorical, here.num_categorical))
        fields = [(f"categorical {i}", i, i) for i in both]
        show, buckets = _hexadecimal, {}
    else:
        kinds = {True: "named columns", False: "fields of a log"}
        yield from _unequal("kind", *(kinds[isinstance(t, TableTransform)] for t in (model, here)))
        return
    for name, theirs, ours in fields:
        pair = model_checksums[theirs : theirs + 1], checksums[ours : ours + 1]
        if not pair[0] or pair[0] != pair[1]:
            values = _values(model.dictionaries[theirs]), _values(here.dictionaries[ours])
            fixed = not extended or buckets.get(name, 0) > 0
            found = list(_of_dictionaries(name, *values, show, fixed))
            if found and extended and len(values[1]) > len(values[0]) and fixed:
                found = [
                    f"{found[0]} (its hash buckets follow its dictionary, so their ids change)"
                ]
            yield from found


def _of_encodings(
    model: TableTransform, model_checksums: list[Any], here: TableTransform, checksums: list[Any]
) -> Iterator[str]:
    """Yields the fields with different encodings."""
    both = [
        {
            field.column: (field.encodings, found[len(one.dictionaries) + place])
            for place, (_, field) in enumerate(one.schema.encoded)
        }
        for one, found in ((model, model_checksums), (here, checksums))
    ]
    for column in filter(both[1].__contains__, both[0]):
        (theirs, their_checksums), (ours, our_checksums) = (one[column] for one in both)
        kinds = [", ".join(one.kind for one in encodings) for encodings in (theirs, ours)]
        yield from _unequal(f"encodings of {column}", *kinds)
        if kinds[0] == kinds[1] and their_checksums != our_checksums:
            yield f"encodings of {column}: other numbers for its values"


def _common_fields(model: TableTransform, here: TableTransform) -> Iterator[tuple[str, int, int]]:
    """Yields the fields that both have, with the indices of their dictionaries."""
    places = dict(zip(here.schema.categorical_names, here.dictionary_of, strict=True))
    for name, place in zip(model.schema.categorical_names, model.dictionary_of, strict=True):
        if name in places:
            yield f"categorical {name}", place, places[name]


def _values(dictionary: Any) -> Any:
    return dictionary.values() if isinstance(dictionary, Dictionary) else dictionary


def _of_tables(model: TableTransform, here: TableTransform) -> Iterator[str]:
    first, second = model.schema, here.schema
    if model.label_known and here.label_known:  # early transforms do not know theirs
        labels = [
            f"{s.label.column!r}"
            + (f" being {', '.join(map(repr, s.label.positives))}" if s.label.positives else "")
            for s in (first, second)
        ]
        yield from _unequal("label", *labels)
    yield from _of_meanings(first, second)
    yield from _of_columns("numerical", first.numerical_names, second.numerical_names)
    ours = {field.column: i for i, field in enumerate(second.numerical_features)}
    for i, field in enumerate(first.numerical_features):
        if (other := ours.get(field.column)) is not None:
            name = f"numerical {field.column}"
            rules = [s.numerical_features[k].transform for s, k in ((first, i), (second, other))]
            yield from _unequal(f"{name}: transform", *rules)
            pair = model.numerical[i], here.numerical[other]
            scales = [f"mean {one.mean!r}, deviation {one.deviation!r}" for one in pair]
            yield from _unequal(name, *scales)
            if field.rule.bins:
                edges = [f"{len(one.edges)} edges {one.edges[:3].tolist()}..." for one in pair]
                if not all(map(np.array_equal, pair[0][2:], pair[1][2:])):
                    yield f"{name}: {edges[0]} for the model and {edges[1]} here"
    yield from _of_columns("categorical", first.categorical_names, second.categorical_names)
    crosses = {cross.column: cross for cross in second.crosses}
    for cross in first.crosses:
        if (same := crosses.get(cross.column)) is not None:
            lists = [", ".join(one.fields) for one in (cross, same)]
            yield from _unequal(f"cross {cross.column}: fields", *lists)
    theirs = {field.column: field for field in here.fields}
    for one in model.fields:
        if (two := theirs.get(one.column)) is not None:
            name = f"categorical {one.column}"
            yield from _unequal(f"{name}: type", one.type, two.type)
            yield from _unequal(f"{name}: hash buckets", one.hash_buckets, two.hash_buckets)
            for entry in ("max_length", "kept", "ordered", "weights", "pooling"):
                yield from _unequal(f"{name}: {entry}", getattr(one, entry), getattr(two, entry))


def _of_meanings(first: Schema, second: Schema) -> Iterator[str]:
    """Yields the fields of both schemas in which texts have other meanings."""
    numerical = {field.column: field for field in second.numerical}
    categorical = {field.column: field for field in second.categorical}
    pairs: list[tuple[NumericalField | CategoricalField, NumericalField | CategoricalField]] = []
    pairs += [(one, numerical[one.column]) for one in first.numerical if one.column in numerical]
    pairs += [
        (one, categorical[one.column]) for one in first.categorical if one.column in categorical
    ]
    for theirs, ours in pairs:
        missing = first.missing_of(theirs), second.missing_of(ours)
        yield from _unequal(f"{theirs.column}: missing values", *map(_listed, missing))
        for name in ("true_values", "false_values"):
            texts = getattr(theirs, name), getattr(ours, name)
            yield from _unequal(f"{theirs.column}: {name}", *map(_listed, texts))


def _listed(texts: Sequence[str]) -> str:
    return ", ".join(map(repr, sorted(set(texts)))) or "none"


def _hexadecimal(number: np.integer) -> str:
    return f"{number:08x}"


def _unequal(field: str, model: Any, here: Any) -> Iterator[str]:
    if model != here:
        yield f"{field}: {model} for the model and {here} here"


def _of_columns(kind: str, model: Sequence[str], here: Sequence[str]) -> Iterator[str]:
    """Yields differences between the columns, which are the model's inputs in order."""
    alone = [name for name in model if name not in here], [n for n in here if n not in model]
    if len(model) == len(here):
        for index, (theirs, ours) in enumerate(zip(model, here, strict=True)):
            yield from _unequal(f"{kind} {index}", theirs, ours)
    elif any(alone):
        pairs = zip(alone, ("of the model alone", "here alone"), strict=True)
        yield f"{kind} fields: " + "; ".join(f"{', '.join(n)} {of}" for n, of in pairs if n)


def _of_dictionaries(
    field: str,
    model: np.ndarray | Sequence[str],
    here: np.ndarray | Sequence[str],
    show: Callable[[Any], str],
    fixed: bool,
) -> Iterator[str]:
    """Yields the first ids with different values, on one line, or nothing.

    Unless `fixed`, there may be more values here.
    """
    common, longest = sorted([len(model), len(here)])
    places: list[int] = []
    for begin in range(0, common, _BLOCK):
        end = min(begin + _BLOCK, common)
        unequal = _objects(model[begin:end]) != _objects(here[begin:end])
        places += (begin + np.flatnonzero(unequal)[:_MOST_IDS]).tolist()
        if len(places) >= _MOST_IDS:
            break
    if fixed or len(model) > len(here):
        places += range(common, longest)[:_MOST_IDS]
    pairs = [
        tuple(show(d[place]) if place < len(d) else "no value" for d in (model, here))
        for place in places[:_MOST_IDS]
    ]
    meanings = [
        f"id {place + 1} is {theirs} for the model and {ours} here"
        for place, (theirs, ours) in zip(places, pairs, strict=False)
    ]
    if meanings:
        yield f"{field}: {', '.join(meanings)}"


def _objects(values: np.ndarray | Sequence[str]) -> np.ndarray:
    """Returns values as an array; numpy's own strings would lose trailing zeros."""
    return values if isinstance(values, np.ndarray) else np.array(values, object)
