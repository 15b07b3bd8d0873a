"""Tables as the tasks of preprocessing read them: counted once, then divided among the splits."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dlrm.data.sources.columns import Coded, Parsed
from dlrm.data.tables.columns import Bad, column_of, texts_of
from dlrm.data.tables.kinds.text import PROBLEM
from dlrm.data.tables.parts import Part
from dlrm.data.tables.rows import RowReader, Rows
from dlrm.data.transform.derived import Cross
from dlrm.data.transform.dictionaries import Counts, merge_counts
from dlrm.data.transform.encodings import Cells
from dlrm.data.transform.lists import Column, list_column, single
from dlrm.data.transform.numbers import Sums, ordered
from dlrm.data.transform.schema import Schema
from dlrm.preproc.stages.dictionary_merge import CountedColumn
from dlrm.preproc.stages.encodings import EncodedColumn
from dlrm.preproc.stages.hashing import FOLD, splitmix64
from dlrm.preproc.stages.source import Rejected, Target
from dlrm.preproc.tables.division import DROPPED, TRAIN, Divider

_MOST_LABELS = 1000  # distinct labels of a part
_TEXTS = pa.large_binary()
_BETWEEN = pa.scalar(b" & ", _TEXTS)  # the values of a combination in its text
_LEAST_MERGED = 1 << 14  # values of a column that are merged at once


def counted_columns(schema: Schema) -> list[CountedColumn]:
    """Returns the columns whose values are counted, for dictionaries, encodings and bins."""
    columns = []
    for field, *_ in schema.dictionaries().values():
        kind = {"string": "texts", "id": "ids"}.get(field.type, "numbers")
        most = field.max_ids if field.cardinality is None else field.cardinality - 1
        columns.append(CountedColumn(kind, field.frequency_limit, most))
    columns += [CountedColumn("encodings", encoded=one) for one in encoded_columns(schema)]
    columns += [
        CountedColumn("bins", bins=field.fitted_bins)
        for field in schema.numerical
        if field.fitted_bins
    ]
    return columns


def encoded_columns(schema: Schema) -> list[EncodedColumn]:
    """Returns the fields with encodings."""
    numbers = iter(schema.numerical_features[len(schema.numerical) :])
    return [
        EncodedColumn(
            place,
            field.encodings,
            [next(numbers) for _ in field.encodings],
            Cells.of(field.encodings, schema.weight is not None),
        )
        for place, (_, field) in enumerate(schema.encoded)
    ]


@dataclass(frozen=True)
class TableSource:
    """Reads parts of files by a schema.

    Attributes:
        schema: the meaning of the columns.
        divider: assigns rows to splits.
    """

    schema: Schema
    divider: Divider

    def count(
        self, part: Part, rejected: list[Rejected] | None
    ) -> tuple[dict[str, Any], list[Counts] | None]:
        """Reads a part once; see `dlrm.preproc.logs.source.Source`.

        It reads every field, so that no later stage meets an unreadable one, and counts the
        statistics to fit only in training rows.

        Returns:
            Facts: `rows` and `positives` of each split, `ids` of each split and list field,
            `labels` with their counts, `crc` of the part, `sums` of each column whose transform
            needs them, the first and last of the `times`, if there are any, `cells` of each field
            with encodings: the sums over all training rows, and over those without a value, and the
            `kinds` of values of each categorical field; and the counts of `counted_columns`.
        """
        schema = self.schema
        counts = [[_none_of(column)] for column in counted_columns(schema)]
        sums = [Sums() for _ in schema.numerical]
        rows, positives = [0, 0, 0], [0, 0, 0]
        ids = np.zeros((3, len(_list_fields(schema))), np.int64)
        labels: Counter[str] = Counter()
        times: list[int] = []
        fields = [_FieldCounts() for _ in schema.categorical]
        encoded = [_EncodedCounts(column) for column in encoded_columns(schema)]
        reader = RowReader(schema)
        for batch, read, splits, numbers in self._read(part, reader, rejected):
            assert read.labels is not None
            if schema.time and (splits != DROPPED).any():
                kept = read.extra["time"][splits != DROPPED]
                times = [min([*times, int(kept.min())]), max([*times, int(kept.max())])]
            for split in range(3):
                chosen = splits == split
                rows[split] += int(np.count_nonzero(chosen))
                positives[split] += int(np.count_nonzero(read.labels[chosen]))
                ids[split] += _num_ids(schema, read, chosen)
            self._add_ids(counts, read, np.flatnonzero(splits != DROPPED))
            if schema.label.positives:
                labels += _label_counts(schema, batch)
            training = np.flatnonzero(splits == TRAIN)
            if len(training):
                self._add_counts(counts, fields, read, training)
                self._add_encoded(counts, encoded, read, training, numbers[training])
                for i, field in enumerate(schema.numerical):
                    if field.rule.needs_sums:
                        values, missing = read.numerical[i]
                        present = training[~missing[training]]
                        sums[i] += Sums.of(values[present])
        for place, counted in zip(self._places(), fields, strict=False):
            counted.finish(counts[place])
        if len(labels) > _MOST_LABELS:
            labels = Counter(dict(labels.most_common(_MOST_LABELS)))
        facts: dict[str, Any] = {"rows": rows, "positives": positives, "labels": labels}
        facts |= {
            "ids": ids.tolist(),
            "times": times,
            "crc": part.checksum(),
            "sums": [one.facts() for one in sums],
            "kinds": [sorted(kinds) for kinds in reader.kinds],
            "cells": [[one.totals.tolist(), one.missing.tolist()] for one in encoded],
        }
        return facts, [merge_counts(parts) for parts in counts]

    def _places(self) -> list[int]:
        """Returns the counted column with the values of each categorical feature."""
        place_of = dict[str, int]()
        for place, fields in enumerate(self.schema.dictionaries().values()):
            place_of |= {field.column: place for field in fields}
        return [place_of[name] for name in self.schema.categorical_names]

    def _add_counts(
        self,
        counts: list[list[Counts]],
        fields: list["_FieldCounts"],
        read: Rows,
        training: np.ndarray,
    ) -> None:
        places = self._places()
        for i, field in enumerate(fields):
            if self.schema.categorical[i].type == "id":
                continue
            field.add(read.categorical[i], read.texts[i], training, counts[places[i]])
        for cross, place in zip(self.schema.crosses, places[len(fields) :], strict=True):
            _append(counts[place], _cross_counts(self.schema, cross, read, training))
        place = len(self.schema.dictionaries()) + len(self.schema.encoded)
        for i, number in enumerate(self.schema.numerical):
            if number.fitted_bins:
                values, missing = read.numerical[i]
                keys = ordered(values[training[~missing[training]]])
                _append(counts[place], Counts(*np.unique(keys, return_counts=True)))
                place += 1

    def _add_ids(self, counts: list[list[Counts]], read: Rows, rows: np.ndarray) -> None:
        """Keeps the greatest id of each field of ids, over the rows of all splits."""
        for i, place in enumerate(self._places()[: len(self.schema.categorical)]):
            if self.schema.categorical[i].type == "id":
                column, chosen = read.categorical[i].each(rows)
                assert isinstance(column, Coded), "as all tables are read"
                found = [counts[place][0].keys, column.keys[column.codes[chosen]]]
                greatest = np.concatenate(found).max(initial=0, keepdims=True)
                counts[place] = [Counts(greatest, np.ones(1, np.int64))]

    def _add_encoded(
        self,
        counts: list[list[Counts]],
        encoded: list["_EncodedCounts"],
        read: Rows,
        training: np.ndarray,
        numbers: np.ndarray,
    ) -> None:
        assert read.labels is not None
        hashes = splitmix64(self.divider.division.seed + FOLD, numbers)
        weights = read.extra["weight"][training] if self.schema.weight else None
        first = len(self.schema.dictionaries())
        for place, (index, _) in enumerate(self.schema.encoded):
            column = single(read.categorical[index])
            facts = read.labels[training], weights, hashes
            _append(counts[first + place], encoded[place].count(column, training, *facts))

    def divide(
        self, part: Part, targets: Sequence[Target], quarantine: bool
    ) -> Iterator[tuple[Target, np.ndarray, Rows]]:
        """Yields the rows of a part by split; see `dlrm.preproc.logs.source.Source`."""
        part.check()
        by_split = {_PLACES[target.name]: target for target in targets}
        reader = RowReader(self.schema)
        for _, read, splits, numbers in self._read(part, reader, [] if quarantine else None):
            for split, target in by_split.items():
                chosen = np.flatnonzero(splits == split)
                if len(chosen):
                    yield target, numbers[chosen], read.take(chosen)

    def where(self, part: Part, number: int) -> str:
        """Returns the location of a row; see `dlrm.preproc.logs.source.Source`."""
        return part.where(number - part.first_row)

    def _read(
        self, part: Part, reader: RowReader, rejected: list[Rejected] | None
    ) -> Iterator[tuple[pa.RecordBatch, Rows, np.ndarray, np.ndarray]]:
        """Yields readable rows: as they are, as fields, their splits and numbers."""
        columns = list(dict.fromkeys([*reader.columns, *self.divider.columns]))
        columns += [PROBLEM] * part.staged
        done = 0
        for batch in part.read(columns):
            numbers = np.arange(part.first_row + done, part.first_row + done + batch.num_rows)
            try:
                read, bad = reader.read(batch)
                splits, undivided = self.divider(batch, read, numbers, part.file)
            except ValueError as error:
                raise ValueError(f"{part.source}: {error}") from None
            wrong = _wrong(batch) if PROBLEM in batch.schema.names else []
            if bad or undivided or wrong:
                first = {one.row: one for one in reversed([*wrong, *bad, *undivided])}
                bad = [first[row] for row in sorted(first)]
                if rejected is None:
                    raise ValueError(f"{part.where(done + bad[0].row)}, {_text(bad[0])}")
                rejected += [
                    Rejected(done + one.row, _text(one), _row_text(batch, one.row)) for one in bad
                ]
                good = np.ones(batch.num_rows, bool)
                good[[one.row for one in bad]] = False
                kept = np.flatnonzero(good)
                read, splits, numbers = read.take(kept), splits[kept], numbers[kept]
                done += batch.num_rows
                batch = batch.take(pa.array(kept))
            else:
                done += batch.num_rows
            yield batch, read, splits, numbers  # even if all are dropped: their labels count


def _cross_counts(schema: Schema, cross: Cross, read: Rows, rows: np.ndarray) -> Counts:
    """Counts the combinations in selected rows, with texts if they may have ids of their own."""
    names = [field.column for field in schema.categorical]
    column = single(read.categorical[len(names) + schema.crosses.index(cross)]).by_row()
    rows = rows[~column.missing[rows]]
    keys, first, counts = np.unique(column.values[rows], return_index=True, return_counts=True)
    if cross.frequency_limit is None:
        return Counts(keys, counts)
    parts = [_texts_at(read, names.index(name), rows[first]) for name in cross.fields]
    return Counts(keys, counts, pc.binary_join_element_wise(*parts, _BETWEEN))


def _texts_at(read: Rows, field: int, rows: np.ndarray) -> pa.Array:
    """Returns the text of a categorical field in rows that have a value."""
    column, texts = read.categorical[field], read.texts[field]
    assert isinstance(column, Coded)
    places = column.codes[rows]
    if texts is not None:
        return texts.take(pa.array(places))
    return pa.array(column.keys[places].view(np.int64)).cast(pa.large_string()).cast(_TEXTS)


class _EncodedCounts:
    """Sums that the encodings of a field need.

    Attributes:
        totals: sums over all rows.
        missing: sums over the rows without a value.
    """

    def __init__(self, column: EncodedColumn) -> None:
        self._cells = column.cells
        self.totals, self.missing = (np.zeros(self._cells.size, np.int64) for _ in range(2))

    def count(
        self,
        column: Parsed | Coded,
        rows: np.ndarray,
        labels: np.ndarray,
        weights: np.ndarray | None,
        hashes: np.ndarray,
    ) -> Counts:
        """Returns the sums of each value over selected rows, given the rows' other facts."""
        keys, codes = column.distinct(rows)
        cells = self._cells.add_up(codes, len(keys) + 1, labels, weights, hashes)
        self.totals += cells.sum(axis=0)
        self.missing += cells[-1]
        there = cells[:-1].any(axis=1)  # excludes keys that occur only in missing rows
        return merge_counts([Counts(keys[there], cells[:-1][there])])


class _FieldCounts:
    """Counts the values of a field by index, as long as batches have the same values."""

    def __init__(self) -> None:
        self._keys, self._occurrences = np.empty(0, np.uint64), np.empty(0, np.int64)
        self._texts: Any = None

    def add(self, column: Column, texts: Any, rows: np.ndarray, counts: list[Counts]) -> None:
        """Counts selected rows; adds values to `counts` when a batch no longer has them."""
        coded, chosen = column.each(rows)
        assert isinstance(coded, Coded), "as all tables are read"
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
            found = Counts(self._keys[there], self._occurrences[there], texts)
            _append(counts, merge_counts([found]))


def _list_fields(schema: Schema) -> list[tuple[int, int]]:
    """Returns the list fields: their index among categorical ones, and their greatest length."""
    fields = enumerate(schema.categorical)
    return [(i, field.max_length) for i, field in fields if field.max_length is not None]


def _num_ids(schema: Schema, read: Rows, chosen: np.ndarray) -> np.ndarray:
    """Returns the number of ids in the lists of selected rows after truncation."""
    found = []
    for i, max_length in _list_fields(schema):
        lengths = list_column(read.categorical[i]).lengths[chosen]
        found.append(int(np.minimum(lengths, max_length).sum()))
    return np.array(found, np.int64)


_PLACES = {"train": 0, "test": 1, "validation": 2}


def _none_of(column: CountedColumn) -> Counts:
    """Returns the counts of a column in no rows: a part may have no training rows."""
    texts = pa.array([], _TEXTS) if column.kind == "texts" else None
    cells = () if column.encoded is None else (column.encoded.cells.size,)
    return Counts(np.empty(0, np.uint64), np.empty((0, *cells), np.int64), texts)


def _append(parts: list[Counts], found: Counts) -> None:
    """Adds counts to those of a column: the first part is merged, and the others wait.

    They are merged once they are as many as the merged ones, so that memory is a small multiple of
    the distinct values, and every value is sorted a logarithmic number of times.
    """
    parts.append(found)
    if sum(len(part.keys) for part in parts[1:]) > max(len(parts[0].keys), _LEAST_MERGED):
        parts[:] = [merge_counts(parts)]


def _label_counts(schema: Schema, batch: pa.RecordBatch) -> Counter[str]:
    name = schema.label.column
    texts, codes = texts_of(name, column_of(batch, name))
    occurrences = np.bincount(codes[codes >= 0], minlength=len(texts))
    found: Counter[str] = Counter()
    for text, count in zip(texts, occurrences.tolist(), strict=True):
        found[text] += count
    return +found


def _wrong(batch: pa.RecordBatch) -> list[Bad]:
    """Returns the rows of text that could not be read at all; other copies have none."""
    if PROBLEM not in batch.schema.names:
        return []
    problems = batch.column(PROBLEM)
    rows = np.flatnonzero(problems.is_valid().to_numpy(zero_copy_only=False)).tolist()
    return [Bad(row, "", problems[row].as_py().partition("\t")[0]) for row in rows]


def _text(bad: Bad) -> str:
    return f"column {bad.column}: {bad.problem}" if bad.column else bad.problem


def _row_text(batch: pa.RecordBatch, row: int) -> str:
    values = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name == PROBLEM:
            if column[row].is_valid:
                return column[row].as_py().partition("\t")[2]
            continue
        if pa.types.is_nested(column.type):
            values.append(f"{name}={column[row].as_py()}")
            continue
        texts, codes = texts_of(name, column.slice(row, 1))
        values.append(f"{name}={texts[codes[0]] if codes[0] >= 0 else None}")
    return "\t".join(values).replace("\n", "\\n")
