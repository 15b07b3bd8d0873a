"""The part of a DLRM after the exchange: from vectors to logits."""

from functools import partial

import torch
from torch import Tensor, nn

from dlrm.model.config import DLRMConfig
from dlrm.model.layers.choices import (
    DCN,
    NO_EMBEDDING,
    QUADRATIC,
    interaction_names,
)
from dlrm.model.layers.composition import Make, compose
from dlrm.model.layers.cross import CrossLayers
from dlrm.model.layers.hooks import has_hooks
from dlrm.model.layers.initialize import generator
from dlrm.model.layers.interaction import Interaction, NativeDot
from dlrm.model.layers.mlp import MLP, is_plain, mlp, output_layer
from dlrm.model.layers.packed import Adapters, member_logits
from dlrm.model.layers.quadratic import QuadraticLayers
from dlrm.ops.network import Layers


class Score(nn.Module):
    """The layers after the exchange: interaction, top MLP, parallel cross layers, logit.

    With factors of members the logits are `[samples, members]`, otherwise `[samples]`.
    """

    def __init__(
        self,
        interact: Interaction,
        top_mlp: MLP,
        output: nn.Linear,
        cross: CrossLayers | None,
        adapters: Adapters | None,
    ):
        super().__init__()
        self.interact, self.top_mlp, self.output, self.cross = interact, top_mlp, output, cross
        self.adapters = adapters

    def native_parameters(self) -> tuple[Layers, tuple[Tensor, Tensor]] | None:
        """Returns those of top MLP and logit if they and a dot interaction are all that runs."""
        interact, output = self.interact, self.output  # a module takes 1 us to find each
        if type(interact) is not NativeDot or has_hooks(interact):
            return None
        if self.cross is not None or self.adapters is not None or not is_plain(output):
            return None
        layers = self.top_mlp.native_parameters()
        return layers and (layers, (output.weight, output.bias))

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        if self.adapters is not None:
            dense, embeddings = self.adapters(dense, embeddings)
        products = self.interact(dense, embeddings)
        if self.cross is None and self.adapters is None:
            return self.top_mlp.logits(products, self.output)
        hidden = self.top_mlp(products).float()
        if self.cross is not None:
            hidden = torch.cat([hidden, self.cross(dense, embeddings).float()], 1)
        if self.adapters is not None:
            return member_logits(hidden, self.output.weight, self.output.bias)
        return self.output(hidden).squeeze(1)


class Members(nn.ModuleList):
    """The members of a mixed ensemble: each is a `Score` of its own over the same vectors.

    As a packed ensemble of one member, it multiplies them by factors of its own and returns
    `[samples, 1]`.
    """

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """Returns the members' logits, `[samples, members]`."""
        return torch.cat([member(dense, embeddings) for member in self], 1)


def make_scores(
    config: DLRMConfig, dense_vectors: int, seed: int, dtype: torch.dtype, optimized: bool
) -> list[Score]:
    """Returns the layers after the exchange, or those of each member of a mixed ensemble.

    The initial values of a member also depend on its number.

    Args:
        dense_vectors: vectors of the bottom MLP.
        dtype, optimized: see `dlrm.model.layers.mlp.MLP`.
    """
    seeds = (generator(seed, f"members.{i}").initial_seed() for i in range(len(config.kinds)))
    members = [*zip(config.kinds, seeds, strict=True)] or [(config.interaction_op, seed)]
    return [
        _make_score(config, kind, dense_vectors, own, dtype, optimized) for kind, own in members
    ]


def _make_score(
    config: DLRMConfig,
    interaction_op: str,
    dense_vectors: int,
    seed: int,
    dtype: torch.dtype,
    optimized: bool,
) -> Score:
    names = interaction_names(interaction_op)
    interact, cross = _interactions(config, names, dense_vectors, seed, dtype, optimized)
    width, sizes = interact.width, () if names == [QUADRATIC] else config.top_mlp_sizes[:-1]
    regularization = config.batch_norm, config.dropout
    top_mlp = mlp(width, sizes, seed, "top_mlp", dtype, optimized, *regularization)
    last = [width, *sizes][-1] + (cross.width if cross else 0)
    output = output_layer(last, seed, "output", config.output_init, config.packed)
    adapters = None
    if config.packed > 1 or config.kinds:
        adapters = Adapters(config.packed, interact.num_vectors, interact.dim, seed)
    if interact.padding:  # inputs that are always zero
        first = next((top_mlp if len(top_mlp) else output).parameters())
        with torch.no_grad():
            first[:, width - interact.padding : width] = 0
    return Score(interact, top_mlp, output, cross, adapters)


def _interactions(
    config: DLRMConfig,
    names: list[str],
    dense_vectors: int,
    seed: int,
    dtype: torch.dtype,
    optimized: bool,
) -> tuple[Interaction, CrossLayers | None]:
    """Returns the interaction of the top MLP, and the cross layers that enter the last layer."""
    embedded = config.numerical_embedding != NO_EMBEDDING
    num_fields = config.num_numerical_features if embedded else 0
    shape = dense_vectors + num_fields + len(config.table_sizes), config.embedding_dim
    cross = partial(CrossLayers, layers=config.cross_layers, rank=config.cross_rank, seed=seed)
    quadratic = partial(
        QuadraticLayers,
        layers=config.quadratic_layers,
        rows=config.quadratic_rows,
        batch_norm=config.batch_norm,
        dropout=config.dropout,
        seed=seed,
        dtype=dtype,
        optimized=optimized,
    )
    with_weights: dict[str, Make] = {DCN: cross, QUADRATIC: quadratic}
    if DCN not in names or config.cross_structure == "stacked":
        return compose(names, *shape, with_weights), None
    names.remove(DCN)
    return compose(names, *shape, with_weights), cross(*shape)
