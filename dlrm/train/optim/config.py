"""Configuration of the optimizers of a DLRM."""

import math
from dataclasses import dataclass

from dlrm.train.optim.dense import CLICK_OPTIMIZERS
from dlrm.train.optim.rows import L2_MODES, TABLE_OPTIMIZERS


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizers of a DLRM; field names are those of the command line's flags.

    Attributes:
        embedding_optimizer: optimizer of the tables, one of `TABLE_OPTIMIZERS`; "adam" is lazy: it
            updates only touched rows, unless the L2 term covers all rows.
        mlp_optimizer: optimizer of everything else, one of `CLICK_OPTIMIZERS`.
        freeze_embeddings: compute gradients of the tables but do not update them.
        freeze_mlps: the same for everything else.
        embedding_l2: weight of half the sum of the tables' squares, which the optimizer adds to the
            mean loss of every step; see `RowOptimizer.add_l2`.
        embedding_l2_mode: "all" rows of the tables, as in a dense optimizer, or those "looked_up"
            by the batch.
        weight_decay: weight of the same term for all other matrices; biases do not decay. It is
            coupled: its gradient goes through the optimizer, as in torch's SGD, Adagrad and Adam.

    Raises:
        ValueError: a value is impossible; the message names flag and value.
    """

    embedding_optimizer: str = "sgd"
    mlp_optimizer: str = "sgd"
    freeze_embeddings: bool = False
    freeze_mlps: bool = False
    embedding_l2: float = 0.0
    embedding_l2_mode: str = "all"
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        for flag, kinds in (
            ("embedding_optimizer", TABLE_OPTIMIZERS),
            ("mlp_optimizer", CLICK_OPTIMIZERS),
            ("embedding_l2_mode", L2_MODES),
        ):
            if getattr(self, flag) not in kinds:
                raise ValueError(f"--{flag} {getattr(self, flag)}: expected one of {tuple(kinds)}")
        for flag, frozen in (("embedding_l2", "embeddings"), ("weight_decay", "mlps")):
            value = getattr(self, flag)
            if not 0 <= value < math.inf:
                raise ValueError(f"--{flag} {value}: expected 0 or more")
            if value and getattr(self, f"freeze_{frozen}"):
                raise ValueError(f"--{flag} {value} contradicts --freeze_{frozen}: nothing decays")
