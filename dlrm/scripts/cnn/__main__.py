"""Trains, validates or times image networks: dlrm cnn --mode train ..."""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import sys

from dlrm.scripts.common.training_command import run_training
from dlrm.vision.flags import FLAGS, parse


def main(arguments: list[str]) -> None:
    """Runs a command line and ends the process."""
    run_training(arguments, parse, lambda: f"{__doc__}\n{FLAGS.help()}", "dlrm.vision.command")


if __name__ == "__main__":
    main(sys.argv[1:])
