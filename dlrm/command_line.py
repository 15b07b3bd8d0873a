"""Formats the output of commands: errors on one line that begins with `error:`, and tables."""

import argparse
import resource
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from dlrm.documents import one_line
from dlrm.files import check_all_local

_MAX_OPEN_FILES = 1 << 20  # programs that a command starts may close every number up to the limit


def fail(error: object, code: int = 1) -> NoReturn:
    """Prints an error on one line that begins with `error:`, and ends the process."""
    print(f"error: {one_line(error)}", file=sys.stderr, flush=True)
    sys.exit(code)


def raise_file_limit() -> None:
    """Lets this process open as many files as it may choose to, by default 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        with suppress(ValueError, OSError):  # the kernel's own limit has become lower
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


class Parser(argparse.ArgumentParser):
    """A parser that reports errors on such a line, with exit code 2, and keeps line breaks in help.

    A URI where a path is expected is an error; see `dlrm.files.check_local`.

    Args:
        description: text at the start of the help.
        prog: name of the command, if it is not that of the file.
    """

    def __init__(self, description: str | None = None, prog: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses as `argparse` does, for `parse_args` too."""
        raise_file_limit()
        options, others = super().parse_known_args(args, namespace)
        try:
            check_all_local(
                (_name(action), getattr(options, action.dest, None)) for action in self._actions
            )
        except ValueError as error:
            self.error(str(error))
        return options, others

    def error(self, message: str) -> NoReturn:
        """Ends the process."""
        fail(message, 2)


def _name(action: argparse.Action) -> str:
    """Returns the long form of a flag, or the name of a positional argument."""
    long = (option for option in action.option_strings if option.startswith("--"))
    return next(long, action.dest)


def text_of(value: Any) -> str:
    """Returns the value of a flag in the form of a command line."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def flags_of(settings: Mapping[str, Any]) -> list[str]:
    """Returns settings as flags, without those that are None."""
    return [_flag(name, value) for name, value in settings.items() if value is not None]


def _flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no{name}"
    return f"--{name}={text_of(value)}"


def aligned(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table whose columns are as wide as their longest cell.

    The first column is aligned to the left and the others to the right.
    """
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [heads, *rows]
    ]
