"""Batches of a table as a model's inputs, by the transform that its training data had."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from dlrm.data.tables.files import Lists
from dlrm.data.tables.rows import RowReader, Rows
from dlrm.data.transform.cells import BadRowError
from dlrm.data.transform.schema import Schema
from dlrm.data.transform.table_transform import TableTransform
from dlrm.documents import brief
from dlrm.serving.inputs import Inputs, RowError

Cell: TypeAlias = "str | list[Cell] | None"


def scoring_reader(
    table: TableTransform, labelled: bool, schema: Schema | None = None
) -> RowReader:
    """Returns what reads the columns of a batch that a model takes, and labels if there are any.

    Args:
        table: of the model.
        labelled: whether labels are read.
        schema: the model's, whose weight, groups and time are read as well; None reads none.
    """
    return RowReader(schema or table.schema, labelled, table.known_labels, schema is None)


def read_inputs(table: TableTransform, reader: RowReader, batch: Any) -> tuple[Inputs, Rows]:
    """Returns a model's inputs of an Arrow batch, and its rows as the schema has them.

    Raises:
        RowError: a value cannot be read; row and column are named.
        ValueError: a column is missing, or of a type that no value can be made of.
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
    """Makes a table of rows of texts and lists, whose fields are those of `table.names`.

    Raises:
        RowError: a row has another number of fields, or a field a list where it should have none.
    """
    lists = Lists.of(table.schema)
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
    """Returns labels as float32 `[rows]`; None where none were read."""
    return None if rows.labels is None else rows.labels.astype(np.float32)
