"""Turns batches of a table into a model's inputs, by the transform of its training data."""

from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa

from dlrm.data.tables.columns import array_of_values
from dlrm.data.tables.kinds.cells import Cells
from dlrm.data.tables.rows import RowReader, Rows
from dlrm.data.transform.cells import BadRowError
from dlrm.data.transform.schema import Schema
from dlrm.data.transform.table_transform import TableTransform
from dlrm.documents import brief
from dlrm.serving.inputs import Inputs, RowError


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


def frame_of(rows: Sequence[Sequence[Any]], table: TableTransform) -> pa.Table:
    """Makes a table from rows of any values and lists of them, whose fields are `table.names`.

    Raises:
        RowError: a row has a wrong number of fields, or an unexpected list.
    """
    names, lists = table.names, Cells.of(table.schema)
    for row, cells in enumerate(rows):
        if len(cells) != len(names):
            raise RowError(row, f": expected {len(names)} fields, got {len(cells)}")
    columns = zip(*rows, strict=True) if rows else [()] * len(names)
    arrays = [_array_of(table, lists, *one) for one in zip(names, columns, strict=True)]
    return pa.table(arrays, names)


def _array_of(table: TableTransform, lists: Cells, name: str, cells: Sequence[Any]) -> pa.Array:
    """Returns values as an array of their type, or as texts if they have several."""
    kinds = set(map(type, cells))
    in_lists = name in lists.separators
    if in_lists or any(issubclass(kind, _SEVERAL) for kind in kinds):
        cells = [_checked(name, row, cell, in_lists) for row, cell in enumerate(cells)]
    if in_lists and not kinds.isdisjoint((str, bytes)):  # as in CSV
        return lists.array(name, [_texts_in(cell) for cell in cells])
    if table.kinds is not None:  # of earlier versions, all values were texts
        with suppress(pa.ArrowException, TypeError, ValueError, OverflowError):
            return array_of_values(cells)
    if in_lists:
        return lists.array(name, [_texts_in(cell) for cell in cells])
    return pa.array([_text_of(cell) or None for cell in cells], pa.string())


_SEVERAL = (list, tuple, np.ndarray, Set, Mapping)


def _checked(name: str, row: int, cell: Any, in_lists: bool) -> Any:
    """Returns a value, and lists of any kind as lists.

    Raises:
        RowError: it is a list where one value is expected, or not a list of values.
    """
    if isinstance(cell, np.ndarray):
        cell = cell.tolist()
    if not isinstance(cell, _SEVERAL):
        return cell
    maps = [one for one in (cell, *cell) if isinstance(one, Mapping | Set)]
    if maps:
        raise ValueError(f"rows: expected values, or lists of them, got {maps[0]!r}")
    nested = any(isinstance(one, _SEVERAL) for one in cell)
    if nested or not in_lists:
        expected = "a list of values" if nested else "one value"
        raise RowError(row, f", column {name}: expected {expected}, got {brief(list(cell))}")
    return list(cell)


def _texts_in(cell: Any) -> Any:
    """Returns a list as texts, and a text of CSV as it is."""
    if isinstance(cell, list):
        return [_text_of(one) or None for one in cell]
    return _text_of(cell) or None


def _text_of(value: Any) -> str:
    """Returns a value as in a log: whole numbers without a point, missing ones empty."""
    if isinstance(value, bytes):
        return value.decode()
    if value is None or type(value).__name__ in ("NAType", "NaTType"):  # which equal nothing
        return ""
    if isinstance(value, float | np.floating) and value != value:
        return ""
    if isinstance(value, float | np.floating) and float(value).is_integer():
        value = int(value)
    return str(value)


def labels_of(rows: Rows) -> np.ndarray | None:
    """Returns labels as float32 `[rows]`; None if none were read."""
    return None if rows.labels is None else rows.labels.astype(np.float32)
