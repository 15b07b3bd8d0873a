"""Multilayer perceptron: linear layers, each followed by a ReLU, in one autograd node.

On the CPU a native operator takes a batch through all layers, and one its gradient: schemas in
csrc/schemas.h, kernels in csrc/cpu/mlp*. Elsewhere, and on processors that multiply bfloat16 faster
in oneDNN, torch's products run layer by layer (`multiplies_natively`). Their backward pass masks a
gradient and sums the bias's gradient in one pass of a kernel: csrc/{cpu,cuda}/relu_bias_backward*.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from dlrm.ops.layers import matrix_product
from dlrm.ops.library import has_native, native_available

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NATIVE_DTYPES = (torch.float32, torch.bfloat16)


def mlp(
    inputs: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    rounded: Sequence[Tensor] = (),
    native: bool = True,
) -> Tensor:
    """Returns relu(x W^T + b), layer after layer: `[batch, outputs of the last layer]`.

    Args:
        inputs: `[batch, inputs]`, of the dtype to compute in: float32, bfloat16 or float16.
        weights: `[outputs, inputs]` of each layer; gradients have their dtype.
        biases: `[outputs]` of each layer.
        rounded: `rounded_parameters` of the weights and biases, if the caller has them already.
        native: run the native operator where it can be; see `choose_products`.

    Raises:
        RuntimeError: shapes or dtypes do not fit together; the message names layer and shapes.
    """
    if native and weights and multiplies_natively(inputs.device, inputs.dtype, weights[0].dtype):
        return _native_mlp(inputs, weights, biases)
    rounded = rounded or rounded_parameters(inputs.dtype, weights, biases)
    _check(inputs, weights, biases, rounded)
    return _MLP.apply(inputs, rounded, *weights, *biases)


def mlp_logits(
    inputs: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    logit_weight: Tensor,
    logit_bias: Tensor,
    rounded: Sequence[Tensor] = (),
    native: bool = True,
) -> Tensor:
    """Returns the logits of a last linear layer after `mlp`, in float32: `[batch]`.

    Args:
        inputs, weights, biases, rounded, native: see `mlp`.
        logit_weight: `[1, inputs of the last layer]` float32.
        logit_bias: `[1]` float32.

    Raises:
        RuntimeError: see `mlp`.
    """
    if native and weights and multiplies_natively(inputs.device, inputs.dtype, weights[0].dtype):
        return _native_mlp(inputs, weights, biases, logit_weight, logit_bias)
    hidden = mlp(inputs, weights, biases, rounded, native).float()
    return F.linear(hidden, logit_weight, logit_bias).squeeze(1)


def multiplies_natively(
    device: torch.device, dtype: torch.dtype, parameters: torch.dtype = torch.float32
) -> bool:
    """Returns whether `mlp` can run the native operator, which rounds parameters itself.

    Args:
        device: device of the inputs.
        dtype: dtype to compute in.
        parameters: dtype of weights and biases.
    """
    return (
        device.type == "cpu"
        and dtype in _NATIVE_DTYPES
        and parameters in _NATIVE_DTYPES
        and native_available()
    )


def rounded_parameters(
    dtype: torch.dtype, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Returns the weights and then the biases in `dtype`; nothing if they have it already."""
    parameters = [*weights, *biases]
    if all(parameter.dtype == dtype for parameter in parameters):
        return ()
    rounded = [torch.empty_like(parameter, dtype=dtype) for parameter in parameters]
    with torch.no_grad():
        torch._foreach_copy_(rounded, parameters)  # one launch on a GPU
    return tuple(rounded)


def mlp_reference(inputs: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """Does the same in plain PyTorch: the oracle of the tests."""
    for weight, bias in zip(weights, biases, strict=True):
        inputs = F.relu(F.linear(inputs, weight.to(inputs.dtype), bias.to(inputs.dtype)))
    return inputs


def relu_bias_backward(grad: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of a ReLU's input and of the bias that was added to it.

    The first is `grad` where `output` is above 0, else 0. The second is its column sums in float32,
    which are the same at any thread count.

    Args:
        grad: gradient of the ReLU's output, `[batch, width]`.
        output: the ReLU's output, of the same shape and dtype.

    Raises:
        RuntimeError: shapes or dtypes do not fit together; the message names both.
    """
    if has_native("relu_bias_backward", grad=grad, output=output):
        return torch.ops.dlrm.relu_bias_backward.default(grad, output)
    _check_pair(grad, output)
    return relu_bias_backward_reference(grad, output)


def relu_bias_backward_reference(grad: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """Does the same in plain PyTorch: the fallback and the oracle of the tests."""
    grad_input = torch.ops.aten.threshold_backward(grad, output, 0)
    return grad_input, grad_input.sum(0, dtype=torch.float32)


def product_flops(batch: int, weights: Sequence[torch.Size | None]) -> int:
    """Returns the operations of a batch's products with weights of some shapes; None is none."""
    return 2 * batch * sum(shape.numel() for shape in weights if shape is not None)


def _native_mlp(
    inputs: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], *logit: Tensor
) -> Tensor:
    """Runs the native operator, with a node for its gradient only if one is wanted."""
    parameters = (*weights, *biases, *logit)
    if torch.is_grad_enabled() and any(one.requires_grad for one in (inputs, *parameters)):
        return _NativeMLP.apply(inputs, len(weights), *parameters)
    layer = logit or (None, None)
    return torch.ops.dlrm.mlp.default(inputs, weights, biases, *layer, False)[0]


class _NativeMLP(torch.autograd.Function):
    """The autograd node of the native operator.

    It takes the inputs, the number of layers, their weights and biases, and those of the logit.
    """

    @staticmethod
    def forward(ctx, inputs: Tensor, num_layers: int, *parameters: Tensor) -> Tensor:  # type: ignore[override]
        weights, biases = parameters[:num_layers], parameters[num_layers : 2 * num_layers]
        logit = parameters[2 * num_layers :] or (None, None)
        output, kept = torch.ops.dlrm.mlp.default(inputs, weights, biases, *logit, True)
        ctx.save_for_backward(kept, output if logit[0] is None else None, logit[0])
        # Only their shapes are needed: `kept` has a copy of the weights' values.
        ctx.weights, ctx.logit_bias, ctx.dtype = weights, logit[1], inputs.dtype
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        kept, output, logit_weight = ctx.saved_tensors
        needs_inputs, _, *needs = ctx.needs_input_grad
        of_inputs, *grads = torch.ops.dlrm.mlp_backward.default(
            grad,
            grad if output is None else output,  # of logits only the shape is needed
            kept,
            ctx.weights,
            logit_weight,
            ctx.logit_bias,
            ctx.dtype,
            needs_inputs,
            any(needs),
        )
        grads = grads or [None] * len(needs)
        return of_inputs if needs_inputs else None, None, *grads


class _MLP(torch.autograd.Function):
    """The autograd node; takes the inputs, rounded parameters or none, weights and biases.

    After a product the processor's caches hold nothing of Python's, so each call costs tens of
    microseconds; none here can be omitted.
    """

    @staticmethod
    def forward(ctx, inputs: Tensor, rounded: Sequence[Tensor], *parameters: Tensor) -> Tensor:  # type: ignore[override]
        num_layers = len(parameters) // 2
        used = rounded or parameters
        weights, biases = list(used[:num_layers]), used[num_layers:]
        ctx.width = inputs.shape[1]
        if weights and (padding := _padding(inputs)):
            inputs, weights[0] = F.pad(inputs, padding), F.pad(weights[0], padding)
        values = [inputs]
        for weight, bias in zip(weights, biases, strict=True):
            values.append(_layer(values[-1], weight, bias))
        ctx.dtypes = [parameter.dtype for parameter in parameters]
        saved: list[Tensor | None] = [*values, *weights]
        needs_inputs, _, *needs = ctx.needs_input_grad
        if not any(needs[:1]):
            saved[0] = None  # only the gradient of the first weight reads the inputs
        if weights and not needs_inputs:
            saved[len(values)] = None  # only that of the inputs reads the first weight
        ctx.save_for_backward(*saved)
        return values[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        num_layers = len(ctx.dtypes) // 2
        saved, dtypes = ctx.saved_tensors, ctx.dtypes
        values, weights = saved[: num_layers + 1], saved[num_layers + 1 :]
        grads: list[Tensor | None] = [None] * (2 * num_layers)
        needs_inputs, _, *needs = ctx.needs_input_grad
        native = has_native("relu_bias_backward", grad=grad)
        masked = relu_bias_backward_reference
        if native:
            masked = torch.ops.dlrm.relu_bias_backward.default
        for layer in reversed(range(num_layers)):
            grad, grads[num_layers + layer] = masked(grad, values[layer + 1])
            if needs[layer]:
                grads[layer] = _weight_gradient(grad, values[layer])
            if layer or needs_inputs:
                grad = matrix_product(grad, weights[layer].T)
        if grads and grads[0] is not None and grads[0].shape[1] != ctx.width:
            # Cast on its own: columns of a wider matrix are not cast together with others.
            grads[0] = grads[0][:, : ctx.width].to(dtypes[0]).contiguous()
        of_inputs = grad[:, : ctx.width] if needs_inputs else None
        return of_inputs, None, *_cast(grads, dtypes)


def _layer(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns relu(x W^T + b). On a GPU cuBLASLt's product ends with the ReLU, which keeps NaN.

    oneDNN's ReLU does not: it turns NaN into 0, and would hide that training diverged.
    """
    if inputs.is_cuda and weight.numel():
        return torch._addmm_activation(bias, inputs, weight.T)
    return matrix_product(inputs, weight, bias).relu_()


def _padding(inputs: Tensor) -> tuple[int, int] | None:
    """Returns the zero columns that give a matrix rows of whole 16 bytes, if a GPU needs them.

    Otherwise cuBLAS reads half-precision operands, such as 13 numerical fields, in pieces.
    """
    missing = -inputs.shape[1] % 8 if inputs.is_cuda and inputs.dtype != torch.float32 else 0
    return (0, missing) if missing else None


def _cast(grads: list[Tensor | None], dtypes: list[torch.dtype]) -> list[Tensor | None]:
    """Casts gradients to the dtypes of their parameters, all in one launch on a GPU."""
    result: list[Tensor | None] = []
    narrow: list[Tensor] = []
    wide: list[Tensor] = []
    for grad, dtype in zip(grads, dtypes, strict=True):
        if grad is not None and grad.dtype != dtype:
            narrow.append(grad)
            wide.append(torch.empty_like(grad, dtype=dtype))
            grad = wide[-1]
        result.append(grad)
    if narrow:
        torch._foreach_copy_(wide, narrow)
    return result


def _weight_gradient(grad: Tensor, inputs: Tensor) -> Tensor:
    """Returns grad^T x inputs. On the CPU, with few inputs, it computes the transpose, which is 2.3
    times as fast (float32, batch 2048 x 13 x 512, Zen 4, 2 threads)."""
    if 8 * inputs.shape[1] <= grad.shape[1] and grad.device.type == "cpu":
        return torch.mm(inputs.T, grad).T.contiguous()  # fused optimizers ignore strides
    return torch.mm(grad.T, inputs)


def _check(
    inputs: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    rounded: Sequence[Tensor] = (),
) -> None:
    if not len(weights) == len(biases) or (rounded and len(rounded) != 2 * len(weights)):
        raise RuntimeError(
            f"mlp: expected a bias for every weight and both rounded, got {len(weights)} weights, "
            f"{len(biases)} biases and {len(rounded)} rounded"
        )
    if inputs.dim() != 2 or inputs.dtype not in _DTYPES:
        raise RuntimeError(
            "mlp: expected inputs [batch, inputs], Float, BFloat16 or Half, got "
            f"{list(inputs.shape)} {inputs.dtype}"
        )
    width = inputs.shape[1]
    for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        if weight.dim() != 2 or weight.shape[1] != width or bias.shape != weight.shape[:1]:
            raise RuntimeError(
                f"mlp: layer {layer}: expected weight [outputs, {width}] and bias [outputs], got "
                f"weight {list(weight.shape)} and bias {list(bias.shape)}"
            )
        if not weight.device == bias.device == inputs.device:
            raise RuntimeError(
                f"mlp: layer {layer}: expected weight and bias on {inputs.device}, as the inputs, "
                f"got weight on {weight.device} and bias on {bias.device}"
            )
        width = weight.shape[0]
    for tensor, source in zip(rounded, (*weights, *biases), strict=False):
        if (tensor.dtype, tensor.device) != (inputs.dtype, inputs.device) or (
            tensor.shape != source.shape
        ):
            raise RuntimeError(
                f"mlp: expected rounded parameters {list(source.shape)} of the inputs' dtype "
                f"{inputs.dtype} on {inputs.device}, got {list(tensor.shape)} {tensor.dtype} on "
                f"{tensor.device}"
            )


def _check_pair(grad: Tensor, output: Tensor) -> None:
    """Checks the same as csrc/relu_bias_backward.h, for the fallback."""
    if grad.dim() != 2 or grad.shape != output.shape:
        raise RuntimeError(
            "relu_bias_backward: expected grad and output [batch, width], got grad "
            f"{list(grad.shape)} and output {list(output.shape)}"
        )
    if grad.dtype != output.dtype or grad.dtype not in _DTYPES:
        raise RuntimeError(
            "relu_bias_backward: expected grad and output of one dtype (Float, BFloat16 or Half), "
            f"got grad {grad.dtype} and output {output.dtype}"
        )


if native_available():

    @torch.library.register_fake("dlrm::mlp")
    def _(inputs, weights, biases, logit_weight, logit_bias, keeps):
        _check(inputs, weights, biases)
        kept = inputs.new_empty(0, dtype=torch.float32)
        if logit_weight is not None:
            return inputs.new_empty(len(inputs), dtype=torch.float32), kept
        return inputs.new_empty(len(inputs), len(weights[-1])), kept

    @register_flop_formula(torch.ops.dlrm.mlp)
    def _(inputs, weights, biases, logit_weight, *_, **_options):
        return product_flops(inputs[0], [*weights, logit_weight])

    @register_flop_formula(torch.ops.dlrm.mlp_backward)
    def _(
        grad, output, kept, weights, logit_weight, bias, dtype, needs_inputs, needs_parameters, **_
    ):
        layers = [*weights, logit_weight]
        of_values = product_flops(grad[0], layers if needs_inputs else layers[1:])
        return of_values + needs_parameters * product_flops(grad[0], layers)

    @torch.library.register_fake("dlrm::relu_bias_backward")
    def _(grad, output):
        _check_pair(grad, output)
        return torch.empty_like(grad), grad.new_empty(grad.shape[1], dtype=torch.float32)
