"""Prepares tables on this machine for commands whose flags determine the schema."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlrm.data.schema.schema import CategoricalField, Label, NumericalField, Schema
from dlrm.data.tables.formats.base import TableFile
from dlrm.preproc.errors import EngineError, TaskError
from dlrm.preproc.spark.session import open_engine
from dlrm.preproc.tables.options import TableOptions
from dlrm.preproc.tables.prepare_tables import prepare_tables


def plain_schema(
    label: str,
    numerical: Iterable[str],
    sizes: Mapping[str, int | None],
    required: bool = True,
) -> Schema:
    """Returns the schema of rows whose numbers and ids stay as they are.

    Args:
        sizes: field of ids -> rows of its table; None is one more than the greatest id.
        required: refuse rows without a number, instead of reading 0.
    """
    return Schema(
        Label(label),
        tuple(NumericalField(name, "none", required=required) for name in numerical),
        tuple(CategoricalField(name, "id", cardinality=size) for name, size in sizes.items()),
    )


def prepare_preset(
    options: TableOptions,
    tables: Mapping[str, Sequence[TableFile]],
    output: Path,
    cores: int | None = None,
    **how: Any,
) -> None:
    """Writes a dataset; see `prepare_tables`, whose options `how` are, but raises ValueError."""
    cores = cores or os.cpu_count() or 1
    try:
        engine = lambda spill: open_engine("local", cores, spill)  # noqa: E731
        prepare_tables(options, tables, output, engine, keep_failed=False, **how)
    except (TaskError, EngineError) as error:
        raise ValueError(str(error)) from error
