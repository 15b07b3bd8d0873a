"""Converts a dataset to Parquet: python -m dlrm.scripts.convert --dataset DIR --output DIR

    python -m dlrm.scripts.convert --dataset adult --output adult_parquet                # values
    python -m dlrm.scripts.convert --dataset adult --output adult_parquet --values ids

Each split is a directory with a Parquet file, whose rows are in the order of the dataset.
"""

from pathlib import Path

from absl import flags

from dlrm.data.clicks.config import DataConfig
from dlrm.data.verification import VERIFY_DATA
from dlrm.preproc.convert_to_parquet import VALUES, convert_to_parquet
from dlrm.scripts.common.command import no_arguments, run_command
from dlrm.settings import settings_of

FLAGS = flags.FLAGS
OUTPUT_FORMATS = ("parquet",)


def define_flags() -> None:
    flags.DEFINE_string("dataset", None, "split-binary dataset to read", required=True)
    flags.DEFINE_string("output", None, "directory to write", required=True)
    flags.DEFINE_enum("output_format", OUTPUT_FORMATS[0], OUTPUT_FORMATS, "format to write")
    flags.DEFINE_enum(
        "values",
        VALUES[0],
        VALUES,
        "contents of categorical columns: decoded, the values that ids stand for, null for ids "
        "without a single value; ids, the ids themselves",
    )
    flags.DEFINE_enum(
        "verify_data",
        VERIFY_DATA[0],
        VERIFY_DATA,
        "compare files with their checksums: first, before their first use; always, in every "
        "run; never",
    )
    flags.DEFINE_boolean("allow_links", False, settings_of(DataConfig)["allow_links"].help)
    flags.DEFINE_boolean("overwrite", False, "replace earlier output once the new one is complete")


def main(argv: list[str]) -> None:
    no_arguments(argv)
    rows = convert_to_parquet(
        Path(FLAGS.dataset),
        Path(FLAGS.output),
        FLAGS.values,
        FLAGS.overwrite,
        FLAGS.verify_data,
        FLAGS.allow_links,
    )
    shown = "  ".join(f"{name} {count:,}" for name, count in rows.items())
    print(f"{FLAGS.output}: {shown} rows; complete")


if __name__ == "__main__":
    define_flags()
    run_command(main)
