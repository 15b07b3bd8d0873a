"""Turns rows in NVIDIA's binary format into a dataset of one file per feature, in order.

    python -m dlrm.scripts.split_dataset --dataset DIR --output DATASET

It runs the stages of `dlrm.scripts.prepare`; the ids stay as they are. `main` also trains on the
binary rows (`--dataset_type binary`); one file per feature has narrower ids and half the bytes.
"""

from pathlib import Path

from absl import flags

from dlrm.data.clicks import layout
from dlrm.data.clicks.readers import binary_file
from dlrm.data.tables.kinds.binary_rows import BinaryRows
from dlrm.data.tables.kinds.kind import TableFile
from dlrm.data.transform.schema import CategoricalField, Label, NumericalField, Schema
from dlrm.data.verification import Verifier
from dlrm.limits import check_features
from dlrm.preproc.preset import prepare_preset
from dlrm.preproc.tables.options import TableOptions
from dlrm.scripts.common import table_flags
from dlrm.scripts.common.command import no_arguments, run_command
from dlrm.scripts.common.table_flags import define_preparation_flags, table_options

FLAGS = flags.FLAGS


def define_flags() -> None:
    flags.DEFINE_string("dataset", None, "directory with train_data.bin, ...", required=True)
    flags.DEFINE_string(
        "output", None, "directory to write the dataset to, new or empty", required=True
    )
    flags.DEFINE_integer("batch_size", 32768, "not used: memory is bounded", lower_bound=1)
    flags.DEFINE_integer("numerical_features", 13, "number of numerical features", lower_bound=0)
    define_preparation_flags()
    flags.adopt_module_key_flags(table_flags)


def main(argv: list[str]) -> None:
    no_arguments(argv)
    check_features("--numerical_features", FLAGS.numerical_features)
    source, output = Path(FLAGS.dataset), Path(FLAGS.output)
    paths = {split: binary_file(source, split) for split in layout.SPLITS}
    sizes = layout.read_model_size(source)
    Verifier(source, layout.KIND, "first").check(filter(None, paths.values()))
    kind = BinaryRows(FLAGS.numerical_features, len(sizes))
    options = TableOptions(
        _schema(FLAGS.numerical_features, sizes), output_ordering="input", **table_options()
    )
    tables = {split: [TableFile(path, kind)] for split, path in paths.items() if path}
    result = prepare_preset(options, tables, output, FLAGS.cores, restart=FLAGS.restart)
    for split, total in result["totals"].items():
        print(f"{split}: {total.get('rows', 0):,} rows")
    print(f"{output}: complete")


def _schema(num_numerical: int, sizes: list[int]) -> Schema:
    numerical = map(layout.numerical_name, range(num_numerical))
    categorical = map(layout.categorical_name, range(len(sizes)))
    return Schema(
        Label(layout.LABEL),
        tuple(NumericalField(name, "none", required=True) for name in numerical),
        tuple(
            CategoricalField(name, "id", cardinality=size)
            for name, size in zip(categorical, sizes, strict=True)
        ),
    )


if __name__ == "__main__":
    define_flags()
    run_command(main, hint="the same command resumes the run")
