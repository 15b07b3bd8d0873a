"""The part of a DLRM after the exchange: from vectors to logits."""

from functools import partial

import torch
from torch import Tensor, nn

from dlrm.model.config import DLRMConfig
from dlrm.model.layers.choices import DCN, NO_EMBEDDING, QUADRATIC, interaction_names
from dlrm.model.layers.composition import Make, compose
from dlrm.model.layers.cross import CrossLayers
from dlrm.model.layers.initialize import generator
from dlrm.model.layers.interaction import Interaction
from dlrm.model.layers.mlp import MLP, output_layer
from dlrm.model.layers.packed import Adapters, member_logits
from dlrm.model.layers.quadratic import QuadraticLayers


class Score(nn.Module):
    """The layers after the exchange: interaction, top MLP, parallel cross layers, logit.

    Args:
        interaction_op: that of the model, or of this member of a mixed ensemble.
        dtype: see `MLP`.

    Attributes:
        cross: the cross layers that enter the last layer, or None.
        adapters: the factors of a packed ensemble's members, or of this member of a mixed one, or
            None.
    """

    def __init__(self, config: DLRMConfig, interaction_op: str, seed: int, dtype: torch.dtype):
        super().__init__()
        names = interaction_names(interaction_op)
        sizes = () if names == [QUADRATIC] else config.top_mlp_sizes[:-1]
        self.interact, self.cross = _interactions(config, names, seed, dtype)
        width, padding = self.interact.width, self.interact.padding
        self.top_mlp = MLP(width, sizes, seed, "top_mlp", dtype, config.batch_norm, config.dropout)
        last = [width, *sizes][-1] + (self.cross.width if self.cross else 0)
        self.output = output_layer(last, seed, "output", config.output_init, config.packed)
        self.adapters: Adapters | None = None
        if config.packed > 1 or config.kinds:
            shape = self.interact.num_vectors, self.interact.dim
            self.adapters = Adapters(config.packed, *shape, seed)
        if padding:  # inputs that are always zero
            first = next((self.top_mlp if len(self.top_mlp) else self.output).parameters())
            with torch.no_grad():
                first[:, width - padding : width] = 0

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """Returns logits, `[samples, 1]`, or those of the members of a packed ensemble."""
        if self.adapters is not None:
            dense, embeddings = self.adapters(dense, embeddings)
        hidden = self.top_mlp(self.interact(dense, embeddings)).float()
        if self.cross is not None:
            hidden = torch.cat([hidden, self.cross(dense, embeddings).float()], 1)
        if self.adapters is not None:
            return member_logits(hidden, self.output.weight, self.output.bias)
        return self.output(hidden)


def make_scores(config: DLRMConfig, seed: int, dtype: torch.dtype) -> list[Score]:
    """Returns the layers after the exchange, or those of each member of a mixed ensemble.

    The initial values of a member also depend on its number.
    """
    seeds = (generator(seed, f"members.{i}").initial_seed() for i in range(len(config.kinds)))
    members = [*zip(config.kinds, seeds, strict=True)] or [(config.interaction_op, seed)]
    return [Score(config, kind, own, dtype) for kind, own in members]


def _interactions(
    config: DLRMConfig, names: list[str], seed: int, dtype: torch.dtype
) -> tuple[Interaction, CrossLayers | None]:
    """Returns the interaction of the top MLP, and the cross layers that enter the last layer."""
    embedded = config.numerical_embedding != NO_EMBEDDING
    num_fields = config.num_numerical_features if embedded else 0
    shape = 1 + num_fields + len(config.table_sizes), config.embedding_dim
    cross = partial(CrossLayers, layers=config.cross_layers, rank=config.cross_rank, seed=seed)
    quadratic = partial(
        QuadraticLayers,
        layers=config.quadratic_layers,
        rows=config.quadratic_rows,
        batch_norm=config.batch_norm,
        dropout=config.dropout,
        seed=seed,
        dtype=dtype,
    )
    with_weights: dict[str, Make] = {DCN: cross, QUADRATIC: quadratic}
    if DCN not in names or config.cross_structure == "stacked":
        return compose(names, *shape, with_weights), None
    names.remove(DCN)
    return compose(names, *shape, with_weights), cross(*shape)
