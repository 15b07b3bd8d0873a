"""Fields of a schema: the label, numbers, categories and times, and those derived from others."""

import itertools
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from typing import Any
from zoneinfo import ZoneInfo

from dlrm.data.clicks import layout
from dlrm.data.clicks.bags import ATTENTION, MAX_LENGTH, POOLINGS, ListField
from dlrm.data.transform.numeric_transforms import NUMERIC_TRANSFORMS, NumericTransform
from dlrm.data.transform.values import SPELLINGS
from dlrm.documents import brief

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


@dataclass(frozen=True)
class Cross:
    """A categorical field whose values are the combinations of values of other fields.

    Attributes:
        fields: columns of two or more categorical fields, with one value per row.
        name: name of the field; None is the columns, joined by "_x_".
        buckets: number of ids, chosen by hash, that combinations without an id of their own share;
            0 gives them id 0, which is that of rows with a missing value.
        frequency_limit: combinations in at least this many training rows have ids of their own;
            None gives no combination its own id.
        max_ids: number of combinations with ids of their own, the most frequent ones; None is all.
    """

    fields: tuple[str, ...]
    name: str | None = None
    buckets: int = 0
    frequency_limit: int | None = None
    max_ids: int | None = None

    def __post_init__(self) -> None:
        where = f"cross {self.column}"
        if len(self.fields) < 2 or len(set(self.fields)) < len(self.fields):
            raise ValueError(
                f"{where}: fields: expected two or more different ones, got "
                f"{brief(list(self.fields))}"
            )
        if self.frequency_limit is None:
            if self.buckets < 1:
                raise ValueError(
                    f"{where}: buckets: expected 1 or more, or a frequency_limit, got "
                    f"{self.buckets}; add `buckets: 100000` or `frequency_limit: 15`"
                )
            if self.max_ids is not None:
                raise ValueError(f"{where}: max_ids: expected a frequency_limit too, got none")

    @property
    def column(self) -> str:
        """Returns `name`, or the default name."""
        return self.name or "_x_".join(self.fields)


@dataclass(frozen=True)
class Label:
    """The column of labels.

    Attributes:
        column: its name.
        positive: the value that counts as 1, or several; None if labels are 0 and 1, or false and
            true.
        negative: values that count as 0; None accepts one other value.
        any_negative: whether all other values count as 0; of numbers, all other numbers.
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
    max_length: int | None = None
    keep: str | None = None
    ordered: bool = True
    weights: str | None = None
    pooling: str | None = None
    target: str | None = None
    separator: str = "|"
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
        if self.type == "hexadecimal" and (self.true_values or self.false_values):
            raise ValueError(f"{where}: true_values: expected the type string or integer")
        for name, least in {"frequency_limit": 1, "max_ids": 0}.items():
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"{where}: {name}: expected {least} or more, got {value}")
        if not 0 <= self.hash_buckets <= _MAX_BUCKETS:
            raise ValueError(
                f"{where}: hash_buckets: expected 0 to {_MAX_BUCKETS}, got {self.hash_buckets}"
            )
        if self.max_ids == 0 and not self.hash_buckets:
            raise ValueError(f"{where}: max_ids 0: expected hash_buckets, as no value has an id")
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


_DIRECTIVE = re.compile(r"%([A-Za-z%])")
_DAYS = "djcxsDF"  # directives of which a format has at least one


def _check_spellings(where: str, field: Any) -> None:
    """Raises ValueError if a text means two of true, false and missing in a field."""
    said = {name: set(getattr(field, f"{name}_values") or ()) for name in _MEANINGS}
    for one, other in itertools.combinations(_MEANINGS, 2):
        if both := sorted(said[one] & said[other]):
            got = f"{one} and {other}" if other == "missing" else "both"
            raise ValueError(f"{where}: expected one meaning of {both[0]!r}, got {got}")
    for text, meaning in SPELLINGS.items():
        if text in said[_OPPOSITES[meaning]]:
            raise ValueError(
                f"{where}: {_OPPOSITES[meaning]}_values: expected no {text!r}, which means "
                f"{meaning}"
            )


_MEANINGS, _OPPOSITES = ("true", "false", "missing"), {"true": "false", "false": "true"}
