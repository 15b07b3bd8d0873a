"""Scores rows with a trained model: python -m dlrm.scripts.predict --checkpoint DIR --input FILE

The input is a log as it was trained on (`day_0`: a label, integers and hashes, separated by tabs;
"-" reads standard input), a CSV, or a dataset's directory. It is read and scored some megabytes at
a time, and the scores, a float32 each, are written in the order of the rows.
"""

import dlrm.scripts.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import io
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from absl import app, flags

from dlrm.data.csv_columns import CsvFormat
from dlrm.data.loader import DataConfig, Dataset, open_datasets
from dlrm.serving.predictor import BATCH_SIZE, Predictor, check_dataset, load, probability
from dlrm.serving.rows import RowError, read_lines, text_of_fields
from dlrm.train.metrics import click_metrics

FLAGS = flags.FLAGS
Scored = Iterator[tuple[np.ndarray, np.ndarray | None]]  # logits of some rows; labels if known
OUTPUT_KINDS = ("probability", "logit")
SPLITS = ("test", "validation", "train")
_CSV_FLAGS = ("columns", "header", "delimiter")


def define_flags() -> None:
    flags.DEFINE_string(
        "checkpoint",
        None,
        "Checkpoint, or directory of checkpoints, of which the best is taken",
        required=True,
    )
    flags.DEFINE_string(
        "input", None, "Log, CSV or dataset to score; - is standard input", required=True
    )
    flags.DEFINE_string("output", None, "File of the scores, .npy; replaced", required=True)
    flags.DEFINE_enum(
        "output_kind", "probability", OUTPUT_KINDS, "Probability of a click, or the model's logit"
    )
    flags.DEFINE_boolean("label", True, "Whether the lines of a log begin with the label")
    flags.DEFINE_string(
        "dataset", None, "Dataset whose fitted transform is applied where a checkpoint has none"
    )
    flags.DEFINE_enum("split", "test", SPLITS, "Which rows of a dataset are scored")
    flags.DEFINE_enum("dataset_type", "split", ["split", "binary"], "Type of a dataset")
    flags.DEFINE_integer("batch_size", BATCH_SIZE, "Rows scored at a time", lower_bound=1)
    flags.DEFINE_list("columns", [], "Names of a CSV's columns; without: those of its header")
    flags.DEFINE_boolean(
        "header", None, "Whether a CSV begins with the names; default: unless --columns does"
    )
    flags.DEFINE_string("delimiter", ",", "What separates the cells of a CSV")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"expected flags only, got {argv[1:]}")
    try:
        run()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def run() -> None:
    """Does what the flags say.

    Raises:
        ValueError, OSError: what the user can mend.
    """
    scored = FLAGS.input if Path(FLAGS.input).is_dir() else None
    _check_paths()
    predictor = load(FLAGS.checkpoint, FLAGS.dataset or scored)
    predictor.batch_size = FLAGS.batch_size
    began, labels, logits = time.perf_counter(), [], []
    with ScoreFile(Path(FLAGS.output)) as file:
        for part, known in _scored(predictor):
            file.write(probability(part) if FLAGS.output_kind == "probability" else part)
            if known is not None:
                labels.append(known)
                logits.append(part)
    seconds = time.perf_counter() - began
    print(
        f"{FLAGS.output}: {file.rows:,} scores ({FLAGS.output_kind}) by {predictor.path}, "
        f"{file.rows / seconds:,.0f} rows/s"
    )
    if not file.rows:
        print(f"note: there are no rows in {FLAGS.input}")
    if labels:
        metrics = _metrics(np.concatenate(logits), np.concatenate(labels))
        print("  ".join(f"{name} {value:.6f}" for name, value in metrics.items()))


def _check_paths() -> None:
    if len(FLAGS.delimiter) != 1:
        raise ValueError(f"--delimiter {FLAGS.delimiter!r}: expected one character")
    output = Path(FLAGS.output)
    if not FLAGS.output or output.is_dir():
        raise ValueError(f"--output {FLAGS.output!r}: expected a file for the scores")
    if output.exists() and not output.is_file():
        raise ValueError(f"--output {output}: expected a regular file, which is replaced")
    if FLAGS.input == "-":
        return
    if not Path(FLAGS.input).exists():
        raise FileNotFoundError(f"{FLAGS.input}: no such file or directory (--input)")
    if output.exists() and output.samefile(FLAGS.input):
        raise ValueError(f"--output {output}: is the --input, which it would replace")


class ScoreFile:
    """A .npy file of float32 whose length is known only when it ends; it appears when it is whole.

    Args:
        path: replaced if it is there; of a symbolic link, what it points to.
    """

    def __init__(self, path: Path) -> None:
        path = path.resolve()
        self.rows, self._path = 0, path
        self._partial = path.with_name(f".{path.name}.partial-{os.getpid()}")

    def __enter__(self) -> "ScoreFile":
        self._path.absolute().parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._partial, "wb")  # noqa: SIM115
        self._header_bytes = self._file.write(self._header())
        return self

    def write(self, scores: np.ndarray) -> None:
        """Appends scores."""
        self._file.write(scores.astype("<f4").tobytes())
        self.rows += len(scores)

    def __exit__(self, kind: Any, *error: Any) -> None:
        with closing(self._file) as file:
            if kind is None:
                header = self._header()
                assert len(header) == self._header_bytes, "numpy leaves room for a longer number"
                file.seek(0)
                file.write(header)
        if kind is None:
            self._partial.replace(self._path)
        else:
            self._partial.unlink()

    def _header(self) -> bytes:
        header = io.BytesIO()
        facts = {"descr": "<f4", "fortran_order": False, "shape": (self.rows,)}
        np.lib.format.write_array_header_1_0(header, facts)
        return header.getvalue()


def _scored(predictor: Predictor) -> Scored:
    path = Path(FLAGS.input)
    is_csv = predictor.transform is not None and predictor.transform.is_csv
    if not is_csv and (given := [name for name in _CSV_FLAGS if FLAGS[name].present]):
        raise ValueError(f"--{given[0]}: is for models of CSV data; {predictor.path} is none")
    if FLAGS.input != "-" and path.is_dir():
        return _score_dataset(predictor, path)
    if is_csv and FLAGS.input == "-":
        raise ValueError("--input -: standard input is for logs; name the file of a CSV")
    return _score_csv(predictor, path) if is_csv else _score_log(predictor, path)


def _score_dataset(predictor: Predictor, path: Path) -> Scored:
    config = predictor.model.config
    datasets = open_datasets(
        DataConfig(
            dataset=str(path),
            dataset_type=FLAGS.dataset_type,
            test_batch_size=FLAGS.batch_size,
            batch_size=FLAGS.batch_size,
            num_numerical_features=config.num_numerical_features,
        )
    )
    dataset: Dataset | None = getattr(datasets, FLAGS.split)
    if dataset is None:
        raise ValueError(f"{path}: has no {FLAGS.split} split")
    check_dataset(path, dataset, config)
    first_row = 0
    for index in range(len(dataset)):
        try:
            yield predictor.score_batch(dataset.batch(index))
        except RowError as error:
            where = f"{path}: {FLAGS.split} row {first_row + error.row}"
            raise ValueError(f"{where}{error.problem}") from None
        first_row += dataset.batch_size


def _score_log(predictor: Predictor, path: Path) -> Scored:
    transform, first_row = predictor.row_transform, 0
    columns = len(transform.names) + FLAGS.label
    if path.suffix in (".gz", ".zst"):
        raise ValueError(f"{path}: compressed; unpack it into a pipe, and read --input -")
    with nullcontext(sys.stdin.buffer) if FLAGS.input == "-" else path.open("rb") as file:
        try:
            for text in read_lines(file, columns):
                labels = text.labels() if FLAGS.label else None
                fields = text.without_first() if FLAGS.label else text
                yield predictor.logits_of_text(fields), labels
                first_row += text.rows
        except RowError as error:
            hint = "" if FLAGS["label"].present else "; lines without a label need --nolabel"
            where = f"{FLAGS.input}, line {first_row + error.row + 1}"
            raise ValueError(f"{where}{error.problem}{hint}") from None


def _score_csv(predictor: Predictor, path: Path) -> Scored:
    names = predictor.row_transform.names
    header = not FLAGS.columns if FLAGS.header is None else FLAGS.header
    chunks = CsvFormat(tuple(FLAGS.columns), header, FLAGS.delimiter).chunks(path)
    for found, lines, records in chunks:
        if missing := [name for name in names if name not in found]:
            hint = "" if FLAGS.columns else "; where the file has no header, --columns names them"
            raise ValueError(f"{path}: no column {missing[0]!r}; the columns are {found}{hint}")
        if twice := [name for name in names if found.count(name) > 1]:
            raise ValueError(f"{path}: two columns are called {twice[0]!r}")
        chosen = [found.index(name) for name in names]
        cells = [[record[index].encode() for index in chosen] for record in records]
        try:
            yield predictor.logits_of_text(text_of_fields(cells, len(names))), None
        except RowError as error:
            raise ValueError(f"{path}, line {lines[error.row]}{error.problem}") from None


def _metrics(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    metrics = click_metrics(torch.from_numpy(logits), torch.from_numpy(labels))
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


if __name__ == "__main__":
    define_flags()
    app.run(main)
