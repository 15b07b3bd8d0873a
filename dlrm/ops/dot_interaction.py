"""Dot interaction: every pair of a sample's feature vectors, multiplied.

The schema is in csrc/schemas.h, the kernels in csrc/{cpu,cuda}/dot_interaction*.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dlrm.ops.library import (
    below_autograd,
    follow_torch_settings,
    has_native,
    native_available,
    register_gradient,
)


def interaction_width(tables: int, dim: int) -> int:
    """Returns the columns of an output row: `dim` and all dots, padded to a multiple of 8."""
    return (dim + (tables + 1) * tables // 2 + 7) // 8 * 8


def dot_interaction(dense: Tensor, embeddings: Tensor) -> Tensor:
    """Returns `[dense | dots | zeros]`, of shape `[batch, interaction_width(tables, dim)]`.

    The dots are those of vectors i and j for i > j, row by row, where vector 0 is `dense` and
    vector k the embedding of table k - 1 (Naumov et al., 2019, section 2). They are summed in
    float32 and rounded once to the inputs' dtype. On a GPU float32 inputs are first rounded to TF32
    if torch's matrix products may use it (`torch.backends.cuda.matmul`).

    Args:
        dense: bottom MLP output, `[batch, dim]`, float32, bfloat16 or float16.
        embeddings: one row of each table, `[batch, tables, dim]`, of the same dtype.

    Raises:
        RuntimeError: shapes or dtypes do not fit together; the message names both.
    """
    if has_native("dot_interaction", dense=dense, embeddings=embeddings):
        follow_torch_settings()
        return torch.ops.dlrm.dot_interaction(dense, embeddings)
    _check(dense, embeddings)
    return dot_interaction_reference(dense, embeddings)


def dot_interaction_reference(dense: Tensor, embeddings: Tensor) -> Tensor:
    """Does the same in plain PyTorch: the fallback and the tests' oracle."""
    vectors = torch.cat([dense.unsqueeze(1), embeddings], dim=1)
    num_vectors = vectors.shape[1]
    i, j = torch.tril_indices(num_vectors, num_vectors, offset=-1, device=dense.device)
    output = torch.cat([dense, (vectors @ vectors.mT)[:, i, j]], dim=1)
    width = interaction_width(num_vectors - 1, dense.shape[1])
    return F.pad(output, (0, width - output.shape[1]))


def _check(dense: Tensor, embeddings: Tensor) -> None:
    """Checks the same as csrc/dot_interaction.h, for the fallback."""
    shapes = f"got dense {list(dense.shape)} and embeddings {list(embeddings.shape)}"
    if (
        dense.dim() != 2
        or embeddings.dim() != 3
        or dense.shape != (embeddings.shape[0], embeddings.shape[2])
    ):
        raise RuntimeError(
            "dot_interaction: expected dense [batch, dim] and embeddings [batch, tables, dim], "
            + shapes
        )
    if dense.shape[1] == 0:
        raise RuntimeError(f"dot_interaction: expected dim > 0, {shapes}")
    if dense.dtype != embeddings.dtype or dense.dtype not in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
    ):
        raise RuntimeError(
            "dot_interaction: expected dense and embeddings of one dtype (Float, BFloat16 or Half),"
            f" got dense {dense.dtype} and embeddings {embeddings.dtype}"
        )


def dot_flops(batch: int, num_vectors: int, dim: int) -> int:
    """Returns the operations of the products of all vectors with all, as torch counts them."""
    return 2 * batch * num_vectors**2 * dim


class _DotInteraction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dense, embeddings):  # type: ignore[override]
        ctx.save_for_backward(dense, embeddings)
        return below_autograd(torch.ops.dlrm.dot_interaction.default, dense, embeddings)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        op = torch.ops.dlrm.dot_interaction_backward.default
        if torch.is_grad_enabled():  # for second derivatives, which the operator refuses
            return op(grad, *ctx.saved_tensors)
        return below_autograd(op, grad, *ctx.saved_tensors)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, grad, dense, embeddings):  # type: ignore[override]
        op = torch.ops.dlrm.dot_interaction_backward.default
        return below_autograd(op, grad, dense, embeddings)

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[override]
        raise RuntimeError(
            "dot_interaction has no second derivatives; dot_interaction_reference has them"
        )


if native_available():

    @torch.library.register_fake("dlrm::dot_interaction")
    def _(dense, embeddings):
        _check(dense, embeddings)
        width = interaction_width(embeddings.shape[1], dense.shape[1])
        return dense.new_empty(dense.shape[0], width)

    @torch.library.register_fake("dlrm::dot_interaction_backward")
    def _(grad, dense, embeddings):
        return dense.new_empty(dense.shape), embeddings.new_empty(embeddings.shape)

    @register_flop_formula(torch.ops.dlrm.dot_interaction)
    def _(dense, embeddings, **_):
        batch, tables, dim = embeddings
        return dot_flops(batch, tables + 1, dim)

    @register_flop_formula(torch.ops.dlrm.dot_interaction_backward)
    def _(grad, dense, embeddings, **_):
        batch, tables, dim = embeddings
        return dot_flops(batch, tables + 1, dim)  # a symmetric matrix times the vectors

    register_gradient("dot_interaction", _DotInteraction.apply)
    register_gradient("dot_interaction_backward", _Backward.apply)
