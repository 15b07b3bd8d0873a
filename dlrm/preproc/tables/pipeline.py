"""The stages that turn tables into a dataset, on any engine.

    spark       a table or query of Spark to Parquet, if there is one
    stage       text, or tables in memory, to Parquet, if there are any
    count       read every row once: its split, values of fields, statistics to fit, bad rows
    dictionary  merge the counts, give ids to values and find the edges of bins
    transform   read every row again and write it; training rows go into buckets
    shuffle     sort each bucket and write its rows
    describe    write the report, the files that describe the dataset, and their checksums

They are the stages of raw logs (`dlrm.preproc.logs.pipeline`), with another source of rows.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.sources.column_names import check_columns
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.files import FRAME, PARQUET, TableFile
from dlrm.data.tables.frames import write_frame
from dlrm.data.tables.kinds.cells import Cells
from dlrm.data.tables.kinds.text import Text
from dlrm.data.tables.parts import Part, parts_of
from dlrm.data.tables.rows import extra_dtypes
from dlrm.data.transform.dictionaries import Dictionary
from dlrm.data.transform.encodings import Encoded
from dlrm.data.transform.numbers import Fitted, Sums
from dlrm.data.transform.schema import Schema
from dlrm.data.transform.transform import Transform
from dlrm.data.transform.values import NUMBER, TEXT, canonical_text
from dlrm.limits import MAX_TASKS
from dlrm.preproc.execution.engines import TaskError
from dlrm.preproc.execution.spark_query import SparkQuery, read_query
from dlrm.preproc.stages.dictionary_merge import CountedColumn, CountJob, count_split
from dlrm.preproc.stages.pipeline import (
    count_buckets,
    finish_dataset,
    fit_counted,
    metadata_of,
    transform,
)
from dlrm.preproc.stages.report import write
from dlrm.preproc.stages.source import Target
from dlrm.preproc.stages.stage import QUARANTINE, Run
from dlrm.preproc.tables import report
from dlrm.preproc.tables.division import TRAIN, Divider
from dlrm.preproc.tables.options import TableOptions
from dlrm.preproc.tables.source import TableSource, counted_columns

_PART_BYTES = (1 << 20, 16 << 20)  # smallest and largest, unless the user sets it
_PARTS_PER_CORE = 2
_COUNT_BUCKET_BYTES = 128 << 20  # of Parquet
_MOST_NEGATIVES = 100  # labels other than the positive one that the transform keeps
_MOST_LISTED = 10
_MOST_NOTES = 3  # about files whose rows extend over several lines


@dataclass(frozen=True)
class Inputs:
    """The files of tables, and the split of each file's rows; no splits if rows determine them.

    Spark first writes the files of a query.
    """

    files: list[TableFile]
    splits: tuple[int, ...] = ()
    query: SparkQuery | None = None

    @property
    def name(self) -> str:
        """Returns a name of the inputs for messages."""
        if self.query is not None:
            return self.query.flag
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        return f"{self.files[0].path}{more}"


def prepare(run: Run, inputs: Inputs) -> dict[str, Any]:
    """Writes a whole dataset; returns its cardinalities, and the totals of each split.

    Args:
        run: the engine, the folder and the options, which are `TableOptions`.
        inputs: the files.

    Raises:
        ValueError: the schema does not fit the tables, or a split would be empty.
        TaskError: a value does not fit the schema, or a file cannot be written.
        EngineError: tasks could not be run.
    """
    if (described := run.work.result("described")) is not None:
        return described
    try:
        return _prepare(run, inputs)
    except ValueError as error:
        message = str(error)
        known = inputs.name in message or any(str(file.path) in message for file in inputs.files)
        raise ValueError(message if known else f"{inputs.name}: {message}") from error


def _prepare(run: Run, inputs: Inputs) -> dict[str, Any]:
    options: TableOptions = run.options
    inputs, origin = _from_spark(run, inputs)
    parts = _parts(run, inputs)
    num_rows = sum(part.rows for part in parts)
    if not num_rows:
        raise ValueError("expected rows, got none")
    source = TableSource(
        options.schema, Divider(options.division, options.schema, num_rows, inputs.splits)
    )
    counted = _counted(run, parts, source)
    parts = [part._replace(crc=one["crc"]) for part, one in zip(parts, counted, strict=True)]
    rows = np.array([result["rows"] for result in counted])
    negatives = _negatives(options.schema, counted)
    _check_splits(rows.sum(axis=0), source.divider.splits, options)
    directory = run.work.output / layout.TRANSFORM
    first = inputs.files[0]
    columns: list[str] = []
    if first.kind.delimited:
        headers = (file.columns(options.format) for file in inputs.files)
        columns = next(filter(None, headers), [])
    fitted = _fit(run, parts, counted, rows, directory, negatives, columns)
    given = {0, 1, *source.divider.splits, *np.flatnonzero(rows.sum(axis=0)).tolist()}
    names = [layout.SPLITS[i] for i in sorted(given)]
    shuffled = options.output_ordering == "total_random"
    places = [i for i, name in enumerate(layout.SPLITS) if name in names]
    ids = np.array([result["ids"] for result in counted], np.int64)[:, places]  # of list fields
    rows = rows[:, places]
    targets = [
        Target(
            layout.SPLITS[i],
            0,
            int(rows[:, k].sum()),
            shuffled and i == TRAIN,
            num_ids=tuple(ids[:, k].sum(axis=0).tolist()),
        )
        for k, i in enumerate(places)
    ]
    periods = report.periods_of(counted, fitted.num_numerical) if options.report else None
    totals = transform(
        run,
        parts,
        targets,
        source,
        extra=extra_dtypes(options.schema),
        starts=(np.cumsum(rows, axis=0) - rows).tolist(),
        list_starts=(np.cumsum(ids, axis=0) - ids).tolist(),
        periods=periods,
    )
    label, numerical, categorical = options.feature_names
    spec = FeatureSpec.named(
        run.work.output / options.feature_spec_out,
        label,
        numerical,
        dict(zip(categorical, fitted.cardinalities, strict=True)),
        names,
        metadata_of(totals, names),
        {categorical[i]: field for i, field in fitted.lists.items()},
    )
    with run.stage("describe"):
        if options.report:
            facts = report.table_facts(run, inputs.files, parts, counted, periods, fitted, totals)
            write(run.work.output, facts)
        labels = _label_counts(counted)
        described = spec if options.output_format == "split_binary" else None
        sizes = fitted.cardinalities
        return finish_dataset(run, described, totals, sizes, names, origin, labels=labels)


def _from_spark(run: Run, inputs: Inputs) -> tuple[Inputs, dict[str, Any]]:
    """Returns the files of a query, which Spark writes once per run, and facts for the manifest."""
    if inputs.query is None:
        return inputs, {}
    stored = run.work.result("spark")
    if stored is None:
        columns, folder = _columns(run.options), run.work.folder("spark")
        with run.stage("spark"):
            stored = read_query(run.engine, inputs.query, columns, folder)
        run.work.finish("spark", stored)
    files = [TableFile(Path(path), PARQUET) for path in stored["files"]]
    return replace(inputs, files=files), {"spark": stored["manifest"]}


def _columns(options: TableOptions) -> list[str]:
    """Returns the columns that are read, each once."""
    named = (options.division.split_key, options.division.split_column)
    return list(dict.fromkeys([*options.schema.columns, *filter(None, named)]))


def _parts(run: Run, inputs: Inputs) -> list[Part]:
    """Divides the input into parts: those of the resumed run, or new ones."""
    stored = run.work.result("count.splits")
    if stored is None:
        options: TableOptions = run.options
        smallest, largest = _PART_BYTES
        staged = _staged(run, inputs.files)
        size = sum(path.stat().st_size for path, _ in staged)
        if options.split_bytes and size > MAX_TASKS * options.split_bytes:
            raise ValueError(
                f"--split_bytes {options.split_bytes}: expected {-(-size // MAX_TASKS)} or more, "
                f"which cuts {size} bytes into {MAX_TASKS} tasks"
            )
        even = size // (_PARTS_PER_CORE * run.engine.cores)
        part_bytes = options.split_bytes or min(max(even, smallest), largest)
        stored = parts_of(staged, part_bytes)
        run.work.finish("count.splits", stored)
    return [Part(*part) for part in stored]


def _staged(run: Run, files: Sequence[TableFile]) -> list[tuple[Path, TableFile]]:
    """Returns the files to read, and their origins: text and frames are copied to Parquet."""
    options: TableOptions = run.options
    columns = _columns(options)
    kind = files[0].kind
    if kind is FRAME:
        folder = run.work.folder("staged")
        return [
            _staged_frame(run, file, columns, folder / f"{i}.parquet")
            for i, file in enumerate(files)
        ]
    if not isinstance(kind, Text):
        for file in files:
            check_columns(file.path, file.columns(options.format), columns)
        return [(file.path.resolve(), file) for file in files]
    folder = run.work.folder("staged")
    partitions = [file.partition for file in files]
    items = [
        (file, str(folder / f"{i}.parquet"), [name for name in columns if name not in partition])
        for i, (file, partition) in enumerate(zip(files, partitions, strict=True))
    ]
    sizes = [file.path.stat().st_size for file in files]
    with run.stage("stage") as now:
        cells = Cells.of(options.schema)
        task = partial(_stage, text=options.format, quarantine=options.quarantine, cells=cells)
        done = now.tasks("stage", task, items, sizes)
        now.rows, now.size = sum(result["rows"] for result in done), sum(sizes)
    for note in [note for result in done if (note := result["note"])][:_MOST_NOTES]:
        run.say(note)
    numbers = set(columns).intersection(*(result["numbers"] for result in done))
    run.work.finish("numbers", sorted(numbers))
    known = {name for result in done for name in result["names"]}.union(*partitions)
    if now.rows:
        missing = [name for name in columns if name not in known]
        check_columns(files[0].path, done[0]["names"], missing)
    return [(Path(item[1]), file) for item, file in zip(items, files, strict=True)]


def _staged_frame(
    run: Run, file: TableFile, columns: list[str], target: Path
) -> tuple[Path, TableFile]:
    with run.stage("stage") as now:
        now.rows = write_frame(file.frame, columns, target, str(file.path))
        now.size = target.stat().st_size
    return target, file


def _stage(
    item: tuple[TableFile, str, list[str]], text: TextFormat, quarantine: bool, cells: Cells
) -> dict[str, Any]:
    file, target, columns = item
    assert isinstance(file.kind, Text), "others are read as they are"
    return file.kind.stage(file, target, text, columns, quarantine, cells)


def _counted(run: Run, parts: list[Part], source: TableSource) -> list[dict[str, Any]]:
    """Reads every row once; returns the facts of the parts, with the number of all rows."""
    sizes = [part.size for part in parts]
    buckets = count_buckets(run, sum(sizes), _COUNT_BUCKET_BYTES)
    with run.stage("count") as now:
        job = CountJob(source, str(run.work.folder("counts")), buckets, run.options.quarantine)
        task = partial(count_split, job=job)
        counted = now.tasks("count", task, list(enumerate(parts)), sizes)
        now.rows, now.size = sum(sum(result["rows"]) for result in counted), sum(sizes)
    _quarantine(run, parts, [result["rejected"] for result in counted], source)
    return counted


def _quarantine(
    run: Run, parts: Sequence[Part], rejected: Sequence[list], source: TableSource
) -> None:
    """Writes the rows that were left out, one file per source; refuses if they are too many."""
    bad, total = sum(map(len, rejected)), sum(part.rows for part in parts)
    if not run.options.quarantine:
        return
    if bad > run.options.max_bad_lines * total:
        part, rows = next((p, r) for p, r in zip(parts, rejected, strict=True) if r)
        raise TaskError(
            f"{bad} of {total} rows cannot be read, a share above --max_bad_lines "
            f"{run.options.max_bad_lines}; the first: {part.where(rows[0][0])}, {rows[0][1]}"
        )
    folder = run.work.output / QUARANTINE
    folder.mkdir(parents=True, exist_ok=True)
    texts: dict[int, list[str]] = {}
    for part, rows in zip(parts, rejected, strict=True):
        lines = texts.setdefault(part.file, [])
        lines += [f"{part.where(row)}\t{why}\t{text}\n" for row, why, text in rows]
    for number, lines in texts.items():
        (folder / f"{number}.tsv").write_text("".join(lines), encoding="utf-8")
    run.say(f"{'quarantined:':<12}{bad:>14,} rows")


def _check_splits(rows: np.ndarray, splits: Sequence[int], options: TableOptions) -> None:
    """Raises ValueError if there is no training row, or if a requested split is empty."""
    for place in splits:
        if not rows[place]:
            division = ", ".join(
                f"--{name} {value}"
                for name, value in vars(options.division).items()
                if value and name not in ("seed", "keep_negatives")
            )
            raise ValueError(
                f"no row is {layout.SPLITS[place]}, of {int(rows.sum())} rows"
                + (f" ({division})" if division else "")
            )


def _negatives(schema: Schema, counted: Sequence[dict[str, Any]]) -> tuple[str, ...] | None:
    """Returns the labels that count as 0, after checking them against the schema."""
    label, found = schema.label, _label_counts(counted)
    if not label.positives:
        return None
    positive = sum(sum(result["positives"]) for result in counted)
    shown = ", ".join(map(repr, sorted(found)[:_MOST_LISTED]))
    if not positive:
        raise ValueError(
            f"column {label.column}: no row has the label "
            f"{' or '.join(map(repr, label.positives))}; found {shown}"
        )
    forms = set(map(canonical_text, label.positives))
    others = sorted(text for text in found if canonical_text(text) not in forms)
    expected = label.negative
    if expected is None and len(others) > 1 and not label.any_negative:
        known = " or ".join(map(repr, label.positives))
        raise ValueError(
            f"column {label.column}: expected two values, {known} and another, got {shown}; label: "
            "{negative: [...]} in the schema names those that count as 0"
        )
    kept = tuple(expected or others)
    return kept if 0 < len(kept) <= _MOST_NEGATIVES else None


def _label_counts(counted: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Returns the count of each label, if the schema names the positive one."""
    found = Counter[str]()
    for result in counted:
        found.update(result["labels"])
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def _fit(
    run: Run,
    parts: Sequence[Part],
    counted: Sequence[dict[str, Any]],
    rows: np.ndarray,
    directory: Path,
    negatives: tuple[str, ...] | None,
    columns: Sequence[str],
) -> Transform:
    """Fits dictionaries, bins, means and deviations to the training rows, and writes them."""
    schema: Schema = run.options.schema
    num_rows = int(rows[:, TRAIN].sum())
    made_of = _with_totals(counted_columns(schema), counted)
    results = fit_counted(run, range(len(parts)), num_rows, made_of, directory)
    places = list(schema.dictionaries().values())
    dictionaries = [
        Dictionary.load(directory, place, results[place], fields[0].type)
        for place, fields in enumerate(places)
    ]
    of_encodings = results[len(places) : len(places) + len(schema.encoded)]
    bins = iter(results[len(places) + len(schema.encoded) :])
    fitted = []
    for i, field in enumerate(schema.numerical):
        total = sum((Sums.of_facts(result["sums"][i]) for result in counted), Sums())
        edges = map(_array, next(bins)) if field.fitted_bins else ()
        try:
            fitted.append(field.rule.fit(total, *edges))
        except OverflowError as error:
            raise ValueError(f"column {field.column}: {error}") from None
    fitted += [Fitted.of_facts(one) for result in of_encodings for one in result["fitted"]]
    encoded = [
        Encoded.load(directory, place, result["size"], len(field.encodings))
        for place, (result, (_, field)) in enumerate(zip(of_encodings, schema.encoded, strict=True))
    ]
    kept = run.options.division.keep_negatives
    own = dictionaries, negatives, columns, kept, encoded, _kinds(run, counted)
    read = run.options.remembered_schema if columns else schema  # of a CSV
    transform = Transform(read, fitted, *own)
    transform.save_facts(directory)
    return transform


def _kinds(run: Run, counted: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the kind of each categorical field's values: numbers, or anything else as text."""
    schema: Schema = run.options.schema
    of_json = set(run.work.result("numbers") or ())
    kinds = []
    for place, field in enumerate(schema.categorical):
        found = set().union(*(result["kinds"][place] for result in counted))
        kinds.append(NUMBER if found == {NUMBER} or field.column in of_json else TEXT)
    return kinds


def _with_totals(
    columns: Sequence[CountedColumn], counted: Sequence[dict[str, Any]]
) -> list[CountedColumn]:
    """Returns the columns with the sums over all training rows that their encodings need."""
    made = []
    for column in columns:
        if (encoded := column.encoded) is not None:
            parts = [result["cells"][encoded.place] for result in counted]
            totals, missing = np.array(parts, np.int64).sum(axis=0).tolist()
            column = column._replace(encoded=encoded._replace(totals=totals, missing=missing))
        made.append(column)
    return made


def _array(values: Sequence[str]) -> np.ndarray:
    return np.array([float.fromhex(value) for value in values])
