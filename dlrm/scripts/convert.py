"""Turns a dataset back into Parquet: python -m dlrm.scripts.convert --dataset DIR --output DIR

    python -m dlrm.scripts.convert --dataset adult --output adult_parquet                # values
    python -m dlrm.scripts.convert --dataset adult --output adult_parquet --values ids

Each split is a folder with a Parquet file, whose rows are those of the dataset in its order.
"""

from pathlib import Path

from absl import flags

from dlrm.data.verification import VERIFY_DATA
from dlrm.preproc.convert_to_parquet import VALUES, convert_to_parquet
from dlrm.scripts.common.command import no_arguments, run_command
from dlrm.scripts.common.config_flags import ALLOW_LINKS_HELP

FLAGS = flags.FLAGS
OUTPUT_FORMATS = ("parquet",)


def define_flags() -> None:
    flags.DEFINE_string("dataset", None, "the dataset, split-binary", required=True)
    flags.DEFINE_string("output", None, "directory to write", required=True)
    flags.DEFINE_enum("output_format", OUTPUT_FORMATS[0], OUTPUT_FORMATS, "format to write")
    flags.DEFINE_enum(
        "values",
        VALUES[0],
        VALUES,
        "of categorical features: decoded writes what ids stand for, null where they stand for no "
        "single value; ids writes them as they are",
    )
    flags.DEFINE_enum(
        "verify_data", VERIFY_DATA[0], VERIFY_DATA, "when files are compared with their checksums"
    )
    flags.DEFINE_boolean("allow_links", False, ALLOW_LINKS_HELP)
    flags.DEFINE_boolean("overwrite", False, "replace earlier output once this one is whole")


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
