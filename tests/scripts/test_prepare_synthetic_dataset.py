"""The command that writes a synthetic dataset."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import forked
from nvidia_reader import read_as_nvidia

from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.data.clicks.feature_spec import FeatureSpec


def run(root, *arguments):
    return forked.call("dlrm.scripts.prepare_synthetic_dataset", *arguments)


def test_a_dataset_is_written_that_the_readers_take(root, tmp_path):
    done = run(
        root,
        f"--synthetic_dataset_dir={tmp_path / 'data'}",
        "--synthetic_dataset_num_entries=500",
        "--synthetic_dataset_table_sizes=10,2000",
        "--num_numerical_features=3",
        "--synthetic_ids=power_law",
    )
    assert done.returncode == 0, done.stderr
    datasets = open_datasets(DataConfig(dataset=str(tmp_path / "data")))
    train, test = datasets.train, datasets.test
    assert (train.num_samples, test.num_samples) == (500, 500)
    assert [len(labels) for labels, *_ in read_as_nvidia(tmp_path / "data").values()] == [500, 500]
    assert (train.table_sizes, train.num_numerical) == ([10, 2000], 3)
    assert (train.batch(0).categorical[:, 1] == 0).float().mean() > 0.2  # the most frequent id

    again = run(root, f"--synthetic_dataset_dir={tmp_path / 'data'}")
    assert again.returncode == 1
    assert "exists and is not empty" in again.stderr
    assert train.batch(0).labels.shape == (500,)


def test_a_feature_specification_gives_the_shapes(root, tmp_path):
    FeatureSpec.default(tmp_path, 2, [7, 8, 9]).save()
    arguments = (
        f"--synthetic_dataset_dir={tmp_path / 'data'}",
        "--synthetic_dataset_num_entries=50",
        f"--feature_spec={tmp_path / 'feature_spec.yaml'}",
    )
    contradiction = run(root, *arguments, "--num_numerical_features=3")
    assert contradiction.returncode == 1
    assert "--num_numerical_features: expected no --feature_spec" in contradiction.stderr
    done = run(root, *arguments)
    assert done.returncode == 0, done.stderr
    assert FeatureSpec.load(tmp_path / "data").cardinalities == [7, 8, 9]


def test_what_will_be_written_is_said_before_and_a_terminal_shows_how_far_it_is(root, tmp_path):
    command = [sys.executable, "-m", "dlrm.scripts.prepare_synthetic_dataset"]
    flags = ["--synthetic_dataset_num_entries=1000000", "--synthetic_dataset_table_sizes=10"]
    existing = tmp_path / "existing"
    existing.mkdir()
    (existing / "file").touch()  # so that nothing is written
    plan = run(root, *flags, f"--synthetic_dataset_dir={existing}").stdout
    # A label, 13 float16 and an int8: 28 bytes.
    assert plan == f"dataset: {existing}\ntrain, test: 1000000 rows each, 0.056 GB in all\n"

    flags = [flags[0].replace("000000", "000"), flags[1]]
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    subprocess.run(
        [*command, *flags, f"--synthetic_dataset_dir={tmp_path / 'data'}"],
        cwd=root,
        stderr=end,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    os.close(end)
    assert "/2.00k [" in os.read(terminal, 10000).decode()
    os.close(terminal)
