"""Fits a transform to counted rows: the stage "dictionary"."""

import shutil
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlrm.data.transform.cells import NAN
from dlrm.data.transform.dictionaries import Dictionary
from dlrm.data.transform.numbers import Fitted, Sums
from dlrm.data.transform.schema import Schema
from dlrm.data.transform.transform import Transform
from dlrm.data.transform.values import NUMBER, TEXT, canonical_text
from dlrm.preproc.stages.counting import BETWEEN, counted_columns
from dlrm.preproc.stages.dictionary_merge import (
    CountedColumn,
    FitJob,
    Known,
    fit_columns,
    merge_bucket,
)
from dlrm.preproc.stages.division import TRAIN
from dlrm.preproc.stages.stage import PreparationRun

_MOST_NEGATIVES = 100  # labels other than the positive one that the transform keeps
_MOST_LISTED = 10
_GROUPS = 12


class TransformFacts(NamedTuple):
    """Parts of a transform that are not fitted to values; see `Transform`."""

    schema: Schema
    columns: Sequence[str]
    negatives: Sequence[str] | None
    keep_negatives: float
    kinds: Sequence[str]


def facts_of(
    run: PreparationRun,
    counted: Sequence[dict[str, Any]],
    columns: Sequence[str] = (),
    negatives: Sequence[str] | None = None,
) -> TransformFacts:
    """Returns what the transform of counted rows holds besides what is fitted."""
    options = run.options
    schema = options.remembered_schema if columns else options.schema  # of a CSV
    kept = options.division.keep_negatives
    return TransformFacts(schema, columns, negatives, kept, _kinds(run, counted))


def fit(
    run: PreparationRun, counted: Sequence[dict[str, Any]], directory: Path, facts: TransformFacts
) -> Transform:
    """Fits dictionaries, bins, means and deviations to the training rows, and writes them."""
    schema: Schema = run.options.schema
    num_rows = sum(result["rows"][TRAIN] for result in counted)
    results = fit_counted(run, len(counted), num_rows, counted_columns(schema), directory)
    dictionaries = [
        Dictionary.load(directory, place, results[place], fields[0].type)
        for place, fields in enumerate(schema.dictionaries().values())
    ]
    fitted = numbers_of(run, counted, results)
    transform = Transform(
        facts.schema,
        fitted,
        dictionaries,
        facts.kinds,
        facts.negatives,
        facts.columns,
        facts.keep_negatives,
    )
    transform.save_facts(directory)
    return transform


def numbers_of(
    run: PreparationRun,
    counted: Sequence[dict[str, Any]],
    results: Sequence[Any],
) -> list[Fitted]:
    """Returns the fitted statistics of numerical features.

    `counted` and `results` are what `count` and `fit_counted` return.
    """
    schema: Schema = run.options.schema
    bins = iter(results[len(schema.dictionaries()) :])
    fitted = []
    for i, field in enumerate(schema.numerical):
        total = sum((Sums.from_list(result["sums"][i]) for result in counted), Sums())
        found = next(bins) if field.fitted_bins else ()
        edges = [np.array([float.fromhex(value) for value in values]) for values in found]
        try:
            fitted.append(field.rule.fit(total, *edges))
        except OverflowError as error:
            raise ValueError(f"column {field.column}: {error}") from None
    return fitted


def negatives_of(schema: Schema, counted: Sequence[dict[str, Any]]) -> tuple[str, ...] | None:
    """Returns the labels that count as 0, after checking them against the schema."""
    label, counts = schema.label, label_counts(counted)
    if not label.positives:
        return None
    positive = sum(sum(result["positives"]) for result in counted)
    shown = ", ".join(map(repr, sorted(counts)[:_MOST_LISTED]))
    if not positive:
        raise ValueError(
            f"column {label.column}: no row has the label "
            f"{' or '.join(map(repr, label.positives))}; found {shown}"
        )
    forms = set(map(canonical_text, label.positives))
    others = sorted(text for text in counts if canonical_text(text) not in forms)
    expected = label.negative
    if expected is None and len(others) > 1 and not label.any_negative:
        known = " or ".join(map(repr, label.positives))
        raise ValueError(
            f"column {label.column}: expected two values, {known} and another, got {shown}; label: "
            "{negative: [...]} in the schema names those that count as 0"
        )
    kept = tuple(expected or others)
    return kept if 0 < len(kept) <= _MOST_NEGATIVES else None


def label_counts(counted: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Returns the count of each label, if the schema names the positive one."""
    labels = Counter[str]()
    for result in counted:
        labels.update(result["labels"])
    return dict(sorted(labels.items(), key=lambda item: (-item[1], item[0])))


def _kinds(run: PreparationRun, counted: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the kind of each categorical field's values: numbers, or anything else as text."""
    schema: Schema = run.options.schema
    of_json = set(run.work.result("numbers") or ())
    kinds = []
    for place, field in enumerate(schema.categorical):
        kinds_met = set().union(*(result["kinds"][place] for result in counted))
        kinds.append(NUMBER if kinds_met == {NUMBER} or field.column in of_json else TEXT)
    return kinds


def fit_counted(
    run: PreparationRun,
    parts: int,
    rows: int,
    columns: Sequence[CountedColumn],
    directory: Path,
    known: Known | None = None,
) -> list[Any]:
    """Makes dictionaries and bins from counts; returns the results of `fit_columns` for each.

    Args:
        run: the engine and the folder, which has the counts.
        parts: number of the parts whose counts are added up.
        columns: the product of each column.
        directory: directory of the dictionaries, and of the lookups if there are `known` values,
            which otherwise are in a folder of the run.
        known: values of the parent; see `merge_bucket`.
    """
    work = run.work
    directory.mkdir(parents=True, exist_ok=True)
    with run.stage("dictionary") as stage:
        stage.rows = rows
        counts = work.folder("counts")
        merge = partial(
            merge_bucket,
            sources=[str(counts / str(i)) for i in range(parts)],
            limits=[column.limit for column in columns],
            folder=str(work.folder("merged")),
            known=known,
        )
        buckets = range(work.result("count.buckets"))
        merged = work.once("merged", lambda: stage.tasks("merge", merge, buckets))
        shutil.rmtree(counts, ignore_errors=True)
        job = FitJob(
            str(work.folder("merged")),
            [result["kept"] for result in merged],
            str(directory),
            str(work.folder("lookups") if known is None else directory),
            _without_nan(run.options.schema, columns, merged, known),
        )

        def fit_all() -> list[Any]:
            groups = shared_out(range(len(columns)))
            found = stage.tasks("fit", partial(fit_columns, job=job), groups)
            by_column = {int(i): outcome for part in found for i, outcome in part.items()}
            return [by_column[i] for i in range(len(columns))]

        fitted = work.once("fitted", fit_all)
        shutil.rmtree(work.folder("merged"), ignore_errors=True)
        work.fetch(directory)
    return fitted


def _without_nan(
    schema: Schema,
    columns: Sequence[CountedColumn],
    merged: Sequence[dict[str, Any]],
    known: Known | None,
) -> list[CountedColumn]:
    """Returns the columns without NaN in fields of numbers, which typed data have as missing.

    Once the dictionary has other texts, NaN is a value beside them.
    """
    nan, missing = f"({'|'.join(NAN)})", dict[str, str]()
    for place, fields in enumerate(schema.dictionaries().values()):
        found = sum(bucket["nan"][place] for bucket in merged)
        others = sum(bucket["kept"][place][0] for bucket in merged) - found
        grows = known is not None and known.sizes[place] > 0
        numbers = all(bucket["numbers"][place] for bucket in merged)
        if found and others > 0 and numbers and columns[place].most != 0 and not grows:
            missing |= dict.fromkeys((field.column for field in fields), f"^{nan}$")
    for cross in schema.crosses:
        ends = ["^", *[BETWEEN] * (len(cross.fields) - 1), "$"]
        around = zip(cross.fields, ends[:-1], ends[1:], strict=True)
        if patterns := [f"{a}{nan}{b}" for name, a, b in around if name in missing]:
            missing[cross.column] = "|".join(patterns)
    names = [fields[0].column for fields in schema.dictionaries().values()]
    of_bins = columns[len(names) :]
    made = zip(columns, names, strict=False)
    return [*(column._replace(missing=missing.get(name)) for column, name in made), *of_bins]


def shared_out(items: Sequence[Any]) -> list[list[Any]]:
    """Distributes small items among tasks, since each task has overhead on Spark."""
    return [part for i in range(_GROUPS) if (part := list(items[i::_GROUPS]))]
