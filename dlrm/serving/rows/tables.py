"""Turns batches of a table into a model's inputs, by the transform of its training data."""

from typing import Any

import numpy as np

from dlrm.data.tables.rows import RowReader, Rows
from dlrm.data.transform.cells import BadRowError
from dlrm.data.transform.schema import Schema
from dlrm.data.transform.transform import Transform
from dlrm.serving.rows.inputs import Inputs, RowError


def scoring_reader(table: Transform, labelled: bool, schema: Schema | None = None) -> RowReader:
    """Returns a reader of the columns that a model takes, and of labels if there are any.

    Args:
        table: transform of the model.
        labelled: whether to read labels.
        schema: the model's schema, to read its weight, groups and time as well; None for none.
    """
    known = table.known_labels
    return RowReader(schema or table.schema, labelled, known, schema is None, table)


def read_inputs(table: Transform, reader: RowReader, batch: Any) -> tuple[Inputs, Rows]:
    """Returns a model's inputs from an Arrow batch, and its rows by the schema.

    Raises:
        RowError: a value is unreadable; the message names row and column.
        ValueError: a column is missing, or has an unsupported type.
    """
    rows, bad = reader.read(batch)
    if bad:
        raise RowError(bad[0].row, f", column {bad[0].column}: {bad[0].problem}")
    try:
        numerical, ids, _ = table.apply(rows.numerical, rows.categorical)
    except BadRowError as error:
        raise RowError(error.row, f", column {error.column}: {error.problem}") from None
    return Inputs.of_columns(numerical, ids), rows


def labels_of(rows: Rows) -> np.ndarray | None:
    """Returns labels as float32 `[rows]`; None if none were read."""
    return None if rows.labels is None else rows.labels.astype(np.float32)
