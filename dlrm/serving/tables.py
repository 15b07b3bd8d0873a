"""Batches of a table as a model's inputs, by the transform that its training data had."""

from typing import Any

import numpy as np

from dlrm.data.tables.rows import RowReader, Rows
from dlrm.data.transform.cells import BadRowError
from dlrm.data.transform.schema import Schema
from dlrm.data.transform.table_transform import TableTransform, stack_ids
from dlrm.serving.rows import Inputs, RowError


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
    return Inputs(numerical, stack_ids(ids, len(numerical))), rows


def labels_of(rows: Rows) -> np.ndarray | None:
    """Returns labels as float32 `[rows]`; None where none were read."""
    return None if rows.labels is None else rows.labels.astype(np.float32)
