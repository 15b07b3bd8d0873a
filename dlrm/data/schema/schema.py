"""The meaning of a table's columns: `schema.yaml`, from raw rows to a model's inputs.

    version: 1
    label: {column: income, positive: ">50K"}
    numerical:
      - age                                        # standardized
      - {column: capital_gain, transform: log, bins: 48, missing_values: ["NA"]}
    categorical:
      - workclass                                  # strings, every value has an id
      - {column: user, type: integer, frequency_limit: 5, max_ids: 1000000, hash_buckets: 100}
      - {column: tags, max_length: 50, separator: ";"}  # a list a row

A user writes a schema; preprocessing makes a `Transform` of it and of the training rows.
Criteo's logs need no file: `--schema criteo` is built in.
"""

import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dlrm.data.schema.entries import read_map, without_defaults
from dlrm.data.schema.fields import CategoricalField, Cross, Label, NumericalField, TimeField
from dlrm.data.sources.text_format import TextFormat
from dlrm.documents import brief, read_yaml
from dlrm.files import write_atomically
from dlrm.limits import check_features
from dlrm.remote.localize import errors_shown, local_path, output_at
from dlrm.settings import REQUIRED, setting

VERSION = 1
_BY_LINE = ("numerical", "categorical", "crosses")  # sections with a line for each field
_LONGEST_GROUP = 200  # bytes of a column's name in the name of a file


@dataclass(frozen=True)
class Schema:
    """The meaning of a table's columns; other columns are ignored.

    Its attributes are the [entries of schema.yaml](schema.md).

    Raises:
        ValueError: fields cannot be combined; the message names them.
    """

    label: Label = setting(REQUIRED, "the column to predict")
    numerical: tuple[NumericalField, ...] = setting(
        (), "fields of numbers, in the order of the model's inputs"
    )
    categorical: tuple[CategoricalField, ...] = setting(
        (), "fields with a table each, unless fields share one, in that order"
    )
    missing_values: tuple[str, ...] = setting(
        (),
        "texts that mean missing besides empty ones, in fields without their own; a number such as "
        '"-999" stands for that number in numerical fields and columns of integers, and "nan" for '
        "NaN",
    )
    weight: str | None = setting(None, "column of sample weights; default: none")
    groups: tuple[str, ...] = setting(
        (), "columns that metrics are grouped by, such as a user or a query"
    )
    time: TimeField | None = setting(None, "time at which a row was logged; default: none")
    crosses: tuple[Cross, ...] = setting(
        (), "further categorical fields, of combinations of values"
    )
    format: TextFormat | None = setting(
        None, "the format of CSV; default: a comma, or a tab in .tsv, and quotes"
    )

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise ValueError(problem)

    def _problems(self) -> Iterator[str]:
        if not self.numerical and not self.categorical:
            yield "numerical, categorical: expected one field or more, got none"
        check_features("number of numerical fields:", len(self.numerical))
        check_features("number of categorical fields:", len(self.categorical_features))
        yield from self._problems_of_names()
        if repeated := _repeated(self.groups):
            yield f"groups: columns named twice: {', '.join(repeated)}"
        for name in self.groups:
            if "/" in name or "\0" in name or len(name.encode()) > _LONGEST_GROUP:
                shown = brief(name)
                yield f"groups: expected columns that can name files of a dataset, got {shown}"
        for cross in self.crosses:
            for got in filter(None, map(self._described, cross.fields)):
                yield (
                    f"cross {cross.column}: fields: expected categorical fields with one value a "
                    f"row, got {got}"
                )
        for fields in self.dictionaries().values():
            for field in fields[1:]:
                yield from _disagreements(fields[0], field)
        yield from self._problems_of_targets()

    def _problems_of_names(self) -> Iterator[str]:
        """A column is used once, or by one numerical and one categorical field."""
        numerical = [field.column for field in self.numerical]
        single = [field.column for field in self.categorical if field.max_length is None]
        others = [field.column for field in self.categorical if field.max_length is not None]
        others += [self.label.column, *(f.weights for f in self.categorical if f.weights)]
        if repeated := {*_repeated([*numerical, *others]), *_repeated([*single, *others])}:
            yield f"columns used twice: {', '.join(sorted(repeated))}"
        if self.weight == self.label.column:
            yield f"weight: expected another column than the label, got {self.weight}"
        names = [*self.columns]
        pairs = zip(numerical, self.numerical_names, strict=True)
        derived = [(f"the number of {own}", name) for own, name in pairs if name != own]
        derived += [(f"cross {cross.column}", cross.column) for cross in self.crosses]
        for owner, name in derived:
            if name in names:
                yield f"{owner}: expected a name that no other column or field has, got {name}"
            names.append(name)

    def _problems_of_targets(self) -> Iterator[str]:
        by_name = {field.column: field for field in self.categorical}
        for field in self.categorical:
            where, target = f"categorical field {field.column}: target: expected", field.target
            if target is None:
                continue
            if (got := self._described(target)) is not None:
                yield f"{where} a categorical field with one value a row, got {got}"
            elif (table := by_name[target].table) != field.table:
                has = "a table of its own" if table is None else f"table {table!r}"
                yield (
                    f"{where} a field of table {field.table!r}, got {target}, which has {has}; "
                    f"write table: {field.table} at {target}"
                )

    def _described(self, name: str) -> str | None:
        """Describes a column, unless it is a categorical field with one value a row."""
        for field in self.categorical:
            if field.column == name:
                return None if field.max_length is None else f"list field {name}"
        if name == self.label.column:
            return f"the label {name}"
        is_number = any(field.column == name for field in self.numerical)
        return f"numerical field {name}" if is_number else brief(name)

    @cached_property
    def marked(self) -> dict[str, Collection[str]]:
        """Returns the columns of numbers that have marks in text, with their missing values."""
        if self.format is None or not self.format.has_marks:
            return {}
        marked: dict[str, Collection[str]] = {f.column: self.missing_of(f) for f in self.numerical}
        for field in self.categorical:
            names = [field.column] if field.type == "integer" else []
            names += [field.weights] if field.weights else []
            marked |= dict.fromkeys(names, self.missing_of(field))
        return marked

    def plain_cell(self, name: str, cell: str) -> str:
        """Returns a cell of text whose numbers, if any, have no marks: 1234.5 for 1.234,5."""
        if name not in self.marked or cell.strip() in self.marked[name]:
            return cell
        assert self.format is not None
        separator = self.separators.get(name)
        values = [cell] if separator is None else cell.split(separator)
        return (separator or "").join(self.format.plain_number(value.strip()) for value in values)

    def missing_of(self, field: NumericalField | CategoricalField) -> tuple[str, ...]:
        """Returns the texts that mean "missing" in a field, besides empty ones."""
        return self.missing_values if field.missing_values is None else field.missing_values

    @property
    def categorical_features(self) -> tuple[CategoricalField, ...]:
        """Returns the model's categorical inputs, a table each: the fields, then the crosses."""
        return self.categorical + tuple(map(_field_of_cross, self.crosses))

    @property
    def numerical_names(self) -> list[str]:
        """Returns the names of the numerical features, each unique in a dataset.

        The number of a column that is categorical too is called `<column>_number`.
        """
        both = {field.column for field in self.categorical}
        return [
            f"{field.column}_number" if field.column in both else field.column
            for field in self.numerical
        ]

    @property
    def categorical_names(self) -> list[str]:
        """Returns the names of `categorical_features`."""
        return [field.column for field in self.categorical_features]

    @property
    def input_columns(self) -> list[str]:
        """Returns the columns of a model's inputs, each once, those of lists' weights last."""
        columns = [field.column for field in self.numerical]
        columns += [field.column for field in self.categorical]
        columns += [field.weights for field in self.categorical if field.weights]
        return list(dict.fromkeys(columns))

    @property
    def separators(self) -> dict[str, str]:
        """Returns the columns of lists, including weights, and their separators in CSV."""
        lists = [field for field in self.categorical if field.max_length is not None]
        by_column = {field.column: field.separator for field in lists}
        return by_column | {field.weights: field.separator for field in lists if field.weights}

    @property
    def columns(self) -> list[str]:
        """Returns every column that is read, each once."""
        used = [self.label.column, *self.input_columns, *self.groups]
        used += [self.weight] if self.weight else []
        used += [self.time.column] if self.time else []
        return list(dict.fromkeys(used))

    def dictionaries(self) -> dict[str, list[CategoricalField]]:
        """Returns the categorical features of each dictionary, in the order of the first ones.

        Its key is the name that fields share, after "shared ", or the column of a single one.
        """
        by_name: dict[str, list[CategoricalField]] = {}
        for field in self.categorical_features:
            shared = f"shared {field.shared}" if field.shared else f"of {field.column}"
            by_name.setdefault(shared, []).append(field)
        return by_name

    @property
    def shared_tables(self) -> dict[str, str]:
        """Returns the categorical features whose table others have, too, with the table's name."""
        named = {f.column: f.table for f in self.categorical if f.table is not None}
        return {name: table for name, table in named.items() if [*named.values()].count(table) > 1}

    def to_dict(self) -> dict[str, Any]:
        """Returns the schema as maps and lists, without default values."""
        return {"version": VERSION} | without_defaults(self)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the schema as YAML to a file or URI, which appears whole.

        Raises:
            OSError: it cannot be written.
            ValueError: `path` is a URI of an unknown scheme.
        """
        with output_at(path, "path") as local:
            write_atomically(local, self.text())

    def text(self, comments: Mapping[str, str] | None = None) -> str:
        """Returns the schema as YAML, one line per field.

        Args:
            comments: a line of text, without control characters, for the columns that have one.
        """

        def line(start: str, value: Any) -> str:
            column = value.get("column") if isinstance(value, dict) else value
            comment = (comments or {}).get(column) if isinstance(column, str) else None
            return f"{start}{_yaml(value)}" + (f"  # {comment}" if comment else "")

        lines = []
        for name, value in self.to_dict().items():
            if name in _BY_LINE:
                lines += [f"{name}:", *(line("  - ", field) for field in value)]
            else:
                lines.append(line(f"{name}: ", value))
        return "\n".join(lines) + "\n"

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Schema":
        """Reads `schema.yaml`, or that of a URI.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not a schema; the message names the file, the field and the value.
        """
        with errors_shown():
            local = local_path(path, "path")
            if not os.path.exists(local):
                raise FileNotFoundError(f"{local}: no such schema (--schema)")
            facts = read_yaml(local)
            try:
                return cls.from_dict(facts)
            except ValueError as error:
                raise ValueError(f"{local}: {error}") from None

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> "Schema":
        """Makes a schema from maps and lists, as `to_dict` returns and YAML holds them.

        Raises:
            ValueError: they are not a schema; the message names the field and the value.
        """
        facts = dict(facts)
        if (version := facts.pop("version", VERSION)) != VERSION:
            raise ValueError(f"version: expected {VERSION}, got {brief(version)}")
        return read_map(cls, "", facts)


def _yaml(value: Any) -> str:
    import yaml

    folded = {*"\x85\u2028\u2029"}  # ends of lines besides those of ASCII
    plain = folded.isdisjoint(json.dumps(value, ensure_ascii=False))
    text = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, allow_unicode=plain, width=1 << 20
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _disagreements(first: CategoricalField, field: CategoricalField) -> Iterator[str]:
    """Fields that share a dictionary agree on the type and numbering of values."""
    for name in ("type", "frequency_limit", "max_ids", "hash_buckets", "cardinality"):
        expected, got = getattr(first, name), getattr(field, name)
        if got != expected:
            shared = "dictionary" if field.table is None else "table"
            fix = f"leave {name} out" if expected is None else f"write {name}: {expected}"
            yield (
                f"categorical field {field.column}: {name}: expected "
                f"{'none' if expected is None else expected}, as of {first.column}, which shares "
                f"{shared} {first.shared!r}, got {'none' if got is None else got}; {fix} at "
                f"{field.column}, or change {first.column}"
            )


def _field_of_cross(cross: Cross) -> CategoricalField:
    """Returns the field of a cross's ids; its values have texts if they have ids of their own.

    Its type selects how values are counted, as `counted_columns` does.
    """
    if cross.frequency_limit is None:
        return CategoricalField(cross.column, "integer", max_ids=0, hash_buckets=cross.buckets)
    limits = cross.frequency_limit, cross.max_ids
    return CategoricalField(cross.column, "string", *limits, cross.buckets)


def _repeated(names: Iterable[str]) -> list[str]:
    return sorted(name for name, number in Counter(names).items() if number > 1)
