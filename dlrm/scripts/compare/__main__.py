"""Shows runs side by side: flags that differ, metrics, speed.

    dlrm compare RUN RUN ... [--sort auc] [--output DIR]
    dlrm compare FOLDER_OF_RUNS

A run is the directory of --save_checkpoint_path, one that contains it as `checkpoints/`, or a
single checkpoint. Its `log.json` is read if it is beside the checkpoints. Metrics are those of the
best test. --output writes a page with the same table, sortable, and the curves of all runs in one
chart, with all numbers as JSON beside it.
"""

import sys

from dlrm.command_line import later
from dlrm.flags import ConfigFlags, run_command
from dlrm.scripts.compare.flags import CompareConfig


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    line = ConfigFlags([("Flags", CompareConfig)])
    return run_command(line, later("dlrm.scripts.compare.command"), __doc__, arguments, usage=2)


if __name__ == "__main__":
    sys.exit(main())
