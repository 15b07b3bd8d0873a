"""The wide term of the logit: one weight an id, in the layout of the tables."""

from collections.abc import Mapping

import torch

from dlrm.distributed import World
from dlrm.distributed.placement import Placement
from dlrm.model.divided import DividedEmbedding
from dlrm.model.embedding import JointEmbedding


def wide_term(
    tables: Mapping[int, int], num_tables: int, native: bool, device: torch.device | str
) -> JointEmbedding:
    """Returns tables of one column, float32, whose values start as 0.

    They are looked up by the same ids as the tables of vectors, lie with the same process, and are
    updated by the same row optimizer.

    Args:
        tables: rows of this process's tables, by number.
        num_tables: of all processes; the weights of table i are table `num_tables + i`.
        native: see `JointEmbedding`.
        device: where they are made.
    """
    numbered = {num_tables + number: rows for number, rows in tables.items()}
    return JointEmbedding(numbered, 1, init_scale=0.0, native=native, device=device)


def divided_wide_term(placement: Placement, world: World) -> DividedEmbedding:
    """As `wide_term`, where tables are divided: the weights of rows lie with their first columns.

    Args:
        placement: of the tables.
        world: the processes.
    """
    return DividedEmbedding(
        placement.of_one_column(),
        world,
        init_scale=0.0,
        first_number=len(placement.table_rows),
        read=placement.tables_by_rank()[world.rank],
    )
