#!/usr/bin/env python3
"""Converts Parquet that Spark transformed to NVIDIA's binary rows."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dlrm.command_line import end_while_imported

end_while_imported(__name__)

from dlrm.command_line import fail
from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.preproc.logs.options import DATASET
from dlrm.settings import REQUIRED, setting


@dataclass(frozen=True)
class ParquetConfig:
    """The Parquet, and the binary rows; field names are those of the flags."""

    src_dir: Path = setting(REQUIRED, "has train/ and test/", uri="read")
    dst_dir: Path = setting(REQUIRED, "gets train_data.bin, ...", uri="replace")
    intermediate_dir: str | None = setting(None, "unused: nothing is written on the way")
    parallel_jobs: int | None = setting(None, "number of processes, up to all cores")


def _run(values: Values) -> None:
    from dlrm.preproc.convert_to_binary import convert

    source = values["src_dir"]
    if (source / DATASET).is_dir():
        fail(f"{source}: run_spark.sh wrote no Parquet but {source / DATASET} itself")
    cores = os.cpu_count() or 1
    convert(source, values["dst_dir"], min(values["parallel_jobs"] or cores, cores))


if __name__ == "__main__":
    sys.exit(run_command(ConfigFlags([("Flags", ParquetConfig)]), _run, __doc__, usage=2))
