"""The stages that all sources share, on any engine.

    count       read every row once: its split, values of fields, statistics to fit, bad rows
    dictionary  merge the counts, give ids to values and find the edges of bins
    transform   read every row again and write it; rows to be shuffled go into buckets
    shuffle     sort each bucket and write its rows
    describe    write the report, the files that describe the dataset, and their checksums

Every finished task leaves a file, and every finished stage a marker, in a `WorkFolder`.
"""

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.transform.rows import extra_dtypes
from dlrm.data.transform.transform import Transform
from dlrm.limits import MAX_TASKS
from dlrm.manifest import checksum
from dlrm.preproc.execution.engines import TaskError
from dlrm.preproc.stages import report
from dlrm.preproc.stages.column_statistics import Periods
from dlrm.preproc.stages.counting import CountJob, count_part
from dlrm.preproc.stages.dataset_files import TransformJob
from dlrm.preproc.stages.division import TRAIN, Divided, Divider, Ranges
from dlrm.preproc.stages.extend import extend, lookups_of
from dlrm.preproc.stages.fitting import (
    facts_of,
    fit,
    label_counts,
    negatives_of,
    shared_out,
)
from dlrm.preproc.stages.shuffle_files import INDEX, bucket_files, remove_unfinished, total_counts
from dlrm.preproc.stages.source import Source, Target
from dlrm.preproc.stages.stage import QUARANTINE, PreparationRun
from dlrm.preproc.stages.tasks import create_files, transform_split, write_bucket
from dlrm.remote.cache import with_uris

_BUCKET_ROWS = 1 << 19  # sorted by one task: 60 MB of Criteo's rows in packed form
_BUCKET_IDS = 1 << 22  # of list fields: 100 MB with weights and indices


def input_facts(files: Sequence[Path]) -> dict[str, str]:
    """Returns facts about input files, to detect changes; see `Split` for the rest."""
    facts = {}
    for path in files:
        status = path.stat()
        facts[str(path.resolve())] = f"of {status.st_size} bytes, changed at {status.st_mtime_ns}"
    return facts


def part_bytes(
    run: PreparationRun, size: int, limits: tuple[int, int], per_core: int, of: str = ""
) -> int:
    """Returns the approximate bytes of a part of the input, which one task reads.

    Args:
        run: has the flag `--split_bytes`, which decides.
        limits: the smallest and the largest part otherwise.
        per_core: parts for each core, as far as these limits allow.
        of: words about the input, for messages.
    """
    given = run.options.split_bytes
    if given and size > MAX_TASKS * given:
        raise ValueError(
            f"--split_bytes {given}: expected {-(-size // MAX_TASKS)} or more, which cuts {size} "
            f"bytes{of} into {MAX_TASKS} tasks"
        )
    smallest, largest = limits
    return given or min(max(size // (per_core * run.engine.cores), smallest), largest)


def count(
    run: PreparationRun,
    source: Source,
    divider: Divider | Ranges,
    parts: Sequence[Any],
    name: str = "count",
    bucket_bytes: int | None = None,
) -> list[dict[str, Any]]:
    """Reads every row once; returns the results of `count_part`.

    With `bucket_bytes`, of input whose counts one task can merge, whatever repeats, the values of
    training rows are counted as well.
    """
    sizes, folder, buckets = [part.size for part in parts], None, 1
    if bucket_bytes is not None:
        folder, least = str(run.work.folder("counts")), -(-sum(sizes) // bucket_bytes)
        # Remembered, since a resumed run may have other cores.
        buckets = run.work.once("count.buckets", lambda: max(run.engine.cores, least))
    with run.stage(name) as stage:
        options = run.options
        job = CountJob(source, divider, folder, buckets, options.quarantine, options.seed)
        items = list(enumerate(parts))
        counted = stage.tasks(name.replace(" ", "."), partial(count_part, job=job), items, sizes)
        stage.rows, stage.size = sum(sum(facts["rows"]) for facts in counted), sum(sizes)
    return counted


def quarantine(
    run: PreparationRun, parts: Sequence[Any], counted: Sequence[dict[str, Any]]
) -> None:
    """Writes the rows that were left out, one file per source; refuses if they are too many.

    A line has the location of the row, the reason, and its text.
    """
    if not run.options.quarantine:
        return
    rejected = [facts["rejected"] for facts in counted]
    bad = sum(map(len, rejected))
    total = bad + sum(sum(facts["rows"]) + facts["dropped"] for facts in counted)
    if bad > run.options.max_bad_lines * total:
        part, rows = next((p, r) for p, r in zip(parts, rejected, strict=True) if r)
        raise TaskError(
            f"{bad} of {total} rows cannot be read, a share above --max_bad_lines "
            f"{run.options.max_bad_lines}; the first: {part.where(rows[0][0])}, {rows[0][1]}"
        )
    folder = run.work.output / QUARANTINE
    folder.mkdir(parents=True, exist_ok=True)
    texts: dict[str, list[str]] = {}
    for part, rows in zip(parts, rejected, strict=True):
        for row, why, text in rows:
            lines = texts.setdefault(part.source_of(row), [])
            lines.append(f"{with_uris(part.where(row))}\t{why}\t{text}\n")
    names = [Path(source).name for source in texts]
    if len(set(names)) < len(names):
        names = [f"{number}.{name}" for number, name in enumerate(names)]
    for name, lines in zip(names, texts.values(), strict=True):
        (folder / f"{name}.tsv").write_text("".join(lines), encoding="utf-8")
    run.say(f"{'quarantined:':<12}{bad:>14,} rows")


def write_dataset(
    run: PreparationRun,
    divided: Divided,
    files: report.Files,
    columns: Sequence[str] = (),
    origin: dict[str, Any] | None = None,
    more: Callable[[], dict[str, dict[str, int]]] | None = None,
) -> dict[str, Any]:
    """Fits the transform to counted rows, and writes the dataset.

    Args:
        files: names of the files, for the report.
        columns: names of all columns of a CSV; none for others.
        origin: origin of the rows, for the manifest, if files do not tell it.
        more: transforms further rows, once there is a transform, and returns their totals.

    Returns:
        Cardinalities, `totals` of each split, and `labels` with their counts.
    """
    options, output, counted = run.options, run.work.output, divided.counted
    negatives = negatives_of(options.schema, counted)
    if isinstance(divided.divider, Divider):
        _check_splits(divided.rows.sum(axis=0), divided.divider)
    facts = facts_of(run, counted, columns, negatives)
    fit_rows = fit if run.parent is None else extend
    fitted = fit_rows(run, counted, output / layout.TRANSFORM, facts)
    run.work.share(output / layout.TRANSFORM)
    if run.parent is not None:
        lookups_of(run, "lookups", output / layout.TRANSFORM)
    shuffled = options.output_ordering == "total_random"
    targets = [divided.target(split, shuffled and split == TRAIN) for split in divided.splits]
    names = [target.name for target in targets]
    periods = report.periods_of(counted, fitted.num_numerical) if options.report else None
    totals = transform(run, divided, targets, periods=periods)
    totals |= more() if more is not None else {}
    with run.stage("describe"):
        if options.report:
            report.write(output, report.facts(run, files, divided, periods, fitted, totals))
        labels = label_counts(counted)
        spec = _specification(run, fitted, totals, names)
        return finish_dataset(run, spec, totals, fitted.cardinalities, names, origin, labels=labels)


def _check_splits(rows: np.ndarray, divider: Divider) -> None:
    """Raises ValueError if there is no training row, or if a requested split is empty."""
    for place in divider.splits:
        if not rows[place]:
            flags = ", ".join(
                f"--{name} {value}"
                for name, value in vars(divider.division).items()
                if value and name not in ("seed", "keep_negatives")
            )
            raise ValueError(
                f"no row is {layout.SPLITS[place]}, of {int(rows.sum())} rows"
                + (f" ({flags})" if flags else "")
            )


def _specification(
    run: PreparationRun, fitted: Transform, totals: dict[str, dict[str, int]], names: Sequence[str]
) -> FeatureSpec | None:
    """Returns the specification of a dataset; None in NVIDIA's binary format, which has none."""
    if run.options.output_format == "binary":
        return None
    schema, (label, numerical, categorical) = fitted.schema, run.options.feature_names
    named = dict(zip(schema.categorical_names, categorical, strict=True))
    return FeatureSpec.named(
        run.work.output / run.options.feature_spec_out,
        label,
        numerical,
        dict(zip(categorical, fitted.cardinalities, strict=True)),
        names,
        metadata_of(totals, names),
        {categorical[i]: field for i, field in fitted.lists.items()},
        {named[column]: table for column, table in schema.shared_tables.items()},
    )


def transform(
    run: PreparationRun,
    divided: Divided,
    targets: list[Target],
    name: str = "transform",
    directory: Path | None = None,
    periods: Periods | None = None,
) -> dict[str, dict[str, int]]:
    """Transforms the rows of targets into the files of the output.

    Args:
        targets: destinations of rows; at most one of them is shuffled.
        directory: the fitted transform; by default that of the output.
        periods: periods that the report compares; None for rows without a time.

    Returns:
        For each target: rows, clicks, and so on, as `transform_split` counts them.
    """
    work, options, parts = run.work, run.options, divided.parts
    splits = [target.split for target in targets]
    rows, ids = divided.rows[:, splits], divided.ids[:, splits]
    job = TransformJob(
        divided.source,
        divided.divider,
        str(directory or work.output / layout.TRANSFORM),
        str(work.folder("lookups")),
        str(work.output),
        options.output_format,
        targets,
        str(work.folder(f"{name}.columns")),
        _shuffle_buckets(run, name, targets),
        options.seed,
        options.quarantine,
        str(work.folder(f"{name}.statistics")) if options.report else None,
        extra_dtypes(options.schema),
        (np.cumsum(rows, axis=0) - rows).tolist(),
        (np.cumsum(ids, axis=0) - ids).tolist(),
        periods,
    )
    with run.stage(name) as stage:
        create_files(job)
        counts, sizes = [part.rows for part in parts], [part.size for part in parts]
        task = partial(transform_split, job=job)
        items = list(enumerate(parts))
        summaries = stage.tasks(f"{name}.columns", task, items, sizes, counts)
        stage.rows, stage.size = sum(counts), sum(sizes)
    names = [target.name for target in targets]
    totals = {name: _sum([summary.get(name, {}) for summary in summaries]) for name in names}
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


def _shuffle_buckets(run: PreparationRun, name: str, targets: Sequence[Target]) -> int:
    """Returns the number of buckets of rows, such that one task can sort a bucket."""
    rows = max(target.rows for target in targets)
    num_ids = max(sum(target.num_ids) for target in targets)
    least = max(-(-rows // _BUCKET_ROWS), -(-num_ids // _BUCKET_IDS))
    return run.work.once(f"{name}.buckets", lambda: max(2 * run.engine.cores, least))


def _shuffle(run: PreparationRun, target: Target, job: TransformJob) -> None:
    with run.stage("shuffle") as stage:
        stage.rows = target.rows
        if run.work.result("shuffled") is None:
            run.work.fetch(Path(job.shuffle), INDEX)
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
    shutil.rmtree(job.shuffle, ignore_errors=True)


def _sum(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    names = dict.fromkeys(name for part in counts for name in part)
    return {name: sum(part.get(name, 0) for part in counts) for name in names}


def metadata_of(totals: dict[str, dict[str, int]], names: Sequence[str]) -> dict[str, Any]:
    """Returns the entries of a feature specification besides the features, for each split."""
    return {
        key: {name: totals[name].get(count, 0) for name in names}
        for key, count in (("clicks", "clicks"), ("numerical_values_raised_to_1", "clamped"))
    }


def finish_dataset(
    run: PreparationRun,
    spec: FeatureSpec | None,
    totals: dict[str, dict[str, int]],
    cardinalities: Sequence[int],
    names: Sequence[str],
    origin: dict[str, Any] | None = None,
    **facts: Any,
) -> dict[str, Any]:
    """Writes the specification and, last, the manifest; returns cardinalities, totals and facts.

    Args:
        spec: describes the features; None if the format has none.
        totals, cardinalities: what each split has, and the rows of each table.
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
    if run.parent is not None:
        made_of["increment"] = run.parent.manifest_facts()
    layout.write_dataset_manifest(output, rows, cardinalities, made_of, _checksums(run))
    tables = None if spec is None else spec.field_tables
    result = {"totals": totals, "cardinalities": list(cardinalities), "tables": tables} | facts
    run.work.finish_output(result)
    return result


def _checksums(run: PreparationRun) -> dict[str, str]:
    """Returns checksums of every large file, computed by the engine if no task has done it."""
    if (known := run.work.checksums()) is not None:
        return known
    output = run.work.output
    names = [path.relative_to(output).as_posix() for path in sorted(output.rglob("*.bin"))]
    task = partial(_checksums_of, folder=str(output))
    parts = run.work.run(run.engine, "checksums", task, shared_out(names))
    return {name: crc for part in parts for name, crc in part.items()}


def _checksums_of(names: list[str], folder: str) -> dict[str, Any]:
    return {name: checksum(Path(folder, name)) for name in names}


def summary(result: dict[str, Any]) -> list[str]:
    """Returns lines about the rows of each split and the tables."""
    lines = []
    for name, total in result["totals"].items():
        rows, clicks = total.get("rows", 0), total.get("clicks", 0)
        rate = f", {clicks / rows:.2%} positive" if rows else ""
        lines.append(f"{name + ':':<12}{rows:>14,} rows{rate}")
        if note := layout.one_class_note(name, rows, clicks):
            lines.append(note)
    cardinalities = result["cardinalities"]
    tables = result["tables"] or range(len(cardinalities))
    sizes = dict(zip(tables, cardinalities, strict=True))
    lines.append(f"tables:     {sum(sizes.values()):>14,} rows in {len(sizes)}")
    if clamped := sum(total.get("clamped", 0) for total in result["totals"].values()):
        lines.append(f"clamped to 1:{clamped:>13,} values whose logarithm would be below 0")
    return lines
