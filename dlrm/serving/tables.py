"""Turns batches of a table into a model's inputs, by the transform of its training data."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from dlrm.data.tables.rows import RowReader, Rows
from dlrm.data.tables.text import Cells
from dlrm.data.transform.cells import BadRowError
from dlrm.data.transform.schema import Schema
from dlrm.data.transform.table_transform import TableTransform
from dlrm.documents import brief
from dlrm.serving.inputs import Inputs, RowError

Cell: TypeAlias = "str | list[Cell] | None"


def scoring_reader(
    table: TableTransform, labelled: bool, schema: Schema | None = None
) -> RowReader:
    """Returns a reader of the columns that a model takes, and of labels if there are any.

    Args:
        table: transform of the model.
        labelled: whether to read labels.
        schema: the model's schema, to read its weight, groups and time as well; None for none.
    """
    known = table.known_labels
    return RowReader(schema or table.schema, labelled, known, schema is None, table)


def read_inputs(table: TableTransform, reader: RowReader, batch: Any) -> tuple[Inputs, Rows]:
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


def frame_of(rows: Sequence[Sequence[Cell]], table: TableTransform) -> pa.Table:
    """Makes a table from rows of texts and lists, whose fields are `table.names`.

    Raises:
        RowError: a row has a wrong number of fields, or an unexpected list.
    """
    lists = Cells.of(table.schema)
    for row, cells in enumerate(rows):
        if len(cells) != len(table.names):
            raise RowError(row, f": expected {len(table.names)} fields, got {len(cells)}")
        for name, cell in zip(table.names, cells, strict=True):
            nested = isinstance(cell, list) and any(isinstance(one, list) for one in cell)
            if nested or (isinstance(cell, list) and name not in lists.separators):
                expected = "a list of values" if nested else "one value"
                raise RowError(row, f", column {name}: expected {expected}, got {brief(cell)}")
    columns = zip(*rows, strict=True) if rows else [()] * len(table.names)
    arrays = [lists.array(name, cells) for name, cells in zip(table.names, columns, strict=True)]
    return pa.table(arrays, table.names)


def labels_of(rows: Rows) -> np.ndarray | None:
    """Returns labels as float32 `[rows]`; None if none were read."""
    return None if rows.labels is None else rows.labels.astype(np.float32)
