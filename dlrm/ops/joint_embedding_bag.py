"""Joint embedding bag: joint embedding for samples with any number of ids per table.

The schemas are in csrc/schemas.h, the kernels in csrc/{cpu,cuda}/joint_embedding_bag*.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dlrm.ops.joint_embedding import (
    ID_TYPES,
    check_dtype,
    check_rows,
    check_table_offsets,
    expect,
    table_ranges,
)
from dlrm.ops.library import has_native, native_available

POOLINGS = ("sum", "mean")


def joint_embedding_bag(
    weight: Tensor,
    ids: Tensor,
    lengths: Tensor,
    table_offsets: Tensor,
    *,
    sample_weights: Tensor | None = None,
    pooling: str = "sum",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns `[batch, tables, dim]`: the sum or mean of the rows of each bag, in `dtype`.

    The ids are stored bag after bag, sample by sample: those of table 0 of sample 0, of table 1 of
    sample 0, ..., of the last table of sample 0, of table 0 of sample 1, ... Id i of table t is row
    `table_offsets[t] + i`. A bag is summed in order, in float32, and rounded once; a bag without
    ids gives zeros.

    The gradient of `weight` is a sparse COO tensor, uncoalesced: its indices are the rows looked
    up, `[1, total]` int64, its values the gradient of each row's bag, times the id's sample weight
    and, for a mean, divided by the bag's length. Autograd casts the values to the weight's dtype
    unless `weight.grad_dtype = None`, as in `joint_embedding`.

    Args:
        weight: all tables' rows, `[rows, dim]`, float32, bfloat16 or float16.
        ids: `[total]`, int8 to int64, each within its own table.
        lengths: ids of each bag, `[batch, tables]`, int8 to int64.
        table_offsets: see `joint_embedding`.
        sample_weights: a factor for the row of each id, `[total]` float32; 1 by default.
        pooling: "sum", or "mean": the sum divided by the number of ids, not by the sum of weights.
        dtype: the output's dtype, the weight's by default.

    Raises:
        ValueError: an unknown pooling.
        RuntimeError: an id is outside its table, a length is negative or too large (the message
            names table, batch row and value), the lengths do not add up to the number of ids (on a
            GPU `raise_device_errors` raises these), or shapes or dtypes do not fit together.
    """
    if pooling not in POOLINGS:
        raise ValueError(f"joint_embedding_bag: expected pooling {POOLINGS}, got {pooling!r}")
    tensors = {"weight": weight, "ids": ids, "lengths": lengths, "table_offsets": table_offsets}
    if has_native("joint_embedding_bag", **tensors, sample_weights=sample_weights):
        return torch.ops.dlrm.joint_embedding_bag(
            weight, ids, lengths, table_offsets, sample_weights, pooling == "mean", dtype
        )
    _check(weight, ids, sample_weights, dtype)
    check_bags("joint_embedding_bag", ids, lengths, table_offsets)
    return joint_embedding_bag_reference(
        weight,
        ids,
        lengths,
        table_offsets,
        sample_weights=sample_weights,
        pooling=pooling,
        dtype=dtype,
    )


def joint_embedding_bag_reference(
    weight: Tensor,
    ids: Tensor,
    lengths: Tensor,
    table_offsets: Tensor,
    *,
    sample_weights: Tensor | None = None,
    pooling: str = "sum",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Does the same in plain PyTorch: the fallback and the tests' oracle."""
    bags = bags_of_ids(ids, lengths)
    rows = ids + table_ranges(table_offsets)[0].repeat(lengths.shape[0])[bags]
    wide = torch.promote_types(weight.dtype, torch.float32)
    vectors = F.embedding(rows, weight, sparse=True).to(wide)
    if sample_weights is not None:
        vectors = vectors * sample_weights.unsqueeze(1)
    pooled = vectors.new_zeros(lengths.numel(), weight.shape[1]).index_add(0, bags, vectors)
    if pooling == "mean":
        pooled = pooled / lengths.reshape(-1, 1).clamp(min=1)
    return pooled.view(*lengths.shape, weight.shape[1]).to(dtype or weight.dtype)


def bags_of_ids(ids: Tensor, lengths: Tensor, name: str = "joint_embedding_bag") -> Tensor:
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
            torch._assert_async(fits, f"{name}: lengths do not add up to the number of ids")
        elif bad.any():
            row, table = bad.nonzero()[0].tolist()
            raise RuntimeError(
                f"{name}: length {lengths[row, table]} of table {table} in batch row {row}: "
                f"expected 0 <= length <= {total}, the number of ids"
            )
        elif (found := int(lengths.sum())) != total:
            raise RuntimeError(
                f"{name}: lengths add up to {found}: expected the number of ids, {total}"
            )
    bags = torch.arange(lengths.numel(), device=lengths.device)
    return bags.repeat_interleave(lengths.flatten(), output_size=total)


def check_bags(name: str, ids: Tensor, lengths: Tensor, table_offsets: Tensor) -> None:
    """Raises the errors of `joint_embedding_bag` about these arguments, for the operator `name`."""
    _check_shapes(name, ids, lengths, table_offsets)
    if torch.compiler.is_compiling():
        return
    bags = bags_of_ids(ids, lengths, name)
    begins, ends = table_ranges(table_offsets)
    sizes = (ends - begins).repeat(lengths.shape[0])[bags]
    bad = (ids < 0) | (ids >= sizes)
    if ids.device.type != "cpu":
        torch._assert_async(~bad.any(), f"{name}: an id is outside its table")
    elif bad.any():
        position = int(bad.nonzero()[0])
        row, table = divmod(int(bags[position]), lengths.shape[1])
        raise RuntimeError(
            f"{name}: id {ids[position]} of table {table} in batch row {row}: "
            f"expected 0 <= id < {sizes[position]}"
        )


def _check(
    weight: Tensor, ids: Tensor, sample_weights: Tensor | None, dtype: torch.dtype | None
) -> None:
    """Checks, with `_check_shapes`, the same as csrc/joint_embedding_bag.h, for the fallback."""
    name = "joint_embedding_bag"
    check_rows(name, weight)
    if sample_weights is not None:
        fits = sample_weights.shape == ids.shape and sample_weights.dtype == torch.float32
        expect(fits, name, f"sample_weights {list(ids.shape)} Float", sample_weights)
    check_dtype(name, dtype)


def _check_shapes(name: str, ids: Tensor, lengths: Tensor, table_offsets: Tensor) -> None:
    are_lengths = lengths.dim() == 2 and lengths.dtype in ID_TYPES
    expect(are_lengths, name, "lengths [batch, tables] of Char, Short, Int or Long", lengths)
    are_ids = ids.dim() == 1 and ids.dtype in ID_TYPES
    expect(are_ids, name, "ids [total] of Char, Short, Int or Long", ids)
    check_table_offsets(name, table_offsets, "lengths", lengths.shape)


def _setup_context(ctx, inputs, output):
    weight, ids, lengths, table_offsets, sample_weights, ctx.mean, _ = inputs
    ctx.weight_shape = weight.shape
    kept = weight if ctx.needs_input_grad[4] else None  # only that gradient reads the rows
    ctx.save_for_backward(kept, ids, lengths, table_offsets, sample_weights)


def _backward(ctx, grad):
    weight, ids, lengths, table_offsets, sample_weights = ctx.saved_tensors
    rows, values = torch.ops.dlrm.joint_embedding_bag_backward(
        grad, ids, lengths, table_offsets, sample_weights, ctx.mean
    )
    sparse = torch.sparse_coo_tensor(
        rows.unsqueeze(0), values, ctx.weight_shape, check_invariants=False, is_coalesced=False
    )
    sample_weights_grad = None
    if ctx.needs_input_grad[4]:
        sample_weights_grad = torch.ops.dlrm.joint_embedding_bag_sample_weights_backward(
            grad, weight, rows, lengths, ctx.mean
        )
    return sparse, None, None, None, sample_weights_grad, None, None


if native_available():

    @torch.library.register_fake("dlrm::joint_embedding_bag")
    def _(weight, ids, lengths, table_offsets, sample_weights, mean, dtype):
        _check_shapes("joint_embedding_bag", ids, lengths, table_offsets)
        _check(weight, ids, sample_weights, dtype)
        return weight.new_empty((*lengths.shape, weight.shape[1]), dtype=dtype or weight.dtype)

    @torch.library.register_fake("dlrm::joint_embedding_bag_backward")
    def _(grad, ids, lengths, table_offsets, sample_weights, mean):
        rows = ids.new_empty(ids.shape, dtype=torch.int64)
        return rows, grad.new_empty(ids.shape[0], grad.shape[2])

    @torch.library.register_fake("dlrm::joint_embedding_bag_sample_weights_backward")
    def _(grad, weight, rows, lengths, mean):
        return grad.new_empty(rows.shape, dtype=torch.float32)

    torch.library.register_autograd(
        "dlrm::joint_embedding_bag", _backward, setup_context=_setup_context
    )
