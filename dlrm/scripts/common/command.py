"""Runs commands with absl's global flags: errors end in one line and an exit code."""

import re
from collections.abc import Callable
from pathlib import Path

from absl import app, flags

from dlrm.command_line import fail, raise_file_limit
from dlrm.files import check_all_local, check_local
from dlrm.manifest import check_lines


def parse_flags(values: flags.FlagValues, arguments: list[str]) -> list[str]:
    """Parses flags, those of `--flagfile` too, at the start of a command; returns the rest.

    Raises:
        ValueError: an unknown flag, a value that a flag cannot have, a URI where a path is
            expected, or a file without flags.
    """
    raise_file_limit()
    for argument in arguments:
        found = re.fullmatch(r"--?flagfile=(.+)", argument)
        if found and Path(found[1]).is_file():
            check_lines(found[1])
    try:
        rest = values(arguments)
    except flags.Error as error:
        if isinstance(error.__context__, FileNotFoundError):
            check_local(error.__context__.filename, "--flagfile")
        raise ValueError(str(error).removeprefix("ERROR:: ")) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"--flagfile: expected text in UTF-8, got byte {error.start}") from None
    except RecursionError:
        raise ValueError("--flagfile: expected files that do not name each other") from None
    given = (values[name] for name in values if values[name].present)
    check_all_local((f"--{flag.name}", flag.value) for flag in given)
    check_all_local(("", argument) for argument in rest[1:])
    return rest


def run_command(main: Callable[[list[str]], int | None]) -> None:
    """Runs `main` with the rest of the command line, as absl does, and ends the process.

    Args:
        main: raises ValueError or OSError for errors that the user can fix; returns the exit code.
    """

    def parse(arguments: list[str]) -> list[str]:
        try:
            return parse_flags(flags.FLAGS, arguments)
        except (ValueError, OSError) as error:
            fail(error)

    def act(arguments: list[str]) -> int | None:
        try:
            return main(arguments)
        except (ValueError, OSError) as error:
            fail(error)

    app.run(act, flags_parser=parse)


def no_arguments(arguments: list[str]) -> None:
    """Raises ValueError if a command line has more than flags."""
    if len(arguments) > 1:
        raise ValueError(f"expected flags only, got {' '.join(arguments[1:])}")
