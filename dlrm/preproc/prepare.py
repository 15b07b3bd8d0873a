"""The preparation of rows from any source, by any engine.

    count       read every row once: its split, values of fields, statistics to fit, bad rows; the
                engine sums the counts, and values get ids in its order
    dictionary  write the transform
    transform   read every row again, transform and pack it; the engine sorts, and rows are written
    describe    write the report, the files that describe the dataset, and their checksums

Every finished stage leaves a marker in a `WorkFolder`.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data import layout
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.schema.schema import Schema
from dlrm.data.transform.transform import Transform
from dlrm.files import link_or_copy
from dlrm.limits import MAX_TASKS, check_disk
from dlrm.preproc.counting import CountJob, counted_columns, partial_counts
from dlrm.preproc.engine import Span
from dlrm.preproc.errors import TaskError
from dlrm.preproc.fitting import (
    NEVER,
    Counted,
    fitted_dictionaries,
    fitted_numbers,
    label_counts,
    negatives_of,
    types_of,
    write_counted,
)
from dlrm.preproc.packing import Layout, PackJob, Written, layouts_of, packed_rows, sum_facts
from dlrm.preproc.report import facts as report
from dlrm.preproc.report.statistics import Periods, Statistics
from dlrm.preproc.source import Source, Target
from dlrm.preproc.splits import TRAIN, Ranges, SplitRows, Splitter
from dlrm.preproc.stage import QUARANTINE, PreparationRun
from dlrm.remote.uri import shown

_FEW_BAD = 1000  # rows that cannot be read, so few that all of them are soon counted


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
    splitter: Splitter | Ranges,
    parts: Sequence[Any],
    name: str = "count",
    fit: bool = True,
) -> Counted:
    """Reads every row once; writes the values that get ids, if `fit`, to the folder of the run."""
    options, columns = run.options, counted_columns(run.options.schema) if fit else []
    grows, known = [0] * len(columns), None
    limits = [column.limit for column in columns]
    if run.parent is not None and fit:
        grows = run.parent.sizes
        columns = run.parent.columns(columns)
        known = run.parent.lookups, grows
        limits = [column.limit for column in columns] + [NEVER] * len(columns)  # of known values
    rows = sum(max(part.rows, 0) for part in parts)  # those of logs are not known yet
    most_bad = max(options.max_bad_lines * rows, _FEW_BAD) if rows else math.inf
    job = CountJob(source, splitter, options.quarantine, fit, known, most_bad)
    folder = run.work.folder(f"{name}.values")

    def read() -> Counted:
        if not options.quarantine and options.division.keep_negatives == 1:
            check_disk(run.work.output, rows * _least_bytes(options.schema), "the dataset")
        task = partial(partial_counts, job=job)
        has_texts = any(column.kind == "texts" for column in columns)
        stage.size = sum(part.size for part in parts)
        how = list(enumerate(parts)), task, limits, has_texts, stage.progress(parts)
        summed = run.engine.counts(*how)
        return write_counted(summed, options.schema, columns, folder, grows)

    with run.stage(name) as stage:
        counted = Counted(*run.work.once(name.replace(" ", "."), read))
        stage.rows = sum(sum(facts["rows"]) for facts in counted.facts)
    return counted


def _least_bytes(schema: Schema) -> int:
    """Returns a lower bound on the bytes of a row of a dataset."""
    return 1 + 2 * len(schema.numerical) + len(schema.categorical) + len(schema.crosses)


def quarantine(run: PreparationRun, parts: Sequence[Any], counted: Counted) -> None:
    """Writes the rows that were left out, one file per source; refuses if they are too many.

    A line has the location of the row, the reason, and its text.
    """
    if not run.options.quarantine:
        return
    rejected = [facts["rejected"] for facts in counted.facts]
    bad = sum(map(len, rejected))
    total = bad + sum(sum(facts["rows"]) + facts["dropped"] for facts in counted.facts)
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
            lines.append(f"{shown(part.where(row))}\t{why}\t{text}\n")
    names = [Path(source).name for source in texts]
    if len(set(names)) < len(names):
        names = [f"{number}.{name}" for number, name in enumerate(names)]
    for name, lines in zip(names, texts.values(), strict=True):
        (folder / f"{name}.tsv").write_text("".join(lines), encoding="utf-8")
    run.say(f"{'quarantined:':<12}{bad:>14,} rows")


def write_dataset(
    run: PreparationRun,
    split_rows: SplitRows,
    files: report.Files,
    columns: Sequence[str] = (),
    origin: dict[str, Any] | None = None,
    more: Callable[[], Written] | None = None,
) -> dict[str, Any]:
    """Fits the transform to counted rows, and writes the dataset.

    Args:
        files: names of the files, for the report.
        columns: names of all columns of a CSV; none for others.
        origin: origin of the rows, for the manifest, if files do not tell it.
        more: transforms further rows, once there is a transform.

    Returns:
        Cardinalities, `totals` of each split, and `labels` with their counts.
    """
    options, output, counted = run.options, run.work.output, split_rows.counted
    if isinstance(split_rows.splitter, Splitter):
        _check_splits(split_rows.rows.sum(axis=0), split_rows.splitter)
    fitted = fit(run, counted, output / layout.TRANSFORM, columns)
    shuffled = options.output_ordering == "total_random"
    targets = [split_rows.target(split, shuffled and split == TRAIN) for split in split_rows.splits]
    names = [target.name for target in targets]
    periods = report.periods_of(counted.facts, fitted.num_numerical) if options.report else None

    def write() -> dict[str, Any]:
        _check_disk(run, fitted, targets)
        made = report.Report(files, split_rows.parts, periods, fitted, names)
        totals, sums = transform(run, split_rows, targets, periods=periods, on_facts=made.add)
        facts = None
        if options.report:
            facts = made.facts(totals, counted.facts, counted.distinct)
        further = Written({}, {}) if more is None else more()
        return {
            "totals": totals | further.totals,
            "sums": sums | further.checksums,
            "report": facts,
        }

    written = run.work.once("written", write)
    totals = written["totals"]
    with run.stage("describe"):
        if options.report:
            report.write(output, written["report"])
        spec = _specification(run, fitted, totals, names)
        if spec is not None:
            spec.save()
        if spec is None or not spec.lists:  # readers of this file alone expect one id per row
            layout.write_model_size(output, fitted.cardinalities)
        rows = {name: totals[name].get("rows", 0) for name in names}
        made_of = options.manifest_facts() | (origin or {})
        if (parent := run.parent) is not None:
            made_of["increment"] = {"parent": parent.digest, "numerics": parent.config.numerics}
        manifest = output, rows, fitted.cardinalities, made_of, written["sums"]
        layout.write_dataset_manifest(*manifest)
        result = {
            "totals": totals,
            "cardinalities": list(fitted.cardinalities),
            "tables": None if spec is None else spec.field_tables,
            "labels": label_counts(counted.facts),
        }
        run.work.finish_output(result)
    return result


def fit(
    run: PreparationRun, counted: Counted, directory: Path, columns: Sequence[str] = ()
) -> Transform:
    """Writes the transform of counted rows into a directory."""
    options = run.options
    schema = options.remembered_schema if columns else options.schema  # of a CSV
    negatives = negatives_of(options.schema, counted.facts)
    values = run.work.folder("count.values")
    with run.stage("dictionary"):
        if run.parent is not None:
            made = run.parent.extended(options.schema, counted, values, directory, negatives)
        else:
            directory.mkdir(parents=True, exist_ok=True)
            for path in values.iterdir():
                (directory / path.name).unlink(missing_ok=True)  # of a killed run
                link_or_copy(str(path), str(directory / path.name))
            made = (
                fitted_numbers(options.schema, counted),
                fitted_dictionaries(options.schema, counted, directory),
                types_of(options.schema, counted, run.work.result("copied.numbers")),
                negatives,
            )
        fitted = Transform(schema, *made, columns, options.division.keep_negatives)
        fitted.save_facts(directory)
        run.write_lookups("lookups", directory)
    return fitted


def _check_splits(rows: np.ndarray, splitter: Splitter) -> None:
    """Raises ValueError if there is no training row, or if a requested split is empty."""
    for split in splitter.splits:
        if not rows[split]:
            flags = ", ".join(
                f"--{name} {value}"
                for name, value in vars(splitter.division).items()
                if value and name not in ("seed", "keep_negatives")
            )
            raise ValueError(
                f"no row is {layout.SPLITS[split]}, of {int(rows.sum())} rows"
                + (f" ({flags})" if flags else "")
            )


def _check_disk(run: PreparationRun, fitted: Transform, targets: Sequence[Target]) -> None:
    """Raises ValueError if the disk has no space for the rows of targets."""
    size = 0
    for target in targets:
        packed = Layout(fitted, target, run.options.output_format)
        files = [run.work.output / name for name in packed.dtypes]
        size += target.rows * packed.row.itemsize
        size -= sum(file.stat().st_size for file in files if file.exists())  # of a killed run
    check_disk(run.work.output, size, "the dataset")


def _specification(
    run: PreparationRun, fitted: Transform, totals: dict[str, dict[str, int]], names: Sequence[str]
) -> FeatureSpec | None:
    """Returns the specification of a dataset; None in NVIDIA's binary format, which has none."""
    if run.options.output_format == "binary":
        return None
    schema, (label, numerical, categorical) = fitted.schema, run.options.feature_names
    counts = {"clicks": "clicks", "numerical_values_raised_to_1": "clamped"}
    metadata = {
        key: {name: totals[name].get(count, 0) for name in names} for key, count in counts.items()
    }
    named = dict(zip(schema.categorical_names, categorical, strict=True))
    return FeatureSpec.named(
        run.work.output / run.options.feature_spec_out,
        label,
        numerical,
        dict(zip(categorical, fitted.cardinalities, strict=True)),
        names,
        metadata,
        {categorical[i]: field for i, field in fitted.lists.items()},
        {named[column]: table for column, table in schema.shared_tables.items()},
    )


def transform(
    run: PreparationRun,
    split_rows: SplitRows,
    targets: list[Target],
    name: str = "transform",
    directory: Path | None = None,
    periods: Periods | None = None,
    on_facts: Callable[[int, dict[str, Statistics]], None] | None = None,
) -> Written:
    """Transforms the rows of targets into the files of the output.

    Args:
        targets: destinations of rows.
        directory: the fitted transform; by default that of the output.
        periods: periods that the report compares; None for rows without a time.
        on_facts: called with the number of each part and the statistics of its rows.
    """
    work, options, parts = run.work, run.options, split_rows.parts
    directory = directory or work.output / layout.TRANSFORM
    job = PackJob(
        split_rows.source,
        split_rows.splitter,
        str(directory),
        str(work.folder("lookups")),
        targets,
        options.output_format,
        options.seed,
        options.quarantine,
        on_facts is not None and options.report,
        periods,
    )
    layouts, none = layouts_of(job), lambda number, statistics: None
    spans = [_span(split_rows, *pair) for pair in zip(targets, layouts, strict=True)]
    files = run.engine.writer(job, layouts, work)
    with run.stage(name) as stage:
        task = partial(packed_rows, job=job)
        how = list(enumerate(parts)), task, spans, files.write, stage.progress(parts)
        results = run.engine.sorted_rows(*how)
        totals = sum_facts(results, targets, on_facts or none, files.add)
        written = Written(totals, files.finish())
        stage.rows, stage.size = sum(part.rows for part in parts), sum(part.size for part in parts)
    for target in targets:
        if (rows := written.totals[target.name].get("rows", 0)) != target.rows:
            raise TaskError(
                f"{target.name}: expected {target.rows} rows, as were counted before, got {rows}: "
                "an input file has changed meanwhile"
            )
    return written


def _span(split_rows: SplitRows, target: Target, layout: Layout) -> Span:
    """Returns the keys of a target's rows, and their bytes."""
    size = layout.bytes_of(target)
    if target.shuffled or not target.rows:
        return Span(size, 0, 1 << 64)
    parts = [split_rows.parts[i] for i in np.flatnonzero(split_rows.rows[:, target.split])]
    return Span(size, parts[0].first_row, parts[-1].first_row + parts[-1].rows)


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
