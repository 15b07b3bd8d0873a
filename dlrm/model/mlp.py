"""Multilayer perceptron: linear layers, each followed by a ReLU."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import is_autocast_available

from dlrm import ops
from dlrm.model.initialize import generator

OUTPUT_INITS = ("uniform", "normal")


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
        norms = [_BatchNorm(size, device="cpu")] if batch_norm else []
        layers += [linear, *norms, nn.ReLU()]
        num_inputs = size
    return layers


class MLP(nn.Sequential):
    """Alternating linear layers and ReLUs, optionally with batch norm, with float32 parameters.

    In half precision each pass rounds the parameters, once for forward and backward; use
    `keep_rounded` for many passes over the same parameters.

    Args:
        layers: the modules.
        dtype: dtype to compute in.
        optimized: run `ops.mlp` instead of the modules one by one, with the same values up to the
            order of summation. The modules still run if they are of other types or have hooks, in
            compiled or traced models, and under torch.func. `ops.mlp` has no second derivatives;
            the modules have them.
        dropout: share of each ReLU's outputs that training sets to 0; see `ops.dropout`.
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
        self._kept: tuple[Tensor, ...] = ()

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns `[batch, outputs]` of the last layer, in `dtype`, from `[batch, inputs]`."""
        if not self._can_be_optimized():
            half = self.dtype != torch.float32
            with torch.autocast(inputs.device.type, self.dtype, enabled=half):
                return self._by_modules(inputs) if self._drops() else super().forward(inputs)
        return self._without_autocast(self._by_ops, inputs)

    def logits(self, inputs: Tensor, output: nn.Linear) -> Tensor:
        """Returns the logits of `output`, a layer of one output after this network: `[batch]`."""
        if self._drops() or not self._can_be_optimized() or not _is_plain(output):
            return output(self(inputs).float()).squeeze(1)
        return self._without_autocast(self._logits_by_ops, inputs, output.weight, output.bias)

    def _without_autocast(
        self, run: Callable[..., Tensor], inputs: Tensor, *logit: Tensor
    ) -> Tensor:
        """Calls an operator on inputs of `dtype`, outside the caller's autocast."""
        parameters = self._parameters_by_kind()
        count = len(parameters) // 2
        arguments = inputs.to(self.dtype), parameters[:count], parameters[count:], *logit
        device = inputs.device.type
        if is_autocast_available(device) and torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return run(*arguments)
        return run(*arguments)

    def _drops(self) -> bool:
        return self.training and self.dropout > 0

    def _by_modules(self, values: Tensor) -> Tensor:
        """Runs the modules one by one, with dropout."""
        for layer in self:
            values = layer(values)
            if isinstance(layer, nn.ReLU):
                values = ops.dropout(values, self.dropout)
        return values

    def _logits_by_ops(
        self,
        values: Tensor,
        weights: list[Tensor],
        biases: list[Tensor],
        logit_weight: Tensor,
        logit_bias: Tensor,
    ) -> Tensor:
        return ops.mlp_logits(values, weights, biases, logit_weight, logit_bias, self._kept)

    def _by_ops(self, values: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
        rounded = self._kept
        if not self._drops():
            return ops.mlp(values, weights, biases, rounded)
        for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            own = rounded[index :: len(weights)]  # none, or this layer's weight and bias
            values = ops.dropout(ops.mlp(values, [weight], [bias], own), self.dropout)
        return values

    @contextmanager
    def keep_rounded(self) -> Iterator[None]:
        """Rounds the parameters once for all passes of the block, which must not change them."""
        device = next(self.parameters()).device if len(self) else torch.device("cpu")
        native = ops.multiplies_natively(device, self.dtype)
        if self.dtype != torch.float32 and self._can_be_optimized() and not native:
            parameters, count = self._parameters_by_kind(), len(self) // 2
            self._kept = ops.rounded_parameters(self.dtype, parameters[:count], parameters[count:])
        try:
            yield
        finally:
            self._kept = ()

    def _can_be_optimized(self) -> bool:
        if not self.optimized or not len(self) or len(self) % 2:
            return False
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return False
        if torch._C._are_functorch_transforms_active():
            return False
        return all(
            type(layer) is nn.ReLU and not _has_hooks(layer) if index % 2 else _is_plain(layer)
            for index, layer in enumerate(self)
        )

    def _parameters_by_kind(self) -> list[Tensor]:
        """Returns the weights of all layers, then their biases."""
        linears = [layer for layer in self if isinstance(layer, nn.Linear)]
        return [*(layer.weight for layer in linears), *(layer.bias for layer in linears)]


def _is_plain(layer: nn.Module) -> bool:
    """Returns whether a layer computes what `nn.Linear` with a bias does, and nothing else."""
    return type(layer) is nn.Linear and layer.bias is not None and not _has_hooks(layer)


def _has_hooks(layer: nn.Module) -> bool:
    return bool(
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
    )


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
        num_inputs: inputs of the layer.
        seed: seed of the initial values.
        name: name of the layer, on which the initial values also depend.
        init: one of `OUTPUT_INITS`: "uniform" as PyTorch's default and NVIDIA's DLRM, or "normal"
            as `mlp_layers` and Meta's DLRM.
        logits: number of logits; each is initialized as in a layer with a single logit.
    """
    if init == "normal":
        return _normal_linear(num_inputs, logits, generator(seed, name), outputs=1)
    linear = nn.Linear(num_inputs, logits, device="meta").to_empty(device="cpu")
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
    linear = nn.Linear(num_inputs, size, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        linear.weight.normal_(0, (2 / (num_inputs + outputs)) ** 0.5, generator=random)
        linear.bias.normal_(0, (1 / outputs) ** 0.5, generator=random)
    return linear
