"""Runs the command lines of the commands that train."""

import importlib
import re
import sys
from collections.abc import Callable

from dlrm.command_line import exit_code_of, fail, importing, show
from dlrm.flags import HelpAsked, Values

# torch.distributed.launch without --use_env passes it to each process; the environment has it.
_LOCAL_RANK = re.compile(r"--local[-_]rank=\d+")


def run_training(
    arguments: list[str],
    parse: Callable[[list[str]], Values],
    help_text: Callable[[], str],
    module: str,
) -> None:
    """Runs a command line and ends the process, or shows the help.

    Args:
        module: has the command's function `run`; it is imported after the flags are parsed.
    """
    try:
        values = parse([word for word in arguments if not _LOCAL_RANK.fullmatch(word)])
    except HelpAsked as asked:
        text = asked.text(help_text)
        if code := exit_code_of(lambda: show(text)):
            sys.exit(code)
        return
    except ValueError as error:
        fail(error)
    with importing():
        from dlrm.tasks.ending import exit_with

    def run() -> None:
        with importing():
            command = importlib.import_module(module)
        command.run(values)

    exit_with(run, values)
