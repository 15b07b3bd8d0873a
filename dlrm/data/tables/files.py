"""Files of tables: their discovery and kinds, and conversion of text to Parquet for tasks."""

import json
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from dlrm.data.sources.csv_columns import (
    CsvFormat,
    check_names,
    delimiter_hint,
    not_utf_8,
    open_text,
)
from dlrm.data.tables.parquet import (
    LINE,
    PROBLEM,
    Part,
    partition_of,
    parts_of,
    read_part,
    schema_of,
)
from dlrm.data.transform.lists import in_list, split_text
from dlrm.data.transform.schema import Schema
from dlrm.documents import brief
from dlrm.files import staged_file

KINDS = PARQUET, CSV, JSON_LINES = ("parquet", "csv", "jsonl")
FRAME = "a table in memory"
_KINDS = {
    **dict.fromkeys((".parquet", ".pq", ".parq"), PARQUET),
    **dict.fromkeys((".csv", ".tsv", ".data", ".txt"), CSV),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), JSON_LINES),
}
_PACKED = (".gz", ".zst")
_STAGED_ROWS = 1 << 16  # of a row group
_LONGEST_LINE = 1 << 24  # characters
Cell = str | list[str | None] | None
Chunk = tuple[list[str], list[int], Sequence[Sequence[Cell]]]  # names, lines, cells


class TableFile(NamedTuple):
    """A file of rows, or a table in memory.

    Attributes:
        path: the file; of a table in memory, its name for messages.
        kind: `PARQUET`, `CSV`, `JSON_LINES` or `FRAME`.
        root: the folder below which folder names encode columns; None for no such columns.
        frame: the table in memory; see `dlrm.data.tables.frames`.
    """

    path: Path
    kind: str
    root: Path | None = None
    frame: Any = None


@dataclass(frozen=True)
class TextFormat:
    """The format of CSV.

    Attributes:
        columns: names of its columns; by default those of the header, or 0, 1, ...
        header: whether the first line is a header; None means unless `columns` names them.
        delimiter: one character; None is a tab in `.tsv` and a comma in other files.
        chunk_size: rows parsed at a time.
    """

    columns: tuple[str, ...] = ()
    header: bool | None = None
    delimiter: str | None = None
    chunk_size: int = _STAGED_ROWS

    def __post_init__(self) -> None:
        if self.delimiter is not None and len(self.delimiter) != 1:
            raise ValueError(f"--delimiter: expected one character, got {self.delimiter!r}")

    def of(self, path: Path) -> CsvFormat:
        """Returns the format of a file."""
        header = not self.columns if self.header is None else self.header
        tab = Path(path.name.removesuffix(".gz").removesuffix(".zst")).suffix == ".tsv"
        delimiter = self.delimiter or ("\t" if tab else ",")
        return CsvFormat(self.columns, header, delimiter, self.chunk_size)


def kind_of(path: Path) -> str | None:
    """Returns the kind of a file by its name, or None."""
    name = path.name
    for packed in _PACKED:
        name = name.removesuffix(packed)
    kind = _KINDS.get(Path(name).suffix.lower())
    return None if kind == PARQUET and name != path.name else kind


def find_tables(inputs: Sequence[str | Path], kind: str | None = None) -> list[TableFile]:
    """Returns files of tables; those of a folder, with its subfolders, are sorted by name.

    Args:
        inputs: files, or folders of them, in which names that begin with "." or "_" are ignored.
        kind: kind of the files, which may then have any name; None derives it from their names.

    Raises:
        FileNotFoundError: a file does not exist, or a folder has none of a known kind.
        ValueError: a file is of an unknown kind, or files are of several.
    """
    found: list[TableFile] = []
    for given in map(Path, inputs):
        if given.is_dir():
            inside = [
                path
                for path in sorted(given.rglob("*"))
                if path.is_file()
                and not _hidden(path.relative_to(given))
                and (kind_of(path) == kind if kind else kind_of(path))
            ]
            if not inside:
                raise FileNotFoundError(
                    f"{given}: no *.parquet, *.csv, *.tsv, *.jsonl or the like in it (--input)"
                )
            found += [TableFile(path, kind_of(path) or "", given) for path in inside]
        elif not given.exists():
            raise FileNotFoundError(f"{given}: no such file or directory (--input)")
        elif not given.is_file():
            raise ValueError(f"{given}: expected a regular file or a folder (--input)")
        else:
            found.append(TableFile(given, kind or kind_of(given) or _kind_by_content(given)))
    if not found:
        raise ValueError("--input: expected a file or a folder, got none")
    for file in found:
        if not_utf_8(str(file.path)):
            shown = os.fsencode(file.path).decode("utf-8", "backslashreplace")
            raise ValueError(f"{shown}: expected UTF-8 in the names of files and folders")
    kinds = {file.kind: file.path for file in found}
    if len(kinds) > 1:
        shown = ", ".join(f"{path.name} ({kind})" for kind, path in kinds.items())
        raise ValueError(f"--input: expected files of one kind, got {shown}")
    return found


def _hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def _kind_by_content(path: Path) -> str:
    if path.is_file():
        with open(path, "rb") as file:
            if file.read(4) == b"PAR1":
                return PARQUET
    raise ValueError(
        f"{path}: expected the name of a Parquet file (.parquet), CSV (.csv, .tsv) or JSON lines "
        "(.jsonl), the latter two plain, .gz or .zst"
    )


def columns_of(file: TableFile, text: TextFormat) -> list[str]:
    """Returns the columns of a file; of JSON lines, those of the first line."""
    if file.kind == PARQUET:
        names = schema_of(file.path).names
        return names + [n for n in partition_of(file.path, file.root) if n not in names]
    return next((names for names, _, _ in chunks_of(file, text, {}, wanted=())), [])


@dataclass(frozen=True)
class Lists:
    """The columns of lists, and their form in CSV.

    Attributes:
        separators: column -> separator of its values.
        missing_values: texts that mean "missing" instead of a list, besides empty ones.
    """

    separators: Mapping[str, str] = field(default_factory=dict)
    missing_values: Collection[str] = ()

    @classmethod
    def of(cls, schema: Schema) -> "Lists":
        """Returns the lists of a schema."""
        return cls(schema.separators, schema.missing_values)

    def type_of(self, name: str) -> pa.DataType:
        """Returns the type of a column whose cells are text."""
        return pa.list_(pa.string()) if name in self.separators else pa.string()

    def array(self, name: str, cells: Iterable[Cell]) -> pa.Array:
        """Returns the cells of a column."""
        separator, missing = self.separators.get(name), self.missing_values
        if separator is None:
            return pa.array(list(cells), pa.string())
        rows = [split_text(c, separator, missing) if isinstance(c, str) else c for c in cells]
        return pa.array(rows, self.type_of(name))


def chunks_of(
    file: TableFile,
    text: TextFormat,
    problems: dict[int, str] | None = None,
    lists: Collection[str] | None = None,
    wanted: Collection[str] | None = None,
) -> Iterator[Chunk]:
    """Yields names, line numbers and cells of text, some rows at a time.

    Args:
        file: CSV or JSON lines.
        text: format of CSV.
        problems: receives the problem of a row, by line; see `CsvFormat.chunks`.
        lists: the only columns with lists in JSON lines; None allows lists anywhere.
        wanted: columns of JSON lines whose cells are read, others being None; None is all.
    """
    if file.kind == CSV:
        csv_format = text.of(file.path)
        try:
            yield from csv_format.chunks(file.path, problems)
        except ValueError as error:
            if hint := delimiter_hint(file.path, csv_format.delimiter):
                raise ValueError(f"{error}{hint}") from error
            raise
    else:
        yield from _json_lines(file.path, text.chunk_size, problems, lists, wanted)


def batches_of(
    file: TableFile, text: TextFormat, columns: Sequence[str], lists: Lists | None = None
) -> Iterator[tuple[pa.RecordBatch, Callable[[int], str]]]:
    """Yields the rows of a file some at a time, and a function that locates a row of them.

    Args:
        file: the file.
        text: format of CSV.
        columns: names of the columns to read; missing ones are left out.
        lists: the columns of lists; None for none.

    Raises:
        ValueError: the file is damaged, or two columns have one name; the message has file and
            line.
    """
    if file.kind == PARQUET:
        for part in parts_of([(file.path, file.path, file.root)], 1):
            done = 0
            for batch in read_part(part, columns):
                yield batch, partial(_row_of_part, part, done)
                done += batch.num_rows
        return
    lists = lists or Lists()
    for names, lines, records in chunks_of(file, text, lists=lists.separators, wanted=columns):
        there = [name for name in columns if name in names]
        if twice := [name for name in there if names.count(name) > 1]:
            raise ValueError(f"{file.path}: two columns are called {twice[0]!r}")
        places = [names.index(name) for name in there]
        arrays = [
            lists.array(name, [record[place] for record in records])
            for name, place in zip(there, places, strict=True)
        ]
        batch = pa.RecordBatch.from_arrays(arrays, names=there)
        yield batch, partial(_line_of, file.path, lines)


def _row_of_part(part: Part, done: int, row: int) -> str:
    return part.where(done + row)


def _line_of(path: Path, lines: Sequence[int], row: int) -> str:
    return f"{path}, line {lines[row]}"


def stage(
    file: TableFile,
    target: str,
    text: TextFormat,
    columns: Sequence[str],
    quarantine: bool = False,
    lists: Lists | None = None,
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
        lists: the columns of lists; None for none.

    Returns:
        The number of `rows`, and the `names` of the file's columns.

    Raises:
        ValueError: the text is damaged, or a column is missing; the message has file and line.
    """
    rows = 0
    problems: dict[int, str] | None = {} if quarantine else None
    found: dict[str, None] = {}
    own = [(LINE, pa.int64()), (PROBLEM, pa.string())]
    lists = lists or Lists()
    schema = pa.schema([*((name, lists.type_of(name)) for name in columns), *own])
    options = {"compression": "none", "write_statistics": False}
    with (
        staged_file(Path(target)) as partial,
        pq.ParquetWriter(partial, schema, **options) as writer,
    ):
        for names, lines, records in chunks_of(file, text, problems, lists.separators, columns):
            found |= dict.fromkeys(names)
            if file.kind == CSV:
                check_names(file.path, names, text.of(file.path), columns)
            if not lines:
                continue
            places = [names.index(name) if name in names else None for name in columns]
            arrays = [
                lists.array(name, [None if place is None else row[place] for row in records])
                for name, place in zip(columns, places, strict=True)
            ]
            wrong = pa.array([(problems or {}).get(line) for line in lines], pa.string())
            arrays += [pa.array(lines, pa.int64()), wrong]
            writer.write_table(pa.table(arrays, schema=schema))
            rows += len(lines)
    return {"rows": rows, "names": [*found]}


def _json_lines(
    path: Path,
    chunk_size: int,
    problems: dict[int, str] | None,
    lists: Collection[str] | None,
    wanted: Collection[str] | None,
) -> Iterator[Chunk]:
    """Yields rows of JSON lines; numbers keep their text."""
    names: dict[str, int] = {}
    lines: list[int] = []
    rows: list[dict[str, Cell]] = []
    number = 0
    try:
        with open_text(path) as file:
            while line := file.readline(_LONGEST_LINE):
                number += 1
                if len(line) == _LONGEST_LINE and not line.endswith("\n"):
                    raise ValueError(
                        f"{path}, line {number}: longer than {_LONGEST_LINE} characters"
                    )
                if not line.strip():
                    continue
                try:
                    rows.append(_json_row(line, lists, wanted))
                except ValueError as error:
                    if problems is None:
                        raise ValueError(f"{path}, line {number}, {error}") from None
                    shown = line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
                    problems[number] = f"{error}\t{shown.rstrip()}"
                    rows.append({})
                lines.append(number)
                names |= dict.fromkeys(rows[-1], 0)
                if len(rows) == chunk_size:
                    yield list(names), lines, [[row.get(n) for n in names] for row in rows]
                    lines, rows = [], []
    except (EOFError, OSError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"{path}, after line {number}: not a whole file ({error})") from error
    yield list(names), lines, [[row.get(name) for name in names] for row in rows]


def _json_row(
    line: str, lists: Collection[str] | None, wanted: Collection[str] | None
) -> dict[str, Cell]:
    if not line.isascii() and (problem := not_utf_8(line)):
        raise ValueError(problem)
    try:
        row = json.loads(line, parse_int=str, parse_float=str, object_pairs_hook=_pairs)
    except RecursionError:
        raise ValueError("no JSON (lists and maps nested too deeply)") from None
    except ValueError as error:
        raise ValueError(f"no JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected a map of columns to values, got {brief(row)}")
    found: dict[str, Cell] = {}
    for name, value in row.items():
        if wanted is not None and name not in wanted:
            found[name] = None
        elif isinstance(value, list) and (lists is None or name in lists):
            found[name] = [
                _json_value(f"column {name}: {in_list(place, '')}", one)
                for place, one in enumerate(value)
            ]
        elif lists and name in lists and value is not None:
            raise ValueError(f"column {name}: expected a list of values, got {brief(value)}")
        else:
            found[name] = _json_value(f"column {name}: ", value)
    return found


def _json_value(where: str, value: Any) -> str | None:
    if isinstance(value, dict | list):
        raise ValueError(f"{where}expected one value, got {brief(value)}")
    if isinstance(value, bool):
        value = "true" if value else "false"
    if isinstance(value, str) and not value.isascii() and not_utf_8(value):
        raise ValueError(f"{where}expected text, got half of a UTF-16 pair")
    return None if value is None else str(value)


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two values of {twice!r}")
    return found
