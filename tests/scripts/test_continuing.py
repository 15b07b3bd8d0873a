"""`--continue_from`: trainings that go on with the rows of another day."""

import json
import re
import shutil

import numpy as np
import pytest
from small_dataset import ROWS, TABLE_SIZES, write_dataset

from dlrm.data.clicks import layout
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.scripts.checkpoint.comparison import compare
from dlrm.train.checkpoints.checkpoint import read_config, read_progress
from dlrm.train.checkpoints.directory import all_checkpoints, last_checkpoint
from dlrm.train.checkpoints.saved_model import read_saved

DAY = {"train": 1024, "test": 400}  # four batches
LARGER = (60, 200, 5, 140)


def differing(one, other):
    """Weights and state that differ in the last checkpoints of two runs."""
    return compare(last_checkpoint(one), last_checkpoint(other))["weights"]


def joined(directory, days):
    """Writes a dataset with the training rows of several, and the other rows of the last."""
    spec = FeatureSpec.load(days[-1])
    shutil.copytree(days[-1], directory)
    for file in (directory / "train").iterdir():
        file.write_bytes(b"".join((day / "train" / file.name).read_bytes() for day in days))
    rows = {**DAY, "train": DAY["train"] * len(days)}
    layout.write_dataset_manifest(directory, rows, spec.cardinalities, {})
    return directory


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    folder = tmp_path_factory.mktemp("days")
    return [write_dataset(folder / f"day{i}", DAY, seed=i) for i in range(3)]


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--embedding_optimizer=adagrad", "--embedding_dtype=bf16", "--wide", "--dropout=0.1"],
        ["--decay_steps=12", "--decay_start_step=5", "--ema_decay=0.9", "--amp"],
    ],
)
def test_days_one_after_another_are_one_long_run(command, days, tmp_path, flags):
    long = joined(tmp_path / "long", days)
    command("--save_checkpoint_path=whole", *flags, data=long)
    command("--save_checkpoint_path=run0", *flags, data=days[0])
    for i in (1, 2):
        going_on = [f"--continue_from=run{i - 1}", f"--save_checkpoint_path=run{i}"]
        command(*going_on, data=days[i], model=[], training=[])  # all settings are carried
    assert last_checkpoint("run2").name == "step-000000012"
    assert differing("whole", "run2") == {}
    assert read_config(last_checkpoint("run2"))["continues"]["day"] == 3


def test_a_killed_run_that_goes_on_resumes_and_does_not_begin_twice(
    command, days, tmp_path, capsys
):
    command("--save_checkpoint_path=run0", data=days[0])
    going_on = ["--continue_from=run0", "--replay=0.25", f"--replay_data={days[0]}"]
    command(*going_on, "--save_checkpoint_path=whole", data=days[1])
    again = [*going_on, "--save_checkpoint_path=parts", "--resume"]
    command(*again, "--max_steps=2", data=days[1])
    capsys.readouterr()
    command(*again, data=days[1], training=["--print_freq=1"], model=[])
    assert re.search(r"resumed from .*step-000000006: 6 steps", said := capsys.readouterr().out)
    assert "goes on from" not in said
    assert differing("whole", "parts") == {}
    # without the flag, the checkpoint tells
    command("--save_checkpoint_path=parts", "--resume", "--epochs=2", data=days[1], training=[])
    with pytest.raises(ValueError, match=r"--continue_from: 'step 4 \(manifest .*now 'step"):
        command(*again, "--continue_from=whole", data=days[1])
    with pytest.raises(ValueError, match=r"whole/step.*is in --save_checkpoint_path"):
        command("--continue_from=whole", "--save_checkpoint_path=whole", "--resume", data=days[1])
