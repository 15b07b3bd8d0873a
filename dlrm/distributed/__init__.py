"""The processes of a run: joining them, and what they send each other."""

from dlrm.distributed.collectives import (
    OtherRankError,
    agreed,
    all_sum,
    check_same,
    from_first,
    gather,
)
from dlrm.distributed.exchange import exchange
from dlrm.distributed.world import World, clone_store, join_world, launch, part, shutdown

__all__ = [
    "OtherRankError",
    "World",
    "agreed",
    "all_sum",
    "check_same",
    "clone_store",
    "exchange",
    "from_first",
    "gather",
    "join_world",
    "launch",
    "part",
    "shutdown",
]
