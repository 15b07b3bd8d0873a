"""Scores rows with a trained model: python -m dlrm.scripts.predict --checkpoint DIR --input FILE

The input is a log in the format of the training data (`day_0`: a label, integers and hashes,
separated by tabs; "-" reads standard input), a table (a file or directory of a kind that
`--input_format` lists), a table or query of Spark (`--spark_table`, `--spark_sql`), or a dataset's
directory. It is read and scored some megabytes at a time, and the scores, float32, are written in
the order of the rows, as a .npy file for `numpy.load`.
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import io
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
import torch
from absl import flags

from dlrm.command_line import say
from dlrm.data.clicks import layout
from dlrm.data.clicks.batch import Dataset
from dlrm.data.clicks.datasets import DataConfig, open_datasets
from dlrm.data.sources.column_names import check_columns
from dlrm.data.sources.csv_rows import Spans, delimiter_hint, read_csv
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.files import KINDS, TableFile, find_tables
from dlrm.data.tables.kinds.cells import Cells
from dlrm.data.transform.difference import compare_transforms
from dlrm.data.transform.lists import missing_features
from dlrm.data.transform.schema import Schema
from dlrm.data.transform.table_transform import TableTransform
from dlrm.data.verification import VERIFY_DATA
from dlrm.documents import cell, read_json
from dlrm.files import MANIFEST, make_directories, staged_file
from dlrm.model.config import DLRMConfig
from dlrm.preproc.convert_to_parquet import KIND as CONVERTED
from dlrm.preproc.execution.choice import open_engine
from dlrm.preproc.execution.engines import EngineError
from dlrm.preproc.execution.spark_query import SparkQuery, read_query
from dlrm.scripts.common import table_flags
from dlrm.scripts.common.command import no_arguments, run_command
from dlrm.scripts.common.config_flags import ALLOW_LINKS_HELP, VERIFY_DATA_HELP
from dlrm.scripts.common.spark_flags import define_spark_flags, spark_query, spark_settings
from dlrm.scripts.common.table_flags import TEXT_FLAGS, define_format_flags, text_format
from dlrm.serving.importance import contributions
from dlrm.serving.inputs import Inputs, RowError
from dlrm.serving.predictor import (
    BATCH_SIZE,
    Predictor,
    ScoreError,
    check_dataset,
    field_names,
    inputs_of,
    load,
    probability,
    shares_of,
)
from dlrm.serving.rows import Text, read_lines
from dlrm.serving.shares import Shares
from dlrm.serving.tables import labels_of, read_inputs, scoring_reader
from dlrm.train.metrics import click_metrics, metrics_note, one_class_note

FLAGS = flags.FLAGS
OUTPUT_KINDS = ("probability", "logit")
SPLITS = ("test", "validation", "train")
_ANY_ROW = ""  # among the names of columns, if there are rows
_LONGEST_BAR = 30  # characters, in an explanation
_MOST_IDS = 4  # ids of a list, in an explanation
_CSV_FLAGS = ("columns", "header", "input_format", *TEXT_FLAGS)
T = TypeVar("T")


class Block(NamedTuple):
    """Some rows of a source.

    Attributes:
        inputs: inputs of the model.
        labels: None if they are unknown.
        inputs_of: returns the inputs of another model; None if rows are inputs already.
        extra: weight, groups and time of rows of tables, if they are read; see `extra_dtypes`.
    """

    inputs: Inputs
    labels: np.ndarray | None
    inputs_of: Callable[[Predictor], Inputs] | None = None
    extra: dict[str, np.ndarray] | None = None


def define_flags() -> None:
    flags.DEFINE_string("input", None, "Log, table or dataset to score; -: standard input")
    define_spark_flags()
    flags.DEFINE_string(
        "output",
        None,
        "File to write the scores to, in NumPy's format, with a name that ends in .npy; an earlier "
        "file is replaced",
        required=True,
    )
    flags.DEFINE_enum(
        "output_kind",
        "probability",
        OUTPUT_KINDS,
        "Scores to write: the probability of a click, or the model's logit",
    )
    flags.DEFINE_integer(
        "explain",
        None,
        "Print the contribution of each field to the logit of this row, counted from 0 (gradient "
        "x input)",
        lower_bound=0,
    )
    define_source_flags("Dataset whose fitted transform to apply if the checkpoint has none")


def define_source_flags(dataset: str) -> None:
    """Defines the flags of a model and of the rows that it scores.

    Args:
        dataset: help of `--dataset`.
    """
    flags.DEFINE_string(
        "checkpoint",
        None,
        "Checkpoint, or directory of checkpoints, whose best one is used",
        required=True,
    )
    flags.DEFINE_boolean(
        "label",
        True,
        "The lines of a log begin with the label; the label of a table is read if it has one",
    )
    flags.DEFINE_string("dataset", None, dataset)
    flags.DEFINE_boolean(
        "allow_other_transform",
        False,
        "Accept a dataset whose fitted transform is not the checkpoint's, so that the same ids "
        "stand for other values",
    )
    flags.DEFINE_enum("split", "test", SPLITS, "Split of the dataset to score")
    flags.DEFINE_enum("verify_data", "first", list(VERIFY_DATA), VERIFY_DATA_HELP)
    flags.DEFINE_boolean("allow_links", False, ALLOW_LINKS_HELP)
    flags.DEFINE_enum("dataset_type", "split", ["split", "binary"], "Type of the dataset")
    flags.DEFINE_integer("batch_size", BATCH_SIZE, "Number of rows scored at a time", lower_bound=1)
    flags.DEFINE_enum(
        "input_format", None, KINDS, "Format of the table; default: by the file's name"
    )
    flags.DEFINE_list(
        "columns",
        [],
        "Names of a CSV's columns; default: those of its header, otherwise those of the training "
        "data",
    )
    flags.DEFINE_boolean(
        "header",
        None,
        "A CSV begins with a line of column names; default: yes if its first row contains one of "
        "them",
    )
    define_format_flags()
    flags.adopt_module_key_flags(table_flags)  # for --help


def main(argv: list[str]) -> None:
    no_arguments(argv)
    run()


def run() -> None:
    """Runs the command.

    Raises:
        ValueError, OSError: an error that the user can fix.
    """
    query = spark_query("input", "dataset_type", *_CSV_FLAGS)
    _check_paths(query)
    predictor = open_predictor(FLAGS.checkpoint, FLAGS.input)
    if note := predictor.sampling_note:
        say(note)
    if query is None:
        _score(predictor, FLAGS.input, FLAGS.input)
        return
    with _rows_of_query(query, predictor) as folder:
        _score(predictor, folder, query.flag)


@contextmanager
def _rows_of_query(query: SparkQuery, predictor: Predictor) -> Iterator[str]:
    """Yields a directory beside the output with the rows written by Spark, for the block."""
    table = predictor.transform.table if predictor.transform else None
    if table is None:
        raise ValueError(f"{query.flag}: expected a model of tables, got {predictor.path}")
    output = Path(FLAGS.output).resolve()
    make_directories(output.parent)
    cores, log, memory = os.cpu_count() or 1, output.parent / "spark.log", FLAGS.memory_gib
    with TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as folder:
        labels = [table.schema.label.column] * FLAGS.label
        try:
            settings = spark_settings(query)
            here = [Path(folder)]
            with open_engine("spark", cores, log, FLAGS.master, memory, settings, here) as engine:
                read_query(engine, query, table.names, Path(folder), labels)
            yield folder
        except EngineError as error:
            raise ValueError(str(error)) from None
        except ValueError as error:  # the place of a row in a temporary file
            message = str(error).removeprefix(f"{query.flag}: ").replace(f"{folder}/", "")
            raise ValueError(f"{query.flag}: {message}") from None


def _score(predictor: Predictor, source: str, name: str) -> None:
    """Writes the scores of a source, which has a name for messages, and prints their metrics."""
    began, labels, logits = time.perf_counter(), [], []
    shares = value_shares(predictor)

    explained: list[str] = []

    def score(block: Block) -> tuple[np.ndarray, np.ndarray | None]:
        logits = predictor.logits_of(block.inputs)
        if FLAGS.explain is not None and 0 <= FLAGS.explain - file.rows < len(logits):
            explained.extend(_explanation(predictor, block, logits, FLAGS.explain - file.rows))
        return logits, block.labels

    with score_file(Path(FLAGS.output)) as file:
        for part, known in taken(predictor, source, shares, score):
            file.write(probability(part) if FLAGS.output_kind == "probability" else part)
            if known is not None:
                labels.append(known)
                logits.append(part)
        if FLAGS.explain is not None and not explained:
            raise ValueError(f"--explain {FLAGS.explain}: expected a row below {file.rows:,}")
    seconds = time.perf_counter() - began
    say(
        f"{FLAGS.output}: {file.rows:,} scores ({FLAGS.output_kind}) by {predictor.path}, "
        f"{file.rows / seconds:,.0f} rows/s"
    )
    if not file.rows:
        say(f"note: there are no rows in {name}")
    if labels and file.rows:
        _print_metrics(np.concatenate(logits), np.concatenate(labels))
        if note := _counts_rows_once(name):
            say(note)
    if line := shares.line() if file.rows else None:
        say(line)
    if line := shares.strangers():
        say(f"warning: {line}")
    print("\n".join(explained), end="\n" * bool(explained))


def _explanation(predictor: Predictor, block: Block, logits: np.ndarray, row: int) -> list[str]:
    """Returns each field's contribution to the logit of a row of a block, as a table with bars."""
    inputs = block.inputs.part(row, row + 1)
    added = contributions(predictor, inputs)[0]
    values = [f"{value:.4g}" for value in inputs.numerical[0].tolist()]
    values += [
        _shown_ids(predictor, table, inputs.ids_of(0, table).tolist())
        for table in range(inputs.num_tables)
    ]
    names = [cell(name) for kind in field_names(predictor) for name in kind]
    widths = [max(map(len, cells)) for cells in (names, values)]
    scale = _LONGEST_BAR / max(float(np.abs(added).max()), 1e-12)
    lines = [f"row {FLAGS.explain}: logit {logits[row]:.4f}; gradient x input of each field:"]
    for field in np.argsort(-np.abs(added), kind="stable").tolist():
        bar = ("+" if added[field] > 0 else "-") * round(abs(added[field]) * scale)
        name, value = names[field].ljust(widths[0]), values[field].ljust(widths[1])
        lines.append(f"{name}  {value}  {added[field]:+9.4f}  {bar}".rstrip())
    return lines


def _shown_ids(predictor: Predictor, table: int, ids: list[int]) -> str:
    """Returns a row's value of a field, or those of a list, of which a long one is truncated."""
    transform = predictor.transform
    shown = [transform.value(table, id) if transform else f"id {id}" for id in ids[:_MOST_IDS]]
    more = f" and {len(ids) - _MOST_IDS} more" if len(ids) > _MOST_IDS else ""
    return ", ".join(map(cell, shown)) + more if shown else "(empty)"


def open_predictor(checkpoint: str, source: str | None) -> Predictor:
    """Loads a model; a dataset to score must have the model's transform."""
    is_dataset = source is not None and Path(source).is_dir() and _is_dataset(Path(source))
    scored = source if is_dataset else None
    allowed = FLAGS.allow_other_transform
    predictor = load(checkpoint, FLAGS.dataset or scored, allowed, say, FLAGS.allow_links)
    predictor.batch_size = FLAGS.batch_size
    if FLAGS.dataset and scored and Path(FLAGS.dataset).resolve() != Path(scored).resolve():
        own = (predictor.path / layout.TRANSFORM).is_dir()
        fitted, kind = (predictor.path, "checkpoint") if own else (FLAGS.dataset, layout.KIND)
        note = compare_transforms(
            fitted, scored, allowed, allow_links=FLAGS.allow_links, source_kind=kind
        )
        if note:
            say(note)
    return predictor


def value_shares(predictor: Predictor) -> Shares:
    """Returns counters of the values that the model's transform knows."""
    transform = predictor.transform
    if transform is None:
        return Shares((), ())
    return shares_of(transform)


def check_source(source: str) -> Path:
    """Returns the path of a file or a dataset to score.

    Raises:
        FileNotFoundError: the source does not exist.
    """
    if source != "-" and not Path(source).exists():
        raise FileNotFoundError(f"{source}: no such file or directory (--input)")
    return Path(source)


def _check_paths(query: SparkQuery | None) -> None:
    if query is None and FLAGS.input is None:
        raise ValueError(
            "--input: expected a log, a table or a dataset, or --spark_table or --spark_sql in its "
            "place, got none"
        )
    output = Path(FLAGS.output)
    if not FLAGS.output or output.is_dir():
        raise ValueError(f"--output {FLAGS.output!r}: expected a file for the scores")
    if output.exists() and not output.is_file():
        raise ValueError(f"--output {output}: expected a regular file, which is replaced")
    if output.suffix != ".npy":
        raise ValueError(f"--output {output}: expected a name that ends in .npy")
    if query is not None:
        return
    source = check_source(FLAGS.input)
    if FLAGS.input != "-" and output.exists() and output.samefile(source):
        raise ValueError(f"--output {output}: is the --input, which it would replace")


@contextmanager
def score_file(path: Path) -> Iterator["ScoreFile"]:
    """Yields a file of scores that appears, whole, when the block ends without an error.

    Args:
        path: replaced if it exists; for a symbolic link, the link's target.
    """
    path = path.resolve()
    make_directories(path.parent)
    with staged_file(path) as partial, open(partial, "wb") as file:
        scores = ScoreFile(file)
        yield scores
        scores.finish()


class ScoreFile:
    """A .npy file of float32 whose length is known only when it ends.

    Args:
        file: open for writing.

    Attributes:
        rows: number of scores in it.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.rows, self._file = 0, file
        self._header_bytes = file.write(self._header())

    def write(self, scores: np.ndarray) -> None:
        """Appends scores."""
        self._file.write(scores.astype("<f4").tobytes())
        self.rows += len(scores)

    def finish(self) -> None:
        """Writes the number of scores."""
        header = self._header()
        assert len(header) == self._header_bytes, "numpy leaves room for a longer number"
        self._file.seek(0)
        self._file.write(header)

    def _header(self) -> bytes:
        header = io.BytesIO()
        facts = {"descr": "<f4", "fortran_order": False, "shape": (self.rows,)}
        np.lib.format.write_array_header_1_0(header, facts)
        return header.getvalue()


def taken(
    predictor: Predictor,
    source: str,
    shares: Shares,
    take: Callable[[Block], T],
    schema: Schema | None = None,
) -> Iterator[T]:
    """Yields the result of `take` for each block of a source's rows, in order.

    Args:
        predictor: applies its transform to raw rows.
        source: a log, a table, the directory of a dataset, or - for standard input.
        shares: counts the values that the transform knows.
        take: function of a block, such as scoring it.
        schema: for tables, the model's schema, to read its weight, groups and time as well.

    Raises:
        FileNotFoundError: there is no such source.
        ValueError: a row cannot be read or, by `take`, scored; the message has file and line, or
            row.
    """
    path = check_source(source)
    table = predictor.transform.table if predictor.transform else None
    if table is None and (given := [name for name in _CSV_FLAGS if FLAGS[name].present]):
        raise ValueError(f"--{given[0]}: is for models of tables; {predictor.path} is none")
    if reads_dataset(predictor, source):
        return _take_dataset(predictor, path, shares, take)
    if table is None:
        return _take_log(predictor, path, shares, take)
    if source == "-":
        raise ValueError("--input -: standard input is for logs; name the file of a table")
    return _take_tables(table, path, shares, take, schema)


def reads_dataset(predictor: Predictor, source: str) -> bool:
    """Returns whether a source is a dataset's directory, and not a file or a folder of tables."""
    of_tables = predictor.transform is not None and predictor.transform.table is not None
    path = Path(source)
    return source != "-" and path.is_dir() and (not of_tables or _is_dataset(path))


def _is_dataset(path: Path) -> bool:
    """Returns whether a directory is a dataset and not a folder of tables."""
    known = (layout.FEATURE_SPEC, layout.MODEL_SIZE, MANIFEST)
    return FLAGS.dataset_type != "split" or any((path / name).exists() for name in known)


def _counts_rows_once(source: str) -> str | None:
    """Returns a line on the metrics of a dataset with sample weights, which `evaluate` can use."""
    if not Path(source, FLAGS.split, layout.WEIGHT_FILE).is_file():
        return None
    return (
        "note: these metrics count every row once; `python -m dlrm.scripts.evaluate --weights "
        "weight` weighs rows as the dataset says"
    )


def _take_dataset(
    predictor: Predictor, path: Path, shares: Shares, take: Callable[[Block], T]
) -> Iterator[T]:
    dataset = open_split(path, predictor.model.config)
    first_row = 0
    for index in range(len(dataset)):
        batch = dataset.batch(index)
        inputs = inputs_of(batch)
        try:
            yield take(Block(inputs, batch.labels.cpu().numpy()))
        except RowError as error:
            where = f"{path}: {FLAGS.split} row {first_row + error.row}"
            raise ValueError(f"{where}{error.problem}") from None
        if predictor.transform is not None:  # otherwise nothing shows that id 0 means no value
            shares.add_ids(inputs.without_id())
        first_row += dataset.batch_size


def open_split(path: Path, config: DLRMConfig) -> Dataset:
    """Opens the split of a dataset that `--split` names, which must match the model."""
    datasets = open_datasets(
        DataConfig(
            dataset=str(path),
            dataset_type=FLAGS.dataset_type,
            test_batch_size=FLAGS.batch_size,
            batch_size=FLAGS.batch_size,
            num_numerical_features=config.num_numerical_features,
            verify_data=FLAGS.verify_data,
            allow_links=FLAGS.allow_links,
        )
    )
    dataset: Dataset | None = getattr(datasets, FLAGS.split)
    if dataset is None:
        raise ValueError(f"{path}: has no {FLAGS.split} split")
    check_dataset(path, dataset, config)
    dataset.check_files()
    return dataset


def _take_log(
    predictor: Predictor, path: Path, shares: Shares, take: Callable[[Block], T]
) -> Iterator[T]:
    transform, first_row = predictor.row_transform, 0
    columns = len(transform.names) + FLAGS.label
    is_stdin = str(path) == "-"
    if path.suffix in (".gz", ".zst"):
        raise ValueError(f"{path}: compressed; unpack it into a pipe, and read --input -")
    with nullcontext(sys.stdin.buffer) if is_stdin else path.open("rb") as file:
        try:
            for text in read_lines(file, columns):
                labels = text.labels() if FLAGS.label else None
                fields = text.without_first() if FLAGS.label else text
                inputs = transform(fields)
                shares.add(fields.starts == fields.ends, inputs.without_id())
                yield take(Block(inputs, labels, partial(_inputs_of_text, fields)))
                first_row += text.rows
        except RowError as error:
            hint = "; lines without a label need --nolabel"
            if FLAGS["label"].present or isinstance(error, ScoreError):
                begins = not FLAGS.label and f"got {columns + 1}" in error.problem
                hint = "; lines that begin with a label need no --nolabel" if begins else ""
            where = f"{path}, line {first_row + error.row + 1}"
            raise ValueError(f"{where}{error.problem}{hint}") from None


def _inputs_of_text(text: Text, model: Predictor) -> Inputs:
    return model.row_transform(text)


def _take_tables(
    table: TableTransform,
    path: Path,
    shares: Shares,
    take: Callable[[Block], T],
    schema: Schema | None,
) -> Iterator[T]:
    """Applies `take` to rows of tables, in a file or a directory."""
    for folder in (path, *path.absolute().parents[:2]):
        if (folder / MANIFEST).is_file() and _kind(folder) == CONVERTED:
            raise ValueError(
                f"{path}: numbers of {folder} are transformed already, so they are no raw rows; "
                "score the dataset that it was converted from"
            )
    seen: set[str] = set()
    for file in find_tables([path], FLAGS.input_format, say):
        yield from _take_file(table, file, shares, take, schema, seen)
    wanted = scoring_reader(table, labelled=False, schema=schema).columns
    if _ANY_ROW in seen and (
        missing := [name for name in wanted if name not in seen]
    ):  # of JSON lines
        raise ValueError(f"{path}: no column {missing[0]!r} in any row")


def _take_file(
    table: TableTransform,
    file: TableFile,
    shares: Shares,
    take: Callable[[Block], T],
    schema: Schema | None,
    seen: set[str],
) -> Iterator[T]:
    """Applies `take` to the rows of a file, and adds the names of its columns to `seen`."""
    text, spans, label = _text_format(file, table), Spans(), table.schema.label.column
    names = file.columns(text)
    if not names and file.kind.delimited:  # an empty part, such as Spark writes
        return
    labelled = FLAGS.label and label in names
    reader = scoring_reader(table, labelled, schema)
    if not file.kind.may_lack_columns:
        _check_columns(file, text, names, reader.columns)
    cells = Cells.of(reader.schema, earlier=table.kinds is None)
    for batch, where in file.kind.batches(file, text, reader.columns, cells, spans, seen):
        try:
            inputs, rows = read_inputs(table, reader, batch)
            columns = rows.numerical, rows.categorical
            absent = missing_features(*columns, inputs.numerical.shape[1])
            shares.add(absent, inputs.without_id())
            seen |= {_ANY_ROW} if batch.num_rows else set()
            inputs_of = partial(_inputs_of_batch, batch)
            yield take(Block(inputs, labels_of(rows), inputs_of, rows.extra))
        except RowError as error:
            hint = ""
            if labelled and error.problem.startswith(f", column {label}:"):
                hint = "; --nolabel scores rows without their labels"
            raise ValueError(f"{where(error.row)}{error.problem}{hint}") from None
        except ValueError as error:
            raise ValueError(f"{file.path}: {error}") from None
    if note := spans.note(file.path, text):
        say(note)


def _check_columns(
    file: TableFile, text: TextFormat, names: Sequence[str], wanted: Sequence[str]
) -> None:
    def hint(missing: str) -> str:
        if not file.kind.delimited or text.columns:
            return ""
        other = text.header is not False and delimiter_hint(file.path, text, missing)
        return other or "; where the file has no header, --columns names them"

    check_columns(file.path, names, wanted, hint)


def _kind(folder: Path) -> str | None:
    with suppress(OSError, ValueError, KeyError):
        return str(read_json(folder / MANIFEST)["kind"])
    return None


def _text_format(file: TableFile, table: TableTransform) -> TextFormat:
    """Returns the format of a CSV; a file without a header has the columns of the training data.

    A first row without the name of a column that the model needs is not a header.
    """
    text = text_format().over(table.schema.format)
    if not file.kind.delimited or not table.columns or text.columns or text.header:
        return text
    plain = replace(text, header=False, chunk_rows=1)
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


def _inputs_of_batch(batch: Any, model: Predictor) -> Inputs:
    table = model.row_transform.table
    if table is None:
        raise ValueError(f"{model.path}: expected a model of tables, got one of logs")
    return read_inputs(table, scoring_reader(table, labelled=False), batch)[0]


def _print_metrics(logits: np.ndarray, labels: np.ndarray) -> None:
    metrics = click_metrics(torch.from_numpy(logits), torch.from_numpy(labels))
    known = {name: value for name, value in metrics.items() if not math.isnan(value)}
    print("  ".join(f"{name} {value:.6f}" for name, value in known.items()))
    for note in (metrics_note(known), one_class_note(metrics, len(labels))):
        if note:
            say(note)


if __name__ == "__main__":
    define_flags()
    run_command(main)
