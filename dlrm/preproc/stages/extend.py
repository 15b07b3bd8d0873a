"""Fits a transform to rows that extend the dictionaries of a parent.

Values of the parent keep their ids. A value without one gets the next id if it occurs as often as
its frequency limit among the new training rows.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data.transform.dictionaries import Dictionary, arrays_of, open_dictionary
from dlrm.data.transform.schema import Schema
from dlrm.data.transform.transform import Transform
from dlrm.data.transform.values import canonical_text
from dlrm.files import staged_file
from dlrm.preproc.stages.counting import counted_columns
from dlrm.preproc.stages.dictionary_merge import CountedColumn, Known, write_lookups
from dlrm.preproc.stages.division import TRAIN
from dlrm.preproc.stages.fitting import TransformFacts, fit_counted, numbers_of, shared_out
from dlrm.preproc.stages.parent import Parent
from dlrm.preproc.stages.stage import PreparationRun

_NEVER = 1 << 62  # a frequency limit


def lookups_of(run: PreparationRun, name: str, transform: Path) -> Path:
    """Returns the folder of a transform's lookups, which tasks write once in a run."""
    folder = run.work.folder(name)
    places = range(len(run.options.schema.dictionaries()))
    task = partial(write_lookups, transform=str(transform), folder=str(folder))

    def write() -> bool:
        with run.stage(name) as stage:
            stage.tasks(name, task, shared_out(places))
        return True

    run.work.once(name, write)
    return folder


def extend(
    run: PreparationRun,
    counted: Sequence[dict[str, Any]],
    directory: Path,
    facts: TransformFacts,
) -> Transform:
    """Writes the transform of an extension; see `dlrm.preproc.stages.fitting.fit`.

    Raises:
        ValueError: no row is positive, or the parent does not have a label of the rows.
    """
    parent = run.parent
    assert parent is not None
    schema: Schema = run.options.schema
    before, keeps = parent.fitted.dictionaries, parent.config.numerics == "keep"
    num_rows = sum(result["rows"][TRAIN] for result in counted)
    if not sum(result["positives"][TRAIN] for result in counted):
        raise ValueError(
            f"--extend {parent.config.extend}: expected rows with label 1 among the {num_rows} "
            "training rows, got none"
        )
    _check_labels(parent, schema, facts.negatives)
    known = Known(
        str(lookups_of(run, "parent", parent.transform)),
        [0 if dictionary.kind == "id" else len(dictionary) for dictionary in before],
    )
    grown = run.work.folder("grown")
    columns = _columns(schema, known.sizes, keeps)
    results = fit_counted(run, len(counted), num_rows, columns, grown, known)
    directory.mkdir(parents=True, exist_ok=True)
    dictionaries = []
    for place, (old, result) in enumerate(zip(before, results, strict=False)):
        if old.kind == "id":
            dictionaries.append(Dictionary.load(directory, place, max(len(old), result), "id"))
            continue
        new = None if result is None else Dictionary.load(grown, place, result, old.kind)
        _write(directory, place, old, new)
        size = len(old) + (result or 0)
        dictionaries.append(Dictionary.load(directory, place, size, old.kind))
    transform = Transform(
        facts.schema,
        parent.fitted.numerical if keeps else numbers_of(run, counted, results),
        dictionaries,
        parent.fitted.kinds,
        parent.fitted.negatives,
        facts.columns,
        facts.keep_negatives,
    )
    transform.save_facts(directory)
    new_values = sum(map(len, dictionaries)) - sum(map(len, before))
    run.say(f"{'extended:':<12}{new_values:>14,} new values in {len(dictionaries)} dictionaries")
    return transform


def _check_labels(parent: Parent, schema: Schema, negatives: Sequence[str] | None) -> None:
    """Raises ValueError if rows have a label that the parent does not have."""
    label, known = schema.label, parent.fitted.known_labels
    if not known or label.any_negative:
        return
    forms = set(map(canonical_text, known))
    if others := [text for text in negatives or () if canonical_text(text) not in forms]:
        raise ValueError(
            f"column {label.column}: expected the labels of --extend {parent.config.extend}, "
            f"{' or '.join(map(repr, known))}, got {others[0]!r}"
        )


def _columns(schema: Schema, sizes: Sequence[int], keeps: bool) -> list[CountedColumn]:
    """Returns what to fit: ids beside those of `sizes` values, and bins unless these are kept."""
    columns = counted_columns(schema)
    for place, fields in enumerate(schema.dictionaries().values()):
        most = columns[place].most
        if any(field.hash_buckets for field in fields):  # as buckets follow the dictionary
            columns[place] = CountedColumn("kept", _NEVER)
        elif most is not None:
            columns[place] = columns[place]._replace(most=max(most - sizes[place], 0))
    if keeps:
        others = len(columns) - len(sizes)
        columns[len(sizes) :] = [CountedColumn("kept", _NEVER)] * others
    return columns


def _write(directory: Path, place: int, old: Dictionary, new: Dictionary | None) -> None:
    """Writes the files of a dictionary: the values of the parent, and then new ones."""
    further = {} if new is None else arrays_of(new, place)
    for name, array in arrays_of(old, place).items():
        more = further.get(name, array[:0])
        if name.startswith("ends") and len(array):
            more = more + array[-1]
        with staged_file(directory / name) as partial_file:
            dtype = max(array.dtype, more.dtype, key=lambda dtype: dtype.itemsize)
            written = open_dictionary(partial_file, dtype, len(array) + len(more))
            np.concatenate([array, more], out=written)
