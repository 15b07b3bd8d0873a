"""Bottom MLP, dot interaction, top MLP and logit in one operator, and the gradients of the loss.

The schemas are in csrc/schemas.h; csrc/cpu/network.cpp calls the kernels of the parts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dlrm.ops.dot_interaction import dot_flops, dot_interaction
from dlrm.ops.joint_embedding import joint_embedding
from dlrm.ops.library import below_autograd, native_available
from dlrm.ops.logistic_loss import logistic_loss
from dlrm.ops.mlp import mlp, mlp_logits, multiplies_natively, product_flops

Layers = tuple[Sequence[Tensor], Sequence[Tensor]]


class Rows(NamedTuple):
    """Rows of tables that `network` looks up: the arguments of `joint_embedding`."""

    weight: Tensor
    ids: Tensor
    table_offsets: Tensor
    dtype: torch.dtype


def network(
    numerical: Tensor,
    embeddings: Tensor | Rows,
    bottom: Layers,
    top: Layers,
    logit: tuple[Tensor, Tensor],
) -> Tensor:
    """Returns the logits of a DLRM, `[batch]` float32, from its numerical fields and embeddings.

    They have the bits of `joint_embedding`, `mlp`, `dot_interaction` and `mlp_logits` one after the
    other. These run where there is no native operator, and where a gradient is wanted.

    Args:
        numerical: `[batch, fields]`, float32, bfloat16 or float16; rounded as the embeddings are.
        embeddings: one row of each table, `[batch, tables, dim]`, of the dtype to compute in; or
            the rows to look up.
        bottom: weights and biases of the bottom MLP, see `mlp`; its output is `[batch, dim]`.
        top: weights and biases of the top MLP, whose input is the output of `dot_interaction`.
        logit: weight and bias of the last layer, see `mlp_logits`.

    Raises:
        RuntimeError: shapes or dtypes do not fit together; the message names the part and both.
    """
    first, *look_up = embeddings if isinstance(embeddings, Rows) else (embeddings,)
    native = _is_native(first.device, embeddings.dtype, bottom, top)
    if isinstance(embeddings, Rows):
        native = native and embeddings.ids.is_cpu and embeddings.table_offsets.is_cpu
    if torch.is_grad_enabled() or not native:
        if isinstance(embeddings, Rows):
            embeddings = joint_embedding(*embeddings[:3], dtype=embeddings.dtype)
        dense = mlp(numerical.to(embeddings.dtype), *bottom)
        return mlp_logits(dot_interaction(dense, embeddings), *top, *logit)
    return torch.ops.dlrm.network.default(numerical, first, *bottom, *top, *logit, *look_up)


class Gradients(NamedTuple):
    """The loss of a network, and its gradients.

    Attributes:
        loss: a scalar.
        added_logits: gradient of the logits, `[batch]`, and so of what is added to them.
        embeddings: gradient of the embeddings.
        parameters: gradients of the weights and biases of the bottom MLP, those of the top MLP, and
            of weight and bias of the logit.
    """

    loss: Tensor
    added_logits: Tensor
    embeddings: Tensor
    parameters: list[Tensor]


def network_gradients(
    numerical: Tensor,
    embeddings: Tensor,
    bottom: Layers,
    top: Layers,
    logit: tuple[Tensor, Tensor],
    labels: Tensor,
    divisor: float = 1.0,
    added_logits: Tensor | None = None,
) -> Gradients:
    """Returns `logistic_loss` of the logits of `network`, and its gradients, without autograd.

    Their bits are those of a backward pass through `network` and `logistic_loss`.

    Args:
        numerical, embeddings, bottom, top, logit: see `network`.
        labels, divisor: see `logistic_loss`.
        added_logits: added to the logits, `[batch]` float32.

    Raises:
        RuntimeError: see `network`.
    """
    arguments = numerical, embeddings, bottom, top, logit, labels, divisor, added_logits
    if not _is_native(embeddings.device, embeddings.dtype, bottom, top):
        return network_gradients_reference(*arguments)
    loss, of_added, of_embeddings, *of_parameters = below_autograd(
        torch.ops.dlrm.network_gradients.default,
        numerical,
        embeddings,
        *bottom,
        *top,
        *logit,
        added_logits,
        labels,
        divisor,
    )
    return Gradients(loss, of_added, of_embeddings, of_parameters)


def network_gradients_reference(
    numerical: Tensor,
    embeddings: Tensor,
    bottom: Layers,
    top: Layers,
    logit: tuple[Tensor, Tensor],
    labels: Tensor,
    divisor: float = 1.0,
    added_logits: Tensor | None = None,
) -> Gradients:
    """Does the same by autograd: the fallback and the oracle of the tests."""
    added = torch.zeros_like(labels) if added_logits is None else added_logits
    given = [added, embeddings, *bottom[0], *bottom[1], *top[0], *top[1], *logit]
    leaves = [one.detach().requires_grad_() for one in given]
    split = iter(leaves[2:])
    below = [next(split) for _ in bottom[0]], [next(split) for _ in bottom[1]]
    above = [next(split) for _ in top[0]], [next(split) for _ in top[1]]
    with torch.enable_grad():
        logits = network(numerical, leaves[1], below, above, (next(split), next(split)))
        loss = logistic_loss(logits + leaves[0], labels, divisor)
    of_added, of_embeddings, *of_parameters = torch.autograd.grad(loss, leaves)
    return Gradients(loss.detach(), of_added, of_embeddings, of_parameters)


def _is_native(device: torch.device, dtype: torch.dtype, *parts: Layers) -> bool:
    return all(
        weights and multiplies_natively(device, dtype, weights[0].dtype) for weights, _ in parts
    )


if native_available():

    @torch.library.register_fake("dlrm::network")
    def _(numerical, embeddings, *parameters):
        return numerical.new_empty(len(numerical), dtype=torch.float32)

    @torch.library.register_fake("dlrm::network_gradients")
    def _(numerical, embeddings, bottom, bottom_biases, top, top_biases, weight, bias, *others):
        batch = numerical.new_empty(len(numerical), dtype=torch.float32)
        parameters = (*bottom, *bottom_biases, *top, *top_biases, weight, bias)
        grads = [torch.empty_like(one) for one in (embeddings, *parameters)]
        return [batch.new_empty(()), batch, *grads]

    @register_flop_formula(torch.ops.dlrm.network)
    def _(
        numerical, embeddings, bottom, _biases, top, _top, logit, _bias, ids=None, *_, **_options
    ):
        tables = embeddings[1] if ids is None else ids[1]
        dots = dot_flops(numerical[0], tables + 1, embeddings[-1])
        return dots + product_flops(numerical[0], [*bottom, *top, logit])

    @register_flop_formula(torch.ops.dlrm.network_gradients)
    def _(numerical, embeddings, bottom, _biases, top, _top, logit, *_, **_options):
        batch, tables, dim = embeddings
        layers = [*bottom, *top, logit]
        forward = dot_flops(batch, tables + 1, dim) + product_flops(batch, layers)
        of_values = dot_flops(batch, tables + 1, dim) + product_flops(batch, layers[1:])
        return forward + of_values + product_flops(batch, layers)
