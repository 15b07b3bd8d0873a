"""Multilayer perceptron: linear layers, each followed by a ReLU."""

import copy
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_linear_bn_eval

from dlrm import ops
from dlrm.model.layers.initialize import fill_normal, generator

LinearT = TypeVar("LinearT", bound=nn.Linear)


class MLP(nn.Sequential):
    """Linear layers, optionally with batch norm, each followed by a ReLU; parameters are float32.

    Initial weights are normal with variance 2 / (inputs + outputs), biases with variance
    1 / outputs, as in NVIDIA's and Meta's DLRM; they depend only on the seed and the names. Layers
    are named by their places in a sequence of linear layers, norms and ReLUs, also where a module
    is two of them.

    Args:
        sizes: outputs of each layer.
        seed, name: of the initial values.
        dtype: dtype to compute in.
        batch_norm: normalize the outputs of each linear layer before the ReLU.
        dropout: share of each ReLU's outputs that training sets to 0; see `ops.dropout`.

    Attributes:
        random: generator that dropout draws from; None is torch's default generator.
    """

    def __init__(
        self,
        num_inputs: int,
        sizes: Sequence[int],
        seed: int,
        name: str,
        dtype: torch.dtype = torch.float32,
        batch_norm: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.dtype, self.dropout = dtype, dropout
        self.random: torch.Generator | None = None
        for index, size in enumerate(sizes):
            own = num_inputs, size, (seed, f"{name}.{index}")
            layers: list[nn.Module] = [_normal(LinearReLU, *own)]
            if batch_norm:
                layers = [_normal(_Linear, *own), _BatchNorm(size), nn.ReLU()]
            for place, layer in enumerate(layers):
                self.add_module(str((3 if batch_norm else 2) * index + place), layer)
            num_inputs = size

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns `[batch, outputs]` of the last layer, in `dtype`, from `[batch, inputs]`."""
        values = inputs.to(self.dtype)
        for layer in self:
            values = layer(values)
            if self.drops() and isinstance(layer, LinearReLU | nn.ReLU):
                values = ops.dropout(values, self.dropout, self.random)
        return values

    def drops(self) -> bool:
        """Returns whether dropout is active."""
        return self.training and self.dropout > 0

    def fused_layers(self) -> list["LinearReLU"]:
        """Returns the layers if each is a `LinearReLU`, none otherwise."""
        layers = [layer for layer in self if type(layer) is LinearReLU]
        return layers if len(layers) == len(self) else []

    def exportable(self) -> nn.Sequential:
        """Returns torch's own modules with the same weights, and batch norm folded into them."""
        result: list[nn.Module] = []
        for layer in self:
            if isinstance(layer, nn.BatchNorm1d):
                linear, norm = result[-1], copy.copy(layer).eval()
                assert isinstance(linear, nn.Linear)
                result[-1] = fuse_linear_bn_eval(linear.eval(), norm)
            elif isinstance(layer, LinearReLU | _Linear):
                plain = nn.Linear(1, layer.out_features, device="meta")
                plain.in_features = layer.in_features
                plain.weight, plain.bias = layer.weight, layer.bias
                result += [plain] if isinstance(layer, _Linear) else [plain, nn.ReLU()]
            else:
                result.append(layer)
        return nn.Sequential(*result)


class LinearReLU(nn.Linear):
    """A linear layer and a ReLU, computed in the dtype of the inputs; see `ops.linear_relu`.

    Attributes:
        products: "native" or "torch"; see `ops.choose_products`.
    """

    products = "torch"

    def forward(self, inputs: Tensor) -> Tensor:
        return ops.linear_relu(inputs, self.weight, self.bias, self.products == "native")


class _Linear(nn.Linear):
    """A linear layer that computes in the dtype of its inputs."""

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.weight.to(inputs.dtype), self.bias.to(inputs.dtype))


class _BatchNorm(nn.BatchNorm1d):
    """Batch norm that uses its running statistics for a batch of one sample, which has none."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training or len(inputs) > 1:
            return super().forward(inputs)
        return F.batch_norm(
            inputs, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )


def output_layer(
    num_inputs: int, seed: int, name: str, init: str = "uniform", logits: int = 1
) -> nn.Linear:
    """Returns the linear layer of the logit, or of several logits.

    Args:
        name: name of the layer, on which the initial values also depend.
        init: one of `OUTPUT_INITS`: "uniform" as PyTorch's default and NVIDIA's DLRM, or "normal"
            as `MLP` and Meta's DLRM.
        logits: number of logits; each is initialized as in a layer with a single logit.
    """
    if init == "normal":
        return _normal(nn.Linear, num_inputs, logits, (seed, name), outputs=1)
    linear = _empty(nn.Linear, num_inputs, logits)
    bound, random = num_inputs**-0.5, generator(seed, name)
    with torch.no_grad():
        linear.weight.uniform_(-bound, bound, generator=random)
        linear.bias.uniform_(-bound, bound, generator=random)
    return linear


def _normal(
    kind: type[LinearT],
    num_inputs: int,
    size: int,
    seed_and_name: tuple[int, str],
    outputs: int | None = None,
) -> LinearT:
    """Returns a layer with the variances of a layer of `outputs`, by default its `size`."""
    outputs, random = outputs or size, generator(*seed_and_name)
    linear = _empty(kind, num_inputs, size)
    with torch.no_grad():
        fill_normal(linear.weight, (2 / (num_inputs + outputs)) ** 0.5, random)
        fill_normal(linear.bias, (1 / outputs) ** 0.5, random)
    return linear


def _empty(kind: type[LinearT], num_inputs: int, size: int) -> LinearT:
    """Returns a layer to fill in. Its parameters are made here, as torch warns of 0 inputs."""
    linear = kind(1, size, device="meta")
    linear.in_features = num_inputs
    linear.weight = nn.Parameter(torch.empty(size, num_inputs))
    linear.bias = nn.Parameter(torch.empty(size))
    return linear
