"""A column of a sampled table: its distinct values, how often they occur, and with which labels."""

from contextlib import suppress
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dlrm.data.sources.text_format import TextFormat
from dlrm.data.transform.arrow_types import is_list

NUMBERS, TEXT, TIMES, LISTS, OTHER = "numbers", "text", "times", "lists", "other"
SURE_MARKERS = ("?", "n/a", "nan", "null", "\\n")  # of missing values; they name no category
MARKERS = (*SURE_MARKERS, "-", ".", "na", "nil", "none")  # in lower case
NUMBER = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_EXACT_BITS = {pa.float16(): 11, pa.float32(): 24}  # of integers that floats have all of; else 53
_BINS = 20  # of equally many rows, in which the order of numbers shows
_CLEAR = 4.0  # standard deviations beyond chance


class Signal(NamedTuple):
    """The share of the label's variance that a column explains, by its values or their order."""

    share: float = 0.0
    clear: bool = False  # chance would not reach the share once in many columns
    ordered: bool = False  # 20 ranges of the values explain most of it
    pure: bool = False  # each value has one label


class Summary:
    """The content of a column; text of numbers or of times in ISO 8601 is summarized as these.

    Attributes:
        content: NUMBERS, TEXT, TIMES or LISTS; OTHER for what no field can have.
        rows, missing: number of rows, and of those without a value, NaN and markers included.
        values, counts: the distinct values, and their rows.
        markers: texts that mean "missing" somewhere, and their rows; of text, some are values.
        inexact: bits of the integers that its floats have all of, if some are beyond these, and so
            may stand for other integers; 0 if none are.
        plain: whether numbers are written without exponents and plus signs.
        items, lengths: the summary of the values of lists, and the lengths of the lists.

    Args:
        positive: mask of the rows whose label counts as 1.
        text: the format of text, whose numbers may have marks.
    """

    items: "Summary | None" = None
    missing = _missing_positives = inexact = 0
    plain = True

    def __init__(
        self,
        name: str,
        array: pa.ChunkedArray,
        positive: np.ndarray,
        text: TextFormat | None = None,
    ) -> None:
        self.name, self.type, self.rows = name, array.type, len(array)
        if pa.types.is_dictionary(self.type):
            self.type = self.type.value_type
        self.content = _content_of(self.type)
        self.values, self.markers = pa.array([], pa.string()), dict[str, int]()
        self.counts = self._positives = self.lengths = np.empty(0, np.int64)
        if self.content == LISTS:
            self.missing = array.null_count
            self.lengths = pc.list_value_length(array).fill_null(0).to_numpy()
            self.items = Summary(name, pc.list_flatten(array), np.repeat(positive, self.lengths))
        elif self.content != OTHER:
            array = array.cast(self.type)
            if pa.types.is_floating(self.type):
                array = array.cast(pa.float64())
                nan = pc.is_nan(array).fill_null(False)
                self.markers = {"nan": rows} if (rows := pc.sum(nan).as_py()) else {}
                array = pc.if_else(nan, None, array)
            self._count(array, np.ones(self.rows, np.int64), positive.astype(np.int64))
            if pa.types.is_floating(self.type):
                self._note_inexact(self.numbers, _EXACT_BITS.get(self.type, 53))
            elif self.content == TEXT:
                self._read_text(text)

    def _count(self, values: pa.Array, rows: np.ndarray, positives: np.ndarray) -> None:
        """Counts the rows of each distinct value, and those of null, which are missing."""
        table = pa.table({"value": values, "rows": rows, "positives": positives})
        sums = [("rows", "sum"), ("positives", "sum")]
        table = table.group_by("value", use_threads=False).aggregate(sums)
        there = _numpy(table["value"].is_valid())
        rows, positives = (table[f"{name}_sum"].to_numpy() for name, _ in sums)
        self.missing += int(rows[~there].sum())
        self._missing_positives += int(positives[~there].sum())
        self.values = table["value"].drop_null().combine_chunks()
        self.counts, self._positives = rows[there], positives[there]

    def _note_inexact(self, floats: np.ndarray, bits: int) -> None:
        if ((np.abs(floats) >= 2.0**bits) & (np.abs(floats) < 2.0**64)).any():
            self.inexact = bits

    def _read_text(self, text: TextFormat | None) -> None:
        """Merges texts of one value, and finds numbers, times, and markers of missing values."""
        try:
            texts = pc.utf8_trim_whitespace(self.values.cast(pa.string()))
        except pa.ArrowInvalid:  # not UTF-8
            self.content, self.values, self.counts = OTHER, pa.array([], pa.string()), self.lengths
            return
        if text is not None and text.has_marks:
            texts = pa.array(map(text.plain_number, texts.to_pylist()), pa.string())
        self._note_inexact(_numbers_of(_with(texts, "[.eE]")), 53)
        texts = pc.replace_substring_regex(texts, r"^(-?(0|[1-9][0-9]*))\.0+$", r"\1")
        self._count(pc.if_else(pc.equal(texts, ""), None, texts), self.counts, self._positives)
        values, lower = self.values, pc.utf8_lower(self.values)
        marked, is_number = pc.is_in(lower, pa.array(MARKERS)), ~np.isnan(self.numbers)
        numbers, rest = values.filter(pa.array(is_number)), pc.if_else(marked, None, values)
        self.plain, padded = not len(_with(numbers, "[eE+]")), len(_with(numbers, "^0[0-9]+$"))
        if is_number.any() and (is_number | _numpy(marked)).all() and not padded:
            self.content = NUMBERS
        elif not is_number.any() and rest.null_count < len(rest) and (times := _times_of(rest)):
            self.content, rest = TIMES, times
        else:
            rest = pc.if_else(pc.is_in(lower, pa.array(SURE_MARKERS)), None, values)
        rows = self.counts[_numpy(marked)].tolist()
        self.markers = dict(zip(values.filter(marked).to_pylist(), rows, strict=True))
        del self.numbers
        self._count(rest, self.counts, self._positives)

    @cached_property
    def numbers(self) -> np.ndarray:
        """Returns the number of each value, of times in microseconds; NaN for other text."""
        if pa.types.is_string(self.values.type):
            return _numbers_of(self.values)
        if self.content == TIMES:
            micros = self.values.cast(pa.timestamp("us"), safe=False)
            return _numpy(micros.cast(pa.int64())).astype(np.float64)
        return _numpy(self.values.cast(pa.float64(), safe=False))

    @cached_property
    def range(self) -> tuple[float, float]:
        """Returns the least and the greatest number; NaN without any."""
        numbers = self.numbers
        return (float(numbers.min()), float(numbers.max())) if len(numbers) else (np.nan, np.nan)

    @property
    def whole(self) -> bool:
        """Returns whether all values are integers."""
        return self.content == NUMBERS and bool((self.numbers == np.floor(self.numbers)).all())

    @cached_property
    def signal(self) -> Signal:
        """Returns how much the values tell about the label; missing ones count as one value."""
        groups = len(self.counts) + (self.missing > 0)
        counts = np.append(self.counts, self.missing)[:groups]
        positives = np.append(self._positives, self._missing_positives)[:groups]
        rows, share = counts.sum(), positives.sum() / max(counts.sum(), 1)
        variance = share * (1 - share)
        if variance <= 0 or groups < 2:
            return Signal()

        def explained(counts: np.ndarray, positives: np.ndarray) -> float:
            """Returns the share of variance between groups, less that which chance would have."""
            apart = ((positives - counts * share) ** 2 / counts).sum() / variance
            return float((apart - (len(counts) - 1)) / rows)

        order = np.argsort(np.append(self.numbers, np.inf)[:groups], kind="stable")
        middles = np.cumsum(counts[order]) - counts[order] / 2
        _, ranges = np.unique((middles * _BINS / rows).astype(int), return_inverse=True)
        by_order = explained(*(np.bincount(ranges, of[order]) for of in (counts, positives)))
        by_value = explained(counts, positives)
        chance = _CLEAR * np.sqrt((2 + (1 / variance - 6) / counts).clip(0).sum()) / rows
        pure = bool(((positives == 0) | (positives == counts)).all())
        return Signal(
            max(by_value, by_order), bool(by_value > chance), by_order >= by_value / 2, pure
        )


def _numbers_of(texts: pa.Array) -> np.ndarray:
    """Returns the numbers of texts, NaN for others."""
    texts = pc.if_else(pc.match_substring_regex(texts, NUMBER), texts, None)
    numbers = _numpy(pc.replace_substring_regex(texts, r"^\+", "").cast(pa.float64()))
    return np.where(np.isinf(numbers), np.nan, numbers)  # 12e45678 is a code


def _times_of(texts: pa.Array) -> pa.Array | None:
    """Returns times in ISO 8601, all with a zone or all without; None of other texts."""
    for zone, unit in product((None, "UTC"), ("us", "ns")):
        with suppress(pa.ArrowInvalid):
            return texts.cast(pa.timestamp(unit, zone))
    return None


def _with(texts: pa.Array, pattern: str) -> pa.Array:
    """Returns the texts in which a pattern is found."""
    return texts.filter(pc.match_substring_regex(texts, pattern))


def _numpy(array: pa.Array) -> np.ndarray:
    return array.to_numpy(zero_copy_only=False)


def _content_of(dtype: pa.DataType) -> str:
    types = pa.types
    if is_list(dtype) and not types.is_nested(dtype.value_type):
        return LISTS
    if types.is_integer(dtype) or types.is_floating(dtype) or types.is_decimal(dtype):
        return NUMBERS
    if types.is_timestamp(dtype) or types.is_date(dtype):
        return TIMES
    texts = {pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.bool_(), pa.null()}
    return TEXT if dtype in texts else OTHER
