"""Statistics of a table's column, collected batch by batch, on which a drafted schema is based."""

from collections import Counter
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa

from dlrm.data.sources.columns import TextColumn, hash_texts
from dlrm.data.sources.csv_cells import number_parser
from dlrm.data.sources.row_error import RowError
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.columns import as_text, bits_of, dictionary_encoded, plain_texts, utf_8
from dlrm.data.tables.distinct import Distinct, Moments, Signal
from dlrm.data.tables.kinds.types import is_list
from dlrm.data.tables.lists import lists_of
from dlrm.data.tables.times import microseconds
from dlrm.data.transform.lookup import spread
from dlrm.data.transform.schema import TimeField
from dlrm.data.transform.values import (
    FLOAT64_BITS,
    are_inexact,
    canonical,
    canonical_text,
    is_inexact,
)

MARKERS = ("?", "-", ".", "na", "n/a", "nan", "nil", "none", "null", "\\n")  # in lower case
NUMBERS, TEXT, BOOLEANS, TIMES, OTHER = "numbers", "text", "booleans", "times", "other"
LISTS = "lists"
_MOST_STRAYS = 8  # texts among numbers
_EXAMPLES = 3
_MOST_FEW, _MOST_SAMPLED = 16, 1000  # distinct texts
_EXPONENT = 1e16  # floats from here on have one in their text
_DATES = (
    *("%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%d-%m-%Y", "%m-%d-%Y", "%Y/%m/%d", "%d %b %Y"),
    *("%d-%b-%Y", "%b %d, %Y", "%d/%m/%y", "%m/%d/%y", "%d.%m.%y", "%Y%m%d", "%Y.%m.%d"),
)
_CLOCKS = ("", " %H:%M:%S", " %H:%M", " %H:%M:%S.%f", " %I:%M:%S %p", " %I:%M %p")
TIME_FORMATS = (
    *(date + clock for date in _DATES for clock in _CLOCKS),
    *("%Y%m%d%H", "%Y%m%d%H%M", "%Y%m%d%H%M%S", "%y%m%d%H", "%y%m%d", "%Y%m%dT%H%M%S"),
    *("%d/%b/%Y:%H:%M:%S %z", "[%d/%b/%Y:%H:%M:%S %z]", "%a, %d %b %Y %H:%M:%S %z"),
    *("%a %b %d %H:%M:%S %Y", "%a %b %d %H:%M:%S %z %Y"),
)
_YEARS = range(1990, 2051)


class Summary:
    """The content of a column.

    Attributes:
        name: name of the column.
        types: its Arrow types in the batches.
        kind: NUMBERS, TEXT, BOOLEANS, TIMES, LISTS, or OTHER, which no field can have; None before
            the first value. Text that is all numbers or all times is still TEXT.
        rows, missing: number of rows, and of rows without a value, NaN included.
        first_missing: the first row without a value, from 0; None if there is none.
        distinct: its values.
        examples: some of its values, frequent ones first.
        few: its texts and their counts; None if they are more than 16.
        sample: up to 1,000 of its first texts, without markers.
        numbers: its values that are numbers.
        markers: texts that mean "missing" elsewhere, such as "?", and how often they occur.
        strays: other texts that are not numbers, as long as they are few.
        padded: whether text has numbers that begin with 0, as codes do.
        exponents: whether the text of numbers has exponents.
        inexact: bits of the integers that its floats have all of, if some are beyond these, and so
            may stand for other integers; 0 if none are.
        not_utf_8: the problem of a text that is not UTF-8; None if all are.
        not_a_number, infinite: counts of numbers that are NaN, which are missing, and infinite.
        times: whether text is times in ISO 8601 only, so far.
        formats: forms of `TIME_FORMATS` that all texts and integers have, so far.
        zoned: whether all times have a zone.
        values: the values of lists, one per row; None without lists.
        longest: the greatest number of values in a list.
        empty: number of lists without values, excluding null lists.

    Args:
        text: format of the text, whose numbers may have marks.
    """

    def __init__(self, name: str, text: TextFormat | None = None) -> None:
        self.name, self.kind = name, None
        self._text = text if text is not None and text.has_marks else None
        self.types: dict[str, None] = {}
        self.rows = self.missing = self._missing_positives = 0
        self.first_missing: int | None = None
        self.distinct, self.numbers = Distinct(), Moments()
        self.examples: list[str] = []
        self.few: Counter[str] | None = Counter()
        self.sample: dict[str, None] = {}
        self.markers: Counter[str] = Counter()
        self.strays: dict[str, None] = {}
        self.padded, self.zoned, self.times, self.exponents = False, True, True, False
        self.inexact = 0
        self.formats = TIME_FORMATS
        self.not_utf_8: str | None = None
        self.not_a_number = self.infinite = self.longest = self.empty = 0
        self.values: Summary | None = None
        self._parses_numbers = True

    kind: str | None

    @property
    def present(self) -> int:
        """Returns the number of rows with a value."""
        return self.rows - self.missing

    @property
    def is_number(self) -> bool:
        """Returns whether all values are numbers, except markers of missing ones."""
        if self.kind == TEXT:
            there = self._parses_numbers and self.numbers.count > 0
            return there and not self.padded and not self.strays
        return self.kind == NUMBERS

    @property
    def is_time(self) -> bool:
        """Returns whether all values are times, or texts in ISO 8601."""
        return self.kind == TIMES or (self.kind == TEXT and self.times and self.present > 0)

    @property
    def signal(self) -> Signal:
        """Returns how much the values tell about the label."""
        return self.distinct.signal(self.missing, self._missing_positives)

    def add_missing(self, rows: int, positives: int = 0) -> None:
        """Adds rows without a value, of which some have a label that counts as 1."""
        if rows and self.first_missing is None:
            self.first_missing = self.rows
        self.rows += rows
        self.missing += rows
        self._missing_positives += positives

    def add(self, array: pa.Array, positives: np.ndarray | None = None) -> None:
        """Adds the rows of an array, and which of them have a label that counts as 1."""
        if positives is None:
            positives = np.zeros(len(array), bool)
        try:
            self._add(array, positives)
        except pa.ArrowNotImplementedError:  # of types such as dictionaries of structures
            self.kind, self.types[str(array.type)] = OTHER, None

    def _add(self, array: pa.Array, positives: np.ndarray) -> None:
        if pa.types.is_dictionary(array.type) and not _is_text(array.type.value_type):
            array = array.dictionary_decode()
        if pa.types.is_null(array.type):
            self.add_missing(len(array), int(positives.sum()))
            return
        kind = _kind(array.type)
        self.types[str(array.type)] = None
        self.kind = kind if self.kind in (None, kind) else OTHER
        if self.kind == OTHER:
            self.rows += len(array)
        elif kind == LISTS:
            self._add_lists(array, positives)
        else:
            self._add_values(kind, array, positives)

    def _add_lists(self, array: pa.Array, positives: np.ndarray) -> None:
        self._note_missing(array.is_null().to_numpy(zero_copy_only=False), positives)
        values, lengths = lists_of(self.name, array)
        self.values = self.values or Summary(self.name)
        self.values.add(values, np.repeat(positives, lengths))
        self.longest = max(self.longest, int(lengths.max(initial=0)))
        self.empty += int(np.count_nonzero(lengths == 0)) - array.null_count

    def _add_values(self, kind: str, array: pa.Array, positives: np.ndarray) -> None:
        """Adds the distinct values of an array by how often they occur."""
        raw, codes = dictionary_encoded(self.name, array)
        counts = np.bincount(codes[codes >= 0], minlength=len(raw))
        of_labels = np.bincount(codes[(codes >= 0) & positives], minlength=len(raw))
        if kind in (TEXT, BOOLEANS):
            distinct, escaped = utf_8(raw)
            self.not_utf_8 = self.not_utf_8 or next(iter(escaped.values()), None)
            texts = plain_texts(distinct)
            absent = np.array([not text for text in [*texts, ""]])
            self._note_missing(absent[codes], positives)
            places = np.flatnonzero((counts > 0) & ~absent[:-1])
            texts = [texts[i] for i in places.tolist()]
            self._add_texts(texts, counts[places], of_labels[places])
        else:
            self._note_missing(codes < 0, positives)
            self.not_a_number += int(np.count_nonzero(codes < 0)) - array.null_count
            places = np.flatnonzero(counts)
            some = raw.take(pa.array(places)), counts[places], of_labels[places]
            self._add_numbers(*some, bits_of(array.type))

    def _add_texts(self, texts: list[str], counts: np.ndarray, positives: np.ndarray) -> None:
        column = canonical(TextColumn.from_bytes([t.encode(errors="replace") for t in texts]))
        numbers = np.full(len(texts), np.nan)
        if len(self.examples) < _EXAMPLES:
            order = np.argsort(-counts, kind="stable")[: 2 * _EXAMPLES].tolist()
            best = [texts[i] for i in order if texts[i].lower() not in MARKERS]
            self.examples = list(dict.fromkeys(self.examples + best))[:_EXAMPLES]
        if self.kind == TEXT:
            others = np.array([text.lower() not in MARKERS for text in texts], bool)
            for place in np.flatnonzero(~others).tolist():
                self.markers[texts[place]] += int(counts[place])
            self._keep_texts(texts, counts, others)
            known = [text for text, other in zip(texts, others.tolist(), strict=True) if other]
            if self._parses_numbers:
                numbers[others] = self._parse_numbers(known, counts[others])
            if self.times:
                self._parse_times(known)
            if self.formats:
                self._match_formats(known)
        self.distinct.add(hash_texts(column), counts, positives, numbers)

    def _keep_texts(self, texts: list[str], counts: np.ndarray, others: np.ndarray) -> None:
        if self.few is not None:
            for text, count in zip(texts[: 2 * _MOST_FEW], counts.tolist(), strict=False):
                self.few[text] += count
            if len(self.few) > _MOST_FEW or len(texts) > 2 * _MOST_FEW:
                self.few = None
        if len(self.sample) < _MOST_SAMPLED:
            some = (texts[place] for place in np.flatnonzero(others)[:_MOST_SAMPLED].tolist())
            self.sample |= dict.fromkeys(some)

    def _parse_numbers(self, texts: list[str], counts: np.ndarray) -> np.ndarray:
        """Returns the numbers of texts, NaN for others."""
        parse = number_parser(())
        values = np.full(len(texts), np.nan)
        if self._text is not None:
            texts = [self._text.plain_number(text) for text in texts]
        try:
            values = parse(texts)
        except RowError:
            for place, text in enumerate(texts):
                try:
                    values[place] = parse([text])[0]
                except RowError:
                    self.strays[text] = None
                    if len(self.strays) > _MOST_STRAYS:
                        self._parses_numbers = False
                        return values
        there = ~np.isnan(values)
        self.padded = self.padded or any(
            len(text) > 1 and text[0] == "0" and text.isdecimal() for text in texts
        )
        self.numbers.add(values[there], counts[there])
        present = [text for text, known in zip(texts, there.tolist(), strict=True) if known]
        self.exponents = self.exponents or any("e" in text.lower() for text in present)
        if any(map(is_inexact, present)):
            self.inexact = FLOAT64_BITS
        self.numbers.whole = self.numbers.whole and all(
            canonical_text(text).lstrip("-").isdecimal() for text in present
        )
        return values

    def _parse_times(self, texts: list[str]) -> None:
        field = TimeField(self.name, "UTC")
        for text in texts:
            try:
                if text.lstrip("-").isdecimal():
                    raise ValueError
                microseconds(text, field)
            except (ValueError, OverflowError):
                self.times = False
                return
            self.zoned = self.zoned and _has_zone(self.name, text)

    def _match_formats(self, texts: list[str]) -> None:
        for text in texts:
            self.formats = tuple(form for form in self.formats if _has_form(text, form))
            if not self.formats:
                return

    def _add_numbers(
        self, array: pa.Array, counts: np.ndarray, positives: np.ndarray, bits: int
    ) -> None:
        """Adds distinct values, of which infinite ones are counted apart."""
        if self.kind == TIMES:
            zone = getattr(array.type, "tz", None)
            self.zoned = self.zoned and zone is not None
            array = array.cast(pa.timestamp("us", zone), safe=False).cast(pa.int64())
        values = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        finite = np.isfinite(values)
        self.infinite += int(counts[np.isinf(values)].sum())
        values, counts, positives = (values + 0.0)[finite], counts[finite], positives[finite]
        self.numbers.add(values, counts)
        if pa.types.is_decimal(array.type):
            keys, whole = _keys_of_decimals(array)
            self.numbers.whole = self.numbers.whole and whole
        elif pa.types.is_floating(array.type):
            self.exponents = self.exponents or bool((np.abs(values) >= _EXPONENT).any())
            if are_inexact(values, bits).any():
                self.inexact = bits
            keys = _keys_of_floats(values)
        else:
            integers = array.to_numpy(zero_copy_only=False)
            wide = pa.types.is_uint64(array.type)
            keys = (integers if wide else integers.astype(np.int64)).view(np.uint64)
        self.distinct.add(keys, counts, positives, values)
        if self.formats and self.kind == NUMBERS:
            whole_values = values[values == np.floor(values)]
            if len(whole_values) < len(values) or not 1e5 <= self.numbers.least <= 1e15:
                self.formats = ()
            self._match_formats([str(int(value)) for value in whole_values.tolist()])

    def _note_missing(self, missing: np.ndarray, positives: np.ndarray) -> None:
        if self.first_missing is None and missing.any():
            self.first_missing = self.rows + int(missing.argmax())
        self.missing += int(np.count_nonzero(missing))
        self._missing_positives += int(np.count_nonzero(missing & positives))
        self.rows += len(missing)


def _keys_of_floats(values: np.ndarray) -> np.ndarray:
    """Returns keys, which whole numbers share with integers."""
    whole = (values == np.floor(values)) & (np.abs(values) < float(1 << 63))
    integers = np.where(whole, values, 0.0).astype(np.int64).view(np.uint64)
    return np.where(whole, integers, spread(values.view(np.uint64)))


def _keys_of_decimals(array: pa.Array) -> tuple[np.ndarray, bool]:
    """Returns keys, which whole numbers share with integers, and whether all are whole."""
    texts = as_text(array).to_pylist()
    keys = hash_texts(TextColumn.from_bytes([text.encode() for text in texts]))
    whole = True
    for place, text in enumerate(texts):
        if text.lstrip("-").isdecimal():
            keys[place] = int(text) & ((1 << 64) - 1)
        else:
            whole = False
    return keys, whole


def _has_form(text: str, form: str) -> bool:
    digits = form.replace("%", "").isalpha() and text.isdecimal()
    if digits and len(text) != len(datetime(2026, 11, 20).strftime(form)):
        return False
    try:
        return datetime.strptime(text, form).year in _YEARS
    except ValueError:
        return False


def _kind(kind: pa.DataType) -> str:
    if is_list(kind) and not pa.types.is_nested(kind.value_type):
        return LISTS
    if pa.types.is_dictionary(kind) or _is_text(kind):
        return TEXT
    if pa.types.is_boolean(kind):
        return BOOLEANS
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return NUMBERS
    return TIMES if pa.types.is_timestamp(kind) or pa.types.is_date(kind) else OTHER


def _is_text(kind: pa.DataType) -> bool:
    tests: list[Any] = [pa.types.is_string, pa.types.is_large_string]
    return any(test(kind) for test in [*tests, pa.types.is_binary, pa.types.is_large_binary])


def _has_zone(name: str, text: str) -> bool:
    try:
        microseconds(text, TimeField(name))
    except ValueError:
        return False
    return True
