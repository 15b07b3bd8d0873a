"""The optimizer of a network without tables, by name."""

import torch
from torch import nn
from torch.optim import Optimizer

from dlrm.train.optim.config import NetworkOptimizerConfig as NetworkOptimizerConfig
from dlrm.train.optim.dense import DENSE_OPTIMIZERS, ParameterGroups


def network_optimizer(config: NetworkOptimizerConfig, model: nn.Module) -> Optimizer:
    """Returns the optimizer of all trainable parameters of a model.

    Weights of two or more dimensions decay. Biases and weights of norms do not, unless the
    configuration says so.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: ParameterGroups = [
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
