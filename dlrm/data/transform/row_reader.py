"""Rows of an Arrow table in the form of a schema: numbers, keys and labels, and the bad rows.

Each distinct value is converted once: a column is read as indices of its distinct values.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dlrm.data.bags import Jagged
from dlrm.data.schema.schema import CategoricalField, NumericalField, Schema
from dlrm.data.sources.columns import Coded, Parsed
from dlrm.data.sources.row_error import RowError
from dlrm.data.transform.arrays import (
    Faults,
    array_of,
    bits_of,
    column_of,
    dictionary_encoded,
    distinct_of,
    numbers_of_json,
    plain_texts,
    utf_8,
    value_class,
    value_type,
)
from dlrm.data.transform.keys import FieldKeys
from dlrm.data.transform.list_arrays import (
    check_lengths,
    checked_weights,
    field_lists,
    weight_field,
)
from dlrm.data.transform.numerical import NO_NUMBER, label_reader, numbers
from dlrm.data.transform.rows import Column, FieldRows, cross_columns
from dlrm.data.transform.times import times
from dlrm.data.transform.transform import Transform
from dlrm.data.transform.values import NUMBER


class _Keyed(NamedTuple):
    """The distinct values of a categorical field as they were read, and their keys."""

    raw: pa.Array
    form: tuple[str, int]  # class of the values, and bits of floats
    keys: np.ndarray
    missing: np.ndarray
    problems: dict[int, str]
    texts: pa.Array | None


class RowReader:
    """Reads batches of an Arrow table by a schema.

    Args:
        known_labels: all labels that are expected; None accepts any.
        inputs_only: leave out weight, groups and time, for scoring.
        fitted: the transform that was fitted to the schema's table; None before it is fitted.
        texts: for rows of a table to fit, which may have ids of any size: whether to return texts,
            which counts need. None is for other rows, and returns texts without a transform.
        only_numbers: for each categorical field, whether all its values are known to be numbers.

    Attributes:
        types: for each categorical field, the Arrow types of its values so far.
    """

    def __init__(
        self,
        schema: Schema,
        labeled: bool = True,
        known_labels: Iterable[str] | None = None,
        inputs_only: bool = False,
        fitted: Transform | None = None,
        texts: bool | None = None,
        only_numbers: Iterable[bool] | None = None,
    ) -> None:
        self.schema, self.labeled, self.inputs_only = schema, labeled, inputs_only
        if schema.time and not inputs_only:
            schema.time.check_zone()
        only_numbers = [*(only_numbers or [False] * len(schema.categorical))]
        self._keys_of = [
            FieldKeys(field, schema.missing_of(field), only_numbers=only_numbers[index])
            if fitted is None or (texts is not None and field.type == "id")
            else fitted.keys[index]
            for index, field in enumerate(schema.categorical)
        ]
        self._texts = fitted is None if texts is None else texts
        self._groups = {
            name: FieldKeys(CategoricalField(name), schema.missing_values) for name in schema.groups
        }
        self.types: list[set[str]] = [set() for _ in schema.categorical]
        label = schema.label
        if known_labels is None and label.positives and label.negative is not None:
            known_labels = [*label.positives, *label.negative]
        self._earlier: dict[str, _Keyed] = {}  # from the last batch; values mostly repeat
        self._is_positive = label_reader(schema, None if known_labels is None else [*known_labels])

    @property
    def columns(self) -> list[str]:
        """Returns the columns that are read, each once."""
        schema = self.schema
        names = schema.input_columns
        if self.labeled:
            names.insert(0, schema.label.column)
        if not self.inputs_only:
            names = [name for name in schema.columns if self.labeled or name in names] + names
            names += [*schema.groups, *([schema.weight] if schema.weight else [])]
            names += [schema.time.column] if schema.time else []
        return list(dict.fromkeys(names))

    def read(self, batch: pa.RecordBatch) -> tuple[FieldRows, list[RowError]]:
        """Returns the rows of a batch, and the first bad value of each bad row, in order.

        The content of bad rows is meaningless.

        Raises:
            ValueError: a column is missing, occurs twice, or has an unsupported type; the message
                names it.
        """
        schema, faults = self.schema, Faults()
        labels = self._labels(batch, faults) if self.labeled else None
        numerical = [self._number(field, batch, faults) for field in schema.numerical]
        categorical: list[Column] = []
        texts = []
        for index, field in enumerate(schema.categorical):
            if field.max_length is None:
                column = column_of(batch, field.column)
                values: tuple[Column, Any] = self._keys(index, batch, column, faults)
            else:
                values = self._lists(index, batch, faults)
            categorical.append(values[0])
            texts.append(values[1])
        categorical += cross_columns(schema, categorical)
        extra = {} if self.inputs_only else self._extra(batch, faults)
        return FieldRows(labels, numerical, categorical, texts, extra), faults.in_order()

    def _labels(self, batch: pa.RecordBatch, faults: Faults) -> np.ndarray:
        name = self.schema.label.column
        distinct, codes = distinct_of(name, column_of(batch, name), faults)
        texts = [*plain_texts(distinct), ""]  # the last for missing ones
        values, problems = np.zeros(len(texts), bool), {}
        for index, text in enumerate(texts):
            try:
                values[index] = self._is_positive(text)
            except ValueError as error:
                problems[index] = str(error)
        faults.add_distinct(name, codes, problems, len(distinct))
        return values[codes]

    def _number(self, field: NumericalField, batch: pa.RecordBatch, faults: Faults) -> Parsed:
        name = field.column
        column = numbers(field, column_of(batch, name), self.schema.missing_of(field), faults)
        if field.required:
            faults.add(name, column.missing, lambda row: NO_NUMBER)
        if field.rule.checked_in_readers:
            large = np.isinf(field.rule.apply(column)[0])
            faults.add(name, large, lambda row: field.rule.overflow(column.values[row]))
        return column

    def _keys(
        self, index: int, batch: pa.RecordBatch, array: pa.Array, faults: Faults
    ) -> tuple[Coded, pa.Array | None]:
        """Returns the keys of a field's values, which are in an array of the batch's rows."""
        keys_of = self._keys_of[index]
        field, name = keys_of.field, keys_of.field.column
        raw, codes = self._distinct(field, array)
        if field.type == "id":
            faults.add(name, codes < 0, lambda row: keys_of.id_problem(None))
        of_values = NUMBER if numbers_of_json(batch, name) else value_class(array.type)
        form = of_values, bits_of(array.type)
        earlier = self._earlier.get(name)
        if earlier is None or earlier.form != form or not earlier.raw.equals(raw):
            distinct, not_utf_8 = utf_8(raw)
            problems = dict[int, str]()
            if len(raw):
                self.types[index].add(_type_name(array.type))
            (keys, missing), column = keys_of.of(distinct, problems, *form)
            problems |= not_utf_8
            texts = array_of(column) if column is not None and self._texts else None
            earlier = self._earlier[name] = _Keyed(raw, form, keys, missing, problems, texts)
        faults.add_distinct(name, codes, earlier.problems, len(raw))
        if earlier.missing.any():
            present = np.append(np.where(earlier.missing, -1, np.arange(len(raw))), -1)
            codes = present.take(codes, mode="wrap")
        return Coded(earlier.keys, codes), earlier.texts

    @staticmethod
    def _distinct(field: CategoricalField, array: pa.Array) -> tuple[pa.Array, np.ndarray]:
        if field.type == "id" and pa.types.is_integer(array.type) and not array.null_count:
            return array, np.arange(len(array))  # most differ
        return dictionary_encoded(field.column, array)

    def _lists(
        self, index: int, batch: pa.RecordBatch, faults: Faults
    ) -> tuple[Jagged, pa.Array | None]:
        field = self._keys_of[index].field
        column = column_of(batch, field.column)
        flat, lengths = field_lists(self.schema, field, field.column, column, faults)
        weights, of_weights = None, None
        if field.weights is not None:
            column = column_of(batch, field.weights)
            weights, of_weights = field_lists(self.schema, field, field.weights, column, faults)
        check_lengths(field, lengths, of_weights, faults)
        coded, texts = self._keys(index, batch, flat, inner := Faults())
        faults.add_lists(inner, lengths)
        if weights is None or of_weights is None:
            return Jagged(coded, lengths), texts
        rule = weight_field(field)
        parsed = numbers(rule, weights, self.schema.missing_of(rule), inner := Faults())
        faults.add_lists(inner, of_weights)
        return Jagged(
            coded, lengths, checked_weights(rule.column, parsed, of_weights, lengths, faults)
        ), texts

    def _extra(self, batch: pa.RecordBatch, faults: Faults) -> dict[str, np.ndarray]:
        schema, extra = self.schema, {}
        if schema.weight:
            field = NumericalField(schema.weight, "none", required=True)
            column = column_of(batch, schema.weight)
            weights = numbers(field, column, schema.missing_values, faults)
            with np.errstate(over="ignore"):
                bad = weights.missing | np.isinf(weights.values.astype(np.float32))
            bad |= weights.values < 0
            faults.add(schema.weight, bad, partial(_bad_weight, weights))
            extra["weight"] = np.where(bad, 0.0, weights.values).astype("<f4")
        for name in schema.groups:
            array = column_of(batch, name)
            distinct, codes = distinct_of(name, array, faults)
            problems = dict[int, str]()
            (keys, missing), _ = self._groups[name].of(distinct, problems, bits=bits_of(array.type))
            faults.add_distinct(name, codes, problems, len(distinct))
            absent = np.append(missing, True)
            faults.add(name, absent[codes], lambda row: "expected a group, got no value")
            extra[f"group_{name}"] = np.append(keys, np.uint64(0))[codes]
        if schema.time:
            extra["time"] = times(schema.time, column_of(batch, schema.time.column), faults)
        return extra


def _type_name(dtype: pa.DataType) -> str:
    dtype = value_type(dtype)
    return "string" if dtype == pa.large_string() else str(dtype)


def _bad_weight(weights: Parsed, row: int) -> str:
    got = "no value" if weights.missing[row] else f"{weights.values[row]}"
    expected = "that float32 has" if weights.values[row] > 0 else "of 0 or more"
    return f"expected a weight {expected}, got {got}"
