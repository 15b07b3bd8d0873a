"""Scores rows with a trained model: dlrm predict --checkpoint DIR --input FILE

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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from dlrm.command_line import say
from dlrm.documents import cell
from dlrm.files import atomic_file, make_directories
from dlrm.flags import Values, run_command
from dlrm.metrics.table import TESTED, line_of, metrics_note, one_class_note
from dlrm.preproc.spark.session import SparkConfig, open_engine
from dlrm.scripts.common.scoring import CSV_FLAGS, open_predictor, scoring_line, source_config
from dlrm.scripts.common.table_flags import SPARK, spark_query
from dlrm.settings import REQUIRED, setting

if TYPE_CHECKING:
    import numpy as np

    from dlrm.preproc.spark.query import SparkQuery
    from dlrm.serving.rows.inputs import Inputs
    from dlrm.serving.scoring import Scorer
    from dlrm.serving.sources import SourceBlock

_LONGEST_BAR = 30  # characters, in an explanation
_MOST_IDS = 4  # ids of a list, in an explanation


@dataclass(frozen=True)
class PredictConfig:
    """The rows to score, and what is written of them; field names are those of the flags."""

    output: Path = setting(
        REQUIRED,
        "File to write the scores to, in NumPy's format, with a name that ends in .npy; an earlier "
        "file is replaced",
        uri="replace",
    )
    input: str | None = setting(
        None, "Log, table or dataset to score; -: standard input", uri="read"
    )
    output_kind: str = setting(
        "probability",
        "Scores to write: the probability of a click, or the model's logit",
        choices=("probability", "logit"),
    )
    explain: int | None = setting(
        None,
        "Print the contribution of each field to the logit of this row, counted from 0 (gradient "
        "x input)",
        least=0,
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    line = scoring_line(("Scores", PredictConfig), *SPARK)
    return run_command(line, _predict, __doc__, arguments)


def _predict(values: Values) -> None:
    own = values.config(PredictConfig)
    query = spark_query(values, "input", "dataset_type", *CSV_FLAGS)
    _check_paths(own, query)
    predictor = _open(own, values)
    if query is None:
        assert own.input is not None
        _score(predictor, own.input, own.input, values)
        return
    with _rows_of_query(query, predictor, values) as folder:
        _score(predictor, folder, query.flag, values)


def _check_paths(own: PredictConfig, query: "SparkQuery | None") -> None:
    from dlrm.serving.sources import check_source

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


def _open(own: PredictConfig, values: Values) -> "Scorer":
    """Opens a checkpoint, or an exported model."""
    from dlrm.serving.exported import exported_version, open_exported

    if (version := exported_version(values["checkpoint"])) is None:
        return open_predictor(values["checkpoint"], own.input, values)
    for name in ("dataset", "explain"):
        if values[name] is not None:
            raise ValueError(f"--{name}: expected a checkpoint, got {version}, an exported model")
    return open_exported(version, values["batch_size"])


@contextmanager
def _rows_of_query(query: "SparkQuery", predictor: "Scorer", values: Values) -> Iterator[str]:
    """Yields a directory beside the output with the rows written by Spark, for the block."""
    from dlrm.preproc.errors import EngineError
    from dlrm.preproc.spark.query import fetch_rows

    fitted = predictor.row_transform
    output, spark = values["output"].resolve(), values.config(SparkConfig).for_queries
    make_directories(output.parent)
    cores = os.cpu_count() or 1
    with TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as folder:
        labels = [fitted.schema.label.column] * (values["label"] is not False)
        try:
            place, log = Path(folder), output.parent / "spark.log"
            with open_engine("spark", cores, place, None, spark, log=log) as engine:
                fetch_rows(engine, query, fitted.names, place, labels)
            yield folder
        except EngineError as error:
            raise ValueError(str(error)) from None
        except ValueError as error:  # the place of a row in a temporary file
            message = str(error).removeprefix(f"{query.flag}: ").replace(f"{folder}/", "")
            raise ValueError(f"{query.flag}: {message}") from None


def _score(predictor: "Scorer", source: str, name: str, values: Values) -> None:
    """Writes the scores of a source, which has a name for messages, and prints their metrics."""
    import numpy as np

    from dlrm.data.layout import WEIGHT_FILE
    from dlrm.serving.rows.shares import shares_of
    from dlrm.serving.scoring import probability
    from dlrm.serving.sources import iter_scored_blocks

    own, began = values.config(PredictConfig), time.perf_counter()
    shares, config = shares_of(predictor.transform), source_config(predictor, values)
    rows, labels, logits, explained = 0, [], [], []

    def score(block: "SourceBlock") -> tuple[np.ndarray, np.ndarray | None]:
        found = predictor.logits_of(block.inputs)
        if own.explain is not None and 0 <= (row := own.explain - rows) < len(found):
            lead = f"row {own.explain}: logit {found[row]:.4f}; gradient x input of each field:"
            explained.extend([lead, *_explanation(predictor, block.inputs.part(row, row + 1))])
        return found, block.labels

    output = own.output.resolve()  # the target of a symbolic link
    make_directories(output.parent)
    with atomic_file(output) as partial, open(partial, "wb") as file:
        file.write(_header(rows))
        for part, known in iter_scored_blocks(predictor, source, config, shares, score):
            shown = probability(part) if own.output_kind == "probability" else part
            file.write(shown.astype("<f4").tobytes())
            rows += len(part)
            if known is not None:
                labels.append(known)
                logits.append(part)
        if own.explain is not None and not explained:
            raise ValueError(f"--explain {own.explain}: expected a row below {rows:,}")
        file.seek(0)
        file.write(_header(rows))
    speed = f"{rows / (time.perf_counter() - began):,.0f} rows/s"
    if predictor.sampling_note:
        say(predictor.sampling_note)
    scores = f"{rows:,} scores ({own.output_kind})"
    say(f"{own.output}: {scores} by {predictor.path}, {speed}", is_prose=True)
    if not rows:
        say(f"note: there are no rows in {name}")
    if labels and rows:
        _say_metrics(np.concatenate(logits), np.concatenate(labels))
        if (Path(name, config.split) / WEIGHT_FILE).is_file():
            say(
                "note: these metrics count every row once; `dlrm evaluate --weights weight` weighs "
                "rows as the dataset says"
            )
    if line := shares.line() if rows else None:
        say(line, is_prose=True)
    if line := shares.unseen_values_warning():
        say(f"warning: {line}")
    print("\n".join(explained), end="\n" * bool(explained))


def _header(rows: int) -> bytes:
    """Returns the header of a .npy file of float32, in which NumPy leaves room for more rows."""
    import numpy as np

    header = io.BytesIO()
    facts = {"descr": "<f4", "fortran_order": False, "shape": (rows,)}
    np.lib.format.write_array_header_1_0(header, facts)
    return header.getvalue()


def _explanation(predictor: "Scorer", inputs: "Inputs") -> Iterator[str]:
    """Yields each field's contribution to the logit of a row, as a table with bars."""
    import numpy as np

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


def _shown_ids(predictor: "Scorer", table: int, ids: list[int]) -> str:
    """Returns a row's value of a field, or those of a list, of which a long one is truncated."""
    transform = predictor.transform
    shown = [transform.value(table, id) if transform else f"id {id}" for id in ids[:_MOST_IDS]]
    more = f" and {len(ids) - _MOST_IDS} more" if len(ids) > _MOST_IDS else ""
    return ", ".join(map(cell, shown)) + more if shown else "(empty)"


def _say_metrics(logits: "np.ndarray", labels: "np.ndarray") -> None:
    from dlrm.metrics.ranked import RankedRows

    found = RankedRows(logits, labels).metrics()
    metrics = {name: found[name] for name in TESTED}
    known = {name: value for name, value in metrics.items() if not math.isnan(value)}
    say(line_of(known), is_prose=True)
    for note in (metrics_note(known), one_class_note(metrics, len(labels))):
        if note:
            say(note, is_prose=True)


if __name__ == "__main__":
    sys.exit(main())
