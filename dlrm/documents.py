"""JSON and YAML read from disk, within limits of size and depth, and texts quoted in messages.

No content of a file makes its reader hang, fill the memory or raise anything but a ValueError that
names the file.
"""

import errno
import json
import math
import os
import re
import reprlib
import resource
import stat
from collections.abc import Callable
from typing import Any

MAX_JSON_BYTES = 1 << 28
MAX_YAML_BYTES = 1 << 21  # read in 15 s
MAX_DEPTH = 64  # of nested lists and maps
MAX_NODES = 1 << 20  # of YAML, aliases expanded
MAX_DIGITS = 300  # of an integer in YAML: Python refuses to print one of 4,300
_TOO_DEEP = f"expected lists and maps at most {MAX_DEPTH} deep, got deeper ones"

# Controls of ASCII and Latin-1, separators of lines, and controls of the direction of text.
_CONTROLS = "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"

_brief = reprlib.Repr()
_brief.maxlevel, _brief.maxstring, _brief.maxother = 2, 80, 200


def brief(value: Any) -> str:
    """Returns a value as code, shortened, to quote it in a message."""
    return _brief.repr(value)


def one_line(error: object) -> str:
    """Returns the message of an error with control characters, as in names of files, escaped.

    Indented continuation lines of a message are kept. If too many files were open, the message
    also has the limit and the remedy.
    """
    text, cause = _printable(r"\n(?!  )|(?!\n)" + _CONTROLS, str(error)), error
    while isinstance(cause, BaseException):
        if isinstance(cause, OSError) and cause.errno == errno.EMFILE:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return (
                f"{text}: the command needs more than {limit} open files, the limit of this "
                f"process; ulimit -n {4 * limit} before the command allows more"
            )
        cause = cause.__cause__
    return text


def cell(value: str, most: int = 60) -> str:
    """Returns a value of data for a line of a terminal: escaped, and shortened in the middle.

    Args:
        value: the value, such as a category or the name of a column.
        most: the number of characters up to which it is kept.
    """
    if len(value) > most:
        head, tail = value[: most // 2], value[-(most // 3) :]
        value = f"{head}... ({len(value):,} characters) ...{tail}"
    return printable(value)


def printable(text: object) -> str:
    """Returns a text, such as a path, for a line of a terminal: control characters escaped."""
    return _printable(_CONTROLS, str(text))


def _printable(controls: str, text: str) -> str:
    escaped = re.sub(controls, lambda found: found[0].encode("unicode_escape").decode(), text)
    return escaped.encode("utf-8", "backslashreplace").decode("utf-8")


def read_bytes(path: str | os.PathLike, max_bytes: int) -> bytes:
    """Reads a regular file that is not larger than expected.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a regular file, or is larger; the message has file and sizes.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path}: expected a regular file")
    if status.st_size > max_bytes:
        raise ValueError(f"{path}: expected at most {max_bytes} bytes, got {status.st_size}")
    with open(path, "rb") as file:
        return file.read(status.st_size)  # which is allocated before it is read


def read_json(path: str | os.PathLike, expected: type = dict) -> Any:
    """Reads a JSON file; see `read_bytes` and `parse_json`."""
    return parse_json(read_bytes(path, MAX_JSON_BYTES), path, expected)


def parse_json(content: bytes | str, path: str | os.PathLike, expected: type = dict) -> Any:
    """Returns the value of JSON in UTF-8.

    Args:
        expected: `dict`, or `object` for any value.

    Raises:
        ValueError: it is not JSON, is deeper than `MAX_DEPTH`, or of another type; the message has
            the file and, if known, line and column.
    """
    try:
        value = json.loads(content if isinstance(content, str) else content.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}: line {error.lineno}, column {error.colno}: no JSON: {error.msg}"
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start}: no JSON, as it is not UTF-8") from None
    except RecursionError:
        raise ValueError(f"{path}: {_TOO_DEEP}") from None
    except ValueError as error:  # an integer of thousands of digits
        raise ValueError(f"{path}: no JSON: {error}") from None
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH + 1):
        parts = (one.values() if isinstance(one, dict) else one for one in level if one)
        level = [part for inner in parts for part in inner if isinstance(part, dict | list)]
    if level:
        raise ValueError(f"{path}: {_TOO_DEEP}")
    return _checked(value, path, expected)


def _checked(value: Any, path: str | os.PathLike, expected: type = dict) -> Any:
    if not isinstance(value, expected):
        raise ValueError(f"{path}: expected a map, got {brief(value)}")
    return value


def json_text(value: Any, indent: int | None = None) -> str:
    """Returns JSON of a value, with null for NaN and infinities, which JSON does not have."""

    def finite(one: Any) -> Any:
        return None if isinstance(one, float) and not math.isfinite(one) else one

    return json.dumps(_mapped(value, finite), indent=indent, allow_nan=False)


def with_nan(value: Any) -> Any:
    """Returns a value of JSON with NaN for null, the inverse of `json_text` for numbers."""
    return _mapped(value, lambda one: math.nan if one is None else one)


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Applies a function to all values that are no lists or maps."""
    if isinstance(value, dict):
        return {key: _mapped(entry, function) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(entry, function) for entry in value]
    return function(value)


def read_yaml(path: str | os.PathLike) -> Any:
    """Reads a YAML file of one document, of plain values.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is too large, invalid, deeper than `MAX_DEPTH`, larger than `MAX_NODES` once
            aliases are expanded, or of another type; the message has the file and, if known, line
            and column.
    """
    import yaml

    content = read_bytes(path, MAX_YAML_BYTES)
    try:
        loader = yaml.SafeLoader(content.decode("utf-8-sig"))
        node = loader.get_single_node()
        _check_node(node)  # before values are made of it
        value = None if node is None else loader.construct_document(node)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start}: invalid YAML, as it is not UTF-8") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = (error.problem or error.context or "")[:200]
        raise ValueError(f"{path}: {place}invalid YAML: {problem}") from None
    except RecursionError:
        raise ValueError(f"{path}: invalid YAML: {_TOO_DEEP}") from None
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError) as error:
        # The last is raised for a value that contradicts its tag, such as !!timestamp of a word.
        raise ValueError(f"{path}: invalid YAML: {brief(str(error))}") from None
    return _checked(value, path)


def _check_node(root: Any) -> None:
    """Raises yaml.MarkedYAMLError for nodes beyond the limits, and for duplicate keys."""
    from yaml import MappingNode, MarkedYAMLError, ScalarNode

    known: dict[int, tuple[int, int]] = {}

    def measured(node: Any) -> tuple[int, int]:
        """Returns the number of values in a node, aliases expanded, and that of its levels."""
        if isinstance(node, ScalarNode):
            if node.tag.endswith(":int") and len(node.value) > MAX_DIGITS:
                raise refused(node, f"expected an integer of at most {MAX_DIGITS} characters")
            return 1, 1
        if id(node) in known:
            return known[id(node)]
        known[id(node)] = MAX_NODES, 0  # for an alias within the node itself, which has no end
        parts, keys = node.value, set[str]()
        if isinstance(node, MappingNode):
            parts = [part for pair in node.value for part in pair]
            for key in parts[::2]:
                if isinstance(key, ScalarNode) and key.value != "<<":
                    if key.value in keys:
                        raise refused(key, f"{brief(key.value)} is a duplicate key")
                    keys.add(key.value)
        found = [measured(part) for part in parts]
        values = 1 + sum(count for count, _ in found)
        levels = 1 + max((depth for _, depth in found), default=0)
        if values > MAX_NODES:
            raise refused(node, f"expected at most {MAX_NODES} values, aliases expanded")
        if levels > MAX_DEPTH:
            raise refused(node, _TOO_DEEP)
        known[id(node)] = values, levels
        return values, levels

    def refused(node: Any, problem: str) -> MarkedYAMLError:
        return MarkedYAMLError(problem=problem, problem_mark=node.start_mark)

    if root is not None:
        measured(root)


def line_of_key(path: str | os.PathLike, key: str) -> int | None:
    """Returns the line of a key of the map in a YAML file that `read_yaml` reads, or None."""
    import yaml

    text = read_bytes(path, MAX_YAML_BYTES).decode("utf-8-sig")
    document: Any = yaml.compose(text, yaml.SafeLoader)
    lines = (own.start_mark.line + 1 for own, _ in document.value if own.value == key)
    return next(lines, None)
