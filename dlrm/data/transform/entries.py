"""The entries of `schema.yaml`: fields made from maps and lists, and the reverse."""

from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from dlrm.data.sources.text_format import TextFormat
from dlrm.data.transform.fields import CategoricalField, Cross, NumericalField
from dlrm.documents import brief

FIELDS: dict[str, type] = {
    "numerical": NumericalField,
    "categorical": CategoricalField,
    "crosses": Cross,
}
_Kind = TypeVar("_Kind")
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
    types = get_type_hints(kind)
    return kind(**{name: _checked(where, name, v, types[name]) for name, v in values.items()})


def _checked(where: str, name: str, value: Any, hint: Any) -> Any:
    """Returns the value of an entry in its type, with numbers that YAML parsed as texts."""
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    types = [get_origin(kind) or kind for kind in kinds]
    if isinstance(value, list | tuple) and tuple in types:
        if any(get_args(kind)[:1] == (str,) for kind in kinds):
            return tuple(_checked(where, "column", item, str) for item in value)
        return value  # fields, which are made already
    if str in types and isinstance(value, int | float):
        return str(value).lower() if isinstance(value, bool) else str(value)  # a column named 0
    is_bool = isinstance(value, bool) and bool not in types
    if is_bool or not isinstance(value, tuple(types)):
        expected = next((words for kind, words in _NAMES.items() if kind in types), "a map")
        raise ValueError(f"{where}{name}: expected {expected}, got {brief(value)}")
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
