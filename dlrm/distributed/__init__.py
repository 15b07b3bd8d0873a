"""The processes of a run, how they join, and their communication."""

from dlrm.distributed.collectives import (
    OtherRankError,
    agreed,
    all_sum,
    check_same,
    from_first,
    gather,
    gather_to_first,
)
from dlrm.distributed.exchange import exchange
from dlrm.distributed.world import (
    Pipelines,
    World,
    choose_device,
    join_world,
    launch,
    part,
    pipelines,
    shutdown,
    start_transfers,
)

__all__ = [
    "OtherRankError",
    "Pipelines",
    "World",
    "agreed",
    "all_sum",
    "check_same",
    "choose_device",
    "exchange",
    "from_first",
    "gather",
    "gather_to_first",
    "join_world",
    "launch",
    "part",
    "pipelines",
    "shutdown",
    "start_transfers",
]
