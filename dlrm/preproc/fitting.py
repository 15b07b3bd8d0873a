"""Fits a transform to counted values: dictionaries, bins, means and deviations."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dlrm.data.schema.numbers import Fitted, Sums, bin_edges
from dlrm.data.schema.schema import Schema
from dlrm.data.transform.dictionaries import (
    Counts,
    Dictionary,
    bytes_of_texts,
    open_dictionary,
    text_array,
)
from dlrm.data.transform.lookup import unhash_u64
from dlrm.data.transform.values import (
    KEYS_OF_NAN,
    NAN,
    NUMBER_OR_NAN,
    NUMBERS_IN_TEXT,
    canonical_text,
    is_number_type,
)
from dlrm.documents import parse_json
from dlrm.files import write_array
from dlrm.mapped_files import map_file
from dlrm.preproc.counting import BETWEEN, CountedColumn
from dlrm.preproc.engine import FACTS, slices

_MOST_NEGATIVES = 100  # labels other than the positive one that the transform keeps
_MOST_LISTED = 10
NEVER = 1 << 62  # a limit that no value reaches
_NAN = f"({'|'.join(NAN)})"


class Counted(NamedTuple):
    """Holds the results of the first reading of all parts.

    Attributes:
        facts: facts about each part; see `partial_counts`.
        sizes: for each counted column, the number of values that got ids, which are in files.
        bins: for each counted column of bins, its edges and shares, in hexadecimal.
        distinct: for each counted column, the number of different values.
        only_numbers: for each counted column of texts, whether all are numbers.
    """

    facts: list[dict[str, Any]]
    sizes: list[int]
    bins: list[list[list[str]]]
    distinct: list[int]
    only_numbers: list[bool]


def write_counted(
    batches: Iterable[pa.RecordBatch],
    schema: Schema,
    columns: Sequence[CountedColumn],
    directory: Path,
    grows: Sequence[int],
) -> Counted:
    """Writes the values of dictionaries in the order in which they are counted, that of their ids.

    Args:
        batches: the sums of counts; see `Engine.counts`.
        columns: the product of each column.
        directory: directory of the dictionaries.
        grows: for each dictionary, the number of values of the one that it extends.
    """
    directory.mkdir(parents=True, exist_ok=True)
    facts = dict[int, dict[str, Any]]()
    count = len(columns)
    counted = Counted([], [0] * count, [[[], []]] * count, [0] * count, [True] * count)
    tables = [*schema.dictionaries().values()]
    left = {index for index, column in enumerate(columns) if column.kind in ("numbers", "texts")}
    missing = dict[str, str]()  # column -> pattern of its texts that mean "missing"
    for index, pieces in groupby(slices(batches), key=itemgetter(0)):
        values = (piece for _, piece in pieces)
        if index == FACTS:
            for piece in values:
                texts = zip(piece.column(1).to_pylist(), piece.column(2).to_pylist(), strict=True)
                facts |= {number: parse_json(text, "facts", dict) for number, text in texts}
            counted.facts.extend(facts[number] for number in sorted(facts))
            continue
        of_column = _counts(values, index % len(columns), counted.distinct)
        if index >= len(columns):  # values that have ids already
            for _ in of_column:
                pass
        elif (column := columns[index]).kind == "bins":
            counted.bins[index] = _bins(of_column, column.bins)
        else:
            left.discard(index)
            dictionary = _Values(column, _pattern(schema, tables[index][0].column, missing))
            dictionary.write(of_column, directory, index)
            counted.only_numbers[index] = dictionary.are_numbers
            of_nan = any(one["nan"][index] for one in counted.facts) and not grows[index]
            if of_nan := of_nan and dictionary.has_numbers:
                missing |= dict.fromkeys((field.column for field in tables[index]), f"^{_NAN}$")
            counted.sizes[index] = dictionary.finish(without_nan=of_nan)
    for index in left:
        empty = _Values(columns[index], None)
        empty.write(iter(()), directory, index)
        empty.finish(without_nan=False)
    return counted


def _counts(batches: Iterator[pa.RecordBatch], index: int, distinct: list[int]) -> Iterator[Counts]:
    """Yields the values of a column that are kept, and counts all of them."""
    for batch in batches:
        keys, occurrences = batch.column(1).to_numpy(), batch.column(3).to_numpy()
        kept = len(keys) - int(occurrences[-1] == 0)
        distinct[index] += kept + int(keys[kept:].sum())
        texts = batch.column(2).slice(0, kept)
        values = unhash_u64(keys[:kept]) if texts.null_count < kept else keys[:kept]
        yield Counts(values, occurrences[:kept], texts)


def _bins(values: Iterator[Counts], bins: int) -> list[list[str]]:
    parts = [(keys, counts) for keys, counts, _ in values]
    keys, counts = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    order = np.argsort(keys)
    fitted = bin_edges(keys[order], counts[order], bins)
    return [[value.hex() for value in values.tolist()] for values in fitted]


def _pattern(schema: Schema, column: str, missing: dict[str, str]) -> str | None:
    """Returns a pattern of the combinations with a value that turned out to mean "missing"."""
    for cross in schema.crosses:
        if cross.column == column:
            ends = ["^", *[BETWEEN] * (len(cross.fields) - 1), "$"]
            around = zip(cross.fields, ends[:-1], ends[1:], strict=True)
            return "|".join(f"{a}{_NAN}{b}" for name, a, b in around if name in missing) or None
    return None


class _Values:
    """Writes the values of a dictionary, which come in the order of their ids.

    Args:
        missing: pattern of texts that are left out.

    Attributes:
        are_numbers: whether all values so far are texts of numbers, or of NaN.
    """

    def __init__(self, column: CountedColumn, missing: str | None) -> None:
        self._column, self._missing = column, missing
        self._is_text = column.kind == "texts"
        self._size = self._bytes = self._largest = 0
        self._nan: list[int] = []  # their indices
        self.are_numbers = self._is_text

    @property
    def has_numbers(self) -> bool:
        """Returns whether its values are texts of numbers, besides NaN."""
        return self.are_numbers and self._size > len(self._nan)

    def write(self, values: Iterator[Counts], directory: Path, index: int) -> None:
        """Writes values to files, as they come."""
        names = ("dictionary", "ends", "texts")
        self._paths = [directory / f"{name}_{index}.npy" for name in names]
        self._raw = [path.with_suffix(".raw") for path in self._paths]
        with ExitStack() as stack:
            files = [stack.enter_context(open(path, "wb")) for path in self._raw]
            for counts in values:
                for file, array in zip(files, self._added(counts), strict=True):
                    file.write(np.ascontiguousarray(array).data)

    def _added(self, counts: Counts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the keys of values, and the ends and the bytes of their texts."""
        texts = counts.texts if self._is_text else None
        if self._missing is not None and texts is not None:
            absent = pc.match_substring_regex(texts, self._missing)
            counts = counts.take(~absent.to_numpy(zero_copy_only=False))
            texts = counts.texts
        if self.are_numbers:
            matched = pc.match_substring_regex(texts, f"^{NUMBER_OR_NAN.pattern}$")
            self.are_numbers = pc.all(matched).as_py() is not False
        if self._is_text:
            self._nan += (np.flatnonzero(np.isin(counts.keys, KEYS_OF_NAN)) + self._size).tolist()
        self._size += len(counts.keys)
        self._largest = max(self._largest, int(counts.keys.max(initial=0)))
        ends, content = bytes_of_texts(texts)
        self._bytes += len(content)
        return counts.keys, ends + (self._bytes - len(content)), content

    def finish(self, without_nan: bool) -> int:
        """Writes the dictionary, whose size it returns."""
        keys, ends, content = map(map_file, self._raw, (np.uint64, np.int64, np.uint8))
        most = self._column.most
        if without_nan or (most is not None and most < self._size):
            chosen = np.delete(np.arange(self._size), self._nan if without_nan else [])[:most]
            keys = keys[chosen]
            if self._is_text:
                texts = text_array(np.concatenate([[0], ends]), content)
                ends, content = bytes_of_texts(texts.take(pa.array(chosen)))
        narrow = not self._is_text and self._largest <= np.iinfo(np.uint32).max
        dictionary = open_dictionary(self._paths[0], np.dtype("u4" if narrow else "u8"), len(keys))
        dictionary[:] = keys
        if self._is_text:
            write_array(self._paths[1], ends)
            write_array(self._paths[2], content)
        for path in self._raw:
            path.unlink()
        return len(keys)


def fitted_numbers(schema: Schema, counted: Counted) -> list[Fitted]:
    """Returns the fitted statistics of numerical features."""
    bins = iter(counted.bins[len(schema.dictionaries()) :])
    fitted = []
    for i, field in enumerate(schema.numerical):
        total = sum((Sums(*facts["sums"][i]) for facts in counted.facts), Sums())
        found = next(bins) if field.fitted_bins else ()
        edges = [np.array([float.fromhex(value) for value in values]) for values in found]
        try:
            fitted.append(field.rule.fit(total, *edges))
        except OverflowError as error:
            raise ValueError(f"column {field.column}: {error}") from None
    return fitted


def fitted_dictionaries(schema: Schema, counted: Counted, directory: Path) -> list[Dictionary]:
    """Returns the dictionaries that `write_counted` wrote."""
    dictionaries = []
    for index, (field, *_) in enumerate(schema.dictionaries().values()):
        size = counted.sizes[index]
        if field.type == "id":
            greatest = max(facts["greatest"][index] for facts in counted.facts)
            size = greatest if field.cardinality is None else field.cardinality - 1
        dictionaries.append(Dictionary.load(directory, index, size, field.type))
    return dictionaries


def negatives_of(schema: Schema, facts: Sequence[dict[str, Any]]) -> tuple[str, ...] | None:
    """Returns the labels that count as 0, after checking them against the schema."""
    label, counts = schema.label, label_counts(facts)
    if not label.positives:
        return None
    positive = sum(sum(part["positives"]) for part in facts)
    shown = ", ".join(map(repr, sorted(counts)[:_MOST_LISTED]))
    if not positive:
        raise ValueError(
            f"column {label.column}: no row has the label "
            f"{' or '.join(map(repr, label.positives))}; found {shown}"
        )
    forms = set(map(canonical_text, label.positives))
    others = sorted(text for text in counts if canonical_text(text) not in forms)
    expected = label.negative
    if expected is None and len(others) > 1 and not label.any_negative:
        known = " or ".join(map(repr, label.positives))
        raise ValueError(
            f"column {label.column}: expected two values, {known} and another, got {shown}; label: "
            "{negative: [...]} in the schema names those that count as 0"
        )
    kept = tuple(expected or others)
    return kept if 0 < len(kept) <= _MOST_NEGATIVES else None


def label_counts(facts: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Returns the count of each label, if the schema names the positive one."""
    labels = Counter[str]()
    for part in facts:
        labels.update(part["labels"])
    return dict(sorted(labels.items(), key=lambda item: (-item[1], item[0])))


def types_of(schema: Schema, counted: Counted, copied: Sequence[str] | None = None) -> list[str]:
    """Returns the type of each categorical field's values in Arrow.

    Numbers of several types are double, and other values of several types string; texts that are
    all numbers are `NUMBERS_IN_TEXT`.

    Args:
        copied: fields whose texts are those of numbers of JSON, in copies; None without copies.
    """
    found = [part["numbers"] for part in counted.facts if "numbers" in part]
    found += [] if copied is None else [copied]
    of_json = set(found[0]).intersection(*found[1:]) if found else set()
    indices = {
        field.column: index
        for index, fields in enumerate(schema.dictionaries().values())
        for field in fields
    }
    types = []
    for i, field in enumerate(schema.categorical):
        met = set().union(*(part["types"][i] for part in counted.facts))
        index = indices[field.column]
        if field.column in of_json or (len(met) > 1 and all(map(is_number_type, met))):
            types.append("double")
        elif len(met) == 1 and met != {"string"}:
            types += met
        else:
            numbers = counted.only_numbers[index] and counted.sizes[index] > 0
            types.append(NUMBERS_IN_TEXT if numbers and field.type == "string" else "string")
    return types
