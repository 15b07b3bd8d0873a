"""The embedding tables as they are served: in float32, or quantized to float16."""

import torch
from torch import Tensor

from dlrm.model.dlrm import DLRM

_ROWS_AT_ONCE = 1 << 18


def quantize_tables(model: DLRM, precision: str) -> Tensor:
    """Returns the rows of all tables, concatenated, float32 or float16 `[rows, dim]`.

    At "fp32" float32 rows are shared, not copied.

    Raises:
        ValueError: a value is infinite, or too large for float16; the message names the table.
    """
    assert precision in ("fp32", "fp16"), precision
    dtype = torch.float32 if precision == "fp32" else torch.float16
    tables = model.embeddings.weight.detach().to(dtype)
    rows = model.config.embedding_rows
    _check_finite(tables, rows)
    if model.wide is not None and dtype == torch.float16:
        _check_finite(model.wide.weight.detach().half(), rows)
    return tables


def _check_finite(tables: Tensor, table_rows: tuple[int, ...]) -> None:
    for table, part in enumerate(tables.split(table_rows)):
        if not all(chunk.isfinite().all() for chunk in part.split(_ROWS_AT_ONCE)):
            raise ValueError(
                f"table {table}: a value is infinite, or beyond float16 (up to 65504), in which "
                "quantized tables store values; fp32 tables do not"
            )
