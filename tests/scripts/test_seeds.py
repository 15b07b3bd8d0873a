"""`--seeds` trains a model for each seed, and reports the mean and spread of their metrics."""

import statistics

import pytest

from dlrm.train.checkpoints.checkpoint import Checkpoint

SHORT = ("--max_steps=8", "--test_freq=4")


def test_the_mean_and_the_spread_are_those_of_runs_of_their_own(command, tmp_path, capsys):
    found = command("--seeds=1-2,5", "--save_checkpoint_path=run", *SHORT)
    out = capsys.readouterr().out
    alone = command("--seed=2", "--save_checkpoint_path=alone", *SHORT)
    for name in ("dense.safetensors", "tables/0.bin", "tables/3.bin"):
        paths = (Checkpoint.open(tmp_path / run).path / name for run in ("run/seed-2", "alone"))
        assert len({path.read_bytes() for path in paths}) == 1
    best = [Checkpoint.open(tmp_path / f"run/seed-{s}").progress["best"] for s in (1, 2, 5)]
    aucs = [one["auc"] for one in best]
    assert aucs[1] == alone["test_auc"]
    assert found["test_auc"] == pytest.approx(statistics.mean(aucs))
    assert found["test_auc_spread"] == pytest.approx(statistics.stdev(aucs))
    (line,) = (line for line in out.splitlines() if line.startswith("spread "))
    assert f"{found['test_auc_spread']:.6f}" in line.split()
    resumed = command("--seeds=1,2,5", "--save_checkpoint_path=run", *SHORT, "--resume")
    assert resumed == found


def test_impossible_seeds_are_named(command, tmp_path):
    for seeds, flags, named in (
        ("3-1", [], ": expected seeds such as"),
        ("1", [], ": expected two seeds or more"),
        ("1,2,1", [], ": expected two seeds or more, each once"),
        ("1-2", ["--seed=1"], ".* --seed 1"),
        ("1-2", ["--mode=test"], ".* --mode test"),
        ("1-2", ["--save_checkpoint_path="], ".* --save_checkpoint_path"),
    ):
        with pytest.raises(ValueError, match=f"--seeds {seeds}{named}"):
            command("--save_checkpoint_path=run", f"--seeds={seeds}", *flags)
    assert not (tmp_path / "run").exists()
