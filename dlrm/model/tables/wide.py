"""The wide term of the logit: one weight per id, in the layout of the tables."""

from collections.abc import Mapping

import torch

from dlrm.distributed import World
from dlrm.distributed.placement import Placement
from dlrm.model.tables.divided import DividedEmbedding
from dlrm.model.tables.embedding import JointEmbedding


def wide_term(
    tables: Mapping[int, int], num_tables: int, native: bool, device: torch.device | str
) -> JointEmbedding:
    """Returns float32 tables of one column whose initial values are 0.

    The ids of the embedding tables also look up these tables; the same process holds them, and the
    same row optimizer updates them.

    Args:
        tables: rows of this process's tables, by number.
        num_tables: number of tables of all processes; the weights of table i are table
            `num_tables + i`.
        native: see `JointEmbedding`.
        device: device on which they are made.
    """
    numbered = {num_tables + number: rows for number, rows in tables.items()}
    return JointEmbedding(numbered, 1, init_scale=0.0, native=native, device=device)


def divided_wide_term(placement: Placement, world: World) -> DividedEmbedding:
    """Returns the wide term of divided tables; a row's weight is where its first columns are.

    Args:
        placement: placement of the tables.
        world: the processes.
    """
    return DividedEmbedding(
        placement.of_one_column(),
        world,
        init_scale=0.0,
        first_number=len(placement.table_rows),
        read=placement.tables_by_rank()[world.rank],
    )
