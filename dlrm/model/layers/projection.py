"""Projects vectors of narrow tables to the width of the interaction."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from dlrm.model.layers.initialize import fill_normal, generator


class Projections(nn.Module):
    """Mixed-dimension embeddings (Ginart et al., 2019, arXiv 1909.11810): a matrix for each table.

    The matrix of table i, `[columns of the table, dim]`, is parameter "i"; tables with `dim`
    columns have none. Results have the variance of the table's values at first.

    Args:
        dims: columns of each field's vector.
        tables: number of each field's table; fields of one table share its matrix.
        dim: columns of the results.
    """

    def __init__(self, dims: Sequence[int], tables: Sequence[int], dim: int, seed: int = 0) -> None:
        super().__init__()
        self.dim = dim
        for own, table in zip(dims, tables, strict=True):
            if own < dim and str(table) not in self._parameters:
                matrix = torch.empty(own, dim)
                fill_normal(matrix, own**-0.5, generator(seed, f"projections.{table}"))
                self.register_parameter(str(table), nn.Parameter(matrix))
        order = by_width(dims)
        self._groups = [
            (width, [str(tables[field]) for field in fields])
            for width, fields in groupby(order, key=lambda field: dims[field])
        ]
        self._sizes = [width * len(names) for width, names in self._groups]
        self._in_order = order == sorted(order)
        self._order: Tensor
        self._places: Tensor
        numbers = torch.tensor(order, dtype=torch.int64)
        self.register_buffer("_order", numbers, persistent=False)
        self.register_buffer("_places", numbers.argsort(), persistent=False)

    def forward(self, vectors: Tensor) -> Tensor:
        """Returns `[samples, fields, dim]`.

        Args:
            vectors: vectors of all fields, concatenated in the order of `by_width`, `[samples, sum
                of the fields' columns]`.
        """
        projected = []
        for own, (width, names) in zip(vectors.split(self._sizes, 1), self._groups, strict=True):
            found = own.unflatten(1, (len(names), width))
            if width < self.dim:
                matrices = torch.stack([self.get_parameter(name) for name in names])
                found = torch.bmm(found.transpose(0, 1), matrices.to(own.dtype)).transpose(0, 1)
            projected.append(found)
        joined = projected[0] if len(projected) == 1 else torch.cat(projected, 1)
        return joined if self._in_order else _Reordered.apply(joined, self._places, self._order)

    def whole(self, table: int, rows: Tensor) -> Tensor:
        """Returns rows of a table as rows of `dim` columns, for look-ups without projections."""
        matrix = self._parameters.get(str(table))
        return rows if matrix is None else rows.float() @ matrix


class _Reordered(torch.autograd.Function):
    """Selects all fields in another order; torch's gradient of a selection adds up."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, places: Tensor, order: Tensor) -> Tensor:
        ctx.order = order
        return vectors.index_select(1, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(1, ctx.order), None, None


def by_width(dims: Sequence[int]) -> list[int]:
    """Returns the numbers of fields, those with the fewest columns first."""
    return sorted(range(len(dims)), key=lambda field: dims[field])
