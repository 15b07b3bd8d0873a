"""Turns Parquet that Spark transformed NVIDIA's way into a dataset of NVIDIA's binary rows.

`preproc/parquet_to_binary.py` is its command; `dlrm prepare` reads such Parquet by a schema.
"""

from pathlib import Path

from dlrm.data.clicks import names
from dlrm.data.clicks.layout import read_model_size
from dlrm.data.tables.files import PARQUET
from dlrm.data.tables.kinds.kind import TableFile
from dlrm.data.transform.schema import Schema
from dlrm.preproc.preset import plain_schema, prepare_preset
from dlrm.preproc.tables.options import TableOptions


def convert(source: Path, output: Path, cores: int | None = None) -> None:
    """Writes a dataset, whose row k is row k of the Parquet, with files in order of their names.

    Args:
        source: has train/, test/ and possibly validation/, and model_size.json unless the sizes of
            tables are those of the greatest ids.
        output: replaced if it is a dataset.

    Raises:
        FileNotFoundError, ValueError: there is no such Parquet; the message names the file.
        FileExistsError: `output` may not be replaced.
    """
    tables = {}
    for split in names.SPLITS:
        found = sorted(path for path in (source / split).rglob("*.parquet") if path.is_file())
        tables[split] = [TableFile(path, PARQUET) for path in found]
        if not found and split != "validation":
            raise FileNotFoundError(f"{source / split}: no Parquet file")
    options = TableOptions(
        _schema(source, tables["train"][0].path),
        output_ordering="input",
        output_format="binary",
    )
    prepare_preset(options, {k: v for k, v in tables.items() if v}, output, cores, replace=True)


def _schema(source: Path, first: Path) -> Schema:
    """Returns the label, floating-point numbers and integer ids that a file has as columns."""
    import pyarrow.types as types

    label, *columns = PARQUET.open(first, first).schema
    numerical = [column.name for column in columns if types.is_floating(column.type)]
    ids = [column.name for column in columns if types.is_integer(column.type)]
    for column in columns:
        if column.name not in {*numerical, *ids}:
            expected = "expected floating-point numbers or ids"
            raise ValueError(f"{first}: column {column.name}: {expected}, got {column.type}")
    sizes: list[int] | list[None] = [None] * len(ids)
    if (source / names.MODEL_SIZE).is_file() and len(sizes := read_model_size(source)) != len(ids):
        raise ValueError(
            f"{source / names.MODEL_SIZE}: expected {len(ids)} tables, got {len(sizes)}"
        )
    return plain_schema(label.name, numerical, dict(zip(ids, sizes, strict=True)))
