"""Messages in the words of a Python program: arguments instead of flags."""

import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from dlrm.data.sources.row_error import RowError
from dlrm.remote.uri import shown

_OURS = ("dlrm.", "contextlib")  # modules between a warning and the caller's line
_COMMAND = r"`[^`]*`|python -m [^;,]*"  # whose flags are flags
_FLAG = re.compile(rf"({_COMMAND})|--(\w+)")
_FIRST = re.compile(r"--(\w+) ([^\s:]+): ")
_OTHER_NAMES = {
    "input": "frame",
    "test_input": "test",
    "validation_input": "validation",
}


@contextmanager
def in_python(names: Mapping[str, str] = _OTHER_NAMES) -> Iterator[None]:
    """Words the errors of the block as `python_text` does."""
    try:
        yield
    except (ValueError, OSError, FloatingPointError) as error:
        error.args = tuple(python_text(a, names) if isinstance(a, str) else a for a in error.args)
        if isinstance(error, RowError):
            error.problem = python_text(error.problem, names)
        raise


def python_text(text: str, names: Mapping[str, str] = _OTHER_NAMES) -> str:
    """Returns a message with arguments instead of flags, except in the commands that it names.

    URIs are in place of the paths of their copies.

    Args:
        text: the message.
        names: flag -> argument, where their names differ.
    """
    text = _FIRST.sub(r"--\1=\2: ", shown(text), count=1)
    return _FLAG.sub(lambda found: found[1] or names.get(found[2], found[2]), text)


def warn(text: str) -> None:
    """Warns at the line of the caller's program that called this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(_OURS):
        level, frame = level + 1, frame.f_back
    warnings.warn(python_text(text), stacklevel=level)
