"""The first reading of rows: splits, values of fields, statistics to fit, and bad rows."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dlrm.data import layout
from dlrm.data.schema.numbers import Sums, ordered
from dlrm.data.schema.schema import Schema
from dlrm.data.sources.columns import Coded, Parsed
from dlrm.data.transform.dictionaries import Counts, count_values
from dlrm.data.transform.lookup import IdLookup, hash_u64
from dlrm.data.transform.rows import Column, FieldRows, list_column, single
from dlrm.data.transform.values import KEYS_OF_NAN
from dlrm.preproc.engine import COUNTS, facts_batch
from dlrm.preproc.source import Read, Rejected, Source
from dlrm.preproc.splits import DROPPED, TRAIN, Ranges, Splitter, readable

_MOST_LABELS = 1000  # distinct labels of a part
BETWEEN = " & "  # the values of a combination in its text


class CountedColumn(NamedTuple):
    """The product of a counted column's values.

    Attributes:
        kind: "numbers" and "texts" become a dictionary, "bins" edges, and "ids" nothing.
        limit: minimum count of a value.
        most: maximum number of values with ids; None for all.
        bins: number of bins.
    """

    kind: str = "numbers"
    limit: int = 1
    most: int | None = None
    bins: int = 0


class CountJob(NamedTuple):
    """The arguments of `partial_counts` besides its part.

    Attributes:
        fit: whether to count the values of training rows; otherwise only rows are counted.
        known: folder of the lookups of the dictionaries that the rows extend, and their sizes.
        most_bad: maximum number of rows of all parts that cannot be read.
    """

    source: Source
    splitter: Splitter | Ranges
    quarantine: bool
    fit: bool = True
    known: tuple[str, Sequence[int]] | None = None
    most_bad: float = math.inf


def partial_counts(item: tuple[int, Any], job: CountJob) -> Iterator[pa.RecordBatch]:
    """Reads a part once, so that no later stage meets an unreadable field.

    Statistics to fit are counted in training rows only.

    Yields:
        The counts of `counted_columns`, in which a value may occur several times; those of values
        with ids in the dictionaries that the rows extend are under further columns. Last come
        facts, as JSON: those of `Source.read`; `rows`, with all three splits, and `positives`;
        `dropped`, rows of no split; `ids` of each split and list field; `labels` with their counts;
        `sums` of each column whose transform needs them; the `greatest` id of each field of ids;
        the first and last of the `times`, if there are any; whether NaN is among the `nan` of each
        column; and the `rejected` rows.
    """
    number, part = item
    rejected: list[Rejected] | None = [] if job.quarantine else None
    facts: dict[str, Any] = {}
    counted = _Counted(job.source.schema)
    for read, splits in readable(job.source, job.splitter, part, rejected, facts, job.most_bad):
        if found := counted.add(read, splits, job.fit):
            yield _batch(found, counted.columns, job.known)
    if found := counted.rest():
        yield _batch(found, counted.columns, job.known)
    yield facts_batch(COUNTS, number, facts | counted.facts() | {"rejected": rejected or []})


def _batch(
    found: Sequence[tuple[int, Counts]], columns: int, known: tuple[str, Sequence[int]] | None
) -> pa.RecordBatch:
    """Returns counts of columns; those of values with ids are under further columns."""
    arrays: list[list[Any]] = [[], [], [], []]
    for index, counts in found:
        numbers = np.full(len(counts.keys), index, np.int32)
        if known is not None and index < len(known[1]) and (size := known[1][index]):
            lookup = IdLookup.load(known[0], index, layout.id_dtype(size + 1))
            numbers[lookup(Parsed.present(counts.keys)) != 0] += columns
        keys, texts = counts.keys.astype(np.uint64), counts.texts
        if texts is None:
            texts = pa.nulls(len(numbers), pa.large_binary())
        else:  # combinations may have equal texts, whose order is that of these hashes
            keys = hash_u64(keys)
        for of_column, array in zip(arrays, (numbers, keys, texts, counts.counts), strict=True):
            of_column.append(array)
    values = [
        pa.concat_arrays(parts) if index == 2 else pa.array(np.concatenate(parts), field.type)
        for index, (parts, field) in enumerate(zip(arrays, COUNTS, strict=True))
    ]
    return pa.RecordBatch.from_arrays(values, schema=COUNTS)


def counted_columns(schema: Schema) -> list[CountedColumn]:
    """Returns the columns whose values are counted, for dictionaries and bins."""
    columns = []
    for field, *_ in schema.dictionaries().values():
        kind = {"string": "texts", "id": "ids"}.get(field.type, "numbers")
        columns.append(CountedColumn(kind, field.frequency_limit, field.max_ids))
    columns += [
        CountedColumn("bins", bins=field.fitted_bins)
        for field in schema.numerical
        if field.fitted_bins
    ]
    return columns


class _Counted:
    """Counts over the rows of a part."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._greatest = [0] * len(schema.dictionaries())  # of ids
        self.columns = len(counted_columns(schema))
        self._nan = [False] * self.columns
        self._sums = [Sums() for _ in schema.numerical]
        self._rows, self._positives, self._dropped = [0, 0, 0], [0, 0, 0], 0
        self._ids = np.zeros((3, len(_list_fields(schema))), np.int64)
        self._labels: Counter[str] = Counter()
        self._times: list[int] = []
        self._fields = [_FieldCounts() for _ in schema.categorical]
        self._indices = _indices(schema)

    def add(self, read: Read, splits: np.ndarray, fit: bool) -> list[tuple[int, Counts]]:
        """Adds rows; returns counts of values of training rows, by column, if they are to `fit`."""
        schema, rows = self._schema, read.rows
        assert rows.labels is not None
        kept = splits != DROPPED
        self._dropped += int(np.count_nonzero(~kept))
        if schema.time and kept.any():
            times = rows.extra["time"][kept]
            times = [*self._times, int(times.min()), int(times.max())]
            self._times = [min(times), max(times)]
        for split in range(3):
            chosen = splits == split
            self._rows[split] += int(np.count_nonzero(chosen))
            self._positives[split] += int(np.count_nonzero(rows.labels[chosen]))
            self._ids[split] += _num_ids(schema, rows, chosen)
        if schema.label.positives:
            self._labels += _label_counts(read, schema.label.column)
        self._add_ids(rows, np.flatnonzero(kept))
        in_training = splits == TRAIN
        if schema.weight:  # a row of weight 0 is as if it were not there
            in_training &= rows.extra["weight"] > 0
        training = np.flatnonzero(in_training)
        if not fit or not len(training):
            return []
        for i, field in enumerate(schema.numerical):
            if field.rule.needs_sums:
                values, missing = rows.numerical[i]
                self._sums[i] += Sums.from_values(
                    values[training[~missing[training]]].astype(np.float64)
                )
        return self._noted(self._values(rows, training))

    def rest(self) -> list[tuple[int, Counts]]:
        """Returns the counts that are left."""
        return self._noted(
            zip(self._indices, (field.rest() for field in self._fields), strict=False)
        )

    def _noted(self, found: Iterable[tuple[int, Counts]]) -> list[tuple[int, Counts]]:
        """Returns the counts of columns that have some, and notes NaN among their values."""
        some = [(index, counts) for index, counts in found if len(counts.keys)]
        for index, counts in some:
            self._nan[index] |= bool(np.isin(KEYS_OF_NAN, counts.keys).any())
        return some

    def facts(self) -> dict[str, Any]:
        """Returns the other facts."""
        return {
            "rows": self._rows,
            "positives": self._positives,
            "dropped": self._dropped,
            "labels": dict(self._labels.most_common(_MOST_LABELS)),
            "ids": self._ids.tolist(),
            "times": self._times,
            "sums": [astuple(sums) for sums in self._sums],
            "greatest": self._greatest,
            "nan": self._nan,
        }

    def _values(self, rows: FieldRows, training: np.ndarray) -> Iterator[tuple[int, Counts]]:
        schema = self._schema
        for i, field in enumerate(self._fields):
            if schema.categorical[i].type != "id":
                yield self._indices[i], field.add(rows.categorical[i], rows.texts[i], training)
        for i, index in enumerate(self._indices[len(self._fields) :]):
            yield index, _cross_counts(schema, i, rows, training)
        index = len(schema.dictionaries())
        for i, number in enumerate(schema.numerical):
            if number.fitted_bins:
                values, missing = rows.numerical[i]
                keys = ordered(values[training[~missing[training]]])
                yield index, Counts(*np.unique(keys, return_counts=True))
                index += 1

    def _add_ids(self, rows: FieldRows, kept: np.ndarray) -> None:
        """Keeps the greatest id of each field of ids, over the rows of all splits."""
        for i, field in enumerate(self._schema.categorical):
            if field.type == "id":
                index = self._indices[i]
                column, chosen = rows.categorical[i].flatten(kept)
                greatest = column.take(chosen).by_row().values.max(initial=0)
                self._greatest[index] = max(self._greatest[index], int(greatest))


def _indices(schema: Schema) -> list[int]:
    """Returns the counted column with the values of each categorical feature."""
    index_of = dict[str, int]()
    for index, fields in enumerate(schema.dictionaries().values()):
        index_of |= {field.column: index for field in fields}
    return [index_of[name] for name in schema.categorical_names]


def _cross_counts(schema: Schema, index: int, read: FieldRows, rows: np.ndarray) -> Counts:
    """Counts the combinations in selected rows, with texts if they may have ids of their own."""
    cross, names = schema.crosses[index], [field.column for field in schema.categorical]
    column = single(read.categorical[len(names) + index]).by_row()
    rows = rows[~column.missing[rows]]
    keys, first, counts = np.unique(column.values[rows], return_index=True, return_counts=True)
    if cross.frequency_limit is None:
        return Counts(keys, counts)
    parts = [_texts_at(read, names.index(name), rows[first]) for name in cross.fields]
    between = pa.scalar(BETWEEN.encode(), pa.large_binary())
    return Counts(keys, counts, pc.binary_join_element_wise(*parts, between))


def _texts_at(read: FieldRows, field: int, rows: np.ndarray) -> Any:
    """Returns an Arrow array: the text of a categorical field in rows that have a value."""
    column, texts = read.categorical[field], read.texts[field]
    assert isinstance(column, Coded)
    codes = column.codes[rows]
    if texts is not None:
        return texts.take(pa.array(codes))
    integers = pa.array(column.keys[codes].view(np.int64))
    return integers.cast(pa.large_string()).cast(pa.large_binary())


class _FieldCounts:
    """Counts the values of a field, by index as long as batches have the same values."""

    def __init__(self) -> None:
        self._keys, self._occurrences = np.empty(0, np.uint64), np.empty(0, np.int64)
        self._texts: Any = None

    def add(self, column: Column, texts: Any, rows: np.ndarray) -> Counts:
        """Counts selected rows; returns the counts so far when a batch no longer has the values."""
        coded, chosen = column.flatten(rows)
        if isinstance(coded, Parsed):
            return count_values(coded.take(chosen) if len(chosen) < coded.rows else coded)
        found = Counts(self._keys[:0], self._occurrences[:0])
        if coded.keys is not self._keys:
            found = self.rest()
            self._keys, self._texts = coded.keys, texts
            self._occurrences = np.zeros(len(coded.keys), np.int64)
        self._occurrences += coded.occurrences(chosen)
        return found

    def rest(self) -> Counts:
        """Returns the counts that are left."""
        there = np.flatnonzero(self._occurrences)
        texts = None if self._texts is None else self._texts.take(there)
        return Counts(self._keys[there], self._occurrences[there], texts)


def _list_fields(schema: Schema) -> list[tuple[int, int]]:
    """Returns the list fields: their index among categorical ones, and their greatest length."""
    fields = enumerate(schema.categorical)
    return [(i, field.max_length) for i, field in fields if field.max_length is not None]


def _num_ids(schema: Schema, read: FieldRows, chosen: np.ndarray) -> np.ndarray:
    """Returns the number of ids in the lists of selected rows after truncation."""
    num_ids = []
    for i, max_length in _list_fields(schema):
        lengths = list_column(read.categorical[i]).lengths[chosen]
        num_ids.append(int(np.minimum(lengths, max_length).sum()))
    return np.array(num_ids, np.int64)


def _label_counts(read: Read, label: str) -> Counter[str]:
    texts, codes = read.texts_of(label)
    occurrences = np.bincount(codes[codes >= 0], minlength=len(texts))
    labels = Counter[str]()
    for text, count in zip(texts, occurrences.tolist(), strict=True):  # which may occur twice
        labels[text] += count
    return +labels
