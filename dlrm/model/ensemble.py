"""An ensemble: several networks whose logits are averaged."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dlrm.model.dlrm import DLRM


class Ensemble(nn.Module):
    """The mean of the logits of networks of one architecture.

    Args:
        members: the networks.

    Attributes:
        config: the architecture of each network.
    """

    def __init__(self, members: Sequence[DLRM]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.config = members[0].config

    def forward(
        self,
        numerical: Tensor,
        categorical: Tensor,
        lengths: Tensor | None = None,
        id_weights: Tensor | None = None,
    ) -> Tensor:
        """Returns logits; see `DLRM.forward`."""
        logits = [
            one(numerical, categorical, lengths, id_weights=id_weights) for one in self.members
        ]
        return torch.stack(logits).mean(0)


def members_of(model: DLRM | Ensemble) -> list[DLRM]:
    """Returns the networks whose logits a model averages, or the model itself."""
    if not isinstance(model, Ensemble):
        return [model]
    return [one for one in model.members if isinstance(one, DLRM)]
