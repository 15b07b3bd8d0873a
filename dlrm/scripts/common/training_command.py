"""Runs the command lines of the commands that train."""

from collections.abc import Callable
from typing import Any

from dlrm.command_line import importing
from dlrm.flags import Values, parsed_or_help


def run_training(
    arguments: list[str],
    parse: Callable[[list[str]], Values],
    help_text: Callable[[], str],
    run: Callable[[Values], dict[str, Any]],
) -> None:
    """Runs a command line and ends the process, or shows the help."""
    values = parsed_or_help(arguments, parse, help_text)
    if values is not None:
        with importing():
            from dlrm.tasks.ending import exit_with

        exit_with(lambda: run(values), values)
