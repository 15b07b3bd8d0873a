"""Turns rows in NVIDIA's binary format into a dataset of one file per feature, in order.

    dlrm split-dataset --dataset DIR --output DATASET

It runs the stages of `dlrm prepare`; the ids stay as they are. `dlrm train` also trains on the
binary rows (`--dataset_type binary`); one file per feature has narrower ids and half the bytes.
`preproc/split_dataset.py` works alike.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dlrm.data import names
from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.limits import check_features
from dlrm.preproc.options import RunConfig
from dlrm.scripts.common.table_flags import NOT_OPTIONS, PREPARATION, say_progress
from dlrm.settings import REQUIRED, setting

if TYPE_CHECKING:
    from dlrm.data.schema.schema import Schema


@dataclass(frozen=True)
class SplitDatasetConfig:
    """The rows, and the place of the dataset; field names are those of the flags."""

    dataset: Path = setting(REQUIRED, "directory with train_data.bin, ...", uri="read")
    output: Path = setting(REQUIRED, "directory to write the dataset to, new or empty", uri="write")
    batch_size: int = setting(32768, "not used: memory is bounded", least=1)
    numerical_features: int = setting(13, "number of numerical features", least=0)

    def __post_init__(self) -> None:
        check_features("--numerical_features", self.numerical_features)


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    line = ConfigFlags([("Dataset", SplitDatasetConfig), *PREPARATION], without=NOT_OPTIONS)
    hint = "the same command resumes the run"
    return run_command(line, _split, __doc__, arguments, hint=hint)


def _split(values: Values) -> None:
    from dlrm.data.clicks.readers import binary_file  # torch takes seconds to import
    from dlrm.data.layout import read_model_size
    from dlrm.data.tables.formats.base import TableFile
    from dlrm.data.tables.formats.binary_rows import BinaryRows
    from dlrm.data.verification import Verifier
    from dlrm.preproc.tables.options import TableOptions
    from dlrm.preproc.tables.preset import prepare_preset

    own, run = values.config(SplitDatasetConfig), values.config(RunConfig)
    paths = {split: binary_file(own.dataset, split) for split in names.SPLITS}
    sizes = read_model_size(own.dataset)
    Verifier(own.dataset, names.KIND, "first").check(filter(None, paths.values()))
    file_format = BinaryRows(own.numerical_features, len(sizes))
    options = values.config(
        TableOptions, schema=_schema(own.numerical_features, sizes), output_ordering="input"
    )
    tables = {split: [TableFile(path, file_format)] for split, path in paths.items() if path}
    how = {"restart": run.restart, "say": say_progress}
    prepare_preset(options, tables, own.output, run.cores, **how)


def _schema(num_numerical: int, sizes: list[int]) -> "Schema":
    from dlrm.preproc.tables.preset import plain_schema

    numerical = map(names.numerical_name, range(num_numerical))
    categorical = map(names.categorical_name, range(len(sizes)))
    return plain_schema(names.LABEL, numerical, dict(zip(categorical, sizes, strict=True)))


if __name__ == "__main__":
    sys.exit(main())
