"""The stages that turn tables into a dataset, on any engine.

    spark       a table or query of Spark to Parquet, if there is one
    stage       text and small files to Arrow, tables in memory to Parquet, if there are any

Those of `dlrm.preproc.prepare` follow.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.sources.column_names import check_columns
from dlrm.data.sources.text_files import ByteRange
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.files import FRAME, JSON_LINES, PARQUET, TableFile
from dlrm.data.tables.frames import write_frame
from dlrm.data.tables.kinds.cells import Cells
from dlrm.data.tables.kinds.kind import Kind
from dlrm.data.tables.kinds.text import Text
from dlrm.data.tables.parts import FilePart, in_order, parts_of, parts_of_copies, parts_of_file
from dlrm.data.tables.pieces import Copied, Copying, Piece, copy, path_of_copy, pieces_of
from dlrm.preproc.execution.spark_query import SparkQuery, read_query
from dlrm.preproc.prepare import count, part_bytes, quarantine, write_dataset
from dlrm.preproc.stages import report
from dlrm.preproc.stages.division import Divided, Divider
from dlrm.preproc.stages.report import Files
from dlrm.preproc.stages.stage import PreparationRun
from dlrm.preproc.tables.options import TableOptions
from dlrm.preproc.tables.source import TableSource
from dlrm.remote import task_files

_PART_BYTES = (1 << 20, 16 << 20)  # smallest and largest, unless the user sets it
_OF_JSON = 32 << 20  # the largest of JSON lines, whose copies lack the names on each line
_LEAST_PIECE = 1 << 12  # of text, whatever the user sets
_PARTS_PER_CORE = 2
_HEADER_BYTES = 8 << 20  # of CSV, to read its header
_MOST_NOTES = 3  # about files whose rows extend over several lines


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
        run.parent = run.parent.with_lookups(run.write_lookups("parent", transform))
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
        headers = (_header(file, options.format) for file in inputs.files)
        columns = next(filter(None, headers), [])
    names = Files([_name(file) for file in inputs.files])
    if inputs.query is not None:  # whose files have other names in each run
        names = Files([f"part-{number:05d}" for number in range(len(inputs.files))])
    divided = Divided(source, divider, parts, rows, ids, counted)
    return write_dataset(run, divided, names, columns, origin)


def _header(file: TableFile, text: TextFormat) -> list[str]:
    task_files.fetch(file.path, [(0, _HEADER_BYTES)])
    return file.columns(text)


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
            stored = read_query(run.engine, query, _columns(run.options), folder)
        return stored

    stored = run.work.once("spark", read)
    files = [TableFile(Path(path), PARQUET) for path in stored["files"]]
    return replace(inputs, files=files), {"spark": stored["manifest"]}


def _columns(options: TableOptions) -> list[str]:
    """Returns the columns that are read, each once."""
    named = (options.division.split_key, options.division.split_column)
    return list(dict.fromkeys([*options.schema.columns, *filter(None, named)]))


def _parts(run: PreparationRun, inputs: InputFiles) -> list[FilePart]:
    """Divides the input into parts: those of the resumed run, or new ones."""
    stored = run.work.once("count.splits", lambda: _staged(run, inputs))
    return [FilePart.from_list(part) for part in stored]


def _part_bytes(run: PreparationRun, size: int, kind: Kind | None = None) -> int:
    """Returns the approximate maximum size of a part, given that of all input and its kind."""
    smallest, largest = _PART_BYTES
    limits = (smallest, _OF_JSON if kind is JSON_LINES else largest)
    return part_bytes(run, size, limits, _PARTS_PER_CORE)


def _staged(run: PreparationRun, inputs: InputFiles) -> list[FilePart]:
    """Returns the parts of the files: those of copies, of text, frames and small files."""
    options: TableOptions = run.options
    files, columns = inputs.files, _columns(options)
    if files[0].kind is FRAME:
        folder = run.work.folder("staged")
        staged = [
            _staged_frame(run, file, columns, folder / f"{i}.parquet")
            for i, file in enumerate(files)
        ]
        return parts_of(staged, _part_bytes(run, sum(path.stat().st_size for path, _ in staged)))
    size = sum(file.path.stat().st_size for file in files)
    most = _part_bytes(run, size, files[0].kind)
    groups = list(zip(inputs.splits or [0] * len(files), _slices(options, files), strict=True))
    piece_bytes = max(most, _LEAST_PIECE)
    pieces: list[Piece] = []
    alone = list(range(len(files)))
    if not task_files.is_active():  # whose tasks fetch whole files of text
        pieces, alone = _pieces(run, files, piece_bytes, groups)
    parts: list[FilePart] = []
    if isinstance(files[0].kind, Text):
        parts, alone = _copied(run, files, pieces, alone, piece_bytes), []
    elif pieces:
        parts = _copied(run, files, pieces, [], piece_bytes)
    else:
        for file in files:
            check_columns(file.path, file.columns(options.format), columns)
    for number in alone:
        file = files[number]
        parts += parts_of_file(number, file.path.resolve(), file, most)
    return in_order([sorted(parts, key=lambda part: part.file)])


def _pieces(
    run: PreparationRun, files: Sequence[TableFile], piece_bytes: int, groups: Sequence[Any]
) -> tuple[list[Piece], list[int]]:
    """Divides files into pieces to copy: those of the resumed run, or new ones; see `pieces_of`."""

    def divide() -> tuple[list[Any], list[int]]:
        pieces, alone = pieces_of(files, run.options.format, piece_bytes, groups)
        return [([n for n, _ in piece.files], *piece[1:]) for piece in pieces], alone

    stored, alone = run.work.once("stage.splits", divide)
    return [
        Piece([(n, files[n]) for n in numbers], within and ByteRange(*within), tuple(names))
        for numbers, within, names in stored
    ], alone


def _slices(options: TableOptions, files: Sequence[TableFile]) -> list[int]:
    """Returns the slice of the report that each file belongs to."""
    if not options.report or options.schema.time is not None:
        return [0] * len(files)
    return report.slices_of_files(len(files), len(options.schema.numerical))


def _copied(
    run: PreparationRun,
    files: Sequence[TableFile],
    pieces: list[Piece],
    whole: list[int],
    copy_bytes: int,
) -> list[FilePart]:
    """Copies pieces, and whole files; returns the parts of all copies."""
    options: TableOptions = run.options
    columns, folder = _columns(options), run.work.folder("staged")
    cells = Cells.from_schema(options.schema)
    floats = _floats(options, cells)
    how = Copying(options.format, columns, options.quarantine, cells, floats, copy_bytes)
    with run.stage("stage") as now:

        def copy_all(stage: str, items: list[tuple[Piece, str]]) -> list[tuple[Any, ...]]:
            task = partial(_copy, how=how)
            found = run.work.once(stage, lambda: [*run.engine.map(task, items)])
            return [(*item, result) for item, result in zip(items, found, strict=True)]

        made = copy_all("stage", [(p, str(folder / f"p{i}")) for i, p in enumerate(pieces)])
        again = {piece.files[0][0] for piece, _, result in made if not result}
        made = [one for one in made if one[0].files[0][0] not in again]
        ones = [(Piece([(i, files[i])]), str(folder / f"{i}")) for i in sorted({*whole, *again})]
        made += copy_all("stage.whole", ones) if ones else []
        done = [result for *_, result in made]
        now.rows = sum(result["rows"] for result in done)
        now.size = sum(path.stat().st_size for path in {file.path for file in files})
    copies = [
        (path_of_copy(target, number), Copied(*copy))
        for _, target, result in made
        for number, copy in enumerate(result["copies"])
    ]
    for note in [note for result in done for note in result["notes"]][:_MOST_NOTES]:
        run.say(note)
    if isinstance(files[0].kind, Text):
        numbers = set(columns).intersection(*(result["numbers"] for result in done))
        run.work.finish("numbers", sorted(numbers))
    known = {name for result in done for name in result["names"]}
    known = known.union(*(file.partition for file in files))
    if now.rows:
        missing = [name for name in columns if name not in known]
        check_columns(files[0].path, done[0]["names"], missing)
    return list(parts_of_copies(files, copies))


def _floats(options: TableOptions, cells: Cells) -> list[str]:
    """Returns the columns of text that are read as nothing but numbers."""
    schema, division = options.schema, options.division
    if options.quarantine or options.format.has_marks:  # whose texts are listed, or changed first
        return []
    others: set[str | None] = {schema.label.column, *schema.groups, *cells.separators}
    others |= {division.split_key, division.split_column}
    others |= {schema.time.column} if schema.time else set()
    others |= {
        field.column
        for field in schema.numerical
        if field.type == "decimal" or field.true_values or field.false_values
    }
    return [name for name in cells.plain if name not in others]


def _staged_frame(
    run: PreparationRun, file: TableFile, columns: list[str], target: Path
) -> tuple[Path, TableFile]:
    time = run.options.schema.time  # a frame's times rarely have a zone, and its program is at hand
    utc = time.column if time is not None and time.zone is None else None
    with run.stage("stage") as now:
        now.rows = write_frame(file.frame, columns, target, str(file.path), utc)
        now.size = target.stat().st_size
    return target, file


def _copy(item: tuple[Piece, str], how: Copying) -> dict[str, Any]:
    return copy(*item, how)
