"""Pre-trains, fine-tunes, evaluates or times BERT: dlrm bert --mode finetune ...

--recipe sets flags of the optimizer, its learning rates and the length of a run that are not given.
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import sys

from dlrm.command_line import importing
from dlrm.flags import Values, parsed_or_help
from dlrm.language import flags


def main(arguments: list[str]) -> None:
    """Runs a command line and ends the process."""
    values = parsed_or_help(arguments, flags.parse, lambda: f"{__doc__}\n{flags.help_text()}")
    if values is not None:
        with importing():
            from dlrm.session.session import exit_with

        exit_with(lambda: _run(values), values)


def _run(values: Values) -> dict[str, float]:
    with importing():
        from dlrm.language.command import run

    return run(values)


if __name__ == "__main__":
    main(sys.argv[1:])
