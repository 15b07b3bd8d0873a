"""The stages that turn tables into a dataset, on any engine.

    spark       a table or query of Spark to Parquet, if there is one
    stage       text, or tables in memory, to Parquet, if there are any

Those of `dlrm.preproc.stages.pipeline` follow.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data.sources.column_names import check_columns
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.files import FRAME, PARQUET, TableFile
from dlrm.data.tables.frames import write_frame
from dlrm.data.tables.kinds.cells import Cells
from dlrm.data.tables.kinds.text import Text
from dlrm.data.tables.parts import FilePart, parts_of
from dlrm.limits import MAX_TASKS
from dlrm.preproc.execution.spark_query import SparkQuery, read_query
from dlrm.preproc.increments.extend import lookups_of_parent
from dlrm.preproc.stages.division import Divider
from dlrm.preproc.stages.pipeline import Divided, count, quarantine, write_dataset
from dlrm.preproc.stages.report import Files
from dlrm.preproc.stages.stage import PreparationRun
from dlrm.preproc.tables.options import TableOptions
from dlrm.preproc.tables.source import TableSource
from dlrm.remote import task_files

_PART_BYTES = (1 << 20, 16 << 20)  # smallest and largest, unless the user sets it
_PARTS_PER_CORE = 2
_COUNT_BUCKET_BYTES = 128 << 20  # of Parquet
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


def _prepare(run: PreparationRun, inputs: InputFiles) -> dict[str, Any]:
    options: TableOptions = run.options
    inputs, origin = _from_spark(run, inputs)
    parts = _parts(run, inputs)
    num_rows = sum(part.rows for part in parts)
    if not num_rows:
        raise ValueError("expected rows, got none")
    divider = Divider(options.division, options.schema, num_rows, inputs.splits)
    lookups = lookups_of_parent(run)
    known = None if lookups is None else (str(run.growth.parent.transform), str(lookups))
    source = TableSource(options.schema, divider.columns, known)
    counted = count(run, source, divider, parts, bucket_bytes=_COUNT_BUCKET_BYTES)
    quarantine(run, parts, counted)
    parts = [part._replace(crc=facts["crc"]) for part, facts in zip(parts, counted, strict=True)]
    rows, ids = (np.array([facts[name] for facts in counted], np.int64) for name in ("rows", "ids"))
    first = inputs.files[0]
    columns: list[str] = []
    if first.kind.delimited:
        headers = (_header(file, options.format) for file in inputs.files)
        columns = next(filter(None, headers), [])
    names = Files([_name(file) for file in inputs.files])
    divided = Divided(source, divider, parts, rows, ids)
    return write_dataset(run, divided, counted, names, columns, origin)


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


def _parts(run: PreparationRun, inputs: InputFiles) -> list[FilePart]:
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
    return [FilePart(*part) for part in stored]


def _staged(run: PreparationRun, files: Sequence[TableFile]) -> list[tuple[Path, TableFile]]:
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
        cells = Cells.from_schema(options.schema)
        task = partial(_stage, text=options.format, quarantine=options.quarantine, cells=cells)
        done = now.tasks("stage", task, items, sizes)
        now.rows, now.size = sum(result["rows"] for result in done), sum(sizes)
        run.work.outline(folder)
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
    run: PreparationRun, file: TableFile, columns: list[str], target: Path
) -> tuple[Path, TableFile]:
    time = run.options.schema.time  # a frame's times rarely have a zone, and its program is at hand
    utc = time.column if time is not None and time.zone is None else None
    with run.stage("stage") as now:
        now.rows = write_frame(file.frame, columns, target, str(file.path), utc)
        now.size = target.stat().st_size
    return target, file


def _stage(
    item: tuple[TableFile, str, list[str]], text: TextFormat, quarantine: bool, cells: Cells
) -> dict[str, Any]:
    file, target, columns = item
    assert isinstance(file.kind, Text), "others are read as they are"
    task_files.fetch(file.path)
    return file.kind.stage(file, target, text, columns, quarantine, cells)
