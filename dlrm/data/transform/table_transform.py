"""From named columns to a model's inputs, as it was fitted: training and serving apply the same.

A `TableTransform` is a `Schema` and what preprocessing fitted to the training rows. It lies in
`transform/` of a dataset, a checkpoint and a served model:

    table.json          the schema, means, edges of bins, sizes and checksums of the dictionaries
    dictionary_<i>.npy  uint64 keys of dictionary i in the order of their ids
    texts_<i>.npy       for strings, their bytes, one after another
    ends_<i>.npy        where each of them ends
"""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.sources.columns import Coded, Parsed, TextColumn, hash_texts, stripped
from dlrm.data.sources.csv_cells import BadCellError, Parser, label_parser, number_parser
from dlrm.data.transform.dictionaries import checksum, dictionary_path, load_dictionary
from dlrm.data.transform.lookup import IdLookup, spread
from dlrm.data.transform.numbers import Fitted, transform_numbers
from dlrm.data.transform.schema import CategoricalField, NumericalField, Schema
from dlrm.data.transform.transform import Transformed
from dlrm.documents import brief, read_json
from dlrm.files import write_atomically

FILE = "table.json"
_VERSION = 1
_LONGEST_SHOWN = 64  # characters of a cell in a message
_MOST_LABELS = 4  # that an error names


class BadRowError(ValueError):
    """A cell that cannot be transformed.

    Attributes:
        row, column: where it is.
        problem: what was expected and what came.
    """

    def __init__(self, row: int, column: str, problem: str) -> None:
        super().__init__(f"column {column}, row {row}: {problem}")
        self.row, self.column, self.problem = row, column, problem


@dataclass(frozen=True)
class Dictionary:
    """The values of a field, or of some that share it, that have ids.

    Attributes:
        keys: uint64, of the values with the ids 1, 2, ...: integers as they are, or hashes of
            texts.
        texts: uint8, the texts one after another; None of integers.
        ends: int64, where each text ends.
    """

    keys: np.ndarray
    texts: np.ndarray | None = None
    ends: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def value(self, id: int) -> str | int:
        """Returns the value that has an id."""
        if self.texts is None or self.ends is None:
            return int(self.keys[id - 1 : id].astype(np.uint64).view(np.int64)[0])
        begin = int(self.ends[id - 2]) if id > 1 else 0
        return self.texts[begin : int(self.ends[id - 1])].tobytes().decode()

    def values(self) -> list[str | int]:
        """Returns all values in the order of their ids."""
        return [self.value(id) for id in range(1, len(self) + 1)]

    @classmethod
    def load(cls, directory: Path, place: int, size: int, kind: str) -> "Dictionary":
        """Maps the files of a dictionary.

        Args:
            directory: of the transform.
            place: of the dictionary in it.
            size: how many values it has.
            kind: the type of its fields.

        Raises:
            FileNotFoundError, ValueError: a file is missing or damaged; it is named.
        """
        keys = load_dictionary(dictionary_path(directory, place), size)
        if kind != "string":
            return cls(keys)
        ends = _load_array(directory / f"ends_{place}.npy", np.dtype(np.int64))
        texts = _load_array(directory / f"texts_{place}.npy", np.dtype(np.uint8))
        if len(ends) != size or (size and (ends[-1] != len(texts) or ends[0] < 0)):
            raise ValueError(
                f"{directory / f'ends_{place}.npy'}: expected {size} ends, the last "
                f"{len(texts)}, got {len(ends)}"
            )
        return cls(keys, texts, ends)

    @classmethod
    def of_texts(cls, texts: Sequence[str]) -> "Dictionary":
        """Makes a dictionary of texts, in the order of their ids."""
        encoded = [text.encode() for text in texts]
        column = TextColumn.from_bytes(encoded)
        data = np.frombuffer(b"".join(encoded), np.uint8)
        return cls(hash_texts(column), data, np.asarray(column.ends, np.int64))


class TableTransform:
    """A fitted transform of named columns.

    Args:
        schema: what the columns mean.
        numerical: what was fitted to each numerical field, in their order.
        dictionaries: of each entry of `schema.dictionaries()`, in their order.
        negatives: the labels that count as 0; None where they are not known or too many.
        columns: names of all columns of the CSV that it was fitted to; none of other tables.
        keep_negatives: share of the training rows with label 0 that were kept, for which scores
            are corrected; see `dlrm.serving.recalibration.of_sampling_rate`.

    Attributes:
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
    ) -> None:
        self.schema, self.numerical = schema, list(numerical)
        self.dictionaries = list(dictionaries)
        self.negatives = None if negatives is None else tuple(negatives)
        self.columns = tuple(columns)
        self.keep_negatives = keep_negatives
        places = {
            field.column: place
            for place, fields in enumerate(schema.dictionaries().values())
            for field in fields
        }
        self.dictionary_of = [places[field.column] for field in schema.categorical]
        self.cardinalities = [
            1 + len(self.dictionaries[place]) + field.hash_buckets
            for place, field in zip(self.dictionary_of, schema.categorical, strict=True)
        ]
        self._lookups: list[IdLookup | None] = [None] * len(self.dictionaries)
        self._earlier: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # keys of a field, and ids
        self._expected: list[tuple[Path, list[str]]] = []  # files, and their checksums

    @property
    def label_known(self) -> bool:
        """Whether the label is known, which early transforms of CSV did not keep."""
        return self.schema.label.column != _NO_LABEL

    def checksums(self) -> list[list[str]]:
        """Returns the checksums of each dictionary, of which those that were saved are not read."""
        if self._expected:
            return [crcs for _, crcs in self._expected]
        return [[checksum(a) for a in _arrays(one).values()] for one in self.dictionaries]

    @property
    def num_numerical(self) -> int:
        """Numerical fields."""
        return len(self.schema.numerical)

    @property
    def num_categorical(self) -> int:
        """Categorical fields, a table each."""
        return len(self.schema.categorical)

    @property
    def names(self) -> list[str]:
        """The columns of a row: numerical ones first, no label."""
        return self.schema.numerical_names + self.schema.categorical_names

    @property
    def own_ids(self) -> list[int]:
        """The greatest id of each table that stands for one value; hash buckets come after it."""
        return [len(self.dictionaries[place]) for place in self.dictionary_of]

    def apply(
        self,
        numerical: Sequence[Parsed],
        categorical: Sequence[Parsed | Coded],
        dtype: np.dtype = layout.NUMERICAL_DTYPE,
    ) -> Transformed:
        """Transforms rows whose fields are numbers and keys already.

        Args:
            numerical: float64 columns.
            categorical: keys, or places in keys.
            dtype: of the numericals.

        Raises:
            BadRowError: a numerical is too large for float16.
        """
        columns = [*numerical, *categorical]
        first = columns[0]
        rows = len(first.codes if isinstance(first, Coded) else first.values)
        numbers = np.empty((rows, self.num_numerical), dtype)
        clamped = 0
        rules = zip(self.schema.numerical, self.numerical, numerical, strict=True)
        for i, (rule, fitted, column) in enumerate(rules):
            numbers[:, i], raised = transform_numbers(rule, fitted, column)
            clamped += raised
            finite = np.isfinite(numbers[:, i])
            if not finite.all():
                row = int(finite.argmin())
                problem = overflow_text(column.values[row], rule.transform)
                raise BadRowError(row, rule.column, problem)
        ids = [self.encode(i, column) for i, column in enumerate(categorical)]
        return Transformed(numbers, ids, clamped)

    def encode(self, index: int, column: Parsed | Coded) -> np.ndarray:
        """Returns the ids of a categorical field, in `layout.id_dtype` of its cardinality."""
        if isinstance(column, Coded):
            keys, ids = self._earlier.get(index, (None, None))
            if keys is not column.keys or ids is None:  # batches mostly have the same values
                present = np.zeros(len(column.keys), bool)
                found = self.encode(index, Parsed(column.keys, present))
                ids = np.append(found, found.dtype.type(0))  # of -1
                self._earlier[index] = column.keys, ids
            return ids[column.codes]
        dtype = layout.id_dtype(self.cardinalities[index])
        ids = self.lookup(self.dictionary_of[index])(column)
        buckets = self.schema.categorical[index].hash_buckets
        if not buckets:
            return ids.astype(dtype, copy=False)
        hashes = spread(spread(column.values) >> np.uint64(32))  # of bits that the lookup mixed
        own = 1 + len(self.dictionaries[self.dictionary_of[index]])
        bucket = own + (((hashes >> np.uint64(32)) * np.uint64(buckets)) >> np.uint64(32))
        outside = (ids == 0) & ~column.missing
        return np.where(outside, bucket.astype(np.int64), ids).astype(dtype)

    def value(self, index: int, id: int) -> str:
        """Returns the value that an id of a categorical field stands for, above 0."""
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
        """Takes lookups from files, so that processes share them; see `IdLookup.load`."""
        self._lookups = [
            IdLookup.load(directory, i, layout.id_dtype(len(one) + 1))
            for i, one in enumerate(self.dictionaries)
        ]

    def of_texts(self, columns: Sequence[TextColumn]) -> tuple[np.ndarray, np.ndarray]:
        """Transforms rows, given as the text of each of `names`.

        Returns:
            Numericals `[rows, num_numerical]`, and ids `[rows, tables]`.

        Raises:
            BadRowError: the first cell, by column, that cannot be read.
        """
        numerical = []
        for field, column in zip(self.schema.numerical, columns, strict=False):
            numerical.append(numbers_of_texts(field, _strings(column), self.schema.missing_values))
        categorical = [
            keys_of_texts(field, column, self.missing_keys)
            for field, column in zip(
                self.schema.categorical, columns[self.num_numerical :], strict=True
            )
        ]
        numbers, ids, _ = self.apply(numerical, categorical)
        return numbers, stack_ids(ids, len(numbers))

    @cached_property
    def missing_keys(self) -> np.ndarray:
        """The hashes of the texts that mean "missing"."""
        return missing_keys(self.schema)

    @property
    def known_labels(self) -> list[str] | None:
        """The labels that preprocessing met; None where they are not known."""
        positive = self.schema.label.positive
        if positive is None or self.negatives is None:
            return None
        return [positive, *self.negatives]

    def check(self, place: int) -> None:
        """Compares a dictionary with its checksums, as is done before its first use.

        Raises:
            ValueError: it is not what was saved; its file is named.
        """
        if not self._expected:
            return
        directory, expected = self._expected[place]
        arrays = _arrays(self.dictionaries[place])
        for (name, array), crc in zip(arrays.items(), expected, strict=True):
            if (found := checksum(array)) != crc:
                path = directory / f"{name}_{place}.npy"
                raise ValueError(f"{path}: expected CRC-32 {crc}, got {found}: damaged")

    def save(self, directory: str | os.PathLike) -> None:
        """Writes the files of a transform into a directory, created if need be."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        for place, dictionary in enumerate(self.dictionaries):
            for name, array in _arrays(dictionary).items():
                np.save(Path(directory, f"{name}_{place}.npy"), array, allow_pickle=False)
        save_facts(directory, self)

    @staticmethod
    def is_at(directory: str | os.PathLike) -> bool:
        """Whether a directory has such a transform, rather than that of a log or none."""
        return any(Path(directory, name).is_file() for name in (FILE, _EARLIER))

    @classmethod
    def load(cls, directory: str | os.PathLike) -> "TableTransform":
        """Reads what `save` wrote, or the transform of a CSV of earlier versions.

        Raises:
            FileNotFoundError: there is no such transform.
            ValueError: a file is not what `save` writes; it is named.
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
            if len(numerical) != len(schema.numerical):
                raise ValueError(f"{len(numerical)} fitted of {len(schema.numerical)} numbers")
            for one, crc in zip(dictionaries, crcs, strict=True):
                if len(crc) != len(_arrays(one)):
                    raise ValueError(f"expected {len(_arrays(one))} checksums, got {brief(crc)}")
            columns = texts_in(facts["columns"])
            kept = float(facts["keep_negatives"])
            transform = cls(schema, numerical, dictionaries, facts["negatives"], columns, kept)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            message = str(error)
            if message.startswith(str(directory)):
                raise
            raise ValueError(f"{path}: not a fitted transform ({brief(error)})") from error
        transform._expected = [(directory, list(crc)) for crc in crcs]
        return transform


def stack_ids(ids: Sequence[np.ndarray], rows: int) -> np.ndarray:
    """Returns the ids of all tables, `[rows, tables]`, of the widest of their types."""
    return np.stack(ids, 1) if len(ids) else np.empty((rows, 0), np.int8)


def _fitted(facts: dict[str, Any]) -> Fitted:
    """Reads what `save_facts` says of a numerical field."""
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
            {"size": len(one), "crc32": [checksum(array) for array in _arrays(one).values()]}
            for one in transform.dictionaries
        ],
        "negatives": None if transform.negatives is None else list(transform.negatives),
        "columns": list(transform.columns),
        "keep_negatives": transform.keep_negatives,
    }
    write_atomically(Path(directory) / FILE, json.dumps(facts, indent=1, ensure_ascii=False) + "\n")


def texts_in(values: Any) -> tuple[str, ...]:
    """Returns a list of texts as a tuple, or raises ValueError."""
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"expected a list of texts as columns, got {brief(values)}")
    return tuple(values)


def _arrays(dictionary: Dictionary) -> dict[str, np.ndarray]:
    """The arrays of a dictionary, by the names of their files."""
    arrays = {"dictionary": dictionary.keys}
    if dictionary.texts is not None and dictionary.ends is not None:
        arrays |= {"texts": dictionary.texts, "ends": dictionary.ends}
    return arrays


def _load_array(path: Path, dtype: np.dtype) -> np.ndarray:
    try:
        empty = path.stat().st_size <= 128  # a header alone, which cannot be mapped
        array = np.load(path, mmap_mode=None if empty else "r", allow_pickle=False)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path}: missing") from error
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path}: not a dictionary ({error})") from error
    if array.ndim != 1 or array.dtype != dtype:
        raise ValueError(
            f"{path}: expected one dimension of type {dtype}, got shape {list(array.shape)} of "
            f"type {array.dtype}"
        )
    return array


# What the text of a cell means, in training and serving alike.


def missing_keys(schema: Schema) -> np.ndarray:
    """Returns the hashes of the texts that mean "missing"."""
    texts = [text.encode() for text in schema.missing_values]
    texts += [b"nan"] * ("nan" in map(str.lower, schema.missing_values))  # the text of NaN
    return hash_texts(TextColumn.from_bytes(texts))


def missing_integers(schema: Schema) -> np.ndarray:
    """Returns the keys of the integers whose text means "missing"."""
    found = []
    for text in schema.missing_values:
        with suppress(ValueError):
            found.append(_integer(text.encode()))
    found = [value for value in found if str(value) in schema.missing_values]
    return np.array(found, np.int64).view(np.uint64)


def missing_numbers(missing_values: Collection[str]) -> np.ndarray:
    """Returns the numbers that mean "missing": -999 is one however it is written."""
    parse, found = number_parser(()), []
    for text in missing_values:
        with suppress(BadCellError):
            found += parse([text]).tolist()
    return np.array(found, np.float64)


def keys_of_texts(
    field: CategoricalField,
    column: TextColumn,
    missing: np.ndarray,
    problems: dict[int, str] | None = None,
) -> Parsed:
    """Returns the keys of texts.

    Args:
        field: of strings or integers.
        column: the texts; blanks around them do not count.
        missing: hashes of texts that mean "missing", besides empty ones.
        problems: gets what is wrong with a text, by row; None refuses the first.

    Raises:
        BadRowError: the first text that is no integer, of a field of integers.
    """
    column = stripped(column)
    hashes = hash_texts(column)
    absent = column.ends == column.starts
    if len(missing):
        absent |= np.isin(hashes, missing)
    if field.type == "string":
        return Parsed(np.where(absent, np.uint64(0), hashes), absent)
    keys = np.zeros(len(hashes), np.int64)
    for row in np.flatnonzero(~absent).tolist():
        text = column.data[column.starts[row] : column.ends[row]].tobytes()
        try:
            keys[row] = _integer(text)
        except ValueError as error:
            if problems is None:
                raise BadRowError(row, field.column, str(error)) from None
            problems[row] = str(error)
    return Parsed(keys.view(np.uint64), absent)


def _integer(text: bytes) -> int:
    whole, point, rest = text.partition(b".")
    if point and not rest.strip(b"0"):  # as floats of whole numbers are written: 5.0
        text = whole
    digits = text[1:] if text[:1] in (b"-", b"+") else text
    if digits.isdigit() and len(digits) < 40:
        value = int(text)
        if -(1 << 63) <= value < 1 << 63:
            return value
    shown = _shortened(text.decode("utf-8", "backslashreplace"))
    raise ValueError(f"expected an integer of 64 bits, got {shown!r}")


def numbers_of_texts(
    field: NumericalField,
    cells: Sequence[str],
    missing_values: Collection[str],
    problems: dict[int, str] | None = None,
) -> Parsed:
    """Returns the numbers of cells, 0 where they are missing.

    Args:
        field: whose cells.
        cells: the text; blanks around a number do not count.
        missing_values: texts that mean "missing", besides empty ones.
        problems: gets what is wrong with a cell, by row; None refuses the first.

    Raises:
        BadRowError: the first cell that is no finite number.
    """
    cells, parse = [cell.strip() for cell in cells], number_parser(missing_values)
    try:
        values = parse(cells)
    except BadCellError as error:
        if problems is None:
            problem = _problem(error.index, error.expected_here, cells)
            raise BadRowError(error.index, field.column, problem) from None
        values = np.full(len(cells), np.nan)
        for row, cell in enumerate(cells):
            try:
                values[row] = parse([cell])[0]
            except BadCellError as bad:
                problems[row] = _problem(0, bad.expected, [cell])
    missing = np.isnan(values) | np.isin(values, missing_numbers(missing_values))
    return Parsed(np.where(missing, 0.0, values), missing)


def _problem(index: int, expected: str, cells: Sequence[str]) -> str:
    return f"expected {expected}, got {_shortened(cells[index])!r}"


def label_cells(schema: Schema, known: Collection[str] | None) -> Parser:
    """Returns what reads the text of labels.

    Args:
        schema: whose label.
        known: all values that are expected; None takes any.
    """
    label, missing = schema.label, {"", *schema.missing_values}
    if label.positive is None:
        return _zero_or_one

    def parse(cells: Sequence[str]) -> np.ndarray:
        for index, cell in enumerate(cells):
            if cell in missing:
                raise BadCellError(index, "a label that is not missing")
            if known is not None and cell not in known:
                shown = " or ".join(map(repr, list(known)[:_MOST_LABELS]))
                raise BadCellError(index, shown + (", ..." if len(known) > _MOST_LABELS else ""))
        return np.array([cell == label.positive for cell in cells], layout.LABEL_DTYPE)

    return parse


def _zero_or_one(cells: Sequence[str]) -> np.ndarray:
    booleans = {"true": "1", "false": "0"}
    try:
        return label_parser()([booleans.get(cell.lower(), cell) for cell in cells])
    except BadCellError as error:
        hint = "--positive, or label: {positive: VALUE} in the schema, names one that counts as 1"
        raise BadCellError(error.index, f"a label of 0 or 1 ({hint})") from None


def _strings(column: TextColumn) -> list[str]:
    whole = column.data.tobytes()
    ends = zip(column.starts.tolist(), column.ends.tolist(), strict=True)
    return [whole[start:end].decode("utf-8", "replace") for start, end in ends]


def _shortened(cell: str) -> str:
    return cell if len(cell) <= _LONGEST_SHOWN else cell[:_LONGEST_SHOWN] + "..."


def overflow_text(value: Any, numeric_transform: str) -> str:
    """Says that a value is too large for a dataset as it was transformed, and what to do."""
    transformed, advice = {
        "none": ("", "choose the transform log or standardise, or scale the column"),
        "standardise": (
            ", standardised,",
            "most training rows are much closer together; choose the transform log or quantile, or "
            "drop the column or the row",
        ),
        "log": (", as a logarithm,", "drop the row"),
    }[numeric_transform]
    greatest = np.finfo(layout.NUMERICAL_DTYPE).max
    return (
        f"{value}{transformed} is beyond float16 (up to {greatest:.0f}), in which "
        f"numerical features are stored; {advice}"
    )


# Transforms of versions that had one of their own for CSV.

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
