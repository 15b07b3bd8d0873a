"""The entries of `schema.yaml`: fields made from maps and lists, and the reverse."""

from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from typing import Any, TypeVar

from dlrm.data.sources.text_format import TextFormat
from dlrm.data.transform.fields import CategoricalField, Cross, NumericalField
from dlrm.documents import brief

FIELDS: dict[str, type] = {
    "numerical": NumericalField,
    "categorical": CategoricalField,
    "crosses": Cross,
}
_Kind = TypeVar("_Kind")
_TYPES: dict[str, tuple[type | None, ...]] = {
    **dict.fromkeys(("column", "transform", "type", "separator"), (str,)),
    **dict.fromkeys(("positive", "zone", "unit", "dictionary", "weight", "keep"), (str, None)),
    "format": (str, None),
    **dict.fromkeys(("delimiter", "quote", "escape", "encoding", "decimal"), (str, None)),
    **dict.fromkeys(("thousands", "compression"), (str, None)),
    "header": (bool, None),
    **dict.fromkeys(("weights", "pooling", "name", "table", "target"), (str, None)),
    **dict.fromkeys(("frequency_limit", "hash_buckets", "bins", "buckets"), (int,)),
    **dict.fromkeys(("cardinality", "max_ids", "max_length"), (int, None)),
    **dict.fromkeys(("any_negative", "ordered", "required"), (bool,)),
    "negative": (tuple, None),
    **dict.fromkeys(("missing_values", "groups", "fields", "columns"), (tuple,)),
    **dict.fromkeys(("true_values", "false_values"), (tuple,)),
}
_NAMES = {str: "a text", int: "an integer", bool: "true or false", tuple: "a list of texts"}
# The entry of a field that is one word; None is none.
_SHORT: dict[type, str | None] = {Cross: None, TextFormat: None}


def field_of(kind: type[_Kind], where: str, value: Any) -> _Kind:
    """Returns a field made from a map, or from only the name of its column."""
    scalar = isinstance(value, str | int | float) and not isinstance(value, bool)
    short = _SHORT.get(kind, "column")
    if scalar and short is not None:
        value = {short: value}
    if not isinstance(value, dict):
        expected = f"a {short} or a map" if short else "a map with fields"
        raise ValueError(f"{where}: expected {expected}, got {brief(value)}")
    column = value.get("column", value.get("name"))
    return made_of(kind, f"{where} {column}: " if isinstance(column, str) else f"{where}: ", value)


def made_of(kind: type[_Kind], where: str, values: dict[str, Any]) -> _Kind:
    known = {entry.name: entry for entry in _entries(kind)}
    for name in values:
        if name not in known:
            near = "".join(f"; did you mean {n}?" for n in get_close_matches(str(name), known, 1))
            raise ValueError(
                f"{where}expected some of {', '.join(known)}, got {brief(name)} as well{near}"
            )
    for name, field in known.items():
        if field.default is MISSING and name not in values:
            raise ValueError(f"{where}{name}: missing")
    checked = {name: _checked(where, name, value) for name, value in values.items()}
    return kind(**checked)


def _checked(where: str, name: str, value: Any) -> Any:
    """Returns the value of an entry in its type, with numbers that YAML parsed as texts."""
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
    if not isinstance(value, expected or object) or (expected is int and isinstance(value, bool)):
        raise ValueError(f"{where}{name}: expected {_NAMES[expected or str]}, got {brief(value)}")
    return value


def _entries(kind: Any) -> list[Field[Any]]:
    """Returns the fields of a configuration that are entries of a schema."""
    return [field for field in fields(kind) if field.metadata.get("in_schema", True)]


def without_defaults(value: Any) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for field in _entries(value):
        content = getattr(value, field.name)
        if content == field.default:
            continue
        if field.name in FIELDS:
            short = [without_defaults(item) for item in content]
            entries[field.name] = [m["column"] if list(m) == ["column"] else m for m in short]
        elif hasattr(content, "__dataclass_fields__"):
            entries[field.name] = without_defaults(content)
        else:
            entries[field.name] = list(content) if isinstance(content, tuple) else content
    return entries


def format_of(value: Any) -> TextFormat:
    try:
        return field_of(TextFormat, "format", value)
    except ValueError as error:
        message = str(error).removeprefix("format: ").replace("--", "")  # of the flags' names
        raise ValueError(f"format: {message}") from None
