"""Turns batches of a table into a model's inputs, by the transform of its training data."""

from typing import Any

import numpy as np
import pyarrow as pa

from dlrm.data.schema.schema import Schema
from dlrm.data.sources.columns import TextColumn
from dlrm.data.transform.arrays import array_of
from dlrm.data.transform.row_reader import RowReader
from dlrm.data.transform.rows import FieldRows, missing_features
from dlrm.data.transform.transform import Transform
from dlrm.serving.rows.inputs import Inputs
from dlrm.serving.rows.shares import Shares


def scoring_reader(fitted: Transform, labeled: bool, schema: Schema | None = None) -> RowReader:
    """Returns a reader of the columns that a model takes, and of labels if `labeled`.

    With the model's schema, it reads weight, groups and time as well.
    """
    known = fitted.known_labels
    return RowReader(schema or fitted.schema, labeled, known, schema is None, fitted)


def read_inputs(
    fitted: Transform, reader: RowReader, batch: Any, shares: Shares | None = None
) -> tuple[Inputs, FieldRows]:
    """Returns a model's inputs from an Arrow batch, and its rows, with labels as float32.

    `shares` counts the values that the transform knows.

    Raises:
        RowError: a value is unreadable; the message names row and column.
        ValueError: a column is missing, or has an unsupported type.
    """
    rows, bad = reader.read(batch)
    if bad:
        raise bad[0]
    numerical, ids, _ = fitted.apply(rows.numerical, rows.categorical)
    inputs = Inputs.from_columns(numerical, ids)
    if shares is not None:
        shares.add(missing_features(rows.numerical, rows.categorical), inputs.without_id())
    labels = None if rows.labels is None else rows.labels.astype(np.float32)
    return inputs, rows._replace(labels=labels)


def inputs_of_texts(fitted: Transform, text: TextColumn) -> Inputs:
    """Returns a model's inputs from the text of each of `fitted.names`; see `inputs_of_text`."""
    schema, arrays = fitted.schema, []
    for name, *bounds in zip(fitted.names, text.starts, text.ends, strict=True):
        column = TextColumn(text.data, *bounds)
        array = array_of(column).view(pa.large_string())  # which readers check
        if name in schema.marked:
            texts = array.to_pylist()
            array = pa.array([schema.plain_cell(name, text) for text in texts], pa.large_string())
        arrays.append(array)
    return inputs_of_batch(fitted, pa.RecordBatch.from_arrays(arrays, fitted.names))


def inputs_of_batch(fitted: Transform, batch: pa.RecordBatch) -> Inputs:
    """Returns a model's inputs from an Arrow batch; see `read_inputs`."""
    return read_inputs(fitted, scoring_reader(fitted, labeled=False), batch)[0]
