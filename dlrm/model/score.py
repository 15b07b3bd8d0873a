"""The part of a DLRM after the exchange: from vectors to logits."""

from functools import partial

import torch
from torch import Tensor, nn

from dlrm.model.config import DLRMConfig
from dlrm.model.layers.choices import DCN, NO_EMBEDDING, QUADRATIC, interaction_names
from dlrm.model.layers.composition import compose
from dlrm.model.layers.cross import CrossLayers
from dlrm.model.layers.hooks import has_hooks
from dlrm.model.layers.interaction import Interaction, NativeDot
from dlrm.model.layers.mlp import MLP, is_plain
from dlrm.model.layers.packed import Adapters, member_logits
from dlrm.model.layers.quadratic import QuadraticLayers
from dlrm.ops.network import Layers


class Score(nn.Module):
    """The layers after the exchange: interaction, top MLP, parallel cross layers, logit.

    For a packed ensemble the logits are `[samples, members]`, otherwise `[samples]`.
    """

    def __init__(
        self,
        interact: nn.Module,
        top_mlp: MLP,
        output: nn.Linear,
        cross: nn.Module | None,
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


def interactions(
    config: DLRMConfig, dense_vectors: int, seed: int, dtype: torch.dtype, optimized: bool
) -> tuple[Interaction, CrossLayers | None]:
    """Returns the interaction of the top MLP, and the cross layers that enter the last layer.

    Args:
        config: the architecture.
        dense_vectors: vectors of the bottom MLP.
        seed: seed of the initial values.
        dtype, optimized: see `dlrm.model.layers.mlp.MLP`.
    """
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
    with_weights = {DCN: cross, QUADRATIC: quadratic}
    names = interaction_names(config.interaction_op)
    if DCN not in names or config.cross_structure == "stacked":
        return compose(names, *shape, with_weights, seed), None
    names.remove(DCN)
    return compose(names, *shape, with_weights, seed), cross(*shape)
