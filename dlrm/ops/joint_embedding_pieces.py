"""Joint embedding of pieces: one look-up of ranges of rows and columns, in weights of any width.

The schemas are in csrc/schemas.h, the kernels in csrc/cpu/joint_embedding_pieces*. There is no
kernel for GPUs, where pieces are looked up one width at a time.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dlrm.ops.library import below_autograd, has_native, native_available, register_gradient


def joint_embedding_pieces(
    weights: Sequence[Tensor], ids: Tensor, pieces: Tensor, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Returns the concatenated vectors of all pieces, `[batch, sum of the pieces' columns]`.

    The vector of a piece is the row that the id selects, or zeros if the piece does not hold that
    row. The gradient of a weight has the form of `joint_embedding`'s, for the rows held here.

    Args:
        weights: `[rows, dim]`, of one dtype, float32, bfloat16 or float16, on the CPU.
        ids: `[batch, columns]`, int8 to int64, each within its own table.
        pieces: `[pieces, 6]` int64, weight by weight: number of the weight; column of the ids;
            the rows `[first, end)` of the table that are held here; rows of the table; row of the
            weight that has the first of them.
        dtype: the output's dtype, the weights' by default.

    Raises:
        RuntimeError: the compiled kernel found an id outside its table (the message names column,
            batch row and value), a piece outside its weight, or a wrong shape or dtype.
    """
    if pieces_are_native(weights):
        return torch.ops.dlrm.joint_embedding_pieces(list(weights), ids, pieces, dtype=dtype)
    return joint_embedding_pieces_reference(weights, ids, pieces, dtype=dtype)


def pieces_are_native(weights: Sequence[Tensor]) -> bool:
    """Returns whether compiled kernels look up the pieces of these weights together."""
    return weights[0].device.type == "cpu" and has_native("joint_embedding_pieces", w=weights[0])


def joint_embedding_pieces_reference(
    weights: Sequence[Tensor], ids: Tensor, pieces: Tensor, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Does the same in plain PyTorch, without checking ids."""
    vectors = []
    for number, column, first, end, _, offset in pieces.tolist():
        own, weight = ids[:, column].long(), weights[number]
        here = (own >= first) & (own < end)
        rows = torch.where(here, own - first + offset, 0)
        looked_up = F.embedding(rows, weight) if len(weight) else weight.new_zeros(len(ids), 1)
        vectors.append(torch.where(here.unsqueeze(1), looked_up, 0))
    return torch.cat(vectors, 1).to(dtype or weights[0].dtype)


class _JointEmbeddingPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, pieces, dtype, *weights):  # type: ignore[override]
        ctx.save_for_backward(ids, pieces)
        ctx.shapes = [weight.shape for weight in weights]
        op = torch.ops.dlrm.joint_embedding_pieces.default
        return below_autograd(op, list(weights), ids, pieces, dtype=dtype)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        dims = [shape[1] for shape in ctx.shapes]
        found = torch.ops.dlrm.joint_embedding_pieces_backward(grad, *ctx.saved_tensors, dims)
        sparse = [
            torch.sparse_coo_tensor(
                rows[None], values, shape, check_invariants=False, is_coalesced=False
            )
            for rows, values, shape in zip(found[::2], found[1::2], ctx.shapes, strict=True)
        ]
        return None, None, None, *sparse


if native_available():

    @torch.library.register_fake("dlrm::joint_embedding_pieces")
    def _(weights, ids, pieces, *, dtype=None):
        width = sum(weights[number].shape[1] for number in pieces[:, 0].tolist())
        return weights[0].new_empty(ids.shape[0], width, dtype=dtype or weights[0].dtype)

    def _differentiable(weights, ids, pieces, *, dtype=None):
        return _JointEmbeddingPieces.apply(ids, pieces, dtype, *weights)

    register_gradient("joint_embedding_pieces", _differentiable)
