"""Pre-trains, fine-tunes, evaluates or times BERT: dlrm bert --mode finetune ...

--recipe sets flags of the optimizer, its learning rates and the length of a run that are not given.
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import sys

from dlrm.command_line import importing
from dlrm.flags import Values
from dlrm.language import flags
from dlrm.scripts.common.training_command import run_training


def main(arguments: list[str]) -> None:
    """Runs a command line and ends the process."""
    run_training(arguments, flags.parse, lambda: f"{__doc__}\n{flags.help_text()}", _run)


def _run(values: Values) -> dict[str, float]:
    with importing():
        from dlrm.language.command import run

    return run(values)


if __name__ == "__main__":
    main(sys.argv[1:])
