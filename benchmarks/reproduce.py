"""Repeats a public protocol for click models, and prints its published table beside our figure.

    python benchmarks/reproduce.py criteo_x4 --data Criteo_x4 --output criteo_x4
    python benchmarks/reproduce.py movielens_x1 --data MovielensLatest_x1 --output movielens_x1

The protocols are Criteo_x4_001 and MovielensLatest_x1 of BARS (https://openbenchmark.github.io/BARS):
Zhu et al., "BARS: Towards Open Benchmarking for Recommender Systems", SIGIR 2022. --data has their
`train.csv`, `valid.csv` and `test.csv`. Other files, by their md5 sums, are refused unless
--other_files accepts them.

`valid.csv` becomes the dataset's test rows, which choose the best weights and the learning rate,
and `test.csv` its validation rows, which are scored once, at the end. Both commands, of `dlrm
prepare` and `dlrm train`, are printed. Flags after those of this script are added to the latter's.
The same command resumes a run that was stopped.

Sources, all of https://github.com/reczoo unless they have an address:

* columns, splits, md5 sums, thresholds, widths of vectors: BARS/datasets/Criteo/README.md and
  split_criteo_x4.py; https://huggingface.co/datasets/reczoo/MovielensLatest_x1;
  BARS/docs/CTR/leaderboard/criteo_x4.md and movielenslatest_x1.md
* numbers of Criteo_x4: FuxiCTR/fuxictr/datasets/criteo.py, floor(ln(x)^2) above 2. The README of
  the data has floor(log2(x)), but the published runs have up to 220 values of a field, so they use
  the former.
* flags: the published DCN-V2 of each protocol, BARS/ranking/ctr/DCNv2/DCNv2_criteo_x4_001/README.md
  and DCNv2_movielenslatest_x1/README.md; initial tables,
  FuxiCTR/fuxictr/pytorch/layers/embeddings/feature_embedding.py
* tables: BARS/docs/CTR/leaderboard/criteo_x4_001.csv (commit bc97da0) and movielenslatest_x1.csv
  (commit 1ffaf73)

Here a missing value of a categorical field has id 0, as rare values do. Training rows are shuffled
once, and their batches anew in each pass.
"""

import argparse
import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import yaml

import dlrm
from dlrm.command_line import aligned, fail
from dlrm.documents import read_json
from dlrm.files import atomic_directory, write_atomically

FILES = {"train.csv": "input", "valid.csv": "test_input", "test.csv": "validation_input"}
TRAINING = {  # of the published runs of DCN-V2, for both protocols
    "interaction_op": "dcn",
    "cross_structure": "parallel",
    "batch_norm": "true",
    "embedding_init": "normal",  # standard deviation 0.0001
    "embedding_optimizer": "adam",
    "mlp_optimizer": "adam",
    "schedule": "constant",
    "lr": "0.001",
    "plateau_patience": "1",  # a tenth of the learning rate after a test without a new best AUC
    "early_stop": "2",
    "epochs": "100",
    "shuffle_batch_order": "true",
}


@dataclass(frozen=True)
class Protocol:
    """Files, schema, flags and published results of a protocol.

    Attributes:
        title: its name there.
        sums: file -> md5 sum.
        label: column of the labels.
        numbers: columns of integers that become categories by `bucket`.
        categories: other columns, which are categories as they are.
        type: type of these values in the schema.
        frequency_limit: occurrences in training rows from which on a value has an id.
        flags: of `dlrm train`, besides `TRAINING`.
        published: model -> AUC and log loss of the test rows.
    """

    title: str
    sums: dict[str, str]
    label: str
    numbers: list[str]
    categories: list[str]
    type: str
    frequency_limit: int
    flags: dict[str, str]
    published: dict[str, tuple[float, float]]

    @property
    def columns(self) -> list[str]:
        """Returns the columns of the files, in their order."""
        return [self.label, *self.numbers, *self.categories]

    def schema(self) -> dict[str, Any]:
        """Returns the schema of the rows that are prepared."""
        limit = {"frequency_limit": self.frequency_limit}
        fields = [{"column": name, "type": "integer", **limit} for name in self.numbers]
        fields += [{"column": name, "type": self.type, **limit} for name in self.categories]
        return {"version": 1, "label": self.label, "categorical": fields}


PROTOCOLS = {
    "criteo_x4": Protocol(
        "Criteo_x4_001",
        {
            "train.csv": "4a53bb7cbc0e4ee25f9d6a73ed824b1a",
            "valid.csv": "fba5428b22895016e790e2dec623cb56",
            "test.csv": "cfc37da0d75c4d2d8778e76997df2976",
        },
        label="Label",
        numbers=[f"I{place}" for place in range(1, 14)],
        categories=[f"C{place}" for place in range(1, 27)],
        type="string",
        frequency_limit=10,
        flags={
            "embedding_dim": "16",
            "bottom_mlp_sizes": "16",
            "cross_layers": "3",
            "top_mlp_sizes": "1000,1000,1000,1000,1000,1",
            "dropout": "0.1",
            "embedding_l2": "0.00001",
            "batch_size": "10000",
            "seed": "2019",
        },
        published={
            "LR": (0.7934, 0.4568),
            "FM": (0.8086, 0.4431),
            "AutoInt+": (0.8132, 0.4390),
            "YoutubeDNN": (0.8140, 0.4380),
            "Wide&Deep": (0.8142, 0.4377),
            "DeepFM": (0.8143, 0.4376),
            "xDeepFM": (0.8143, 0.4376),
            "DCN": (0.8144, 0.4376),
            "DCN-V2": (0.814514, 0.437631),
            "FinalMLP": (0.814584, 0.437353),
            "ONN": (0.8148, 0.4372),
            "FinalNet": (0.814966, 0.437116),
        },
    ),
    "movielens_x1": Protocol(
        "MovielensLatest_x1",
        {
            "train.csv": "efc8bceeaa0e895d566470fc99f3f271",
            "valid.csv": "e1930223a5026e910ed5a48687de8af1",
            "test.csv": "54e8c6baff2e059fe067fb9b69e692d0",
        },
        label="label",
        numbers=[],
        categories=["user_id", "item_id", "tag_id"],
        type="integer",
        frequency_limit=1,
        flags={
            "embedding_dim": "10",
            "bottom_mlp_sizes": "10",
            "cross_layers": "5",
            "top_mlp_sizes": "400,400,400,1",
            "dropout": "0.2",
            "embedding_l2": "0.01",
            "batch_size": "4096",
            "seed": "2021",
        },
        published={
            "LR": (0.9342, 0.3201),
            "FM": (0.9434, 0.2729),
            "YoutubeDNN": (0.9678, 0.2388),
            "DeepFM": (0.9685, 0.2130),
            "DCN": (0.9687, 0.2160),
            "Wide&Deep": (0.9688, 0.2161),
            "DLRM": (0.9691, 0.2150),
            "DCN-V2": (0.9691, 0.2147),
            "AutoInt+": (0.9692, 0.2148),
            "xDeepFM": (0.9697, 0.2409),
            "FinalMLP": (0.9720, 0.1966),
            "FinalNet": (0.9725, 0.1941),
        },
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("protocol", choices=PROTOCOLS)
    parser.add_argument("--data", type=Path, required=True, help="directory of the three files")
    parser.add_argument("--output", type=Path, required=True, help="directory of dataset and run")
    parser.add_argument(
        "--other_files", action="store_true", help="accept files with other md5 sums"
    )
    options, flags = parser.parse_known_args()
    try:
        reproduce(
            PROTOCOLS[options.protocol], options.data, options.output, options.other_files, flags
        )
    except (ValueError, OSError) as error:
        fail(error)


def reproduce(
    protocol: Protocol, data: Path, output: Path, other_files: bool, flags: list[str]
) -> None:
    """Prepares the files, trains, and prints the table.

    Raises:
        ValueError, OSError: what the user can fix.
    """
    sums = check_files(protocol, data, other_files)
    output.mkdir(parents=True, exist_ok=True)
    known = output / "files.json"
    if known.exists() and read_json(known) != {"sums": sums, "flags": flags}:
        raise ValueError(f"--output {output}: has a run of other files or flags; name another one")
    write_atomically(known, json.dumps({"sums": sums, "flags": flags}, indent=1) + "\n")
    schema, dataset, run = (output / name for name in ("schema.yaml", "dataset", "run"))
    write_atomically(schema, yaml.safe_dump(protocol.schema(), sort_keys=False))
    if not dataset.exists():
        files = [data / name for name in FILES]
        if protocol.numbers:
            files = converted(protocol, files, output / "rows")
        inputs = dict(zip(FILES.values(), files, strict=True))
        _command("prepare", {"schema": schema, **inputs, "output": dataset})
    training = {"dataset": dataset, "save_checkpoint_path": run, "resume": "true"}
    _command("train", {**training, **TRAINING, **protocol.flags}, *flags)
    results = dlrm.load(run).results
    ours = results["validation_auc"], results["validation_log_loss"]
    print("\n".join(report(protocol, ours, sums == protocol.sums, flags)))


def check_files(protocol: Protocol, data: Path, other_files: bool) -> dict[str, str]:
    """Returns the md5 sums of the files.

    Raises:
        ValueError: columns differ from the protocol's or, unless `other_files`, a sum does.
        OSError: a file cannot be read.
    """
    found = {}
    for name, expected in protocol.sums.items():
        path = data / name
        with path.open("rb") as file:
            header = file.readline().decode("utf-8", "backslashreplace").strip().split(",")
            if header != protocol.columns:
                columns = ",".join(protocol.columns)
                raise ValueError(f"{path}: expected the columns {columns}, got {','.join(header)}")
        found[name] = hashlib.md5(path.read_bytes()).hexdigest()
        if found[name] != expected and not other_files:
            raise ValueError(
                f"{path}: expected the md5 sum {expected} of {protocol.title}, got {found[name]}; "
                "--other_files accepts other rows"
            )
    return found


def converted(protocol: Protocol, files: list[Path], folder: Path) -> list[Path]:
    """Returns files of Parquet of the same rows, with numbers as `bucket` makes them.

    Raises:
        ValueError: a number is no integer; the message names file, column and row.
    """
    paths = [folder / f"{path.stem}.parquet" for path in files]
    if not folder.exists():
        with atomic_directory(folder) as staging:
            for source, path in zip(files, paths, strict=True):
                _convert(protocol, source, staging / path.name)
    return paths


def _convert(protocol: Protocol, source: Path, path: Path) -> None:
    types = dict.fromkeys(protocol.numbers, pa.int64()) | {protocol.label: pa.int8()}
    types |= dict.fromkeys(protocol.categories, pa.string())
    how = pa.csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True)
    try:
        with (
            pa.csv.open_csv(
                source, pa.csv.ReadOptions(use_threads=False), convert_options=how
            ) as rows,
            pa.parquet.ParquetWriter(path, rows.schema) as writer,
        ):
            for batch in rows:
                for name in protocol.numbers:
                    place = batch.schema.get_field_index(name)
                    numbers = batch.column(place).fill_null(0).to_numpy(zero_copy_only=False)
                    batch = batch.set_column(place, name, pa.array(bucket(numbers)))
                writer.write_batch(batch)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{source}: {error}") from None


def bucket(numbers: np.ndarray) -> np.ndarray:
    """Returns the categories of integers: floor(ln(x)^2) above 2, and x itself up to 2."""
    large = np.floor(np.square(np.log(np.maximum(numbers, 1)))).astype(np.int64)
    return np.where(numbers > 2, large, numbers)


def report(
    protocol: Protocol, ours: tuple[float, float], is_protocol: bool, flags: list[str]
) -> list[str]:
    """Returns the lines of the table, by ascending AUC.

    Args:
        protocol: what was run.
        ours: AUC and log loss of the rows of `test.csv`.
        is_protocol: whether the files are the protocol's.
        flags: further flags of the training.
    """
    rows = sorted([*protocol.published.items(), ("dlrm", ours)], key=lambda row: row[1][0])
    heads = [protocol.title, "AUC", "log loss"]
    lines = aligned(heads, [[model, f"{auc:.4f}", f"{loss:.4f}"] for model, (auc, loss) in rows])
    lines.append(" ".join(["dlrm: with the settings of the published DCN-V2", *flags]))
    if not is_protocol:
        lines.append("dlrm: on other files than the published figures, so they do not compare")
    return lines


def _command(name: str, flags: dict[str, Any], *others: str) -> None:
    words = ["-m", "dlrm", name, *(f"--{flag}={value}" for flag, value in flags.items()), *others]
    print(" ".join(["python", *words]), flush=True)
    if subprocess.run([sys.executable, *words], check=False).returncode:
        raise ValueError(f"dlrm {name} has failed; the same command continues")


if __name__ == "__main__":
    main()
