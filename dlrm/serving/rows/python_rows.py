"""Rows in Python and tables in memory, as Arrow tables, and these as a model's inputs."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa

from dlrm.data.sources.row_error import RowError, shown_text
from dlrm.data.tables.formats.cells import Cells
from dlrm.data.tables.frames import is_frame
from dlrm.data.transform.arrays import array_of, array_of_values, bits_of, value_class
from dlrm.data.transform.keys import FieldKeys
from dlrm.data.transform.transform import Transform
from dlrm.data.transform.values import MOST_EXACT
from dlrm.documents import brief

_SEVERAL = (list, tuple, np.ndarray, Set, Mapping)
_WITH_TEXT = (str, int, float, Decimal, np.generic, date, time, UUID)  # also bool, and datetime
_NOT_OF_ONE_TYPE = (pa.ArrowException, TypeError, ValueError, OverflowError)


def frame_of(rows: Any, transform: Transform) -> Any:
    """Returns a batch of Arrow with the fields that a model takes, from rows of any kind.

    A table in memory is returned as a table.

    Args:
        rows: lines of text, sequences of fields, or mappings from names to fields; one mapping, or
            a mapping from names to columns, beside which a single value counts for all rows; or a
            table in memory. See `Predictor.logits`.

    Raises:
        RowError: a row has a wrong number of fields, or an unexpected list.
        ValueError: a column is missing, or it is no row.
    """
    names = transform.names
    is_row = _is_named(rows) and not hasattr(rows, "columns")  # also a Series, which has a stream
    if is_frame(rows) and not is_row:
        return pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
    if isinstance(rows, str | bytes):
        raise ValueError("rows: expected a list of rows, got one string; put it in a list")
    if type(rows).__name__ == "LazyFrame":
        raise ValueError("rows: expected a table in memory, got LazyFrame; its collect() reads it")
    lists = Cells.from_schema(transform.schema)
    if _is_named(rows) or hasattr(rows, "columns"):
        columns = _columns(rows, names, lists)
    elif isinstance(rows, Iterable):
        columns = _columns_of_rows(list(rows), names)
    else:
        raise ValueError(f"rows: expected a list of rows, got {rows!r}")
    named = zip(names, columns, strict=True)
    arrays = [_array_of(transform, lists, *column) for column in named]
    return pa.RecordBatch.from_arrays(arrays, names)


def _is_named(row: Any) -> bool:
    """Returns whether values have names, as in a mapping or in a row of pandas."""
    return isinstance(row, Mapping) or hasattr(row, "keys")


def _columns_of_rows(rows: Sequence[Any], names: Sequence[str]) -> list[list[Any]]:
    if all(map(_is_named, rows)):
        try:
            return [[row[name] for row in rows] for name in names]
        except KeyError:  # `_row` names the row
            pass
    cells = [_row(index, row, names) for index, row in enumerate(rows)]
    return [[row[i] for row in cells] for i in range(len(names))]


def _row(index: int, row: Any, names: Sequence[str]) -> list[Any]:
    if isinstance(row, bytes):
        try:
            row = row.decode()
        except UnicodeDecodeError:
            raise RowError(index, f"expected UTF-8, got {shown_text(row)}") from None
    if isinstance(row, str):
        row = row.rstrip("\r\n").split("\t")
        row += [""] * (len(names) - len(row))  # fields absent at the end are missing
    elif _is_named(row):
        row = _named(f"row {index}", row, names)
    elif not isinstance(row, Iterable):
        hint = "; put the fields of a row in a list" if index == 0 else ""
        raise RowError(index, f"expected a line, fields or a mapping, got {row!r}{hint}")
    cells = list(row)
    if len(cells) != len(names):
        raise RowError(index, f"expected {len(names)} fields, got {len(cells)}")
    return cells


def _columns(rows: Any, names: Sequence[str], lists: Cells) -> list[list[Any]]:
    """Returns the columns of a mapping, in which single values count for all rows.

    In a list field a flat list is a single value, however many rows there are, and so is the only
    list of a column.
    """
    columns, single, flat = {}, {}, {}
    for name, value in zip(names, _named("rows", rows, names), strict=True):
        cells = list(value) if _is_column(value) else None
        if cells is None:
            single[name] = value
        elif name not in lists.separators:
            columns[name] = cells
        elif not any(map(_is_column, cells)):
            flat[name] = cells
        elif len(cells) == 1:
            (single[name],) = cells
        else:
            columns[name] = cells
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"rows: expected columns of one length, got {lengths}")
    count = next(iter(lengths.values()), 1)
    of_rows = bool(columns) or not single  # otherwise of one row, beside its other fields
    for name, cells in flat.items():
        if columns and len(cells) == count and not any(map(_text_of, cells)):
            columns[name] = cells  # of missing lists
            continue
        single[name] = cells
        for row, cell in enumerate(cells if of_rows else ()):
            if isinstance(cell, str) and lists.separators[name] in cell:
                expected = "an item of one list for all rows, or a list for each row"
                raise RowError(row, f"expected {expected}, got the text {cell!r}", name)
    return [columns[name] if name in columns else [single[name]] * count for name in names]


def _is_column(value: Any) -> bool:
    """Returns whether a value of a mapping holds those of several rows, or a list of one row."""
    if isinstance(value, str | bytes | Mapping | set | frozenset) or getattr(value, "ndim", 1) == 0:
        return False
    return isinstance(value, Iterable)


def _named(what: str, mapping: Any, names: Sequence[str]) -> list[Any]:
    if missing := [name for name in names if name not in mapping]:
        raise ValueError(f"{what}: no column {missing[0]!r}; expected {', '.join(names)}")
    return [mapping[name] for name in names]


def _array_of(fitted: Transform, lists: Cells, name: str, cells: Sequence[Any]) -> pa.Array:
    """Returns values as an array of their type, or as texts if they have several."""
    if name in fitted.schema.marked:
        plain = fitted.schema.plain_cell
        cells = [plain(name, cell) if isinstance(cell, str) else cell for cell in cells]
    kinds = set(map(type, cells))
    in_lists = name in lists.separators
    if in_lists or any(issubclass(kind, _SEVERAL) for kind in kinds):
        cells = [_checked(name, row, cell, in_lists) for row, cell in enumerate(cells)]
    if bytes in kinds and not in_lists:
        cells = _each(name, cells, _decoded)
    as_text = in_lists and not kinds.isdisjoint((str, bytes))  # as in CSV
    narrow = any(issubclass(kind, np.floating) for kind in kinds - {np.float64})
    if not as_text and not (narrow and len(kinds) > 1):
        with suppress(*_NOT_OF_ONE_TYPE):
            return array_of_values(cells)
    if in_lists:
        return lists.array(name, _each(name, cells, _texts_in))
    texts = _each(name, cells, _text_of)
    keys = next((keys for keys in fitted.keys if keys.field.column == name), None)
    if keys is not None and keys.field.type == "string":
        _use_known(keys, cells, texts)
    return pa.array([text or None for text in texts], pa.string())


def _use_known(keys: FieldKeys, cells: Sequence[Any], texts: list[str]) -> None:
    """Replaces the texts of typed values, beside others, by those that they have alone."""
    for kind in {type(cell) for cell, text in zip(cells, texts, strict=True) if text} - {str}:
        rows = [row for row, cell in enumerate(cells) if type(cell) is kind and texts[row]]
        try:
            array = array_of_values([cells[row] for row in rows])
        except _NOT_OF_ONE_TYPE:
            continue  # values that have no type in Arrow are texts alone, too
        if isinstance(array.type, pa.BaseExtensionType):  # of UUIDs, which are texts
            continue
        problems = dict[int, str]()
        _, known = keys.of(array, problems, value_class(array.type), bits_of(array.type))
        for index, problem in problems.items():
            raise RowError(rows[index], problem, keys.field.column)
        assert known is not None
        for row, text in zip(rows, array_of(known).to_pylist(), strict=True):
            texts[row] = text.decode()


def _checked(name: str, row: int, cell: Any, in_lists: bool) -> Any:
    """Returns a value, and lists of any kind as lists; refuses what a field cannot have."""
    if isinstance(cell, np.ndarray):
        cell = cell.tolist()
    if not isinstance(cell, _SEVERAL):
        return cell
    if maps := [item for item in (cell, *cell) if isinstance(item, Mapping | Set)]:
        raise RowError(row, f"expected values, or lists of them, got {maps[0]!r}", name)
    nested = any(isinstance(item, _SEVERAL) for item in cell)
    if nested or not in_lists:
        expected = "a list of values" if nested else "one value"
        raise RowError(row, f"expected {expected}, got {brief(list(cell))}", name)
    return list(cell)


def _texts_in(cell: Any) -> Any:
    """Returns a list as texts, and a text of CSV as it is."""
    if isinstance(cell, list):
        return [_text_of(item) or None for item in cell]
    return _text_of(cell) or None


def _each(name: str, cells: Sequence[Any], convert: Callable[[Any], Any]) -> list[Any]:
    """Returns converted cells, of which errors name row and column."""
    converted = []
    for row, cell in enumerate(cells):
        try:
            converted.append(convert(cell))
        except ValueError as error:
            raise RowError(row, str(error), name) from None
    return converted


def _decoded(cell: Any) -> Any:
    try:
        return cell.decode() if isinstance(cell, bytes) else cell
    except UnicodeDecodeError:
        raise ValueError(f"expected UTF-8, got {shown_text(cell)}") from None


def _text_of(value: Any) -> str:
    """Returns a value as in a log: whole numbers without a point, missing ones empty."""
    if isinstance(value, bytes):
        return str(_decoded(value))
    if value is None or type(value).__name__ in ("NAType", "NaTType"):  # which equal nothing
        return ""
    if isinstance(value, np.datetime64) and np.isnat(value):
        return ""
    if isinstance(value, float | np.floating):
        if value != value:
            return ""
        value = float(value)
        if value.is_integer() and abs(value) < MOST_EXACT:  # others are refused as ids
            value = int(value)
    if not isinstance(value, _WITH_TEXT) or isinstance(value, timedelta):
        raise ValueError(f"expected a value such as text, a number or a time, got {brief(value)}")
    return str(value)
