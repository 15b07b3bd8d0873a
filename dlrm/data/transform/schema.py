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
      - {column: city, embedding_dim: 8}           # 8 columns, projected to the model's
      - {column: tags, max_length: 50, weights: tag_weights}  # a list a row
      - {column: item, encodings: [count, {kind: target, smoothing: 20}]}  # further numbers
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
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar
from zoneinfo import ZoneInfo

from dlrm.data.clicks import layout
from dlrm.data.clicks.bags import ATTENTION, MAX_LENGTH, POOLINGS, ListField
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.transform.derived import TARGET, Cross, Encoding
from dlrm.data.transform.numeric_transforms import NUMERIC_TRANSFORMS, NumericTransform
from dlrm.documents import brief, read_yaml
from dlrm.files import write_atomically
from dlrm.limits import check_features
from dlrm.remote.copies import Copies, output_at
from dlrm.settings import FORMER

VERSION = 1
NUMERICAL_TYPES = ("number", "decimal")
CATEGORICAL_TYPES = ("string", "integer", "hexadecimal", "id")
TIME_UNITS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1000, "ns": 1}  # in nanoseconds
KEEP = ("first", "last", "all")
MAX_BINS = 256
_MAX_BUCKETS = 1 << 30
# Entries of list fields only.
_OF_LISTS = ("keep", "ordered", "weights", "pooling", "target", "separator")
_OF_DICTIONARIES = (  # entries of fields whose values get ids
    *("frequency_limit", "max_ids", "hash_buckets", "dictionary"),
    *("missing_values", "true_values", "false_values"),
)
_NO_SEPARATORS = '"\r\n\0'
_LINE_ENDS = frozenset("\x85\u2028\u2029")  # besides those of ASCII
_LONGEST_GROUP = 200  # bytes of a column's name in the name of a file


@dataclass(frozen=True)
class Label:
    """The column of labels.

    Attributes:
        column: its name.
        positive: the value that counts as 1, or several; None if labels are 0 and 1, or false and
            true.
        negative: values that count as 0; None accepts one other value.
        any_negative: whether all other values count as 0.
    """

    column: str
    positive: str | tuple[str, ...] | None = None
    negative: tuple[str, ...] | None = None
    any_negative: bool = False

    def __post_init__(self) -> None:
        if self.positive == ():
            raise ValueError(f"label {self.column}: positive: expected one value or more, got none")
        if both := sorted(set(self.positives) & set(self.negative or ())):
            raise ValueError(
                f"label {self.column}: expected values that count as 1 or as 0, got {both[0]!r} as "
                "both"
            )

    @property
    def positives(self) -> tuple[str, ...]:
        """Returns the values that count as 1; none if labels are 0 and 1."""
        if isinstance(self.positive, str):
            return (self.positive,)
        return self.positive or ()


def _check_choice(where: str, name: str, value: Any, choices: Iterable[str]) -> None:
    """Raises ValueError if an entry is not one of its choices."""
    if value not in choices:
        raise ValueError(
            f"{where}: {name}: expected one of {', '.join(choices)}, got {brief(value)}"
        )


@dataclass(frozen=True)
class NumericalField:
    """A column of numbers.

    Attributes:
        column: its name.
        transform: a name in `NUMERIC_TRANSFORMS`.
        bins: number of bins to fit, at quantiles of the values and of the distinct values; 0 fits
            none.
        missing_values: texts that mean "missing" besides empty ones; None is those of the schema.
        true_values, false_values: texts that mean true and false, which count as 1 and 0, besides
            `true` and `false` in lower case, in upper case and capitalized.
        type: "number", or "decimal": an integer of up to 18 digits, as logs have them.
        required: whether a row without a number is a bad one.
    """

    column: str
    transform: str = "standardize"
    bins: int = 0
    missing_values: tuple[str, ...] | None = None
    true_values: tuple[str, ...] = ()
    false_values: tuple[str, ...] = ()
    type: str = "number"
    required: bool = False

    def __post_init__(self) -> None:
        where = f"numerical field {self.column}"
        object.__setattr__(self, "transform", FORMER.get(self.transform, self.transform))
        _check_choice(where, "type", self.type, NUMERICAL_TYPES)
        if self.type != "number" and (self.true_values or self.false_values):
            raise ValueError(f"{where}: true_values: expected the type number, got {self.type}")
        _check_choice(where, "transform", self.transform, NUMERIC_TRANSFORMS)
        if self.bins not in range(MAX_BINS + 1) or self.bins == 1:
            raise ValueError(f"{where}: bins: expected 0, or 2 to {MAX_BINS}, got {self.bins}")
        _check_spellings(where, self)

    @property
    def rule(self) -> NumericTransform:
        """Returns the transform."""
        return NUMERIC_TRANSFORMS[self.transform]

    @property
    def fitted_bins(self) -> int:
        """Returns the number of bins that the transform or the model needs; 0 for none."""
        return self.bins or self.rule.bins


@dataclass(frozen=True)
class CategoricalField:
    """A column of values, or of lists of them, each with a row of an embedding table.

    Attributes:
        column: its name.
        type: "string" (text without surrounding blanks), "integer" (64 bits), "hexadecimal" (up to
            16 digits, of which zeros at the beginning mean nothing) or "id": values are the ids
            themselves, from 0, and every row must have one.
        frequency_limit: values in fewer training rows have no id of their own.
        max_ids: number of values with ids of their own, the most frequent ones; None is all, 0 is
            none.
        hash_buckets: number of further ids, chosen by hash, that values without their own share; 0
            gives them id 0, which is that of missing values.
        dictionary: name of a dictionary that fields share, for which their counts are added up;
            None is a dictionary of the field's own, or that of its `table`.
        table: name of an embedding table that fields share; they share the dictionary of this name,
            too. None is a table of the field's own.
        embedding_dim: columns of the table, at most the model's `--embedding_dim`, to which its
            vectors are projected; None is that number.
        max_length: for a list field, with several values per row: number of values to keep; None is
            one value per row.
        keep: which values of a longer list to keep: the "first" or the "last"; "all" refuses longer
            lists. None is the last ones, or the first ones if they are not ordered.
        ordered: whether ids stay in the order of the list. Otherwise they are sorted before a
            longer list is truncated, so that the order in the source has no effect: ids of frequent
            values come first, and id 0 last.
        weights: column with a list of numbers, one for each value; None for none.
        pooling: "sum" or "mean" of the rows that are looked up, or "attention", which weighs them
            by their relation to the candidate; None follows the model's `--pooling`.
        target: with "attention", the field of the candidate: another field of the same `table`,
            with one value per row.
        separator: separator of the values in CSV.
        encodings: numerical features derived from the value.
        missing_values: texts that mean "missing" besides empty ones; None is those of the schema.
        true_values, false_values: texts that mean true and false, besides `true` and `false` in
            lower case, in upper case and capitalized.
        cardinality: for the type "id", number of rows of the table, greater than every id; None is
            the greatest id of all splits plus one.
    """

    column: str
    type: str = "string"
    frequency_limit: int = 1
    max_ids: int | None = None
    hash_buckets: int = 0
    dictionary: str | None = None
    table: str | None = None
    embedding_dim: int | None = None
    max_length: int | None = None
    keep: str | None = None
    ordered: bool = True
    weights: str | None = None
    pooling: str | None = None
    target: str | None = None
    separator: str = "|"
    encodings: tuple[Encoding, ...] = ()
    missing_values: tuple[str, ...] | None = None
    true_values: tuple[str, ...] = ()
    false_values: tuple[str, ...] = ()
    cardinality: int | None = None

    def __post_init__(self) -> None:
        where = f"categorical field {self.column}"
        _check_spellings(where, self)
        _check_choice(where, "type", self.type, CATEGORICAL_TYPES)
        self._check_ids(where)
        for name in ("table", "dictionary"):
            if getattr(self, name) == "":
                raise ValueError(f"{where}: {name}: expected a name, got ''")
        if self.table is not None and self.dictionary is not None:
            raise ValueError(
                f"{where}: dictionary: expected none beside table {self.table!r}, whose fields "
                f"share the dictionary of that name, got {self.dictionary!r}"
            )
        if self.embedding_dim is not None and self.embedding_dim < 1:
            raise ValueError(
                f"{where}: embedding_dim: expected 1 or more, got {self.embedding_dim}"
            )
        if self.type == "hexadecimal" and (self.true_values or self.false_values):
            raise ValueError(f"{where}: true_values: expected the type string or integer")
        if self.frequency_limit < 1:
            raise ValueError(
                f"{where}: frequency_limit: expected 1 or more, got {self.frequency_limit}"
            )
        if self.max_ids is not None and self.max_ids < 0:
            raise ValueError(f"{where}: max_ids: expected 0 or more, got {self.max_ids}")
        if not 0 <= self.hash_buckets <= _MAX_BUCKETS:
            raise ValueError(
                f"{where}: hash_buckets: expected 0 to {_MAX_BUCKETS}, got {self.hash_buckets}"
            )
        if self.max_ids == 0 and not self.hash_buckets:
            raise ValueError(f"{where}: max_ids 0: expected hash_buckets, as no value has an id")
        kinds = [encoding.kind for encoding in self.encodings]
        if len(set(kinds)) < len(kinds):
            raise ValueError(f"{where}: encodings: expected each once, got {', '.join(kinds)}")
        if kinds and self.max_length is not None:
            raise ValueError(
                f"{where}: encodings: expected none of a list field, got {', '.join(kinds)}"
            )
        self._check_list(where)

    def _check_ids(self, where: str) -> None:
        if self.type != "id":
            if self.cardinality is not None:
                raise ValueError(f"{where}: cardinality: expected the type id, got {self.type}")
            return
        why = "expected a type other than id, whose values are kept as they are"
        self._check_defaults(where, _OF_DICTIONARIES, why)
        if self.cardinality is not None and not 1 <= self.cardinality <= layout.MAX_CARDINALITY:
            raise ValueError(
                f"{where}: cardinality: expected 1 to {layout.MAX_CARDINALITY}, got "
                f"{self.cardinality}"
            )

    def _check_defaults(self, where: str, names: Collection[str], why: str) -> None:
        for field in fields(self):
            if field.name in names and getattr(self, field.name) != field.default:
                raise ValueError(f"{where}: {field.name}: {why}")

    def _check_list(self, where: str) -> None:
        if self.max_length is None:
            why = "expected max_length too, which makes a field one of lists, got none"
            self._check_defaults(where, _OF_LISTS, why)
            return
        if not 1 <= self.max_length <= MAX_LENGTH:
            raise ValueError(
                f"{where}: max_length: expected 1 to {MAX_LENGTH}, got {self.max_length}"
            )
        poolings = (None, *POOLINGS, ATTENTION)
        for name, allowed in (("keep", (None, *KEEP)), ("pooling", poolings)):
            if (value := getattr(self, name)) not in allowed:
                shown = ", ".join(filter(None, allowed))
                raise ValueError(f"{where}: {name}: expected one of {shown}, got {brief(value)}")
        if len(self.separator) != 1 or self.separator in _NO_SEPARATORS:
            raise ValueError(
                f"{where}: separator: expected one character, and no quote or end of a line, got "
                f"{brief(self.separator)}"
            )

        if self.pooling == ATTENTION:
            self._check_attended(where)
        elif self.target is not None:
            raise ValueError(
                f"{where}: target: expected pooling: attention beside it, got "
                f"{self.pooling or 'none'}"
            )
        if self.keep == "last" and not self.ordered:
            raise ValueError(
                f"{where}: keep: expected first or all, as ordered is false, got last, which are "
                "the rarest values"
            )

    def _check_attended(self, where: str) -> None:
        if self.target is None:
            raise ValueError(
                f"{where}: pooling: attention: expected a target, the candidate's field, got none"
            )
        if not self.ordered:
            raise ValueError(
                f"{where}: pooling: attention: expected an ordered list, got ordered: false; leave "
                "ordered out, or write pooling: sum or mean"
            )
        if self.table is None:
            raise ValueError(
                f"{where}: pooling: attention: expected table: NAME here and at {self.target}, so "
                "that list and candidate share a table, got none"
            )

    @property
    def shared(self) -> str | None:
        """Returns the name of the dictionary that the field shares; None if it has its own."""
        return self.dictionary or self.table

    @property
    def kept(self) -> str:
        """Returns `keep`, or its default."""
        return self.keep or ("last" if self.ordered else "first")

    @property
    def list_field(self) -> ListField | None:
        """Returns the list field in a dataset's form; None if a row has one value."""
        if self.max_length is None:
            return None
        return ListField(self.max_length, self.weights is not None, self.pooling, self.target)


@dataclass(frozen=True)
class TimeField:
    """The column of times: timestamps, or text in ISO 8601.

    Attributes:
        column: its name.
        zone: time zone of timestamps without one, such as "UTC" or "Europe/Zurich"; None refuses
            them. A local time that occurs twice is the first one, and a local time that the clocks
            skip is the last moment before.
        unit: "s", "ms", "us" or "ns" of numbers that count from 1970-01-01 in UTC; None refuses
            them.
        format: form of times in text, as `datetime.strptime` takes it; None is ISO 8601.
    """

    column: str
    zone: str | None = None
    unit: str | None = None
    format: str | None = None

    def __post_init__(self) -> None:
        if self.unit not in (None, *TIME_UNITS):
            raise ValueError(
                f"time {self.column}: unit: expected {', '.join(TIME_UNITS)}, got "
                f"{brief(self.unit)}"
            )
        if self.format is not None and not set(_DAYS) & set(_DIRECTIVE.findall(self.format)):
            raise ValueError(
                f"time {self.column}: format: expected directives such as %d/%m/%Y %H:%M, got "
                f"{brief(self.format)}"
            )
        if self.format is not None and self.unit is not None:
            raise ValueError(f"time {self.column}: expected a unit or a format, got both")

    def check_zone(self) -> None:
        """Raises ValueError if this machine does not know the time zone."""
        try:
            ZoneInfo(self.zone or "UTC")
        except (ValueError, OSError, LookupError):
            raise ValueError(
                f"time {self.column}: zone: expected the name of a time zone such as UTC or "
                f"Europe/Zurich, got {brief(self.zone)}"
            ) from None


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
        check_features("number of numerical fields:", len(self.numerical_features))
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
        for field, name in zip(self.numerical, self.numerical_names, strict=False):
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
        taken = [*self.columns, *self.numerical_names[: len(self.numerical)]]
        made = [(f"cross {cross.column}", cross.column) for cross in self.crosses]
        for _, field in self.encoded:
            names = [encoding.name_of(field.column) for encoding in field.encodings]
            made += [(f"encoding of {field.column}", name) for name in names]
        for what, name in made:
            if name in taken:
                raise ValueError(
                    f"{what}: name: expected one that no other column or field has, got {name}"
                )
            taken.append(name)

    def _shown(self, name: str) -> str:
        """Describes a column that a cross or an encoding cannot use."""
        if name == self.label.column:
            return f"the label {name}"
        numerical = {field.column for field in self.numerical_features}
        return f"numerical field {name}" if name in numerical else brief(name)

    def _check_shared(self) -> None:
        """Checks that fields of a shared dictionary agree on the type and numbering of values."""
        for fields_of in self.dictionaries().values():
            first = fields_of[0]
            names = ["type", "frequency_limit", "max_ids", "hash_buckets", "cardinality"]
            names += ["embedding_dim"] if first.table is not None else []
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

    def missing_of(self, field: NumericalField | CategoricalField) -> tuple[str, ...]:
        """Returns the texts that mean "missing" in a field, besides empty ones."""
        return self.missing_values if field.missing_values is None else field.missing_values

    @property
    def numerical_features(self) -> tuple[NumericalField, ...]:
        """Returns the model's numerical inputs: the fields, then the encodings."""
        return self.numerical + tuple(
            NumericalField(encoding.name_of(field.column), encoding.transform, encoding.bins)
            for _, field in self.encoded
            for encoding in field.encodings
        )

    @property
    def encoded(self) -> list[tuple[int, CategoricalField]]:
        """Returns the categorical features with encodings, each with its index among all."""
        features = enumerate(self.categorical_features)
        return [(place, field) for place, field in features if field.encodings]

    @property
    def weighs_targets(self) -> bool:
        """Returns whether sample weights are summed for targets."""
        kinds = [encoding.kind for _, field in self.encoded for encoding in field.encodings]
        return self.weight is not None and TARGET in kinds

    @property
    def categorical_features(self) -> tuple[CategoricalField, ...]:
        """Returns the model's categorical inputs, a table each: the fields, then the crosses."""
        return self.categorical + tuple(map(_field_of_cross, self.crosses))

    @property
    def numerical_names(self) -> list[str]:
        """Returns the names of `numerical_features`, each unique in a dataset.

        The number of a column that is categorical too is called `<column>_number`.
        """
        both = {field.column for field in self.categorical}
        return [
            f"{field.column}_number" if field.column in both else field.column
            for field in self.numerical_features
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

    @property
    def embedding_dims(self) -> dict[str, int]:
        """Returns the columns of tables by categorical feature, where the schema says them."""
        said = {field.column: field.embedding_dim for field in self.categorical}
        return {name: dim for name, dim in said.items() if dim is not None}

    def to_dict(self) -> dict[str, Any]:
        """Returns the schema as maps and lists, without default values."""
        return {"version": VERSION} | _without_defaults(self)

    def facts(self) -> dict[str, Any]:
        """Returns `to_dict()`; the name of earlier versions."""
        return self.to_dict()

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
            if name in _FIELDS:
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
                made[name] = None if value is None else _format(value)
            elif name in kinds:
                made[name] = None if value is None else _field(kinds[name], name, value)
            elif name in _FIELDS:
                if not isinstance(value, list):
                    raise ValueError(f"{name}: expected a list of fields, got {brief(value)}")
                made[name] = tuple(_field(_FIELDS[name], name, item) for item in value)
            else:
                made[name] = value
        return _made(cls, "", made)

    @classmethod
    def of_facts(cls, facts: dict[str, Any]) -> "Schema":
        """Returns `from_dict(facts)`; the name of earlier versions."""
        return cls.from_dict(facts)


def _format(value: Any) -> TextFormat:
    try:
        return _field(TextFormat, "format", value)
    except ValueError as error:
        message = str(error).removeprefix("format: ").replace("--", "")  # of the flags' names
        raise ValueError(f"format: {message}") from None


_DIRECTIVE = re.compile(r"%([A-Za-z%])")
_DAYS = "djcxsDF"  # directives of which a format has at least one
_SPELLINGS = {**dict.fromkeys(("true", "True", "TRUE"), True)}
_SPELLINGS |= dict.fromkeys(("false", "False", "FALSE"), False)


def _check_spellings(where: str, field: Any) -> None:
    """Raises ValueError if a text means two of true, false and missing in a field."""
    true, false, missing = (set(getattr(field, f"{name}_values") or ()) for name in _MEANINGS)
    for texts, other, got in ((true, false, "both"), (true, missing, "true and missing")):
        if both := sorted(texts & other):
            raise ValueError(f"{where}: expected one meaning of {both[0]!r}, got {got}")
    if both := sorted(false & missing):
        raise ValueError(f"{where}: expected one meaning of {both[0]!r}, got false and missing")
    for text, meaning in _SPELLINGS.items():
        if text in (false if meaning else true):
            raise ValueError(
                f"{where}: {str(not meaning).lower()}_values: expected no {text!r}, which means "
                f"{str(meaning).lower()}"
            )


_MEANINGS = ("true", "false", "missing")


_FIELDS: dict[str, type] = {
    "numerical": NumericalField,
    "categorical": CategoricalField,
    "crosses": Cross,
}


def _field_of_cross(cross: Cross) -> CategoricalField:
    """Returns the field of a cross's ids; its values have texts if they have ids of their own.

    Its type selects how values are counted, as `counted_columns` does.
    """
    if cross.frequency_limit is None:
        field = CategoricalField(cross.column, "integer", max_ids=0, hash_buckets=cross.buckets)
    else:
        limits = cross.frequency_limit, cross.max_ids
        field = CategoricalField(cross.column, "string", *limits, cross.buckets)
    return replace(field, encodings=cross.encodings)


_Kind = TypeVar("_Kind")
_TYPES: dict[str, tuple[type | None, ...]] = {
    **dict.fromkeys(("column", "transform", "type", "separator", "kind"), (str,)),
    **dict.fromkeys(("positive", "zone", "unit", "dictionary", "weight", "keep"), (str, None)),
    "format": (str, None),
    **dict.fromkeys(("delimiter", "quote", "escape", "encoding", "decimal"), (str, None)),
    **dict.fromkeys(("thousands", "compression"), (str, None)),
    "header": (bool, None),
    **dict.fromkeys(("weights", "pooling", "name", "table", "target"), (str, None)),
    **dict.fromkeys(("frequency_limit", "hash_buckets", "bins", "buckets", "folds"), (int,)),
    "smoothing": (float,),
    **dict.fromkeys(("cardinality", "embedding_dim", "max_ids", "max_length"), (int, None)),
    **dict.fromkeys(("any_negative", "ordered", "required"), (bool,)),
    "negative": (tuple, None),
    **dict.fromkeys(("missing_values", "groups", "fields", "columns"), (tuple,)),
    **dict.fromkeys(("true_values", "false_values"), (tuple,)),
}
_NAMES = {str: "a text", int: "an integer", bool: "true or false", tuple: "a list of texts"}
_NAMES |= {float: "a number"}
# The entry of a field that is one word; None is none.
_SHORT: dict[type, str | None] = {Cross: None, TextFormat: None, Encoding: "kind"}


def _field(kind: type[_Kind], where: str, value: Any) -> _Kind:
    """Returns a field made from a map, or from only the name of its column."""
    scalar = isinstance(value, str | int | float) and not isinstance(value, bool)
    short = _SHORT.get(kind, "column")
    if scalar and short is not None:
        value = {short: value}
    if not isinstance(value, dict):
        expected = f"a {short} or a map" if short else "a map with fields"
        raise ValueError(f"{where}: expected {expected}, got {brief(value)}")
    column = value.get("column", value.get("name", value.get("kind")))
    return _made(kind, f"{where} {column}: " if isinstance(column, str) else f"{where}: ", value)


def _made(kind: type[_Kind], where: str, values: dict[str, Any]) -> _Kind:
    known = {entry.name: entry for entry in _entries(kind)}
    for name in values:
        if name not in known:
            raise ValueError(
                f"{where}expected some of {', '.join(known)}, got {brief(name)} as well"
            )
    for name, field in known.items():
        if field.default is MISSING and name not in values:
            raise ValueError(f"{where}{name}: missing")
    checked = {name: _checked(where, name, value) for name, value in values.items()}
    return kind(**checked)


def _checked(where: str, name: str, value: Any) -> Any:
    """Returns the value of an entry in its type, with numbers that YAML parsed as texts."""
    if name == "encodings":
        return _encodings(where, value)
    types = _TYPES.get(name)
    if types is None or (value is None and None in types) or isinstance(value, TextFormat):
        return value
    expected = types[0]
    if name == "positive" and isinstance(value, list | tuple):
        expected = tuple
    if expected is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)  # a column named 0, or the label 1
    if expected is str and isinstance(value, bool):
        return str(value).lower()
    if expected is tuple and isinstance(value, list | tuple):
        return tuple(_checked(where, "column", item) for item in value)
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, expected or object) or (expected is int and isinstance(value, bool)):
        raise ValueError(f"{where}{name}: expected {_NAMES[expected or str]}, got {brief(value)}")
    return value


def _encodings(where: str, value: Any) -> tuple[Encoding, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{where}encodings: expected a list such as [target], got {brief(value)}")
    try:
        return tuple(_field(Encoding, "encodings", item) for item in value)
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None


def _entries(kind: Any) -> list[Field[Any]]:
    """Returns the fields of a configuration that are entries of a schema."""
    return [field for field in fields(kind) if field.metadata.get("in_schema", True)]


def _without_defaults(value: Any) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for field in _entries(value):
        content = getattr(value, field.name)
        if content == field.default:
            continue
        if field.name in _FIELDS or field.name == "encodings":
            entry = "kind" if field.name == "encodings" else "column"
            short = [_without_defaults(item) for item in content]
            entries[field.name] = [m[entry] if list(m) == [entry] else m for m in short]
        elif hasattr(content, "__dataclass_fields__"):
            entries[field.name] = _without_defaults(content)
        else:
            entries[field.name] = list(content) if isinstance(content, tuple) else content
    return entries


def _repeated(names: Sequence[str]) -> list[str]:
    return sorted({name for name in names if list(names).count(name) > 1})
