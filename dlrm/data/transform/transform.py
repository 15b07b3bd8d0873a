"""The fitted conversion of rows to a model's inputs, the same in training and serving.

A `Transform` is a `Schema` and the statistics that preprocessing fitted to the training rows; the
logs of Criteo have a built-in schema. It is stored in `transform/` of a dataset, a checkpoint and a
served model; see `stored`. Only numpy and the standard library are imported.
"""

import os
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dlrm.data import layout
from dlrm.data.bags import Ids, Jagged, ListField, ids_in, lists_in
from dlrm.data.schema.logs import is_log, log_schema
from dlrm.data.schema.numbers import Fitted
from dlrm.data.schema.schema import Schema
from dlrm.data.sources import native
from dlrm.data.sources.columns import (
    CachedByKey,
    Coded,
    Parsed,
    TextColumn,
    field_error,
    parse_fields,
)
from dlrm.data.sources.row_error import RowError
from dlrm.data.transform import stored
from dlrm.data.transform.dictionaries import (
    Dictionary,
    arrays_of,
    checksum,
    frequency_limits,
)
from dlrm.data.transform.lookup import IdLookup, hash_u64
from dlrm.data.transform.rows import Column, bags_of
from dlrm.data.transform.values import NUMBERS_IN_TEXT, KnownTexts, is_number_type
from dlrm.files import write_array

if TYPE_CHECKING:
    from dlrm.data.transform.keys import FieldKeys


class Transformed(NamedTuple):
    """Inputs of a model: numbers `[rows, num_numerical]`; for each table ids `[rows]`, or bags."""

    numerical: np.ndarray
    ids: Sequence[Ids]
    clamped: int


class Transform:
    """A fitted transform.

    Args:
        schema: the meaning of the columns.
        numerical: the fitted statistics of each numerical feature, in order.
        dictionaries: dictionary of each entry of `schema.dictionaries()`, in order.
        types: for each of the schema's categorical fields, the type of the training values in
            Arrow; texts that were all numbers are `NUMBERS_IN_TEXT`.
        negatives: the labels that count as 0; None if they are unknown or too many.
        columns: names of all columns of the CSV that it was fitted to; none for other tables.
        keep_negatives: share of the training rows with label 0 that were kept, for which scores
            are corrected; see `dlrm.serving.recalibration.of_sampling_rate`.
        crcs: checksums of each dictionary in files; none if they are unknown.
        directory: the directory of these files; None if it was not loaded.

    Attributes:
        is_log: whether its rows are lines of Criteo's logs, and it has the built-in schema.
        fields: the categorical features, which are the schema's fields and crosses.
        cardinalities: rows of each field's table: id 0, the dictionary's ids, and the buckets.
    """

    def __init__(
        self,
        schema: Schema,
        numerical: Sequence[Fitted],
        dictionaries: Sequence[Dictionary],
        types: Sequence[str],
        negatives: Sequence[str] | None = None,
        columns: Sequence[str] = (),
        keep_negatives: float = 1.0,
        crcs: Sequence[Sequence[str]] = (),
        directory: Path | None = None,
    ) -> None:
        self.types = tuple(types)
        self.schema, self.numerical = schema, list(numerical)
        self.is_log = is_log(schema) and keep_negatives == 1
        self.dictionaries = list(dictionaries)
        self.negatives = None if negatives is None else tuple(negatives)
        self.columns = tuple(columns)
        self.keep_negatives = keep_negatives
        index_of = {
            field.column: index
            for index, fields in enumerate(schema.dictionaries().values())
            for field in fields
        }
        self.fields = schema.categorical_features
        self.dictionary_of = [index_of[field.column] for field in self.fields]
        self.cardinalities = [
            1 + len(self.dictionaries[index]) + field.hash_buckets
            for index, field in zip(self.dictionary_of, self.fields, strict=True)
        ]
        self._lookups: list[IdLookup | None] = [None] * len(self.dictionaries)
        self._encode = [CachedByKey(partial(self._ids_of_keys, i)) for i in range(len(self.fields))]
        self.directory, self._crcs = directory, [list(sums) for sums in crcs]
        self._checked: set[int] = set()  # indices in `_crcs`

    @classmethod
    def from_logs(
        cls,
        num_numerical: int,
        dictionaries: Sequence[np.ndarray],
        numeric_transform: str = "readme",
        frequency_limit: str = "15",
    ) -> "Transform":
        """Returns the transform of logs.

        Args:
            num_numerical: number of integers in a line.
            dictionaries: for each hash, the numbers that have the ids 1, 2, ...
            numeric_transform: transform of the integers, one of `CRITEO_TRANSFORMS`.
            frequency_limit: the limits that they were fitted with; see `frequency_limits`.
        """
        limits = frequency_limits(frequency_limit, num_numerical, len(dictionaries))
        schema = log_schema(num_numerical, limits, numeric_transform)
        made = [Dictionary(keys, type="hexadecimal") for keys in dictionaries]
        return cls(schema, [Fitted()] * num_numerical, made, ["string"] * len(made))

    @classmethod
    def load(cls, directory: str | os.PathLike) -> "Transform":
        """Loads what `save` wrote, and maps the dictionaries without reading them.

        Args:
            directory: `transform/` of a dataset or a checkpoint.

        Raises:
            FileNotFoundError: there is no transform, or one of its files is missing.
            ValueError: a file is damaged; the message names it.
        """
        return stored.load(Path(directory), cls)

    def save(self, directory: str | os.PathLike) -> None:
        """Writes the files of a transform into a directory, created if need be."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        for arrays in self._arrays():
            for name, array in arrays.items():
                write_array(Path(directory, name), array)
        self.save_facts(directory)

    def save_facts(self, directory: str | os.PathLike) -> None:
        """Writes the file that is last: without it there is no transform."""
        stored.save(Path(directory), self, self.checksums())

    def checksums(self) -> list[list[str]]:
        """Returns the checksums of each dictionary; does not read saved files."""
        return self._crcs or [
            [checksum(array) for array in arrays.values()] for arrays in self._arrays()
        ]

    def _arrays(self) -> list[dict[str, np.ndarray]]:
        """Returns the arrays of each dictionary, by file."""
        return [arrays_of(dictionary, i) for i, dictionary in enumerate(self.dictionaries)]

    @property
    def num_numerical(self) -> int:
        """Number of numerical features."""
        return len(self.numerical)

    @property
    def num_categorical(self) -> int:
        """Number of categorical features, a table each."""
        return len(self.fields)

    @cached_property
    def names(self) -> list[str]:
        """Returns the columns of a row: numerical first, weights of lists last, no label."""
        return self.schema.input_columns

    @property
    def lists(self) -> dict[int, ListField]:
        """Returns the tables with several ids per row."""
        fields = {i: field.list_field for i, field in enumerate(self.fields)}
        return {i: field for i, field in fields.items() if field is not None}

    @property
    def longest(self) -> dict[int, int]:
        """Returns the maximum ids per row of each table of lists."""
        return {table: field.max_length for table, field in self.lists.items()}

    @property
    def of_ids(self) -> list[bool]:
        """Returns, for each categorical field, whether its values are ids, of which 0 is one."""
        return [field.type == "id" for field in self.fields]

    @property
    def own_ids(self) -> list[int]:
        """Returns each table's greatest id of a single value; ids of hash buckets follow."""
        return [len(self.dictionaries[index]) for index in self.dictionary_of]

    def apply(
        self,
        numerical: Sequence[Parsed],
        categorical: Sequence[Column],
        dtype: np.dtype = layout.NUMERICAL_DTYPE,
    ) -> Transformed:
        """Transforms rows whose fields are already numbers and keys.

        Args:
            numerical: float64 columns.
            categorical: keys, indices into keys, or lists of these, followed by those of crosses.
            dtype: dtype of the numericals.

        Raises:
            RowError: a numerical is too large for float16, or a list is too long.
        """
        rows = [*numerical, *categorical][0].rows
        numbers = np.empty((rows, self.num_numerical), dtype)
        clamped = 0
        fields = zip(self.schema.numerical, self.numerical, numerical, strict=True)
        for i, (field, fitted, column) in enumerate(fields):
            numbers[:, i], more = field.rule.apply(column, fitted, dtype)
            clamped += more
            finite = np.isfinite(numbers[:, i])
            if not finite.all():
                row = int(finite.argmin())
                raise RowError(row, field.rule.overflow(column.values[row]), field.column)
        ids = [
            self._bags(i, column) if isinstance(column, Jagged) else self.encode(i, column)
            for i, column in enumerate(categorical)
        ]
        return Transformed(numbers, ids, clamped)

    def _bags(self, index: int, column: Jagged) -> Jagged:
        return bags_of(self.fields[index], self.encode(index, column.values), column)

    def encode(self, index: int, column: Parsed | Coded) -> np.ndarray:
        """Returns the ids of a categorical field, in `layout.id_dtype` of its cardinality."""
        return self._encode[index](column)

    def _ids_of_keys(self, index: int, column: Parsed) -> np.ndarray:
        dtype = layout.id_dtype(self.cardinalities[index])
        if self.fields[index].type == "id":
            return column.values.astype(dtype)
        ids = self.lookup(self.dictionary_of[index])(column)
        buckets = self.fields[index].hash_buckets
        if not buckets:
            return ids.astype(dtype, copy=False)
        mixed = hash_u64(column.values) >> np.uint64(32)  # bits that the lookup has mixed
        hashes = hash_u64(mixed)
        first_bucket = 1 + len(self.dictionaries[self.dictionary_of[index]])
        bucket = first_bucket + (((hashes >> np.uint64(32)) * np.uint64(buckets)) >> np.uint64(32))
        outside = (ids == 0) & ~column.missing
        return np.where(outside, bucket.astype(np.int64), ids).astype(dtype)

    def value(self, index: int, id: int) -> str:
        """Returns the value of a categorical field's id; id 0 has none unless values are ids."""
        if not id and self.fields[index].type != "id":
            return "(no id)"
        dictionary = self.dictionaries[self.dictionary_of[index]]
        if id > len(dictionary):
            return f"(bucket {id - len(dictionary) - 1})"
        return str(dictionary.value(id))

    def lookup(self, index: int) -> IdLookup:
        """Returns the lookup of a dictionary, made on first use."""
        lookup = self._lookups[index]
        if lookup is None:
            self.check(index)
            lookup = self._lookups[index] = IdLookup.from_dictionary(self.dictionaries[index].keys)
        return lookup

    def build(self) -> None:
        """Makes the lookups of ids, which otherwise the first rows make."""
        if not self.is_log:
            _ = self.keys
        elif native.served is not None:
            _ = self._native_lookups
        for index, dictionary in enumerate(self.dictionaries):
            if dictionary.type != "id":
                self.lookup(index)

    def use_lookups(self, directory: str | os.PathLike) -> None:
        """Loads lookups from files, so that processes share them; see `IdLookup.load`."""
        self._lookups = [
            None if d.type == "id" else IdLookup.load(directory, i, layout.id_dtype(len(d) + 1))
            for i, d in enumerate(self.dictionaries)
        ]

    def of_fields(self, fields: TextColumn) -> tuple[np.ndarray, np.ndarray]:
        """Transforms rows of logs, in few operations for any number of columns.

        Args:
            fields: the text of each of `names`; `starts` and `ends` are int64 `[columns, rows]`.

        Returns:
            Numericals `[rows, num_numerical]`, and ids `[rows, tables]` in the widest of the
            tables' dtypes.

        Raises:
            RowError: the first row that cannot be read, and its first such column.
        """
        count = self.num_numerical
        if native.served is not None:
            starts, ends = (np.ascontiguousarray(a, np.int64) for a in (fields.starts, fields.ends))
            values, missing, ids, bad_at = native.encode_fields(
                fields.data, starts, ends, count, self._native_lookups
            )
            integers = Parsed(values, missing)
        else:
            integers, hashes, bad_at = parse_fields(fields, count)
            ids = np.empty(hashes.values.shape[::-1], np.int32)
            for i, numbers in enumerate(zip(*hashes, strict=True)):
                ids[:, i] = self.lookup(self.dictionary_of[i])(Parsed(*numbers))
        if bad_at is not None:
            raise field_error(fields, bad_at, count, self.names)
        rules = [field.rule for field in self.schema.numerical[:1]]
        results = rules[0].apply(integers)[0] if rules else integers.values.astype(np.float16)
        dtype = layout.id_dtype(max(self.cardinalities, default=0))
        return np.ascontiguousarray(results.T), ids.astype(dtype, copy=False)

    @cached_property
    def _native_lookups(self) -> native.Lookups:
        return native.Lookups([self.lookup(index) for index in self.dictionary_of])

    @cached_property
    def keys(self) -> list["FieldKeys"]:
        """Returns the keys of each of the schema's categorical fields."""
        from dlrm.data.transform.keys import FieldKeys  # imports Arrow, which logs do not need

        made = []
        for index, field in enumerate(self.schema.categorical):
            known, rows = None, None
            if field.type == "string":
                dictionary = self.dictionaries[self.dictionary_of[index]]
                known = KnownTexts(field.column, dictionary, self.types[index])
            elif field.type == "id":
                rows = self.cardinalities[index]
            only_numbers = self.only_numbers[index]
            markers = self.schema.missing_of(field)
            made.append(FieldKeys(field, markers, known, only_numbers, rows))
            if field.shared is None and rows is None:
                # Others may have a field's markers as values.
                self._check_markers(index, made[-1])
        return made

    @property
    def only_numbers(self) -> list[bool]:
        """Returns, for each of the schema's categorical fields, whether all values were numbers."""
        return [type == NUMBERS_IN_TEXT or is_number_type(type) for type in self.types]

    def _check_markers(self, index: int, keys: "FieldKeys") -> None:
        """Raises ValueError if a field has a value with an id that means "missing"."""
        lookup = self.lookup(self.dictionary_of[index])
        id = lookup(Parsed.present(keys.missing)).max(initial=0)
        if id:
            raise ValueError(
                f"column {keys.field.column!r}: expected missing_values that the training data did "
                f"not have as values, got {self.value(index, int(id))!r}, which has id {id}"
            )

    @property
    def known_labels(self) -> list[str] | None:
        """Returns the labels that preprocessing met; None if they are unknown."""
        positives = self.schema.label.positives
        if not positives or self.negatives is None:
            return None
        return [*positives, *self.negatives]

    def check_all(self) -> None:
        """Compares every file with its checksum, as `check` does."""
        for index in range(len(self._crcs)):
            self.check(index)

    def check(self, index: int) -> None:
        """Compares a dictionary with its checksums; called before its first use.

        Args:
            index: index of the dictionary.

        Raises:
            ValueError: it has changed since it was saved; the message names its file.
        """
        if not self._crcs or index in self._checked:
            return
        for (name, array), crc in zip(
            arrays_of(self.dictionaries[index], index).items(), self._crcs[index], strict=True
        ):
            if (actual := checksum(array)) != crc:
                path = Path(self.directory or "", name)
                raise ValueError(f"{path}: expected CRC-32 {crc}, got {actual}: damaged")
        self._checked.add(index)


def stack_ids(ids: Sequence[np.ndarray | Jagged], rows: int) -> np.ndarray:
    """Returns the ids of all tables, `[rows, tables]`, in the widest of their dtypes.

    Raises:
        ValueError: a table has several ids per row.
    """
    if lists_in(ids):
        raise ValueError("expected one id a row of each table, got a list field")
    return np.stack(list(map(ids_in, ids)), 1) if ids else np.empty((rows, 0), np.int8)
