"""Turns rows in NVIDIA's binary format into a dataset of one file per feature, in order.

    python -m dlrm.scripts.split_dataset --dataset DIR --output DATASET

`main` also trains on the binary rows (`--dataset_type binary`); one file per feature has narrower
ids and half the bytes.
"""

from pathlib import Path

from absl import flags

from dlrm.data.clicks import layout
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.readers import open_binary
from dlrm.data.clicks.writer import SplitWriter
from dlrm.data.verification import Verifier
from dlrm.files import staged_directory
from dlrm.limits import check_features
from dlrm.scripts.common.command import no_arguments, run_command

FLAGS = flags.FLAGS


def define_flags() -> None:
    flags.DEFINE_string("dataset", None, "directory with train_data.bin, ...", required=True)
    flags.DEFINE_string(
        "output", None, "directory to write the dataset to, new or empty", required=True
    )
    flags.DEFINE_integer("batch_size", 32768, "number of rows copied at a time", lower_bound=1)
    flags.DEFINE_integer("numerical_features", 13, "number of numerical features", lower_bound=0)


def main(argv: list[str]) -> None:
    no_arguments(argv)
    check_features("--numerical_features", FLAGS.numerical_features)
    source, output = Path(FLAGS.dataset), Path(FLAGS.output)
    for split, rows in split_dataset(
        source, output, FLAGS.numerical_features, FLAGS.batch_size
    ).items():
        print(f"{split}: {rows:,} rows")
    print(f"{output}: complete")


def split_dataset(
    source: Path, output: Path, num_numerical: int, batch_size: int = 32768
) -> dict[str, int]:
    """Converts a binary dataset; returns the rows of each split.

    Raises:
        FileNotFoundError: a file of the binary dataset is missing.
        ValueError: a file is damaged, or a value is out of range.
        FileExistsError: `output` exists.
    """
    verifier = Verifier(source, layout.KIND, "first")
    opened = {
        split: open_binary(source, split, num_numerical, batch_size, verifier=verifier)
        for split in layout.SPLITS
    }
    splits = {split: dataset for split, dataset in opened.items() if dataset is not None}
    sizes = splits["train"].table_sizes
    with staged_directory(output) as staging:
        spec = FeatureSpec.default(staging, num_numerical, sizes, list(splits))
        for split, dataset in splits.items():
            dataset.check_files()
            with SplitWriter(spec, split) as writer:
                for index in range(len(dataset)):
                    numerical, ids, labels, *_ = dataset.batch(index)
                    writer.write(labels.numpy(), numerical.numpy(), list(ids.numpy().T))
        spec.save()
        layout.write_model_size(staging, sizes)
        rows = {split: dataset.num_samples for split, dataset in splits.items()}
        layout.write_dataset_manifest(staging, rows, sizes, {"split_from": source.name})
    return rows


if __name__ == "__main__":
    define_flags()
    run_command(main)
