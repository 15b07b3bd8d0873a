"""Numerical fields as vectors of the interaction, one per field, next to the bottom MLP's.

To add a kind, subclass `NumericalEmbedding` and enter it in `NUMERICAL_EMBEDDINGS`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlrm import ops
from dlrm.model.layers.choices import MAX_BINS
from dlrm.model.layers.initialize import fill_normal, generator


@dataclass(frozen=True)
class NumericalOptions:
    """Options of the numerical embeddings; see `DLRMConfig`.

    Attributes:
        bins: maximum number of bins of a field, for the kinds with bins.
        frequencies: number of frequencies of a field, for "periodic".
        sigma: standard deviation of the initial frequencies.
    """

    bins: int = MAX_BINS
    frequencies: int = 32
    sigma: float = 0.05


class NumericalEmbedding(nn.Module):
    """Base of the kinds: a vector for each numerical field of a sample.

    Args:
        dim: columns of a vector.
        seed: seed of the initial values, which also depend on the names of the weights.
    """

    def __init__(self, num_fields: int, dim: int, options: NumericalOptions, seed: int) -> None:
        super().__init__()
        self.num_fields, self.dim, self._seed = num_fields, dim, seed

    def forward(self, numerical: Tensor) -> Tensor:
        """Returns float32 `[samples, fields, dim]` from `[samples, fields]`, any floating dtype."""
        raise NotImplementedError

    def exportable(self) -> nn.Module:
        """Returns the same network in operators that TorchScript and ONNX have."""
        return self

    def _drawn(self, name: str, *shape: int, bound: float) -> nn.Parameter:
        random = generator(self._seed, f"numerical.{name}")
        return nn.Parameter(torch.empty(shape).uniform_(-bound, bound, generator=random))


class Binned(NumericalEmbedding):
    """Base of the kinds with bins.

    Attributes:
        edges: ascending edges of each field's bins, `[fields, bins + 1]`; a field with fewer bins
            repeats its greatest edge. Checkpoints include them. Before `set_edges`, a new model has
            equal bins in [0, 1].
    """

    def __init__(self, num_fields: int, dim: int, options: NumericalOptions, seed: int) -> None:
        super().__init__(num_fields, dim, options, seed)
        self.bins = options.bins
        self.edges: Tensor
        equal = torch.linspace(0, 1, self.bins + 1)
        self.register_buffer("edges", equal.repeat(num_fields, 1))

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


class PiecewiseLinear(Binned):
    """A linear layer over the piecewise-linear encoding (Gorishniy et al., 2022, section 3.2).

    The encoding has a number for each bin of the field: 0 for bins above the value, 1 for bins
    below, and, for the value's own bin, the share of it that is below the value. Values beyond the
    edges are clamped. The product with the encoding, which is nearly all 0 and 1, is not computed
    as such: it is a running sum over the layer's rows plus a share of the next row.
    """

    def __init__(self, num_fields: int, dim: int, options: NumericalOptions, seed: int) -> None:
        super().__init__(num_fields, dim, options, seed)
        bound = self.bins**-0.5
        self.weight = self._drawn("weight", num_fields, self.bins, dim, bound=bound)
        self.bias = self._drawn("bias", num_fields, dim, bound=bound)

    def forward(self, numerical: Tensor) -> Tensor:
        return ops.piecewise_linear(numerical.float(), self.edges, self.weight, self.bias)

    def exportable(self) -> nn.Module:
        with torch.no_grad():
            vectors, places = ops.piecewise_tables(self.edges, self.weight, self.bias)
        return _ExportedBins(self.edges, self.bins, vectors, places)


class BinIds(Binned):
    """A row of a small table for each bin, like the row of an id.

    A field with n edges has n bins: from each edge up to the next, and from the greatest edge on.
    Values below the least edge are in the first bin. A field with few values thus has a bin for
    each value.
    """

    def __init__(self, num_fields: int, dim: int, options: NumericalOptions, seed: int) -> None:
        super().__init__(num_fields, dim, options, seed)
        rows = self.bins + 1
        self.weight = self._drawn("weight", num_fields, rows, dim, bound=rows**-0.5)

    def forward(self, numerical: Tensor) -> Tensor:
        bins = (ops.edges_up_to(numerical.float(), self.edges) - 1).clamp(0)
        return F.embedding(_rows(bins, self.bins + 1), self.weight.flatten(0, 1))

    def exportable(self) -> nn.Module:
        return _ExportedBins(self.edges, self.bins + 1, self.weight.detach().flatten(0, 1), None)


class Periodic(NumericalEmbedding):
    """PLR: relu of a linear layer over sines and cosines (Gorishniy et al., 2022, section 3.3).

    A field's frequencies c are trained and start as N(0, sigma); its value x enters the layer as
    sin(2 pi c x) and cos(2 pi c x).
    """

    def __init__(self, num_fields: int, dim: int, options: NumericalOptions, seed: int) -> None:
        super().__init__(num_fields, dim, options, seed)
        count = options.frequencies
        random, values = generator(seed, "numerical.frequencies"), torch.empty(num_fields, count)
        self.frequencies = nn.Parameter(fill_normal(values, options.sigma, random))
        bound = (2 * count) ** -0.5
        self.weight = self._drawn("weight", num_fields, 2 * count, dim, bound=bound)
        self.bias = self._drawn("bias", num_fields, dim, bound=bound)

    def forward(self, numerical: Tensor) -> Tensor:
        angles = 2 * math.pi * numerical.float().unsqueeze(-1) * self.frequencies
        waves = torch.cat([angles.sin(), angles.cos()], -1)
        vectors = torch.matmul(waves.transpose(0, 1), self.weight).transpose(0, 1)
        return (vectors + self.bias).relu()


NUMERICAL_EMBEDDINGS: dict[str, type[NumericalEmbedding]] = {  # by command-line name
    "piecewise": PiecewiseLinear,
    "periodic": Periodic,
    "bins": BinIds,
}


def _rows(bins: Tensor, rows_a_field: int) -> Tensor:
    """Returns the rows of bins `[samples, fields]` in the concatenated tables of all fields."""
    first = torch.arange(bins.shape[1], device=bins.device) * rows_a_field
    return bins + first


class _ExportedBins(nn.Module):
    """Bisects for a value's bin with one look-up per bit, since ONNX has no search operator."""

    def __init__(self, edges: Tensor, rows: int, vectors: Tensor, places: Tensor | None) -> None:
        super().__init__()
        num_fields, count = edges.shape
        self.steps = [1 << bit for bit in reversed(range(count.bit_length()))]
        self.width = 2 * self.steps[0]
        self.interpolates, self.last = places is not None, rows - 1
        padded = F.pad(edges, (0, self.width - count), value=math.inf)
        self.edges: Tensor
        self.vectors: Tensor
        self.places: Tensor
        self.first: Tensor
        self.register_buffer("edges", padded.reshape(-1, 1))
        self.register_buffer("vectors", vectors)
        self.register_buffer("places", torch.zeros(0, 2) if places is None else places)
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
        if not self.interpolates:
            return vectors
        edge, inverse = F.embedding(rows, self.places).unbind(-1)
        shares = ((numerical - edge) * inverse).clamp(0, 1)
        starts, steps = vectors.chunk(2, -1)
        return starts + steps * shares.unsqueeze(-1)
