"""Runs commands with absl's global flags: errors end in one line and an exit code."""

from collections.abc import Callable

from absl import app, flags

from dlrm.command_line import exit_code_of, fail
from dlrm.flags import parse_flags


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
