"""Configuration of the optimizers of a DLRM."""

from dataclasses import dataclass

from dlrm.settings import check_settings, setting

# The names in the registries of `rows` and `dense`.
TABLE_OPTIMIZER_NAMES = ("sgd", "adagrad", "row_wise_adagrad", "adam")
CLICK_OPTIMIZER_NAMES = ("sgd", "adagrad", "adam")
NETWORK_OPTIMIZER_NAMES = ("sgd", "momentum", "nesterov", "rmsprop_tf", "adam", "adamw", "lamb")
L2_MODES = ("all", "looked_up")


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizers of a DLRM; field names are those of the command line's flags.

    Raises:
        ValueError: a value is impossible; the message names flag and value.
    """

    embedding_optimizer: str = setting(
        "sgd", "Optimizer of the embedding tables", choices=TABLE_OPTIMIZER_NAMES
    )
    mlp_optimizer: str = setting("sgd", "Optimizer of the MLPs", choices=CLICK_OPTIMIZER_NAMES)
    freeze_embeddings: bool = setting(False, "Do not update the tables (for benchmarks)")
    freeze_mlps: bool = setting(False, "Do not update the MLPs (for benchmarks)")
    embedding_l2: float = setting(
        0.0,
        "L2 regularization of the embedding tables: the optimizer adds this / 2 * (sum of their "
        "squares) to the mean loss of every step; needs --embedding_type joint_fused",
        least=0,
    )
    embedding_l2_mode: str = setting(
        "all",
        "Rows that --embedding_l2 regularizes in a step: all, as a dense optimizer does, or "
        "looked_up, those of the batch",
        choices=L2_MODES,
    )
    weight_decay: float = setting(
        0.0, "Weight decay of the MLPs' matrices, added to their gradients", least=0
    )

    def __post_init__(self) -> None:
        check_settings(self)
        for flag, frozen in (("embedding_l2", "embeddings"), ("weight_decay", "mlps")):
            value = getattr(self, flag)
            if value and getattr(self, f"freeze_{frozen}"):
                raise ValueError(f"--{flag} {value} contradicts --freeze_{frozen}: nothing decays")
