"""Turns tables of named columns into a dataset, in one call; used by `dlrm.scripts.prepare`.

    spark       a table or query of Spark to Parquet, if there is one
    copy        tables in memory to Parquet
    lines       count the rows of text, and copy to Arrow what cannot be read in parts: packed
                files, other encodings than UTF-8, and rows of several lines

The stages of `dlrm.preproc.prepare` follow.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data import layout
from dlrm.data.sources.column_names import check_columns
from dlrm.data.tables.files import ARROW, FRAME, JSON_LINES, PARQUET, TableFile
from dlrm.data.tables.formats.base import FileFormat
from dlrm.data.tables.formats.cells import Cells
from dlrm.data.tables.formats.text import Text
from dlrm.data.tables.frames import write_frame
from dlrm.data.tables.parts import Part, joined, parts_of_file
from dlrm.data.tables.text_parts import (
    Measured,
    TextColumns,
    TextPart,
    copy,
    measure,
    text_parts,
)
from dlrm.preproc.engine import Engine
from dlrm.preproc.errors import TaskError
from dlrm.preproc.prepare import (
    count,
    input_facts,
    part_bytes,
    quarantine,
    summary,
    write_dataset,
)
from dlrm.preproc.report.facts import Files, slices_of_files
from dlrm.preproc.spark.query import SparkQuery, read_query
from dlrm.preproc.splits import SplitRows, Splitter
from dlrm.preproc.stage import PreparationRun, open_run
from dlrm.preproc.tables.options import TableOptions
from dlrm.preproc.tables.source import TableSource

_PART_BYTES = (1 << 20, 16 << 20)  # smallest and largest, unless the user sets it
_OF_JSON = (1 << 20, 32 << 20)  # of JSON lines, whose copies lack the names on each line
_LEAST_TEXT = 1 << 12  # whatever the user sets
_PARTS_PER_CORE = 2
_MOST_NOTES = 3  # about files whose rows extend over several lines


def prepare_tables(
    options: TableOptions,
    tables: Mapping[str, Sequence[TableFile]],
    output: Path,
    engine: Callable[[Path], AbstractContextManager[Engine]],
    replace: bool = False,
    restart: bool = False,
    say: Callable[[str], None] = print,
    query: SparkQuery | None = None,
    keep_failed: bool = True,
) -> dict[str, Any]:
    """Writes a dataset, which appears when it is complete; resumes an unfinished run.

    Args:
        options: the schema, and the division of rows.
        tables: "train" -> files, which the division splits; or splits -> files, if files determine
            the split of their rows. A run of tables in memory, or of a data frame of Spark, neither
            resumes an unfinished run nor leaves one.
        output: the directory of the dataset.
        engine: starts the engine, which may use a directory.
        replace: whether to replace an earlier dataset.
        restart: whether to discard an unfinished run.
        say: called with lines about the stages and the result.
        query: query that Spark, then the engine, reads instead of `tables`.
        keep_failed: whether a run that ends with a TaskError or ValueError can be resumed.

    Returns:
        `totals` of each split, and `cardinalities`.

    Raises:
        ValueError, FileExistsError: the options, the tables or the output cannot be used together.
        TaskError: a value does not match the schema, or a file cannot be written.
        EngineError: tasks could not be run.
    """
    began = time.perf_counter()
    files, splits = _files(options, tables) if query is None else ([], [])
    in_memory = any(file.format is FRAME for file in files)
    in_memory |= query is not None and query.frame is not None
    on_disk = [] if in_memory else [file.path for file in files]
    facts: dict[str, Any] = input_facts(on_disk) | ({} if query is None else query.facts())
    for split, given in tables.items():
        named = [f"{file.path.resolve()} ({file.format})" for file in given]
        facts[f"--{split}_input"] = len(given) if in_memory else named
    failures = () if keep_failed else (TaskError, ValueError)
    lost = (BaseException,) if in_memory else failures
    kind = layout.KIND if replace else False
    with open_run(options, output, facts, engine, kind, restart or in_memory, say, lost) as run:
        if (result := run.work.result("described")) is None:
            with _named(files, query):
                result = _prepare(run, files, splits, query)
    for line in summary(result):
        say(line)
    if (kept := options.division.keep_negatives) < 1:
        say(
            f"note: {kept:g} of the training rows with label 0 were kept, so a model's "
            "probabilities will be too high; `dlrm evaluate --sampling_rate "
            f"{kept:g}` corrects them"
        )
    say(f"{output}: complete, in {time.perf_counter() - began:.1f} s")
    return result


def _files(
    options: TableOptions, tables: Mapping[str, Sequence[TableFile]]
) -> tuple[list[TableFile], list[int]]:
    """Returns the files, and the split of each file's rows; no splits if rows determine them."""
    files = [file for split in layout.SPLITS for file in tables.get(split, ())]
    given: set[tuple[Path, FileFormat]] = set()
    for file in files:
        if (key := (file.path.resolve(), file.format)) in given:
            raise ValueError(f"{file.path}: given twice (--input, --test_input, ...)")
        given.add(key)
    formats = {file.format.name: file.path for file in files}
    if len(formats) > 1:
        shown = ", ".join(f"{path.name} ({name})" for name, path in formats.items())
        raise ValueError(f"--input: expected files of one kind, got {shown}")
    if set(tables) <= {"train"}:
        return files, []
    for name in ("test_fraction", "validation_fraction", "test_from", "split_column"):
        if getattr(options.division, name):
            raise ValueError(
                f"--{name}: expected no --test_input and --validation_input beside it, got both"
            )
    numbered = enumerate(layout.SPLITS)
    return files, [split for split, name in numbered for _ in tables.get(name, ())]


@contextmanager
def _named(files: Sequence[TableFile], query: SparkQuery | None) -> Iterator[None]:
    """Raises errors that name no input with that of this run."""
    try:
        yield
    except ValueError as error:
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        name = f"{files[0].path}{more}" if query is None else query.flag
        known = any(text in str(error) for text in [name, *(str(file.path) for file in files)])
        raise ValueError(str(error) if known else f"{name}: {error}") from error


def _prepare(
    run: PreparationRun,
    files: list[TableFile],
    splits: Sequence[int],
    query: SparkQuery | None,
) -> dict[str, Any]:
    options, origin = run.options, dict[str, Any]()
    if query is not None:  # which Spark writes once per run
        arguments = query, _columns(options), run.work.folder("spark")
        with run.stage("spark"):
            stored = run.work.once("spark", lambda: read_query(run.engine, *arguments))
        files = [TableFile(Path(path), PARQUET) for path in stored["files"]]
        origin = {"spark": stored["manifest"]}
    num_rows, parts = 0, list[Part]()
    for part in _parts(run, files, splits):
        parts.append(part._replace(first_row=num_rows))
        num_rows += part.rows
    if not num_rows:
        raise ValueError("expected rows, got none")
    splitter = Splitter(options.division, options.schema, num_rows, splits)
    known = None
    if run.parent is not None:
        run.parent.lookups = str(run.write_lookups("parent", run.parent.transform))
        known = str(run.parent.transform), run.parent.lookups
    fitted = str(run.work.output / layout.TRANSFORM)
    source = TableSource(options.schema, splitter.columns, known, fitted)
    counted = count(run, source, splitter, parts)
    quarantine(run, parts, counted)
    found = counted.facts
    parts = [part._replace(crc=facts["crc"]) for part, facts in zip(parts, found, strict=True)]
    rows, ids = (np.array([facts[name] for facts in found], np.int64) for name in ("rows", "ids"))
    columns: list[str] = []
    if files[0].format.delimited:
        columns = next(filter(None, (file.columns(options.format) for file in files)), [])
    names = [file.path.relative_to(file.root or file.path.parent).as_posix() for file in files]
    if query is not None:  # whose files have other names in each run
        names = [f"part-{number:05d}" for number in range(len(files))]
    split_rows = SplitRows(source, splitter, parts, rows, ids, counted)
    return write_dataset(run, split_rows, Files(names), columns, origin)


def _columns(options: TableOptions) -> list[str]:
    """Returns the columns that are read, each once."""
    named = (options.division.split_key, options.division.split_column)
    return list(dict.fromkeys([*options.schema.columns, *filter(None, named)]))


def _parts(
    run: PreparationRun, files: Sequence[TableFile], splits: Sequence[int]
) -> Iterator[Part]:
    """Yields the parts of the files, which are of the same size in a resumed run.

    Files that cannot be read in parts are copied first.
    """
    how, numbered = _text_columns(run.options), list(enumerate(files))
    schema, file_format = run.options.schema, files[0].format
    if file_format is FRAME:
        time = schema.time  # a frame's times rarely have a zone, and its program is at hand
        utc = time.column if time is not None and time.zone is None else None
        for number, file in numbered:
            path = run.work.folder("copies") / f"{number}.parquet"
            with run.stage("copy") as stage:
                stage.rows = write_frame(file.frame, how.columns, path, str(file.path), utc)
                stage.size = path.stat().st_size
            most = part_bytes(run, stage.size, _PART_BYTES, _PARTS_PER_CORE)
            yield from (Part([part]) for part in parts_of_file(number, file, most, (path, PARQUET)))
        return
    size = sum(file.path.stat().st_size for file in files)
    limits = _OF_JSON if file_format is JSON_LINES else _PART_BYTES
    most = run.work.once("part_bytes", lambda: part_bytes(run, size, limits, _PARTS_PER_CORE))
    slices = [0] * len(files)  # of the report
    if run.options.report and schema.time is None:
        slices = slices_of_files(len(files), len(schema.numerical))
    groups = list(zip(splits or [0] * len(files), slices, strict=True))
    if isinstance(file_format, Text):
        with run.stage("lines") as stage:
            stage.size = 0 if run.work.result("lines") else size  # of a resumed run
            found = list(_text_parts(run, numbered, how, max(most, _LEAST_TEXT), groups))
            stage.rows = sum(part.rows for part in found)
        yield from found
        return
    for file in files:
        check_columns(file.path, file.columns(run.options.format), how.columns)
    of_files = (parts_of_file(number, file, most) for number, file in numbered)
    parts = [*itertools.chain.from_iterable(of_files)]
    yield from joined(parts, [part.size for part in parts], most, groups)


def _text_parts(
    run: PreparationRun,
    files: Sequence[tuple[int, TableFile]],
    how: TextColumns,
    part_bytes: int,
    groups: Sequence[Any],
) -> Iterator[Part]:
    parts = text_parts(files, how, part_bytes)
    together = joined(parts, [part.text_size for part in parts], part_bytes, groups)
    is_json = files[0][1].format is JSON_LINES  # of which Python's parser reads lists
    of_groups = partial(run.engine.map, measure, together)
    stored = run.work.once("lines", lambda: [*itertools.chain(*of_groups())])
    measured = [one and Measured(*one) for one in stored]
    folder, lines, copies = run.work.folder("copies"), dict[int, int](), dict[int, Any]()
    for part, one in zip(parts, measured, strict=True):
        is_large = part.within is None and part.text_size > part_bytes
        if one is None or is_large or (is_json and how.cells.separators):
            whole = part._replace(within=None, names=())
            copies[part.file] = whole, str(folder / f"{part.file}.arrow")
    stored = run.work.once("copies", lambda: [*run.engine.map(_copy, [*copies.values()])])
    copied = {number: Measured(*one) for number, one in zip(copies, stored, strict=True)}
    if copied:
        numbers = set(how.columns).intersection(*(one.numbers for one in copied.values()))
        run.work.finish("copied.numbers", sorted(numbers))
    found = [one for one in [*measured, *copied.values()] if one is not None]
    for note in [note for one in found for note in one.notes][:_MOST_NOTES]:
        run.say(note)
    if any(one.rows for one in found):
        names = {name for one in found for name in one.names}
        missing = [name for name in how.columns if name not in names]
        check_columns(files[0][1].path, found[0].names, missing)
    known = iter(measured)
    for group in together:
        made: list[TextPart] = []
        for part, one in zip(group.parts, known, strict=False):
            if part.file in copied:
                if part.file in copies and copied[part.file].rows:
                    copy_of = Path(copies.pop(part.file)[1]), ARROW
                    copied_parts = parts_of_file(part.file, part.table, part_bytes, copy_of)
                    yield from (Part([one]) for one in copied_parts)
                continue
            assert one is not None
            if part.within is not None:
                before = lines.get(part.file, 0)
                part = part._replace(within=part.within._replace(lines=before))
                lines[part.file] = before + one.lines
            made.append(part._replace(rows=one.rows))
        if made:
            yield Part(made)


def _copy(item: tuple[TextPart, str]) -> Measured:
    return copy(*item)


def _text_columns(options: TableOptions) -> TextColumns:
    """Returns what is read of text."""
    schema, division, cells = options.schema, options.division, Cells.from_schema(options.schema)
    floats: list[str] = []
    # Quarantine lists the texts of numbers, and marks change them.
    if not options.quarantine and not options.format.has_marks:
        others: set[Any] = {schema.label.column, *schema.groups, *cells.separators}
        others |= {division.split_key, division.split_column, schema.time and schema.time.column}
        for field in schema.numerical:
            if field.type == "decimal" or field.true_values or field.false_values:
                others.add(field.column)
        floats = [name for name in cells.plain if name not in others]
    return TextColumns(options.format, _columns(options), options.quarantine, cells, floats)
