"""Trains, tests or times a DLRM: dlrm train --dataset DIR ..., or dlrm test

A first training needs --dataset, --recipe auto and --save_checkpoint_path only.
`python -m dlrm.scripts.main --mode train` works alike, and prints the lines of NVIDIA's
program.
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import functools
import sys
from collections.abc import Mapping
from typing import Any

from dlrm.command_line import later
from dlrm.scripts.common import dlrm_flags
from dlrm.scripts.common.training_command import run_training


def main(
    arguments: list[str], defaults: Mapping[str, Any] | None = None, doc: str | None = __doc__
) -> None:
    """Runs a command line and ends the process.

    Args:
        defaults: defaults that replace those of flags.
    """
    flags = dlrm_flags.make_flags(defaults)
    parse = functools.partial(dlrm_flags.parse, flags=flags)
    run = later("dlrm.scripts.common.click_command")
    run_training(arguments, parse, lambda: f"{doc}\n{flags.help()}", run)


def start() -> None:
    main(sys.argv[1:])


if __name__ == "__main__":
    start()
