"""Searches training settings by successive halving, on the training rows of a dataset alone.

    dlrm tune --dataset DIR --output tuning [--trials 27] [--folds 5]
    dlrm train --dataset DIR --flagfile tuning/best.flags

Trials are judged on a held-out share of the training rows, or on folds of them; test and validation
rows are never opened. Settings outside the space are those of `--recipe auto`, as are, in the first
trial, all that the space does not fix. A study of Optuna chooses the others, and ends trials early
that are behind after a share of their steps. The same command resumes a search that was stopped or
killed, several at the same time share it, and more --trials extend it. The directory --output gets
a table, tuning.txt, the best settings as flags, best.flags, and the study, study.journal. --space
names a YAML file of the settings to search:

    lr: {low: 0.0005, high: 0.004, log: true}   # of a range, evenly in its logarithm
    embedding_dim: [8, 16, 32]                  # one of these
    schedule: linear                            # always this
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import sys

from dlrm.command_line import later
from dlrm.flags import ConfigFlags, run_command
from dlrm.scripts.tune.flags import TuneConfig


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    line = ConfigFlags([("Flags", TuneConfig)])
    hint = "the same command resumes the search"
    return run_command(
        line, later("dlrm.scripts.tune.command"), __doc__, arguments, usage=2, hint=hint
    )


if __name__ == "__main__":
    sys.exit(main())
