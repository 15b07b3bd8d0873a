"""Inspects and converts checkpoints.

    dlrm checkpoint inspect DIR [--check] [--noweights] [--json]
    dlrm checkpoint convert --to nvidia|dlrm --output OUT SRC

A directory is a checkpoint, a run's directory of checkpoints (whose best or else last one is used,
while inspect lists all), or a directory that NVIDIA's PyTorch DLRM saved. Large tables are read
some megabytes at a time, and no code in a file is run.

The exit code is 0, or 2 after an error, which is printed.
"""

import sys

from dlrm.command_line import later
from dlrm.flags import ConfigFlags, run_command
from dlrm.scripts.checkpoint.flags import CheckpointConfig


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    line = ConfigFlags([("Flags", CheckpointConfig)])
    return run_command(line, later("dlrm.scripts.checkpoint.command"), __doc__, arguments, code=2)


if __name__ == "__main__":
    sys.exit(main())
