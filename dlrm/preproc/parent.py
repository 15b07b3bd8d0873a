"""The dataset or checkpoint whose dictionaries further rows extend."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data import layout
from dlrm.data.schema.numbers import Fitted
from dlrm.data.schema.schema import Schema
from dlrm.data.transform import stored
from dlrm.data.transform.dictionaries import Dictionary, arrays_of, open_dictionary
from dlrm.data.transform.transform import Transform
from dlrm.data.transform.values import NUMBERS_IN_TEXT, canonical_text
from dlrm.data.verification import Verifier
from dlrm.documents import read_json
from dlrm.files import MANIFEST
from dlrm.preproc.counting import CountedColumn
from dlrm.preproc.fitting import NEVER, Counted, fitted_dictionaries, fitted_numbers
from dlrm.preproc.options import IncrementConfig
from dlrm.preproc.splits import TRAIN

_KINDS = (layout.KIND, "checkpoint")
_OF_VALUES = ("frequency_limit", "max_ids")  # which an extension may change


@dataclass
class Parent:
    """A dataset or checkpoint whose dictionaries are extended.

    Values of it keep their ids. A value without one gets the next id if it occurs as often as its
    frequency limit among the new training rows.

    Attributes:
        config: the options of the extension.
        fitted: its transform.
        digest: digest of the transform.
        transform: the folder of the transform, which tasks read.
        lookups: the folder of its lookups, once they are written.
    """

    config: IncrementConfig
    fitted: Transform
    digest: str
    transform: Path
    lookups: str = ""

    def facts(self) -> dict[str, str]:
        """Returns, by flag, what determines the bytes of the dataset."""
        return {"--extend": self.digest}

    @property
    def sizes(self) -> list[int]:
        """Returns the number of values of each dictionary; 0 if it has none, or has ids."""
        dictionaries = self.fitted.dictionaries
        return [0 if one.type == "id" else len(one) for one in dictionaries]

    def columns(self, columns: Sequence[CountedColumn]) -> list[CountedColumn]:
        """Returns what to fit: ids beside those there are, and bins unless these are kept."""
        columns, sizes = list(columns), self.sizes
        for index, fields in enumerate(self.fitted.schema.dictionaries().values()):
            most = columns[index].most
            if any(field.hash_buckets for field in fields):  # as buckets follow the dictionary
                columns[index] = columns[index]._replace(limit=NEVER)
            elif most is not None:
                columns[index] = columns[index]._replace(most=max(most - sizes[index], 0))
        if self.config.numerics == "keep":
            columns[len(sizes) :] = [one._replace(limit=NEVER) for one in columns[len(sizes) :]]
        return columns

    def extended(
        self,
        schema: Schema,
        counted: Counted,
        values: Path,
        directory: Path,
        negatives: Sequence[str] | None,
    ) -> tuple[list[Fitted], list[Dictionary], Sequence[str], Sequence[str] | None]:
        """Writes the dictionaries of an extension.

        Args:
            counted: the rows, and the new values, which are in the folder `values`.
            directory: folder of the transform to write.
            negatives: the labels of the rows that count as 0.

        Returns:
            The statistics of numbers, the dictionaries, the types of values and the labels.

        Raises:
            ValueError: no row is positive, or the parent does not have a label of the rows.
        """
        rows = sum(facts["rows"][TRAIN] for facts in counted.facts)
        if not sum(facts["positives"][TRAIN] for facts in counted.facts):
            raise ValueError(
                f"--extend {self.config.extend}: expected rows with label 1 among the {rows} "
                "training rows, got none"
            )
        self._check_labels(schema, negatives)
        directory.mkdir(parents=True, exist_ok=True)
        keeps = self.config.numerics == "keep"
        numbers = self.fitted.numerical if keeps else fitted_numbers(schema, counted)
        new, dictionaries = fitted_dictionaries(schema, counted, values), []
        for index, (old, more) in enumerate(zip(self.fitted.dictionaries, new, strict=True)):
            size = max(len(old), len(more)) if old.type == "id" else len(old) + len(more)
            if old.type != "id":
                _write(directory, index, old, more)
            dictionaries.append(Dictionary.load(directory, index, size, old.type))
        index_of = self.fitted.dictionary_of
        types = list(self.fitted.types)
        for i, type in enumerate(types):
            old = self.fitted.dictionaries[index_of[i]]
            if type == NUMBERS_IN_TEXT and not counted.only_numbers[index_of[i]]:
                types[i] = "string"
            elif type == "string" and len(old) < 3 and {*old.values()} <= {"true", "false"}:
                types[i] = "bool"  # as which 0 and 1 are read
        return numbers, dictionaries, types, self.fitted.negatives

    def _check_labels(self, schema: Schema, negatives: Sequence[str] | None) -> None:
        """Raises ValueError if rows have a label that the parent does not have."""
        label, known = schema.label, self.fitted.known_labels
        if not known or label.any_negative:
            return
        forms = set(map(canonical_text, known))
        if others := [text for text in negatives or () if canonical_text(text) not in forms]:
            raise ValueError(
                f"column {label.column}: expected the labels of --extend {self.config.extend}, "
                f"{' or '.join(map(repr, known))}, got {others[0]!r}"
            )


def _write(directory: Path, index: int, old: Dictionary, new: Dictionary) -> None:
    """Writes the files of a dictionary: the values of the parent, and then new ones."""
    further = arrays_of(new, index)
    for name, array in arrays_of(old, index).items():
        more = further[name]
        if name.startswith("ends") and len(array):
            more = more + array[-1]
        dtype = max(array.dtype, more.dtype, key=lambda dtype: dtype.itemsize)
        written = open_dictionary(directory / name, dtype, len(array) + len(more))
        np.concatenate([array, more], out=written)


def open_parent(config: IncrementConfig, schema: Schema) -> Parent | None:
    """Returns what the rows of a schema extend; None if they extend nothing.

    Raises:
        FileNotFoundError: the parent, or a file of it, is missing.
        ValueError: the parent is damaged, or of another schema.
    """
    directory = config.extend
    if directory is None:
        return None
    if not (directory / layout.TRANSFORM).is_dir():
        within = [path.parent for path in sorted(directory.glob(f"*/{layout.TRANSFORM}"))]
        raise FileNotFoundError(
            f"--extend {directory}: expected a dataset or checkpoint with a fitted transform, got "
            f"none{f'; {within[-1]} has one' if within else ''}"
        )
    if not (directory / MANIFEST).is_file():
        raise FileNotFoundError(f"{directory / MANIFEST}: no such file, so nothing checks it")
    kind = read_json(directory / MANIFEST).get("kind")
    if kind not in _KINDS:
        raise ValueError(f"--extend {directory}: expected a dataset or checkpoint, got {kind!r}")
    facts = stored.facts_file(directory / layout.TRANSFORM)
    Verifier(directory, kind, "first", None).check_names(f"{layout.TRANSFORM}/{facts.name}")
    fitted = Transform.load(facts.parent)
    if difference := _difference(fitted.schema, schema):
        raise ValueError(
            f"--extend {directory}: expected the schema of its transform, got another one: "
            f"{difference}"
        )
    return Parent(config, fitted, stored.digest(facts.parent), facts.parent)


def _difference(parent: Schema, own: Schema) -> str | None:
    """Names the first entry in which schemas differ, except limits and the format of CSV."""
    sides = [_entries(schema.to_dict()) for schema in (parent, own)]
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        for one, other in zip_longest(*(s.get(name, []) for s in sides), fillvalue="nothing"):
            if one != other:
                return f"{name}: {one} in the transform and {other} in the schema"
    return None


def _entries(facts: dict[str, Any]) -> dict[str, list[str]]:
    """Returns the entries of each section as JSON, in order, as columns are numbered by it."""
    entries = {}
    for name, value in facts.items():
        items = value if isinstance(value, list) else [value]
        items = [item if isinstance(item, dict) else {"column": item} for item in items]
        own = [{k: v for k, v in item.items() if k not in _OF_VALUES} for item in items]
        entries[name] = [json.dumps(one, sort_keys=True) for one in own if name != "format"]
    return entries
