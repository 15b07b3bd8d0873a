"""Says where two fitted transforms differ, so that no model meets ids that mean other values.

A checkpoint keeps the transform of its training data. Every command that brings a checkpoint and a
dataset together calls `compare_transforms`, which knows logs and CSV. Only numpy and the standard
library are imported.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.transform.csv_transform import CsvTransform
from dlrm.data.transform.transform import Transform
from dlrm.data.verification import Verifier
from dlrm.documents import read_json

_MOST_FIELDS, _MOST_IDS = 3, 2  # that a message names
_BLOCK = 1 << 20  # numbers of a dictionary that are compared at a time


def compare_transforms(
    checkpoint: str | os.PathLike,
    dataset: str | os.PathLike | None,
    allowed: bool = False,
    verify_data: str = "first",
    allow_links: bool = False,
) -> str | None:
    """Compares the transform of a checkpoint with that of a dataset, both in their `transform/`.

    Dictionaries whose checksums agree are not read.

    Args:
        checkpoint: a model.
        dataset: what it meets; None is data without files.
        allowed: go on where they differ.
        verify_data: when the dataset's transform is compared with its checksums; see `Verifier`.
        allow_links: whether the dataset's files may be symbolic links out of it.

    Returns:
        A line that says what could not be compared or is allowed to differ, or None.

    Raises:
        ValueError: they differ, and how; or a file of one is damaged, which is named.
        FileNotFoundError: a file of a transform is missing.
    """
    model = _load(Path(checkpoint), "checkpoint", "always", None)
    here = None if dataset is None else _load(Path(dataset), layout.KIND, verify_data, allow_links)
    if model is None:
        return None
    if dataset is None or here is None:
        return (
            f"note: {dataset or 'the data'} has no fitted transform, so nothing tells whether its "
            f"numbers mean what they do for {checkpoint}"
        )
    found = list(_differences(*model, *here))
    if not found:
        return None
    shown = "; ".join(found[:_MOST_FIELDS])
    if (more := len(found) - _MOST_FIELDS) > 0:
        shown += f"; {more} more field{'s' * (more > 1)} differ{'s' * (more == 1)}"
    differ = f"{dataset}: its transform is not that of {checkpoint}"
    if allowed:
        return f"note: {differ} ({shown}); --allow_other_transform goes on"
    raise ValueError(
        f"{differ}, so the same ids and numbers mean other values: {shown}. "
        "--allow_other_transform goes on where the tables have the same sizes"
    )


_Loaded = tuple[Transform | CsvTransform, list[str]]  # with the checksums of the dictionaries


def _load(directory: Path, kind: str, verify_data: str, allow_links: bool | None) -> _Loaded | None:
    """Reads `transform/` as its manifest has it; returns None where there is none."""
    folder = directory / layout.TRANSFORM
    if not folder.is_dir():
        return None
    Verifier(directory, kind, verify_data, allow_links).check_names(layout.TRANSFORM)
    try:
        return CsvTransform.load(directory), []
    except FileNotFoundError:
        transform = Transform.load(folder)
    facts = read_json(folder / "transform.json")
    return transform, facts.get("dictionary_crc32", [])


def _differences(
    model: Transform | CsvTransform,
    model_checksums: list[str],
    here: Transform | CsvTransform,
    checksums: list[str],
) -> Iterator[str]:
    """Yields what differs, a field each."""
    if isinstance(model, CsvTransform) and isinstance(here, CsvTransform):
        yield from _of_csv(model, here)
    elif isinstance(model, Transform) and isinstance(here, Transform):
        yield from _unequal("numeric transform", model.numeric_transform, here.numeric_transform)
        yield from _unequal("numerical columns", model.num_numerical, here.num_numerical)
        yield from _unequal("categorical columns", model.num_categorical, here.num_categorical)
        known = list(zip_longest(model_checksums, checksums))
        for index, pair in enumerate(zip(model.dictionaries, here.dictionaries, strict=False)):
            theirs, ours = known[index] if index < len(known) else (None, None)
            if theirs is None or theirs != ours:
                yield from _of_dictionaries(f"categorical {index}", *pair, _hexadecimal)
    else:
        kinds = {True: "columns of a CSV", False: "fields of a log"}
        yield from _unequal("kind", *(kinds[isinstance(t, CsvTransform)] for t in (model, here)))


def _of_csv(model: CsvTransform, here: CsvTransform) -> Iterator[str]:
    yield from _unequal("numeric transform", model.numeric_transform, here.numeric_transform)
    missing = [", ".join(map(repr, sorted(set(t.missing_values)))) for t in (model, here)]
    yield from _unequal("missing values", *(text or "none" for text in missing))
    if model.label is not None and here.label is not None:  # older ones do not know theirs
        labels = [
            f"{t.label!r}" + (f" being {t.positive!r}" if t.positive is not None else "")
            for t in (model, here)
        ]
        yield from _unequal("label", *labels)
    yield from _of_columns("numerical", list(model.scales), list(here.scales))
    for name in [name for name in model.scales if name in here.scales]:
        scales = ["mean {!r}, deviation {!r}".format(*t.scales[name]) for t in (model, here)]
        yield from _unequal(f"numerical {name}", *scales)
    yield from _of_columns("categorical", list(model.dictionaries), list(here.dictionaries))
    for name in [name for name in model.dictionaries if name in here.dictionaries]:
        theirs, ours = model.dictionaries[name], here.dictionaries[name]
        if theirs != ours:
            yield from _of_dictionaries(f"categorical {name}", theirs, ours, repr)


def _hexadecimal(number: np.integer) -> str:
    return f"{number:08x}"


def _unequal(field: str, model: Any, here: Any) -> Iterator[str]:
    if model != here:
        yield f"{field}: {model} for the model and {here} here"


def _of_columns(kind: str, model: Sequence[str], here: Sequence[str]) -> Iterator[str]:
    """The columns are the model's inputs in their order."""
    for index, (theirs, ours) in enumerate(zip_longest(model, here, fillvalue="no column")):
        yield from _unequal(f"{kind} {index}", theirs, ours)


def _of_dictionaries(
    field: str,
    model: np.ndarray | Sequence[str],
    here: np.ndarray | Sequence[str],
    show: Callable[[Any], str],
) -> Iterator[str]:
    """Yields the first ids that mean other values, on one line, or nothing."""
    common, longest = sorted([len(model), len(here)])
    places: list[int] = []
    for begin in range(0, common, _BLOCK):
        end = min(begin + _BLOCK, common)
        unequal = _objects(model[begin:end]) != _objects(here[begin:end])
        places += (begin + np.flatnonzero(unequal)[:_MOST_IDS]).tolist()
        if len(places) >= _MOST_IDS:
            break
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
    """Values as an array; numpy's own strings have no zeros at their end."""
    return values if isinstance(values, np.ndarray) else np.array(values, object)
