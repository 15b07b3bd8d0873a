"""Sources of rows to score: logs, tables and datasets, read and transformed some rows at a time."""

import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from dlrm.command_line import say
from dlrm.data import layout
from dlrm.data.clicks.config import DataConfig
from dlrm.data.schema.schema import Schema
from dlrm.data.sources.column_names import check_columns
from dlrm.data.sources.columns import TextColumn
from dlrm.data.sources.csv_rows import Reading, Spans, delimiter_hint, read_csv
from dlrm.data.sources.row_error import RowError
from dlrm.data.sources.text_files import PACKED
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.files import TableFile, find_tables, format_of
from dlrm.data.tables.formats.cells import Cells
from dlrm.data.tables.formats.text import Text
from dlrm.data.tables.frames import open_frame
from dlrm.data.transform.transform import Transform
from dlrm.documents import read_json
from dlrm.files import MANIFEST
from dlrm.model.config import DLRMConfig
from dlrm.serving.rows.config import SourceConfig
from dlrm.serving.rows.inputs import Inputs, ScoreError
from dlrm.serving.rows.raw import inputs_of_text, labels_of_text, read_lines, text_of_lines
from dlrm.serving.rows.shares import Shares
from dlrm.serving.rows.tables import inputs_of_batch, read_inputs, scoring_reader
from dlrm.serving.scoring import Scorer

if TYPE_CHECKING:  # datasets need torch, and other sources none
    from dlrm.data.clicks.batch import Batch, ClickDataset

_ANY_ROW = ""  # among the names of columns, if there are rows
T = TypeVar("T")


class SourceBlock(NamedTuple):
    """Some rows of a source.

    Attributes:
        inputs: inputs of the model.
        labels: None if they are unknown.
        inputs_of: returns the inputs of another model; None if rows are inputs already.
        extra: weight, groups and time of rows of tables, if they are read; see `extra_dtypes`.
    """

    inputs: Inputs
    labels: np.ndarray | None
    inputs_of: Callable[[Scorer], Inputs] | None = None
    extra: dict[str, np.ndarray] | None = None


Blocks = Generator[SourceBlock, None, None]


def iter_scored_blocks(
    model: Scorer,
    source: str,
    config: SourceConfig,
    shares: Shares,
    take: Callable[[SourceBlock], T],
    schema: Schema | None = None,
) -> Iterator[T]:
    """Returns the results of `take` for each block of a source's rows, in order.

    Args:
        model: applies its transform to raw rows.
        source: a log, a table, the directory of a dataset, or - for standard input.
        shares: counts the missing and unknown values of the rows.
        take: function of a block, such as scoring it.
        schema: for tables, the model's schema, to read its weight, groups and time as well.

    Raises:
        FileNotFoundError: there is no such source.
        ValueError: a row cannot be read or, by `take`, scored; the message has file and line, or
            row.
    """
    path = check_source(source)
    if reads_dataset(model, source, config):
        blocks = _of_dataset(model, path, config, shares)
    elif _reads_lines(model, path):
        blocks = _of_log(model, path, config, shares)
    elif source == "-":
        raise ValueError("--input -: standard input is for logs; name the file of a table")
    else:
        blocks = _of_tables(model, path, config, shares, schema)
    return taken_from(blocks, take)


def taken_from(blocks: Blocks, take: Callable[[SourceBlock], T]) -> Iterator[T]:
    """Yields the result of `take` for each block; the source of blocks names rows of its errors."""
    for block in blocks:
        try:
            taken = take(block)
        except ValueError as error:
            blocks.throw(error)
            raise
        yield taken


def reads_dataset(model: Scorer, source: str, config: SourceConfig) -> bool:
    """Returns whether a source is the directory of a dataset, not a file or folder of tables."""
    path = Path(source)
    is_folder = path.is_dir() if _reads_lines(model, path) else config.is_dataset(path)
    return source != "-" and is_folder


def _reads_lines(model: Scorer, path: Path) -> bool:
    """Returns whether a source has lines of logs, unless it is a dataset.

    A log may also be a table of a columnar format, which its name shows.
    """
    transform, file_format = model.transform, format_of(path)
    is_text = file_format is None or isinstance(file_format, Text)
    return transform is None or (transform.is_log and is_text)


def check_source(source: str) -> Path:
    """Returns the path of a file or a dataset to score.

    Raises:
        FileNotFoundError: the source does not exist.
    """
    if source != "-" and not Path(source).exists():
        raise FileNotFoundError(f"{source}: no such file or directory (--input)")
    return Path(source)


def _of_dataset(model: Scorer, path: Path, config: SourceConfig, shares: Shares) -> Blocks:
    if model.config is None:
        raise ValueError(
            f"{model.path}: expected raw rows, in a log or a table, for an exported model; its "
            "checkpoint scores datasets"
        )
    dataset = open_split(path, model.config, config)
    for index in range(len(dataset)):
        batch = dataset.batch(index)
        inputs = inputs_of(batch)
        try:
            yield SourceBlock(inputs, batch.labels.cpu().numpy())
        except RowError as error:
            row = index * dataset.batch_size + error.row
            error.where = f"{path}: {config.split} row {row}"
            raise
        if model.transform is not None:  # which shows where id 0 means no value
            shares.add_ids(inputs.without_id())


def _of_log(model: Scorer, path: Path, config: SourceConfig, shares: Shares) -> Blocks:
    if path.suffix in PACKED:
        raise ValueError(f"{path}: compressed; unpack it into a pipe, and read --input -")
    transform, first_row, first = model.row_transform, 0, int(config.labeled)
    columns = first + len(transform.names)
    with nullcontext(sys.stdin.buffer) if str(path) == "-" else path.open("rb") as file:
        for lines in read_lines(file):
            try:
                text = text_of_lines(lines, columns)
                labels = labels_of_text(text) if config.labeled else None
                text = TextColumn(text.data, text.starts[first:], text.ends[first:])
                inputs = inputs_of_text(transform, text)
                shares.add(text.starts == text.ends, inputs.without_id())
                yield SourceBlock(inputs, labels, partial(_inputs_of, inputs_of_text, text))
            except RowError as error:
                error.where = f"{path}, line {first_row + error.row + 1}"
                if config.label is None and not isinstance(error, ScoreError):
                    error.problem += "; lines without a label need --nolabel"
                elif not config.labeled and f"got {columns + 1}" in error.problem:
                    error.problem += "; lines that begin with a label need no --nolabel"
                raise
            first_row += text.starts.shape[1]


def _inputs_of(read: Callable[[Transform, Any], Inputs], rows: Any, model: Scorer) -> Inputs:
    return read(model.row_transform, rows)


def _of_tables(
    model: Scorer, path: Path, config: SourceConfig, shares: Shares, schema: Schema | None
) -> Blocks:
    """Yields the rows of Parquet, CSV or JSON lines, in a file or a directory."""
    for folder in (path, *path.absolute().parents[:2]):
        if _kind(folder) == layout.CONVERTED:
            raise ValueError(
                f"{path}: numbers of {folder} are transformed already, so they are no raw rows; "
                "score the dataset that it was converted from"
            )
    transform = model.row_transform
    label, seen = transform.schema.label.column, set[str]()  # columns of the files
    for file in find_tables([path], config.input_format, say):
        text, spans = _text_format(config.text, file, transform), Spans()
        names = file.columns(text)
        if not names and file.format.delimited:  # an empty part, such as Spark writes
            continue
        reader = scoring_reader(transform, config.labeled and label in names, schema)
        if not file.format.may_lack_columns:
            _check_columns(file, text, names, reader.columns)
        cells = Cells.from_schema(reader.schema)
        for batch, where in file.format.batches(file, text, reader.columns, cells, spans, seen):
            try:
                inputs, rows = read_inputs(transform, reader, batch, shares)
                seen |= {_ANY_ROW} if batch.num_rows else set()
                by = partial(_inputs_of, inputs_of_batch, batch)
                yield SourceBlock(inputs, rows.labels, by, rows.extra)
            except RowError as error:
                error.where = where(error.row)
                if config.label is None and error.column == label and reader.labeled:
                    error.problem += "; --nolabel scores rows without their labels"
                raise
            except ValueError as error:
                named = str(error).startswith(f"{file.path}: ")
                raise ValueError(str(error) if named else f"{file.path}: {error}") from None
        if note := spans.note(file.path, text):
            say(note)
    wanted = scoring_reader(transform, labeled=False, schema=schema).columns
    missing = [name for name in wanted if name not in seen]
    if missing and _ANY_ROW in seen:  # of JSON lines
        raise ValueError(f"{path}: no column {missing[0]!r} in any row")


def frame_blocks(model: Scorer, frame: Any, labeled: bool, shares: Shares) -> Blocks:
    """Yields the rows of a table in memory, see `open_frame`, or of a batch as it is."""
    fitted, first = model.row_transform, 0
    reader = scoring_reader(fitted, labeled)
    is_batch = isinstance(frame, pa.RecordBatch)  # of which a stream would cost 0.2 ms
    for batch in [frame] if is_batch else open_frame(frame, reader.columns):
        for begin in range(0, batch.num_rows, model.batch_size):
            try:
                part = batch.slice(begin, model.batch_size)
                inputs, rows = read_inputs(fitted, reader, part, shares)
                yield SourceBlock(inputs, rows.labels)
            except RowError as error:
                error.row += first + begin
                raise
        first += batch.num_rows


def open_split(path: Path, model: DLRMConfig, config: SourceConfig) -> "ClickDataset":
    """Opens the split of a dataset, which must match the model."""
    from dlrm.data.clicks.datasets import open_datasets

    datasets = open_datasets(
        DataConfig(
            dataset=str(path),
            dataset_type=config.dataset_type,
            test_batch_size=config.batch_size,
            batch_size=config.batch_size,
            num_numerical_features=model.num_numerical_features,
            verify_data=config.verify_data,
            allow_links=config.allow_links,
        )
    )
    dataset: ClickDataset | None = getattr(datasets, config.split)
    if dataset is None:
        raise ValueError(f"{path}: has no {config.split} split")
    check_dataset(path, dataset, model)
    return dataset


def inputs_of(batch: "Batch") -> Inputs:
    """Returns the inputs of a dataset's batch."""
    lengths, weights = (
        None if tensor is None else tensor.cpu().numpy()
        for tensor in (batch.lengths, batch.id_weights)
    )
    return Inputs(batch.numerical.cpu().numpy(), batch.categorical.cpu().numpy(), lengths, weights)


def check_dataset(path: str | os.PathLike, dataset: "ClickDataset", config: DLRMConfig) -> None:
    """Raises ValueError if the features of a dataset differ from those of the model."""
    check_features(f"{path}: the dataset", dataset.num_numerical, dataset.table_sizes, config)


def check_features(
    what: str, num_numerical: int, table_sizes: Sequence[int], config: DLRMConfig
) -> None:
    """Raises ValueError if numbers or tables are not those of the model; `what` has them."""
    shape = (num_numerical, list(table_sizes))
    expected = (config.num_numerical_features, list(config.table_sizes))
    if shape != expected:
        raise ValueError(
            f"{what} of another model: expected {expected[0]} numerical features and tables of "
            f"{expected[1]} rows, got {shape[0]} and {shape[1]}"
        )


def _check_columns(
    file: TableFile, text: TextFormat, names: Sequence[str], wanted: Sequence[str]
) -> None:
    def hint(missing: str) -> str:
        if not file.format.delimited or text.columns:
            return ""
        other = text.header is not False and delimiter_hint(file.path, text, missing)
        return other or "; where the file has no header, --columns names them"

    check_columns(file.path, names, wanted, hint)


def _kind(folder: Path) -> str | None:
    with suppress(OSError, ValueError, KeyError):
        return str(read_json(folder / MANIFEST)["kind"])
    return None


def _text_format(given: TextFormat, file: TableFile, table: Transform) -> TextFormat:
    """Returns the format of a CSV; a file without a header has the columns of the training data.

    A first row without the name of a column that the model needs is not a header.
    """
    text = given.over(table.schema.format)
    if not file.format.delimited or not table.columns or text.columns or text.header:
        return text
    plain = Reading(replace(text, header=False))
    first = next((c for c in read_csv(file.path, plain) if len(c.lines)), None)
    if first is None:
        return text
    cells = {str(column[0]).strip() for column in first.columns if column is not None}
    numbered = list(table.columns) == list(map(str, range(len(table.columns))))
    if text.header is None and not numbered and not cells.isdisjoint(table.names):
        return replace(text, header=True)
    columns, label = table.columns, table.schema.label.column
    if len(first.columns) == len(columns) - 1 and label in columns:
        columns = tuple(name for name in columns if name != label)
    return replace(text, columns=columns, header=False)
