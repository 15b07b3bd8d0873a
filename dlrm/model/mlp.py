"""Multilayer perceptron: linear layers, each followed by a ReLU."""

from collections.abc import Sequence

import torch
from torch import nn

from dlrm.model.initialize import generator


def mlp(num_inputs: int, sizes: Sequence[int], seed: int, name: str) -> nn.Sequential:
    """Returns linear layers of the given sizes, each followed by a ReLU.

    Weights are normal with variance 2 / (inputs + outputs), biases with variance 1 / outputs,
    as in NVIDIA's and Meta's DLRM.
    """
    layers: list[nn.Module] = []
    for index, size in enumerate(sizes):
        linear = nn.Linear(num_inputs, size, device="meta").to_empty(device="cpu")
        random = generator(seed, f"{name}.{index}")
        with torch.no_grad():
            linear.weight.normal_(0, (2 / (num_inputs + size)) ** 0.5, generator=random)
            linear.bias.normal_(0, (1 / size) ** 0.5, generator=random)
        layers += [linear, nn.ReLU()]
        num_inputs = size
    return nn.Sequential(*layers)


def output_layer(num_inputs: int, seed: int, name: str) -> nn.Linear:
    """Returns the linear layer that gives the logit, initialised as PyTorch does by default."""
    linear = nn.Linear(num_inputs, 1, device="meta").to_empty(device="cpu")
    bound = num_inputs**-0.5
    random = generator(seed, name)
    with torch.no_grad():
        linear.weight.uniform_(-bound, bound, generator=random)
        linear.bias.uniform_(-bound, bound, generator=random)
    return linear
