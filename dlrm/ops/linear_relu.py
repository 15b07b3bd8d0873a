"""A linear layer with a ReLU in one autograd node, and the gradient of the ReLU and the bias.

On a CPU a native operator computes both, with the kernels of `network` (csrc/cpu/mlp*), or oneDNN
the products. On a GPU cuBLASLt's product ends with the ReLU, and the gradient's mask and sums are
one pass of csrc/cuda/relu_bias_backward.cu.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from dlrm.ops.layers import matrix_product
from dlrm.ops.library import has_native, is_native_on_cpu, native_available

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NATIVE_DTYPES = (torch.float32, torch.bfloat16)


def linear_relu(inputs: Tensor, weight: Tensor, bias: Tensor, native: bool = False) -> Tensor:
    """Returns relu(x W^T + b), computed in the dtype of x: `[batch, outputs]`.

    In compiled and traced models, under torch.func and for other dtypes it calls torch's functions.
    Otherwise it has no second derivatives.

    Args:
        inputs: x, `[batch, inputs]`.
        weight: W, `[outputs, inputs]`, of any floating dtype, which its gradient has, too.
        bias: b, `[outputs]`, of any floating dtype.
        native: run the native operator on a CPU, for float32 parameters and inputs in float32 or
            bfloat16; see `choose_products`.

    Raises:
        RuntimeError: shapes do not fit together.
    """
    in_graph = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if in_graph or torch._C._are_functorch_transforms_active() or inputs.dtype not in _DTYPES:
        return linear_relu_reference(inputs, weight, bias)
    outputs, width = weight.shape
    if inputs.dim() != 2 or inputs.shape[1] != width or bias.shape != (outputs,):
        return linear_relu_reference(inputs, weight, bias)  # whose error names the shapes
    node = _NativeLinearReLU if native and _is_native(inputs, weight, bias) else _LinearReLU
    return node.apply(inputs, weight, bias)


def linear_relu_reference(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Does the same in plain PyTorch: the fallback and the oracle of the tests."""
    return F.relu(F.linear(inputs, weight.to(inputs.dtype), bias.to(inputs.dtype)))


def relu_bias_backward(grad: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of a ReLU's input and of the bias that was added to it.

    The first is `grad` where `output` is above 0, else 0. The second is its column sums in float32.

    Args:
        grad: gradient of the ReLU's output, `[batch, width]`.
        output: the ReLU's output, of the same shape and dtype.

    Raises:
        RuntimeError: shapes or dtypes do not fit together; the message names both.
    """
    if has_native("relu_bias_backward", grad=grad, output=output) and grad.is_cuda:
        return torch.ops.dlrm.relu_bias_backward.default(grad, output)
    _check_pair(grad, output)
    return relu_bias_backward_reference(grad, output)


def relu_bias_backward_reference(grad: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """Does the same in plain PyTorch: the fallback and the oracle of the tests."""
    grad_input = torch.ops.aten.threshold_backward(grad, output, 0)
    return grad_input, grad_input.sum(0, dtype=torch.float32)


def _is_native(inputs: Tensor, *parameters: Tensor) -> bool:
    return (
        inputs.dtype in _NATIVE_DTYPES
        and is_native_on_cpu(inputs, *parameters)
        and all(one.dtype == torch.float32 for one in parameters)
    )


class _NativeLinearReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        keeps = any(ctx.needs_input_grad)
        output, kept = torch.ops.dlrm.linear_relu.default(inputs, weight, bias, keeps)
        ctx.save_for_backward(output, kept)
        ctx.weight = weight  # only its shape is needed: `kept` has a copy of its values
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        output, kept = ctx.saved_tensors
        grads = torch.ops.dlrm.linear_relu_backward.default(
            grad, output, kept, ctx.weight, ctx.needs_input_grad[0]
        )
        wanted = zip(grads, ctx.needs_input_grad, strict=True)
        return tuple(one if is_wanted else None for one, is_wanted in wanted)


class _LinearReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        ctx.dtypes = weight.dtype, bias.dtype
        weight, bias = weight.to(inputs.dtype), bias.to(inputs.dtype)
        if inputs.is_cuda and weight.numel():
            output = torch._addmm_activation(bias, inputs, weight.T)
        else:  # oneDNN's own ReLU turns NaN into 0, and would hide that training diverged
            output = matrix_product(inputs, weight, bias).relu_()
        needs_inputs, needs_weight, _ = ctx.needs_input_grad
        kept = inputs if needs_weight else None, weight if needs_inputs else None
        ctx.save_for_backward(*kept, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        inputs, weight, output = ctx.saved_tensors
        of_weight, of_bias = ctx.dtypes
        grad, sums = relu_bias_backward(grad, output)
        needs_inputs, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            matrix_product(grad, weight.T) if needs_inputs else None,
            _weight_gradient(grad, inputs).to(of_weight) if needs_weight else None,
            sums.to(of_bias) if needs_bias else None,
        )


def _weight_gradient(grad: Tensor, inputs: Tensor) -> Tensor:
    """Returns grad^T x inputs. On the CPU, with few inputs, it computes the transpose, which is 2.3
    times as fast (float32, batch 2048 x 13 x 512, Zen 4, 2 threads)."""
    if 8 * inputs.shape[1] <= grad.shape[1] and grad.device.type == "cpu":
        return torch.mm(inputs.T, grad).T.contiguous()  # fused optimizers ignore strides
    return torch.mm(grad.T, inputs)


def _check_pair(grad: Tensor, output: Tensor) -> None:
    """Checks the same as csrc/cuda/relu_bias_backward.cu, for the fallback."""
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

    @torch.library.register_fake("dlrm::relu_bias_backward")
    def _(grad, output):
        _check_pair(grad, output)
        return torch.empty_like(grad), grad.new_empty(grad.shape[1], dtype=torch.float32)

    @register_flop_formula(torch.ops.dlrm.linear_relu)
    def _(inputs, weight, bias, keeps, **_options):
        return 2 * inputs[0] * weight.numel()

    @register_flop_formula(torch.ops.dlrm.linear_relu_backward)
    def _(grad, output, kept, weight, needs_inputs, **_options):
        return 2 * grad[0] * weight.numel() * (1 + needs_inputs)
