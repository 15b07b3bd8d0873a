"""Layers that torch runs slower on a CPU: the linear layer, and dropout.

In float32 on the CPU torch multiplies with MKL. With oneDNN's products, which torch exposes as an
operator of inductor, BERT-base's layers take a tenth less time forward and backward (8 x 128
tokens, Zen 4, 1 and 2 threads). MKL computes the gradients of weights, for which it is faster.
Dropout draws 16 random bits per element; torch draws 64.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_STEPS = 1 << 16  # of dropout's probability


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns x W^T + b, as torch.nn.functional.linear: `[..., outputs]`.

    It calls that function in graphs, under autocast, and where oneDNN is no faster.

    Args:
        inputs: x, `[..., inputs]`.
        weight: W, `[outputs, inputs]`.
        bias: b, `[outputs]`.

    Raises:
        RuntimeError: shapes or dtypes do not fit together.
    """
    if _is_torchs(inputs) or not weight.numel() or inputs.shape[-1:] != weight.shape[1:]:
        return F.linear(inputs, weight, bias)
    return _Linear.apply(inputs, weight, bias)


def matrix_product(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns the same without a gradient; bfloat16 uses oneDNN, too."""
    onednn = inputs.dtype in _ONEDNN_DTYPES and inputs.device.type == "cpu"
    if onednn and weight.numel():  # oneDNN refuses a layer without inputs
        if bias is not None and not bias.is_contiguous():
            bias = bias.contiguous()  # oneDNN ignores strides
        return torch.ops.mkldnn._linear_pointwise.default(inputs, weight, bias, "none", [], "")
    return F.linear(inputs, weight, bias)


def fused_linear_dtypes() -> tuple[torch.dtype, ...]:
    """Returns the dtypes for which torch has oneDNN's fused linear layer on this processor."""
    if not (
        torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    ):
        return ()
    half = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.float32, torch.bfloat16) if half else (torch.float32,)


def dropout(values: Tensor, share: float, random: torch.Generator | None = None) -> Tensor:
    """Sets elements to 0, each with probability `share`, and scales the others up accordingly.

    On the CPU, except under torch.compile, the probability is rounded to a multiple of 2**-16; this
    is 2.5 times as fast (1024 x 768, Zen 4) as torch.nn.functional.dropout, which runs elsewhere.

    Args:
        values: of any shape and floating dtype.
        share: in [0, 1).
        random: generator of the device to draw from; None is torch's default generator.
    """
    dropped = round(share * _STEPS)
    compiled = torch.compiler.is_compiling()
    if dropped in (0, _STEPS) or values.device.type != "cpu" or compiled:
        if random is None:
            return F.dropout(values, share)
        kept = torch.empty_like(values).bernoulli_(1 - share, generator=random)
        return values * kept.div_(1 - share)
    count = values.numel()
    bits = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None, generator=random)
    kept = _parts(bits)[:count] >= dropped - _STEPS // 2
    noise = kept.to(values.dtype).mul_(_STEPS / (_STEPS - dropped))
    return values * noise.view(values.shape)


_ONEDNN_DTYPES = fused_linear_dtypes()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # type: ignore[override]
        needs_inputs, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(inputs if needs_weight else None, weight if needs_inputs else None)
        return matrix_product(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        inputs, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        needs_inputs, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            matrix_product(grad, weight.T) if needs_inputs else None,
            torch.mm(rows.T, inputs.flatten(0, -2)) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


def _is_torchs(inputs: Tensor) -> bool:
    """Returns whether to call torch's own function, which graphs and autocast recognize."""
    if inputs.device.type != "cpu" or inputs.dtype != torch.float32 or not _ONEDNN_DTYPES:
        return True
    in_graph = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return in_graph or torch.is_autocast_enabled("cpu")


def _parts(bits: Tensor) -> Tensor:
    """Returns the four int16 of each int64; a trace cannot record that view."""
    if not torch.jit.is_tracing():
        return bits.view(torch.int16)
    parts = bits[:, None] >> torch.tensor([0, 16, 32, 48]) & _STEPS - 1
    return (parts - _STEPS * (parts >= _STEPS // 2)).flatten()
