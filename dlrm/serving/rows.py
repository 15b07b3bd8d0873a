"""From raw rows to a model's inputs, by the transform that was fitted for the training data.

Offline scoring and the served model both use this file; `triton/export.py` puts a copy of it, and
of what it imports, into the model repository. Only numpy and the standard library are imported.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from dlrm.data import layout
from dlrm.data.csv_transform import BadRowError, CsvTransform
from dlrm.data.text_columns import BadValueError, TextColumn
from dlrm.data.transform import Transform

_PADDING = 8  # bytes that a TextColumn has after its last field
_BLOCK_BYTES = 4 << 20
_TAB, _NEWLINE, _RETURN = b"\t\n\r"


class Inputs(NamedTuple):
    """What a model takes: numericals `[rows, num_numerical]` and ids `[rows, tables]`."""

    numerical: np.ndarray
    ids: np.ndarray


class RowError(ValueError):
    """A row that cannot be scored.

    Attributes:
        row: the first such row.
        problem: what is wrong with it.
    """

    def __init__(self, row: int, problem: str) -> None:
        super().__init__(f"row {row}{problem}")
        self.row, self.problem = row, problem


class Text(NamedTuple):
    """The fields of rows: field `[column, row]` is `data[starts[column, row]:ends[column, row]]`.

    `data` is uint8 with 8 bytes or more after the last field; an empty field is a missing value.
    """

    data: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    @property
    def rows(self) -> int:
        """How many there are."""
        return self.starts.shape[1]

    def without_first(self) -> "Text":
        """Returns all columns but the first, which is the label of a line of a log."""
        return Text(self.data, self.starts[1:], self.ends[1:])

    def labels(self) -> np.ndarray:
        """Returns the first column as float32.

        Raises:
            RowError: it is neither 0 nor 1.
        """
        labels = self.data[self.starts[0]] - np.uint8(ord("0"))
        bad = (labels > 1) | (self.ends[0] - self.starts[0] != 1)
        if bad.any():
            row = int(bad.argmax())
            got = self.column(0).text(row)
            raise RowError(row, f": expected the label 0 or 1 first, got {got!r}")
        return labels.astype(np.float32)

    def column(self, index: int) -> TextColumn:
        """Returns a column."""
        return TextColumn(self.data, self.starts[index], self.ends[index])

    def strings(self, index: int) -> list[str]:
        """Returns a column as strings, with bytes that are no UTF-8 replaced."""
        text, column = self.data.tobytes(), zip(self.starts[index], self.ends[index], strict=True)
        return [text[start:end].decode("utf-8", "replace") for start, end in column]


class RowTransform:
    """The fitted transform of a dataset, of whichever kind, applied to rows of text.

    Args:
        transform: of logs of integers and hexadecimal hashes, or of columns of a CSV.
        directory: what it was loaded from.
    """

    def __init__(self, transform: Transform | CsvTransform, directory: Path | None = None) -> None:
        self._transform, self.directory = transform, directory
        if isinstance(transform, CsvTransform):
            self.numerical_names = list(transform.scales)
            self.categorical_names = list(transform.dictionaries)
            self.table_sizes = [len(values) + 1 for values in transform.dictionaries.values()]
        else:
            self.numerical_names = [f"numerical {i}" for i in range(transform.num_numerical)]
            self.categorical_names = [f"categorical {i}" for i in range(transform.num_categorical)]
            self.table_sizes = transform.cardinalities

    @classmethod
    def load(cls, directory: str | os.PathLike) -> "RowTransform":
        """Reads the `transform/` of a dataset, a checkpoint or a served model.

        Raises:
            FileNotFoundError: there is none.
            ValueError: a file of it is damaged; it is named.
        """
        directory = Path(directory)
        try:
            return cls(CsvTransform.load(directory), directory)
        except FileNotFoundError:
            transform = Transform.load(directory / layout.TRANSFORM)
        for i in range(transform.num_categorical):
            transform.check(i)
        return cls(transform, directory)

    @property
    def is_csv(self) -> bool:
        """Whether the training data was a CSV of named columns, not a log."""
        return isinstance(self._transform, CsvTransform)

    @property
    def names(self) -> list[str]:
        """The columns of a row: numerical ones first, no label."""
        return self.numerical_names + self.categorical_names

    def __call__(self, text: Text) -> Inputs:
        """Transforms rows, whose columns are `names`.

        Raises:
            RowError: a field cannot be read; row and column are named.
        """
        if isinstance(self._transform, CsvTransform):
            cells = {name: text.strings(index) for index, name in enumerate(self.names)}
            try:
                numerical, by_name = self._transform(cells)
            except BadRowError as bad:
                raise RowError(bad.row, f", {bad.column}: {bad.problem}") from None
            ids = [by_name[name] for name in self.categorical_names]
        else:
            try:
                columns = [text.column(index) for index in range(len(self.names))]
                numerical, ids, _ = self._transform(columns)
            except BadValueError as bad_value:
                name = self.names[bad_value.column or 0]
                problem = f"expected {bad_value.expected}, got {bad_value.got!r}"
                raise RowError(bad_value.row, f", {name}: {problem}") from None
        return Inputs(numerical, np.stack(ids, 1) if ids else np.empty((text.rows, 0), np.int8))


def check_inputs(
    inputs: Inputs, num_numerical: int, table_sizes: Sequence[int], names: Sequence[str] = ()
) -> None:
    """Raises ValueError where inputs do not fit a model, a `RowError` where a value does not.

    Args:
        inputs: of any rows; floating numericals, integer ids.
        num_numerical: the model's numerical features.
        table_sizes: the rows of its tables; an empty sequence takes any id.
        names: of the tables, for the message.
    """
    numerical, ids = inputs
    if numerical.ndim != 2 or numerical.shape[1] != num_numerical or numerical.dtype.kind != "f":
        raise ValueError(
            f"numericals: expected [rows, {num_numerical}] of a floating type, got "
            f"{list(numerical.shape)} of {numerical.dtype}"
        )
    tables = len(names) if names else len(table_sizes)
    if ids.shape != (len(numerical), tables) or ids.dtype.kind not in "iu":
        raise ValueError(
            f"ids: expected [{len(numerical)}, {tables}] of an integer type, as there are "
            f"{len(numerical)} rows of numericals, got {list(ids.shape)} of {ids.dtype}"
        )
    if not np.isfinite(numerical).all():
        row, column = np.argwhere(~np.isfinite(numerical))[0]
        got = numerical[row, column]
        raise RowError(int(row), f", numerical {column}: expected a finite number, got {got}")
    if len(table_sizes):
        wrong = (ids < 0) | (ids >= np.asarray(table_sizes))
        if wrong.any():
            row, table = np.argwhere(wrong)[0]
            name = f" ({names[table]})" if names else ""
            expected = f"expected an id from 0 to {table_sizes[table] - 1}"
            raise RowError(int(row), f", table {table}{name}: {expected}, got {ids[row, table]}")


def text_of_fields(rows: Sequence[Sequence[bytes]], num_columns: int) -> Text:
    """Makes text of fields, row by row.

    Raises:
        RowError: a row has another number of fields.
    """
    for row, fields in enumerate(rows):
        if len(fields) != num_columns:
            raise RowError(row, f": expected {num_columns} fields, got {len(fields)}")
    flat = [field for fields in rows for field in fields]
    lengths = np.fromiter(map(len, flat), np.int64, len(flat))
    ends = lengths.cumsum()
    data = np.frombuffer(b"".join(flat) + bytes(_PADDING), np.uint8)
    shape = (len(rows), num_columns)
    return Text(data, (ends - lengths).reshape(shape).T.copy(), ends.reshape(shape).T.copy())


def text_of_tensor(rows: np.ndarray, num_columns: int) -> Text:
    """Makes text of uint8 `[rows, width]`: a line a row, padded with zeros.

    Raises:
        ValueError: another shape or type, or (`RowError`) too many fields.
    """
    if rows.ndim != 2 or rows.dtype != np.uint8:
        raise ValueError(
            f"raw rows: expected uint8 [rows, width], got {list(rows.shape)} of {rows.dtype}"
        )
    lines = np.full((len(rows), rows.shape[1] + 1), _NEWLINE, np.uint8)
    lines[:, :-1] = rows
    padding = np.cumprod(rows[:, ::-1] == 0, axis=1)[:, ::-1].astype(bool)
    ends = (~padding).sum(1)
    lines[np.arange(len(rows)), ends] = _NEWLINE
    flat = np.concatenate([lines.reshape(-1), np.zeros(_PADDING, np.uint8)])
    starts = np.arange(len(rows)) * lines.shape[1]
    return _cut(flat, starts, starts + ends, num_columns)


def text_of_lines(lines: bytes, num_columns: int) -> Text:
    """Makes text of whole lines; fields that are cut off at a line's end are missing.

    Raises:
        RowError: a line is empty or has too many fields.
    """
    if not lines.endswith(b"\n"):
        lines += b"\n"
    data = np.frombuffer(lines + bytes(_PADDING), np.uint8)
    ends = np.flatnonzero(data[: len(lines)] == _NEWLINE)
    starts = np.concatenate([[0], ends[:-1] + 1])
    text = _cut(data, starts, ends, num_columns)
    empty = text.ends[-1] == text.starts[0]
    if empty.any():
        raise RowError(int(empty.argmax()), f": expected {num_columns} fields, got an empty line")
    return text


def _cut(data: np.ndarray, starts: np.ndarray, ends: np.ndarray, num_columns: int) -> Text:
    """Cuts lines `[start, end)` into fields at their tabs."""
    ends = ends - ((ends > starts) & (data[ends - 1] == _RETURN))
    tabs = np.flatnonzero(data[: ends[-1] if len(ends) else 0] == _TAB)
    row_of_tab = np.searchsorted(starts, tabs, side="right") - 1
    first_tab = np.searchsorted(tabs, starts)
    fields = np.bincount(row_of_tab, minlength=len(starts)) + 1
    if (fields > num_columns).any():
        row = int((fields > num_columns).argmax())
        raise RowError(row, f": expected up to {num_columns} fields, got {fields[row]}")
    field_ends = np.repeat(ends[None], num_columns, axis=0)
    field_ends[np.arange(len(tabs)) - first_tab[row_of_tab], row_of_tab] = tabs
    field_starts = np.empty_like(field_ends)
    field_starts[0] = starts
    np.minimum(field_ends[:-1] + 1, field_ends[1:], out=field_starts[1:])  # cut off: empty
    return Text(data, field_starts, field_ends)


def read_lines(file: BinaryIO, num_columns: int) -> Iterator[Text]:
    """Yields the lines of a file, some megabytes at a time.

    Raises:
        RowError: a line is empty or has too many fields; rows are counted from those last yielded.
    """
    rest = b""
    while block := file.read(_BLOCK_BYTES):
        whole, newline, rest = (rest + block).rpartition(b"\n")
        if newline:
            yield text_of_lines(whole + newline, num_columns)
    if rest:
        yield text_of_lines(rest, num_columns)
