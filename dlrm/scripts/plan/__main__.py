r"""Plans the placement of tables, and predicts memory and time: dlrm plan ...

    dlrm plan --dataset data --ranks 8 --memory_gb 80 --machine h100 \
        --output plan.yaml
    torchrun --nproc_per_node 8 -m dlrm.scripts.main --dataset data --placement plan.yaml

It needs neither the ranks nor a GPU. Where the tables do not fit in --memory_gb, no file is written
and the exit code is 3.
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import sys

from dlrm.command_line import later
from dlrm.data.clicks.config import DataConfig
from dlrm.flags import ConfigFlags, run_command
from dlrm.model.config import DLRMConfig
from dlrm.model.tables.placement import AUTO
from dlrm.scripts.plan.flags import PlanConfig
from dlrm.settings import settings_of
from dlrm.tasks.config import StepConfig
from dlrm.train.config import PrecisionConfig
from dlrm.train.optim.config import OptimizerConfig

_READ = (
    *("dataset", "batch_size", "feature_spec", "synthetic_dataset_table_sizes"),
    *("num_numerical_features", "allow_links", "ema_decay"),
)
_CONFIGS = (
    ("Plan", PlanConfig),
    ("Data", DataConfig),
    ("Model", DLRMConfig),
    ("Optimizers", OptimizerConfig),
    ("Precision", PrecisionConfig),
    ("Steps", StepConfig),
)
_HELPS = {
    "feature_spec": "Name of the file in --dataset that describes its features or, without "
    "--dataset, path of such a file",
    "placement": "Placement to describe: auto, which plans one; balanced; nvidia; or a file",
}


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    line = ConfigFlags(
        _CONFIGS,
        defaults={"placement": AUTO},
        helps=_HELPS,
        without=(settings_of(DataConfig) | settings_of(StepConfig)).keys() - _READ,
    )
    return run_command(line, later("dlrm.scripts.plan.command"), __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
