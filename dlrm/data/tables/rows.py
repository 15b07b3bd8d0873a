"""Rows of an Arrow table as a schema has them: numbers, keys and labels, and which are bad.

Values are converted once each: a column is read as places in its distinct values.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dlrm.data.clicks import layout
from dlrm.data.sources.columns import Coded, Parsed, TextColumn, hash_texts, stripped
from dlrm.data.sources.csv_cells import BadCellError
from dlrm.data.transform.schema import (
    TIME_UNITS,
    CategoricalField,
    NumericalField,
    Schema,
    TimeField,
)
from dlrm.data.transform.table_transform import (
    keys_of_texts,
    label_cells,
    missing_integers,
    missing_keys,
    missing_numbers,
    numbers_of_texts,
    overflow_text,
)

_LONGEST_SHOWN = 64  # characters of a value in a message
_YEARS = (-62_135_596_800_000_000, 253_402_300_799_999_999)  # 1 to 9999, in microseconds
_EXPECTED_YEAR = "expected a time in the years 1 to 9999"
_INTEGER = re.compile(r"[+-]?[0-9]{1,4000}")


class Bad(NamedTuple):
    """A value that cannot be read: its row in the batch, its column, and why."""

    row: int
    column: str
    problem: str


class Rows(NamedTuple):
    """Rows by the fields of a schema.

    Attributes:
        labels: bool `[rows]`; None where there are none to read.
        numerical: a column for each numerical field.
        categorical: a column for each categorical field.
        texts: the distinct values of each categorical field of strings, as `Coded.keys` has them;
            None of integers.
        extra: weight, groups and time by their names in a dataset; see `extra_dtypes`.
    """

    labels: np.ndarray | None
    numerical: list[Parsed]
    categorical: list[Coded]
    texts: list[pa.Array | None]
    extra: dict[str, np.ndarray]

    def missing(self) -> np.ndarray:
        """Returns which fields have no value, bool `[fields, rows]`."""
        absent = [column.missing for column in self.numerical]
        return np.array(absent + [column.codes < 0 for column in self.categorical])

    def take(self, rows: np.ndarray) -> "Rows":
        """Returns the rows of a mask, or of places."""
        return Rows(
            None if self.labels is None else self.labels[rows],
            [Parsed(column.values[rows], column.missing[rows]) for column in self.numerical],
            [Coded(column.keys, column.codes[rows]) for column in self.categorical],
            self.texts,
            {name: values[rows] for name, values in self.extra.items()},
        )


def extra_dtypes(schema: Schema) -> dict[str, np.dtype]:
    """Returns the columns of a dataset beside the model's inputs: name -> type.

    `weight` is float32, `group_<column>` a 64-bit hash, and `time` microseconds since 1970 in UTC.
    """
    names: dict[str, np.dtype] = {"weight": np.dtype("<f4")} if schema.weight else {}
    names |= {f"group_{name}": np.dtype("<u8") for name in schema.groups}
    return names | ({"time": np.dtype("<i8")} if schema.time else {})


class _Keyed(NamedTuple):
    """The distinct values of a categorical field, and what was made of them."""

    distinct: pa.Array
    keys: np.ndarray
    missing: np.ndarray
    problems: dict[int, str]
    texts: pa.Array | None


class RowReader:
    """Reads batches of an Arrow table by a schema.

    Args:
        schema: what the columns mean.
        labelled: whether there are labels to read.
        known_labels: all labels that are expected; None takes any.
        inputs_only: leave out weight, groups and time, as for scoring.
    """

    def __init__(
        self,
        schema: Schema,
        labelled: bool = True,
        known_labels: Iterable[str] | None = None,
        inputs_only: bool = False,
    ) -> None:
        self.schema, self.labelled, self.inputs_only = schema, labelled, inputs_only
        if schema.time and not inputs_only:
            schema.time.check_zone()
        self._missing = missing_keys(schema)
        self._missing_integers = missing_integers(schema)
        label = schema.label
        if known_labels is None and label.positive is not None and label.negative is not None:
            known_labels = [label.positive, *label.negative]
        self._earlier: dict[str, _Keyed] = {}  # of the last batch, which mostly has them again
        self._parse_labels = label_cells(schema, None if known_labels is None else [*known_labels])

    @property
    def columns(self) -> list[str]:
        """The columns that are read, each once."""
        schema = self.schema
        names = [*schema.numerical_names, *schema.categorical_names]
        if self.labelled:
            names.insert(0, schema.label.column)
        if not self.inputs_only:
            names = [name for name in schema.columns if self.labelled or name in names] + names
            names += [*schema.groups, *([schema.weight] if schema.weight else [])]
            names += [schema.time.column] if schema.time else []
        return list(dict.fromkeys(names))

    def read(self, batch: pa.RecordBatch) -> tuple[Rows, list[Bad]]:
        """Returns the rows of a batch, and the first bad value of each bad row, in their order.

        What the rows hold where they are bad means nothing.

        Raises:
            ValueError: a column is missing, there twice, or of a type that no value can be made
                of; it is named.
        """
        schema, found = self.schema, _Found()
        labels = None
        if self.labelled:
            labels = self._labels(schema.label.column, column_of(batch, schema.label.column), found)
        numerical = [
            _numbers(field, column_of(batch, field.column), schema, found)
            for field in schema.numerical
        ]
        for rule, (values, _) in zip(schema.numerical, numerical, strict=True):
            if rule.transform == "none":
                large = _is_infinite(values, layout.NUMERICAL_DTYPE)
                found.add(rule.column, large, partial(_too_large, values))
        categorical, texts = [], []
        for field in schema.categorical:
            coded, text = self._keys(field, column_of(batch, field.column), found)
            categorical.append(coded)
            texts.append(text)
        extra = {} if self.inputs_only else self._extra(batch, found)
        return Rows(labels, numerical, categorical, texts, extra), found.in_order()

    def _labels(self, name: str, array: pa.Array, found: "_Found") -> np.ndarray:
        distinct, codes = _distinct(name, array, found)
        cells = [*_texts(distinct), ""]  # the last for missing ones
        values, problems = np.zeros(len(cells), bool), {}
        for place, cell in enumerate(cells):
            try:
                values[place] = self._parse_labels([cell])[0]
            except BadCellError as error:
                problems[place] = f"expected {error.expected}, got {_shown(cell)}"
        found.add_places(name, codes, problems, len(distinct))
        return values[codes]

    def _keys(
        self, field: CategoricalField, array: pa.Array, found: "_Found"
    ) -> tuple[Coded, pa.Array | None]:
        name = field.column
        distinct, codes = _distinct(name, array, found)
        earlier = self._earlier.get(name)
        if earlier is None or not earlier.distinct.equals(distinct):
            problems: dict[int, str] = {}
            texts = None
            if field.type == "integer" and pa.types.is_integer(distinct.type):
                keys, missing = _integers(distinct, self._missing_integers, problems)
            else:
                column = _text_column(_as_text(distinct))
                keys, missing = keys_of_texts(field, column, self._missing, problems)
                texts = _array_of(stripped(column)) if field.type == "string" else None
            earlier = self._earlier[name] = _Keyed(distinct, keys, missing, problems, texts)
        found.add_places(name, codes, earlier.problems, len(distinct))
        if earlier.missing.any():
            places = np.append(np.where(earlier.missing, -1, np.arange(len(distinct))), -1)
            codes = places[codes]
        return Coded(earlier.keys, codes), earlier.texts

    def _extra(self, batch: pa.RecordBatch, found: "_Found") -> dict[str, np.ndarray]:
        schema, extra = self.schema, {}
        if schema.weight:
            field = NumericalField(schema.weight, "none")
            weights = _numbers(field, column_of(batch, schema.weight), schema, found)
            bad = weights.missing | (weights.values < 0) | _is_infinite(weights.values, "<f4")
            found.add(schema.weight, bad, lambda row: _bad_weight(weights, row))
            extra["weight"] = np.where(bad, 0.0, weights.values).astype("<f4")
        for name in schema.groups:
            distinct, codes = _distinct(name, column_of(batch, name), found)
            column = stripped(_text_column(_as_text(distinct)))
            keys = hash_texts(column)
            absent = np.append((column.starts == column.ends) | np.isin(keys, self._missing), True)
            found.add(name, absent[codes], lambda row: "expected a group, got no value")
            extra[f"group_{name}"] = np.append(keys, np.uint64(0))[codes]
        if schema.time:
            extra["time"] = times(schema.time, column_of(batch, schema.time.column), found)
        return extra


def _bad_weight(weights: Parsed, row: int) -> str:
    got = "no value" if weights.missing[row] else f"{weights.values[row]}"
    expected = "that float32 has" if weights.values[row] > 0 else "of 0 or more"
    return f"expected a weight {expected}, got {got}"


def _is_infinite(values: np.ndarray, dtype: Any) -> np.ndarray:
    """Returns which numbers are too large for a type."""
    with np.errstate(over="ignore"):
        return np.isinf(values.astype(np.float32).astype(dtype))


def _too_large(values: np.ndarray, row: int) -> str:
    return overflow_text(values[row], "none")


class _Found:
    """The first bad value of each bad row of a batch."""

    def __init__(self) -> None:
        self._by_row: dict[int, Bad] = {}

    def add(self, column: str, bad: np.ndarray, problem: Callable[[int], str]) -> None:
        for row in np.flatnonzero(bad).tolist():
            if row not in self._by_row:
                self._by_row[row] = Bad(row, column, problem(row))

    def add_places(
        self, column: str, codes: np.ndarray, problems: dict[int, str], missing: int
    ) -> None:
        """Adds rows whose place in the distinct values is bad; `missing` is that of -1."""
        if problems:
            wrong = np.zeros(missing + 1, bool)
            wrong[list(problems)] = True
            self.add(column, wrong[codes], lambda row: problems[int(codes[row]) % (missing + 1)])

    def in_order(self) -> list[Bad]:
        return [self._by_row[row] for row in sorted(self._by_row)]


def column_of(batch: pa.RecordBatch, name: str) -> pa.Array:
    """Returns a column.

    Raises:
        ValueError: there is none of that name, or two.
    """
    places = batch.schema.get_all_field_indices(name)
    if len(places) != 1:
        names = ", ".join(batch.schema.names[:20])
        if places:
            raise ValueError(f"two columns are called {name!r}")
        raise ValueError(f"no column {name!r}; the columns are {names}")
    array = batch.column(places[0])
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    return array


def _distinct(
    name: str, array: pa.Array, found: "_Found | None" = None
) -> tuple[pa.Array, np.ndarray]:
    """Returns the distinct values, and the place of each row's; -1 where it is null.

    Text that is no UTF-8 is noted, and escaped in the values.
    """
    kind = array.type
    if pa.types.is_null(kind):
        return pa.array([], pa.string()), np.full(len(array), -1, np.int32)
    if pa.types.is_nested(kind):
        raise ValueError(f"column {name!r}: expected a value a row, got the type {kind}")
    if pa.types.is_float16(kind):
        array = array.cast(pa.float32())  # Arrow finds no distinct ones of the former
    if not pa.types.is_dictionary(kind):
        array = array.dictionary_encode()
    elif array.dictionary.null_count:
        array = array.dictionary_decode().dictionary_encode()
    indices = array.indices
    if pa.types.is_unsigned_integer(indices.type):
        indices = indices.cast(pa.int64())
    codes = indices.fill_null(-1).to_numpy(zero_copy_only=False)
    codes = codes.astype(np.int64 if codes.dtype.itemsize > 4 else np.int32)
    distinct = array.dictionary
    if _is_text(distinct.type) or _is_binary(distinct.type):
        distinct = _utf_8(name, distinct, codes, found)
    return distinct, codes


def _utf_8(name: str, distinct: pa.Array, codes: np.ndarray, found: "_Found | None") -> pa.Array:
    try:
        if _is_text(distinct.type):
            distinct.validate(full=True)
            return distinct
        return distinct.cast(pa.large_binary()).cast(pa.large_string())
    except pa.ArrowInvalid:
        texts, problems = [], {}
        for place, raw in enumerate(distinct.cast(pa.large_binary()).to_pylist()):
            texts.append(raw.decode("utf-8", "backslashreplace"))
            if texts[-1].encode() != raw:
                problems[place] = f"expected UTF-8, got {_shown(raw)}"
        if found is not None:
            found.add_places(name, codes, problems, len(texts))
        return pa.array(texts, pa.large_string())


def _is_binary(kind: pa.DataType) -> bool:
    fixed = pa.types.is_fixed_size_binary(kind)
    return fixed or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _as_text(array: pa.Array) -> pa.Array:
    """Returns values as text: whole numbers without a point, booleans as true and false."""
    kind = array.type
    if pa.types.is_floating(kind):
        values = array.cast(pa.float64())
        whole = pc.and_(pc.is_finite(values), pc.equal(pc.floor(values), values))
        small = pc.and_(whole, pc.less(pc.abs(values), float(1 << 53)))
        integers = pc.if_else(small, values, 0.0).cast(pa.int64()).cast(pa.large_string())
        text = (
            pa.array(
                [None if v is None else repr(v) for v in values.to_pylist()], pa.large_string()
            )
            if not pc.all(small).as_py()
            else integers
        )
        return pc.if_else(small, integers, text)
    if pa.types.is_decimal(kind):
        texts = [None if v is None else _plain(v) for v in array.to_pylist()]
        return pa.array(texts, pa.large_string())
    return array.cast(pa.large_string())


def _plain(value: Any) -> str:
    text = format(value, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _texts(array: pa.Array) -> list[str]:
    return [one.strip() for one in _as_text(array).to_pylist()]


def _text_column(array: pa.Array) -> TextColumn:
    """Returns the text of an array without nulls, where it is."""
    wide = pa.types.is_large_string(array.type)
    _, offsets, data = array.buffers()
    if offsets is None:
        places = np.zeros(1, np.int64)
    else:
        every = np.frombuffer(offsets, np.int64 if wide else np.int32).astype(np.int64)
        places = every[array.offset : array.offset + len(array) + 1]  # type: ignore[assignment]
    content = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return TextColumn(content, places[:-1], places[1:])


def _array_of(column: TextColumn) -> pa.Array:
    """Returns texts as an array, one after another."""
    lengths = column.ends - column.starts
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    if len(lengths) and (column.starts[1:] == column.ends[:-1]).all():
        data = column.data[column.starts[0] : column.ends[-1]]
    else:
        places = np.repeat(column.starts - ends[:-1], lengths) + np.arange(ends[-1])
        data = column.data[places] if len(places) else np.empty(0, np.uint8)
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(lengths), [None, pa.py_buffer(ends), pa.py_buffer(data.tobytes())]
    )


def _integers(distinct: pa.Array, missing: np.ndarray, problems: dict[int, str]) -> Parsed:
    """Returns integers as keys, and notes those beyond int64 by their place."""
    values = distinct.to_numpy(zero_copy_only=False)
    if values.dtype == np.uint64:
        for place in np.flatnonzero(values >> np.uint64(63)).tolist():
            problems[place] = f"expected an integer of 64 bits with sign, got {values[place]}"
    keys = np.ascontiguousarray(values.astype(np.int64)).view(np.uint64)
    return Parsed(keys, np.isin(keys, missing))


def _numbers(field: NumericalField, array: pa.Array, schema: Schema, found: _Found) -> Parsed:
    name, kind = field.column, array.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
        if not _is_text(kind):
            array = array.dictionary_decode()
    if pa.types.is_null(kind):
        return Parsed(np.zeros(len(array)), np.ones(len(array), bool))
    if _is_text(kind):
        return _numbers_of_text(field, array, schema, found)
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        array = array.cast(pa.timestamp("us", getattr(kind, "tz", None)))
        array = pc.divide(array.cast(pa.int64()).cast(pa.float64(), safe=False), 1e6)
    elif pa.types.is_boolean(kind):
        array = array.cast(pa.uint8())
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        raise ValueError(f"column {name!r}: expected numbers, got the type {kind}")
    if pa.types.is_decimal(kind):
        array = array.cast(pa.string())  # read as text is, to the nearest float64
    missing = array.is_null().to_numpy(zero_copy_only=False)
    values = array.cast(pa.float64(), safe=False).fill_null(0.0).to_numpy(zero_copy_only=False)
    missing |= np.isin(values, missing_numbers(schema.missing_values))
    finite = np.isfinite(values)
    if not finite.all():
        bad = ~finite
        if "nan" in (text.lower() for text in schema.missing_values):
            missing, bad = missing | np.isnan(values), np.isinf(values)
        hint = "; missing_values: [nan] takes NaN as missing"
        found.add(
            name,
            bad,
            lambda row: (
                f"expected a finite number, got {values[row]}" + hint * math.isnan(values[row])
            ),
        )
    return Parsed(np.where(finite & ~missing, values, 0.0), missing)


def _numbers_of_text(
    field: NumericalField, array: pa.Array, schema: Schema, found: _Found
) -> Parsed:
    distinct, codes = _distinct(field.column, array, found)
    cells, problems = [*_texts(distinct), ""], dict[int, str]()
    values, missing = numbers_of_texts(field, cells, schema.missing_values, problems)
    found.add_places(field.column, codes, problems, len(distinct))
    return Parsed(values[codes], missing[codes])


def times(field: TimeField, array: pa.Array, found: _Found) -> np.ndarray:
    """Returns microseconds since 1970 in UTC, int64 `[rows]`; missing ones are bad."""
    name, kind = field.column, array.type
    if pa.types.is_dictionary(kind):
        array, kind = array.dictionary_decode(), kind.value_type
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        zone = getattr(kind, "tz", None)
        if zone is None and field.zone is None:
            raise ValueError(
                f"column {name!r}: expected timestamps with a time zone, got the type {kind}; "
                "time: {zone: UTC} in the schema says which it is"
            )
        if pa.types.is_date(kind):
            array = array.cast(pa.timestamp("s" if pa.types.is_date32(kind) else "ms"))
        local = field.zone if zone is None else None
        return _of_counts(name, array.cast(pa.int64()), _unit(array.type), local, found)
    if pa.types.is_integer(kind):
        if field.unit is None:
            raise ValueError(
                f"column {name!r}: expected timestamps, got the type {kind}; time: {{unit: s}} in "
                "the schema says that they are seconds since 1970"
            )
        return _of_counts(name, array, TIME_UNITS[field.unit], None, found)
    if _is_text(kind):
        return _times_of_text(field, array, found)
    raise ValueError(f"column {name!r}: expected timestamps, got the type {kind}")


def _unit(kind: pa.TimestampType) -> int:
    """Returns the microseconds of a unit; 0 of nanoseconds."""
    return TIME_UNITS.get(kind.unit, 0)


def _of_counts(
    name: str, array: pa.Array, unit: int, local: str | None, found: "_Found"
) -> np.ndarray:
    """Returns microseconds of integers that count units of time, in UTC or in a local zone."""
    missing = array.is_null().to_numpy(zero_copy_only=False)
    found.add(name, missing, lambda row: "expected a time, got no value")
    counts = array.fill_null(0).to_numpy(zero_copy_only=False)
    if counts.dtype == np.uint64:
        counts = np.minimum(counts, np.uint64(1 << 62))
    counts = counts.astype(np.int64)
    first, last = (limit // (unit or 1) for limit in _YEARS)  # beyond which are no nanoseconds
    beyond = ((counts < first) | (counts > last)) & bool(unit)
    found.add(name, beyond, lambda row: f"{_EXPECTED_YEAR}, got {array[row]}")
    times = np.where(beyond, 0, counts) * unit if unit else counts // 1000
    return _in_utc(times, local) if local else times


def _in_utc(times: np.ndarray, zone: str) -> np.ndarray:
    """Returns local times in UTC: the first where there are two, the last before where none."""
    array = pc.assume_timezone(
        pa.array(times).cast(pa.timestamp("us")), zone, ambiguous="earliest", nonexistent="earliest"
    )
    return array.cast(pa.int64()).to_numpy(zero_copy_only=False)


def _times_of_text(field: TimeField, array: pa.Array, found: _Found) -> np.ndarray:
    distinct, codes = _distinct(field.column, array, found)
    cells = [*_texts(distinct), ""]
    values, problems = np.zeros(len(cells), np.int64), dict[int, str]()
    for place, cell in enumerate(cells):
        try:
            values[place] = microseconds(cell, field)
        except ValueError as error:
            problems[place] = str(error)
    found.add_places(field.column, codes, problems, len(distinct))
    return values[codes]


def microseconds(text: str, field: TimeField) -> int:
    """Returns a time in ISO 8601, or in `field.unit`, as microseconds since 1970 in UTC.

    Raises:
        ValueError: it is none, or has no zone where the field has none.
    """
    if field.unit is not None and _INTEGER.fullmatch(text):
        count = int(text) * TIME_UNITS[field.unit]
        if not _YEARS[0] <= count <= _YEARS[1]:
            raise ValueError(f"{_EXPECTED_YEAR}, got {_shown(text)}")
        return count
    try:
        time = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        raise ValueError(
            f"expected a time such as 2026-11-20T08:00:00+00:00, got {_shown(text)}"
        ) from None
    if time.tzinfo is None:
        if field.zone is None:
            raise ValueError(
                f"expected a time with a zone, got {_shown(text)}; time: {{zone: UTC}} in the "
                "schema says which it is"
            )
        since = time - datetime(1970, 1, 1)
        return int(_in_utc(np.array([since // timedelta(microseconds=1)]), field.zone)[0])
    return (time - datetime(1970, 1, 1, tzinfo=timezone.utc)) // timedelta(microseconds=1)


def _shown(text: str | bytes) -> str:
    shown = repr(text[:_LONGEST_SHOWN])
    return shown if len(text) <= _LONGEST_SHOWN else f"{shown[:-1]}...{shown[-1]}"


def texts_of(name: str, array: pa.Array) -> tuple[Sequence[str], np.ndarray]:
    """Returns the distinct values of any column as text, and the place of each row's, or -1."""
    distinct, codes = _distinct(name, array)
    return _texts(distinct), codes
