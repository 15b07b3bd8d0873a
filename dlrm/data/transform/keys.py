"""Keys of categorical values: equal values have one key, whatever their type in Arrow."""

from collections.abc import Collection
from contextlib import suppress

import numpy as np
import pyarrow as pa

from dlrm.data import layout
from dlrm.data.choices import BITS
from dlrm.data.schema.schema import CategoricalField
from dlrm.data.sources.columns import (
    EXPECTED_HEXADECIMAL,
    Parsed,
    TextColumn,
    hash_texts,
    read_hexadecimal,
    stripped,
)
from dlrm.data.sources.row_error import shown_text
from dlrm.data.transform.arrays import canonical_texts, text_column
from dlrm.data.transform.values import (
    FLOAT64_BITS,
    KEYS_OF_NAN,
    NAN,
    NUMBER,
    TEXT,
    KnownTexts,
    canonical,
    canonical_text,
    is_inexact,
    replaced,
)

_WORDS = hash_texts(TextColumn.from_bytes([b"true", b"false"]))
_FEW = 8  # keys that are compared one by one, faster than by a search


class FieldKeys:
    """The keys of a categorical field's values.

    Args:
        field: the field.
        missing_values: texts that mean "missing", besides empty ones.
        known: the texts that a string field had in training; None before it is fitted.
        only_numbers: whether all values in training were numbers, so that NaN is none.
        cardinality: for the type "id", rows of the table; None is that of the field, or the most.

    Attributes:
        missing: keys of the values that mean "missing".
    """

    def __init__(
        self,
        field: CategoricalField,
        missing_values: Collection[str],
        known: KnownTexts | None = None,
        only_numbers: bool = False,
        cardinality: int | None = None,
    ) -> None:
        self.field, self._known, self._only_numbers = field, known, only_numbers
        self._cardinality = cardinality or field.cardinality
        self._spelled = dict.fromkeys(map(canonical_text, field.true_values), "true")
        self._spelled |= dict.fromkeys(map(canonical_text, field.false_values), "false")
        texts = [text.encode() for text in missing_values]
        if "nan" in map(str.lower, missing_values):
            texts += [text.encode() for text in NAN]
        column = TextColumn.from_bytes(texts)
        self._marked = np.union1d(hash_texts(column), hash_texts(canonical(column)))
        if field.type == "string":
            self.missing = self._marked
        elif field.type == "hexadecimal":
            parsed, bad = read_hexadecimal(column)
            self.missing = parsed.values[~bad & ~parsed.missing]
        else:
            self.missing = _integers_of(set(map(canonical_text, missing_values)))

    def of(
        self,
        array: pa.Array,
        problems: dict[int, str],
        value_class: str = TEXT,
        bits: int = FLOAT64_BITS,
    ) -> tuple[Parsed, TextColumn | None]:
        """Returns the keys of values, and for a field of strings the texts that they are known by.

        Args:
            array: the values, without nulls and of one type; surrounding blanks are ignored.
            problems: receives the problem with a value, by its index.
            value_class: `NUMBER`, `BOOLEAN` or `TIME` of typed values; `TEXT` of others.
            bits: floats have all integers up to 2^bits: 24 of float32.

        Raises:
            ValueError: typed values are of a class that the field never had.
        """
        field = self.field
        is_plain = field.type in ("integer", "id") and not self._spelled
        if is_plain and pa.types.is_integer(array.type):
            return self._of_integers(array.to_numpy(zero_copy_only=False), problems), None
        column = stripped(text_column(canonical_texts(field.column, array)))
        hashes = hash_texts(column)
        absent = (column.starts == column.ends) | _among(hashes, self._marked)
        absent |= self._are_nan(hashes, value_class)
        form = column if field.type == "hexadecimal" else canonical(column)
        if form is not column:  # -999.0 where -999 is missing
            absent |= _among(hash_texts(form), self._marked)
            self._note_inexact(column, form, absent, problems, bits)
        if (meant := self._meant(column, form, absent, value_class)) is not column:
            column, hashes = meant, hash_texts(meant)
            absent |= _among(hashes, self._marked)
        if self._spelled:
            self._check_words(column, absent | _among(hashes, _WORDS), problems)
        if field.type == "string":
            return Parsed(np.where(absent, np.uint64(0), hashes), absent), column
        if field.type == "hexadecimal":
            return self._hexadecimals(column, absent, problems), None
        return self._integers(column, absent, problems), None

    def _meant(
        self, column: TextColumn, form: TextColumn, absent: np.ndarray, value_class: str
    ) -> TextColumn:
        """Returns texts, of which `form` is canonical, in the form in which they are known."""
        if self._spelled:
            # All other texts are refused.
            return replaced(form, np.flatnonzero(~absent), self._spelled)
        if self.field.type != "string":
            return column
        return form if self._known is None else self._known.match(form, ~absent, value_class)

    def _are_nan(self, hashes: np.ndarray, value_class: str) -> np.ndarray:
        """Returns a mask of texts of NaN, which are no values in a field of numbers."""
        if value_class == NUMBER or self.field.type == "integer" or self._only_numbers:
            return _among(hashes, KEYS_OF_NAN)
        return np.zeros(len(hashes), bool)

    def _note_inexact(
        self,
        column: TextColumn,
        form: TextColumn,
        absent: np.ndarray,
        problems: dict[int, str],
        bits: int,
    ) -> None:
        """Notes texts of floats that need not be the integers they mean, and counts them absent."""
        such_as = ""
        for row in np.flatnonzero((form.starts != column.starts) & ~absent).tolist():
            if is_inexact(text := column.text(row), bits):
                if self.field.type == "string" and self._known is not None:
                    if (known := self._known.inexact(bits)) is None:
                        break
                    such_as = f" such as {known}, as in the training data"
                absent[row] = True
                problems[row] = (
                    f"expected integers{such_as}, got the float {text}, which need not be exact: "
                    f"above 2^{bits} read the column as integers or text"
                )

    def _check_words(self, column: TextColumn, fits: np.ndarray, problems: dict[int, str]) -> None:
        """Notes texts that are neither true nor false, in a field with spellings of them."""
        for row in np.flatnonzero(~fits).tolist():
            spellings = ", ".join(map(repr, self._spelled))
            problems[row] = (
                f"expected true, false or {spellings}, as true_values and false_values in the "
                f"schema say, got {column.text(row)!r}"
            )

    def _integers(self, column: TextColumn, absent: np.ndarray, problems: dict[int, str]) -> Parsed:
        keys, bad = np.zeros(len(column.starts), np.int64), absent.copy()
        for row in np.flatnonzero(~absent).tolist():
            text = column.data[column.starts[row] : column.ends[row]].tobytes().decode()
            try:
                keys[row] = _integer(text)
            except ValueError as error:
                bad[row] = True
                if self.field.type == "integer":
                    problems[row] = str(error)
        if self.field.type == "integer":
            return Parsed(keys.view(np.uint64), absent)
        bad |= self._out_of_range(keys)
        for row in np.flatnonzero(bad).tolist():
            if row not in problems:
                problems[row] = self.id_problem(None if absent[row] else column.text(row))
        return Parsed.present(np.where(bad, 0, keys).view(np.uint64))

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
        self, column: TextColumn, absent: np.ndarray, problems: dict[int, str]
    ) -> Parsed:
        padded = np.concatenate([column.data, np.zeros(8, np.uint8)])  # as Arrow's are not
        (keys, _), bad = read_hexadecimal(column._replace(data=padded))
        for row in np.flatnonzero(bad & ~absent).tolist():
            problems[row] = f"expected {EXPECTED_HEXADECIMAL}, got {column.text(row)!r}"
        absent = absent | np.isin(keys, self.missing)
        return Parsed(np.where(absent | bad, np.uint64(0), keys), absent)

    def _of_integers(self, values: np.ndarray, problems: dict[int, str]) -> Parsed:
        """Returns the keys of integers of any width; notes those beyond int64 by their index."""
        if self.field.type == "id":
            bad = self._out_of_range(values) | np.isin(values, self.missing.view(np.int64))
            for row in np.flatnonzero(bad).tolist():
                problems[row] = self.id_problem(str(values[row]))
            return Parsed.present(np.where(bad, 0, values).astype(np.uint64))
        if values.dtype == np.uint64:
            for row in np.flatnonzero(values >> np.uint64(63)).tolist():
                problems[row] = f"expected an integer of 64 bits with sign, got {values[row]}"
        keys = np.ascontiguousarray(values.astype(np.int64)).view(np.uint64)
        return Parsed(keys, _among(keys, self.missing))


def _among(keys: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Returns a mask of keys that are among others."""
    if len(chosen) > _FEW:
        return np.isin(keys, chosen)
    mask = np.zeros(len(keys), bool)
    for key in chosen:
        mask |= keys == key
    return mask


def _integers_of(texts: Collection[str]) -> np.ndarray:
    """Returns the keys of the integers that have these canonical texts."""
    values = []
    for text in texts:
        with suppress(ValueError):
            values.append(_integer(text))
    values = [value for value in values if str(value) in texts]
    return np.array(values, np.int64).view(np.uint64)


def _integer(given: str) -> int:
    """Returns the integer of a text; whole numbers may be written as floats: 5.0."""
    whole, point, rest = BITS.get(given, given).partition(".")
    text = whole if point and not rest.strip("0") else BITS.get(given, given)
    digits = text[1:] if text[:1] in ("-", "+") else text
    if digits.isascii() and digits.isdigit() and len(digits) < 40:
        value = int(text)
        if -(1 << 63) <= value < 1 << 63:
            return value
    raise ValueError(f"expected an integer of 64 bits, got {shown_text(given)}")
