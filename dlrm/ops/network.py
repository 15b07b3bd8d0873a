"""Bottom MLP, dot interaction, top MLP and logit in one operator, and the gradients of the loss.

The schemas are in csrc/schemas.h; csrc/cpu/network.cpp calls the kernels of the parts, of which
those of the MLPs are in csrc/cpu/mlp*.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dlrm.ops.dot_interaction import dot_flops, dot_interaction_reference
from dlrm.ops.joint_embedding import joint_embedding
from dlrm.ops.library import below_autograd, native_available
from dlrm.ops.linear_relu import linear_relu_reference
from dlrm.ops.logistic_loss import logistic_loss_reference

_NATIVE_DTYPES = (torch.float32, torch.bfloat16)


class NetworkParameters(NamedTuple):
    """The weights and biases of a network's layers, float32 for the native operators.

    Attributes:
        bottom_weights, bottom_biases: `[outputs, inputs]` and `[outputs]` of each layer of the
            bottom MLP, which is followed by a ReLU; the last has the columns of the embeddings.
        top_weights, top_biases: those of the top MLP, whose input is the output of
            `dot_interaction`.
        logit_weight, logit_bias: those of the last layer, `[1, inputs]` and `[1]`.
    """

    bottom_weights: Sequence[Tensor]
    bottom_biases: Sequence[Tensor]
    top_weights: Sequence[Tensor]
    top_biases: Sequence[Tensor]
    logit_weight: Tensor
    logit_bias: Tensor

    def tensors(self) -> list[Tensor]:
        """Returns all weights and biases, in order."""
        *lists, weight, bias = self
        return [tensor for one in lists for tensor in one] + [weight, bias]

    def are_native(self, dtype: torch.dtype) -> bool:
        """Returns whether the native operators run, by the first weights and the dtype.

        They name further parameters of another dtype.
        """
        if not native_available() or dtype not in _NATIVE_DTYPES:
            return False
        first = *self.bottom_weights[:1], *self.top_weights[:1]
        return len(first) == 2 and all(one.is_cpu and one.dtype == torch.float32 for one in first)


class Rows(NamedTuple):
    """Rows of tables that `network` looks up: the arguments of `joint_embedding`."""

    weight: Tensor
    ids: Tensor
    table_offsets: Tensor
    dtype: torch.dtype


class Gradients(NamedTuple):
    """The loss of a network, and its gradients.

    Attributes:
        loss: a scalar.
        added_logits: gradient of the logits, `[batch]`, and so of what is added to them.
        embeddings: gradient of the embeddings.
        parameters: gradients of `NetworkParameters.tensors`.
    """

    loss: Tensor
    added_logits: Tensor
    embeddings: Tensor
    parameters: list[Tensor]


def network(numerical: Tensor, embeddings: Tensor | Rows, parameters: NetworkParameters) -> Tensor:
    """Returns the logits of a DLRM, `[batch]` float32, without a gradient.

    A row has the same bits in any batch. Elsewhere than on a CPU the reference runs.

    Args:
        numerical: `[batch, fields]`, of the dtype to compute in: float32 or bfloat16.
        embeddings: one row of each table, `[batch, tables, dim]`, of the same dtype; or the rows to
            look up.

    Raises:
        RuntimeError: shapes or dtypes do not fit together; the message names the part and both.
    """
    first, *look_up = embeddings if isinstance(embeddings, Rows) else (embeddings,)
    if parameters.are_native(numerical.dtype) and all(
        one.is_cpu for one in (first, *look_up) if isinstance(one, Tensor)
    ):
        return below_autograd(
            torch.ops.dlrm.network.default, numerical, first, *parameters, *look_up
        )
    if isinstance(embeddings, Rows):
        embeddings = joint_embedding(*embeddings[:3], dtype=embeddings.dtype)
    with torch.no_grad():
        return network_reference(numerical, embeddings, parameters)


def network_reference(
    numerical: Tensor, embeddings: Tensor, parameters: NetworkParameters
) -> Tensor:
    """Does the same in plain PyTorch, with gradients: the fallback and the oracle of the tests."""
    values = numerical
    for weight, bias in zip(parameters.bottom_weights, parameters.bottom_biases, strict=True):
        values = linear_relu_reference(values, weight, bias)
    values = dot_interaction_reference(values, embeddings)
    for weight, bias in zip(parameters.top_weights, parameters.top_biases, strict=True):
        values = linear_relu_reference(values, weight, bias)
    logit = parameters.logit_weight, parameters.logit_bias
    return F.linear(values.to(logit[0].dtype), *logit).squeeze(1)


def network_gradients(
    numerical: Tensor,
    embeddings: Tensor,
    parameters: NetworkParameters,
    labels: Tensor,
    divisor: float = 1.0,
    added_logits: Tensor | None = None,
) -> Gradients:
    """Returns `logistic_loss` of the logits of `network`, and its gradients, without autograd.

    Args:
        numerical, embeddings, parameters: see `network`.
        labels, divisor: see `logistic_loss`.
        added_logits: added to the logits, `[batch]` float32.

    Raises:
        RuntimeError: see `network`.
    """
    if not parameters.are_native(numerical.dtype) or not embeddings.is_cpu:
        return network_gradients_reference(
            numerical, embeddings, parameters, labels, divisor, added_logits
        )
    loss, of_added, of_embeddings, *of_parameters = below_autograd(
        torch.ops.dlrm.network_gradients.default,
        *(numerical, embeddings, *parameters, added_logits, labels, divisor),
    )
    return Gradients(loss, of_added, of_embeddings, of_parameters)


def network_gradients_reference(
    numerical: Tensor,
    embeddings: Tensor,
    parameters: NetworkParameters,
    labels: Tensor,
    divisor: float = 1.0,
    added_logits: Tensor | None = None,
) -> Gradients:
    """Does the same by autograd: the fallback and the oracle of the tests."""
    added = torch.zeros_like(labels) if added_logits is None else added_logits
    given = [added, embeddings, *parameters.tensors()]
    leaves = [one.detach().requires_grad_() for one in given]
    split = iter(leaves[2:])
    lists = [[next(split) for _ in one] for one in parameters[:4]]
    own = NetworkParameters(lists[0], lists[1], lists[2], lists[3], next(split), next(split))
    with torch.enable_grad():
        logits = network_reference(numerical, leaves[1], own)
        loss = logistic_loss_reference(logits + leaves[0], labels, divisor)
    of_added, of_embeddings, *of_parameters = torch.autograd.grad(loss, leaves)
    return Gradients(loss.detach(), of_added, of_embeddings, of_parameters)


def _product_flops(batch: int, weights: Sequence[torch.Size]) -> int:
    return 2 * batch * sum(shape.numel() for shape in weights)


if native_available():

    @torch.library.register_fake("dlrm::network")
    def _(numerical, embeddings, *parameters):
        return numerical.new_empty(len(numerical), dtype=torch.float32)

    @torch.library.register_fake("dlrm::network_gradients")
    def _(numerical, embeddings, *others):
        *parameters, added_logits, labels, divisor = others
        batch = numerical.new_empty(len(numerical), dtype=torch.float32)
        tensors = NetworkParameters(*parameters).tensors()
        grads = [torch.empty_like(one) for one in (embeddings, *tensors)]
        return [batch.new_empty(()), batch, *grads]

    @register_flop_formula(torch.ops.dlrm.network)
    def _(
        numerical, embeddings, bottom, _biases, top, _top, logit, _bias, ids=None, *_, **_options
    ):
        tables = embeddings[1] if ids is None else ids[1]
        dots = dot_flops(numerical[0], tables + 1, embeddings[-1])
        return dots + _product_flops(numerical[0], [*bottom, *top, logit])

    @register_flop_formula(torch.ops.dlrm.network_gradients)
    def _(numerical, embeddings, bottom, _biases, top, _top, logit, *_, **_options):
        batch, tables, dim = embeddings
        layers = [*bottom, *top, logit]
        forward = dot_flops(batch, tables + 1, dim) + _product_flops(batch, layers)
        of_values = dot_flops(batch, tables + 1, dim) + _product_flops(batch, layers[1:])
        return forward + of_values + _product_flops(batch, layers)
