"""Makes the tables of a model."""

import torch

from dlrm.distributed import World
from dlrm.distributed.placement import Placement
from dlrm.model.config import DLRMConfig
from dlrm.model.tables.initial import Initial
from dlrm.model.tables.joint import JointEmbedding

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_tables(
    config: DLRMConfig,
    placement: Placement,
    world: World = World(),
    seed: int = 0,
    files: str | None = None,
) -> JointEmbedding:
    """Returns the tables of vectors, or shards of them, that a process holds.

    Args:
        world: the processes; the tables are made on its device.
        files: directory for the tables' files, see `mapped_zeros`; None keeps them in memory.
    """
    std = config.embedding_init_std if config.embedding_init == "normal" else None
    initial = Initial(seed, config.embedding_init_scale, std)
    dtype = _DTYPES[config.embedding_dtype]
    return JointEmbedding(placement, config.tables, world, initial, dtype, files)
