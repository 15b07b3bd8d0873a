"""Attended bag: a joint embedding bag whose lists are weighted by target attention.

The schemas are in csrc/schemas.h, the kernels in csrc/cpu/attention*.

An activation unit gives each item of a list a weight that depends on the item and on the sample's
candidate (DIN; Zhou et al., 2018, arXiv 1706.06978); the list's vector is the weighted sum.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dlrm.ops.joint_embedding import bags_of_ids, check_ids, table_ranges
from dlrm.ops.library import is_native_on_cpu, native_available


class ActivationUnits(NamedTuple):
    """The activation units of some lists, with `hidden` neurons each.

    The weight of an item x for a candidate c is `output . relu(h) + output_bias`, where h is
    `items x + products (x * c) + candidates c + bias`: a layer over x, c, x - c and x * c.

    Attributes:
        items, products, candidates: `[lists, hidden, dim]` float32.
        bias, output: `[lists, hidden]` float32.
        output_bias: `[lists]` float32.
    """

    items: Tensor
    products: Tensor
    candidates: Tensor
    bias: Tensor
    output: Tensor
    output_bias: Tensor


def attended_bag(
    weight: Tensor,
    ids: Tensor,
    table_offsets: Tensor,
    lengths: Tensor,
    lists: Sequence[tuple[int, int]],
    units: ActivationUnits,
    *,
    sample_weights: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns `[batch, fields, dim]`: the sum of the rows of each bag, weighted where attended.

    It is `joint_embedding` with lengths, but the rows of attended lists are also multiplied by the
    weights of their items. The candidate is the sum of the rows of its bag, usually one. The
    gradient of `weight` has the form of `joint_embedding`'s.

    Args:
        weight, ids, table_offsets, lengths, sample_weights, dtype: see `joint_embedding`.
        lists: for each attended list its field, and that of the candidate.
        units: an activation unit for each of `lists`.

    Raises:
        RuntimeError: see `joint_embedding`.
    """
    tensors = weight, ids, lengths, table_offsets
    given = (*tensors, *units, *(() if sample_weights is None else (sample_weights,)))
    if is_native_on_cpu(*given):
        pairs = [field for pair in lists for field in pair]
        return _AttendedBag.apply(*tensors, sample_weights, pairs, dtype, *units)
    check_ids(ids, table_offsets, lengths)
    return attended_bag_reference(
        weight,
        ids,
        table_offsets,
        lengths,
        lists,
        units,
        sample_weights=sample_weights,
        dtype=dtype,
    )


def attended_bag_reference(
    weight: Tensor,
    ids: Tensor,
    table_offsets: Tensor,
    lengths: Tensor,
    lists: Sequence[tuple[int, int]],
    units: ActivationUnits,
    *,
    sample_weights: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Does the same in plain PyTorch: the fallback and the tests' oracle."""
    batch, fields = lengths.shape
    bags = bags_of_ids(ids, lengths)
    rows = ids + table_ranges(table_offsets)[0].repeat(batch)[bags]
    wide = torch.promote_types(weight.dtype, torch.float32)
    vectors = F.embedding(rows, weight, sparse=True).to(wide)
    kind: dict[str, Any] = {"dtype": wide, "device": vectors.device}
    zeros = torch.zeros(batch * fields, vectors.shape[1], **kind)
    sums = zeros.index_add(0, bags, vectors).view(batch, fields, vectors.shape[1])
    samples = torch.div(bags, fields, rounding_mode="floor")
    of_field = bags - samples * fields
    factors = torch.ones(1, **kind)
    for place, (field, target) in enumerate(lists):
        unit = [part[place] for part in units]
        found = item_weights(vectors, sums[:, target], samples, *unit)
        factors = torch.where(of_field == field, found, factors)
    weighted = vectors * factors.unsqueeze(1)
    if sample_weights is not None:
        weighted = weighted * sample_weights.unsqueeze(1)
    attended = zeros.index_add(0, bags, weighted).view(batch, fields, vectors.shape[1])
    return attended.to(dtype or weight.dtype)


def item_weights(
    vectors: Tensor,
    candidate: Tensor,
    samples: Tensor,
    items: Tensor,
    products: Tensor,
    candidates: Tensor,
    bias: Tensor,
    output: Tensor,
    output_bias: Tensor,
) -> Tensor:
    """Returns the weights that an activation unit gives to items, `[total]`; it can be exported.

    Args:
        vectors: the items, `[total, dim]`.
        candidate: that of each sample, `[batch, dim]`.
        samples: the sample of each item, `[total]`.
        items, products, candidates, bias, output, output_bias: one of `ActivationUnits`.
    """
    hidden = F.linear(vectors, items) + F.linear(candidate, candidates, bias)[samples]
    hidden = hidden + F.linear(vectors * candidate[samples], products)
    # ONNX Runtime multiplies no empty matrix with a vector.
    return (F.relu(hidden) * output).sum(1) + output_bias


class _AttendedBag(torch.autograd.Function):
    """Weighs the rows of attended lists, then adds up the rows of each bag.

    The weights are the sample weights of the bags' operators, so that a row has one gradient.
    """

    @staticmethod
    def forward(ctx, weight, ids, lengths, table_offsets, sample_weights, lists, dtype, *units):  # type: ignore[override]
        tensors = weight, ids, lengths, table_offsets
        factors = torch.ops.dlrm.attention_weights.default(*tensors, lists, *units)
        if sample_weights is not None:
            factors *= sample_weights
        ctx.save_for_backward(*tensors, sample_weights, factors, *units)
        ctx.lists = lists
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.dlrm.joint_embedding_bag.default(*tensors, factors, False, dtype)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        weight, ids, lengths, table_offsets, sample_weights, factors, *units = ctx.saved_tensors
        rows, values = torch.ops.dlrm.joint_embedding_bag_backward.default(
            grad, ids, lengths, table_offsets, factors, False
        )
        of_factors = torch.ops.dlrm.joint_embedding_bag_sample_weights_backward.default(
            grad, weight, rows, lengths, False
        )
        if sample_weights is not None:
            of_factors *= sample_weights
        of_units = torch.ops.dlrm.attention_weights_backward.default(
            of_factors, values, weight, rows, lengths, ctx.lists, *units
        )
        sparse = torch.sparse_coo_tensor(
            rows.unsqueeze(0), values, weight.shape, check_invariants=False, is_coalesced=False
        )
        return sparse, *[None] * 6, *of_units


if native_available():

    @torch.library.register_fake("dlrm::attention_weights")
    def _(weight, ids, *operands):
        return weight.new_empty(ids.shape, dtype=torch.float32)

    @torch.library.register_fake("dlrm::attention_weights_backward")
    def _(*operands):
        return tuple(torch.empty_like(part) for part in operands[6:])  # the units, the last ones
