"""Configuration of the optimizers of a DLRM."""

from dataclasses import dataclass

from dlrm.settings import check_settings, setting

# The names in the registries of `row_optimizers` and `dense`.
TABLE_OPTIMIZER_NAMES = ("sgd", "adagrad", "row_wise_adagrad", "adam")
CLICK_OPTIMIZER_NAMES = ("sgd", "adagrad", "adam")
LAMB_NAMES = ("nvlamb", "popart")
NETWORK_OPTIMIZER_NAMES = ("sgd", "momentum", "nesterov", "rmsprop_tf", "adam", "adamw", "lamb")
L2_MODES = ("all", "looked_up")


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizers of a DLRM; field names are those of the command line's flags."""

    embedding_optimizer: str = setting(
        "sgd", "Optimizer of the embedding tables", choices=TABLE_OPTIMIZER_NAMES
    )
    mlp_optimizer: str = setting("sgd", "Optimizer of the MLPs", choices=CLICK_OPTIMIZER_NAMES)
    freeze_embeddings: bool = setting(False, "Do not update the tables (for benchmarks)")
    freeze_mlps: bool = setting(False, "Do not update the MLPs (for benchmarks)")
    embedding_l2: float = setting(
        0.0,
        "L2 regularization of the embedding tables: the optimizer adds this / 2 * (sum of their "
        "squares) to the mean loss of every step",
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


@dataclass(frozen=True)
class NetworkOptimizerConfig:
    """The optimizer of a network without tables; field names are those of the flags."""

    optimizer: str = setting(
        "momentum", "Optimizer of all weights", choices=NETWORK_OPTIMIZER_NAMES
    )
    momentum: float = setting(
        0.9, "Momentum of --optimizer momentum, nesterov and rmsprop_tf", least=0, below=1
    )
    rmsprop_decay: float = setting(
        0.9, "Decay rate of the mean squares of --optimizer rmsprop_tf", least=0, below=1
    )
    optimizer_eps: float | None = setting(
        None,
        "Added to the optimizer's denominator; default: 1e-3 for rmsprop_tf, 1e-6 for lamb, "
        "otherwise 1e-8",
        above=0,
    )
    lamb_flavor: str = setting(
        "nvlamb",
        "Variant of LAMB; nvlamb: NVIDIA's and Habana's; popart: Graphcore's",
        choices=LAMB_NAMES,
    )
    weight_decay: float = setting(
        0.0, "Weight decay; decoupled for adamw and lamb, otherwise added to the gradients", least=0
    )
    decay_norm_and_bias: bool = setting(
        False, "Apply weight decay to biases and weights of norms as well"
    )

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def max_grad_norm(self) -> float | None:
        """Returns the norm that the optimizer itself clips all gradients to, or None."""
        return 1.0 if (self.optimizer, self.lamb_flavor) == ("lamb", "nvlamb") else None
