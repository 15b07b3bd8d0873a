"""The flags of `dlrm.scripts.tune`."""

import math
from dataclasses import dataclass
from pathlib import Path

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
