"""The optimizer of a network without tables, by name."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dlrm.settings import check_settings, setting
from dlrm.train.optim.config import NETWORK_OPTIMIZER_NAMES
from dlrm.train.optim.lamb import LAMB_FLAVOURS, Lamb
from dlrm.train.optim.rmsprop import RMSpropTF

Groups = list[dict[str, Any]]  # groups of parameters, with their weight decay


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
    return NETWORK_OPTIMIZERS[config.optimizer](groups, lr, config)


def _sgd(groups: Groups, lr: Tensor, config: NetworkOptimizerConfig) -> Optimizer:
    return torch.optim.SGD(groups, lr=lr, fused=True)


def _momentum(groups: Groups, lr: Tensor, config: NetworkOptimizerConfig) -> Optimizer:
    momentum = config.momentum
    nesterov = config.optimizer == "nesterov" and momentum > 0
    sgd = torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, fused=True)
    for weight in _weights(groups) if momentum else ():
        # torch leaves it uninitialised if the very first step is skipped for an overflow.
        sgd.state[weight]["momentum_buffer"] = torch.zeros_like(weight, requires_grad=False)
    return sgd


def _rmsprop_tf(groups: Groups, lr: Tensor, config: NetworkOptimizerConfig) -> Optimizer:
    eps = config.optimizer_eps or 1e-3
    return RMSpropTF(groups, lr, config.rmsprop_decay, config.momentum, eps)


def _adam(groups: Groups, lr: Tensor, config: NetworkOptimizerConfig) -> Optimizer:
    if any(weight.element_size() < 4 for weight in _weights(groups)):
        raise ValueError(
            f"--optimizer {config.optimizer} keeps its moments in the weights' 16 bits under "
            "--precision 16.16, which round 1 - beta away; --precision 16.32 has 32 bits"
        )
    make = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    eps = config.optimizer_eps or 1e-8
    return make(groups, lr=lr, betas=config.adam_betas, eps=eps, fused=True)


def _lamb(groups: Groups, lr: Tensor, config: NetworkOptimizerConfig) -> Optimizer:
    eps, limit = config.optimizer_eps or 1e-6, config.lamb_max_weight_norm or math.inf
    return Lamb(groups, lr, config.lamb_flavour, config.adam_betas, eps, limit)


def _weights(groups: Groups) -> Iterator[Tensor]:
    return (weight for group in groups for weight in group["params"])


NETWORK_OPTIMIZERS: dict[str, Callable[[Groups, Tensor, NetworkOptimizerConfig], Optimizer]] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "nesterov": _momentum,
    "rmsprop_tf": _rmsprop_tf,
    "adam": _adam,
    "adamw": _adam,
    "lamb": _lamb,
}
