"""A column of a sampled table: its distinct values, how often they occur, and with which labels."""

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.columns import as_text, bits_of, dictionary_encoded, utf_8
from dlrm.data.tables.kinds.types import is_list
from dlrm.data.tables.lists import lists_of
from dlrm.data.transform.values import FLOAT64_BITS, are_inexact

NUMBERS, TEXT, TIMES, LISTS, OTHER = "numbers", "text", "times", "lists", "other"
MARKERS = ("?", "-", ".", "na", "n/a", "nan", "nil", "none", "null", "\\n")  # in lower case
_NUMBER = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_ZONE = "(Z|[+-][0-9]{2}:?[0-9]{2})$"
_BINS = 20  # of equally many rows, in which the order of numbers shows
_CLEAR = 4.0  # standard deviations beyond chance


class Signal(NamedTuple):
    """The share of the label's variance that a column explains, by its values or their order.

    The share is clear if chance would not reach it once in many columns, and ordered if 20 ranges
    of the values explain most of it. A column is pure if each value has one label.
    """

    share: float = 0.0
    clear: bool = False
    ordered: bool = False
    pure: bool = False


class Summary:
    """The content of a column.

    Attributes:
        kind: NUMBERS, TEXT, TIMES or LISTS; OTHER for what no field can have. Text that is all
            numbers or all times is still TEXT, and so are booleans.
        missing: mask of the rows without a value, NaN included.
        values, counts: the distinct values without infinite ones, and their rows.
        numbers: the number of each value, of times in microseconds; NaN for other texts.
        markers: texts that mean "missing" elsewhere, such as "?", and how often they occur.
        others: texts that are neither numbers nor markers.
        padded, exponents: whether text has numbers that begin with 0, as codes do, and exponents.
        inexact: bits of the integers that its floats have all of, if some are beyond these, and so
            may stand for other integers; 0 if none are.
        not_utf_8: the problem of a text that is not UTF-8; None if all are.
        not_a_number, infinite: counts of numbers that are NaN, which are missing, and infinite.
        is_time, zoned: whether all values are times, or texts in ISO 8601, and have a zone.
        items, lengths: the summary of the values of lists, and the lengths of the lists.

    Args:
        positive: which rows have a label that counts as 1.
        text: the format of text, whose numbers may have marks.
    """

    items: "Summary | None" = None
    not_utf_8: str | None = None
    padded = exponents = is_time = zoned = False
    inexact = not_a_number = infinite = 0

    def __init__(
        self,
        name: str,
        array: pa.Array | pa.ChunkedArray,
        positive: np.ndarray,
        text: TextFormat | None = None,
    ) -> None:
        self.name, self.type, self.kind = name, array.type, _kind(array.type)
        if isinstance(array, pa.ChunkedArray) and self.kind != OTHER:
            array = array.combine_chunks()
        self.markers: dict[str, int] = {}
        self.values = self.others = pa.array([], pa.string())
        self.counts = self._positives = self.lengths = np.empty(0, np.int64)
        self.numbers: np.ndarray = np.empty(0)
        self.missing: np.ndarray = np.zeros(len(array), bool)
        if self.kind == LISTS:
            self.missing = _numpy(array.is_null())
            items, self.lengths = lists_of(name, array)
            self.items = Summary(name, items, np.repeat(positive, self.lengths))
        elif self.kind != OTHER:
            values, codes = dictionary_encoded(name, array)
            self.not_a_number = int(np.count_nonzero(codes < 0)) - array.null_count
            if self.kind == TEXT:
                values, codes = self._merged(values, codes, text)
                numbers = _numbers_of(values)
            elif self.kind == TIMES:
                self.is_time, self.zoned = True, getattr(values.type, "tz", None) is not None
                times = values.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
                numbers = _numpy(times).astype(np.float64)
            else:
                numbers = _numpy(values.cast(pa.float64(), safe=False))
            self.missing = codes < 0
            counts = np.bincount(codes[~self.missing], minlength=len(values))
            positives = np.bincount(codes[~self.missing & positive], minlength=len(values))
            self.infinite = int(counts[np.isinf(numbers)].sum())
            kept = (counts > 0) & ~np.isinf(numbers)
            self.values, self.numbers = values.filter(pa.array(kept)), numbers[kept]
            self.counts, self._positives = counts[kept], positives[kept]
            self._note_forms()
        self._absent = [np.count_nonzero(self.missing), np.count_nonzero(self.missing & positive)]

    def _merged(
        self, values: pa.Array, codes: np.ndarray, text: TextFormat | None
    ) -> tuple[pa.Array, np.ndarray]:
        """Returns texts without blanks and fractions of 0, and the index of each row's, or -1."""
        texts, problems = utf_8(values)
        self.not_utf_8 = next(iter(problems.values()), None)
        texts = pc.utf8_trim_whitespace(as_text(texts))
        if text is not None and text.has_marks:
            texts = pa.array(map(text.plain_number, texts.to_pylist()), texts.type)
        floats = texts.filter(pc.match_substring_regex(texts, _NUMBER))
        floats = _numpy(floats.filter(pc.match_substring_regex(floats, "[.eE]")).cast(pa.float64()))
        self.inexact = FLOAT64_BITS * bool(are_inexact(floats, FLOAT64_BITS).any())
        merged = pc.replace_substring_regex(texts, r"^(-?(0|[1-9][0-9]*))\.0+$", r"\1")
        merged = merged.dictionary_encode()
        values, places = merged.dictionary, _numpy(merged.indices)
        places = np.where(_numpy(pc.equal(values, "")), -1, np.arange(len(values)))[places]
        return values, np.append(places, -1)[codes]

    def _note_forms(self) -> None:
        """Notes the forms of texts, and floats that need not be exact."""
        values, no_number = self.values, np.isnan(self.numbers)
        if self.kind == TEXT:
            texts = values.filter(pa.array(~no_number))
            self.padded, self.exponents = _any(texts, "^0[0-9]+$"), _any(texts, "[eE+]")
            marked = _numpy(pc.is_in(pc.utf8_lower(values), pa.array(MARKERS, values.type)))
            marks = values.filter(pa.array(marked)).to_pylist()
            self.markers = dict(zip(marks, self.counts[marked].tolist(), strict=True))
            self.others = values.filter(pa.array(no_number & ~marked))
            self.is_time = bool(no_number.all() and len(self.others)) and _are_times(self.others)
            self.zoned = all_match(self.others, _ZONE)
        elif pa.types.is_floating(values.type):
            bits = bits_of(values.type)
            self.inexact = bits * bool(are_inexact(self.numbers, bits).any())

    @property
    def is_number(self) -> bool:
        """Returns whether all values are numbers, except markers of missing ones."""
        if self.kind == TEXT:
            return not np.isnan(self.numbers).all() and not self.padded and not len(self.others)
        return self.kind == NUMBERS

    @cached_property
    def range(self) -> tuple[float, float]:
        """Returns the least and the greatest number; NaN without any."""
        numbers = self.numbers[~np.isnan(self.numbers)]
        return (float(numbers.min()), float(numbers.max())) if len(numbers) else (np.nan, np.nan)

    @cached_property
    def whole(self) -> bool:
        """Returns whether all numbers are integers."""
        numbers = self.numbers[~np.isnan(self.numbers)]
        return not self.infinite and bool((numbers == np.floor(numbers)).all())

    @cached_property
    def signal(self) -> Signal:
        """Returns how much the values tell about the label; missing ones count as one value."""
        absent = [[number] * (self._absent[0] > 0) for number in (*self._absent, np.inf)]
        counts = np.append(self.counts, absent[0])
        positives = np.append(self._positives, absent[1])
        rows, share = counts.sum(), positives.sum() / max(counts.sum(), 1)
        variance = share * (1 - share)
        if variance <= 0 or len(counts) < 2:
            return Signal()

        def explained(counts: np.ndarray, positives: np.ndarray) -> float:
            """Returns the share of variance between groups, less that which chance would have."""
            apart = ((positives - counts * share) ** 2 / counts).sum() / variance
            return float((apart - (len(counts) - 1)) / rows)

        order = np.argsort(np.append(self.numbers, absent[2]), kind="stable")
        middles = np.cumsum(counts[order]) - counts[order] / 2
        _, ranges = np.unique((middles * _BINS / rows).astype(int), return_inverse=True)
        in_ranges = (np.bincount(ranges, of[order]) for of in (counts, positives))
        by_value, by_order = explained(counts, positives), explained(*in_ranges)
        chance = _CLEAR * np.sqrt((2 + (1 / variance - 6) / counts).clip(0).sum()) / rows
        pure = bool(((positives == 0) | (positives == counts)).all())
        clear, ordered = bool(by_value > chance), by_order >= by_value / 2
        return Signal(max(by_value, by_order), clear, ordered, pure)


def _numbers_of(texts: pa.Array) -> np.ndarray:
    """Returns the numbers of texts, NaN for others."""
    texts = pc.if_else(pc.match_substring_regex(texts, _NUMBER), texts, None)
    numbers = _numpy(pc.replace_substring_regex(texts, r"^\+", "").cast(pa.float64()))
    return np.where(np.isinf(numbers), np.nan, numbers)


def _are_times(texts: pa.Array) -> bool:
    """Returns whether texts are times in ISO 8601, with or without a zone."""
    plain = pc.replace_substring_regex(texts, _ZONE, "")
    plain = pc.replace_substring_regex(plain, r"(\.[0-9]{6})[0-9]+$", r"\1")
    try:
        plain.cast(pa.timestamp("us"))
        return True
    except pa.ArrowInvalid:
        return False


def all_match(texts: pa.Array, pattern: str) -> bool:
    """Returns whether a pattern is found in all texts."""
    return bool(pc.all(pc.match_substring_regex(texts, pattern)).as_py())


def _any(texts: pa.Array, pattern: str) -> bool:
    return bool(pc.any(pc.match_substring_regex(texts, pattern)).as_py())


def _numpy(array: pa.Array) -> np.ndarray:
    return array.to_numpy(zero_copy_only=False)


def _kind(kind: pa.DataType) -> str:
    types = pa.types
    if is_list(kind) and not types.is_nested(kind.value_type):
        return LISTS
    kind = kind.value_type if types.is_dictionary(kind) else kind
    tests: dict[str, list[Any]] = {
        TEXT: [
            types.is_string,
            types.is_large_string,
            types.is_binary,
            types.is_large_binary,
            types.is_boolean,
            types.is_null,
        ],
        NUMBERS: [types.is_integer, types.is_floating, types.is_decimal],
        TIMES: [types.is_timestamp, types.is_date],
    }
    return next((name for name, of in tests.items() if any(test(kind) for test in of)), OTHER)
