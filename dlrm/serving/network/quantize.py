"""Quantizes embedding tables to 16 or 8 bits."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm.model.dlrm import DLRM
from dlrm.model.ensemble import Ensemble, members_of
from dlrm.model.tables.layout import TableParameters

_ROWS_AT_ONCE = 1 << 18
_LEVELS = 127  # on either side of a row's middle, so that they fit int8


class QuantizedTables(NamedTuple):
    """The rows of all tables, concatenated.

    Attributes:
        values: `[rows, dim]`, float32, float16 or int8.
        scale, offset: for int8 rows, float16 `[rows, 1]`: a value is `values * scale + offset`.
    """

    values: Tensor
    scale: Tensor | None = None
    offset: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Returns their size in bytes."""
        return sum(t.numel() * t.element_size() for t in self if t is not None)

    def rows(self, begin: int, end: int) -> "QuantizedTables":
        """Returns some of the rows."""
        return QuantizedTables(*(None if t is None else t[begin:end] for t in self))  # type: ignore[arg-type]

    def float(self) -> Tensor:
        """Returns the rows as float32, as the served model computes with them."""
        if self.scale is None or self.offset is None:
            return self.values.float()
        return self.values.float() * self.scale.float() + self.offset.float()


def quantize_tables(model: DLRM | Ensemble, precision: str) -> QuantizedTables:
    """Quantizes the tables of a model; at "fp32" float32 rows are shared, not copied.

    The rows of an ensemble are those of its members, concatenated. Rows of narrow tables are
    projected to the width of the interaction.

    Raises:
        ValueError: a value is too large for float16; the message names the table.
    """
    members = members_of(model)
    parts = [_quantized(weight, precision) for member in members for weight in _weights(member)]
    tables = parts[0]
    if len(parts) > 1:
        tables = QuantizedTables(
            *(None if part[0] is None else torch.cat(part) for part in zip(*parts, strict=True))  # type: ignore[arg-type]
        )
    rows = model.config.embedding_rows
    _check_finite(tables, rows * len(members))
    for member in members:
        if member.wide is not None and precision != "fp32":
            _check_finite(QuantizedTables(wide_rows(member).half()), rows)
    return tables


def wide_rows(model: DLRM) -> Tensor:
    """Returns the weights of the wide term, `[rows of all tables, 1]`, table by table."""
    assert model.wide is not None, "there is no wide term"
    parameters = model.wide.table_parameters()
    if len(parameters) == 1:
        return parameters[0][0].detach()
    return torch.cat([rows for _, rows in _by_table(parameters)]).detach()


@torch.no_grad()
def _weights(model: DLRM) -> Iterator[Tensor]:
    """Yields the rows of all tables, table by table if some are projected."""
    parameters = model.embeddings.table_parameters()
    if model.projections is None:
        yield from (weight.detach() for weight, _ in parameters)
        return
    for table, rows in _by_table(parameters):
        yield model.projections.whole(table, rows.detach())


def _by_table(parameters: TableParameters) -> Iterator[tuple[int, Tensor]]:
    """Yields the number and the rows of each table, in order."""
    found: dict[int, Tensor] = {}
    for weight, held in parameters:
        sizes = [piece.num_rows for piece in held.values()]
        found.update(zip(held, weight.split(sizes), strict=True))
    yield from sorted(found.items())


def _quantized(weight: Tensor, precision: str) -> QuantizedTables:
    if precision == "fp32":
        return QuantizedTables(weight.float())
    if precision == "fp16":
        return QuantizedTables(weight.half())
    assert precision == "int8", precision
    values = torch.empty(weight.shape, dtype=torch.int8)
    scale, offset = torch.empty(2, len(weight), 1, dtype=torch.float16)
    for begin in range(0, len(weight), _ROWS_AT_ONCE):
        part = slice(begin, begin + _ROWS_AT_ONCE)
        values[part], scale[part], offset[part] = _int8_rows(weight[part].float())
    return QuantizedTables(values, scale, offset)


def _int8_rows(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Spreads each row over 255 levels around its middle: values are off by half a level at most.

    Levels use the stored float16 scale and offset, and the scale is rounded up, so that they cover
    the row's range.
    """
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    offset = ((low + high) / 2).half()
    reach = torch.maximum(high - offset.float(), offset.float() - low)
    scale = _rounded_up(reach / _LEVELS)
    divisor = scale.float().clamp_min(torch.finfo(torch.float32).tiny)
    levels = ((rows - offset.float()) / divisor).round().clamp(-_LEVELS, _LEVELS)
    return levels.to(torch.int8), scale, offset


def _rounded_up(values: Tensor) -> Tensor:
    half = values.half()
    return torch.where(half.float() < values, half.nextafter(half.new_tensor(torch.inf)), half)


def _check_finite(tables: QuantizedTables, table_rows: tuple[int, ...]) -> None:
    begin = 0
    for table, rows in enumerate(table_rows):
        part = tables.rows(begin, begin + rows)
        for tensor in (part.values, part.scale, part.offset):
            if tensor is not None and not all(
                chunk.isfinite().all() for chunk in tensor.split(_ROWS_AT_ONCE)
            ):
                raise ValueError(
                    f"table {table}: a value is infinite, or beyond float16 (up to 65504), in "
                    "which quantized tables store values or scales; fp32 tables do not"
                )
        begin += rows
