"""Numerical vectors, cross layers, the wide term and the like, from the command line to scores."""

import json

import numpy as np
import pytest
import torch
from small_dataset import NUM_NUMERICAL, ROWS, TABLE_SIZES, write_dataset

from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.scripts.checkpoint import describe
from dlrm.serving.loading import load
from dlrm.serving.rows.inputs import Inputs
from dlrm.tasks.numerical_edges import ROWS as FITTED_ROWS
from dlrm.train.checkpoints.checkpoint import Checkpoint

EVERYTHING = [
    *("--wide", "--numerical_embedding=piecewise", "--numerical_bins=6", "--dropout=0.2"),
    *("--interaction_op=dot,dcn", "--cross_rank=3", "--cross_layers=2", "--batch_norm"),
    *("--embedding_init=normal", "--ema_decay=0.8"),
]
WAYS = [
    EVERYTHING,
    [
        "--ensemble=3",
        "--wide",
        "--dropout=0.2",
        "--ema_decay=0.8",
        "--amp",
        "--embedding_dtype=bf16",
    ],
]


def log_losses(path):
    with open(path) as file:
        entries = [json.loads(line.removeprefix("DLLL ")) for line in file]
    return {
        tuple(entry["step"]): entry["data"]["loss"]
        for entry in entries
        if entry.get("step") != "PARAMETER" and "lr" in entry.get("data", {})
    }


@pytest.mark.parametrize("flags", WAYS, ids=lambda flags: flags[0])
def test_a_checkpoint_tests_and_predicts_as_it_trained(command, dataset, capsys, flags):
    trained = command("--epochs=2", "--save_checkpoint_path=run", *flags)
    assert trained["best_auc"] > 0.65
    amp = ["--amp"] if "--amp" in flags else []
    words = ["--mode=test", "--load_checkpoint_path=run", *amp]
    tested = command(*words, model=[], training=["--test_batch_size=400"])
    assert tested["auc"] == trained["test_auc"]
    assert f"{flags[0].lstrip('-').split('=')[0]} " in capsys.readouterr().out
    spec = FeatureSpec.load(dataset)
    numerical = np.fromfile(spec.file("test", "num_0"), np.float16).reshape(-1, NUM_NUMERICAL)
    ids = [np.fromfile(spec.file("test", n), spec.dtype(n)) for n in spec.categorical]
    model = load(Checkpoint.open("run").path)
    logits = model.logits_of(Inputs(numerical, np.stack(ids, 1)))
    labels = np.fromfile(spec.file("test", "label"), bool)
    order = logits[labels][:, None] > logits[~labels]
    assert order.mean() == pytest.approx(tested["auc"], abs=2e-3 if amp else 1e-5)


@pytest.mark.parametrize("flags", WAYS, ids=lambda flags: flags[0])
def test_a_resumed_run_is_the_uninterrupted_one(command, flags):
    command("--epochs=2", "--log_path=whole.json", "--save_checkpoint_path=whole", *flags)
    halves = ["--epochs=2", "--log_path=halves.json", "--save_checkpoint_path=halves", *flags]
    command(*halves, "--max_steps=19")
    command(*halves, "--resume")
    found, expected = log_losses("halves.json"), log_losses("whole.json")
    assert len(expected) > 3
    assert {step: loss for step, loss in found.items() if step in expected} == expected


def test_edges_are_quantiles_of_the_first_training_rows_and_of_their_distinct_values(
    command, tmp_path
):
    """One numerical is mostly 0, one is constant, and one has three values."""
    data = write_dataset(tmp_path / "own")
    spec = FeatureSpec.load(data)
    random = np.random.default_rng(3)
    rows = np.zeros((ROWS["train"], NUM_NUMERICAL), np.float16)
    rows[::10, 0] = random.permutation(400) + 1
    rows[:, 1] = -7
    rows[:, 2] = random.integers(0, 3, ROWS["train"])
    rows.tofile(spec.file("train", "num_0"))
    (data / "manifest.json").unlink()
    flags = ["--numerical_embedding=piecewise", "--numerical_bins=8", "--save_checkpoint_path=run"]
    command("--max_steps=1", *flags, data=data)
    edges = load(Checkpoint.open("run").path).model.numerical_embedding.edges
    first = edges[0].unique()
    assert ROWS["train"] < FITTED_ROWS
    assert (first[0], first[-1], len(first)) == (0, 400, 5)  # half the quantiles are 0
    torch.testing.assert_close(first[1:4], torch.tensor([100.0, 200.0, 300.0]), atol=1, rtol=0)
    assert edges[1].tolist() == [-7] * 9
    assert edges[2].unique().tolist() == [0, 1, 2]


def test_a_field_of_one_value_is_named(command, tmp_path, capsys):
    data = write_dataset(tmp_path / "own")
    spec = FeatureSpec.load(data)
    np.full((ROWS["train"], NUM_NUMERICAL), 2, np.float16).tofile(spec.file("train", "num_0"))
    (data / "manifest.json").unlink()
    command("--max_steps=1", "--numerical_embedding=piecewise", data=data)
    out = capsys.readouterr().out
    assert "numerical 0, numerical 1, numerical 2, which has one value only" in out


def test_a_warm_start_and_other_flags_keep_the_edges(command, dataset):
    command("--max_steps=2", "--save_checkpoint_path=run", *EVERYTHING)
    command("--max_steps=2", "--save_checkpoint_path=next", "--load_checkpoint_path=run")
    first, second = (load(Checkpoint.open(path).path).model for path in ("run", "next"))
    assert torch.equal(first.numerical_embedding.edges, second.numerical_embedding.edges)
    assert second.config.wide
    with pytest.raises(ValueError, match="--numerical_bins 7|another architecture"):
        command("--mode=test", "--load_checkpoint_path=run", "--numerical_bins=7")


def test_inspect_has_the_parts(command):
    command("--max_steps=2", "--save_checkpoint_path=run", *EVERYTHING)
    found = describe(Checkpoint.open("run").path)
    assert found["architecture"]["interaction_op"] == "dot,dcn"
    assert (found["architecture"]["wide"], found["architecture"]["numerical_bins"]) == (True, 6)
    assert [(t["rows"], t["dim"]) for t in found["tables"]] == [
        *((rows, 4) for rows in TABLE_SIZES),
        *((rows, 1) for rows in TABLE_SIZES),
    ]
    assert "numerical_embedding.edges" in found["dense"]
