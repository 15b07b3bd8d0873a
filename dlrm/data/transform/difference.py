"""Finds differences between two fitted transforms, so that no model receives ids of other values.

A checkpoint keeps the transform of its training data. Every command that combines a checkpoint and
a dataset calls `compare_transforms`. Only numpy and the standard library are imported.
"""

import os
from pathlib import Path
from typing import Any

from dlrm.data import layout
from dlrm.data.transform.dictionaries import Dictionary
from dlrm.data.transform.transform import Transform
from dlrm.data.verification import Verifier
from dlrm.documents import brief

_ENTRIES = {  # of a field, which determine what becomes of its values
    "numerical": ("transform", "true_values", "false_values"),
    "categorical": (
        *("type", "hash_buckets", "table", "max_length", "kept", "ordered", "weights", "pooling"),
        *("target", "true_values", "false_values"),
    ),
}


def compare_transforms(
    checkpoint: str | os.PathLike,
    dataset: str | os.PathLike | None,
    allowed: bool = False,
    verify_data: str = "first",
    allow_links: bool | None = False,
    source_kind: str = "checkpoint",
    extended: bool = False,
) -> str | None:
    """Compares the transform of a checkpoint with that of a dataset, both in their `transform/`.

    Args:
        dataset: the dataset to use it with; None is data without files.
        allowed: continue in spite of differences.
        verify_data: when to verify the checksums of the dataset's transform; see `Verifier`.
        allow_links: whether the dataset's files may be symbolic links that lead out of it.
        source_kind: kind of `checkpoint` in its manifest; `layout.KIND` if the model has no
            transform of its own and uses that of a dataset.
        extended: whether the dataset's dictionaries may have further values at their ends, so that
            every id of the checkpoint means the same.

    Returns:
        A line about what could not be compared or differs by permission, or None.

    Raises:
        ValueError: the transforms differ, or a file of one is damaged; the message has the details.
        FileNotFoundError: a file of a transform is missing.
    """
    model = _load(Path(checkpoint), source_kind, "always", None)
    here = None if dataset is None else _load(Path(dataset), layout.KIND, verify_data, allow_links)
    if model is None and (here is None or not extended):
        return None
    if model is None or here is None:
        without = checkpoint if model is None else dataset or "the data"
        return (
            f"note: {without} has no fitted transform, so nothing tells whether the ids and "
            f"numbers of {dataset or 'the data'} mean what they do for {checkpoint}"
        )
    if (difference := _difference(model, here, extended)) is None:
        return None
    if extended:
        raise ValueError(
            f"{dataset}: expected the transform of {checkpoint} with further values at the ends of "
            f"its dictionaries, got another one: {difference}. Trained rows and weights would get "
            "other values; train a new model on this dataset"
        )
    differ = f"{dataset}: its transform is not that of {checkpoint}"
    if allowed:
        return f"note: {differ} ({difference}); --allow_other_transform continues"
    advice = "--allow_other_transform continues where the tables have the same sizes"
    inputs = [(side.num_numerical, side.num_categorical) for side in (model, here)]
    if inputs[0] != inputs[1]:
        advice = (
            "A model takes the fields that it was trained on, in their order: prepare the rows "
            "with the schema of its training data, or train a new model"
        )
    raise ValueError(
        f"{differ}, so the same ids and numbers mean other values: {difference}. {advice}"
    )


def _load(directory: Path, kind: str, verify: str, allow_links: bool | None) -> Transform | None:
    """Reads `transform/` as listed in its manifest, or returns None if there is none."""
    folder = directory / layout.TRANSFORM
    if not folder.is_dir():
        return None
    Verifier(directory, kind, verify, allow_links).check_names(layout.TRANSFORM)
    return Transform.load(folder)


def _difference(model: Transform, here: Transform, extended: bool) -> str | None:
    """Returns the first entry, or value of a dictionary, in which transforms differ.

    Dictionaries with equal checksums are not read.
    """
    sides = [_entries(side, extended) for side in (model, here)]
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        values = [side.get(name) for side in sides]
        if values[0] != values[1]:
            return f"{name}: {brief(values[0])} for the model and {brief(values[1])} here"
    checksums = model.checksums(), here.checksums()
    for field, i, j in zip(model.fields, model.dictionary_of, here.dictionary_of, strict=True):
        theirs, ours = model.dictionaries[i], here.dictionaries[j]
        if checksums[0][i] == checksums[1][j] and len(theirs) == len(ours):
            continue
        grows = extended and not field.hash_buckets
        if (shown := _other_value(theirs, ours, grows)) is not None:
            if extended and not grows and len(ours) > len(theirs):
                shown += " (its hash buckets follow its dictionary, so their ids change)"
            return f"{_named('categorical', field.column)}: {shown}"
    return None


def _entries(side: Transform, extended: bool) -> dict[str, Any]:
    """Returns what a transform makes of values, besides its dictionaries: JSON by entry."""
    schema = side.schema
    entries: dict[str, Any] = {"label": [schema.label.column, *schema.label.positives]}
    fields: dict[str, Any] = {"numerical": schema.numerical, "categorical": side.fields}
    for role, own in fields.items():
        entries |= {f"{role} {i}": field.column for i, field in enumerate(own)}
    entries |= {f"cross {cross.column}": list(cross.fields) for cross in schema.crosses}
    if extended:  # the model's scores are corrected for its share
        entries["keep_negatives"] = side.keep_negatives
    for role, own in fields.items():
        for i, field in enumerate(own):
            facts = {name: getattr(field, name) for name in _ENTRIES[role]}
            facts["missing_values"] = schema.missing_of(field)
            if role == "numerical":
                facts |= {name: getattr(side.numerical[i], name) for name in ("mean", "deviation")}
                facts |= {"edges": side.numerical[i].edges.tolist()} if field.rule.bins else {}
            for name, fact in facts.items():
                fact = sorted({*fact}) if isinstance(fact, tuple) else fact
                entries[f"{_named(role, field.column)}: {name}"] = fact
    return entries


def _named(role: str, column: str) -> str:
    """Returns the name of a field in messages; those of logs begin with their role."""
    return f"{role} {column.removeprefix(f'{role} ')}"


def _other_value(model: Dictionary, here: Dictionary, grows: bool) -> str | None:
    """Returns the first id with different values; one that `grows` may have more of them here."""
    common, longest = sorted([len(model), len(here)])
    unequal = model.keys[:common] != here.keys[:common]
    index = int(unequal.argmax()) if unequal.any() else common
    if index == common and (common == longest or (grows and len(here) == longest)):
        return None
    shown = [_shown(side, index + 1) for side in (model, here)]
    return f"id {index + 1} is {shown[0]} for the model and {shown[1]} here"


def _shown(dictionary: Dictionary, id: int) -> str:
    if id > len(dictionary):
        return "no value"
    value = dictionary.value(id)
    return str(value) if dictionary.type == "hexadecimal" else repr(value)
