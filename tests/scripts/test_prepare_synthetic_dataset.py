"""The command that writes a synthetic dataset."""

import subprocess
import sys

from dlrm.data.feature_spec import FeatureSpec
from dlrm.data.loader import DataConfig, open_datasets


def run(root, *arguments):
    command = [sys.executable, "-m", "dlrm.scripts.prepare_synthetic_dataset", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


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
    train, test, _ = open_datasets(DataConfig(dataset=str(tmp_path / "data")))
    assert (train.num_samples, test.num_samples) == (500, 500)
    assert (train.table_sizes, train.num_numerical) == ([10, 2000], 3)
    assert (train.batch(0).categorical[:, 1] == 0).float().mean() > 0.2  # the law's commonest id

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


def test_help_lists_every_flag_and_bad_sizes_are_named(root, tmp_path):
    text = run(root, "--help").stdout
    for flag in (
        "synthetic_dataset_num_entries",
        "num_numerical_features",
        "synthetic_dataset_table_sizes",
        "feature_spec",
        "synthetic_dataset_dir",
        "seed",
        "synthetic_ids",
    ):
        assert f"--{flag}:" in text
    bad = run(root, "--synthetic_dataset_table_sizes=10,x", f"--synthetic_dataset_dir={tmp_path}/d")
    assert bad.returncode == 1
    assert "--synthetic_dataset_table_sizes: expected integers of 1 or more, got 'x'" in bad.stderr
