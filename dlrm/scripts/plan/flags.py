"""The flags of `dlrm.scripts.plan`."""

from dataclasses import dataclass

from dlrm.settings import check_settings, setting
from dlrm.store.config import bytes_of
from dlrm.tasks.planning.machines import MACHINES


@dataclass(frozen=True)
class PlanConfig:
    """The machines of a plan, and where it is written; field names are those of the flags."""

    ranks: int = setting(1, "Number of processes, each with its own device", least=1)
    memory_gb: float | None = setting(
        None, "Memory of each device, in GB of 10**9 bytes; default: no limit", above=0, below=1e9
    )
    machine: str | None = setting(
        None,
        "Machine whose constants predict memory and times; default: h100 where torch finds a GPU, "
        "else cpu",
        choices=MACHINES,
    )
    table_memory: str | None = setting(
        None,
        "Memory of each rank for its tables, such as 8GB; the remaining rows are in --table_store "
        "of the training. For --machine cpu",
    )
    mean_ids: tuple[float, ...] | None = setting(
        None,
        "Mean number of ids per sample and table, one number for all tables or one per table; "
        "default: that of the first batch of --dataset, otherwise 1",
    )
    fixed_shapes: bool = setting(
        False,
        "Neither replicate tables nor split them by rows, so that --cuda_graphs can record steps",
    )
    output: str | None = setting(
        None, "File to write the plan to, for --placement of the training", uri="write"
    )
    overwrite: bool = setting(False, "Replace an earlier file")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.table_memory is not None:
            bytes_of(self.table_memory)
