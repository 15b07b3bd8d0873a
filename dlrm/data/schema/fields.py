"""Fields of a schema: the label, numbers, categories, crosses and times.

A field describes its entries by `setting`, from which reading, checks and reference page follow;
`_problems` yields what rules over several entries refuse.
"""

import itertools
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar
from zoneinfo import ZoneInfo

from dlrm.data import layout
from dlrm.data.bags import ATTENTION, MAX_LENGTH, POOLINGS, ListField
from dlrm.data.choices import SPELLINGS
from dlrm.data.schema.numeric_transforms import NUMERIC_TRANSFORMS, NumericTransform
from dlrm.documents import brief
from dlrm.settings import REQUIRED, setting, settings_of

TIME_UNITS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1000, "ns": 1}  # in nanoseconds
MAX_BINS = 256
_MAX_BUCKETS = 1 << 30
_optional = partial(setting, None)
# Entries of list fields only.
_OF_LISTS = ("keep", "ordered", "weights", "pooling", "target", "separator")
_OF_DICTIONARIES = (  # entries of fields whose values get ids
    *("frequency_limit", "max_ids", "hash_buckets", "dictionary"),
    *("missing_values", "true_values", "false_values"),
)


class Field:
    """A field of a schema, which is checked when it is made; messages begin with its title."""

    _title: ClassVar[str]

    def __init_subclass__(cls, title: str) -> None:
        cls._title = title

    def __post_init__(self: Any) -> None:
        for problem in itertools.chain(self._refused_settings(), self._problems()):
            raise ValueError(f"{self._title} {self.column}: {problem}")

    def _refused_settings(self) -> Iterator[str]:
        for name, described in settings_of(type(self)).items():
            if not described.takes(value := getattr(self, name)):
                yield f"{name}: expected {described.expected}, got {brief(value)}"

    def _given(self: Any, names: Collection[str], problem: str) -> Iterator[str]:
        for field in fields(self):
            if field.name in names and getattr(self, field.name) != field.default:
                yield f"{field.name}: {problem}"


@dataclass(frozen=True)
class Cross(Field, title="cross"):
    """A categorical field whose values are the combinations of values of other fields."""

    fields: tuple[str, ...] = setting(
        REQUIRED, "columns of two or more categorical fields, with one value a row"
    )
    name: str | None = _optional("name of the field; default: the columns, joined by _x_")
    buckets: int = setting(
        0,
        "number of ids, chosen by hash, that combinations without an id of their own share; 0 "
        "gives them id 0, which is that of rows with a missing value",
    )
    frequency_limit: int | None = _optional(
        "combinations in at least this many training rows have ids of their own; default: none has"
    )
    max_ids: int | None = _optional(
        "number of combinations with ids of their own, the most frequent ones; default: all"
    )

    def _problems(self) -> Iterator[str]:
        if len(self.fields) < 2 or len(set(self.fields)) < len(self.fields):
            yield f"fields: expected two or more different ones, got {brief(list(self.fields))}"
        if self.frequency_limit is None and self.buckets < 1:
            yield (
                f"buckets: expected 1 or more, or a frequency_limit, got {self.buckets}; add "
                "`buckets: 100000` or `frequency_limit: 15`"
            )
        if self.frequency_limit is None and self.max_ids is not None:
            yield "max_ids: expected a frequency_limit too, got none"

    @property
    def column(self) -> str:
        """Returns `name`, or the default name."""
        return self.name or "_x_".join(self.fields)


@dataclass(frozen=True)
class Label(Field, title="label"):
    """The column of labels."""

    column: str = setting(REQUIRED, "its name")
    positive: str | tuple[str, ...] | None = _optional(
        "the value that counts as 1, or several; default: labels are 0 and 1, or false and true"
    )
    negative: tuple[str, ...] | None = _optional("values that count as 0; default: one other value")
    any_negative: bool = setting(
        False, "whether all other values count as 0; of numbers, all other numbers"
    )

    def _problems(self) -> Iterator[str]:
        if self.positive == ():
            yield "positive: expected one value or more, got none"
        for text in sorted(set(self.positives) & set(self.negative or ())):
            yield f"expected values that count as 1 or as 0, got {text!r} as both"

    @property
    def positives(self) -> tuple[str, ...]:
        """Returns the values that count as 1; none if labels are 0 and 1."""
        return (self.positive,) if isinstance(self.positive, str) else self.positive or ()


_MISSING_VALUES = "texts that mean missing, besides empty ones; default: those of the schema"
_SPELLINGS = "texts that mean {}, besides `{}` in lower case, in upper case and capitalized"


@dataclass(frozen=True)
class NumericalField(Field, title="numerical field"):
    """A column of numbers."""

    column: str = setting(REQUIRED, "its name")
    transform: str = setting(
        "standardize", "the transform of its numbers", choices=NUMERIC_TRANSFORMS
    )
    bins: int = setting(
        0,
        "number of bins to fit, at quantiles of the values and of the distinct values; 0 fits none",
        least=0,
        most=MAX_BINS,
    )
    missing_values: tuple[str, ...] | None = _optional(_MISSING_VALUES)
    true_values: tuple[str, ...] = setting((), _SPELLINGS.format("1", "true"))
    false_values: tuple[str, ...] = setting((), _SPELLINGS.format("0", "false"))
    type: str = setting(
        "number",
        "decimal is an integer of up to 18 digits, as logs have them",
        choices=("number", "decimal"),
    )
    required: bool = setting(False, "whether a row without a number is a bad one")

    def _problems(self) -> Iterator[str]:
        if self.type != "number" and (self.true_values or self.false_values):
            yield f"true_values: expected the type number, got {self.type}"
        if self.bins == 1:
            yield f"bins: expected 0, or 2 to {MAX_BINS}, got 1"
        yield from _spelled_twice(self)

    @property
    def rule(self) -> NumericTransform:
        """Returns the transform."""
        return NUMERIC_TRANSFORMS[self.transform]

    @property
    def fitted_bins(self) -> int:
        """Returns the number of bins that the transform or the model needs; 0 for none."""
        return self.bins or self.rule.bins


@dataclass(frozen=True)
class CategoricalField(Field, title="categorical field"):
    """A column of values, or of lists of them, each with a row of an embedding table."""

    column: str = setting(REQUIRED, "its name")
    type: str = setting(
        "string",
        "string is text without surrounding blanks, integer has 64 bits, hexadecimal has up to 16 "
        "digits, of which zeros at the beginning mean nothing; of id, values are the ids "
        "themselves, from 0, and every row must have one",
        choices=("string", "integer", "hexadecimal", "id"),
    )
    frequency_limit: int = setting(
        1, "values in fewer training rows have no id of their own", least=1
    )
    max_ids: int | None = _optional(
        "number of values with ids of their own, the most frequent ones; default: all", least=0
    )
    hash_buckets: int = setting(
        0,
        "number of further ids, chosen by hash, that values without their own share; 0 gives them "
        "id 0, which is that of missing values",
        least=0,
        most=_MAX_BUCKETS,
    )
    dictionary: str | None = _optional(
        "name of a dictionary that fields share, for which their counts are added up; default: one "
        "of the field's own, or that of its table"
    )
    table: str | None = _optional(
        "name of an embedding table that fields share, with the dictionary of this name; default: "
        "one of the field's own"
    )
    max_length: int | None = _optional(
        "number of values to keep, which makes it a field of lists; default: one value a row",
        least=1,
        most=MAX_LENGTH,
    )
    keep: str | None = _optional(
        "which values of a longer list to keep; all refuses longer lists; default: the last ones, "
        "or the first ones if they are not ordered",
        choices=("first", "last", "all"),
    )
    ordered: bool = setting(
        True,
        "whether ids stay in the order of the list; otherwise they are sorted before a longer list "
        "is cut, so that the order in the source has no effect: ids of frequent values come first, "
        "and id 0 last",
    )
    weights: str | None = _optional(
        "column with a list of numbers, one for each value; default: none"
    )
    pooling: str | None = _optional(
        "how the rows that are looked up become one; attention weighs them by their relation to "
        "the candidate; default: that of the model's --pooling",
        choices=(*POOLINGS, ATTENTION),
    )
    target: str | None = _optional(
        "with attention, the field of the candidate: another field of the same table, with one "
        "value a row"
    )
    separator: str = setting("|", "separator of the values in CSV")
    missing_values: tuple[str, ...] | None = _optional(_MISSING_VALUES)
    true_values: tuple[str, ...] = setting((), _SPELLINGS.format("true", "true"))
    false_values: tuple[str, ...] = setting((), _SPELLINGS.format("false", "false"))
    cardinality: int | None = _optional(
        "for the type id, number of rows of the table, greater than every id; default: the "
        "greatest id of all splits plus one",
        least=1,
        most=layout.MAX_CARDINALITY,
    )

    def _problems(self) -> Iterator[str]:
        yield from _spelled_twice(self)
        if self.type == "id":
            problem = "expected a type other than id, whose values are kept as they are"
            yield from self._given(_OF_DICTIONARIES, problem)
        elif self.cardinality is not None:
            yield f"cardinality: expected the type id, got {self.type}"
        for name in ("table", "dictionary"):
            if getattr(self, name) == "":
                yield f"{name}: expected a name, got ''"
        if self.table is not None and self.dictionary is not None:
            yield (
                f"dictionary: expected none beside table {self.table!r}, whose fields share the "
                f"dictionary of that name, got {self.dictionary!r}"
            )
        if self.type == "hexadecimal" and (self.true_values or self.false_values):
            yield "true_values: expected the type string or integer"
        if self.max_ids == 0 and not self.hash_buckets:
            yield "max_ids 0: expected hash_buckets, as no value has an id"
        if self.max_length is not None:
            yield from self._problems_of_lists()
            return
        problem = "expected max_length too, which makes a field one of lists, got none"
        yield from self._given(_OF_LISTS, problem)

    def _problems_of_lists(self) -> Iterator[str]:
        if len(self.separator) != 1 or self.separator in '"\r\n\0':
            yield (
                "separator: expected one character, and no quote or end of a line, got "
                f"{brief(self.separator)}"
            )
        if self.pooling != ATTENTION and self.target is not None:
            got = self.pooling or "none"
            yield f"target: expected pooling: attention beside it, got {got}"
        given = self.target is not None and self.table is not None and self.ordered
        if self.pooling == ATTENTION and not given:
            yield (
                "pooling: attention: expected a target, the candidate's field, table: NAME here "
                "and there, so that list and candidate share a table, and an ordered list, got "
                f"target: {self.target or 'none'}, table: {self.table or 'none'}, ordered: "
                f"{str(self.ordered).lower()}"
            )
        if self.keep == "last" and not self.ordered:
            yield (
                "keep: expected first or all, as ordered is false, got last, which are the rarest "
                "values"
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
class TimeField(Field, title="time"):
    """The column of times: timestamps, or text in ISO 8601."""

    column: str = setting(REQUIRED, "its name")
    zone: str | None = _optional(
        "time zone of timestamps without one, such as UTC or Europe/Zurich; default: these are "
        "refused. A local time that occurs twice is the first one, and one that the clocks skip is "
        "the last moment before"
    )
    unit: str | None = _optional(
        "unit of numbers that count from 1970-01-01 in UTC; default: these are refused",
        choices=TIME_UNITS,
    )
    format: str | None = _optional(
        "form of times in text, as `datetime.strptime` takes it; default: ISO 8601"
    )

    def _problems(self) -> Iterator[str]:
        directives = re.findall("%([A-Za-z%])", self.format or "%d")
        if not set("djcxsDF").intersection(directives):  # of days
            got = brief(self.format)
            yield f"format: expected directives such as %d/%m/%Y %H:%M, got {got}"
        if self.format is not None and self.unit is not None:
            yield "expected a unit or a format, got both"

    def check_zone(self) -> None:
        """Raises ValueError if this machine does not know the time zone."""
        try:
            ZoneInfo(self.zone or "UTC")
        except (ValueError, OSError, LookupError):
            raise ValueError(
                f"time {self.column}: zone: expected the name of a time zone such as UTC or "
                f"Europe/Zurich, got {brief(self.zone)}"
            ) from None


def _spelled_twice(field: NumericalField | CategoricalField) -> Iterator[str]:
    """Yields messages about texts that mean two of true, false and missing."""
    own = {"true": {*field.true_values}, "false": {*field.false_values}}
    for meaning, texts in own.items():
        for text in sorted(texts.intersection(field.missing_values or ())):
            yield f"expected one meaning of {text!r}, got {meaning} and missing"
    for text, meaning in SPELLINGS.items():
        own[meaning].add(text)
    for text in sorted(own["true"] & own["false"]):
        yield f"expected one meaning of {text!r}, got true and false"
