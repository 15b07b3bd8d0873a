"""Writes a table by every route that users have, and reads it as a fitted transform does.

A table is a mapping from names to lists of Python values, with None for a missing one. Files are
written by csv, json, pyarrow, pandas and Polars alone.
"""

import csv
import datetime as dt
import io
import json
from pathlib import Path

import numpy as np
import pandas
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tables_testing import prepare

from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.files import find_tables
from dlrm.data.tables.text import Cells, batches_of
from dlrm.data.transform.schema import Schema
from dlrm.serving.predictor import Predictor
from dlrm.serving.reader import RAW
from dlrm.serving.rows import RowTransform, text_of_tensors
from dlrm.serving.tables import read_inputs, scoring_reader


def as_pandas(table):
    """Returns a DataFrame as users make it, of types that pandas chooses."""
    return pandas.DataFrame(table)


def as_nullable(table):
    """Returns a DataFrame of pandas' nullable types."""
    return pandas.DataFrame({n: _object(v) for n, v in table.items()}).convert_dtypes()


def as_objects(table):
    """Returns a DataFrame of Python objects."""
    return pandas.DataFrame({name: _object(values) for name, values in table.items()})


def _object(values):
    return pandas.Series(values, dtype=object)


def as_polars(table):
    return polars.DataFrame(table, infer_schema_length=None)


def as_arrow(table):
    return pa.table({name: _array(values) for name, values in table.items()})


def _array(values):
    wide = any(isinstance(value, int) and value >= 1 << 63 for value in values)
    return pa.array(values, pa.uint64() if wide else None)


def as_dictionaries(table):
    """Returns an Arrow table whose text is in dictionaries."""
    arrays = {name: _array(values) for name, values in table.items()}
    return pa.table(
        {n: a.dictionary_encode() if a.type == pa.string() else a for n, a in arrays.items()}
    )


def _text(value):
    return "" if value is None else "|".join(map(str, value)) if isinstance(value, list) else value


def csv_module(table, path):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(table)
        writer.writerows([map(_text, row) for row in zip(*table.values(), strict=True)])


def pandas_csv(table, path):
    as_pandas(table).to_csv(path, index=False)


def nullable_csv(table, path):
    as_nullable(table).to_csv(path, index=False)


def polars_csv(table, path):
    as_polars(table).write_csv(path)


def json_module(table, path):
    rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    path.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows))


def pandas_json(table, path):
    as_pandas(table).to_json(path, orient="records", lines=True, date_format="iso", date_unit="ns")


def polars_json(table, path):
    as_polars(table).write_ndjson(path)


def arrow_parquet(table, path):
    pq.write_table(as_arrow(table), path)


def pandas_parquet(table, path):
    as_pandas(table).to_parquet(path)


def polars_parquet(table, path):
    as_polars(table).write_parquet(path)


FILES = {
    "csv": (csv_module, ".csv"),
    "pandas csv": (pandas_csv, ".csv"),
    "nullable csv": (nullable_csv, ".csv"),
    "polars csv": (polars_csv, ".csv"),
    "json": (json_module, ".jsonl"),
    "pandas json": (pandas_json, ".jsonl"),
    "polars json": (polars_json, ".jsonl"),
    "parquet": (arrow_parquet, ".parquet"),
    "pandas parquet": (pandas_parquet, ".parquet"),
    "polars parquet": (polars_parquet, ".parquet"),
}
FRAMES = {
    "arrow": as_arrow,
    "dictionaries": as_dictionaries,
    "pandas": as_pandas,
    "nullable": as_nullable,
    "objects": as_objects,
    "polars": as_polars,
}


class Recorder(Predictor):
    """A predictor that keeps the inputs of a model instead of scoring them."""

    def __init__(self, transform):
        super().__init__(torch.nn.Identity(), transform, Path("model"))
        self.inputs = []

    def logits_of(self, inputs):
        self.inputs.append(inputs)
        return np.zeros(len(inputs.numerical), np.float32)


def of_file(transform, path):
    """Returns the inputs of a file, as `predict --input` reads it."""
    (file,), table = find_tables([path]), transform.table
    reader = scoring_reader(table, labelled=False)
    cells = Cells.of(table.schema)
    text = TextFormat().over(table.schema.format)
    parts = batches_of(file, text, reader.columns, cells)
    return [read_inputs(table, reader, batch)[0] for batch, _ in parts]


def of_rows(transform, rows):
    """Returns the inputs of anything that `predict` takes."""
    predictor = Recorder(transform)
    predictor.predict(rows)
    return predictor.inputs


def dicts(table, names):
    return [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]


def sequences(table, names):
    return [list(row) for row in zip(*(table[name] for name in names), strict=True)]


def columns(table, names):
    return dict(table)


def arrays(table, names):
    """Returns columns of numpy, as users make them; lists stay."""
    made = {}
    for name, values in table.items():
        nested = any(isinstance(value, list) for value in values)
        made[name] = values if nested else np.array(values)
    return made


def scalars(table, names):
    """Returns rows of numpy's scalars, as `frame.to_dict("records")` and rows of arrays have."""
    made = {
        name: [v if v is None or isinstance(v, list) else np.array([v])[0] for v in values]
        for name, values in table.items()
    }
    return dicts(made, names)


def records(table, names):
    return as_pandas(table).to_dict("records")


def lines(table, names):
    rows = zip(*(table[name] for name in names), strict=True)
    return ["\t".join(str(_text(value)) for value in row) for row in rows]


ROWS = {f.__name__: f for f in (dicts, sequences, columns, arrays, scalars, records, lines)}


def of_requests(transform, table):
    """Returns the inputs of rows of text as the server reads them."""
    texts = [line.encode() for line in lines(table, transform.names)]
    width = max(map(len, texts), default=0)
    padded = b"".join(text.ljust(width, b"\0") for text in texts)
    tensor = np.frombuffer(padded, np.uint8).reshape(len(texts), width)
    return [transform(text_of_tensors([tensor], len(transform.names)))]


def fitted(schema, table, route, folder):
    """Returns the transform of a table that a route brings to preprocessing, and its file."""
    import dlrm

    output = folder / "dataset"
    if route in FILES:
        write, suffix = FILES[route]
        write(table, path := folder / f"table{suffix}")
        prepare(schema, [path], output)
    else:
        dlrm.Dataset.from_arrow(
            FRAMES[route](table), schema, output, test_fraction=0.0, cores=1
        )
    return RowTransform.load(output)


def read(transform, table, route, folder):
    """Returns the numbers and ids of a table by a route."""
    names = transform.names
    if route in FILES:
        write, suffix = FILES[route]
        write(table, path := folder / f"scored{suffix}")
        parts = of_file(transform, path)
    elif route in FRAMES:
        parts = of_rows(transform, FRAMES[route](table))
    elif route in ROWS:
        parts = of_rows(transform, ROWS[route](table, names))
    else:
        assert route == RAW
        parts = of_requests(transform, table)
    return parts
