"""Interactions by name, and compositions of several, such as `dot,dcn`."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from dlrm.model.layers.interaction import INTERACTIONS, Interaction

_ALIGNED = 8  # a composition is padded to a multiple of this many columns
Make = Callable[[int, int], Interaction]  # from the number of vectors, and their columns


def compose(
    names: Sequence[str], num_vectors: int, dim: int, with_weights: Mapping[str, Make]
) -> Interaction:
    """Returns the interaction of one name, or the composition of several.

    Args:
        names: as `interaction_names` returns them; an empty list is "cat".
        with_weights: makes the interactions that have weights, by name.
    """
    kinds: dict[str, Make] = {**INTERACTIONS, **with_weights}
    parts = [kinds[name](num_vectors, dim) for name in names or ["cat"]]
    return parts[0] if len(parts) == 1 else Composition(names, parts)


class Composition(Interaction):
    """Concatenates the outputs of interactions without their padding, and pads the result.

    Args:
        parts: the interactions, all over the same vectors.
    """

    def __init__(self, names: Sequence[str], parts: Sequence[Interaction]) -> None:
        super().__init__(parts[0].num_vectors, parts[0].dim)
        self.parts = nn.ModuleDict(dict(zip(names, parts, strict=True)))
        self._used = [part.width - part.padding for part in parts]
        self.padding = -sum(self._used) % _ALIGNED
        self.width = sum(self._used) + self.padding

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        outputs = [
            part(dense, embeddings)[:, :used]
            for part, used in zip(self.parts.values(), self._used, strict=True)
        ]
        return torch.cat([*outputs, dense.new_zeros(len(dense), self.padding)], dim=1)

    def exportable(self) -> tuple[nn.Module, list[int] | None]:
        modules, columns, begin = [], [], 0
        for part, used in zip(self.parts.values(), self._used, strict=True):
            module, own = part.exportable()  # type: ignore[operator]
            modules.append(module)
            own = list(range(used)) if own is None else own
            columns += [begin + column if column >= 0 else -1 for column in own]
            begin += used
        return _SideBySide(modules), columns


class _SideBySide(nn.Module):
    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        outputs = []
        for part in self.parts:
            outputs.append(part(dense, embeddings))
        return torch.cat(outputs, dim=1)
