"""The entries of `schema.yaml`: fields made from maps and lists, and the reverse."""

from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from dlrm.documents import brief
from dlrm.settings import settings_of

_NAMES = {str: "a text", int: "an integer", bool: "true or false", tuple: "a list of texts"}


def read_map(cls: Any, where: str, values: dict[str, Any]) -> Any:
    """Returns a configuration made from a map of its settings.

    Raises:
        ValueError: an entry is unknown, missing or of another type.
    """
    known = settings_of(cls)
    for name in values:
        if name not in known:
            near = "".join(f"; did you mean {n}?" for n in get_close_matches(str(name), known, 1))
            raise ValueError(
                f"{where}expected some of {', '.join(known)}, got {brief(name)} as well{near}"
            )
    for field in fields(cls):
        if field.name not in values and field.default is MISSING:
            raise ValueError(f"{where}{field.name}: missing")
    types = get_type_hints(cls)
    entries = {n: _read(types[n], f"{where}{n}", value) for n, value in values.items()}
    try:
        return cls(**entries)
    except ValueError as error:
        message = str(error)
        if message.startswith("--"):  # of a configuration whose settings are flags as well
            message = where + message.replace("--", "")
        raise ValueError(message) from None


def _read(hint: Any, where: str, value: Any) -> Any:
    """Returns the value of an entry in its type, with numbers that YAML parsed as texts."""
    hints = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    classes = [get_origin(one) or one for one in hints]
    item = next((get_args(one)[0] for one in hints if get_origin(one) is tuple), None)
    if is_dataclass(classes[0]) and (value is not None or NoneType not in classes):
        return _read_field(classes[0], where, value)
    if item is not None and isinstance(value, list | tuple):
        return tuple(_read(item, where, one) for one in value)
    if str in classes and isinstance(value, int | float):
        return str(value).lower() if isinstance(value, bool) else str(value)  # a column named 0
    if isinstance(value, tuple(classes)) and (bool in classes or not isinstance(value, bool)):
        return value
    expected = next(words for one, words in _NAMES.items() if one in classes)
    expected = "a list of fields" if is_dataclass(item) else expected
    raise ValueError(f"{where}: expected {expected}, got {brief(value)}")


def _read_field(cls: Any, where: str, value: Any) -> Any:
    """Returns a field made from a map, or from only the name of its column."""
    expected = "a map with fields"
    if "column" in settings_of(cls):
        expected = "a column or a map"
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            value = {"column": value}
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected {expected}, got {brief(value)}")
    name = value.get("column", value.get("name"))
    return read_map(cls, f"{where} {name}: " if isinstance(name, str) else f"{where}: ", value)


def without_defaults(config: Any) -> dict[str, Any]:
    """Returns the settings of a configuration that differ from their defaults, as in YAML."""
    return {
        field.name: _plain(value)
        for field in fields(config)
        if "setting" in field.metadata
        if (value := getattr(config, field.name)) != field.default
    }


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return without_defaults(value)
    if not isinstance(value, tuple):
        return value
    items = [_plain(item) for item in value]
    return [
        item.get("column") if isinstance(item, dict) and [*item] == ["column"] else item
        for item in items
    ]
