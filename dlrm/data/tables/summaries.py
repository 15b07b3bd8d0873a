"""Statistics of a table's column, collected batch by batch, on which a drafted schema is based."""

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa

from dlrm.data.sources.columns import TextColumn, hash_texts
from dlrm.data.sources.csv_cells import BadCellError, number_parser
from dlrm.data.tables.columns import texts_of
from dlrm.data.tables.lists import is_list, lists_of
from dlrm.data.tables.times import microseconds
from dlrm.data.transform.lookup import spread
from dlrm.data.transform.schema import TimeField

MARKERS = ("?", "-", ".", "na", "n/a", "nan", "nil", "none", "null", "\\n")  # in lower case
NUMBERS, TEXT, BOOLEANS, TIMES, OTHER = "numbers", "text", "booleans", "times", "other"
LISTS = "lists"
_MOST_KEPT = 1 << 16  # distinct values of a column
_MOST_STRAYS = 8  # texts among numbers
_EXAMPLES = 3


class Distinct:
    """Counts of distinct values: of all, or of a sample of them selected by their hashes.

    Attributes:
        most: the greatest count of a value within one addition; 1 if no value repeats.
    """

    def __init__(self) -> None:
        self.most = 0
        self._keys: np.ndarray = np.empty(0, np.uint64)
        self._counts: np.ndarray = np.empty(0, np.int64)
        self._halvings = 0

    def add(self, keys: np.ndarray, counts: np.ndarray) -> None:
        """Adds occurrences of keys, uint64; a key may be given several times."""
        keys, places = np.unique(np.concatenate([self._keys, keys]), return_inverse=True)
        every = np.concatenate([self._counts, counts])
        self._keys = keys
        self._counts = np.bincount(places, every, len(keys)).astype(np.int64)
        self.most = max(self.most, int(self._counts.max(initial=0)))
        self._keep()
        while len(self._keys) > _MOST_KEPT:
            self._halvings += 1
            self._keep()

    def _keep(self) -> None:
        if self._halvings:
            kept = spread(self._keys) >> np.uint64(64 - self._halvings) == 0
            self._keys, self._counts = self._keys[kept], self._counts[kept]

    def __len__(self) -> int:
        return len(self._keys) << self._halvings

    @property
    def exact(self) -> bool:
        """Returns whether every value was counted."""
        return not self._halvings

    def below(self, limit: int) -> tuple[int, int]:
        """Returns the number of values with a count below `limit`, and that of their rows."""
        rare = self._counts[self._counts < limit]
        return len(rare) << self._halvings, int(rare.sum()) << self._halvings


class Moments:
    """Number, mean, deviation and range of values."""

    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, 0.0, 0.0
        self.least, self.most = np.inf, -np.inf
        self.whole = True

    def add(self, values: np.ndarray, counts: np.ndarray) -> None:
        """Adds values, float64 and finite, by how often they occur."""
        if not len(values):
            return
        count = int(counts.sum())
        mean = float(np.average(values, weights=counts))
        squares = float(((values - mean) ** 2 * counts).sum())
        total, apart = self.count + count, mean - self.mean
        self._squares += squares + apart * apart * self.count * count / total
        self.mean += apart * count / total
        self.count = total
        self.least = min(self.least, float(values.min()))
        self.most = max(self.most, float(values.max()))
        self.whole = self.whole and bool((values == np.floor(values)).all())

    @property
    def deviation(self) -> float:
        """Returns the standard deviation."""
        return float(np.sqrt(self._squares / self.count)) if self.count else 0.0


class Summary:
    """The content of a column.

    Attributes:
        name: name of the column.
        types: its Arrow types in the batches.
        kind: NUMBERS, TEXT, BOOLEANS, TIMES, LISTS, or OTHER, which no field can have; None before
            the first value. Text that is all numbers or all times is still TEXT.
        rows, missing: number of rows, and of rows without a value.
        first_missing: the first row without a value, from 0; None if there is none.
        distinct: its values.
        examples: some of its values, frequent ones first.
        numbers: its values that are numbers.
        markers: texts that mean "missing" elsewhere, such as "?", and how often they occur.
        strays: other texts that are not numbers, as long as they are few.
        padded: whether text has numbers that begin with 0, as codes do.
        not_a_number, infinite: counts of numbers that are NaN and infinite.
        times: whether text is times only, so far.
        zoned: whether all times have a zone.
        values: the values of lists, one per row; None without lists.
        longest: the greatest number of values in a list.
        empty: number of lists without values, excluding null lists.
    """

    def __init__(self, name: str) -> None:
        self.name, self.kind = name, None
        self.types: dict[str, None] = {}
        self.rows = self.missing = 0
        self.first_missing: int | None = None
        self.distinct, self.numbers = Distinct(), Moments()
        self.examples: list[str] = []
        self.markers: Counter[str] = Counter()
        self.strays: dict[str, None] = {}
        self.padded, self.zoned, self.times = False, True, True
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

    def add_missing(self, rows: int) -> None:
        """Adds rows without a value."""
        if rows and self.first_missing is None:
            self.first_missing = self.rows
        self.rows += rows
        self.missing += rows

    def add(self, array: pa.Array) -> None:
        """Adds the rows of an array."""
        if pa.types.is_dictionary(array.type) and not _is_text(array.type.value_type):
            array = array.dictionary_decode()
        if pa.types.is_null(array.type):
            self.add_missing(len(array))
            return
        kind = _kind(array.type)
        self.types[str(array.type)] = None
        self.kind = kind if self.kind in (None, kind) else OTHER
        if self.kind == OTHER:
            self.rows += len(array)
        elif kind == LISTS:
            self._add_lists(array)
        elif kind in (TEXT, BOOLEANS):
            self._add_texts(array)
        else:
            self._add_numbers(array)

    def _add_lists(self, array: pa.Array) -> None:
        self._note_missing(array.is_null().to_numpy(zero_copy_only=False))
        values, lengths = lists_of(self.name, array)
        self.values = self.values or Summary(self.name)
        self.values.add(values)
        self.longest = max(self.longest, int(lengths.max(initial=0)))
        self.empty += int(np.count_nonzero(lengths == 0)) - array.null_count

    def _add_texts(self, array: pa.Array) -> None:
        texts, codes = texts_of(self.name, array)
        filled = np.array([bool(text) for text in [*texts, ""]])
        self._note_missing(~filled[codes])
        counts = np.bincount(codes[codes >= 0], minlength=len(texts))
        places = np.flatnonzero((counts > 0) & filled[:-1])
        texts, counts = [texts[i] for i in places.tolist()], counts[places]
        hashes = hash_texts(TextColumn.from_bytes([t.encode(errors="replace") for t in texts]))
        self.distinct.add(hashes, counts)
        if len(self.examples) < _EXAMPLES:
            order = np.argsort(-counts, kind="stable")[: 2 * _EXAMPLES].tolist()
            best = [texts[i] for i in order if texts[i].lower() not in MARKERS]
            self.examples = list(dict.fromkeys(self.examples + best))[:_EXAMPLES]
        if self.kind == BOOLEANS:
            return
        other = []
        for place, text in enumerate(texts):
            if text.lower() in MARKERS:
                self.markers[text] += int(counts[place])
            else:
                other.append(place)
        texts, counts = [texts[i] for i in other], counts[other]
        if self._parses_numbers:
            self._parse_numbers(texts, counts)
        if self.times:
            self._parse_times(texts)

    def _parse_numbers(self, texts: list[str], counts: np.ndarray) -> None:
        parse = number_parser(())
        values = np.full(len(texts), np.nan)
        try:
            values = parse(texts)
        except BadCellError:
            for place, text in enumerate(texts):
                try:
                    values[place] = parse([text])[0]
                except BadCellError:
                    self.strays[text] = None
                    if len(self.strays) > _MOST_STRAYS:
                        self._parses_numbers = False
                        return
        numbers = ~np.isnan(values)
        self.padded = self.padded or any(
            len(text) > 1 and text[0] == "0" and text.isdecimal() for text in texts
        )
        self.numbers.add(values[numbers], counts[numbers])
        self.numbers.whole = self.numbers.whole and all(
            text.lstrip("-").isdecimal() for text, one in zip(texts, numbers, strict=True) if one
        )

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

    def _add_numbers(self, array: pa.Array) -> None:
        self._note_missing(array.is_null().to_numpy(zero_copy_only=False))
        array = array.drop_null()
        if self.kind == TIMES:
            zone = getattr(array.type, "tz", None)
            self.zoned = self.zoned and zone is not None
            array = array.cast(pa.timestamp("us", zone)).cast(pa.int64())
        if pa.types.is_floating(array.type) or pa.types.is_decimal(array.type):
            values = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
            self.not_a_number += int(np.isnan(values).sum())
            self.infinite += int(np.isinf(values).sum())
            values = values[np.isfinite(values)] + 0.0  # so that -0 is 0
        else:
            values = array.to_numpy(zero_copy_only=False)
            values = values if pa.types.is_uint64(array.type) else values.astype(np.int64)
        values, counts = np.unique(values, return_counts=True)
        self.distinct.add(values.view(np.uint64), counts)
        self.numbers.add(values.astype(np.float64), counts)

    def _note_missing(self, missing: np.ndarray) -> None:
        if self.first_missing is None and missing.any():
            self.first_missing = self.rows + int(missing.argmax())
        self.missing += int(np.count_nonzero(missing))
        self.rows += len(missing)


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
