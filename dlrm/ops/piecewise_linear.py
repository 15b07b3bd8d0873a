"""Piecewise-linear vectors of numbers: a linear layer over the encoding of each field's bins.

The schemas are in csrc/schemas.h, the kernels in csrc/cpu/piecewise_linear*. There is no kernel for
GPUs, where plain torch runs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dlrm.ops.library import (
    below_autograd,
    has_native,
    is_native_on_cpu,
    native_available,
    register_gradient,
)


def piecewise_linear(numerical: Tensor, edges: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns `[batch, fields, dim]`: the bias, plus the weights of all bins below, plus a share.

    The share is the part of the value's own bin that is below the value, times the bin's weight.
    Values beyond the edges are clamped, and bins without width add nothing.

    Args:
        numerical: values, `[batch, fields]` float32.
        edges: ascending edges of each field's bins, `[fields, bins + 1]` float32.
        weight: `[fields, bins, dim]` float32.
        bias: `[fields, dim]` float32.

    Raises:
        RuntimeError: shapes or dtypes do not fit together.
    """
    tensors = {"numerical": numerical, "edges": edges, "weight": weight, "bias": bias}
    native = is_native_on_cpu(*tensors.values())  # the same in less time
    native = native or (has_native("piecewise_linear", **tensors) and numerical.is_cpu)
    if native and not numerical.requires_grad:
        return torch.ops.dlrm.piecewise_linear(numerical, edges, weight, bias)
    return piecewise_linear_reference(numerical, edges, weight, bias)


def piecewise_linear_reference(
    numerical: Tensor, edges: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    """Does the same in plain PyTorch, also with a gradient for the values."""
    vectors, places = piecewise_tables(edges, weight, bias)
    bins = edges_up_to(numerical, edges).sub(1).clamp(0, weight.shape[1] - 1)
    first = torch.arange(len(edges), device=edges.device) * weight.shape[1]
    edge, inverse = F.embedding(bins + first, places).unbind(-1)
    shares = ((numerical - edge) * inverse).clamp(0, 1)
    starts, steps = F.embedding(bins + first, vectors).chunk(2, -1)
    return torch.addcmul(starts, steps, shares.unsqueeze(-1))


def piecewise_tables(edges: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Returns, `[fields * bins, ...]`, each bin's vector at its lower edge, step, edge, 1/width."""
    widths = edges.diff()
    inverse = torch.where(widths > 0, 1 / widths, 0)
    steps = weight * (widths > 0).unsqueeze(-1)
    starts = bias.unsqueeze(1) + steps.cumsum(1) - steps
    vectors = torch.cat([starts, steps], -1).flatten(0, 1)
    return vectors, torch.stack([edges[:, :-1], inverse], -1).flatten(0, 1)


def edges_up_to(numerical: Tensor, edges: Tensor) -> Tensor:
    """Counts, for each value, the edges of its field at or below it, `[batch, fields]` int64."""
    return torch.searchsorted(edges, numerical.T.contiguous(), right=True).T


class _PiecewiseLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, numerical, edges, weight, bias):  # type: ignore[override]
        ctx.save_for_backward(numerical, edges)
        op = torch.ops.dlrm.piecewise_linear.default
        return below_autograd(op, numerical, edges, weight, bias)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        numerical, edges = ctx.saved_tensors
        return None, None, *torch.ops.dlrm.piecewise_linear_backward(grad, numerical, edges)


if native_available():

    @torch.library.register_fake("dlrm::piecewise_linear")
    def _(numerical, edges, weight, bias):
        return weight.new_empty(*numerical.shape, weight.shape[2])

    @torch.library.register_fake("dlrm::piecewise_linear_backward")
    def _(grad, numerical, edges):
        fields, dim = grad.shape[1:]
        return grad.new_empty(fields, edges.shape[1] - 1, dim), grad.new_empty(fields, dim)

    register_gradient("piecewise_linear", _PiecewiseLinear.apply)
