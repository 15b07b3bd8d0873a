"""Conversion of a log's text to a model's inputs: one definition, from Spark to serving.

Preprocessing fits a `Transform` on the logs, applies it and stores it in the dataset as
`transform/`; serving loads that directory and applies the same. All functions here work on whole
columns. Only numpy and the standard library are imported, and nothing is pickled.

    numerical    a logarithm, by one of `CRITEO_TRANSFORMS`
    categorical  hexadecimal digits -> a number -> its id; 0 for missing, rare and unseen ones
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.clicks.bags import Bags, ListField
from dlrm.data.sources import native
from dlrm.data.sources.columns import (
    BadValueError,
    Parsed,
    TextColumn,
    parse_fields,
    parse_hexadecimal,
    parse_integer,
)
from dlrm.data.transform.dictionaries import (
    FrequencyLimit,
    checksum,
    dictionary_path,
    load_dictionary,
    save_dictionary,
)
from dlrm.data.transform.lookup import IdLookup
from dlrm.data.transform.numeric_transforms import CRITEO_TRANSFORMS, NumericTransform
from dlrm.documents import brief, read_json
from dlrm.files import write_atomically

_FILE = "transform.json"
_VERSION = 1


class Transformed(NamedTuple):
    """Inputs of a model: numbers `[rows, num_numerical]`; for each table ids `[rows]`, or bags."""

    numerical: np.ndarray
    ids: Sequence[np.ndarray | Bags]
    clamped: int


class Transform:
    """A fitted transform, which turns a row of a log into inputs of a model.

    Attributes:
        num_numerical: columns of integers, which come first.
        dictionaries: for each categorical column, the numbers that have the ids 1, 2, ...
        numeric_transform: name of the rule for numbers in `CRITEO_TRANSFORMS`.
        frequency_limit: the limit that the dictionaries were fitted with.
    """

    def __init__(
        self,
        num_numerical: int,
        dictionaries: Sequence[np.ndarray],
        numeric_transform: str = "readme",
        frequency_limit: FrequencyLimit | None = None,
    ) -> None:
        if numeric_transform not in CRITEO_TRANSFORMS:
            raise ValueError(
                f"numeric transform {numeric_transform!r}: expected one of "
                f"{tuple(CRITEO_TRANSFORMS)}"
            )
        self.num_numerical = num_numerical
        self.dictionaries = list(dictionaries)
        self.numeric_transform = numeric_transform
        self.frequency_limit = frequency_limit or FrequencyLimit()
        self._lookups: list[IdLookup | None] = [None] * len(self.dictionaries)
        self._tables: native.Tables | None = None  # of all lookups
        self._checksums: list[tuple[Path, str]] = []  # of dictionaries that come from files
        self._checked: set[int] = set()

    @property
    def rule(self) -> NumericTransform:
        """Returns the rule for numbers."""
        return CRITEO_TRANSFORMS[self.numeric_transform]

    @property
    def num_categorical(self) -> int:
        """Number of categorical columns, a dictionary each."""
        return len(self.dictionaries)

    @property
    def lists(self) -> dict[int, ListField]:
        """Returns the tables with several ids per row: none, since logs have one."""
        return {}

    @property
    def cardinalities(self) -> list[int]:
        """Returns the rows of each table: the ids of the dictionary, and id 0."""
        return [len(dictionary) + 1 for dictionary in self.dictionaries]

    @property
    def own_ids(self) -> list[int]:
        """Returns each table's greatest id of a single value."""
        return [len(dictionary) for dictionary in self.dictionaries]

    def __call__(self, columns: Sequence[TextColumn]) -> Transformed:
        """Transforms rows, given as the text of each column: numerical ones first, no label.

        Raises:
            BadValueError: a value is unreadable; the error is about the first such row and column.
            ValueError: the number of columns is wrong.
        """
        self._check_columns(len(columns))
        parsed: list[Parsed] = []
        first_error: BadValueError | None = None
        for i, column in enumerate(columns):
            parse = parse_integer if i < self.num_numerical else parse_hexadecimal
            try:
                parsed.append(parse(column))
            except BadValueError as error:
                if first_error is None or error.row < first_error.row:
                    first_error = BadValueError(error.row, error.expected, error.got, i)
        if first_error is not None:
            raise first_error
        return self.apply(parsed[: self.num_numerical], parsed[self.num_numerical :])

    def of_fields(self, fields: TextColumn) -> tuple[np.ndarray, np.ndarray]:
        """Transforms rows as `__call__` does, in few operations for any number of columns.

        Args:
            fields: the text of all columns; `starts` and `ends` are int64 `[columns, rows]`.

        Returns:
            Numericals `[rows, num_numerical]`, and ids `[rows, tables]` in the widest of the
            tables' dtypes.

        Raises:
            BadValueError: a value is unreadable; the error is about the first such row and column.
            ValueError: the number of columns is wrong.
        """
        self._check_columns(len(fields.starts))
        integers, hashes = parse_fields(fields, self.num_numerical)
        logarithms, _ = self.rule.apply(integers)
        return np.ascontiguousarray(logarithms.T), self._encode_rows(hashes)

    def _encode_rows(self, hashes: Parsed) -> np.ndarray:
        dtype = layout.id_dtype(max(self.cardinalities, default=0))
        if native.host is not None:
            lookups = map(self._lookup, range(self.num_categorical))
            self._tables = self._tables or native.Tables(list(lookups))
            return native.host.look_up_rows(*hashes, self._tables).astype(dtype, copy=False)
        ids = np.empty((hashes.values.shape[1], self.num_categorical), dtype)
        for i, numbers in enumerate(zip(*hashes, strict=True)):
            ids[:, i] = self.encode(i, Parsed(*numbers))
        return ids

    def _check_columns(self, columns: int) -> None:
        if columns != self.num_numerical + self.num_categorical:
            raise ValueError(
                f"expected {self.num_numerical} numerical and {self.num_categorical} categorical "
                f"columns, got {columns} in all"
            )

    def apply(
        self,
        integers: Sequence[Parsed],
        hashes: Sequence[Parsed],
        dtype: np.dtype = layout.NUMERICAL_DTYPE,
    ) -> Transformed:
        """Transforms rows whose fields are already numbers, as `log_lines` reads them.

        Args:
            integers, hashes: the columns; as many as the transform was fitted for.
            dtype: dtype of the logarithms.
        """
        rows = len((*integers, *hashes)[0].values)
        numerical = np.empty((rows, self.num_numerical), dtype)
        clamped = 0
        for i, column in enumerate(integers):
            numerical[:, i], more = self.rule.apply(column, dtype=dtype)
            clamped += more
        ids = [self.encode(i, column) for i, column in enumerate(hashes)]
        return Transformed(numerical, ids, clamped)

    def encode(self, index: int, numbers: Parsed) -> np.ndarray:
        """Returns the ids of a categorical column, in `layout.id_dtype` of its cardinality."""
        return self._lookup(index)(numbers)

    def _lookup(self, index: int) -> IdLookup:
        lookup = self._lookups[index]
        if lookup is None:
            self.check(index)
            lookup = self._lookups[index] = IdLookup.of(self.dictionaries[index])
        return lookup

    def check_all(self) -> None:
        """Compares every dictionary with its checksum, as `check` does."""
        for index in range(len(self.dictionaries)):
            self.check(index)

    def check(self, index: int) -> None:
        """Compares a dictionary with its checksum; called before its first use.

        Raises:
            ValueError: it has changed since it was saved; the message names its file.
        """
        if not self._checksums or index in self._checked:
            return
        path, expected = self._checksums[index]
        if (found := checksum(self.dictionaries[index])) != expected:
            raise ValueError(f"{path}: expected CRC-32 {expected}, got {found}: damaged")
        self._checked.add(index)

    def use_lookups(self, directory: str | os.PathLike) -> None:
        """Loads lookups that `IdLookup.save` wrote, so that processes share them."""
        self._lookups = [
            IdLookup.load(directory, i, layout.id_dtype(n))
            for i, n in enumerate(self.cardinalities)
        ]

    def save(self, directory: str | os.PathLike) -> None:
        """Writes `transform.json` and `dictionary_<i>.npy` into a directory, created if need be."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        for i, dictionary in enumerate(self.dictionaries):
            save_dictionary(directory, i, dictionary)
        sizes = [len(dictionary) for dictionary in self.dictionaries]
        save_facts(
            directory, self.num_numerical, sizes, self.numeric_transform, self.frequency_limit
        )

    @classmethod
    def load(cls, directory: str | os.PathLike) -> "Transform":
        """Loads what `save` wrote, and maps the dictionaries without reading them.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file differs from the form that `save` writes; the message names it.
        """
        path = Path(directory) / _FILE
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file, so {directory} is no fitted transform")
        try:
            facts = read_json(path)
            version, sizes = facts["version"], facts["dictionary_sizes"]
            limits = facts["frequency_limit"]
            limit = FrequencyLimit(
                limits["default"], {int(k): v for k, v in limits["by_column"].items()}
            )
            num_numerical, rule = facts["num_numerical"], facts["numeric_transform"]
            checksums = facts.get("dictionary_crc32", [])  # early ones have none
            if checksums and len(checksums) != len(sizes):
                raise ValueError(f"{len(checksums)} checksums of {len(sizes)} dictionaries")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: not a fitted transform ({brief(error)})") from error
        if version != _VERSION:
            raise ValueError(f"{path}: expected version {_VERSION}, got {brief(version)}")
        paths = [dictionary_path(directory, i) for i in range(len(sizes))]
        dictionaries = [load_dictionary(*item) for item in zip(paths, sizes, strict=True)]
        transform = cls(num_numerical, dictionaries, rule, limit)
        transform._checksums = list(zip(paths, checksums, strict=False))
        return transform


def save_facts(
    directory: str | os.PathLike,
    num_numerical: int,
    dictionary_sizes: Sequence[int],
    numeric_transform: str,
    frequency_limit: FrequencyLimit,
) -> None:
    """Writes `transform.json`, after the dictionaries: without it there is no transform."""
    paths = [dictionary_path(directory, i) for i in range(len(dictionary_sizes))]
    dictionaries = [load_dictionary(*item) for item in zip(paths, dictionary_sizes, strict=True)]
    facts = {
        "version": _VERSION,
        "num_numerical": num_numerical,
        "numeric_transform": numeric_transform,
        "frequency_limit": {
            "default": frequency_limit.default,
            "by_column": {str(k): v for k, v in frequency_limit.by_column.items()},
        },
        "dictionary_sizes": list(dictionary_sizes),
        "dictionary_crc32": [checksum(dictionary) for dictionary in dictionaries],
    }
    write_atomically(Path(directory) / _FILE, json.dumps(facts, indent=2) + "\n")
