"""Tables in memory: of Polars, pandas, DuckDB or Arrow, as Arrow batches and as Parquet.

None of these packages is imported: the functions use a table's Arrow stream of batches, and pyarrow
converts a pandas DataFrame.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dlrm.data.sources.column_names import check_columns
from dlrm.data.tables.formats.columnar import arrow_errors, first_line
from dlrm.data.transform.arrays import array_of_values
from dlrm.data.transform.arrow_types import plain_array, plain_field
from dlrm.files import atomic_file

GROUP_ROWS = 1 << 17  # rows of a written row group
_HINTS = {
    "LazyFrame": "; its collect() reads the rows",
    **dict.fromkeys(
        ("ndarray", "list", "dict"), "; pandas.DataFrame(...) of it gives columns their names"
    ),
}


def is_frame(value: Any) -> bool:
    """Returns whether something is a table that `open_frame` reads."""
    return hasattr(value, "__arrow_c_stream__") or _is_pandas(value)


def _is_pandas(value: Any) -> bool:
    pandas = sys.modules.get("pandas")  # a caller with a DataFrame has imported it
    return pandas is not None and isinstance(value, pandas.DataFrame)


def open_frame(
    frame: Any, columns: Sequence[str] | None, name: str = "frame"
) -> pa.RecordBatchReader:
    """Reads columns of a table in memory as batches; other columns are ignored.

    In columns of pandas, NaN, None and NaT are missing values.

    Args:
        frame: a table with `__arrow_c_stream__`, as of pyarrow, Polars, pandas 2.2 and DuckDB, or a
            DataFrame of an earlier pandas. A stream, such as a `RecordBatchReader`, is consumed.
        columns: the columns to read, in the order of the table; None for all.
        name: name for messages.

    Raises:
        ValueError: it is not a table, a column is missing or occurs twice, or a column of pandas
            has values of several types; the message names the column.
    """
    if not is_frame(frame):
        raise ValueError(
            f"{name}: expected a table of Arrow, Polars, pandas or DuckDB, got "
            f"{type(frame).__name__}{_HINTS.get(type(frame).__name__, '')}"
        )
    if _is_pandas(frame):
        names = [str(column) for column in frame.columns]
        wanted = _indices(names, columns, name)
        arrays = [_array_of_series(frame.iloc[:, i], names[i], name) for i in wanted]
        return pa.table(arrays, names=[names[i] for i in wanted]).to_reader(GROUP_ROWS)
    try:
        stream = pa.RecordBatchReader.from_stream(frame)
    except (pa.ArrowException, TypeError) as error:
        column = _unreadable_column(frame)
        what = "a table of columns" if column is None else f"a type of Arrow in column {column!r}"
        hint = "" if column is None else "; cast it to another, or drop it"
        raise ValueError(f"{name}: expected {what} ({first_line(error)}){hint}") from error
    wanted = _indices(stream.schema.names, columns, name)
    schema = pa.schema([plain_field(stream.schema.field(i)) for i in wanted])

    def batches() -> Iterator[pa.RecordBatch]:
        with arrow_errors(f"{name}: cannot be read"):
            for batch in stream:
                chosen = batch.select(wanted)
                for begin in range(0, batch.num_rows, GROUP_ROWS):  # for small dictionaries
                    part = chosen.slice(begin, GROUP_ROWS)
                    arrays = map(plain_array, part.columns, schema.types)
                    yield pa.RecordBatch.from_arrays(list(arrays), schema=schema)

    return pa.RecordBatchReader.from_batches(schema, batches())


def _unreadable_column(frame: Any) -> str | None:
    """Returns the first column of a data frame that is not one of Arrow, such as Polars' Int128."""
    for column in getattr(frame, "columns", ()):
        try:
            pa.RecordBatchReader.from_stream(frame[[column]])
        except pa.ArrowException:
            return str(column)
        except (TypeError, KeyError):  # columns of another kind of frame
            return None
    return None


def _indices(names: Sequence[str], columns: Sequence[str] | None, name: str) -> list[int]:
    """Returns the indices of wanted columns, each of which is there once."""
    wanted = names if columns is None else columns
    check_columns(name, names, wanted)
    return [index for index, column in enumerate(names) if column in wanted]


def _array_of_series(series: Any, column: str, name: str) -> pa.ChunkedArray:
    try:
        if series.dtype == object:
            array = array_of_values(series.tolist())
        else:
            array = pa.array(series, from_pandas=True)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{name}: column {column!r}: expected values of one type ({first_line(error)}); "
            "convert it, with .astype(str) for instance, or drop it"
        ) from None
    arrow_type = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    if isinstance(arrow_type, pa.BaseExtensionType) and arrow_type.extension_name != "arrow.uuid":
        raise ValueError(
            f"{name}: column {column!r}: expected values such as text, numbers or times, got "
            f"{series.dtype}; convert it, with .astype(str) for instance, or drop it"
        )
    return array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])


def write_frame(
    frame: Any, columns: Sequence[str], path: Path, name: str = "frame", utc: str | None = None
) -> int:
    """Copies columns of a table in memory into a Parquet file that appears once it is complete.

    Args:
        frame, columns, name: see `open_frame`.
        path: the file; its row groups have 131,072 rows except for the last.
        utc: a column whose timestamps and dates are in UTC if they have no zone; None for none.

    Returns:
        The number of rows.

    Raises:
        ValueError: see `open_frame`; or Parquet does not support the values.
    """
    reader, rows = _in_utc(open_frame(frame, columns, name), utc), 0
    options: dict[str, Any] = {"compression": "none", "write_statistics": False}
    with (
        arrow_errors(f"{name}: cannot be written as Parquet"),
        atomic_file(path) as partial,
        pq.ParquetWriter(partial, reader.schema, **options) as writer,
    ):
        for table in _in_groups(reader):
            writer.write_table(table, GROUP_ROWS)
            rows += table.num_rows
    return rows


def _in_utc(reader: pa.RecordBatchReader, column: str | None) -> pa.RecordBatchReader:
    """Gives timestamps and dates of a column the zone UTC, unless they have a zone."""
    index = reader.schema.get_field_index(column) if column is not None else -1
    type_ = reader.schema.field(index).type if index >= 0 else pa.null()
    is_time = pa.types.is_timestamp(type_) or pa.types.is_date(type_)
    if not is_time or getattr(type_, "tz", None) is not None:
        return reader
    unit = getattr(type_, "unit", "ms")
    schema = reader.schema.set(index, pa.field(column, pa.timestamp(unit, "UTC")))

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in reader:
            times = pc.assume_timezone(batch.column(index).cast(pa.timestamp(unit)), "UTC")
            yield batch.set_column(index, schema.field(index), times)

    return pa.RecordBatchReader.from_batches(schema, batches())


def _in_groups(reader: pa.RecordBatchReader) -> Iterator[pa.Table]:
    """Yields rows, a multiple of `GROUP_ROWS` at a time except for the last."""
    batches: list[pa.RecordBatch] = []
    rows = 0
    for batch in reader:
        batches.append(batch)
        rows += batch.num_rows
        if rows >= GROUP_ROWS:
            table = pa.Table.from_batches(batches)
            whole = rows - rows % GROUP_ROWS
            yield table.slice(0, whole)
            batches, rows = table.slice(whole).to_batches(), rows - whole
    if rows:
        yield pa.Table.from_batches(batches)
