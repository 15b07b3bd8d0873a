"""Text tables as Arrow batches, for scoring and drafts, and as Parquet, for tasks."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dlrm.data.sources.csv_rows import Spans, check_names, delimiter_hint, read_csv
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.columns import NUMBERS_OF_JSON
from dlrm.data.tables.files import CSV, JSON_LINES, PARQUET, TableFile
from dlrm.data.tables.json_lines import Cell, Number, read_json_lines
from dlrm.data.tables.parquet import (
    LINE,
    PROBLEM,
    Part,
    partition_of,
    parts_of,
    read_part,
    schema_of,
)
from dlrm.data.transform.lists import split_text
from dlrm.data.transform.schema import Schema
from dlrm.data.transform.values import number_text
from dlrm.files import staged_file

_STAGED_ROWS = 1 << 16  # of a row group
_FIRST_ROWS = 1000  # of JSON lines, whose columns are those of the file
Locate = Callable[[int], str]
Column = tuple[str, pa.Array | list[Cell]]  # name and cells


@dataclass(frozen=True)
class Cells:
    """The meaning of cells of text that depends on the file, and not on the field alone.

    Attributes:
        separators: column of lists -> separator of its values in CSV.
        missing_values: column -> texts that mean "missing", as they are written.
        numbers: columns of numbers, which may have the marks of a format.
        earlier: whether numbers of JSON keep their texts, as for transforms of earlier versions.
    """

    separators: Mapping[str, str] = field(default_factory=dict)
    missing_values: Mapping[str, Collection[str]] = field(default_factory=dict)
    numbers: Collection[str] = ()
    earlier: bool = False

    @classmethod
    def of(cls, schema: Schema, earlier: bool = False) -> "Cells":
        """Returns the meaning of a schema's cells."""
        missing: dict[str, Collection[str]] = {
            one.column: schema.missing_of(one) for one in schema.numerical
        }
        missing |= {schema.weight: schema.missing_values} if schema.weight else {}
        numbers = {one.column for one in schema.numerical}
        numbers |= {schema.weight} if schema.weight else set()
        for one in schema.categorical:
            columns = [one.column, *([one.weights] if one.weights else [])]
            missing |= dict.fromkeys(columns, schema.missing_of(one))
            if one.type == "integer":
                numbers.add(one.column)
            if one.weights:
                numbers.add(one.weights)
        return cls(schema.separators, missing, numbers, earlier)

    def type_of(self, name: str) -> pa.DataType:
        """Returns the type of a column whose cells are text."""
        return pa.list_(pa.string()) if name in self.separators else pa.string()

    def array(
        self, name: str, cells: pa.Array | Iterable[Cell], text: TextFormat | None = None
    ) -> pa.Array:
        """Returns the cells of a column.

        Args:
            name: the column.
            cells: its cells.
            text: the format of CSV, whose numbers may have marks.
        """
        separator, missing = self.separators.get(name), self.missing_values.get(name, ())
        if separator is None:
            array = cells if isinstance(cells, pa.Array) else pa.array(list(cells), pa.string())
        else:
            of = cells.to_pylist() if isinstance(cells, pa.Array) else cells
            rows = [split_text(c, separator, missing) if isinstance(c, str) else c for c in of]
            array = pa.array(rows, self.type_of(name))
        if text is None or not text.has_marks or name not in self.numbers:
            return array
        if separator is None:
            return _without_marks(array, text, missing)
        values = _without_marks(array.flatten(), text, missing)
        return pa.ListArray.from_arrays(array.offsets, values, mask=array.is_null())


def _without_marks(array: pa.Array, text: TextFormat, missing: Collection[str]) -> pa.Array:
    """Returns numbers in text without the marks of a format, and missing ones as they are."""
    coded = array.dictionary_encode()
    texts = [
        one if one.strip() in missing else text.plain_number(one.strip())
        for one in coded.dictionary.to_pylist()
    ]
    values = pa.array(texts, pa.string())
    return pa.DictionaryArray.from_arrays(coded.indices, values).dictionary_decode()


def columns_of(file: TableFile, text: TextFormat) -> list[str]:
    """Returns the columns of a file; of JSON lines, those of the first 1,000 rows.

    An empty file has none.

    Raises:
        ValueError: JSON lines are damaged; the message has file and line.
    """
    if file.kind == PARQUET:
        names = schema_of(file.path).names
    elif file.kind == CSV:
        names = next((chunk.names for chunk in read_csv(file.path, text, {}, ())), [])
    else:
        rows = read_json_lines(file.path, replace(text, chunk_rows=_FIRST_ROWS), wanted=())
        names = next((one.names for one in rows), [])
    added = partition_of(file.path, file.root) if names else ()
    return names + [name for name in added if name not in names]


def text_of(
    file: TableFile,
    text: TextFormat,
    lists: Collection[str] | None = None,
    columns: Sequence[str] | None = None,
    problems: dict[int, str] | None = None,
    spans: Spans | None = None,
    nested: dict[str, str] | None = None,
) -> Iterator[tuple[list[str], np.ndarray, list[Column]]]:
    """Yields names, lines and the cells of columns of a file of text, some rows at a time.

    Args:
        file: CSV or JSON lines.
        text: format of CSV.
        lists: the columns of lists in JSON lines; None allows lists anywhere.
        columns: the columns to read; None is all. Missing ones are left out.
        problems, spans: see `read_csv`.
        nested: see `read_json_lines`.

    Raises:
        ValueError: the file is damaged; the message has file and line.
    """
    if file.kind == CSV:
        try:
            for names, lines, found in read_csv(file.path, text, problems, columns, spans):
                there = [(n, c) for n, c in zip(names, found, strict=True) if c is not None]
                yield names, lines, there
        except ValueError as error:
            if hint := delimiter_hint(file.path, text):
                raise ValueError(f"{error}{hint}") from error
            raise
        return
    for rows in read_json_lines(file.path, text, problems, lists, columns, nested):
        wanted = rows.names if columns is None else [n for n in rows.names if n in columns]
        yield (
            rows.names,
            np.array(rows.lines, np.int64),
            [(name, [row.get(name) for row in rows.cells]) for name in wanted],
        )


def batches_of(
    file: TableFile,
    text: TextFormat,
    columns: Sequence[str],
    cells: Cells | None = None,
    spans: Spans | None = None,
    seen: set[str] | None = None,
) -> Iterator[tuple[pa.RecordBatch, Locate]]:
    """Yields the rows of a file some at a time, and a function that locates a row of them.

    Args:
        file: the file.
        text: format of CSV.
        columns: names of the columns to read; missing ones are left out, and those of JSON lines
            are missing values.
        cells: the columns of lists and of numbers; None for none.
        spans: counts rows of several lines; see `read_csv`.
        seen: receives the names of the columns that the file has.

    Raises:
        ValueError: the file is damaged, or two columns have one name; the message has file and
            line.
    """
    if file.kind == PARQUET:
        for part in parts_of([(file.path, file.path, file.root)], 1):
            done = 0
            if seen is not None:
                seen |= {*schema_of(file.path).names, *part.partition}
            for batch in read_part(part, columns):
                yield batch, partial(_row_of_part, part, done)
                done += batch.num_rows
        return
    cells = cells or Cells()
    partition = {n: v for n, v in partition_of(file.path, file.root).items() if n in columns}
    own = [name for name in columns if name not in partition]
    for names, lines, found in text_of(file, text, cells.separators, own, spans=spans):
        if twice := [name for name in own if names.count(name) > 1]:
            raise ValueError(f"{file.path}: two columns are called {twice[0]!r}")
        if seen is not None:
            seen |= {*names, *partition}
        made = [_with_field(cells, text, file.kind, *column) for column in found]
        if file.kind == JSON_LINES:  # in which a row may leave out a value that it does not have
            there = {one.name for one, _ in made}
            made += [_constant(name, None, len(lines)) for name in own if name not in there]
        made += [_constant(name, value, len(lines)) for name, value in partition.items()]
        schema = pa.schema([one for one, _ in made])
        batch = pa.RecordBatch.from_arrays([array for _, array in made], schema=schema)
        yield batch, partial(_line_of, file.path, lines)


def _with_field(
    cells: Cells, text: TextFormat, kind: str, name: str, column: pa.Array | list[Cell]
) -> tuple[pa.Field, pa.Array]:
    """Returns a column and its field, which says whether text was numbers in JSON."""
    texts: set[str] = set()
    array = _array_of(cells, text, kind, name, column, texts)
    numbers = kind == JSON_LINES and name not in texts
    return pa.field(name, array.type, metadata=NUMBERS_OF_JSON if numbers else None), array


def _array_of(
    cells: Cells,
    text: TextFormat,
    kind: str,
    name: str,
    column: pa.Array | list[Cell],
    texts: set[str],
) -> pa.Array:
    """Returns a column of a file, and adds it to `texts` if JSON has other values than numbers."""
    if kind == CSV:
        return cells.array(name, column, text)
    plain = plain_numbers(column, name, texts)
    return cells.array(name, column if cells.earlier else plain)


def _constant(name: str, value: str | None, rows: int) -> tuple[pa.Field, pa.Array]:
    return pa.field(name, pa.string()), pa.array([value] * rows, pa.string())


def _row_of_part(part: Part, done: int, row: int) -> str:
    return part.where(done + row)


def _line_of(path: Path, lines: np.ndarray, row: int) -> str:
    return f"{path}, line {lines[row]}"


def stage(
    file: TableFile,
    target: str,
    text: TextFormat,
    columns: Sequence[str],
    quarantine: bool = False,
    cells: Cells | None = None,
) -> dict[str, Any]:
    """Copies the columns of a text file into a Parquet file, which appears when it is whole.

    Every cell stays text, and a list becomes a list of texts. A column `LINE` has the lines, and a
    column `PROBLEM` the problem of a row as a whole.

    Args:
        file: CSV or JSON lines.
        target: the Parquet file.
        text: format of CSV.
        columns: the columns to copy.
        quarantine: whether to accept bad rows.
        cells: the columns of lists and of numbers; None for none.

    Returns:
        The number of `rows`, the `names` of the file's columns, those of `numbers` in JSON, and a
        `note` about rows of several lines, or None.

    Raises:
        ValueError: the text is damaged, or a column is missing; the message has file and line.
    """
    rows, spans, cells = 0, Spans(), cells or Cells()
    problems: dict[int, str] | None = {} if quarantine else None
    found: dict[str, None] = {}
    texts: set[str] = set()  # columns with other values than numbers of JSON
    own = [(LINE, pa.int64()), (PROBLEM, pa.string())]
    schema = pa.schema([*((name, cells.type_of(name)) for name in columns), *own])
    options: dict[str, Any] = {"compression": "none", "write_statistics": False}
    with (
        staged_file(Path(target)) as partial_file,
        pq.ParquetWriter(partial_file, schema, **options) as writer,
    ):
        parts = text_of(file, text, cells.separators, columns, problems, spans)
        for names, lines, read in parts:
            found |= dict.fromkeys(names)
            if file.kind == CSV:
                check_names(file.path, names, text, columns)
            if not len(lines):
                continue
            by_name = {n: _array_of(cells, text, file.kind, n, one, texts) for n, one in read}
            arrays = [
                by_name[name] if name in by_name else pa.nulls(len(lines), cells.type_of(name))
                for name in columns
            ]
            wrong = pa.array([(problems or {}).get(line) for line in lines.tolist()], pa.string())
            arrays += [pa.array(lines, pa.int64()), wrong]
            writer.write_table(pa.table(arrays, schema=schema), _STAGED_ROWS)
            rows += len(lines)
    numbers = [] if file.kind == CSV else [name for name in columns if name not in texts]
    note = spans.note(file.path, text)
    return {"rows": rows, "names": [*found], "numbers": numbers, "note": note}


def plain_numbers(column: Iterable[Cell], name: str, texts: set[str]) -> list[Cell]:
    """Returns cells of JSON in which numbers have the text of typed ones, and notes other cells."""
    cells: list[Cell] = []
    for cell in column:
        if isinstance(cell, list):
            texts |= {name for one in cell if not isinstance(one, Number)}
            cell = [number_text(one) if isinstance(one, Number) else one for one in cell]
        elif isinstance(cell, Number):
            cell = number_text(cell)
        elif cell is not None:
            texts.add(name)
        cells.append(cell)
    return cells
