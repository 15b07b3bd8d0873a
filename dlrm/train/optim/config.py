"""Which optimizers train a DLRM."""

from dataclasses import dataclass

from dlrm.train.optim.dense import DENSE_OPTIMIZERS
from dlrm.train.optim.rows import TABLE_OPTIMIZERS


@dataclass(frozen=True)
class OptimizerConfig:
    """Which optimizers; field names are those of the command line's flags.

    Attributes:
        embedding_optimizer: of the tables, one of `TABLE_OPTIMIZERS`; "adam" is lazy: it updates
            touched rows only.
        mlp_optimizer: of everything else, one of `DENSE_OPTIMIZERS`.
        freeze_embeddings: compute gradients of the tables but do not update them.
        freeze_mlps: the same for everything else.

    Raises:
        ValueError: an unknown optimizer; flag and value are named.
    """

    embedding_optimizer: str = "sgd"
    mlp_optimizer: str = "sgd"
    freeze_embeddings: bool = False
    freeze_mlps: bool = False

    def __post_init__(self) -> None:
        for flag, kinds in (
            ("embedding_optimizer", TABLE_OPTIMIZERS),
            ("mlp_optimizer", DENSE_OPTIMIZERS),
        ):
            if getattr(self, flag) not in kinds:
                raise ValueError(f"--{flag} {getattr(self, flag)}: expected one of {tuple(kinds)}")
