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
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

import numpy as np
import torch
from absl import flags

from dlrm.command_line import say
from dlrm.data.clicks import layout
from dlrm.documents import cell
from dlrm.files import make_directories, staged_file
from dlrm.metrics.clicks import click_metrics, one_class_note
from dlrm.metrics.table import line_of, metrics_note
from dlrm.preproc.execution.choice import open_engine
from dlrm.preproc.execution.engines import EngineError
from dlrm.preproc.execution.spark_query import SparkQuery, read_query
from dlrm.scripts.common import source_flags
from dlrm.scripts.common.command import no_arguments, run_command
from dlrm.scripts.common.source_flags import (
    CSV_FLAGS,
    define_source_flags,
    open_predictor,
    source_config,
)
from dlrm.scripts.common.spark_flags import define_spark_flags, spark_query, spark_settings
from dlrm.serving.importance import contributions
from dlrm.serving.predictor import Predictor, field_names, probability, shares_of
from dlrm.serving.sources import SourceBlock, check_source, taken

FLAGS = flags.FLAGS
OUTPUT_KINDS = ("probability", "logit")
_LONGEST_BAR = 30  # characters, in an explanation
_MOST_IDS = 4  # ids of a list, in an explanation


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


def main(argv: list[str]) -> None:
    no_arguments(argv)
    run()


def run() -> None:
    """Runs the command.

    Raises:
        ValueError, OSError: an error that the user can fix.
    """
    query = spark_query("input", "dataset_type", *CSV_FLAGS)
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
    fitted = predictor.row_transform
    output = Path(FLAGS.output).resolve()
    make_directories(output.parent)
    cores, log, memory = os.cpu_count() or 1, output.parent / "spark.log", FLAGS.memory_gib
    with TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as folder:
        labels = [fitted.schema.label.column] * FLAGS.label
        try:
            settings = spark_settings(query)
            here = [Path(folder)]
            with open_engine("spark", cores, log, FLAGS.master, memory, settings, here) as engine:
                read_query(engine, query, fitted.names, Path(folder), labels)
            yield folder
        except EngineError as error:
            raise ValueError(str(error)) from None
        except ValueError as error:  # the place of a row in a temporary file
            message = str(error).removeprefix(f"{query.flag}: ").replace(f"{folder}/", "")
            raise ValueError(f"{query.flag}: {message}") from None


def _score(predictor: Predictor, source: str, name: str) -> None:
    """Writes the scores of a source, which has a name for messages, and prints their metrics."""
    began, labels, logits = time.perf_counter(), [], []
    shares, config = shares_of(predictor.transform), source_config(predictor)
    explained: list[str] = []

    def score(block: SourceBlock) -> tuple[np.ndarray, np.ndarray | None]:
        logits = predictor.logits_of(block.inputs)
        if FLAGS.explain is not None and 0 <= FLAGS.explain - file.rows < len(logits):
            explained.extend(_explanation(predictor, block, logits, FLAGS.explain - file.rows))
        return logits, block.labels

    with score_file(Path(FLAGS.output)) as file:
        for part, known in taken(predictor, source, config, shares, score):
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


def _explanation(
    predictor: Predictor, block: SourceBlock, logits: np.ndarray, row: int
) -> list[str]:
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


def _counts_rows_once(source: str) -> str | None:
    """Returns a line on the metrics of a dataset with sample weights, which `evaluate` can use."""
    if not Path(source, FLAGS.split, layout.WEIGHT_FILE).is_file():
        return None
    return (
        "note: these metrics count every row once; `python -m dlrm.scripts.evaluate --weights "
        "weight` weighs rows as the dataset says"
    )


def _print_metrics(logits: np.ndarray, labels: np.ndarray) -> None:
    metrics = click_metrics(torch.from_numpy(logits), torch.from_numpy(labels))
    known = {name: value for name, value in metrics.items() if not math.isnan(value)}
    print(line_of(known))
    for note in (metrics_note(known), one_class_note(metrics, len(labels))):
        if note:
            say(note)


if __name__ == "__main__":
    define_flags()
    flags.adopt_module_key_flags(source_flags)  # for --help
    run_command(main)
