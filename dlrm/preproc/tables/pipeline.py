"""The stages that turn tables into a dataset, on any engine.

    spark       a table or query of Spark to Parquet, if there is one
    copy        tables in memory to Parquet
    lines       count the rows of text, and copy to Arrow what cannot be read in parts: packed
                files, other encodings than UTF-8, and rows of several lines

Those of `dlrm.preproc.prepare` follow.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.sources.column_names import check_columns
from dlrm.data.sources.text_files import ByteRange
from dlrm.data.tables.files import ARROW, FRAME, JSON_LINES, PARQUET, TableFile
from dlrm.data.tables.frames import write_frame
from dlrm.data.tables.kinds.cells import Cells
from dlrm.data.tables.kinds.kind import Kind
from dlrm.data.tables.kinds.text import Text
from dlrm.data.tables.parts import FilePart, JoinedPart, joined, part_of, parts_of_file
from dlrm.data.tables.text_parts import (
    Measured,
    TextColumns,
    TextPart,
    copy,
    measure,
    text_parts,
)
from dlrm.preproc.division import Divided, Divider
from dlrm.preproc.prepare import count, part_bytes, quarantine, write_dataset
from dlrm.preproc.report import facts as report
from dlrm.preproc.report.facts import Files
from dlrm.preproc.spark.query import SparkQuery, read_query
from dlrm.preproc.stage import PreparationRun
from dlrm.preproc.tables.options import TableOptions
from dlrm.preproc.tables.source import TableSource

_PART_BYTES = (1 << 20, 16 << 20)  # smallest and largest, unless the user sets it
_OF_JSON = 32 << 20  # the largest of JSON lines, whose copies lack the names on each line
_LEAST_TEXT = 1 << 12  # whatever the user sets
_PARTS_PER_CORE = 2
_MOST_NOTES = 3  # about files whose rows extend over several lines


Part = FilePart | JoinedPart | TextPart


@dataclass(frozen=True)
class InputFiles:
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


def prepare(run: PreparationRun, inputs: InputFiles) -> dict[str, Any]:
    """Writes a whole dataset by `TableOptions`; returns cardinalities, and totals of each split.

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


def _prepare(run: PreparationRun, inputs: InputFiles) -> dict[str, Any]:
    options: TableOptions = run.options
    inputs, origin = _from_spark(run, inputs)
    parts = _parts(run, inputs)
    num_rows = sum(part.rows for part in parts)
    if not num_rows:
        raise ValueError("expected rows, got none")
    divider = Divider(options.division, options.schema, num_rows, inputs.splits)
    known = None
    if run.parent is not None:
        transform = run.parent.transform
        run.parent.lookups = str(run.write_lookups("parent", transform))
        known = str(transform), run.parent.lookups
    fitted = str(run.work.output / layout.TRANSFORM)
    source = TableSource(options.schema, divider.columns, known, fitted)
    counted = count(run, source, divider, parts)
    quarantine(run, parts, counted)
    found = counted.facts
    parts = [part._replace(crc=facts["crc"]) for part, facts in zip(parts, found, strict=True)]
    rows, ids = (np.array([facts[name] for facts in found], np.int64) for name in ("rows", "ids"))
    first = inputs.files[0]
    columns: list[str] = []
    if first.kind.delimited:
        headers = (file.columns(options.format) for file in inputs.files)
        columns = next(filter(None, headers), [])
    names = Files([_name(file) for file in inputs.files])
    if inputs.query is not None:  # whose files have other names in each run
        names = Files([f"part-{number:05d}" for number in range(len(inputs.files))])
    divided = Divided(source, divider, parts, rows, ids, counted)
    return write_dataset(run, divided, names, columns, origin)


def _name(file: TableFile) -> str:
    path = file.path.relative_to(file.root) if file.root else Path(file.path.name)
    return path.as_posix()


def _from_spark(run: PreparationRun, inputs: InputFiles) -> tuple[InputFiles, dict[str, Any]]:
    """Returns the files of a query, which Spark writes once per run, and facts for the manifest."""
    if inputs.query is None:
        return inputs, {}
    query, folder = inputs.query, run.work.folder("spark")

    def read() -> dict[str, Any]:
        with run.stage("spark"):
            return read_query(run.engine, query, _columns(run.options), folder)

    stored = run.work.once("spark", read)
    files = [TableFile(Path(path), PARQUET) for path in stored["files"]]
    return replace(inputs, files=files), {"spark": stored["manifest"]}


def _columns(options: TableOptions) -> list[str]:
    """Returns the columns that are read, each once."""
    named = (options.division.split_key, options.division.split_column)
    return list(dict.fromkeys([*options.schema.columns, *filter(None, named)]))


def _parts(run: PreparationRun, inputs: InputFiles) -> list[Part]:
    """Divides the input into parts, in order: those of the resumed run, or new ones."""
    how, rows, placed = _text_columns(run.options), 0, list[Part]()
    stored = run.work.once("parts", lambda: [_stored(part) for part in _found(run, inputs, how)])
    for part in (_restored(kind, values, inputs.files, how) for kind, values in stored):
        placed.append(part._replace(first_row=rows))
        rows += part.rows
    return placed


def _stored(part: Part) -> list[Any]:
    """Returns a part as JSON."""
    if isinstance(part, JoinedPart):
        return ["joined", list(map(_stored, part.parts))]
    return ["text", [part.file, *part[3:]]] if isinstance(part, TextPart) else ["file", part]


def _restored(kind: str, values: Any, files: Sequence[TableFile], how: TextColumns) -> Part:
    if kind == "joined":
        return JoinedPart([_restored(one, value, files, how) for one, value in values])
    if kind == "file":
        return FilePart(*values)
    number, within, *others = values
    return TextPart(files[number], number, how, within and ByteRange(*within), *others)


def _found(run: PreparationRun, inputs: InputFiles, how: TextColumns) -> Iterator[Part]:
    """Yields the parts of the files; those that cannot be read in parts are copied first."""
    options: TableOptions = run.options
    files, numbered = inputs.files, list(enumerate(inputs.files))
    kind = files[0].kind
    if kind is FRAME:
        for number, file in numbered:
            path = _copied_frame(run, file, how.columns, number)
            size = _part_bytes(run, path.stat().st_size)
            yield from parts_of_file(number, file, size, (path, PARQUET))
        return
    size = sum(file.path.stat().st_size for file in files)
    part_bytes = _part_bytes(run, size, kind)
    groups = list(zip(inputs.splits or [0] * len(files), _slices(options, files), strict=True))
    if isinstance(kind, Text):
        with run.stage("lines") as stage:
            found = list(_text_parts(run, numbered, how, max(part_bytes, _LEAST_TEXT), groups))
            stage.rows, stage.size = sum(part.rows for part in found), size
        yield from found
        return
    for file in files:
        check_columns(file.path, file.columns(options.format), how.columns)
    of_files = (parts_of_file(number, file, part_bytes) for number, file in numbered)
    parts = [*itertools.chain.from_iterable(of_files)]
    yield from map(part_of, joined(parts, [part.size for part in parts], part_bytes, groups))


def _text_parts(
    run: PreparationRun,
    files: Sequence[tuple[int, TableFile]],
    how: TextColumns,
    part_bytes: int,
    groups: Sequence[Any],
) -> Iterator[Part]:
    parts = text_parts(files, how, part_bytes)
    together = joined(parts, [part.text_size for part in parts], part_bytes, groups)
    measured = [*itertools.chain(*run.engine.map(measure, [*map(part_of, together)]))]
    undecided = {part.file for part, found in zip(parts, measured, strict=True) if found is None}
    folder, lines = run.work.folder("copies"), dict[int, int]()
    copies = {
        part.file: (part._replace(within=None, names=()), str(folder / f"{part.file}.arrow"))
        for part in parts
        if part.file in undecided or (part.within is None and part.text_size > part_bytes)
    }
    copied = dict(zip(copies, run.engine.map(_copy, [*copies.values()]), strict=True))
    if copied:
        numbers = set(how.columns).intersection(*(one.numbers for one in copied.values()))
        run.work.finish("copied.numbers", sorted(numbers))
    found = [one for one in [*measured, *copied.values()] if one is not None]
    for note in [note for one in found for note in one.notes][:_MOST_NOTES]:
        run.say(note)
    names = {name for one in found for name in one.names}
    if any(one.rows for one in found):
        missing = [name for name in how.columns if name not in names]
        check_columns(files[0][1].path, found[0].names, missing)
    known = iter(measured)
    for group in together:
        made: list[TextPart] = []
        for part, one in zip(group, known, strict=False):
            if part.file in copied:
                if part.file in copies and copied[part.file].rows:
                    copy_of = Path(copies.pop(part.file)[1]), ARROW
                    yield from parts_of_file(part.file, part.table, part_bytes, copy_of)
                continue
            assert one is not None
            if part.within is not None:
                before = lines.get(part.file, 0)
                part = part._replace(within=part.within._replace(lines=before))
                lines[part.file] = before + one.lines
            made.append(part._replace(rows=one.rows))
        if made:
            yield part_of(made)


def _copy(item: tuple[TextPart, str]) -> Measured:
    return copy(*item)


def _part_bytes(run: PreparationRun, size: int, kind: Kind | None = None) -> int:
    """Returns the approximate maximum size of a part, given that of all input and its kind."""
    smallest, largest = _PART_BYTES
    limits = (smallest, _OF_JSON if kind is JSON_LINES else largest)
    return part_bytes(run, size, limits, _PARTS_PER_CORE)


def _slices(options: TableOptions, files: Sequence[TableFile]) -> list[int]:
    """Returns the slice of the report that each file belongs to."""
    if not options.report or options.schema.time is not None:
        return [0] * len(files)
    return report.slices_of_files(len(files), len(options.schema.numerical))


def _text_columns(options: TableOptions) -> TextColumns:
    """Returns what is read of text."""
    schema, division, cells = options.schema, options.division, Cells.from_schema(options.schema)
    floats: list[str] = []
    if (
        not options.quarantine and not options.format.has_marks
    ):  # which lists texts, or changes them
        others: set[str | None] = {schema.label.column, *schema.groups, *cells.separators}
        others |= {division.split_key, division.split_column}
        others |= {schema.time.column} if schema.time else set()
        others |= {
            field.column
            for field in schema.numerical
            if field.type == "decimal" or field.true_values or field.false_values
        }
        floats = [name for name in cells.plain if name not in others]
    return TextColumns(options.format, _columns(options), options.quarantine, cells, floats)


def _copied_frame(
    run: PreparationRun, file: TableFile, columns: Sequence[str], number: int
) -> Path:
    target = run.work.folder("copies") / f"{number}.parquet"
    time = run.options.schema.time  # a frame's times rarely have a zone, and its program is at hand
    utc = time.column if time is not None and time.zone is None else None
    with run.stage("copy") as now:
        now.rows = write_frame(file.frame, columns, target, str(file.path), utc)
        now.size = target.stat().st_size
    return target
