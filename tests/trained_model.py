"""A small log, its dataset and a model trained on it, for the serving tests."""

import shutil
from pathlib import Path
from typing import NamedTuple

import forked
import numpy as np
from column_testing import fit_dictionary, text_column, transform_texts

from dlrm.data import layout
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.writer import SplitWriter
from dlrm.data.sources.columns import read_hexadecimal
from dlrm.data.transform.dictionaries import count_values
from dlrm.data.transform.transform import Transform
from dlrm.manifest import write_manifest
from dlrm.train.checkpoints.checkpoint import Checkpoint

NUM_NUMERICAL, TABLES = 3, (40, 200, 7, 120)
ROWS = {"train": 4000, "test": 1000}
LIMIT = 3
MODEL = ["--embedding_dim=8", "--bottom_mlp_sizes=16,8", "--top_mlp_sizes=32,1"]
TRAINING = [
    *("--base_device=cpu", "--batch_size=128", "--test_batch_size=400", "--print_freq=1000"),
    *("--lr=0.01", "--warmup_steps=4", "--decay_steps=0", "--epochs=2"),
    *("--embedding_optimizer=adam", "--mlp_optimizer=adam"),
]


class Trained(NamedTuple):
    """Holds the paths; `lines` are the test rows of the log, with labels."""

    dataset: Path
    checkpoint: Path
    log: Path
    lines: list[str]

    @property
    def rows(self) -> list[str]:
        """Returns the lines without labels."""
        return [line.split("\t", 1)[1] for line in self.lines]


def write_log(path: Path, seed: int = 0) -> list[str]:
    """Writes lines of a learnable label, integers and hashes."""
    effects = [np.random.default_rng(1).normal(0, 1.2, size) for size in TABLES]
    random = np.random.default_rng(seed)
    lines = []
    for _ in range(sum(ROWS.values())):
        ids = [int(size * random.random() ** 2) for size in TABLES]
        numbers = random.integers(-1, 100, NUM_NUMERICAL)
        logit = sum(e[i] for e, i in zip(effects, ids, strict=True)) + np.log(numbers[0] + 3) - 4
        fields = [str(number) for number in numbers] + [f"{7919 * (i + 1):08x}" for i in ids]
        shown = ["" if random.random() < 0.1 else field for field in fields]
        lines.append("\t".join([str(int(random.random() < 1 / (1 + np.exp(-logit)))), *shown]))
    path.write_text("\n".join(lines) + "\n")
    return lines


def write_dataset(
    directory: Path, lines: list[str], other_ids: bool = False, rows: dict[str, int] = ROWS
) -> Path:
    """Fits the transform on all lines and writes the dataset like preprocessing.

    With `other_ids`, tables have the same sizes but every id means another value.
    """
    columns = [text_column(c) for c in zip(*(x.split("\t") for x in lines), strict=True)]
    hashes = columns[1 + NUM_NUMERICAL :]
    counts = [count_values(read_hexadecimal(column)[0]) for column in hashes]
    frequent = [count.take(count.counts >= LIMIT) for count in counts]
    dictionaries = [np.roll(fit_dictionary(count), int(other_ids)) for count in frequent]
    transform = Transform.from_logs(NUM_NUMERICAL, dictionaries, frequency_limit=str(LIMIT))
    numerical, ids, _ = transform_texts(transform, columns[1:])
    labels = np.array([line[0] == "1" for line in lines])
    spec = FeatureSpec.default(directory, NUM_NUMERICAL, transform.cardinalities, list(rows))
    begin = 0
    for split, count in rows.items():
        part = slice(begin, begin + count)
        with SplitWriter(spec, split) as writer:
            writer.write(labels[part], numerical[part], [column[part] for column in ids])
        begin += count
    transform.save(directory / layout.TRANSFORM)
    spec.save()
    layout.write_dataset_manifest(directory, rows, transform.cardinalities, {})
    return directory


def train(dataset: Path, checkpoints: Path, *flags: str) -> Path:
    """Trains a small model; returns its checkpoint directory."""
    words = [f"--dataset={dataset}", f"--save_checkpoint_path={checkpoints}", *MODEL, *TRAINING]
    log = f"--log_path={checkpoints.parent / 'log.json'}"
    forked.succeed("dlrm.scripts.main", *words, log, *flags)
    return checkpoints


def overflowing(trained: Trained, directory: Path) -> tuple[Path, int]:
    """Copies the checkpoint so that rows whose first two ids are 1 have no finite score.

    All weights stay finite.

    Returns:
        The copy, and the first such row of the test split.
    """
    copy = shutil.copytree(Checkpoint.open(trained.checkpoint).path, directory / "overflowing")
    for table in (0, 1):
        path = copy / "tables" / f"{table}.bin"
        rows = np.fromfile(path, np.float32).reshape(-1, 8)
        rows[1] = 1e25  # one alone gives a large but finite score
        path.unlink()  # it may be a link shared with another checkpoint
        rows.tofile(path)
    write_manifest(copy, "checkpoint")
    spec = FeatureSpec.load(trained.dataset)
    ids = [np.fromfile(spec.file("test", n), spec.dtype(n)) for n in spec.categorical[:2]]
    return copy, int(((ids[0] == 1) & (ids[1] == 1)).argmax())


def make(directory: Path, seed: int = 0) -> Trained:
    """Makes the log, dataset and checkpoint in a directory."""
    log = directory / "day_0"
    lines = write_log(log, seed)
    dataset = directory / "dataset"
    dataset.mkdir()
    write_dataset(dataset, lines)
    checkpoint = train(dataset, directory / "run")
    test_log = directory / "test.tsv"
    test_log.write_text("\n".join(lines[-ROWS["test"] :]) + "\n")
    return Trained(dataset, checkpoint, test_log, lines[-ROWS["test"] :])
