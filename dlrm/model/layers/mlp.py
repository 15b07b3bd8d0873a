"""Multilayer perceptron: linear layers, each followed by a ReLU."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_linear_bn_eval

from dlrm import ops
from dlrm.model.layers.hooks import has_hooks
from dlrm.model.layers.initialize import fill_normal, generator


def mlp(
    num_inputs: int,
    sizes: Sequence[int],
    seed: int,
    name: str,
    dtype: torch.dtype = torch.float32,
    optimized: bool = True,
    batch_norm: bool = False,
    dropout: float = 0.0,
) -> "MLP":
    """Returns linear layers of the given sizes, each followed by a ReLU.

    See `mlp_layers` and `MLP`.
    """
    layers = mlp_layers(num_inputs, sizes, seed, name, batch_norm)
    return MLP(*layers, dtype=dtype, optimized=optimized, dropout=dropout)


def mlp_layers(
    num_inputs: int, sizes: Sequence[int], seed: int, name: str, batch_norm: bool = False
) -> list[nn.Module]:
    """Returns the layers of an MLP with their initial values.

    With `batch_norm` each linear layer is normalized before its ReLU.

    Weights are normal with variance 2 / (inputs + outputs), biases with variance 1 / outputs, as in
    NVIDIA's and Meta's DLRM; they depend only on the seed and the names.
    """
    layers: list[nn.Module] = []
    for index, size in enumerate(sizes):
        linear = _normal_linear(num_inputs, size, generator(seed, f"{name}.{index}"))
        norms = [_BatchNorm(size)] if batch_norm else []
        layers += [linear, *norms, nn.ReLU()]
        num_inputs = size
    return layers


class MLP(nn.Sequential):
    """Alternating linear layers and ReLUs, optionally with batch norm, with float32 parameters.

    In half precision each pass rounds the parameters, once for forward and backward; use
    `keep_rounded` for many passes over the same parameters.

    Args:
        dtype: dtype to compute in.
        optimized: run `ops.mlp` instead of the modules one by one, with the same values up to the
            order of summation. The modules still run if they are of other types or have hooks, in
            compiled or traced models, and under torch.func. `ops.mlp` has no second derivatives;
            the modules have them.
        dropout: share of each ReLU's outputs that training sets to 0; see `ops.dropout`.

    Attributes:
        products: "native" or "torch", see `ops.choose_products`: whose products the CPU uses.
        random: generator that dropout draws from; None is torch's default generator.
    """

    def __init__(
        self,
        *layers: nn.Module,
        dtype: torch.dtype = torch.float32,
        optimized: bool = True,
        dropout: float = 0.0,
    ):
        super().__init__(*layers)
        self.dtype, self.optimized, self.dropout = dtype, optimized, dropout
        self.random: torch.Generator | None = None
        self._kept: tuple[Tensor, ...] = ()
        self.products = ops.choose_products(dtype)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what a block of `keep_rounded` keeps: a copy outlives the block."""
        return {**self.__dict__, "_kept": ()}

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns `[batch, outputs]` of the last layer, in `dtype`, from `[batch, inputs]`."""
        parameters = self._parameters_of_ops()
        if parameters is None:
            run = self._by_modules if self._drops() else super().forward
            device, half = inputs.device.type, self.dtype != torch.float32
            if device == "meta":  # which has no autocast
                return run(inputs)
            with torch.autocast(device, self.dtype, enabled=half):
                return run(inputs)
        return _without_autocast(self._by_ops, inputs.to(self.dtype), *parameters)

    def logits(self, inputs: Tensor, output: nn.Linear) -> Tensor:
        """Returns the logits of `output`, a layer of one output after this network: `[batch]`."""
        as_modules = self._drops() or has_hooks(self) or not is_plain(output)
        parameters = None if as_modules else self._parameters_of_ops()
        if parameters is None:
            return output(self(inputs).float()).squeeze(1)
        logit = output.weight, output.bias
        return _without_autocast(
            ops.mlp_logits, inputs.to(self.dtype), *parameters, *logit, self._kept, self._native
        )

    def native_parameters(self) -> tuple[list[Tensor], list[Tensor]] | None:
        """Returns weights and biases if all that runs is an operator with native products."""
        if not self._native or self._drops() or has_hooks(self):
            return None
        return self._parameters_of_ops()

    @property
    def _native(self) -> bool:
        return self.products == "native"

    def _drops(self) -> bool:
        return self.training and self.dropout > 0

    def _by_modules(self, values: Tensor) -> Tensor:
        """Runs the modules one by one, with dropout."""
        for layer in self:
            values = layer(values)
            if isinstance(layer, nn.ReLU):
                values = ops.dropout(values, self.dropout, self.random)
        return values

    def _by_ops(self, values: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
        rounded = self._kept
        if not self._drops():
            return ops.mlp(values, weights, biases, rounded, self._native)
        for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            own = rounded[index :: len(weights)]  # none, or this layer's weight and bias
            values = ops.mlp(values, [weight], [bias], own, self._native)
            values = ops.dropout(values, self.dropout, self.random)
        return values

    @contextmanager
    def keep_rounded(self) -> Iterator[None]:
        """Rounds the parameters once for all passes of the block, which must not change them."""
        device = next((weight.device for weight in self.parameters()), torch.device("cpu"))
        native = self._native and ops.multiplies_natively(device, self.dtype)
        parameters = self._parameters_of_ops()
        if self.dtype != torch.float32 and parameters and not native:
            self._kept = ops.rounded_parameters(self.dtype, *parameters)
        try:
            yield
        finally:
            self._kept = ()

    def _parameters_of_ops(self) -> tuple[list[Tensor], list[Tensor]] | None:
        """Returns the weights and the biases of all layers; None if the modules must run."""
        if not self.optimized or torch.compiler.is_compiling() or torch.jit.is_tracing():
            return None
        if torch._C._are_functorch_transforms_active():
            return None
        weights: list[Tensor] = []
        biases: list[Tensor] = []
        wanted: type[nn.Module] = nn.Linear
        for layer in self._modules.values():
            if type(layer) is not wanted or has_hooks(layer):
                return None
            if wanted is nn.Linear:
                parameters = layer._parameters  # the modules' own look-up takes 1 us each
                weight, bias = parameters.get("weight"), parameters.get("bias")
                if weight is None or bias is None:
                    return None
                weights.append(weight)
                biases.append(bias)
            wanted = nn.ReLU if wanted is nn.Linear else nn.Linear
        return (weights, biases) if weights and wanted is nn.Linear else None


def _without_autocast(run: Callable[..., Tensor], inputs: Tensor, *arguments: Any) -> Tensor:
    """Calls an operator outside the caller's autocast."""
    device = inputs.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return run(inputs, *arguments)
    return run(inputs, *arguments)


def is_plain(layer: nn.Module) -> bool:
    """Returns whether a layer computes what `nn.Linear` with a bias does, and nothing else."""
    return type(layer) is nn.Linear and not has_hooks(layer) and layer.bias is not None


class _BatchNorm(nn.BatchNorm1d):
    """Batch norm that uses its running statistics for a batch of one sample, which has none."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training or len(inputs) > 1:
            return super().forward(inputs)
        return F.batch_norm(
            inputs, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )


def without_norms(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns the layers of an MLP, each batch norm folded into the linear layer before it."""
    result: list[nn.Module] = []
    for layer in layers:
        if isinstance(layer, nn.BatchNorm1d):
            linear, norm = copy.copy(result[-1]).eval(), copy.copy(layer).eval()
            assert isinstance(linear, nn.Linear)
            result[-1] = fuse_linear_bn_eval(linear, norm)
        else:
            result.append(layer)
    return result


def output_layer(
    num_inputs: int, seed: int, name: str, init: str = "uniform", logits: int = 1
) -> nn.Linear:
    """Returns the linear layer of the logit, or of several logits.

    Args:
        name: name of the layer, on which the initial values also depend.
        init: one of `OUTPUT_INITS`: "uniform" as PyTorch's default and NVIDIA's DLRM, or "normal"
            as `mlp_layers` and Meta's DLRM.
        logits: number of logits; each is initialized as in a layer with a single logit.
    """
    if init == "normal":
        return _normal_linear(num_inputs, logits, generator(seed, name), outputs=1)
    linear = _empty_linear(num_inputs, logits)
    bound = num_inputs**-0.5
    random = generator(seed, name)
    with torch.no_grad():
        linear.weight.uniform_(-bound, bound, generator=random)
        linear.bias.uniform_(-bound, bound, generator=random)
    return linear


def _normal_linear(
    num_inputs: int, size: int, random: torch.Generator, outputs: int | None = None
) -> nn.Linear:
    """Returns a layer with the variances of a layer of `outputs`, by default its `size`."""
    outputs = outputs or size
    linear = _empty_linear(num_inputs, size)
    with torch.no_grad():
        fill_normal(linear.weight, (2 / (num_inputs + outputs)) ** 0.5, random)
        fill_normal(linear.bias, (1 / outputs) ** 0.5, random)
    return linear


def _empty_linear(num_inputs: int, size: int) -> nn.Linear:
    """Returns a layer to fill in. Its parameters are made here, as torch warns of 0 inputs."""
    linear = nn.Linear(1, size, device="meta")
    linear.in_features = num_inputs
    linear.weight = nn.Parameter(torch.empty(size, num_inputs))
    linear.bias = nn.Parameter(torch.empty(size))
    return linear
