"""The stages that all sources share, on any engine.

    dictionary  merge the counts, and give ids to the values that are frequent enough
    transform   read every row again and write it; rows to be shuffled go into buckets
    shuffle     sort each bucket and write its rows
    describe    write the files that describe the dataset, and their checksums

Every finished task leaves a file, and every finished stage a marker, in a `WorkFolder`.
"""

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.manifest import checksum
from dlrm.preproc.execution.engines import TaskError
from dlrm.preproc.stages.column_statistics import Periods
from dlrm.preproc.stages.dictionary_merge import (
    CountedColumn,
    FitJob,
    fit_columns,
    merge_bucket,
)
from dlrm.preproc.stages.shuffle_files import bucket_files, remove_unfinished, total_counts
from dlrm.preproc.stages.source import Source, Target
from dlrm.preproc.stages.stage import Run
from dlrm.preproc.stages.tasks import Job, create_files, transform_split, write_bucket

_BUCKET_ROWS = 1 << 19  # sorted by one task: 60 MB of Criteo's rows in packed form
_BUCKET_IDS = 1 << 22  # of list fields: 100 MB with weights and indices
_GROUPS = 12


def input_facts(files: Sequence[Path]) -> dict[str, str]:
    """Returns facts about input files, to detect changes; see `Split` for the rest."""
    facts = {}
    for path in files:
        status = path.stat()
        facts[str(path.resolve())] = f"of {status.st_size} bytes, changed at {status.st_mtime_ns}"
    return facts


def count_buckets(run: Run, size: int, bucket_bytes: int) -> int:
    """Returns the number of buckets of values, such that one task can merge a bucket's counts.

    Args:
        run: remembers the number, since a resumed run may have other cores.
        size: bytes of the input.
        bucket_bytes: bytes of input whose counts one task can merge, whatever repeats.
    """
    buckets = run.work.result("count.buckets")
    if buckets is None:
        buckets = max(run.engine.cores, -(-size // bucket_bytes))
        run.work.finish("count.buckets", buckets)
    return buckets


def fit_counted(
    run: Run,
    counted: Sequence[int],
    rows: int,
    columns: Sequence[CountedColumn],
    directory: Path,
) -> list[Any]:
    """Makes dictionaries and bins from counts; returns the results of `fit_columns` for each.

    Args:
        run: the engine and the folder, which has the counts in `count_buckets`.
        counted: numbers of the parts whose counts are added up.
        rows: number of their rows.
        columns: the product of each column.
        directory: directory of the dictionaries.
    """
    work = run.work
    directory.mkdir(parents=True, exist_ok=True)
    with run.stage("dictionary") as stage:
        stage.rows = rows
        counts = work.folder("counts")
        merge = partial(
            merge_bucket,
            sources=[str(counts / str(i)) for i in counted],
            limits=[column.limit for column in columns],
            folder=str(work.folder("merged")),
        )
        if (merged := work.result("merged")) is None:
            merged = stage.tasks("merge", merge, range(work.result("count.buckets")))
            work.finish("merged", merged)
        _remove(counts)
        job = FitJob(
            str(work.folder("merged")),
            [result["kept"] for result in merged],
            str(directory),
            str(work.folder("lookups")),
            columns,
        )
        if (fitted := work.result("fitted")) is None:
            groups = shared_out(range(len(columns)))
            parts = stage.tasks("fit", partial(fit_columns, job=job), groups)
            by_column = {int(i): found for part in parts for i, found in part.items()}
            fitted = [by_column[i] for i in range(len(columns))]
            work.finish("fitted", fitted)
        _remove(work.folder("merged"))
    return fitted


def transform(
    run: Run,
    splits: Sequence[Any],
    targets: list[Target],
    source: Source,
    name: str = "transform",
    directory: Path | None = None,
    extra: dict[str, np.dtype] | None = None,
    starts: list[list[int]] | None = None,
    periods: Periods | None = None,
    list_starts: list[list[list[int]]] | None = None,
) -> dict[str, dict[str, int]]:
    """Transforms the rows of targets into the files of the output.

    Args:
        run: the engine, the folder and the options.
        splits: the splits, which know their rows.
        targets: destinations of rows; at most one of them is shuffled.
        source: reads the splits.
        name: name of the stage.
        directory: the fitted transform; by default that of the output.
        extra: columns besides the model's inputs.
        starts: for each split, its first row in each target; None if rows are ranges.
        periods: periods that the report compares; None for rows without a time.
        list_starts: for each split, its first id in each target and list field; None for rows
            without lists.

    Returns:
        For each target: rows, clicks, and so on, as `transform_split` counts them.
    """
    work = run.work
    options = run.options
    job = Job(
        source,
        str(directory or work.output / layout.TRANSFORM),
        str(work.folder("lookups")),
        str(work.output),
        options.output_format,
        targets,
        str(work.folder(f"{name}.rows")),
        _shuffle_buckets(run, name, targets),
        options.seed,
        options.quarantine,
        str(work.folder(f"{name}.statistics")) if options.report else None,
        extra or {},
        starts,
        list_starts or [],
        periods,
    )
    with run.stage(name) as stage:
        create_files(job)
        rows, sizes = [split.rows for split in splits], [split.size for split in splits]
        task = partial(transform_split, job=job)
        parts = stage.tasks(name, task, list(enumerate(splits)), sizes, rows)
        stage.rows, stage.size = sum(rows), sum(sizes)
    totals = {
        target.name: _sum([part.get(target.name, {}) for part in parts]) for target in targets
    }
    for target in targets:
        if totals[target.name].get("rows", 0) != target.rows:
            raise TaskError(
                f"{target.name}: expected {target.rows} rows, as were counted before, got "
                f"{totals[target.name].get('rows', 0)}: an input file has changed meanwhile"
            )
    for target in targets:
        if target.shuffled and target.rows:
            _shuffle(run, target, job)
    return totals


def _shuffle_buckets(run: Run, name: str, targets: Sequence[Target]) -> int:
    """Returns the number of buckets of rows, such that one task can sort a bucket."""
    if (buckets := run.work.result(f"{name}.buckets")) is None:
        rows = max(target.rows for target in targets)
        num_ids = max(sum(target.num_ids) for target in targets)
        least = max(-(-rows // _BUCKET_ROWS), -(-num_ids // _BUCKET_IDS))
        buckets = max(2 * run.engine.cores, least)
        run.work.finish(f"{name}.buckets", buckets)
    return buckets


def _shuffle(run: Run, target: Target, job: Job) -> None:
    with run.stage("shuffle") as stage:
        stage.rows = target.rows
        if run.work.result("shuffled") is None:
            sources = bucket_files(Path(job.shuffle))
            counts = total_counts(sources)
            rows, first = counts[:, 0].tolist(), (np.cumsum(counts, axis=0) - counts).tolist()
            assert tuple(counts.sum(axis=0).tolist()) == (target.rows, *target.num_ids)
            width = sum(dtype.itemsize for dtype in job.files(target).values())
            stage.tasks(
                "shuffle",
                partial(write_bucket, sources=[str(path) for path in sources], job=job),
                [(bucket, row, ids) for bucket, (row, *ids) in enumerate(first)],
                [width * count for count in rows],
                rows,
            )
            run.work.finish("shuffled", True)
    _remove(Path(job.shuffle))


def _sum(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    names = dict.fromkeys(name for part in counts for name in part)
    return {name: sum(part.get(name, 0) for part in counts) for name in names}


def _remove(folder: Path) -> None:
    """Removes intermediate files of tasks, once the stage that reads them is finished."""
    shutil.rmtree(folder, ignore_errors=True)


def metadata_of(totals: dict[str, dict[str, int]], names: Sequence[str]) -> dict[str, Any]:
    """Returns the entries of a feature specification besides the features, for each split."""
    return {
        key: {name: totals[name].get(count, 0) for name in names}
        for key, count in (("clicks", "clicks"), ("numerical_values_raised_to_1", "clamped"))
    }


def finish_dataset(
    run: Run,
    spec: FeatureSpec | None,
    totals: dict[str, dict[str, int]],
    cardinalities: Sequence[int],
    names: Sequence[str],
    origin: dict[str, Any] | None = None,
    **facts: Any,
) -> dict[str, Any]:
    """Writes the specification and, last, the manifest; returns cardinalities, totals and facts.

    Args:
        run: the engine, the folder and the options.
        spec: describes the features; None if the format has none.
        totals: totals of each split.
        cardinalities: rows of each table.
        names: names of the dataset's splits.
        origin: origin of the rows, for the manifest, if files do not tell it.
        facts: facts to return as well, also by a run that finds the dataset complete.
    """
    output = run.work.output
    if spec is not None:
        spec.save()
    if spec is None or not spec.lists:  # readers of this file alone expect one id per row
        layout.write_model_size(output, cardinalities)
    remove_unfinished(output)
    rows = {name: totals[name].get("rows", 0) for name in names}
    made_of = run.options.manifest_facts() | (origin or {})
    layout.write_dataset_manifest(output, rows, cardinalities, made_of, _checksums(run))
    result = {"totals": totals, "cardinalities": list(cardinalities)} | facts
    run.work.finish_output(result)
    return result


def _checksums(run: Run) -> dict[str, str]:
    """Returns checksums of every large file, computed by the engine."""
    output = run.work.output
    names = [path.relative_to(output).as_posix() for path in sorted(output.rglob("*.bin"))]
    task = partial(_checksums_of, folder=str(output))
    parts = run.work.run(run.engine, "checksums", task, shared_out(names))
    return {name: crc for part in parts for name, crc in part.items()}


def _checksums_of(names: list[str], folder: str) -> dict[str, Any]:
    return {name: checksum(Path(folder, name)) for name in names}


def shared_out(items: Sequence[Any]) -> list[list[Any]]:
    """Distributes small items among tasks, since each task has overhead on Spark."""
    return [part for i in range(_GROUPS) if (part := list(items[i::_GROUPS]))]
