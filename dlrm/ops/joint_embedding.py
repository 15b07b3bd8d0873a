"""Joint embedding: one look-up for all tables, which are stored one after another in one weight.

The schema is in csrc/schemas.h, the kernels in csrc/{cpu,cuda}/joint_embedding*.
"""

from collections.abc import Sequence

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


def joint_embedding(
    weight: Tensor, ids: Tensor, table_offsets: Tensor, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Returns row `table_offsets[t] + ids[b, t]` of `weight` as output `[b, t]`, cast to `dtype`.

    The gradient of `weight` is a sparse COO tensor, uncoalesced and without a copy: its indices are
    the rows looked up, `[1, batch * tables]` int64, its values the output's gradient. Autograd
    casts the values to the weight's dtype, as `torch.optim` requires. With
    `weight.grad_dtype = None` they keep the output's dtype, which saves a pass over them; this is
    the form that `row_sgd_` and the other row updates take.

    Args:
        weight: all tables' rows, `[rows, dim]`, float32, bfloat16 or float16.
        ids: `[batch, tables]`, int8 to int64, each within its own table.
        table_offsets: the first row of each table, and the end, `[tables + 1]` int64; or first rows
            and ends, `[2, tables]`, where tables may have the same rows.
        dtype: the output's dtype, the weight's by default.

    Raises:
        RuntimeError: an id is outside its table (the message names table, batch row and value; on a
            GPU `raise_device_errors` raises it), or shapes or dtypes do not fit together.
    """
    if is_native_on_cpu(weight, ids, table_offsets):  # the same without dispatch: 10 us less
        if weight.requires_grad and torch.is_grad_enabled():
            return _JointEmbedding.apply(weight, ids, table_offsets, dtype)
        return below_autograd(_OP.default, weight, ids, table_offsets, dtype=dtype)
    if has_native("joint_embedding", weight=weight, ids=ids, table_offsets=table_offsets):
        return torch.ops.dlrm.joint_embedding(weight, ids, table_offsets, dtype=dtype)
    _check(weight, ids, table_offsets, dtype)
    _check_ids(ids, table_offsets)
    return joint_embedding_reference(weight, ids, table_offsets, dtype=dtype)


def joint_embedding_gradient(
    shape: torch.Size, ids: Tensor, table_offsets: Tensor, grad: Tensor
) -> Tensor:
    """Returns the gradient of a weight of the given shape, as `joint_embedding` describes it.

    Args:
        shape: `[rows, dim]`.
        ids, table_offsets: those of the look-up; the ids are not checked again.
        grad: gradient of the output, `[batch, tables, dim]`.
    """
    if native_available() and ids.is_cpu:
        rows = torch.ops.dlrm.joint_embedding_rows.default(ids, table_offsets)
    else:
        rows = (ids + table_ranges(table_offsets)[0]).reshape(1, -1)
    values = grad.contiguous().view(-1, shape[1])  # torch cannot add strided ones in half precision
    return torch.sparse_coo_tensor(rows, values, shape, check_invariants=False, is_coalesced=False)


def joint_embedding_reference(
    weight: Tensor, ids: Tensor, table_offsets: Tensor, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Does the same in plain PyTorch: the fallback and the tests' oracle."""
    rows = ids + table_ranges(table_offsets)[0]
    return F.embedding(rows, weight, sparse=True).to(dtype or weight.dtype)


def table_ranges(table_offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the first row of each table and the row after its last, each `[tables]`."""
    if table_offsets.dim() == 2:
        return table_offsets[0], table_offsets[1]
    return table_offsets[:-1], table_offsets[1:]


ID_TYPES = (torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATING = (torch.float32, torch.bfloat16, torch.float16)


def _check(weight: Tensor, ids: Tensor, table_offsets: Tensor, dtype: torch.dtype | None) -> None:
    """Checks the same as csrc/joint_embedding.h, for the fallback."""
    name, are_ids = "joint_embedding", ids.dim() == 2 and ids.dtype in ID_TYPES
    check_rows(name, weight)
    expect(are_ids, name, "ids [batch, tables] of Char, Short, Int or Long", ids)
    check_table_offsets(name, table_offsets, "ids", ids.shape)
    check_dtype(name, dtype)


def expect(condition: bool, name: str, expected: str, got: Tensor) -> None:
    """Raises RuntimeError for a tensor that an operator does not take."""
    if not condition:
        raise RuntimeError(f"{name}: expected {expected}, got {list(got.shape)} {got.dtype}")


def check_rows(name: str, weight: Tensor) -> None:
    """Raises RuntimeError unless a weight may hold rows of tables."""
    are_rows = weight.dim() == 2 and weight.shape[1] > 0 and weight.dtype in _FLOATING
    expect(are_rows, name, "weight [rows, dim > 0] of Float, BFloat16 or Half", weight)


def check_table_offsets(name: str, table_offsets: Tensor, of: str, shape: Sequence[int]) -> None:
    """Raises RuntimeError unless the offsets are of as many tables as `shape` has columns."""
    tables = shape[1]
    fits = (
        table_offsets.shape in ((tables + 1,), (2, tables)) and table_offsets.dtype == torch.int64
    )
    expect(fits, name, f"table_offsets [{tables + 1}] Long for {of} {list(shape)}", table_offsets)


def check_dtype(name: str, dtype: torch.dtype | None) -> None:
    """Raises RuntimeError for a dtype in which an operator cannot return rows."""
    if dtype is not None and dtype not in _FLOATING:
        raise RuntimeError(f"{name}: expected dtype Float, BFloat16 or Half, got {dtype}")


def _check_ids(ids: Tensor, table_offsets: Tensor) -> None:
    """Raises on the first bad id; on a GPU the device asserts, so that the host need not wait."""
    if torch.compiler.is_compiling():
        return
    begins, ends = table_ranges(table_offsets)
    sizes = ends - begins
    bad = (ids < 0) | (ids >= sizes)
    if ids.device.type != "cpu":
        torch._assert_async(~bad.any(), "joint_embedding: an id is outside its table")
    elif bad.any():
        row, table = bad.nonzero()[0].tolist()
        raise RuntimeError(
            f"joint_embedding: id {ids[row, table]} of table {table} in batch row {row}: "
            f"expected 0 <= id < {sizes[table]}"
        )


class _JointEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, ids, table_offsets, dtype):  # type: ignore[override]
        ctx.save_for_backward(ids, table_offsets)
        ctx.weight_shape = weight.shape
        return below_autograd(_OP.default, weight, ids, table_offsets, dtype=dtype)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        ids, table_offsets = ctx.saved_tensors
        return joint_embedding_gradient(ctx.weight_shape, ids, table_offsets, grad), *[None] * 3


if native_available():
    _OP = torch.ops.dlrm.joint_embedding

    @torch.library.register_fake("dlrm::joint_embedding")
    def _(weight, ids, table_offsets, *, dtype=None):
        _check(weight, ids, table_offsets, dtype)
        return weight.new_empty((*ids.shape, weight.shape[1]), dtype=dtype or weight.dtype)

    @torch.library.register_fake("dlrm::joint_embedding_rows")
    def _(ids, table_offsets):
        return ids.new_empty(1, ids.numel(), dtype=torch.int64)

    def _differentiable(weight, ids, table_offsets, *, dtype=None):
        return _JointEmbedding.apply(weight, ids, table_offsets, dtype)

    register_gradient("joint_embedding", _differentiable)
