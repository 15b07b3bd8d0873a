"""Searches training settings by successive halving, on the training rows of a dataset alone.

    dlrm tune --dataset DIR --output tuning [--trials 27] [--folds 5]
    dlrm train --dataset DIR --flagfile tuning/best.flags

Trials are judged on held-out training rows; test and validation rows are never opened. The first
trial is `--recipe auto`, and Optuna chooses the settings of the others, which end early if they are
behind after a share of their steps. The same command resumes a search that was stopped or killed,
several at the same time share it, and more --trials extend it. --space names a YAML file such as:

    lr: {low: 0.0005, high: 0.004, log: true}   # of a range, evenly in its logarithm
    embedding_dim: [8, 16, 32]                  # one of these
    schedule: linear                            # always this
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

from dlrm.command_line import later, missing_extra
from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.metrics.table import METRICS, SHOWN
from dlrm.settings import REQUIRED, check_settings, setting

# Metrics of which either higher or lower values are better.
JUDGES = [name for name in SHOWN if math.isinf(METRICS[name].ideal)]


@dataclass(frozen=True)
class TuneConfig:
    """The dataset, and the search; field names are those of the flags."""

    dataset: Path = setting(REQUIRED, "directory of the dataset", uri="read")
    output: Path = setting(REQUIRED, "directory for the search's state and results")
    space: Path | None = setting(
        None, "YAML file of the settings to search; default: from the dataset", uri="read"
    )
    trials: int = setting(27, "number of settings to try", least=1)
    rungs: int = setting(3, "rungs of the halving, each of --eta times as many steps", least=1)
    eta: int = setting(3, "one trial in this many advances to the next rung", least=2)
    folds: int = setting(1, "cross-validation folds; 1 holds out --held_out", least=1)
    held_out: float = setting(0.2, "share of the rows held out with one fold", above=0, below=1)
    order: str = setting(
        "random", "held-out rows: random, or the last ones, for logs", choices=("random", "last")
    )
    metric: str = setting("auc", "metric to choose by", choices=JUDGES)
    seed: int = setting(1, "random seed", least=0)
    processes: int | None = setting(None, "trainings at a time; default: one per core", least=1)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.folds > 1 and self.order != "random":
            raise ValueError(f"--order {self.order} is for --folds 1, got {self.folds} folds")


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
