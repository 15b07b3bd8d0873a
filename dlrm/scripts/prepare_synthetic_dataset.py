"""Writes a synthetic dataset of random rows in the split-binary format."""

import sys
from pathlib import Path

from absl import flags
from tqdm import tqdm

from dlrm.data.clicks.config import IDS
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.synthetic import write_synthetic_dataset
from dlrm.scripts.common.command import no_arguments, run_command

FLAGS = flags.FLAGS


def define_flags() -> None:
    flags.DEFINE_integer(
        "synthetic_dataset_num_entries", 2**25, "number of samples of each split", lower_bound=1
    )
    flags.DEFINE_integer(
        "num_numerical_features", 13, "number of numerical features", lower_bound=0
    )
    flags.DEFINE_list(
        "synthetic_dataset_table_sizes", ["100000"] * 26, "number of rows of each table"
    )
    flags.DEFINE_string(
        "feature_spec",
        None,
        "specification to follow instead of --num_numerical_features and "
        "--synthetic_dataset_table_sizes",
    )
    flags.DEFINE_string(
        "synthetic_dataset_dir", "/tmp/dlrm_synthetic_data", "directory to write to"
    )
    flags.DEFINE_integer("seed", 12345, "seed of the random values", lower_bound=0)
    flags.DEFINE_enum("synthetic_ids", "uniform", IDS, "distribution of the ids over each table")


def main(argv: list[str]) -> None:
    no_arguments(argv)
    rows = FLAGS.synthetic_dataset_num_entries
    spec = _spec()
    num_bytes = sum(spec.dtype(name).itemsize for name in spec.feature_spec)
    total = rows * len(spec.splits)
    print(f"dataset: {FLAGS.synthetic_dataset_dir}")
    print(f"{', '.join(spec.splits)}: {rows} rows each, {total * num_bytes / 1e9:.3g} GB in all")
    sys.stdout.flush()
    with tqdm(total=total, unit="row", unit_scale=True, disable=None) as bar:
        write_synthetic_dataset(
            FLAGS.synthetic_dataset_dir,
            spec,
            rows,
            seed=FLAGS.seed,
            ids=FLAGS.synthetic_ids,
            on_write=bar.update,
        )
    print("complete")


def _spec() -> FeatureSpec:
    if FLAGS.feature_spec is None:
        return FeatureSpec.default(
            Path(FLAGS.synthetic_dataset_dir), FLAGS.num_numerical_features, _table_sizes()
        )
    for flag in ("num_numerical_features", "synthetic_dataset_table_sizes"):
        if FLAGS[flag].present:
            raise ValueError(f"--{flag}: expected no --feature_spec beside it, got both")
    return FeatureSpec.load(FLAGS.feature_spec)


def _table_sizes() -> list[int]:
    sizes = FLAGS.synthetic_dataset_table_sizes
    for size in sizes:
        if not size.strip().isdecimal() or int(size) < 1:
            raise ValueError(
                f"--synthetic_dataset_table_sizes: expected integers of 1 or more, got {size!r}"
            )
    return [int(size) for size in sizes]


if __name__ == "__main__":
    define_flags()
    run_command(main)
