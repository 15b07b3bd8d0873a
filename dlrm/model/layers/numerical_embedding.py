"""Numerical fields as vectors of the interaction, one per field, next to the bottom MLP's."""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlrm import ops
from dlrm.model.layers.initialize import generator


class PiecewiseLinear(nn.Module):
    """A linear layer over the piecewise-linear encoding (Gorishniy et al., 2022, section 3.2).

    The encoding has a number for each bin of the field: 0 for bins above the value, 1 for bins
    below, and, for the value's own bin, the share of it that is below the value. Values beyond the
    edges are clamped. The product with the encoding, which is nearly all 0 and 1, is not computed
    as such: it is a running sum over the layer's rows plus a share of the next row.

    Args:
        dim: columns of a vector.
        bins: maximum number of bins of a field.
        seed: seed of the initial values, which also depend on the names of the weights.

    Attributes:
        edges: ascending edges of each field's bins, `[fields, bins + 1]`; a field with fewer bins
            repeats its greatest edge. Checkpoints include them. Before `set_edges`, a new model has
            equal bins in [0, 1].
    """

    def __init__(self, num_fields: int, dim: int, bins: int, seed: int) -> None:
        super().__init__()
        self.num_fields, self.dim, self.bins, self._seed = num_fields, dim, bins, seed
        self.edges: Tensor
        equal = torch.linspace(0, 1, bins + 1)
        self.register_buffer("edges", equal.repeat(num_fields, 1))
        bound = bins**-0.5
        self.weight = self._drawn("weight", num_fields, bins, dim, bound=bound)
        self.bias = self._drawn("bias", num_fields, dim, bound=bound)

    def forward(self, numerical: Tensor) -> Tensor:
        """Returns float32 `[samples, fields, dim]` from `[samples, fields]`, any floating dtype."""
        return ops.piecewise_linear(numerical.float(), self.edges, self.weight, self.bias)

    def exportable(self) -> nn.Module:
        """Returns the same network in operators that TorchScript and ONNX have."""
        with torch.no_grad():
            vectors, places = ops.piecewise_tables(self.edges, self.weight, self.bias)
        return _ExportedBins(self.edges, self.bins, vectors, places)

    def _drawn(self, name: str, *shape: int, bound: float) -> nn.Parameter:
        random = generator(self._seed, f"numerical.{name}")
        return nn.Parameter(torch.empty(shape).uniform_(-bound, bound, generator=random))

    @torch.no_grad()
    def set_edges(self, edges: Sequence[np.ndarray]) -> None:
        """Sets the edges of every field.

        Args:
            edges: for each field, 1 to `bins + 1` ascending and finite edges.

        Raises:
            ValueError: the edges of a field are invalid; the message names the field's index.
        """
        if len(edges) != self.num_fields:
            raise ValueError(f"edges: expected those of {self.num_fields} fields, got {len(edges)}")
        for field, own in enumerate(edges):
            values = torch.tensor(np.asarray(own, np.float32))
            rising = bool(values.isfinite().all()) and bool((values.diff() > 0).all())
            if not 1 <= len(values) <= self.bins + 1 or not rising:
                raise ValueError(
                    f"edges of numerical field {field}: expected 1 to {self.bins + 1} ascending "
                    f"finite numbers, got {len(values)}: {values[:4].tolist()}"
                )
            row = values[-1].repeat(self.bins + 1)
            row[: len(values)] = values
            self.edges[field].copy_(row)


class _ExportedBins(nn.Module):
    """Bisects for a value's bin with one look-up per bit, since ONNX has no search operator."""

    def __init__(self, edges: Tensor, rows: int, vectors: Tensor, places: Tensor) -> None:
        super().__init__()
        num_fields, count = edges.shape
        self.steps = [1 << bit for bit in reversed(range(count.bit_length()))]
        self.width = 2 * self.steps[0]
        self.last = rows - 1
        padded = F.pad(edges, (0, self.width - count), value=math.inf)
        self.edges: Tensor
        self.vectors: Tensor
        self.places: Tensor
        self.first: Tensor
        self.register_buffer("edges", padded.reshape(-1, 1))
        self.register_buffer("vectors", vectors)
        self.register_buffer("places", places)
        self.register_buffer("first", torch.arange(num_fields, device=edges.device))

    def forward(self, numerical: Tensor) -> Tensor:
        numerical = numerical.float()
        begins = self.first * self.width
        found = torch.zeros_like(numerical, dtype=torch.int64)
        for step in self.steps:
            edge = F.embedding(found + (begins + step - 1), self.edges).squeeze(-1)
            found = found + step * (numerical >= edge).long()
        rows = (found - 1).clamp(0, self.last) + self.first * (self.last + 1)
        vectors = F.embedding(rows, self.vectors)
        edge, inverse = F.embedding(rows, self.places).unbind(-1)
        shares = ((numerical - edge) * inverse).clamp(0, 1)
        starts, steps = vectors.chunk(2, -1)
        return starts + steps * shares.unsqueeze(-1)
