"""Joint embedding: one look-up for all tables, which are stored one after another in one weight.

The schemas are in csrc/schemas.h, the kernels in csrc/{cpu,cuda}/joint_embedding*.
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

POOLINGS = ("sum", "mean")
_ID_TYPES = (torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATING = (torch.float32, torch.bfloat16, torch.float16)


def joint_embedding(
    weight: Tensor,
    ids: Tensor,
    table_offsets: Tensor,
    lengths: Tensor | None = None,
    *,
    sample_weights: Tensor | None = None,
    pooling: str = "sum",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns row `table_offsets[t] + ids[b, t]` of `weight` as output `[b, t]`, cast to `dtype`.

    With `lengths`, tables have any number of ids for a sample, and output `[b, t]` is the sum or
    mean of their rows. The ids are then stored bag after bag, sample by sample: those of table 0 of
    sample 0, of table 1 of sample 0, ..., of the last table of sample 0, of table 0 of sample 1,
    ... A bag is summed in order, in float32, and rounded once; a bag without ids gives zeros.

    The gradient of `weight` is a sparse COO tensor, uncoalesced: its indices are the rows looked
    up, `[1, look-ups]` int64. Its values are the output's gradient without a copy, or with
    `lengths` the gradient of each row's bag, times the id's sample weight and, for a mean, divided
    by the bag's length. Autograd casts the values to the weight's dtype, as `torch.optim` requires.
    With `weight.grad_dtype = None` they keep the output's dtype, which saves a pass over them; this
    is the form that `row_update_` takes.

    Args:
        weight: all tables' rows, `[rows, dim]`, float32, bfloat16 or float16.
        ids: `[batch, tables]` or, with `lengths`, `[total]`, int8 to int64, each within its own
            table.
        table_offsets: the first row of each table, and the end, `[tables + 1]` int64; or first rows
            and ends, `[2, tables]`, where tables may have the same rows.
        lengths: ids of each bag, `[batch, tables]`, int8 to int64.
        sample_weights: with `lengths`, a factor for the row of each id, `[total]` float32; 1 by
            default.
        pooling: "sum", or "mean": the sum divided by the number of ids, not by the sum of weights.
        dtype: the output's dtype, the weight's by default.

    Raises:
        ValueError: an unknown pooling.
        RuntimeError: an id is outside its table, a length is negative or too large (the message
            names table, batch row and value), the lengths do not add up to the number of ids (on a
            GPU `raise_device_errors` raises these), or shapes or dtypes do not fit together.
    """
    if lengths is None and is_native_on_cpu(weight, ids, table_offsets):
        if weight.requires_grad and torch.is_grad_enabled():  # without dispatch: 10 us less
            return _JointEmbedding.apply(weight, ids, table_offsets, dtype)
        return below_autograd(_OP.default, weight, ids, table_offsets, dtype=dtype)
    if pooling not in POOLINGS:
        raise ValueError(f"joint_embedding: expected pooling {POOLINGS}, got {pooling!r}")
    tensors = {"weight": weight, "ids": ids, "table_offsets": table_offsets, "lengths": lengths}
    if not has_native("joint_embedding", **tensors, sample_weights=sample_weights):
        _check(weight, ids, table_offsets, lengths, sample_weights, dtype)
        check_ids(ids, table_offsets, lengths)
        return joint_embedding_reference(
            weight,
            ids,
            table_offsets,
            lengths,
            sample_weights=sample_weights,
            pooling=pooling,
            dtype=dtype,
        )
    if lengths is None:
        return torch.ops.dlrm.joint_embedding(weight, ids, table_offsets, dtype=dtype)
    return torch.ops.dlrm.joint_embedding_bag(
        weight, ids, lengths, table_offsets, sample_weights, pooling == "mean", dtype
    )


def joint_embedding_gradient(
    shape: torch.Size, ids: Tensor, table_offsets: Tensor, grad: Tensor
) -> Tensor:
    """Returns the gradient of a weight of the given shape, as `joint_embedding` describes it.

    Args:
        shape: `[rows, dim]`.
        ids, table_offsets: those of a look-up without lengths; the ids are not checked again.
        grad: gradient of the output, `[batch, tables, dim]`.
    """
    rows = (ids + table_ranges(table_offsets)[0]).reshape(1, -1)
    values = grad.contiguous().view(-1, shape[1])  # torch cannot add strided ones in half precision
    return _sparse(rows, values, shape)


def joint_embedding_reference(
    weight: Tensor,
    ids: Tensor,
    table_offsets: Tensor,
    lengths: Tensor | None = None,
    *,
    sample_weights: Tensor | None = None,
    pooling: str = "sum",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Does the same in plain PyTorch: the fallback and the tests' oracle."""
    begins = table_ranges(table_offsets)[0]
    if lengths is None:
        return F.embedding(ids + begins, weight, sparse=True).to(dtype or weight.dtype)
    bags = bags_of_ids(ids, lengths)
    rows = ids + begins.repeat(lengths.shape[0])[bags]
    wide = torch.promote_types(weight.dtype, torch.float32)
    vectors = F.embedding(rows, weight, sparse=True).to(wide)
    if sample_weights is not None:
        vectors = vectors * sample_weights.unsqueeze(1)
    pooled = vectors.new_zeros(lengths.numel(), weight.shape[1]).index_add(0, bags, vectors)
    if pooling == "mean":
        pooled = pooled / lengths.reshape(-1, 1).clamp(min=1)
    return pooled.view(*lengths.shape, weight.shape[1]).to(dtype or weight.dtype)


def table_ranges(table_offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the first row of each table and the row after its last, each `[tables]`."""
    if table_offsets.dim() == 2:
        return table_offsets[0], table_offsets[1]
    return table_offsets[:-1], table_offsets[1:]


def bags_of_ids(ids: Tensor, lengths: Tensor) -> Tensor:
    """Returns the bag of each id, `[total]` int64: bag `b * tables + t` is table t of sample b.

    Raises:
        RuntimeError: a length is negative or too large (the message names table, batch row and
            value), or the lengths do not add up to the number of ids. On a GPU the device asserts
            instead, so that the host need not wait.
    """
    total, lengths = ids.shape[0], lengths.long()  # int8 cannot be compared with 300
    if not torch.compiler.is_compiling():
        bad = (lengths < 0) | (lengths > total)
        if lengths.device.type != "cpu":
            fits = ~bad.any() & (lengths.sum() == total)
            torch._assert_async(fits, "joint_embedding: lengths do not add up to the number of ids")
        elif bad.any():
            row, table = bad.nonzero()[0].tolist()
            raise RuntimeError(
                f"joint_embedding: length {lengths[row, table]} of table {table} in batch row "
                f"{row}: expected 0 <= length <= {total}, the number of ids"
            )
        elif (found := int(lengths.sum())) != total:
            raise RuntimeError(
                f"joint_embedding: lengths add up to {found}: expected the number of ids, {total}"
            )
    bags = torch.arange(lengths.numel(), device=lengths.device)
    return bags.repeat_interleave(lengths.flatten(), output_size=total)


def check_ids(ids: Tensor, table_offsets: Tensor, lengths: Tensor | None = None) -> None:
    """Raises the errors of `joint_embedding` about ids and lengths; a GPU asserts instead."""
    if torch.compiler.is_compiling():
        return
    begins, ends = table_ranges(table_offsets)
    tables, sizes = len(begins), ends - begins
    bags = None if lengths is None else bags_of_ids(ids, lengths)
    limits = sizes.expand(ids.shape) if bags is None else sizes[bags % max(tables, 1)]
    bad = (ids < 0) | (ids >= limits)
    if ids.device.type != "cpu":
        torch._assert_async(~bad.any(), "joint_embedding: an id is outside its table")
    elif bad.any():
        position = int(bad.flatten().nonzero()[0])
        row, table = divmod(position if bags is None else int(bags[position]), tables)
        raise RuntimeError(
            f"joint_embedding: id {ids.flatten()[position]} of table {table} in batch row {row}: "
            f"expected 0 <= id < {sizes[table]}"
        )


def _check(
    weight: Tensor,
    ids: Tensor,
    table_offsets: Tensor,
    lengths: Tensor | None,
    sample_weights: Tensor | None,
    dtype: torch.dtype | None,
) -> None:
    """Checks the same shapes and dtypes as csrc/joint_embedding.h, for fallback and fakes."""
    are_rows = weight.dim() == 2 and weight.shape[1] > 0 and weight.dtype in _FLOATING
    _expect(are_rows, "weight [rows, dim > 0] of Float, BFloat16 or Half", weight)
    if lengths is not None:
        are_lengths = lengths.dim() == 2 and lengths.dtype in _ID_TYPES
        _expect(are_lengths, "lengths [batch, tables] of Char, Short, Int or Long", lengths)
    of, shape = ("[batch, tables]", ids.shape) if lengths is None else ("[total]", lengths.shape)
    are_ids = ids.dim() == (2 if lengths is None else 1) and ids.dtype in _ID_TYPES
    _expect(are_ids, f"ids {of} of Char, Short, Int or Long", ids)
    tables = shape[1]
    fit = table_offsets.shape in ((tables + 1,), (2, tables)) and table_offsets.dtype == torch.int64
    _expect(fit, f"table_offsets [{tables + 1}] Long for {tables} tables", table_offsets)
    if sample_weights is not None:
        fit = sample_weights.shape == ids.shape and sample_weights.dtype == torch.float32
        _expect(fit, f"sample_weights {list(ids.shape)} Float", sample_weights)
    if dtype is not None and dtype not in _FLOATING:
        raise RuntimeError(f"joint_embedding: expected dtype Float, BFloat16 or Half, got {dtype}")


def _expect(condition: bool, expected: str, got: Tensor) -> None:
    if not condition:
        shown = f"{list(got.shape)} {got.dtype}"
        raise RuntimeError(f"joint_embedding: expected {expected}, got {shown}")


def _sparse(rows: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    return torch.sparse_coo_tensor(rows, values, shape, check_invariants=False, is_coalesced=False)


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


def _setup_bags(ctx, inputs, output):
    weight, ids, lengths, table_offsets, sample_weights, ctx.mean, _ = inputs
    ctx.weight_shape = weight.shape
    kept = weight if ctx.needs_input_grad[4] else None  # only that gradient reads the rows
    ctx.save_for_backward(kept, ids, lengths, table_offsets, sample_weights)


def _bags_backward(ctx, grad):
    weight, ids, lengths, table_offsets, sample_weights = ctx.saved_tensors
    rows, values = torch.ops.dlrm.joint_embedding_bag_backward(
        grad, ids, lengths, table_offsets, sample_weights, ctx.mean
    )
    sample_weights_grad = None
    if ctx.needs_input_grad[4]:
        sample_weights_grad = torch.ops.dlrm.joint_embedding_bag_sample_weights_backward(
            grad, weight, rows, lengths, ctx.mean
        )
    sparse = _sparse(rows.unsqueeze(0), values, ctx.weight_shape)
    return sparse, None, None, None, sample_weights_grad, None, None


if native_available():
    _OP = torch.ops.dlrm.joint_embedding

    @torch.library.register_fake("dlrm::joint_embedding")
    def _(weight, ids, table_offsets, *, dtype=None):
        _check(weight, ids, table_offsets, None, None, dtype)
        return weight.new_empty((*ids.shape, weight.shape[1]), dtype=dtype or weight.dtype)

    @torch.library.register_fake("dlrm::joint_embedding_bag")
    def _(weight, ids, lengths, table_offsets, sample_weights, mean, dtype):
        _check(weight, ids, table_offsets, lengths, sample_weights, dtype)
        return weight.new_empty((*lengths.shape, weight.shape[1]), dtype=dtype or weight.dtype)

    @torch.library.register_fake("dlrm::joint_embedding_bag_backward")
    def _(grad, ids, lengths, table_offsets, sample_weights, mean):
        rows = ids.new_empty(ids.shape, dtype=torch.int64)
        return rows, grad.new_empty(ids.shape[0], grad.shape[2])

    @torch.library.register_fake("dlrm::joint_embedding_bag_sample_weights_backward")
    def _(grad, weight, rows, lengths, mean):
        return grad.new_empty(rows.shape, dtype=torch.float32)

    def _differentiable(weight, ids, table_offsets, *, dtype=None):
        return _JointEmbedding.apply(weight, ids, table_offsets, dtype)

    register_gradient("joint_embedding", _differentiable)
    torch.library.register_autograd(
        "dlrm::joint_embedding_bag", _bags_backward, setup_context=_setup_bags
    )
