#!/usr/bin/env python3
"""Converts Parquet that Spark transformed to NVIDIA's binary rows.

Row k is row k of the Parquet, with files in order of their names.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dlrm.data import names
from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.settings import REQUIRED, setting


@dataclass(frozen=True)
class ParquetConfig:
    """The Parquet, and the binary rows; field names are those of the flags."""

    src_dir: Path = setting(REQUIRED, "has train/ and test/", uri="read")
    dst_dir: Path = setting(REQUIRED, "gets train_data.bin, ...", uri="replace")
    intermediate_dir: str | None = setting(None, "unused: nothing is written on the way")
    parallel_jobs: int | None = setting(None, "number of processes, up to all cores")


def _run(values: Values) -> None:
    import pyarrow.types as types

    from dlrm.data.layout import read_model_size
    from dlrm.data.tables.files import PARQUET, TableFile
    from dlrm.preproc.tables.options import TableOptions
    from dlrm.preproc.tables.preset import plain_schema, prepare_preset

    source, tables = values["src_dir"], {}
    for split in names.SPLITS:
        found = sorted(path for path in (source / split).rglob("*.parquet") if path.is_file())
        if found:
            tables[split] = [TableFile(path, PARQUET) for path in found]
        elif split != "validation":
            why = "; run_spark.sh writes the dataset itself, and no Parquet"
            raise FileNotFoundError(f"{source / split}: no Parquet file{why}")
    first = tables["train"][0].path
    label, *columns = PARQUET.open(first, first).schema
    numerical = [column.name for column in columns if types.is_floating(column.type)]
    ids = [column.name for column in columns if column.name not in numerical]
    path = source / names.MODEL_SIZE
    sizes = read_model_size(source) if path.is_file() else [None] * len(ids)
    if len(sizes) != len(ids):
        raise ValueError(f"{path}: expected {len(ids)} tables, got {len(sizes)}")
    schema = plain_schema(label.name, numerical, dict(zip(ids, sizes, strict=True)))
    options = TableOptions(schema, output_ordering="input", output_format="binary")
    cores = os.cpu_count() or 1
    jobs = min(values["parallel_jobs"] or cores, cores)
    prepare_preset(options, tables, values["dst_dir"], jobs, replace=True)


if __name__ == "__main__":
    sys.exit(run_command(ConfigFlags([("Flags", ParquetConfig)]), _run, __doc__, usage=2))
