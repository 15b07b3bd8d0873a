"""The embedding tables as they are served: in float32, or quantized to float16."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dlrm.model.dlrm import DLRM
from dlrm.model.ensemble import Ensemble, members_of
from dlrm.model.tables.layout import TableParameters

_ROWS_AT_ONCE = 1 << 18


def quantize_tables(model: DLRM | Ensemble, precision: str) -> Tensor:
    """Returns the rows of all tables, concatenated, float32 or float16 `[rows, dim]`.

    At "fp32" float32 rows are shared, not copied. The rows of an ensemble are those of its members,
    concatenated. Rows of narrow tables are projected to the width of the interaction.

    Raises:
        ValueError: a value is infinite, or too large for float16; the message names the table.
    """
    assert precision in ("fp32", "fp16"), precision
    dtype = torch.float32 if precision == "fp32" else torch.float16
    members = members_of(model)
    parts = [weight.to(dtype) for member in members for weight in _weights(member)]
    tables = parts[0] if len(parts) == 1 else torch.cat(parts)
    rows = model.config.embedding_rows
    _check_finite(tables, rows * len(members))
    for member in members:
        if member.wide is not None and dtype == torch.float16:
            _check_finite(wide_rows(member).half(), rows)
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


def _check_finite(tables: Tensor, table_rows: tuple[int, ...]) -> None:
    for table, part in enumerate(tables.split(table_rows)):
        if not all(chunk.isfinite().all() for chunk in part.split(_ROWS_AT_ONCE)):
            raise ValueError(
                f"table {table}: a value is infinite, or beyond float16 (up to 65504), in which "
                "quantized tables store values; fp32 tables do not"
            )
