"""The commands on a dataset with lists and sample weights: resumed, tested, inspected, refused."""

import re
import shutil

import list_testing
import numpy as np
import pytest
import torch
from forked import run as run_command

from dlrm.serving.loading import load_model, model_config
from dlrm.train.checkpoints.checkpoint import Checkpoint

MODEL = ["--embedding_dim=4", "--bottom_mlp_sizes=8,4", "--top_mlp_sizes=8,1"]
RUN = ["--batch_size=32", "--test_batch_size=64", "--epochs=3", "--print_freq=1", "--lr=1"]


@pytest.fixture(scope="module")
def rows():
    return {split: list_testing.drawn(300, seed) for seed, split in enumerate(("train", "test"))}


@pytest.fixture(scope="module")
def lists(rows, tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "lists"
    list_testing.write(path, rows, weights=True)
    return path


@pytest.fixture
def train(command, lists):
    def run(*arguments, data=lists):
        return command(*arguments, data=data, model=MODEL, training=RUN)

    return run


def same_weights(one, other):
    a, b = (load_model(Checkpoint.open(path).path).state_dict() for path in (one, other))
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(train):
    extra = ["--embedding_optimizer=row_wise_adagrad", "--shuffle", "--embedding_dtype=bf16"]
    extra += ["--gradient_accumulation_steps=2"]
    extra += ["--test_freq=13"]  # else the first half ends with another test
    whole = train("--save_checkpoint_path=whole", *extra)
    train("--save_checkpoint_path=halves", "--max_steps=13", *extra)
    halves = train("--save_checkpoint_path=halves", "--resume", *extra)
    assert halves["test_log_loss"] == whole["test_log_loss"]
    assert same_weights("whole", "halves")


def test_a_checkpoint_knows_how_its_tables_are_pooled(train, rows, tmp_path):
    data = tmp_path / "data"
    list_testing.write(data, rows, poolings={"history": "mean"})
    trained = train("--save_checkpoint_path=run", "--pooling=mean", data=data)
    saved = Checkpoint.open("run").path
    assert Checkpoint(saved).config["dataset"]["poolings"] == [None, None, "mean"]
    assert model_config(saved).poolings == ("mean",) * 3
    tested = train("--mode=test", "--load_checkpoint_path=run", data=data)
    assert tested["log_loss"] == pytest.approx(trained["test_log_loss"], rel=1e-6)
    summed = train("--save_checkpoint_path=summed", data=data)
    assert model_config(Checkpoint.open("summed").path).poolings == ("sum", "sum", "mean")
    assert summed["test_log_loss"] != pytest.approx(trained["test_log_loss"], rel=1e-6)
    shown = run_command("dlrm.scripts.checkpoint", "inspect", str(saved))
    assert re.search("dataset: .*poolings .*mean", shown.stdout), shown.stdout


def test_weights_of_samples_are_used_unless_they_are_not_wanted(train, lists, tmp_path, capsys):
    weighted = train("--save_checkpoint_path=weighted")
    assert "note: the dataset's sample weights weight the loss" in capsys.readouterr().out
    without = train("--save_checkpoint_path=without", "--nosample_weights")
    assert "all rows count once" in capsys.readouterr().out
    assert weighted["test_log_loss"] != without["test_log_loss"]
    for run, trained in (("weighted", weighted), ("without", without)):
        tested = train("--mode=test", f"--load_checkpoint_path={run}")
        assert tested["log_loss"] == pytest.approx(trained["test_log_loss"], rel=1e-6)
    tested = train("--mode=test", "--load_checkpoint_path=without", "--sample_weights")
    assert tested["log_loss"] != pytest.approx(without["test_log_loss"], rel=1e-4)
    with pytest.raises(ValueError, match="--sample_weights: True in the checkpoint, now False"):
        train("--save_checkpoint_path=weighted", "--resume", "--nosample_weights")
    ones = tmp_path / "ones"
    shutil.copytree(lists, ones)
    for split in ("train", "test"):
        np.ones(300, "<f4").tofile(ones / split / "weight.bin")
    same = train("--save_checkpoint_path=ones", "--verify_data=never", data=ones)
    assert same["test_log_loss"] == pytest.approx(without["test_log_loss"], rel=1e-5)


def test_a_test_set_without_any_weight_is_refused(train, lists, tmp_path):
    none = tmp_path / "none"
    shutil.copytree(lists, none)
    np.zeros(300, "<f4").tofile(none / "test" / "weight.bin")
    with pytest.raises(ValueError, match="test/weight.bin: expected a weight above 0, got 300"):
        train("--verify_data=never", data=none)


def test_weights_that_leave_one_class_are_said_to(train, rows, lists, tmp_path, capsys):
    one = tmp_path / "one"
    shutil.copytree(lists, one)
    rows["test"].labels.astype("<f4").tofile(one / "test" / "weight.bin")
    train("--verify_data=never", "--mode=test", data=one)
    said = "no AUC can be computed, since all rows with a weight above 0 have the label 1"
    assert said in capsys.readouterr().out
