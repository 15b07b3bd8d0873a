"""Writes a table by every route that users have, and reads it as a fitted transform does.

A table is a mapping from names to columns: lists of Python values, with None for missing ones, or
arrays of numpy. Files are written by csv, json, pyarrow, pandas and Polars alone.
"""

import os
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow import feather, orc
from tables_testing import csv_module, json_module, prepare, rows_of, texts

import dlrm
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.files import find_tables
from dlrm.data.tables.formats.cells import Cells
from dlrm.data.transform.transform import Transform
from dlrm.serving.predictor import Predictor
from dlrm.serving.rows.raw import inputs_of_text, text_of_tensors
from dlrm.serving.rows.tables import read_inputs, scoring_reader
from dlrm.serving.server.names import RAW

polars = pytest.importorskip("polars")


def broken(fault, *case):
    """Returns a case of a fault that is not mended yet, and is expected to fail."""
    return pytest.param(*case, marks=pytest.mark.xfail(strict=True, reason=fault))


def as_pandas(table):
    return pandas.DataFrame(table)


def as_nullable(table):
    """Returns a DataFrame of the types of pandas that have missing values."""
    return as_objects(table).convert_dtypes()


def as_objects(table):
    """Returns a DataFrame of Python objects."""
    return pandas.DataFrame({n: pandas.Series(v, dtype=object) for n, v in table.items()})


def as_polars(table):
    return polars.DataFrame(table, infer_schema_length=None)


def as_arrow(table):
    return pa.table({name: pa.array(values) for name, values in table.items()})


def as_dictionaries(table):
    """Returns an Arrow table whose texts are indices into dictionaries."""
    coded = pa.dictionary(pa.int32(), pa.string())
    return of_types(table, {pa.string(): coded, pa.list_(pa.string()): pa.list_(coded)})


def as_views(table):
    """Returns an Arrow table whose texts and lists are views."""
    text, integer = pa.string_view(), pa.int64()
    views = {pa.list_(pa.string()): pa.list_view(text), pa.list_(integer): pa.list_view(integer)}
    return of_types(table, {pa.string(): text, **views})


def of_types(table, types):
    """Returns an Arrow table with other types for some."""
    found = {name: pa.array(values).type for name, values in table.items()}
    return pa.table({n: pa.array(v, types.get(found[n], found[n])) for n, v in table.items()})


def as_slices(table):
    """Returns an Arrow table of chunks that begin within their buffers."""
    arrays = {name: pa.array(values) for name, values in table.items()}
    whole = pa.table({n: pa.concat_arrays([a, a]) for n, a in arrays.items()})
    rows, half = whole.num_rows // 2, whole.num_rows // 4
    return pa.concat_tables([whole.slice(rows, half), whole.slice(half, rows - half)])


def pandas_csv(table, path):
    as_pandas(table).to_csv(path, index=False)


def nullable_csv(table, path):
    as_nullable(table).to_csv(path, index=False)


def polars_csv(table, path):
    as_polars(table).write_csv(path)


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


def arrow_orc(table, path):
    whole = as_arrow(table)
    orc.write_table(pa.table({name: _of_orc(whole[name]) for name in table}), path)


def _of_orc(chunks):
    """Returns a column in a type that ORC has: of these, text can express all values."""
    others = (pa.uint8(), pa.uint64(), pa.time64("us"), pa.null())
    return chunks.cast(pa.string()) if chunks.type in others else chunks


def arrow_ipc(table, path):
    feather.write_feather(as_arrow(table), path)


def arrow_stream(table, path):
    whole = as_dictionaries(table)
    with pa.ipc.new_stream(path, whole.schema) as writer:
        writer.write_table(whole, 2)


def polars_ipc(table, path):
    as_polars(table).write_ipc(path)


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
    "orc": (arrow_orc, ".orc"),
    "ipc": (arrow_ipc, ".feather"),
    "stream": (arrow_stream, ".arrows"),
    "polars ipc": (polars_ipc, ".arrow"),
}
FRAMES = {
    "arrow": as_arrow,
    "dictionaries": as_dictionaries,
    "views": as_views,
    "slices": as_slices,
    "pandas": as_pandas,
    "nullable": as_nullable,
    "objects": as_objects,
    "polars": as_polars,
}


def dicts(table, names):
    return rows_of(table)


def sequences(table, names):
    return list(zip(*(table[name] for name in names), strict=True))


def columns(table, names):
    return table


def arrays(table, names):
    """Returns columns of numpy, as users make them; lists stay."""
    nested = {n for n, values in table.items() if any(type(v) is list for v in values)}
    return {n: v if n in nested else np.array(v) for n, v in table.items()}


def scalars(table, names):
    """Returns rows of numpy's scalars."""
    there = {
        name: [v if v is None or type(v) is list else np.array([v])[0] for v in values]
        for name, values in table.items()
    }
    return rows_of(there)


def records(table, names):
    return as_pandas(table).to_dict("records")


def lines(table, names):
    return ["\t".join(row) for row in zip(*(texts(table[name]) for name in names), strict=True)]


def cells(table, names):
    """Returns rows of text, as the csv module reads them."""
    return rows_of({name: texts(table[name]) for name in names})


ROWS = {f.__name__: f for f in (dicts, sequences, columns, arrays, scalars, records, lines, cells)}
ROUTES = [*FILES, *FRAMES, *ROWS, RAW]


class Recorder(Predictor):
    """A predictor that keeps the inputs of its model and scores nothing."""

    def __init__(self, transform):
        super().__init__(torch.nn.Identity(), transform, Path("model"))
        self.inputs = []

    def logits_of(self, inputs):
        self.inputs.append(inputs)
        return np.zeros(len(inputs.numerical), np.float32)


def fitted(schema, table, route, folder):
    """Returns the transform of a table that a route brings to preprocessing."""
    output = folder / f"dataset of {route}"
    if route in FILES:
        write, suffix = FILES[route]
        write(table, path := folder / f"{route}{suffix}")
        prepare(schema, [path], output)
    else:
        options = {"test_fraction": 0.0, "cores": 1}
        with patch.object(os, "fsync"):
            dlrm.Dataset.from_arrow(FRAMES[route](table), schema, output, **options)
    return Transform.load(output / "transform")


def written(table, folder, routes=tuple(ROUTES)):
    """Writes the files of routes; returns route -> path."""
    paths = {}
    for route in FILES.keys() & set(routes):
        write, suffix = FILES[route]
        write(table, path := folder / f"{route}{suffix}")
        paths[route] = path
    return paths


def inputs_of(transform, table, route, paths):
    """Returns the inputs of a model, in parts, from a table that a route brings to scoring."""
    if route in FILES:
        return of_file(transform, paths[route])
    if route == RAW:
        return [of_request(transform, lines(table, transform.names))]
    rows = FRAMES[route](table) if route in FRAMES else ROWS[route](table, transform.names)
    return of_rows(transform, rows)


def of_rows(transform, rows):
    """Returns the inputs of anything that `predict` takes."""
    recorder = Recorder(transform)
    recorder.predict(rows)
    return recorder.inputs


def of_file(transform, path):
    """Returns the inputs of a file, as `predict --input` reads it."""
    (file,) = find_tables([path])
    reader = scoring_reader(transform, labeled=False)
    text = TextFormat().over(transform.schema.format)
    batches = file.format.batches(file, text, reader.columns, Cells.from_schema(transform.schema))
    return [read_inputs(transform, reader, batch)[0] for batch, _ in batches]


def of_request(transform, lines):
    """Returns the inputs of lines of text, as the server reads them."""
    encoded = [line.encode() for line in lines]
    width = max(map(len, encoded), default=0)
    tensor = np.frombuffer(b"".join(line.ljust(width, b"\0") for line in encoded), np.uint8)
    text = text_of_tensors([tensor.reshape(-1, width)], len(transform.names))
    return inputs_of_text(transform, text)


def ids_of(transform, parts, name):
    """Returns a field's id in each row, or the ids of its list."""
    table, found = transform.schema.categorical_names.index(name), []
    for part in parts:
        rows = [part.ids_of(row, table).tolist() for row in range(len(part.numerical))]
        found += rows if table in transform.longest else [ids for (ids,) in rows]
    return found


def weights_of(transform, parts, name):
    """Returns the weights of a field's list in each row."""
    table, found = transform.schema.categorical_names.index(name), []
    for part in parts:
        lists = np.split(part.weights, part.lengths.ravel().cumsum()[:-1])
        found += [own.tolist() for own in lists[table :: part.num_tables][: len(part.lengths)]]
    return found


def numbers_of(transform, parts, name):
    """Returns a field's number in each row."""
    place = transform.schema.numerical_names.index(name)
    return [number for part in parts for number in part.numerical[:, place].tolist()]
