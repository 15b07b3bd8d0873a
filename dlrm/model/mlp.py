"""Multilayer perceptron: linear layers, each followed by a ReLU."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dlrm import ops
from dlrm.model.initialize import generator


def mlp(
    num_inputs: int,
    sizes: Sequence[int],
    seed: int,
    name: str,
    dtype: torch.dtype = torch.float32,
    optimized: bool = True,
) -> "MLP":
    """Returns linear layers of the given sizes, each followed by a ReLU.

    Weights are normal with variance 2 / (inputs + outputs), biases with variance 1 / outputs,
    as in NVIDIA's and Meta's DLRM; they depend on the seed and the names alone.
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
    return MLP(*layers, dtype=dtype, optimized=optimized)


class MLP(nn.Sequential):
    """Linear layers and ReLUs by turns, with float32 parameters.

    In half precision the rounded weights are kept beside them: training rounds once a step,
    evaluation and inference once in all.

    Args:
        layers: the modules.
        dtype: to compute in.
        optimized: run `ops.mlp` on the CPU, not the modules one by one. The values are the same up
            to the order of summation. Compiled and traced models have the modules either way.
    """

    def __init__(
        self, *layers: nn.Module, dtype: torch.dtype = torch.float32, optimized: bool = True
    ):
        super().__init__(*layers)
        self.dtype, self.optimized = dtype, optimized
        self._rounded: tuple[Tensor, ...] = ()
        self._rounded_from: list[tuple[int, int]] = []  # address and version of each parameter

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns `[batch, outputs]` of the last layer, in `dtype`, from `[batch, inputs]`."""
        traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
        if self.optimized and inputs.device.type == "cpu" and len(self) and not traced:
            linears = [layer for layer in self if isinstance(layer, nn.Linear)]
            weights = [linear.weight for linear in linears]
            biases = [linear.bias for linear in linears]
            rounded = self._in_dtype([*weights, *biases])
            return ops.mlp(inputs.to(self.dtype), weights, biases, rounded)
        half = self.dtype != torch.float32
        with torch.autocast(inputs.device.type, self.dtype, enabled=half):
            return super().forward(inputs)

    def _in_dtype(self, parameters: list[Tensor]) -> tuple[Tensor, ...]:
        """The parameters, rounded where `dtype` is not theirs.

        What a pass with gradients has rounded is not used again, since the update that follows may
        go unseen: torch's fused optimizers do not count a parameter's versions up.
        """
        if self.dtype == torch.float32:
            return ()
        current = [(parameter.data_ptr(), parameter._version) for parameter in parameters]
        if torch.is_grad_enabled() or current != self._rounded_from:
            self._rounded = tuple(parameter.detach().to(self.dtype) for parameter in parameters)
            self._rounded_from = [] if torch.is_grad_enabled() else current
        return self._rounded


def output_layer(num_inputs: int, seed: int, name: str) -> nn.Linear:
    """Returns the linear layer that gives the logit, initialised as PyTorch does by default."""
    linear = nn.Linear(num_inputs, 1, device="meta").to_empty(device="cpu")
    bound = num_inputs**-0.5
    random = generator(seed, name)
    with torch.no_grad():
        linear.weight.uniform_(-bound, bound, generator=random)
        linear.bias.uniform_(-bound, bound, generator=random)
    return linear
