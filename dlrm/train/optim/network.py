"""The optimizer of a network without tables, by name."""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from dlrm.train.optim.dense import DENSE_OPTIMIZERS, NETWORK_OPTIMIZERS, Groups
from dlrm.train.optim.lamb import LAMB_FLAVOURS


@dataclass(frozen=True)
class NetworkOptimizerConfig:
    """The optimizer of a network without tables; field names are those of the flags.

    Attributes:
        optimizer: "sgd"; "momentum" or "nesterov": torch's SGD with it; "rmsprop_tf": see
            `RMSpropTF`; "adam" or, with decoupled weight decay, "adamw"; "lamb": see `Lamb`.
        momentum: momentum of "momentum", "nesterov" and "rmsprop_tf".
        rmsprop_decay: decay rate of the mean squares of "rmsprop_tf".
        optimizer_eps: added to the denominator; None: 1e-3 for "rmsprop_tf", 1e-6 for "lamb",
            otherwise 1e-8.
        adam_betas: decay rates of the moments of "adam", "adamw" and "lamb".
        lamb_flavour: one of `LAMB_FLAVOURS`.
        lamb_max_weight_norm: clamps the norm of weights that scales a step of "lamb"; None: none.
        weight_decay: gradients grow by this times the weights, except for "adamw" and "lamb".
        decay_norm_and_bias: decay weights of norms and biases as well.

    Raises:
        ValueError: a value is impossible; the message names flag and value.
    """

    optimizer: str = "momentum"
    momentum: float = 0.9
    rmsprop_decay: float = 0.9
    optimizer_eps: float | None = None
    adam_betas: tuple[float, float] = (0.9, 0.999)
    lamb_flavour: str = "nvlamb"
    lamb_max_weight_norm: float | None = None
    weight_decay: float = 0.0
    decay_norm_and_bias: bool = False

    def __post_init__(self) -> None:
        if self.optimizer not in NETWORK_OPTIMIZERS:
            raise ValueError(f"--optimizer {self.optimizer}: expected one of {NETWORK_OPTIMIZERS}")
        shares = {"momentum": self.momentum, "rmsprop_decay": self.rmsprop_decay}
        for flag, value in (*shares.items(), *(("adam_betas", beta) for beta in self.adam_betas)):
            if not 0 <= value < 1:
                raise ValueError(f"--{flag} {value}: expected 0 or more, less than 1")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"--weight_decay {self.weight_decay}: expected 0 or more")
        for flag in ("optimizer_eps", "lamb_max_weight_norm"):
            value = getattr(self, flag)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"--{flag} {value}: expected a number above 0")
        if self.lamb_flavour not in LAMB_FLAVOURS:
            raise ValueError(
                f"--lamb_flavour {self.lamb_flavour}: expected one of {tuple(LAMB_FLAVOURS)}"
            )

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
