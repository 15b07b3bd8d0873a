"""Converts a dataset to Parquet: dlrm convert --dataset DIR --output DIR

    dlrm convert --dataset adult --output adult_parquet                # values
    dlrm convert --dataset adult --output adult_parquet --values ids

Each split is a directory with a Parquet file, whose rows are in the order of the dataset.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from dlrm.data.clicks.config import DataConfig
from dlrm.data.names import CONVERTED
from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.preproc.options import PARQUET_VALUES
from dlrm.settings import REQUIRED, same_setting, setting


@dataclass(frozen=True)
class ConvertConfig:
    """The dataset, and what is written of it; field names are those of the flags."""

    dataset: Path = setting(REQUIRED, "split-binary dataset to read", uri="read")
    output: Path = setting(REQUIRED, "directory to write", uri=f"write, plain, {CONVERTED}")
    values: str = setting(
        PARQUET_VALUES[0],
        "contents of categorical columns: decoded, the values that ids stand for, null for ids "
        "without a single value; ids, the ids themselves",
        choices=PARQUET_VALUES,
    )
    verify_data: str = same_setting(DataConfig, "verify_data")
    allow_links: bool = same_setting(DataConfig, "allow_links")
    overwrite: bool = setting(False, "replace earlier output once the new one is complete")


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    return run_command(ConfigFlags([("Flags", ConvertConfig)]), _convert, __doc__, arguments)


def _convert(values: Values) -> None:
    from dlrm.preproc.convert_to_parquet import convert_to_parquet

    own = values.config(ConvertConfig)
    rows = convert_to_parquet(
        own.dataset, own.output, own.values, own.overwrite, own.verify_data, own.allow_links
    )
    shown = "  ".join(f"{name} {count:,}" for name, count in rows.items())
    print(f"{own.output}: {shown} rows; complete")


if __name__ == "__main__":
    sys.exit(main())
