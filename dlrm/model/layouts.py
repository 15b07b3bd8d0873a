"""Makes the tables of a model in the layout of its configuration."""

import torch

from dlrm.distributed import World
from dlrm.distributed.placement import Placement
from dlrm.model.config import FUSED_TYPES, DLRMConfig
from dlrm.model.tables.divided import DividedEmbedding
from dlrm.model.tables.initial import Initial
from dlrm.model.tables.joint import JointEmbedding
from dlrm.model.tables.layout import Held, Tables
from dlrm.model.tables.multi_table import MultiTableEmbedding

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_tables(
    config: DLRMConfig,
    placement: Placement,
    world: World = World(),
    seed: int = 0,
    files: str | None = None,
) -> Tables:
    """Returns the tables of vectors, or pieces of them, that a process holds.

    Args:
        world: the processes; the tables are made on its device.
        files: directory for the tables' files, see `mapped_zeros`; None keeps them in memory.

    Raises:
        ValueError: tables are divided or copied, and the configuration's layout has only whole
            tables.
    """
    dtype = _DTYPES[config.embedding_dtype]
    std = config.embedding_init_std if config.embedding_init == "normal" else None
    initial = Initial(seed, config.embedding_init_scale, std)
    if not placement.is_whole or placement.dims:
        if not placement.is_whole and config.embedding_type not in FUSED_TYPES:
            raise ValueError(
                f"--placement {config.placement} divides tables or copies them, which needs "
                f"--embedding_type joint_fused, got {config.embedding_type}"
            )
        attended = {config.tables[field] for field in config.attended}
        for piece in placement.pieces:
            if piece.table in attended and not piece.is_whole:
                raise ValueError(
                    f"--placement {config.placement} divides or copies table {piece.table}: "
                    "expected a whole table on one rank, since its lists have pooling: attention, "
                    "which needs items and candidates side by side; use --placement auto or "
                    "balanced"
                )
        return DividedEmbedding(placement, world, initial, dtype, tables=config.tables, files=files)
    pieces = {piece.table: piece for piece in placement.of_rank(world.rank)}
    fields_by_rank = placement.of_fields(config.tables).tables_by_rank()
    held = Held(pieces, placement.dim, world, config.tables, fields_by_rank, files)
    if config.embedding_type == "multi_table":
        return MultiTableEmbedding(held, initial)
    return JointEmbedding(held, initial, config.embedding_type != "joint", dtype)
