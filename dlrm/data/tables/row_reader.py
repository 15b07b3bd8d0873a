"""Rows of an Arrow table in the form of a schema: numbers, keys and labels, and the bad rows.

Each distinct value is converted once: a column is read as indices of its distinct values.
"""

import math
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dlrm.data.clicks.bags import Jagged
from dlrm.data.sources import native
from dlrm.data.sources.columns import EXPECTED_INTEGER, MOST_DECIMAL, Coded, Parsed
from dlrm.data.sources.row_error import RowError
from dlrm.data.tables.columns import (
    Faults,
    are_null,
    array_of,
    bits_of,
    canonical_texts,
    column_of,
    dictionary_encoded,
    distinct_of,
    kind_of_values,
    numbers_of_json,
    plain_texts,
    stored_values,
    text_column,
    utf_8,
)
from dlrm.data.tables.kinds.types import is_text
from dlrm.data.tables.lists import check_lengths, checked_weights, lists_of
from dlrm.data.tables.times import times
from dlrm.data.transform.cells import (
    NO_NUMBER,
    FieldKeys,
    label_cells,
    missing_numbers,
    numbers_of_texts,
)
from dlrm.data.transform.lists import Column, split_text
from dlrm.data.transform.rows import FieldRows, cross_columns
from dlrm.data.transform.schema import CategoricalField, NumericalField, Schema
from dlrm.data.transform.transform import Transform
from dlrm.data.transform.values import NUMBER


class _Keyed(NamedTuple):
    """The distinct values of a categorical field as they were read, and their keys."""

    raw: pa.Array
    numbers: bool  # in JSON
    bits: int
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
        numbers: the transform that was fitted to the very rows, which says where NaN is no value.

    Attributes:
        kinds: for each categorical field, the kinds of its values so far; see
            `dlrm.data.transform.values`.
    """

    def __init__(
        self,
        schema: Schema,
        labeled: bool = True,
        known_labels: Iterable[str] | None = None,
        inputs_only: bool = False,
        fitted: Transform | None = None,
        texts: bool | None = None,
        numbers: Transform | None = None,
    ) -> None:
        self.schema, self.labeled, self.inputs_only = schema, labeled, inputs_only
        if schema.time and not inputs_only:
            schema.time.check_zone()
        self._keys_of = [
            FieldKeys(
                field,
                schema.missing_of(field),
                numbers=None if numbers is None else numbers.known_texts(place),
            )
            if fitted is None or (texts is not None and field.type == "id")
            else fitted.keys[place]
            for place, field in enumerate(schema.categorical)
        ]
        self._texts = fitted is None if texts is None else texts
        self._groups = {
            name: FieldKeys(CategoricalField(name), schema.missing_values) for name in schema.groups
        }
        self.kinds: list[set[str]] = [set() for _ in schema.categorical]
        label = schema.label
        if known_labels is None and label.positives and label.negative is not None:
            known_labels = [*label.positives, *label.negative]
        self._earlier: dict[str, _Keyed] = {}  # from the last batch; values mostly repeat
        self._parse_labels = label_cells(schema, None if known_labels is None else [*known_labels])

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
        labels = None
        if self.labeled:
            labels = self._labels(batch, faults)
        numerical = [
            _numbers(field, column_of(batch, field.column), schema, faults)
            for field in schema.numerical
        ]
        for number, parsed in zip(schema.numerical, numerical, strict=True):
            if number.required:
                faults.add(number.column, parsed.missing, lambda row: NO_NUMBER)
            if number.rule.checked_in_readers:
                large = np.isinf(number.rule.apply(parsed)[0])
                faults.add(number.column, large, partial(_overflow, number, parsed.values))
        categorical: list[Column] = []
        texts = []
        for place, field in enumerate(schema.categorical):
            if field.max_length is None:
                coded, text = self._keys(place, batch, column_of(batch, field.column), faults)
                categorical.append(coded)
            else:
                lists, text = self._lists(place, batch, faults)
                categorical.append(lists)
            texts.append(text)
        categorical += cross_columns(schema, categorical)
        extra = {} if self.inputs_only else self._extra(batch, faults)
        return FieldRows(labels, numerical, categorical, texts, extra), faults.in_order()

    def _labels(self, batch: pa.RecordBatch, faults: Faults) -> np.ndarray:
        name = self.schema.label.column
        distinct, codes = distinct_of(name, column_of(batch, name), faults)
        cells = [*plain_texts(distinct), ""]  # the last for missing ones
        values, problems = np.zeros(len(cells), bool), {}
        for place, cell in enumerate(cells):
            try:
                values[place] = self._parse_labels([cell])[0]
            except RowError as error:
                problems[place] = error.problem
        faults.add_places(name, codes, problems, len(distinct))
        return values[codes]

    def _keys(
        self, place: int, batch: pa.RecordBatch, array: pa.Array, faults: Faults
    ) -> tuple[Coded, pa.Array | None]:
        """Returns the keys of a field's values, which are in an array of the batch's rows."""
        of_texts = self._keys_of[place]
        field, name = of_texts.field, of_texts.field.column
        if field.type == "id":
            faults.add(name, array.is_null().to_numpy(zero_copy_only=False), _no_id(of_texts))
            if pa.types.is_integer(array.type):
                return _ids(of_texts, array, faults), None
        raw, codes = dictionary_encoded(name, array)
        if field.type == "id":  # a dictionary may have a null of its own
            faults.add(name, codes < 0, _no_id(of_texts))
        form = numbers_of_json(batch, name), bits_of(array.type)
        earlier = self._earlier.get(name)
        if earlier is None or earlier[1:3] != form or not earlier.raw.equals(raw):
            problems, texts = dict[int, str](), None
            distinct, not_utf_8 = utf_8(raw)
            kind = kind_of_values(distinct.type)
            if len(raw):
                self.kinds[place].add(kind)
            spelled = field.true_values or field.false_values
            if (
                field.type in ("integer", "id")
                and pa.types.is_integer(distinct.type)
                and not spelled
            ):
                values = distinct.to_numpy(zero_copy_only=False)
                keys, missing = of_texts.of_integers(values, problems)
            else:
                column = text_column(canonical_texts(name, distinct))
                numbers, bits = form
                kind = NUMBER if numbers else kind
                (keys, missing), column = of_texts.of_texts(column, problems, kind, bits)
                if field.type == "string" and self._texts:
                    texts = array_of(column)
            problems |= not_utf_8
            earlier = self._earlier[name] = _Keyed(raw, *form, keys, missing, problems, texts)
        faults.add_places(name, codes, earlier.problems, len(raw))
        if earlier.missing.any():
            places = np.append(np.where(earlier.missing, -1, np.arange(len(raw))), -1)
            codes = places.take(codes, mode="wrap")
        return Coded(earlier.keys, codes), earlier.texts

    def _lists(
        self, place: int, batch: pa.RecordBatch, faults: Faults
    ) -> tuple[Jagged, pa.Array | None]:
        field = self._keys_of[place].field
        flat, lengths = self._flat(field, field.column, batch)
        if field.weights is None:
            check_lengths(field, lengths, None, faults)
        else:
            numbers, of_weights = self._flat(field, field.weights, batch)
            check_lengths(field, lengths, of_weights, faults)
        inner = Faults()
        coded, texts = self._keys(place, batch, flat, inner)
        faults.add_lists(inner, lengths)
        if field.weights is None:
            return Jagged(coded, lengths), texts
        inner = Faults()
        markers = field.missing_values
        rule = NumericalField(field.weights, "none", missing_values=markers, required=True)
        weights = _numbers(rule, numbers, self.schema, inner)
        faults.add_lists(inner, of_weights)
        checked = checked_weights(field.weights, weights, of_weights, lengths, faults)
        return Jagged(coded, lengths, checked), texts

    def _flat(
        self, field: CategoricalField, name: str, batch: pa.RecordBatch
    ) -> tuple[pa.Array, np.ndarray]:
        """Returns the values of lists, which may be text as in CSV, and their lengths."""
        array = column_of(batch, name)
        kind = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
        if is_text(kind):
            missing = self.schema.missing_of(field)
            texts = array.to_pylist()
            split = [None if t is None else split_text(t, field.separator, missing) for t in texts]
            array = pa.array(split, pa.list_(pa.string()))
        return lists_of(name, array)

    def _extra(self, batch: pa.RecordBatch, faults: Faults) -> dict[str, np.ndarray]:
        schema, extra = self.schema, {}
        if schema.weight:
            field = NumericalField(schema.weight, "none", required=True)
            weights = _numbers(field, column_of(batch, schema.weight), schema, faults)
            with np.errstate(over="ignore"):
                bad = weights.missing | np.isinf(weights.values.astype(np.float32))
            bad |= weights.values < 0
            faults.add(schema.weight, bad, lambda row: _bad_weight(weights, row))
            extra["weight"] = np.where(bad, 0.0, weights.values).astype("<f4")
        for name in schema.groups:
            array = column_of(batch, name)
            distinct, codes = distinct_of(name, array, faults)
            of_texts, problems = self._groups[name], dict[int, str]()
            column = text_column(canonical_texts(name, distinct))
            (keys, missing), _ = of_texts.of_texts(column, problems, bits=bits_of(array.type))
            faults.add_places(name, codes, problems, len(distinct))
            absent = np.append(missing, True)
            faults.add(name, absent[codes], lambda row: "expected a group, got no value")
            extra[f"group_{name}"] = np.append(keys, np.uint64(0))[codes]
        if schema.time:
            extra["time"] = times(schema.time, column_of(batch, schema.time.column), faults)
        return extra


def _no_id(of_ids: FieldKeys) -> Callable[[int], str]:
    return lambda row: of_ids.id_problem(None)


def _ids(of_ids: FieldKeys, array: pa.Array, faults: Faults) -> Coded:
    """Returns ids without a search for the distinct ones."""
    values = array.fill_null(0).to_numpy(zero_copy_only=False)
    problems: dict[int, str] = {}
    keys, _ = of_ids.of_integers(values, problems)
    codes = np.arange(len(values))
    faults.add_places(of_ids.field.column, codes, problems, len(values))
    return Coded(keys, codes)


def _overflow(field: NumericalField, values: np.ndarray, row: int) -> str:
    return field.rule.overflow(values[row])


def _bad_weight(weights: Parsed, row: int) -> str:
    got = "no value" if weights.missing[row] else f"{weights.values[row]}"
    expected = "that float32 has" if weights.values[row] > 0 else "of 0 or more"
    return f"expected a weight {expected}, got {got}"


def _numbers(
    field: NumericalField,
    array: pa.Array,
    schema: Schema,
    faults: Faults,
) -> Parsed:
    name, kind = field.column, array.type
    hint = "" if field.required else "; missing_values: [nan] takes NaN as missing"
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
        if not is_text(kind):
            array = array.dictionary_decode()
    if pa.types.is_null(kind):
        return Parsed(np.zeros(len(array)), np.ones(len(array), bool))
    if (field.true_values or field.false_values) and not is_text(kind):
        array, kind = canonical_texts(name, array), pa.large_string()
    if is_text(kind):
        return _numbers_of_text(field, array, schema, faults)
    given, whole = array, _are_decimals(name, array) if field.type == "decimal" else None
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        array = array.cast(pa.timestamp("us", getattr(kind, "tz", None)), safe=False)
        array = pc.divide(array.cast(pa.int64()).cast(pa.float64(), safe=False), 1e6)
    elif pa.types.is_boolean(kind):
        array = array.cast(pa.uint8())
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        raise ValueError(f"column {name!r}: expected numbers, got the type {kind}")
    if pa.types.is_decimal(kind):
        array = array.cast(pa.string())  # read as text is, to the nearest float64
    missing = are_null(array)
    values = stored_values(array.cast(pa.float64(), safe=False))
    values = np.where(missing, 0.0, values) if array.null_count else values
    if markers := schema.missing_of(field):
        missing = missing | np.isin(values, missing_numbers(markers))
    finite = np.isfinite(values)
    if finite.all() and whole is None and not markers:
        return Parsed(values, missing)
    if not finite.all():
        bad = ~finite
        if "nan" in (text.lower() for text in markers):
            missing, bad = missing | np.isnan(values), np.isinf(values)
        faults.add(
            name,
            bad,
            lambda row: (
                f"expected a finite number, got {values[row]}" + hint * math.isnan(values[row])
            ),
        )
    if whole is not None:
        bad = finite & ~missing & ~whole
        faults.add(name, bad, lambda row: f"expected {EXPECTED_INTEGER}, got {given[row].as_py()}")
    return Parsed(np.where(finite & ~missing, values, 0.0), missing)


def _are_decimals(name: str, array: pa.Array) -> np.ndarray:
    """Returns which numbers, by their exact values, a field of type `decimal` takes.

    Raises:
        ValueError: the column's type has no numbers.
    """
    kind = array.type
    if pa.types.is_integer(kind):
        values = array if kind == pa.uint64() else array.cast(pa.int64())
        whole = pc.less(values, pa.scalar(MOST_DECIMAL, values.type))
        if kind != pa.uint64():
            above = pc.greater(values, pa.scalar(-MOST_DECIMAL, values.type))
            whole = pc.and_kleene(whole, above)
    elif pa.types.is_floating(kind):
        values = array.cast(pa.float64())
        within = pc.less(pc.abs(values), float(MOST_DECIMAL))
        whole = pc.and_kleene(pc.equal(values, pc.floor(values)), within)
    elif pa.types.is_decimal(kind):
        numbers = (value.as_py() for value in array)
        whole = pa.array([n is None or (n % 1 == 0 and abs(n) < MOST_DECIMAL) for n in numbers])
    else:
        raise ValueError(f"column {name!r}: expected integers, got the type {kind}")
    return pc.fill_null(whole, True).to_numpy(zero_copy_only=False)


def _numbers_of_text(
    field: NumericalField, array: pa.Array, schema: Schema, faults: Faults
) -> Parsed:
    if native.host is not None and field.type != "decimal" and pa.types.is_string(array.type):
        distinct: pa.Array = utf_8(array)[0]
        codes: np.ndarray = np.arange(len(array))
        if array.null_count:
            codes = np.where(array.is_valid().to_numpy(zero_copy_only=False), codes, -1)
        if distinct is not array:  # bytes that are not UTF-8
            distinct, codes = distinct_of(field.column, array, faults)
    else:
        distinct, codes = distinct_of(field.column, array, faults)
    problems, markers = dict[int, str](), schema.missing_of(field)
    if (numbers := _plain_numbers(field, distinct, markers, problems)) is None:
        cells = [*plain_texts(distinct), ""]
        numbers = numbers_of_texts(field, cells, markers, problems)
    faults.add_places(field.column, codes, problems, len(distinct))
    return Parsed(numbers.values[codes], numbers.missing[codes])


def _plain_numbers(
    field: NumericalField, array: pa.Array, markers: Collection[str], problems: dict[int, str]
) -> Parsed | None:
    """Returns the numbers of texts, and a missing one at the end, most of them read natively.

    None if the field takes other texts than numbers, or the compiled host code is missing.
    """
    if native.host is None or field.type == "decimal" or field.true_values or field.false_values:
        return None
    column = text_column(array)
    values = np.append(native.host.numbers_of(*column), 0.0)
    missing = np.append(column.starts == column.ends, True)
    others = np.flatnonzero(np.isnan(values) & ~missing).tolist()
    if others:
        places = dict[str, list[int]]()
        for place in others:
            raw = column.data[column.starts[place] : column.ends[place]].tobytes()
            places.setdefault(raw.decode(), []).append(place)
        wrong: dict[int, str] = {}
        parsed = numbers_of_texts(field, list(places), markers, wrong)
        for i, of_text in enumerate(places.values()):
            values[of_text], missing[of_text] = parsed.values[i], parsed.missing[i]
            if i in wrong:
                problems |= dict.fromkeys(of_text, wrong[i])
    missing |= np.isin(values, missing_numbers(markers)) if markers else False
    return Parsed(np.where(missing, 0.0, values), missing)
