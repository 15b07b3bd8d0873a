"""The meaning of a table's columns: `schema.yaml`, from raw rows to a model's inputs.

    version: 1
    label: {column: income, positive: ">50K"}
    format: {delimiter: ";", encoding: latin-1}      # of CSV; see `TextFormat`
    missing_values: ["?"]                            # in fields without their own
    numerical:
      - age                                        # standardized
      - {column: capital_gain, transform: log, bins: 48, missing_values: ["NA"]}
    categorical:
      - workclass                                  # strings, every value has an id
      - {column: user, type: integer, frequency_limit: 5, max_ids: 1000000, hash_buckets: 100}
      - {column: last_item, dictionary: items}     # the same ids as any other field of "items"
      - {column: shown_item, table: shown}         # the same ids and rows as any field of "shown"
      - {column: seen, table: shown, max_length: 50, pooling: attention, target: shown_item}
      - {column: tags, max_length: 50, weights: tag_weights}  # a list a row
      - {column: shop, type: id, cardinality: 500}   # ids already, kept as they are
    crosses:
      - {fields: [user, workclass], buckets: 100000}  # combinations, hashed
    weight: sample_weight
    groups: [user]
    time: {column: logged_at, zone: UTC}

A column may be numerical and categorical: a model then has its number, called `<column>_number`,
and an embedding of its value.

A user writes a schema; preprocessing makes a `Transform` of it and of the training rows.
Criteo's logs need no file: `--schema criteo` is built in.
"""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dlrm.data.sources.text_format import TextFormat
from dlrm.data.transform.entries import FIELDS, field_of, format_of, made_of, without_defaults
from dlrm.data.transform.fields import (
    CategoricalField,
    Cross,
    Label,
    NumericalField,
    TimeField,
)
from dlrm.documents import brief, read_yaml
from dlrm.files import write_atomically
from dlrm.limits import check_features
from dlrm.remote.copies import Copies, output_at

VERSION = 1
_LINE_ENDS = frozenset("\x85\u2028\u2029")  # besides those of ASCII
_LONGEST_GROUP = 200  # bytes of a column's name in the name of a file


@dataclass(frozen=True)
class Schema:
    """The meaning of a table's columns; other columns are ignored.

    Attributes:
        label: the column to predict.
        numerical: fields of numbers, in the order of the model's inputs.
        categorical: fields with a table each, unless fields share one, in that order.
        missing_values: texts that mean "missing" besides empty ones, in fields without their own. A
            number such as "-999" stands for that number in numerical fields and columns of
            integers, and "nan" for NaN.
        weight: column of sample weights; None for none.
        groups: columns that metrics are grouped by, such as a user or a query.
        time: time at which a row was logged; None for none.
        crosses: further categorical fields, of combinations of values.
        format: the format of CSV; None is a comma, or a tab in `.tsv`, and quotes.

    Raises:
        ValueError: fields cannot be combined; the message names them.
    """

    label: Label
    numerical: tuple[NumericalField, ...] = ()
    categorical: tuple[CategoricalField, ...] = ()
    missing_values: tuple[str, ...] = ()
    weight: str | None = None
    groups: tuple[str, ...] = ()
    time: TimeField | None = None
    crosses: tuple[Cross, ...] = ()
    format: TextFormat | None = None

    def __post_init__(self) -> None:
        if not self.numerical and not self.categorical:
            raise ValueError("numerical, categorical: expected one field or more, got none")
        check_features("number of numerical fields:", len(self.numerical))
        check_features("number of categorical fields:", len(self.categorical_features))
        self._check_columns()
        if repeated := _repeated(self.groups):
            raise ValueError(f"groups: columns named twice: {', '.join(repeated)}")
        for name in self.groups:
            if "/" in name or "\0" in name or len(name.encode()) > _LONGEST_GROUP:
                raise ValueError(
                    f"groups: expected columns that can name files of a dataset, got {brief(name)}"
                )
        self._check_crosses()
        self._check_shared()
        self._check_targets()

    def _check_columns(self) -> None:
        """Checks that a column is used once, or by one numerical and one categorical field."""
        numerical = [field.column for field in self.numerical]
        single = [field.column for field in self.categorical if field.max_length is None]
        lists = [field.column for field in self.categorical if field.max_length is not None]
        lists += [self.label.column, *(f.weights for f in self.categorical if f.weights)]
        repeated = {*_repeated([*numerical, *lists]), *_repeated([*single, *lists])}
        if repeated:
            raise ValueError(f"columns used twice: {', '.join(sorted(repeated))}")
        for field, name in zip(self.numerical, self.numerical_names, strict=True):
            if name != field.column and name in self.columns:
                raise ValueError(
                    f"columns used twice: {field.column}, whose number would be called {name}, "
                    "which is another column"
                )

    def _check_crosses(self) -> None:
        """Checks that crosses are of fields without lists, and that names are unique."""
        lists = {field.column: field.max_length is not None for field in self.categorical}
        for cross in self.crosses:
            for name in cross.fields:
                if lists.get(name, True):
                    got = f"list field {name}" if name in lists else self._shown(name)
                    raise ValueError(
                        f"cross {cross.column}: fields: expected categorical fields with one value "
                        f"a row, got {got}"
                    )
        taken = [*self.columns, *self.numerical_names]
        for name in (cross.column for cross in self.crosses):
            if name in taken:
                raise ValueError(
                    f"cross {name}: name: expected one that no other column or field has, got "
                    f"{name}"
                )
            taken.append(name)

    def _shown(self, name: str) -> str:
        """Describes a column that a cross cannot use."""
        if name == self.label.column:
            return f"the label {name}"
        numerical = {field.column for field in self.numerical}
        return f"numerical field {name}" if name in numerical else brief(name)

    def _check_shared(self) -> None:
        """Checks that fields of a shared dictionary agree on the type and numbering of values."""
        for fields_of in self.dictionaries().values():
            first = fields_of[0]
            names = ["type", "frequency_limit", "max_ids", "hash_buckets", "cardinality"]
            for field in fields_of[1:]:
                for name in names:
                    ours, theirs = getattr(field, name), getattr(first, name)
                    if ours != theirs:
                        kind = "dictionary" if field.table is None else "table"
                        there, here = ("none" if one is None else one for one in (theirs, ours))
                        fix = f"leave {name} out" if theirs is None else f"write {name}: {theirs}"
                        raise ValueError(
                            f"categorical field {field.column}: {name}: expected {there}, as of "
                            f"{first.column}, which shares {kind} {first.shared!r}, got {here}; "
                            f"{fix} at {field.column}, or change {first.column}"
                        )

    def _check_targets(self) -> None:
        """Checks that the candidates of attended lists are fields of the same table."""
        by_name = {field.column: field for field in self.categorical}
        for field in self.categorical:
            if field.target is None:
                continue
            where = f"categorical field {field.column}: target"
            found = by_name.get(field.target)
            if found is None:
                raise ValueError(
                    f"{where}: expected a categorical field, got {self._shown(field.target)}"
                )
            if found.max_length is not None:
                raise ValueError(
                    f"{where}: expected a field with one value a row, got list field {found.column}"
                )
            if found.table != field.table:
                table = "a table of its own" if found.table is None else f"table {found.table!r}"
                raise ValueError(
                    f"{where}: expected a field of table {field.table!r}, got {found.column}, "
                    f"which has {table}; write table: {field.table} at {found.column}"
                )

    @cached_property
    def marked(self) -> dict[str, Collection[str]]:
        """Returns the columns of numbers that have marks in text, with their missing values."""
        if self.format is None or not self.format.has_marks:
            return {}
        found: dict[str, Collection[str]] = {
            field.column: self.missing_of(field) for field in self.numerical
        }
        for field in self.categorical:
            if field.type == "integer":
                found[field.column] = self.missing_of(field)
            if field.weights:
                found[field.weights] = self.missing_of(field)
        return found

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
        with output_at(path, "path") as place:
            write_atomically(place, self.text())

    def text(self, comments: Mapping[str, str] | None = None) -> str:
        """Returns the schema as YAML, one line per field.

        Args:
            comments: a line of text, without control characters, for the columns that have one.
        """
        import yaml

        comments = comments or {}

        def flow(value: Any) -> str:
            plain = not _LINE_ENDS.intersection(
                json.dumps(value, ensure_ascii=False)
            )  # YAML folds them
            text = yaml.safe_dump(
                value, default_flow_style=True, sort_keys=False, allow_unicode=plain, width=1 << 20
            )
            return text.removesuffix("\n").removesuffix("\n...")

        def noted(line: str, value: Any) -> str:
            column = value.get("column") if isinstance(value, dict) else value
            comment = comments.get(column) if isinstance(column, str) else None
            return f"{line}  # {comment}" if comment else line

        lines = []
        for name, value in self.to_dict().items():
            if name in FIELDS:
                lines.append(f"{name}:")
                lines += [noted(f"  - {flow(field)}", field) for field in value]
            else:
                lines.append(noted(f"{name}: {flow(value)}", value))
        return "\n".join(lines) + "\n"

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Schema":
        """Reads `schema.yaml`, or that of a URI.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not a schema; the message names the file, the field and the value.
        """
        with Copies() as copies:
            return cls._load(copies.path_of(path, "path"))

    @classmethod
    def _load(cls, path: Path) -> "Schema":
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such schema (--schema)")
        try:
            return cls.from_dict(read_yaml(path))
        except ValueError as error:
            message = str(error)
            raise ValueError(
                message if message.startswith(str(path)) else f"{path}: {message}"
            ) from None

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> "Schema":
        """Makes a schema from maps and lists, as `to_dict` returns and YAML holds them.

        Raises:
            ValueError: they are not a schema; the message names the field and the value.
        """
        facts = dict(facts)
        if (version := facts.pop("version", VERSION)) != VERSION:
            raise ValueError(f"version: expected {VERSION}, got {brief(version)}")
        if "label" not in facts:
            raise ValueError("label: expected {column: NAME}, got none")
        for name in ("lists", "sequences"):
            if name in facts:
                raise ValueError(
                    f"{name}: expected fields of lists under categorical, with max_length"
                )
        made: dict[str, Any] = {}
        kinds = {"label": Label, "time": TimeField}
        for name, value in facts.items():
            if name == "format":
                made[name] = None if value is None else format_of(value)
            elif name in kinds:
                made[name] = None if value is None else field_of(kinds[name], name, value)
            elif name in FIELDS:
                if not isinstance(value, list):
                    raise ValueError(f"{name}: expected a list of fields, got {brief(value)}")
                made[name] = tuple(field_of(FIELDS[name], name, item) for item in value)
            else:
                made[name] = value
        return made_of(cls, "", made)


def _field_of_cross(cross: Cross) -> CategoricalField:
    """Returns the field of a cross's ids; its values have texts if they have ids of their own.

    Its type selects how values are counted, as `counted_columns` does.
    """
    if cross.frequency_limit is None:
        return CategoricalField(cross.column, "integer", max_ids=0, hash_buckets=cross.buckets)
    limits = cross.frequency_limit, cross.max_ids
    return CategoricalField(cross.column, "string", *limits, cross.buckets)


def _repeated(names: Sequence[str]) -> list[str]:
    return sorted({name for name in names if list(names).count(name) > 1})
