"""Runs commands with absl's global flags: errors end in one line and an exit code."""

import re
from collections.abc import Callable
from pathlib import Path

from absl import app, flags

from dlrm.command_line import exit_code_of, fail, raise_file_limit
from dlrm.files import check_all_local, check_local
from dlrm.manifest import check_lines


def parse_flags(values: flags.FlagValues, arguments: list[str]) -> list[str]:
    """Parses flags, those of `--flagfile` too, at the start of a command; returns the rest.

    Raises:
        ValueError: an unknown flag, a value that a flag cannot have, a URI where a path is
            expected, or a file without flags.
    """
    raise_file_limit()
    _check_flag_files(arguments)
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


def _check_flag_files(words: list[str], outer: tuple[Path, ...] = ()) -> None:
    """Compares flag files, and those that they name, with their checksums, if they have any."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "--":
            return
        if found := re.fullmatch(r"--?flagfile(?:=(.*))?", word):
            path = Path(following if found[1] is None else found[1]).expanduser()
            if path.is_file() and path not in outer:
                check_lines(path)
                lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
                _check_flag_files([line.strip() for line in lines], (*outer, path))


def run_command(main: Callable[[list[str]], int | None], code: int = 1, hint: str = "") -> None:
    """Runs `main` with the rest of the command line, as absl does, and ends the process.

    Args:
        main: raises ValueError or OSError for errors that the user can fix; returns the exit code.
        code, hint: see `exit_code_of`.
    """

    def parse(arguments: list[str]) -> list[str]:
        try:
            return parse_flags(flags.FLAGS, arguments)
        except (ValueError, OSError) as error:
            fail(error, code)

    def act(arguments: list[str]) -> int:
        return exit_code_of(lambda: main(arguments), code=code, hint=hint)

    app.run(act, flags_parser=parse)


def no_arguments(arguments: list[str]) -> None:
    """Raises ValueError if a command line has more than flags."""
    if len(arguments) > 1:
        raise ValueError(f"expected flags only, got {' '.join(arguments[1:])}")
