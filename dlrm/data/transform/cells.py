"""The meaning of a cell's text, in training and serving alike: keys, numbers and labels."""

from collections.abc import Collection, Sequence
from contextlib import suppress

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.sources.columns import Parsed, TextColumn, hash_texts, stripped
from dlrm.data.sources.csv_cells import BadCellError, Parser, label_parser, number_parser
from dlrm.data.transform.schema import CategoricalField, NumericalField, Schema

_LONGEST_SHOWN = 64  # characters of a cell in a message
_MOST_LABELS = 4  # labels that an error names


class BadRowError(ValueError):
    """A cell that cannot be transformed.

    Attributes:
        row, column: position of the cell.
        problem: the expected form and the cell's.
    """

    def __init__(self, row: int, column: str, problem: str) -> None:
        super().__init__(f"column {column}, row {row}: {problem}")
        self.row, self.column, self.problem = row, column, problem


def missing_keys(schema: Schema) -> np.ndarray:
    """Returns the hashes of the texts that mean "missing"."""
    texts = [text.encode() for text in schema.missing_values]
    texts += [b"nan"] * ("nan" in map(str.lower, schema.missing_values))  # the text of NaN
    return hash_texts(TextColumn.from_bytes(texts))


def missing_integers(schema: Schema) -> np.ndarray:
    """Returns the keys of the integers whose text means "missing"."""
    found = []
    for text in schema.missing_values:
        with suppress(ValueError):
            found.append(_integer(text.encode()))
    found = [value for value in found if str(value) in schema.missing_values]
    return np.array(found, np.int64).view(np.uint64)


def missing_numbers(missing_values: Collection[str]) -> np.ndarray:
    """Returns the numbers that mean "missing": -999 in any notation."""
    parse, found = number_parser(()), []
    for text in missing_values:
        with suppress(BadCellError):
            found += parse([text]).tolist()
    return np.array(found, np.float64)


def keys_of_texts(
    field: CategoricalField,
    column: TextColumn,
    missing: np.ndarray,
    problems: dict[int, str] | None = None,
) -> Parsed:
    """Returns the keys of texts.

    Args:
        field: a field of strings or integers.
        column: the texts; surrounding blanks are ignored.
        missing: hashes of texts that mean "missing", besides empty ones.
        problems: receives the problem with a text, by row; None raises the first.

    Raises:
        BadRowError: the first text that is not an integer, in a field of integers.
    """
    column = stripped(column)
    hashes = hash_texts(column)
    absent = column.ends == column.starts
    if len(missing):
        absent |= np.isin(hashes, missing)
    if field.type == "string":
        return Parsed(np.where(absent, np.uint64(0), hashes), absent)
    keys = np.zeros(len(hashes), np.int64)
    for row in np.flatnonzero(~absent).tolist():
        text = column.data[column.starts[row] : column.ends[row]].tobytes()
        try:
            keys[row] = _integer(text)
        except ValueError as error:
            if problems is None:
                raise BadRowError(row, field.column, str(error)) from None
            problems[row] = str(error)
    return Parsed(keys.view(np.uint64), absent)


def _integer(text: bytes) -> int:
    whole, point, rest = text.partition(b".")
    if point and not rest.strip(b"0"):  # whole numbers written as floats: 5.0
        text = whole
    digits = text[1:] if text[:1] in (b"-", b"+") else text
    if digits.isdigit() and len(digits) < 40:
        value = int(text)
        if -(1 << 63) <= value < 1 << 63:
            return value
    shown = _shortened(text.decode("utf-8", "backslashreplace"))
    raise ValueError(f"expected an integer of 64 bits, got {shown!r}")


def numbers_of_texts(
    field: NumericalField,
    cells: Sequence[str],
    missing_values: Collection[str],
    problems: dict[int, str] | None = None,
) -> Parsed:
    """Returns the numbers of cells; missing cells give 0.

    Args:
        field: the field of the cells.
        cells: the text; blanks around a number are ignored.
        missing_values: texts that mean "missing", besides empty ones.
        problems: receives the problem with a cell, by row; None raises the first.

    Raises:
        BadRowError: the first cell that is not a finite number.
    """
    cells, parse = [cell.strip() for cell in cells], number_parser(missing_values)
    try:
        values = parse(cells)
    except BadCellError as error:
        if problems is None:
            problem = _problem(error.index, error.expected_here, cells)
            raise BadRowError(error.index, field.column, problem) from None
        values = np.full(len(cells), np.nan)
        for row, cell in enumerate(cells):
            try:
                values[row] = parse([cell])[0]
            except BadCellError as bad:
                problems[row] = _problem(0, bad.expected, [cell])
    missing = np.isnan(values) | np.isin(values, missing_numbers(missing_values))
    return Parsed(np.where(missing, 0.0, values), missing)


def _problem(index: int, expected: str, cells: Sequence[str]) -> str:
    return f"expected {expected}, got {_shortened(cells[index])!r}"


def label_cells(schema: Schema, known: Collection[str] | None) -> Parser:
    """Returns a parser of labels.

    Args:
        schema: the schema with the label.
        known: all values that are expected; None accepts any value.
    """
    label, missing = schema.label, {"", *schema.missing_values}
    if label.positive is None:
        return _zero_or_one

    def parse(cells: Sequence[str]) -> np.ndarray:
        for index, cell in enumerate(cells):
            if cell in missing:
                raise BadCellError(index, "a label that is not missing")
            if known is not None and cell not in known:
                shown = " or ".join(map(repr, list(known)[:_MOST_LABELS]))
                raise BadCellError(index, shown + (", ..." if len(known) > _MOST_LABELS else ""))
        return np.array([cell == label.positive for cell in cells], layout.LABEL_DTYPE)

    return parse


def _zero_or_one(cells: Sequence[str]) -> np.ndarray:
    booleans = {"true": "1", "false": "0"}
    try:
        return label_parser()([booleans.get(cell.lower(), cell) for cell in cells])
    except BadCellError as error:
        hint = "--positive, or label: {positive: VALUE} in the schema, names one that counts as 1"
        raise BadCellError(error.index, f"a label of 0 or 1 ({hint})") from None


def _shortened(cell: str) -> str:
    return cell if len(cell) <= _LONGEST_SHOWN else cell[:_LONGEST_SHOWN] + "..."
