"""The meaning of a cell's text, in training and serving alike: keys, numbers and labels."""

from collections.abc import Collection, Sequence
from contextlib import suppress

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.sources.columns import (
    EXPECTED_HEXADECIMAL,
    EXPECTED_INTEGER,
    Parsed,
    TextColumn,
    hash_texts,
    read_hexadecimal,
    read_integer,
    stripped,
)
from dlrm.data.sources.csv_cells import Parser, label_parser, number_parser
from dlrm.data.sources.row_error import RowError, shown_text
from dlrm.data.transform.schema import CategoricalField, NumericalField, Schema
from dlrm.data.transform.values import (
    FLOAT64_BITS,
    NUMBER,
    SPELLINGS,
    TEXT,
    KnownTexts,
    canonical,
    canonical_text,
    is_inexact,
    replaced,
)

NO_NUMBER = "expected a number, got no value"
_MOST_LABELS = 4  # labels that an error names
_WORDS = hash_texts(TextColumn.from_bytes([b"true", b"false"]))
NAN = ("nan", "NaN", "NAN")
KEYS_OF_NAN = hash_texts(TextColumn.from_bytes([text.encode() for text in NAN]))
_BOOLEANS = {text.encode(): b"01"[word == "true" :][:1] for text, word in SPELLINGS.items()}


class FieldKeys:
    """The keys of a categorical field's values, on every route.

    Args:
        missing_values: texts that mean "missing", besides empty ones.
        known: the texts that a string field had in training; None before it is fitted.
        numbers: those by which only NaN is read: as missing, if all others are numbers.
        cardinality: for the type "id", rows of the table; None is that of the field, or the most.

    Attributes:
        missing: keys of the values that mean "missing".
    """

    def __init__(
        self,
        field: CategoricalField,
        missing_values: Collection[str],
        known: KnownTexts | None = None,
        cardinality: int | None = None,
        numbers: KnownTexts | None = None,
    ) -> None:
        self.field, self._known, self._numbers = field, known, numbers or known
        self._cardinality = cardinality or field.cardinality
        self._spelled = dict.fromkeys(map(canonical_text, field.true_values), "true")
        self._spelled |= dict.fromkeys(map(canonical_text, field.false_values), "false")
        texts = [text.encode() for text in missing_values]
        texts += [b"nan"] * ("nan" in map(str.lower, missing_values))  # the text of NaN
        column = TextColumn.from_bytes(texts)
        self._marked = np.union1d(hash_texts(column), hash_texts(canonical(column)))
        if field.type == "string":
            self.missing = self._marked
        elif field.type in ("integer", "id"):
            self.missing = _missing_integers(missing_values)
        else:
            parsed, bad = read_hexadecimal(column)
            self.missing = parsed.values[~bad & ~parsed.missing]

    def of_texts(
        self,
        column: TextColumn,
        problems: dict[int, str] | None = None,
        kind: str = TEXT,
        bits: int = FLOAT64_BITS,
    ) -> tuple[Parsed, TextColumn]:
        """Returns the keys of values, and their texts in canonical form.

        Args:
            column: the values' texts; surrounding blanks are ignored.
            problems: receives the problem with a text, by row; None raises the first.
            kind: `NUMBER`, `BOOLEAN` or `TIME` of typed values; `TEXT` of others.
            bits: floats have all integers up to 2^bits: 24 of float32.

        Raises:
            RowError: the first text that is not an integer, in a field of integers, or that is a
                float where integers beyond 2^bits are known, or nothing is.
            ValueError: typed values are of a kind that the field never had.
        """
        column = stripped(column)
        hashes = hash_texts(column)
        absent = (column.starts == column.ends) | self._are_marked(hashes)
        form = column if self.field.type == "hexadecimal" else canonical(column)
        absent |= self._are_nan(hashes, kind)
        if form is not column:  # -999.0 where -999 is missing
            absent |= self._are_marked(hash_texts(form))
            absent |= self._note_inexact(column, form, absent, problems, bits)
        if (meant := self._meant(column, form, absent, kind)) is not column:
            column, hashes = meant, hash_texts(meant)
            absent |= self._are_marked(hashes)
        if self._spelled:
            self._check_words(column, absent | np.isin(hashes, _WORDS), problems)
        if self.field.type == "string":
            return Parsed(np.where(absent, np.uint64(0), hashes), absent), column
        if self.field.type == "integer":
            return self._integers(column, absent, problems), column
        if self.field.type == "id":
            return self._ids(column, absent, problems), column
        return self._hexadecimals(column, absent, problems), column

    def _meant(
        self, column: TextColumn, form: TextColumn, absent: np.ndarray, kind: str
    ) -> TextColumn:
        """Returns texts, of which `form` is canonical, in the form in which they are known."""
        if self._spelled:
            # All other texts are refused.
            return replaced(form, np.flatnonzero(~absent), self._spelled)
        if self.field.type != "string":
            return column
        return form if self._known is None else self._known.match(form, ~absent, kind)

    def _are_nan(self, hashes: np.ndarray, kind: str) -> np.ndarray:
        """Returns a mask of texts of NaN, which are no values in a field of numbers."""
        nan = np.isin(hashes, KEYS_OF_NAN)
        if kind == NUMBER or self.field.type == "integer" or not nan.any():
            return nan
        return nan & (self._numbers is not None and self._numbers.are_numbers)

    def _note_inexact(
        self,
        column: TextColumn,
        form: TextColumn,
        absent: np.ndarray,
        problems: dict[int, str] | None,
        bits: int,
    ) -> np.ndarray:
        """Notes texts of floats that need not be the integers they mean; returns their mask."""
        bad, such_as = np.zeros(len(absent), bool), ""
        for row in np.flatnonzero((form.starts != column.starts) & ~absent).tolist():
            if is_inexact(text := column.text(row), bits):
                if self.field.type == "string" and self._known is not None:
                    if (known := self._known.inexact(bits)) is None:
                        break
                    such_as = f" such as {known}, as in the training data"
                bad[row] = True
                problem = (
                    f"expected integers{such_as}, got the float {text}, which need not be exact: "
                    f"above 2^{bits} read the column as integers or text"
                )
                _note(problems, row, self.field.column, problem)
        return bad

    def _check_words(
        self, column: TextColumn, fits: np.ndarray, problems: dict[int, str] | None
    ) -> None:
        """Notes texts that are neither true nor false, in a field with spellings of them."""
        for row in np.flatnonzero(~fits).tolist():
            text = column.text(row)
            spellings = ", ".join(map(repr, self._spelled))
            problem = (
                f"expected true, false or {spellings}, as true_values and false_values in the "
                f"schema say, got {text!r}"
            )
            _note(problems, row, self.field.column, problem)

    def _integers(
        self, column: TextColumn, absent: np.ndarray, problems: dict[int, str] | None
    ) -> Parsed:
        keys = np.zeros(len(column.starts), np.int64)
        for row in np.flatnonzero(~absent).tolist():
            text = column.data[column.starts[row] : column.ends[row]].tobytes()
            try:
                keys[row] = _integer(text)
            except ValueError as error:
                _note(problems, row, self.field.column, str(error))
        return Parsed(keys.view(np.uint64), absent)

    def _ids(
        self, column: TextColumn, absent: np.ndarray, problems: dict[int, str] | None
    ) -> Parsed:
        no_integers: dict[int, str] = {}
        keys = self._integers(column, absent, no_integers).values
        bad = self._out_of_range(keys.view(np.int64)) | absent
        bad[list(no_integers)] = True
        for row in np.flatnonzero(bad).tolist():
            if problems is None or row not in problems:
                problem = self.id_problem(None if absent[row] else column.text(row))
                _note(problems, row, self.field.column, problem)
        return Parsed.present(np.where(bad, np.uint64(0), keys))

    def _out_of_range(self, values: np.ndarray) -> np.ndarray:
        return (values < 0) | (values >= (self._cardinality or layout.MAX_CARDINALITY))

    def id_problem(self, got: str | None) -> str:
        """Returns the problem of a value that is no id; None for no value."""
        limit = f"its cardinality, {self._cardinality}" if self._cardinality else None
        shown = "no value" if got is None else repr(got)
        return (
            f"expected an integer id from 0 and less than {limit or layout.MAX_CARDINALITY}, got "
            f"{shown}"
        )

    def _hexadecimals(
        self, column: TextColumn, absent: np.ndarray, problems: dict[int, str] | None
    ) -> Parsed:
        padded = np.concatenate([column.data, np.zeros(8, np.uint8)])  # as Arrow's are not
        (keys, _), bad = read_hexadecimal(column._replace(data=padded))
        for row in np.flatnonzero(bad & ~absent).tolist():
            problem = f"expected {EXPECTED_HEXADECIMAL}, got {column.text(row)!r}"
            _note(problems, row, self.field.column, problem)
        absent = absent | np.isin(keys, self.missing)
        return Parsed(np.where(absent | bad, np.uint64(0), keys), absent)

    def of_integers(self, values: np.ndarray, problems: dict[int, str]) -> Parsed:
        """Returns the keys of integers of any width; notes those beyond int64 by their index."""
        if self.field.type == "id":
            bad = self._out_of_range(values) | np.isin(values, self.missing.view(np.int64))
            for place in np.flatnonzero(bad).tolist():
                problems[place] = self.id_problem(str(values[place]))
            return Parsed.present(np.where(bad, 0, values).astype(np.uint64))
        if values.dtype == np.uint64:
            for place in np.flatnonzero(values >> np.uint64(63)).tolist():
                problems[place] = f"expected an integer of 64 bits with sign, got {values[place]}"
        keys = np.ascontiguousarray(values.astype(np.int64)).view(np.uint64)
        return Parsed(keys, np.isin(keys, self.missing))

    def _are_marked(self, hashes: np.ndarray) -> np.ndarray:
        """Returns a mask of hashes of texts that mean "missing"."""
        return np.isin(hashes, self._marked) if len(self._marked) else np.zeros(len(hashes), bool)


def _missing_integers(missing_values: Collection[str]) -> np.ndarray:
    """Returns the keys of the integers whose text means "missing"."""
    values = []
    for text in missing_values:
        with suppress(ValueError):
            values.append(_integer(text.encode()))
    values = [value for value in values if str(value) in missing_values]
    return np.array(values, np.int64).view(np.uint64)


def missing_numbers(missing_values: Collection[str]) -> np.ndarray:
    """Returns the numbers that mean "missing": -999 in any notation."""
    parse, numbers = number_parser(()), []
    for text in missing_values:
        with suppress(RowError):
            numbers += parse([text]).tolist()
    return np.array(numbers, np.float64)


def _integer(text: bytes) -> int:
    given, text = text, _BOOLEANS.get(text, text)
    whole, point, rest = text.partition(b".")
    if point and not rest.strip(b"0"):  # whole numbers written as floats: 5.0
        text = whole
    digits = text[1:] if text[:1] in (b"-", b"+") else text
    if digits.isdigit() and len(digits) < 40:
        value = int(text)
        if -(1 << 63) <= value < 1 << 63:
            return value
    shown = shown_text(given.decode("utf-8", "backslashreplace"))
    raise ValueError(f"expected an integer of 64 bits, got {shown}")


def _note(problems: dict[int, str] | None, row: int, column: str, problem: str) -> None:
    """Adds a problem to those of other rows; raises it if they are not collected."""
    if problems is None:
        raise RowError(row, problem, column) from None
    problems[row] = problem


def numbers_of_texts(
    field: NumericalField,
    cells: Sequence[str],
    missing_values: Collection[str],
    problems: dict[int, str] | None = None,
) -> Parsed:
    """Returns the numbers of cells; missing cells give 0, and blanks around a number are ignored.

    `problems` receives the problem with a cell, by row; None raises the first.

    Raises:
        RowError: the first cell that is not a finite number.
    """
    cells = [cell.strip() for cell in cells]
    if field.type == "decimal":
        return _decimals(field, cells, missing_values, problems)
    cells, parse = _without_words(field, cells), number_parser(missing_values, problems is not None)
    try:
        values = parse(cells)
    except RowError as error:
        if problems is None:
            error.column = field.column
            raise
        values = np.full(len(cells), np.nan)
        for row, cell in enumerate(cells):
            try:
                values[row] = parse([cell])[0]
            except RowError as bad:
                problems[row] = bad.problem
    missing = np.isnan(values) | np.isin(values, missing_numbers(missing_values))
    return Parsed(np.where(missing, 0.0, values), missing)


def _decimals(
    field: NumericalField,
    cells: Sequence[str],
    missing_values: Collection[str],
    problems: dict[int, str] | None,
) -> Parsed:
    there = ["" if cell in missing_values else cell for cell in cells]
    column = TextColumn.from_bytes([cell.encode() for cell in there])
    (values, missing), bad = read_integer(column)
    for row in np.flatnonzero(bad).tolist():
        problem = f"expected {EXPECTED_INTEGER}, got {shown_text(cells[row])}"
        _note(problems, row, field.column, problem)
    return Parsed(np.where(bad, 0, values).astype(np.float64), missing)


def _without_words(field: NumericalField, cells: list[str]) -> list[str]:
    """Returns cells with 1 and 0 for true and false."""
    words = {text: str(int(word == "true")) for text, word in SPELLINGS.items()}
    words |= dict.fromkeys(map(canonical_text, field.true_values), "1")
    words |= dict.fromkeys(map(canonical_text, field.false_values), "0")
    if field.true_values or field.false_values:
        return [words.get(canonical_text(cell), cell) for cell in cells]
    return cells if words.keys().isdisjoint(cells) else [words.get(cell, cell) for cell in cells]


def label_cells(schema: Schema, known: Collection[str] | None) -> Parser:
    """Returns a parser of labels, of which `known` are all that are expected; None accepts any."""
    label, missing = schema.label, {"", *schema.missing_values}
    if not label.positives:
        return _zero_or_one
    positives = set(map(canonical_text, label.positives))
    forms = None if known is None else set(map(canonical_text, known))
    rated = label.any_negative and known is not None and all(map(_is_number, known))
    of_numbers = all(map(_is_number, (*label.positives, *(label.negative or ()))))

    def parse(cells: Sequence[str]) -> np.ndarray:
        for index, cell in enumerate(cells):
            if cell in missing or (of_numbers and cell.lower() == "nan"):
                problem = f"expected a label that is not missing, got {shown_text(cell)}"
                raise RowError(index, problem)
            if of_numbers and label.any_negative and not _is_number(cell):
                shown = " or ".join(map(repr, label.positives[:_MOST_LABELS]))
                raise RowError(index, f"expected a number such as {shown}, got {shown_text(cell)}")
            if rated and _is_number(cell):  # one more rating counts as 0
                continue
            if known is not None and forms is not None and canonical_text(cell) not in forms:
                shown = " or ".join(map(repr, list(known)[:_MOST_LABELS]))
                shown += ", ..." * (len(known) > _MOST_LABELS)
                raise RowError(index, f"expected {shown}, got {shown_text(cell)}")
        values = [canonical_text(cell) in positives for cell in cells]
        return np.array(values, layout.LABEL_DTYPE)

    return parse


def _is_number(text: str) -> bool:
    try:
        number_parser(())([text])
    except RowError:
        return False
    return True


def _zero_or_one(cells: Sequence[str]) -> np.ndarray:
    booleans = {"true": "1", "false": "0"}
    return label_parser()([booleans.get(cell.lower(), cell) for cell in cells])
