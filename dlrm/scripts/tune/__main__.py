"""Searches training settings by successive halving, on the training rows of a dataset alone.

    dlrm tune --dataset DIR --output tuning [--trials 27] [--folds 5]
    dlrm train --dataset DIR --flagfile tuning/best.flags --save_checkpoint_path run

Trials are judged on held-out training rows; test and validation rows are never opened. The first
trial is `--recipe auto`, and Optuna chooses the settings of the others, which end early if they are
behind after a share of their steps. The same command resumes a search that was stopped or killed,
several at the same time share it, and more --trials extend it. --space names a YAML file such as:

    lr: {low: 0.0005, high: 0.004, log: true}   # of a range, evenly in its logarithm
    embedding_dim: [8, 16, 32]                  # one of these
    schedule: linear                            # always this
"""

import sys

from dlrm.command_line import later, missing_extra
from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.scripts.tune.flags import TuneConfig


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    line, hint = ConfigFlags([("Flags", TuneConfig)]), "the same command resumes the search"
    return run_command(line, _search, __doc__, arguments, usage=2, hint=hint)


def _search(values: Values) -> None:
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise ValueError(missing_extra(error, "tune")) from error
    later("dlrm.scripts.tune.command")(values.config(TuneConfig))


if __name__ == "__main__":
    sys.exit(main())
