"""The wide term of the logit: one weight an id, in the layout of the tables."""

from collections.abc import Mapping

import torch

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
