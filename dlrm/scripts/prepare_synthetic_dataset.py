"""Writes a synthetic dataset of random rows in the split-binary format.

    dlrm synthetic --synthetic_dataset_dir DATASET

`python -m dlrm.scripts.prepare_synthetic_dataset` works alike.
"""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlrm.data.clicks.config import IDS
from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.scripts.common.table_flags import say_progress
from dlrm.settings import check_settings, setting

if TYPE_CHECKING:
    from dlrm.data.clicks.feature_spec import FeatureSpec


@dataclass(frozen=True)
class SyntheticConfig:
    """The features, their random rows, and their place; field names are those of the flags."""

    synthetic_dataset_num_entries: int = setting(2**25, "number of samples of each split", least=1)
    num_numerical_features: int = setting(13, "number of numerical features", least=0)
    synthetic_dataset_table_sizes: tuple[int, ...] = setting(
        (100_000,) * 26, "number of rows of each table", least=1
    )
    feature_spec: str | None = setting(
        None,
        "specification to follow instead of --num_numerical_features and "
        "--synthetic_dataset_table_sizes",
        uri="read",
    )
    synthetic_dataset_dir: str = setting(
        "/tmp/dlrm_synthetic_data", "directory to write to", uri="replace"
    )
    seed: int = setting(12345, "seed of the random values", least=0)
    synthetic_ids: str = setting("uniform", "distribution of the ids over each table", choices=IDS)

    def __post_init__(self) -> None:
        check_settings(self)


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    return run_command(ConfigFlags([("Flags", SyntheticConfig)]), _write, __doc__, arguments)


def _write(values: Values) -> None:
    from tqdm import tqdm

    from dlrm.data.clicks.synthetic import write_synthetic_dataset  # torch takes seconds to import

    own = values.config(SyntheticConfig)
    rows, folder = own.synthetic_dataset_num_entries, own.synthetic_dataset_dir
    spec = _spec(values)
    num_bytes = sum(spec.dtype(name).itemsize for name in spec.feature_spec)
    total = rows * len(spec.splits)
    say_progress(f"dataset: {folder}")
    size = f"{total * num_bytes / 1e9:.3g} GB"
    say_progress(f"{', '.join(spec.splits)}: {rows} rows each, {size} in all")
    with tqdm(total=total, unit="row", unit_scale=True, disable=None) as bar:
        write_synthetic_dataset(
            folder, spec, rows, seed=own.seed, ids=own.synthetic_ids, on_write=bar.update
        )
    print("complete")


def _spec(values: Values) -> "FeatureSpec":
    from dlrm.data.clicks.feature_spec import FeatureSpec

    own = values.config(SyntheticConfig)
    if own.feature_spec is not None:
        for flag in ("num_numerical_features", "synthetic_dataset_table_sizes"):
            if flag in values.given:
                raise ValueError(f"--{flag}: expected no --feature_spec beside it, got both")
        return FeatureSpec.load(own.feature_spec)
    return FeatureSpec.default(
        own.synthetic_dataset_dir, own.num_numerical_features, own.synthetic_dataset_table_sizes
    )


if __name__ == "__main__":
    sys.exit(main())
