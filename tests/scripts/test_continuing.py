"""`--continue_from`: trainings that continue with the rows of another day."""

import re
import shutil
import signal
import time

import compared_checkpoints
import forked
import pytest
from small_dataset import write_dataset

from dlrm.data import layout
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.serving.network.recalibration import (
    load_recalibration,
    of_sampling_rate,
    write_recalibrated,
)
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.directory import all_checkpoints, last_checkpoint

DAY = {"train": 1024, "test": 400}  # four batches
FIRST_DAY = {"train": 768, "test": 400}
LARGER = (60, 200, 5, 140)


def differing(one, other):
    """Returns the weights and state that differ in the last checkpoints of two runs."""
    return compared_checkpoints.differing(last_checkpoint(one), last_checkpoint(other))


def joined(directory, days):
    """Writes a dataset with the training rows of several, and the other rows of the last."""
    spec = FeatureSpec.load(days[-1])
    shutil.copytree(days[-1], directory)
    for file in (directory / "train").iterdir():
        file.write_bytes(b"".join((day / "train" / file.name).read_bytes() for day in days))
    rows = {**DAY, "train": sum(layout.read_dataset_manifest(day)["rows"]["train"] for day in days)}
    layout.write_dataset_manifest(directory, rows, spec.cardinalities, {})
    return directory


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    folder = tmp_path_factory.mktemp("days")
    rows = (FIRST_DAY, DAY, DAY)
    return [write_dataset(folder / f"day{i}", own, seed=i) for i, own in enumerate(rows)]


def test_days_one_after_another_are_one_long_run(command, days, tmp_path):
    flags = ["--embedding_optimizer=adagrad", "--embedding_dtype=bf16", "--wide", "--dropout=0.1"]
    flags += ["--decay_steps=12", "--decay_start_step=5", "--ema_decay=0.9", "--amp"]
    long = joined(tmp_path / "long", days)
    command("--save_checkpoint_path=whole", *flags, data=long)
    command("--save_checkpoint_path=run0", *flags, data=days[0])
    for i in (1, 2):
        going_on = [f"--continue_from=run{i - 1}", f"--save_checkpoint_path=run{i}"]
        command(*going_on, data=days[i], model=[], training=[])  # all settings are carried
    assert last_checkpoint("run2").name == "step-000000011"
    assert not differing("whole", "run2")


def test_a_killed_run_that_goes_on_resumes_and_does_not_begin_twice(
    command, days, tmp_path, capsys
):
    command("--save_checkpoint_path=run0", data=days[0])
    going_on = ["--continue_from=run0"]
    command(*going_on, "--save_checkpoint_path=whole", data=days[1])
    again = [*going_on, "--save_checkpoint_path=parts", "--resume"]
    command(*again, "--max_steps=2", data=days[1])
    capsys.readouterr()
    command(*again, data=days[1], training=["--print_freq=1"], model=[])
    assert re.search(r"resumed from .*step-000000005: 5 steps", said := capsys.readouterr().out)
    assert "continues from" not in said
    assert not differing("whole", "parts")
    # without the flag, the checkpoint tells
    command("--save_checkpoint_path=parts", "--resume", "--epochs=2", data=days[1], training=[])
    with pytest.raises(ValueError, match=r"--continue_from: 'step 3 \(manifest .*now 'step"):
        command(*again, "--continue_from=whole", data=days[1])
    with pytest.raises(ValueError, match=r"whole/step.*is in --save_checkpoint_path"):
        command("--continue_from=whole", "--save_checkpoint_path=whole", "--resume", data=days[1])


def test_tables_grow_and_those_in_files_too(command, days, tmp_path):
    later = [write_dataset(tmp_path / f"later{i}", DAY, LARGER, seed=i) for i in (1, 2)]
    command("--save_checkpoint_path=run0", data=days[0])
    for data, run, source in ((later[0], "run1", "run0"), (later[1], "run2", "run1")):
        for kind, flags in (
            ("", []),
            ("mapped ", ["--table_files=files"]),
        ):
            flags.append(f"--continue_from={source if source == 'run0' else kind + source}")
            command(*flags, f"--save_checkpoint_path={kind}{run}", data=data, model=[], training=[])
    assert not differing("run2", "mapped run2")
    assert [table["rows"] for table in Checkpoint(last_checkpoint("run2")).config["tables"]] == [
        *LARGER
    ]
    with pytest.raises(ValueError, match="cat_0.bin: expected 60 ids or more, .* got 50"):
        command("--continue_from=run2", "--save_checkpoint_path=run3", data=days[0])


@pytest.mark.slow
@pytest.mark.parametrize("saved", [0, 1, 3])
def test_a_run_that_is_killed_while_it_goes_on_ends_as_an_uninterrupted_one(
    command, days, tmp_path, saved
):
    command("--save_checkpoint_path=run0", data=days[0])
    words = [f"--dataset={days[1]}", "--continue_from=run0", "--checkpoint_freq=1", "--resume"]
    words += ["--base_device=cpu", "--keep_checkpoints=9", "--epochs=20"]
    forked.succeed("dlrm.scripts.main", *words, "--save_checkpoint_path=whole", cwd=tmp_path)
    words.append("--save_checkpoint_path=parts")
    process = forked.start("dlrm.scripts.main", *words, stdout=tmp_path / "said", cwd=tmp_path)
    while process.is_alive() and len(all_checkpoints("parts")) < saved:
        time.sleep(0.001)
    time.sleep(0 if saved else 0.3)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    forked.succeed("dlrm.scripts.main", *words, cwd=tmp_path)
    assert not differing("whole", "parts")


def test_learning_rates_go_on_are_constant_or_begin_again(command, days):
    falling = ["--decay_start_step=2", "--decay_steps=8", "--decay_power=1", "--warmup_steps=2"]
    command("--save_checkpoint_path=run0", *falling, "--print_freq=1", data=days[0])
    rates = {}
    for kind in ("schedule", "constant", "rewarm"):
        flags = ["--continue_from=run0", f"--save_checkpoint_path={kind}", "--print_freq=1"]
        command(*flags, f"--continue_lr={kind}", data=days[1], training=[])
        history = Checkpoint(last_checkpoint(kind)).progress["history"]
        rates[kind] = [entry["lr"] / 0.02 for entry in history if "lr" in entry]
    assert rates["schedule"] == pytest.approx([0.625, 0.5, 0.375])  # of the steps 5 to 7
    assert rates["constant"] == pytest.approx([1, 1, 1])
    assert rates["rewarm"] == pytest.approx([1, 0.875, 0.75])
    command("--continue_from=schedule", "--save_checkpoint_path=run2", data=days[2], training=[])
    last = ["--continue_from=run2", "--save_checkpoint_path=run3"]
    with pytest.raises(ValueError, match="--continue_lr schedule: its rate is 0 after step 11"):
        command(*last, "--continue_lr=schedule", data=days[0], training=[])
    command(*last, data=days[0], training=[])
    assert Checkpoint(last_checkpoint("run3")).config["flags"]["continue_lr"] == "rewarm"


def test_a_recalibration_is_carried_over(command, days, capsys):
    command("--save_checkpoint_path=run0", data=days[0])
    write_recalibrated(last_checkpoint("run0"), of_sampling_rate(0.5), "recalibrated")
    flags = ["--continue_from=recalibrated", "--checkpoint_freq=2", "--keep_checkpoints=9"]
    command(*flags, "--save_checkpoint_path=run1", data=days[1], training=[], model=[])
    assert "recalibration (sampling) of" in capsys.readouterr().out
    paths = all_checkpoints("run1")
    assert [path.name[-2:] for path in paths] == ["05", "07"]
    assert [load_recalibration(path).kind for path in paths] == ["sampling"] * 2


def test_mistakes_are_named(command, days):
    command("--save_checkpoint_path=run0", "--max_steps=1", data=days[0])
    for flags, named in (
        (["--continue_lr=constant"], "--continue_lr constant"),
        (["--continue_from=run0", "--load_checkpoint_path=X"], "--load_checkpoint_path"),
        (["--continue_from=run0", "--seeds=1-3"], "--seeds 1-3"),
        (["--continue_from=run0", "--recipe=auto"], "--recipe auto"),
        (["--continue_from=run0", "--mode=test"], "--mode test"),
        (["--continue_from=run0", "--top_mlp_sizes=8,1"], "of another architecture"),
        (["--continue_from=run0", "--mlp_optimizer=sgd"], "of the optimizers .*, here"),
        (["--continue_from=nothing"], "nothing: no checkpoint here"),
    ):
        own = ["--save_checkpoint_path=run1", *flags]
        with pytest.raises((ValueError, FileNotFoundError), match=named):
            command(*own, data=days[1], training=["--base_device=cpu"])
    assert last_checkpoint("run1") is None
