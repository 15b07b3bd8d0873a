"""The first reading of rows: splits, values of fields, statistics to fit, and bad rows."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dlrm.data.clicks import layout
from dlrm.data.sources.columns import Coded, Parsed
from dlrm.data.transform.cells import KEYS_OF_NAN
from dlrm.data.transform.dictionaries import Counts, count_values, merge_counts
from dlrm.data.transform.lists import Column, list_column, single
from dlrm.data.transform.lookup import IdLookup, spread
from dlrm.data.transform.numbers import Sums, ordered
from dlrm.data.transform.rows import FieldRows
from dlrm.data.transform.schema import Schema
from dlrm.preproc.division import DROPPED, TRAIN, Divider, Ranges, readable
from dlrm.preproc.engine import COUNTS, facts_batch
from dlrm.preproc.source import Read, Rejected, Source

_MOST_LABELS = 1000  # distinct labels of a part
BETWEEN = " & "  # the values of a combination in its text
_LEAST_MERGED = 1 << 14  # values of a column that are merged at once


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
    divider: Divider | Ranges
    quarantine: bool
    fit: bool = True
    known: tuple[str, Sequence[int]] | None = None
    most_bad: float = math.inf


def partial_counts(item: tuple[int, Any], job: CountJob) -> Iterator[pa.RecordBatch]:
    """Reads a part once, so that no later stage meets an unreadable field.

    Statistics to fit are counted in training rows only.

    Yields:
        The counts of `counted_columns`, those of values with ids in the dictionaries that the rows
        extend under further columns; and facts, as JSON: those of `Source.read`; `rows`, with all
        three splits, and `positives`; `dropped`, rows of no split; `ids` of each split and list
        field; `labels` with their counts; `sums` of each column whose transform needs them; the
        `greatest` id of each field of ids; the first and last of the `times`, if there are any;
        whether NaN is among the `nan` of each column; and the `rejected` rows.
    """
    number, part = item
    rejected: list[Rejected] | None = [] if job.quarantine else None
    facts: dict[str, Any] = {}
    counted = _Counted(job.source.schema)
    for read, splits in readable(job.source, job.divider, part, rejected, facts, job.most_bad):
        counted.add(read, splits, job.fit)
    facts |= counted.facts() | {"rejected": rejected or []}
    if job.fit:
        columns = counted.columns()
        facts["nan"] = [bool(np.isin(KEYS_OF_NAN, column.keys).any()) for column in columns]
        yield from _batches(columns, job.known)
    yield facts_batch(COUNTS, number, facts)


def _batches(
    columns: Sequence[Counts], known: tuple[str, Sequence[int]] | None
) -> Iterator[pa.RecordBatch]:
    for place, counts in enumerate(columns):
        numbers = np.full(len(counts.keys), place, np.int32)
        if known is not None and place < len(known[1]) and (size := known[1][place]):
            lookup = IdLookup.load(known[0], place, layout.id_dtype(size + 1))
            numbers[lookup(Parsed.present(counts.keys)) != 0] += len(columns)
        keys, texts = counts.keys.astype(np.uint64), counts.texts
        if texts is None:
            texts = pa.nulls(len(numbers), pa.large_binary())
        else:  # combinations may have equal texts, whose order is that of these hashes
            keys = spread(keys)
        arrays = [numbers, keys, texts, counts.counts.astype(np.int64)]
        yield pa.RecordBatch.from_arrays([*map(pa.array, arrays)], schema=COUNTS)


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
        self._counts = [[_none_of(column)] for column in counted_columns(schema)]
        self._sums = [Sums() for _ in schema.numerical]
        self._rows, self._positives, self._dropped = [0, 0, 0], [0, 0, 0], 0
        self._ids = np.zeros((3, len(_list_fields(schema))), np.int64)
        self._labels: Counter[str] = Counter()
        self._times: list[int] = []
        self._fields = [_FieldCounts() for _ in schema.categorical]
        self._places = _places(schema)

    def add(self, read: Read, splits: np.ndarray, fit: bool) -> None:
        """Adds rows; `fit` says whether to count values of training rows."""
        schema, rows = self._schema, read.rows
        assert rows.labels is not None
        kept = splits != DROPPED
        self._dropped += int(np.count_nonzero(~kept))
        if schema.time and kept.any():
            times = rows.extra["time"][kept]
            self._times = [
                min([*self._times, int(times.min())]),
                max([*self._times, int(times.max())]),
            ]
        for split in range(3):
            chosen = splits == split
            self._rows[split] += int(np.count_nonzero(chosen))
            self._positives[split] += int(np.count_nonzero(rows.labels[chosen]))
            self._ids[split] += _num_ids(schema, rows, chosen)
        if schema.label.positives:
            self._labels += _label_counts(read, schema.label.column)
        self._add_ids(rows, np.flatnonzero(kept))
        training = np.flatnonzero(splits == TRAIN)
        if not fit or not len(training):
            return
        self._add_values(rows, training)
        for i, field in enumerate(schema.numerical):
            if field.rule.needs_sums:
                values, missing = rows.numerical[i]
                self._sums[i] += Sums.from_values(
                    values[training[~missing[training]]].astype(np.float64)
                )

    def columns(self) -> list[Counts]:
        """Returns the counts of `counted_columns`."""
        for place, field in zip(self._places, self._fields, strict=False):
            field.finish(self._counts[place])
        return [merge_counts(parts) for parts in self._counts]

    def facts(self) -> dict[str, Any]:
        """Returns the other facts."""
        labels = self._labels
        if len(labels) > _MOST_LABELS:
            labels = Counter(dict(labels.most_common(_MOST_LABELS)))
        return {
            "rows": self._rows,
            "positives": self._positives,
            "dropped": self._dropped,
            "labels": labels,
            "ids": self._ids.tolist(),
            "times": self._times,
            "sums": [sums.to_list() for sums in self._sums],
            "greatest": self._greatest,
        }

    def _add_values(self, rows: FieldRows, training: np.ndarray) -> None:
        schema, counts = self._schema, self._counts
        for i, field in enumerate(self._fields):
            if schema.categorical[i].type == "id":
                continue
            field.add(rows.categorical[i], rows.texts[i], training, counts[self._places[i]])
        for i, place in enumerate(self._places[len(self._fields) :]):
            _append(counts[place], _cross_counts(schema, i, rows, training))
        place = len(schema.dictionaries())
        for i, number in enumerate(schema.numerical):
            if number.fitted_bins:
                values, missing = rows.numerical[i]
                keys = ordered(values[training[~missing[training]]])
                _append(counts[place], Counts(*np.unique(keys, return_counts=True)))
                place += 1

    def _add_ids(self, rows: FieldRows, kept: np.ndarray) -> None:
        """Keeps the greatest id of each field of ids, over the rows of all splits."""
        for i, field in enumerate(self._schema.categorical):
            if field.type == "id":
                place = self._places[i]
                column, chosen = rows.categorical[i].each(kept)
                greatest = column.take(chosen).by_row().values.max(initial=0)
                self._greatest[place] = max(self._greatest[place], int(greatest))


def _places(schema: Schema) -> list[int]:
    """Returns the counted column with the values of each categorical feature."""
    place_of = dict[str, int]()
    for place, fields in enumerate(schema.dictionaries().values()):
        place_of |= {field.column: place for field in fields}
    return [place_of[name] for name in schema.categorical_names]


def _cross_counts(schema: Schema, index: int, read: FieldRows, rows: np.ndarray) -> Counts:
    """Counts the combinations in selected rows, with texts if they may have ids of their own."""
    cross, names = schema.crosses[index], [field.column for field in schema.categorical]
    column = single(read.categorical[len(names) + index]).by_row()
    rows = rows[~column.missing[rows]]
    keys, first, counts = np.unique(column.values[rows], return_index=True, return_counts=True)
    if cross.frequency_limit is None:
        return Counts(keys, counts)
    import pyarrow as pa
    import pyarrow.compute as pc

    parts = [_texts_at(read, names.index(name), rows[first]) for name in cross.fields]
    between = pa.scalar(BETWEEN.encode(), pa.large_binary())
    return Counts(keys, counts, pc.binary_join_element_wise(*parts, between))


def _texts_at(read: FieldRows, field: int, rows: np.ndarray) -> Any:
    """Returns an Arrow array: the text of a categorical field in rows that have a value."""
    import pyarrow as pa

    column, texts = read.categorical[field], read.texts[field]
    assert isinstance(column, Coded)
    places = column.codes[rows]
    if texts is not None:
        return texts.take(pa.array(places))
    integers = pa.array(column.keys[places].view(np.int64))
    return integers.cast(pa.large_string()).cast(pa.large_binary())


class _FieldCounts:
    """Counts the values of a field, by index as long as batches have the same values."""

    def __init__(self) -> None:
        self._keys, self._occurrences = np.empty(0, np.uint64), np.empty(0, np.int64)
        self._texts: Any = None

    def add(self, column: Column, texts: Any, rows: np.ndarray, counts: list[Counts]) -> None:
        """Counts selected rows; adds values to `counts` when a batch no longer has them."""
        coded, chosen = column.each(rows)
        if isinstance(coded, Parsed):
            # Parts of logs are small enough for one merge, at the end.
            counts.append(count_values(coded.take(chosen) if len(chosen) < coded.rows else coded))
            return
        if coded.keys is not self._keys:
            self.finish(counts)
            self._keys, self._texts = coded.keys, texts
            self._occurrences = np.zeros(len(coded.keys), np.int64)
        self._occurrences += coded.occurrences(chosen)

    def finish(self, counts: list[Counts]) -> None:
        """Adds the pending counts to `counts`."""
        there = np.flatnonzero(self._occurrences)
        if len(there):
            texts = None if self._texts is None else self._texts.take(there)
            _append(counts, Counts(self._keys[there], self._occurrences[there], texts))


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


def _none_of(column: CountedColumn) -> Counts:
    """Returns the counts of a column in no rows: a part may have no training rows."""
    texts = None
    if column.kind == "texts":
        import pyarrow as pa

        texts = pa.array([], pa.large_binary())
    return Counts(np.empty(0, np.uint32), np.empty(0, np.int64), texts)


def _append(parts: list[Counts], counts: Counts) -> None:
    """Adds counts to those of a column: the first part is merged, and the others wait.

    They are merged once they are as many as the merged ones, so that memory is a small multiple of
    the distinct values, and every value is sorted a logarithmic number of times.
    """
    parts.append(counts)
    if sum(len(part.keys) for part in parts[1:]) > max(len(parts[0].keys), _LEAST_MERGED):
        parts[:] = [merge_counts(parts)]


def _label_counts(read: Read, label: str) -> Counter[str]:
    texts, codes = read.texts_of(label)
    occurrences = np.bincount(codes[codes >= 0], minlength=len(texts))
    labels: Counter[str] = Counter()
    for text, count in zip(texts, occurrences.tolist(), strict=True):
        labels[text] += count
    return +labels
