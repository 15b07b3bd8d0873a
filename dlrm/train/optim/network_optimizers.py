"""The optimizer of a network without tables, by name."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from dlrm.settings import check_settings, setting
from dlrm.train.optim.config import NETWORK_OPTIMIZER_NAMES
from dlrm.train.optim.dense import DENSE_OPTIMIZERS, Groups
from dlrm.train.optim.lamb import LAMB_FLAVOURS


@dataclass(frozen=True)
class NetworkOptimizerConfig:
    """The optimizer of a network without tables; field names are those of the flags.

    Attributes:
        adam_betas: decay rates of the moments of "adam", "adamw" and "lamb".

    Raises:
        ValueError: a value is impossible; the message names flag and value.
    """

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
    adam_betas: tuple[float, float] = (0.9, 0.999)
    lamb_flavour: str = setting(
        "nvlamb",
        "Variant of LAMB; nvlamb: NVIDIA's and Habana's; popart: Graphcore's; paper: another name "
        "of nvlamb",
        choices=LAMB_FLAVOURS,
    )
    lamb_max_weight_norm: float | None = setting(
        None,
        "Upper limit of the weight norm that scales a step of --optimizer lamb; default: none",
        above=0,
    )
    weight_decay: float = setting(
        0.0, "Weight decay; decoupled for adamw and lamb, otherwise added to the gradients", least=0
    )
    decay_norm_and_bias: bool = setting(
        False, "Apply weight decay to biases and weights of norms as well"
    )

    def __post_init__(self) -> None:
        check_settings(self)
        for beta in self.adam_betas:
            if not 0 <= beta < 1:
                raise ValueError(f"adam_betas {beta}: expected 0 or more, less than 1")

    @property
    def max_grad_norm(self) -> float | None:
        """Returns the norm that the optimizer itself clips all gradients to, or None."""
        return LAMB_FLAVOURS[self.lamb_flavour].max_grad_norm if self.optimizer == "lamb" else None


def network_optimizer(config: NetworkOptimizerConfig, model: nn.Module) -> Optimizer:
    """Returns the optimizer of all trainable parameters of a model.

    Weights of two or more dimensions decay. Biases and weights of norms do not, unless the
    configuration says so.

    Raises:
        ValueError: Adam's moments would have 16 bits.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: Groups = [
        {
            "params": [p for p in trained if (p.ndim > 1 or config.decay_norm_and_bias) == decayed],
            "weight_decay": config.weight_decay if decayed else 0.0,
        }
        for decayed in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    lr = torch.zeros((), device=trained[0].device)
    make = DENSE_OPTIMIZERS[config.optimizer].networks
    assert make is not None, config.optimizer
    return make(groups, lr, config)
