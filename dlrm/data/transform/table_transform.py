"""The fitted conversion of named columns to a model's inputs, the same in training and serving.

A `TableTransform` is a `Schema` and the statistics that preprocessing fitted to the training rows.
It is stored in `transform/` of a dataset, a checkpoint and a served model:

    table.json          the schema, means, edges of bins, sizes and checksums of the dictionaries
    dictionary_<i>.npy  uint64 keys of dictionary i in the order of their ids
    texts_<i>.npy       for strings, their concatenated bytes
    ends_<i>.npy        the end of each string
    encoded_keys_<i>.npy, encoded_values_<i>.npy
                        of the i-th field with encodings; see `encodings.Encoded`
"""

import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.clicks.bags import Bags, ListField
from dlrm.data.sources.columns import Coded, Parsed, TextColumn
from dlrm.data.transform.cells import BadRowError, FieldKeys, numbers_of_texts
from dlrm.data.transform.crosses import cross_columns
from dlrm.data.transform.dictionaries import Dictionary, arrays_of, checksum
from dlrm.data.transform.encodings import Encoded
from dlrm.data.transform.lists import ListValues, bags_of, lists_of_texts
from dlrm.data.transform.lookup import IdLookup, spread
from dlrm.data.transform.numbers import Fitted, overflow_text, transform_numbers
from dlrm.data.transform.schema import Schema
from dlrm.data.transform.transform import Transformed
from dlrm.data.transform.values import NUMBER, KnownTexts
from dlrm.documents import brief, read_json
from dlrm.files import write_array, write_atomically

FILE = "table.json"
_VERSION = 1
_GREATEST = np.finfo(layout.NUMERICAL_DTYPE).max


class TableTransform:
    """A fitted transform of named columns.

    Args:
        schema: the meaning of the columns.
        numerical: the fitted statistics of each numerical feature, in order.
        dictionaries: dictionary of each entry of `schema.dictionaries()`, in order.
        negatives: the labels that count as 0; None if they are unknown or too many.
        columns: names of all columns of the CSV that it was fitted to; none for other tables.
        keep_negatives: share of the training rows with label 0 that were kept, for which scores
            are corrected; see `dlrm.serving.network.recalibration.of_sampling_rate`.
        encoded: encodings of each field, in the order of `schema.encoded`.
        kinds: kind of the training values of each of the schema's categorical fields: `NUMBER` of
            typed numbers, otherwise `TEXT`. None if texts have no canonical form, as in earlier
            versions.

    Attributes:
        fields: the categorical features, which are the schema's fields and crosses.
        cardinalities: rows of each field's table: id 0, the dictionary's ids, and the buckets.
    """

    def __init__(
        self,
        schema: Schema,
        numerical: Sequence[Fitted],
        dictionaries: Sequence[Dictionary],
        negatives: Sequence[str] | None = None,
        columns: Sequence[str] = (),
        keep_negatives: float = 1.0,
        encoded: Sequence[Encoded] = (),
        kinds: Sequence[str] | None = None,
    ) -> None:
        self.kinds = None if kinds is None else tuple(kinds)
        self.schema, self.numerical = schema, list(numerical)
        self.dictionaries = list(dictionaries)
        self.negatives = None if negatives is None else tuple(negatives)
        self.columns = tuple(columns)
        self.keep_negatives, self.encoded = keep_negatives, list(encoded)
        places = {
            field.column: place
            for place, fields in enumerate(schema.dictionaries().values())
            for field in fields
        }
        self.fields = schema.categorical_features
        self.dictionary_of = [places[field.column] for field in self.fields]
        self.cardinalities = [
            1 + len(self.dictionaries[place]) + field.hash_buckets
            for place, field in zip(self.dictionary_of, self.fields, strict=True)
        ]
        self._lookups: list[IdLookup | None] = [None] * len(self.dictionaries)
        self._earlier: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # keys of a field, and ids
        self._expected: list[tuple[Path, list[str]]] = []  # files, and their checksums
        self._checked: set[int] = set()  # indices in `_expected`

    @property
    def label_known(self) -> bool:
        """Returns whether the label is known, which early transforms of CSV did not keep."""
        return self.schema.label.column != _NO_LABEL

    def checksums(self) -> list[list[str]]:
        """Returns the checksums of each dictionary, then encodings; does not read saved files."""
        if self._expected:
            return [crcs for _, crcs in self._expected]
        return [[checksum(array) for array in arrays.values()] for arrays in self._arrays()]

    def _arrays(self) -> list[dict[str, np.ndarray]]:
        """Returns the arrays of each dictionary, then of each field with encodings, by file."""
        return [self._arrays_at(i) for i in range(len(self.dictionaries) + len(self.encoded))]

    def _arrays_at(self, place: int) -> dict[str, np.ndarray]:
        """Returns the arrays of a dictionary or a field with encodings, by file; see `check`."""
        i = place - len(self.dictionaries)
        if i < 0:
            i, arrays = place, arrays_of(self.dictionaries[place])
        else:
            arrays = self.encoded[i].arrays
        return {f"{name}_{i}.npy": one for name, one in arrays.items()}

    @property
    def num_numerical(self) -> int:
        """Number of numerical features."""
        return len(self.numerical)

    @property
    def num_categorical(self) -> int:
        """Number of categorical features, a table each."""
        return len(self.fields)

    @property
    def names(self) -> list[str]:
        """Returns the columns of a row: numerical first, weights of lists last, no label."""
        return self.schema.input_columns

    @property
    def lists(self) -> dict[int, ListField]:
        """Returns the tables with several ids per row."""
        found = {i: field.list_field for i, field in enumerate(self.fields)}
        return {i: one for i, one in found.items() if one is not None}

    @property
    def own_ids(self) -> list[int]:
        """Returns each table's greatest id of a single value; ids of hash buckets follow."""
        return [len(self.dictionaries[place]) for place in self.dictionary_of]

    def apply(
        self,
        numerical: Sequence[Parsed],
        categorical: Sequence[Parsed | Coded | ListValues],
        dtype: np.dtype = layout.NUMERICAL_DTYPE,
        hashes: np.ndarray | None = None,
    ) -> Transformed:
        """Transforms rows whose fields are already numbers and keys.

        Args:
            numerical: float64 columns.
            categorical: keys, indices into keys, or lists of these, followed by those of crosses.
            dtype: dtype of the numericals.
            hashes: hashes of training rows, which select their folds; None for other rows.

        Raises:
            BadRowError: a numerical is too large for float16, or a list is too long.
        """
        rows = _num_rows([*numerical, *categorical][0])
        numbers = np.empty((rows, self.num_numerical), dtype)
        clamped = 0
        encodings = self._encodings(categorical, hashes)
        columns, first = [*numerical, *encodings], len(numerical)
        rules = zip(self.schema.numerical_features, self.numerical, columns, strict=True)
        for i, (rule, fitted, column) in enumerate(rules):
            numbers[:, i], raised = transform_numbers(rule, fitted, column)
            clamped += raised
            if i >= first:
                np.clip(numbers[:, i], -_GREATEST, _GREATEST, out=numbers[:, i])
                continue
            finite = np.isfinite(numbers[:, i])
            if not finite.all():
                row = int(finite.argmin())
                problem = overflow_text(column.values[row], rule.transform)
                raise BadRowError(row, rule.column, problem)
        ids = [
            self._bags(i, column) if isinstance(column, ListValues) else self.encode(i, column)
            for i, column in enumerate(categorical)
        ]
        return Transformed(numbers, ids, clamped)

    def _encodings(
        self, categorical: Sequence[Parsed | Coded | ListValues], hashes: np.ndarray | None
    ) -> list[Parsed]:
        """Returns the values of the encodings, before the transforms of numerical fields."""
        found: list[Parsed] = []
        for place, (index, field) in enumerate(self.schema.encoded):
            self.check(len(self.dictionaries) + place)
            column = categorical[index]
            assert not isinstance(column, ListValues), "schemas refuse encodings of lists"
            numbers = self.encoded[place](field.encodings, column, hashes)
            found += [Parsed(one, np.zeros(len(one), bool)) for one in numbers]
        return found

    def _bags(self, index: int, column: ListValues) -> Bags:
        return bags_of(self.fields[index], self.encode(index, column.values), column)

    def encode(self, index: int, column: Parsed | Coded) -> np.ndarray:
        """Returns the ids of a categorical field, in `layout.id_dtype` of its cardinality."""
        if isinstance(column, Coded):
            keys, ids = self._earlier.get(index, (None, None))
            if keys is not column.keys or ids is None:  # batches mostly have the same values
                present = np.zeros(len(column.keys), bool)
                found = self.encode(index, Parsed(column.keys, present))
                ids = np.append(found, found.dtype.type(0))  # of -1
                self._earlier[index] = column.keys, ids
            return ids.take(column.codes, mode="wrap")  # twice as fast as with checks
        dtype = layout.id_dtype(self.cardinalities[index])
        ids = self.lookup(self.dictionary_of[index])(column)
        buckets = self.fields[index].hash_buckets
        if not buckets:
            return ids.astype(dtype, copy=False)
        hashes = spread(spread(column.values) >> np.uint64(32))  # bits that the lookup has mixed
        own = 1 + len(self.dictionaries[self.dictionary_of[index]])
        bucket = own + (((hashes >> np.uint64(32)) * np.uint64(buckets)) >> np.uint64(32))
        outside = (ids == 0) & ~column.missing
        return np.where(outside, bucket.astype(np.int64), ids).astype(dtype)

    def value(self, index: int, id: int) -> str:
        """Returns the value of a categorical field's id, which is above 0."""
        dictionary = self.dictionaries[self.dictionary_of[index]]
        if id > len(dictionary):
            return f"(bucket {id - len(dictionary) - 1})"
        return str(dictionary.value(id))

    def lookup(self, place: int) -> IdLookup:
        """Returns the lookup of a dictionary, made on first use."""
        found = self._lookups[place]
        if found is None:
            self.check(place)
            found = self._lookups[place] = IdLookup.of(self.dictionaries[place].keys)
        return found

    def use_lookups(self, directory: str | os.PathLike) -> None:
        """Loads lookups from files, so that processes share them; see `IdLookup.load`.

        It loads the encodings of training rows as well.
        """
        self._lookups = [
            IdLookup.load(directory, i, layout.id_dtype(len(one) + 1))
            for i, one in enumerate(self.dictionaries)
        ]
        for place, encoded in enumerate(self.encoded):
            encoded.use_lookup(directory, len(self.dictionaries) + place, place)

    def of_texts(self, columns: Sequence[TextColumn]) -> Transformed:
        """Transforms rows, given as the text of each of `names`.

        Raises:
            BadRowError: the first cell, by column, that cannot be read.
        """
        by_name = dict(zip(self.names, columns, strict=True))
        missing_of = self.schema.missing_of
        numerical = [
            numbers_of_texts(field, _strings(by_name[field.column]), missing_of(field))
            for field in self.schema.numerical
        ]
        categorical: list[Parsed | Coded | ListValues] = []
        for field, keys in zip(self.schema.categorical, self.keys, strict=True):
            column = by_name[field.column]
            if field.max_length is None:
                categorical.append(keys.of_texts(column)[0])
                continue
            weights = _strings(by_name[field.weights]) if field.weights else None
            lists = lists_of_texts(keys, _strings(column), weights, missing_of(field))
            categorical.append(lists)
        categorical += cross_columns(self.schema, categorical)
        return self.apply(numerical, categorical)

    @cached_property
    def keys(self) -> list[FieldKeys]:
        """Returns the keys of each of the schema's categorical fields."""
        made = []
        for place, field in enumerate(self.schema.categorical):
            known = None
            if self.kinds is not None and field.type == "string":
                dictionary = self.dictionaries[self.dictionary_of[place]]
                known = KnownTexts(field.column, dictionary, self.kinds[place] == NUMBER)
            plain = self.kinds is None
            made.append(FieldKeys(field, self.schema.missing_of(field), known, plain))
            if field.dictionary is None:  # others may have a field's markers as values
                self._check_markers(place, made[-1])
        return made

    def _check_markers(self, place: int, keys: FieldKeys) -> None:
        """Raises ValueError if a field has a value with an id that means "missing"."""
        markers = keys.missing if keys.field.type == "string" else keys.missing_integers
        lookup = self.lookup(self.dictionary_of[place])
        found = lookup(Parsed(markers, np.zeros(len(markers), bool))).max(initial=0)
        if found:
            raise ValueError(
                f"column {keys.field.column!r}: expected missing_values that the training data did "
                f"not have as values, got {self.value(place, int(found))!r}, which has id {found}"
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
        for place in range(len(self._expected)):
            self.check(place)

    def check(self, place: int) -> None:
        """Compares a dictionary with its checksums; called before its first use.

        Args:
            place: index of the dictionary; the fields with encodings follow the dictionaries.

        Raises:
            ValueError: it has changed since it was saved; the message names its file.
        """
        if not self._expected or place in self._checked:
            return
        directory, expected = self._expected[place]
        for (name, array), crc in zip(self._arrays_at(place).items(), expected, strict=True):
            if (found := checksum(array)) != crc:
                raise ValueError(f"{directory / name}: expected CRC-32 {crc}, got {found}: damaged")
        self._checked.add(place)

    def save(self, directory: str | os.PathLike) -> None:
        """Writes the files of a transform into a directory, created if need be."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        for arrays in self._arrays():
            for name, array in arrays.items():
                write_array(Path(directory, name), array)
        save_facts(directory, self)

    @staticmethod
    def is_at(directory: str | os.PathLike) -> bool:
        """Returns whether a directory has such a transform, and not that of a log or none."""
        return any(Path(directory, name).is_file() for name in (FILE, _EARLIER))

    @classmethod
    def load(cls, directory: str | os.PathLike) -> "TableTransform":
        """Loads what `save` wrote, or the transform of a CSV of earlier versions.

        Raises:
            FileNotFoundError: there is no such transform.
            ValueError: a file differs from the form that `save` writes; the message names it.
        """
        directory = Path(directory)
        path = directory / FILE
        if not path.is_file() and (directory / _EARLIER).is_file():
            return _of_earlier(directory / _EARLIER)
        facts = read_json(path)
        try:
            if facts["version"] != _VERSION:
                raise ValueError(f"expected version {_VERSION}, got {brief(facts['version'])}")
            schema = Schema.of_facts(facts["schema"])
            numerical = [_fitted(one) for one in facts["numerical"]]
            sizes = [one["size"] for one in facts["dictionaries"]]
            crcs = [one["crc32"] for one in facts["dictionaries"]]
            kinds = [fields[0].type for fields in schema.dictionaries().values()]
            dictionaries = [
                Dictionary.load(directory, place, size, kind)
                for place, (size, kind) in enumerate(zip(sizes, kinds, strict=True))
            ]
            if len(numerical) != len(schema.numerical_features):
                expected = len(schema.numerical_features)
                raise ValueError(f"{len(numerical)} fitted of {expected} numbers")
            of_encodings = facts.get("encodings", [])
            encoded = [
                Encoded.load(directory, place, one["size"], len(field.encodings))
                for place, (one, (_, field)) in enumerate(
                    zip(of_encodings, schema.encoded, strict=True)
                )
            ]
            crcs += [one["crc32"] for one in of_encodings]
            columns = texts_in(facts["columns"])
            kept = float(facts["keep_negatives"])
            negatives = facts["negatives"]
            of_values = texts_in(facts["kinds"]) if "kinds" in facts else None
            if of_values is not None and len(of_values) != len(schema.categorical):
                raise ValueError(f"{len(of_values)} kinds of {len(schema.categorical)} fields")
            own = numerical, dictionaries, negatives, columns, kept, encoded, of_values
            transform = cls(schema, *own)
            for arrays, crc in zip(transform._arrays(), crcs, strict=True):
                if len(crc) != len(arrays):
                    raise ValueError(f"expected {len(arrays)} checksums, got {brief(crc)}")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            message = str(error)
            if message.startswith(str(directory)):
                raise
            raise ValueError(f"{path}: not a fitted transform ({brief(error)})") from error
        transform._expected = [(directory, list(crc)) for crc in crcs]
        return transform


def stack_ids(ids: Sequence[np.ndarray | Bags], rows: int) -> np.ndarray:
    """Returns the ids of all tables, `[rows, tables]`, in the widest of their dtypes.

    Raises:
        ValueError: a table has several ids per row.
    """
    columns = [column for column in ids if not isinstance(column, Bags)]
    if len(columns) < len(ids):
        raise ValueError("expected one id a row of each table, got a list field")
    return np.stack(columns, 1) if columns else np.empty((rows, 0), np.int8)


def _num_rows(column: Parsed | Coded | ListValues) -> int:
    if isinstance(column, ListValues):
        return len(column.lengths)
    return len(column.codes if isinstance(column, Coded) else column.values)


def _fitted(facts: dict[str, Any]) -> Fitted:
    """Returns the statistics of a numerical field from the form of `save_facts`."""
    mean, deviation = float.fromhex(facts["mean"]), float.fromhex(facts["deviation"])
    edges, shares = (
        np.array([float.fromhex(value) for value in facts[name]]) for name in ("edges", "shares")
    )
    finite = np.isfinite([mean, deviation]).all() and np.isfinite(edges).all()
    if not finite or deviation <= 0 or (np.diff(edges) <= 0).any() or len(edges) != len(shares):
        raise ValueError(f"expected finite numbers, edges ascending, got {brief(facts)}")
    return Fitted(mean, deviation, edges, shares)


def save_facts(directory: str | os.PathLike, transform: TableTransform) -> None:
    """Writes `table.json`, after the dictionaries: without it there is no transform."""
    checksums = [[checksum(array) for array in arrays.values()] for arrays in transform._arrays()]
    of_encodings = checksums[len(transform.dictionaries) :]
    facts = {
        "version": _VERSION,
        "schema": transform.schema.facts(),
        "numerical": [
            {
                "mean": one.mean.hex(),
                "deviation": one.deviation.hex(),
                "edges": [edge.hex() for edge in one.edges.tolist()],
                "shares": [share.hex() for share in one.shares.tolist()],
            }
            for one in transform.numerical
        ],
        "dictionaries": [
            {"size": len(one), "crc32": crc}
            for one, crc in zip(transform.dictionaries, checksums, strict=False)
        ],
        "negatives": None if transform.negatives is None else list(transform.negatives),
        "columns": list(transform.columns),
        "keep_negatives": transform.keep_negatives,
    }
    if transform.kinds is not None:
        facts["kinds"] = list(transform.kinds)
    if transform.encoded:
        facts["encodings"] = [
            {"size": len(one.keys), "crc32": crc}
            for one, crc in zip(transform.encoded, of_encodings, strict=True)
        ]
    write_atomically(Path(directory) / FILE, json.dumps(facts, indent=1, ensure_ascii=False) + "\n")


def texts_in(values: Any) -> tuple[str, ...]:
    """Returns a list of texts as a tuple, or raises ValueError."""
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"expected a list of texts as columns, got {brief(values)}")
    return tuple(values)


def _strings(column: TextColumn) -> list[str]:
    whole = column.data.tobytes()
    ends = zip(column.starts.tolist(), column.ends.tolist(), strict=True)
    return [whole[start:end].decode("utf-8", "replace") for start, end in ends]


# Transforms of versions with a separate class for CSV.

_EARLIER = "csv.json"
_EARLIER_BYTES = 1 << 30
_NO_LABEL = " no label"  # no column is called so: names have no blanks around them


def _of_earlier(path: Path) -> TableTransform:
    """Reads `csv.json`, in which dictionaries were lists of texts."""
    try:
        facts = read_json(path, max_bytes=_EARLIER_BYTES)
        if facts["version"] != 1:
            raise ValueError(f"expected version 1, got {brief(facts['version'])}")
        rule = facts["numeric_transform"]
        values: Mapping[str, list[str]] = facts["dictionaries"]
        negatives, positive = facts.get("negatives"), facts.get("positive")
        schema = Schema.of_facts(
            {
                "label": {
                    "column": facts.get("label") or _NO_LABEL,
                    "positive": positive,
                    "any_negative": positive is not None,
                },
                "numerical": [{"column": name, "transform": rule} for name in facts["scales"]],
                "categorical": list(values),
                "missing_values": facts["missing_values"],
            }
        )
        fitted = [Fitted(float(mean), float(scale)) for mean, scale in facts["scales"].values()]
        dictionaries = [Dictionary.of_texts(texts) for texts in values.values()]
        columns = texts_in(facts.get("columns", []))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a fitted transform ({brief(error)})") from error
    return TableTransform(schema, fitted, dictionaries, negatives, columns)
