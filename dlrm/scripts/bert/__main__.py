"""Pre-trains, fine-tunes, evaluates or times BERT: dlrm bert --mode finetune ...

--recipe sets flags of the optimizer, its learning rates and the length of a run that are not given.
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import sys

from dlrm.language.flags import help_text, parse
from dlrm.scripts.common.training_command import run_training


def main(arguments: list[str]) -> None:
    """Runs a command line and ends the process."""
    run_training(arguments, parse, lambda: f"{__doc__}\n{help_text()}", "dlrm.language.command")


if __name__ == "__main__":
    main(sys.argv[1:])
