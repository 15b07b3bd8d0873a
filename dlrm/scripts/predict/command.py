"""Scores the rows of a source and writes the scores to a file."""

import dlrm.environment  # noqa: F401  # first: torch reads it if it is loaded

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

from dlrm.command_line import say
from dlrm.data import layout
from dlrm.documents import cell
from dlrm.files import atomic_file, make_directories
from dlrm.flags import Values
from dlrm.metrics.table import line_of, metrics_note, one_class_note
from dlrm.preproc.spark.query import SparkQuery, fetch_rows
from dlrm.scripts.common.scoring import open_predictor, source_config
from dlrm.scripts.common.source_flags import CSV_FLAGS
from dlrm.scripts.common.spark_flags import spark_query
from dlrm.scripts.predict.flags import PredictConfig
from dlrm.serving.exported import ExportedModel, exported_version
from dlrm.serving.rows.inputs import Inputs
from dlrm.serving.scoring import Scoring, probability, shares_of
from dlrm.serving.sources import SourceBlock, check_source, iter_scored_blocks

_LONGEST_BAR = 30  # characters, in an explanation
_MOST_IDS = 4  # ids of a list, in an explanation


def run(values: Values) -> None:
    """Runs the command."""
    own, query = (
        values.config(PredictConfig),
        spark_query(values, "input", "dataset_type", *CSV_FLAGS),
    )
    _check_paths(own, query)
    predictor = _open(values)
    if note := predictor.sampling_note:
        say(note)
    if query is None:
        assert own.input is not None
        _score(predictor, own.input, own.input, values)
        return
    with _rows_of_query(query, predictor, values) as folder:
        _score(predictor, folder, query.flag, values)


def _open(values: Values) -> Scoring:
    """Opens a checkpoint, or an exported model."""
    own, checkpoint = values.config(PredictConfig), values["checkpoint"]
    if (version := exported_version(checkpoint)) is None:
        return open_predictor(checkpoint, own.input, values)
    for name in ("dataset", "explain"):
        if values[name] is not None:
            raise ValueError(f"--{name}: expected a checkpoint, got {version}, an exported model")
    return ExportedModel(version, values["batch_size"])


@contextmanager
def _rows_of_query(query: SparkQuery, predictor: Scoring, values: Values) -> Iterator[str]:
    """Yields a directory beside the output with the rows written by Spark, for the block."""
    from dlrm.preproc.errors import EngineError
    from dlrm.preproc.spark.session import SparkConfig, open_engine

    fitted = predictor.row_transform
    output, spark = values["output"].resolve(), values.config(SparkConfig).for_queries
    make_directories(output.parent)
    cores = os.cpu_count() or 1
    with TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as folder:
        labels = [fitted.schema.label.column] * (values["label"] is not False)
        try:
            place, log = Path(folder), output.parent / "spark.log"
            with open_engine("spark", cores, place, None, spark, log=log) as engine:
                fetch_rows(engine, query, fitted.names, Path(folder), labels)
            yield folder
        except EngineError as error:
            raise ValueError(str(error)) from None
        except ValueError as error:  # the place of a row in a temporary file
            message = str(error).removeprefix(f"{query.flag}: ").replace(f"{folder}/", "")
            raise ValueError(f"{query.flag}: {message}") from None


def _score(predictor: Scoring, source: str, name: str, values: Values) -> None:
    """Writes the scores of a source, which has a name for messages, and prints their metrics."""
    began, labels, logits = time.perf_counter(), [], []
    shares, config = shares_of(predictor.transform), source_config(predictor, values)
    own = values.config(PredictConfig)
    explained: list[str] = []

    def score(block: SourceBlock) -> tuple[np.ndarray, np.ndarray | None]:
        logits = predictor.logits_of(block.inputs)
        if own.explain is not None and 0 <= own.explain - file.rows < len(logits):
            inputs, row = block.inputs, own.explain - file.rows
            explained.append(
                f"row {own.explain}: logit {logits[row]:.4f}; gradient x input of each field:"
            )
            explained.extend(_explanation(predictor, inputs.part(row, row + 1)))
        return logits, block.labels

    with score_file(own.output) as file:
        for part, known in iter_scored_blocks(predictor, source, config, shares, score):
            file.write(probability(part) if own.output_kind == "probability" else part)
            if known is not None:
                labels.append(known)
                logits.append(part)
        if own.explain is not None and not explained:
            raise ValueError(f"--explain {own.explain}: expected a row below {file.rows:,}")
    seconds = time.perf_counter() - began
    say(
        f"{own.output}: {file.rows:,} scores ({own.output_kind}) by {predictor.path}, "
        f"{file.rows / seconds:,.0f} rows/s",
        is_prose=True,
    )
    if not file.rows:
        say(f"note: there are no rows in {name}")
    if labels and file.rows:
        all_labels = np.concatenate(labels)
        _print_metrics(predictor.tested(np.concatenate(logits), all_labels), len(all_labels))
        if note := _counts_rows_once(Path(name, config.split)):
            say(note)
    if line := shares.line() if file.rows else None:
        say(line, is_prose=True)
    if line := shares.unseen_values_warning():
        say(f"warning: {line}")
    print("\n".join(explained), end="\n" * bool(explained))


def _explanation(predictor: Scoring, inputs: Inputs) -> Iterator[str]:
    """Yields each field's contribution to the logit of a row, as a table with bars."""
    from dlrm.serving.importance import contributions
    from dlrm.serving.predictor import Predictor, field_names

    assert isinstance(predictor, Predictor)
    added = contributions(predictor, inputs)[0]
    values = [f"{value:.4g}" for value in inputs.numerical[0].tolist()]
    values += [
        _shown_ids(predictor, table, inputs.ids_of(0, table).tolist())
        for table in range(inputs.num_tables)
    ]
    names = [cell(name) for kind in field_names(predictor) for name in kind]
    widths = [max(map(len, cells)) for cells in (names, values)]
    scale = _LONGEST_BAR / max(float(np.abs(added).max()), 1e-12)
    for field in np.argsort(-np.abs(added), kind="stable").tolist():
        bar = ("+" if added[field] > 0 else "-") * round(abs(added[field]) * scale)
        name, value = names[field].ljust(widths[0]), values[field].ljust(widths[1])
        yield f"{name}  {value}  {added[field]:+9.4f}  {bar}".rstrip()


def _shown_ids(predictor: Scoring, table: int, ids: list[int]) -> str:
    """Returns a row's value of a field, or those of a list, of which a long one is truncated."""
    transform = predictor.transform
    shown = [transform.value(table, id) if transform else f"id {id}" for id in ids[:_MOST_IDS]]
    more = f" and {len(ids) - _MOST_IDS} more" if len(ids) > _MOST_IDS else ""
    return ", ".join(map(cell, shown)) + more if shown else "(empty)"


def _check_paths(own: PredictConfig, query: SparkQuery | None) -> None:
    if query is None and own.input is None:
        raise ValueError(
            "--input: expected a log, a table or a dataset, or --spark_table or --spark_sql in its "
            "place, got none"
        )
    output = own.output
    if output.is_dir():  # also if the flag is empty
        raise ValueError(f"--output {str(output)!r}: expected a file for the scores")
    if output.exists() and not output.is_file():
        raise ValueError(f"--output {output}: expected a regular file, which is replaced")
    if output.suffix != ".npy":
        raise ValueError(f"--output {output}: expected a name that ends in .npy")
    if own.input is None:
        return
    source = check_source(own.input)
    if own.input != "-" and output.exists() and output.samefile(source):
        raise ValueError(f"--output {output}: is the --input, which it would replace")


@contextmanager
def score_file(path: Path) -> Iterator["ScoreFile"]:
    """Yields a file of scores that appears, whole, when the block ends without an error.

    Args:
        path: replaced if it exists; for a symbolic link, the link's target.
    """
    path = path.resolve()
    make_directories(path.parent)
    with atomic_file(path) as partial, open(partial, "wb") as file:
        scores = ScoreFile(file)
        yield scores
        scores.finish()


class ScoreFile:
    """A .npy file of float32 whose length is known only when it ends.

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


def _counts_rows_once(split: Path) -> str | None:
    """Returns a line on the metrics of a dataset with sample weights, which `evaluate` can use."""
    if not (split / layout.WEIGHT_FILE).is_file():
        return None
    return (
        "note: these metrics count every row once; `dlrm evaluate --weights "
        "weight` weighs rows as the dataset says"
    )


def _print_metrics(metrics: dict[str, float], rows: int) -> None:
    known = {name: value for name, value in metrics.items() if not math.isnan(value)}
    say(line_of(known), is_prose=True)
    for note in (metrics_note(known), one_class_note(metrics, rows)):
        if note:
            say(note, is_prose=True)
