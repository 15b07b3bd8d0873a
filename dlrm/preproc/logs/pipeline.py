"""Stages of preprocessing with any engine, from raw logs to a complete dataset.

    unpack      compressed files, if there are any
    cut         one file into days of equally many lines, if there is one file
    count       read every line once: rows, the count of each value, unreadable lines
    dictionary  merge the counts, and give ids to the values that are frequent enough
    transform   read every line once more and write rows; those to be shuffled go into buckets
    shuffle     sort each bucket and write its rows
    describe    the report, the files that describe the dataset, and their checksums

Every finished task leaves a file, and every finished stage a marker, in a `WorkFolder`.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dlrm.data.clicks import layout
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.transform.dictionaries import dictionary_path, load_dictionary
from dlrm.data.transform.transform import Transform
from dlrm.manifest import write_manifest
from dlrm.preproc.logs import report
from dlrm.preproc.logs.counted_splits import (
    counted_splits,
    num_rows,
    numbered_splits,
)
from dlrm.preproc.logs.raw_log import Split
from dlrm.preproc.logs.source import LogSource
from dlrm.preproc.stages.dictionary_merge import (
    CountedColumn,
    write_lookups,
)
from dlrm.preproc.stages.pipeline import (
    finish_dataset,
    fit_counted,
    metadata_of,
    shared_out,
    transform,
)
from dlrm.preproc.stages.report import write
from dlrm.preproc.stages.shuffle_files import remove_unfinished
from dlrm.preproc.stages.source import Target
from dlrm.preproc.stages.stage import Run

UNLABELLED = "unlabelled"


def prepare(
    run: Run, files: Sequence[Path], num_days: int | None = None, unlabelled: Path | None = None
) -> dict[str, Any]:
    """Writes a whole dataset; returns its cardinalities, and the totals of each split.

    All days except the last are train/; of the n rows of the last day, the first floor(n/2) are
    test/, the others validation/.

    Args:
        run: the engine, the folder and the options.
        files: one file per day; or one for all days, with `num_days`.
        num_days: number of days of equally many lines to cut a single file into.
        unlabelled: a log without labels to transform as well.

    Raises:
        ValueError: the options do not match the days.
        TaskError: a line is unreadable, or a file cannot be written.
        EngineError: tasks could not be run.
    """
    if (facts := run.work.result("described")) is not None:
        return facts
    splits = counted_splits(run, files, num_days)
    last_day = splits[-1].day
    train_rows, all_rows = num_rows(splits, 0, last_day - 1), num_rows(splits)
    if not all_rows:
        raise ValueError("the input has no line that can be read; expected one or more")
    half = train_rows + (all_rows - train_rows) // 2
    fit(run, splits, run.work.output / layout.TRANSFORM)
    shuffled = run.options.output_ordering == "total_random"
    edges = (0, train_rows, half, all_rows)
    targets = [
        Target(name, first, last, shuffled and name == "train")
        for name, first, last in zip(layout.SPLITS, edges, edges[1:], strict=False)
    ]
    totals = transform(run, splits, targets, LogSource(run.options.log_format))
    if unlabelled is not None:
        totals |= _transform_unlabelled(run, unlabelled)
    return _describe(run, splits, totals)


def fit(run: Run, splits: Sequence[Split], directory: Path) -> None:
    """Makes dictionaries from the counts, and writes a transform."""
    shape, limit = run.options.log_format, run.options.parse_limit()
    first, last = run.options.dictionary_days or (0, splits[-1].day)
    counted = [i for i, split in enumerate(splits) if first <= split.day <= last]
    columns = [CountedColumn(limit=limit.of(i)) for i in range(shape.num_categorical)]
    rows = num_rows(splits, first, last)
    sizes = fit_counted(run, counted, rows, columns, directory)
    keys = [load_dictionary(dictionary_path(directory, i), size) for i, size in enumerate(sizes)]
    rule = run.options.numeric_transform
    Transform.from_logs(shape.num_numerical, keys, rule, limit).save_facts(directory)


def _transform_unlabelled(run: Run, path: Path) -> dict[str, dict[str, int]]:
    """Transforms a log without labels, in the order of its lines."""
    log_format = replace(run.options.log_format, labelled=False)
    splits = numbered_splits(run, UNLABELLED, [path], log_format)
    target = Target(UNLABELLED, 0, num_rows(splits), labelled=False)
    return transform(run, splits, [target], LogSource(log_format), UNLABELLED)


def _describe(
    run: Run, splits: Sequence[Split], totals: dict[str, dict[str, int]]
) -> dict[str, Any]:
    """Writes the files that describe a dataset; the manifest last."""
    output, options = run.work.output, run.options
    fitted = Transform.load(output / layout.TRANSFORM)
    spec = None
    if options.output_format == "split_binary":
        spec = FeatureSpec.default(
            output,
            fitted.num_numerical,
            fitted.cardinalities,
            layout.SPLITS,
            metadata=metadata_of(totals, layout.SPLITS),
        )
    with run.stage("describe"):
        if options.report:
            write(output, report.log_facts(run, splits, fitted, totals))
        return finish_dataset(run, spec, totals, fitted.cardinalities, layout.SPLITS)


def fit_days(run: Run, files: Sequence[Path], num_days: int | None = None) -> None:
    """Fits a transform only, as `--mode generate_models` does."""
    if run.work.result("described") is None:
        splits = counted_splits(run, files, num_days)
        fit(run, splits, run.work.output)
        remove_unfinished(run.work.output)
        write_manifest(run.work.output, "transform", rows=num_rows(splits))
        run.work.finish_output(True)


def transform_days(
    run: Run, files: Sequence[Path], half: str, directory: Path, labelled: bool
) -> dict[str, int]:
    """Applies a fitted transform to days or half their rows, as `--mode transform` does.

    Returns:
        Totals of the rows; see `transform_split`.
    """
    options, fitted = run.options, Transform.load(directory)
    shape = options.log_format
    if (fitted.num_numerical, fitted.num_categorical) != (
        shape.num_numerical,
        shape.num_categorical,
    ):
        raise ValueError(
            f"{directory}: made for {fitted.num_numerical} numerical and {fitted.num_categorical} "
            f"categorical columns, got --num_numerical {shape.num_numerical} --num_categorical "
            f"{shape.num_categorical}"
        )
    if (totals := run.work.result("described")) is not None:
        return totals
    run.work.output.mkdir(exist_ok=True)
    splits = numbered_splits(run, "input", files, replace(shape, labelled=labelled))
    rows = num_rows(splits)
    first = rows // 2 if half == "second" else 0
    last = rows // 2 if half == "first" else rows
    with run.stage("dictionary") as stage:
        task = partial(
            write_lookups, transform=str(directory), folder=str(run.work.folder("lookups"))
        )
        stage.tasks("lookups", task, shared_out(range(shape.num_categorical)))
    target = Target("", first, last, options.output_ordering == "total_random", labelled)
    used = [
        split for split in splits if split.first_row < last and split.first_row + split.rows > first
    ]
    source = LogSource(replace(shape, labelled=labelled))
    totals = transform(run, used, [target], source, directory=directory)[""]
    remove_unfinished(run.work.output)
    write_manifest(run.work.output, "split", rows=target.rows)
    run.work.finish_output(totals)
    return totals
