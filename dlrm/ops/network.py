"""Bottom MLP, dot interaction, top MLP and logit in one operator, also with the loss.

The schemas are in csrc/schemas.h; csrc/cpu/network.cpp calls the kernels of the parts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dlrm.ops.dot_interaction import dot_interaction
from dlrm.ops.library import native_available
from dlrm.ops.logistic_loss import logistic_loss
from dlrm.ops.mlp import mlp, mlp_logits, multiplies_natively

Layers = tuple[Sequence[Tensor], Sequence[Tensor]]


def network(
    numerical: Tensor,
    embeddings: Tensor,
    bottom: Layers,
    top: Layers,
    logit: tuple[Tensor, Tensor],
) -> Tensor:
    """Returns the logits of a DLRM, `[batch]` float32, from its numerical fields and embeddings.

    They have the bits of `mlp`, `dot_interaction` and `mlp_logits` one after the other. These run
    where there is no native operator, and where a gradient is wanted.

    Args:
        numerical: `[batch, fields]`, float32, bfloat16 or float16; rounded to the embeddings' dtype.
        embeddings: one row of each table, `[batch, tables, dim]`, of the dtype to compute in.
        bottom: weights and biases of the bottom MLP, see `mlp`; its output is `[batch, dim]`.
        top: weights and biases of the top MLP, whose input is the output of `dot_interaction`.
        logit: weight and bias of the last layer, see `mlp_logits`.

    Raises:
        RuntimeError: shapes or dtypes do not fit together; the message names the part and both.
    """
    if torch.is_grad_enabled() or not _is_native(embeddings, bottom):
        dense = mlp(numerical.to(embeddings.dtype), *bottom)
        return mlp_logits(dot_interaction(dense, embeddings), *top, *logit)
    return torch.ops.dlrm.network.default(numerical, embeddings, *bottom, *top, *logit)


def network_loss(
    numerical: Tensor,
    embeddings: Tensor,
    bottom: Layers,
    top: Layers,
    logit: tuple[Tensor, Tensor],
    labels: Tensor,
    divisor: float = 1.0,
    added_logits: Tensor | None = None,
) -> Tensor:
    """Returns `logistic_loss` of the logits of `network`, a scalar, by one autograd node.

    The gradients are computed together with the loss, and are of one backward pass only.

    Args:
        numerical, embeddings, bottom, top, logit: see `network`.
        labels, divisor: see `logistic_loss`.
        added_logits: added to the logits, `[batch]` float32.

    Raises:
        RuntimeError: see `network`.
    """
    if not _is_native(embeddings, bottom):
        logits = network(numerical, embeddings, bottom, top, logit)
        logits = logits if added_logits is None else logits + added_logits
        return logistic_loss(logits, labels, divisor)
    layers = len(bottom[0]), len(top[0])
    parameters = (*bottom[0], *bottom[1], *top[0], *top[1], *logit)
    inputs = added_logits, numerical, embeddings
    return _NetworkLoss.apply(labels, divisor, layers, *inputs, *parameters)


def _is_native(embeddings: Tensor, bottom: Layers) -> bool:
    return multiplies_natively(embeddings.device, embeddings.dtype, bottom[0][0].dtype)


class _NetworkLoss(torch.autograd.Function):
    """The autograd node; takes the inputs that need no gradient, the others, and all parameters."""

    @staticmethod
    def forward(
        ctx,
        labels: Tensor,
        divisor: float,
        layers: tuple[int, int],
        added_logits: Tensor | None,
        numerical: Tensor,
        embeddings: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        bottom, top = layers
        loss, *ctx.grads = torch.ops.dlrm.network_loss.default(
            numerical,
            embeddings,
            parameters[:bottom],
            parameters[bottom : 2 * bottom],
            parameters[2 * bottom : -2 - top],
            parameters[-2 - top : -2],
            *parameters[-2:],
            added_logits,
            labels,
            divisor,
            ctx.needs_input_grad[4],
        )
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        grads, ctx.grads = ctx.grads, None  # autograd keeps a gradient that is nobody else's
        if grads is None:
            raise RuntimeError("network_loss: its gradients are of one backward pass only")
        torch.ops.dlrm.scale_gradients_.default(grads, grad)
        needed = zip(grads, ctx.needs_input_grad[3:], strict=True)
        return None, None, None, *(one if needs else None for one, needs in needed)


if native_available():

    @torch.library.register_fake("dlrm::network")
    def _(numerical, embeddings, *parameters):
        return numerical.new_empty(len(numerical), dtype=torch.float32)
