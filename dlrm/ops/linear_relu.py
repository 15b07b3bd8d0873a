"""A linear layer with a ReLU in one autograd node, and the gradient of the ReLU and the bias.

The products are torch's: oneDNN's on a CPU, and cuBLASLt's on a GPU, which end with the ReLU. The
gradient's mask and its sums are one pass of a kernel: csrc/{cpu,cuda}/relu_bias_backward*.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dlrm.ops.layers import matrix_product
from dlrm.ops.library import has_native, native_available

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def linear_relu(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns relu(x W^T + b), computed in the dtype of x: `[batch, outputs]`.

    In compiled and traced models, under torch.func and for other dtypes it calls torch's functions.
    Otherwise it has no second derivatives.

    Args:
        inputs: x, `[batch, inputs]`.
        weight: W, `[outputs, inputs]`, of any floating dtype, which its gradient has, too.
        bias: b, `[outputs]`, of any floating dtype.

    Raises:
        RuntimeError: shapes do not fit together.
    """
    in_graph = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if in_graph or torch._C._are_functorch_transforms_active() or inputs.dtype not in _DTYPES:
        return linear_relu_reference(inputs, weight, bias)
    outputs, width = weight.shape
    if inputs.dim() != 2 or inputs.shape[1] != width or bias.shape != (outputs,):
        return linear_relu_reference(inputs, weight, bias)  # whose error names the shapes
    return _LinearReLU.apply(inputs, weight, bias)


def linear_relu_reference(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Does the same in plain PyTorch: the fallback and the oracle of the tests."""
    return F.relu(F.linear(inputs, weight.to(inputs.dtype), bias.to(inputs.dtype)))


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

    @torch.library.register_fake("dlrm::relu_bias_backward")
    def _(grad, output):
        _check_pair(grad, output)
        return torch.empty_like(grad), grad.new_empty(grad.shape[1], dtype=torch.float32)
