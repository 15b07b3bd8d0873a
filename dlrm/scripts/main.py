"""Trains, tests or times a DLRM: dlrm train --dataset DIR ..., or dlrm test

A first training needs --dataset, --recipe auto and --save_checkpoint_path only.
`python -m dlrm.scripts.main --mode train` works alike, and prints the lines of NVIDIA's
program.
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import sys
from collections.abc import Mapping
from typing import Any

from dlrm.scripts.common.dlrm_flags import make_flags, parse
from dlrm.scripts.common.training_command import run_training


def main(
    arguments: list[str], defaults: Mapping[str, Any] | None = None, doc: str | None = __doc__
) -> None:
    """Runs a command line and ends the process.

    Args:
        defaults: defaults that replace those of flags.
    """
    flags = make_flags(defaults)
    run_training(
        arguments,
        lambda words: parse(words, flags),
        lambda: f"{doc}\n{flags.help()}",
        "dlrm.scripts.common.click_command",
    )


def start() -> None:
    main(sys.argv[1:])


if __name__ == "__main__":
    start()
