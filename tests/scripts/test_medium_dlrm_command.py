"""The main command of Habana's medium DLRM, made small."""

import json

import pytest
import torch
from test_dist_main import Ranks

from dlrm.published.rows import find
from dlrm.scripts import main
from dlrm.scripts.common import dlrm_flags

DATA = [
    *("--dataset_type=synthetic_random", "--base_device=cpu", "--num_numerical_features=32"),
    *("--synthetic_dataset_table_sizes=1000", "--synthetic_dataset_num_entries=1300"),
    "--synthetic_dataset_hotness=38",
]
SMALL = [
    *(*find("gaudi/dlrm-medium/eager-fp32").flags, *DATA),
    *("--bottom_mlp_sizes=64,64,64", "--top_mlp_sizes=64,64,1"),
    *("--batch_size=130", "--test_batch_size=130", "--print_freq=1", "--lr=0.005"),
]


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs the command in this process; returns its summary."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        values = dlrm_flags.parse([*SMALL, *arguments])
        torch.set_num_threads(1)
        return main.run(values)

    return run


def losses(path="log.json"):
    """Returns the losses of steps and tests in the order of a run's log."""
    with open(path) as file:
        entries = [json.loads(line.removeprefix("DLLL ")) for line in file]
    data = [entry["data"] for entry in entries if entry["type"] == "LOG" and entry["step"] != []]
    return [e[key] for e in data for key in ("loss", "test_log_loss") if key in e]


@pytest.mark.parametrize("precision", ["--noamp", "--amp"])
def test_fractions_are_tested_by_their_loss_alone(command, precision, capsys):
    summary = command(precision, "--test_freq=4")
    found = losses()
    assert len(found) == 10 + 3 - 1  # steps but the first, and tests
    assert max(found) - min(found) > 0.02
    assert summary["best_validation_loss"] == min(found[i] for i in (3, 8, 11))
    assert not any("auc" in name for name in summary)
    out = capsys.readouterr().out
    assert "note: the targets are fractions and no clicks, so tests report no AUC" in out


def test_a_run_resumes_and_its_checkpoint_is_tested(command, capsys):
    whole = command("--log_path=whole.json")
    command("--max_steps=4", "--save_checkpoint_path=run", "--log_path=halves.json")
    resumed = command("--save_checkpoint_path=run", "--log_path=halves.json", "--resume")
    assert losses("halves.json")[-6:] == losses("whole.json")[-6:]
    assert resumed["test_log_loss"] == whole["test_log_loss"]
    with pytest.raises(ValueError, match="--lr: 0.005 in the checkpoint, now 0.5"):
        command("--save_checkpoint_path=run", "--resume", "--lr=0.5")
    capsys.readouterr()
    load = ["--mode=test", "--load_checkpoint_path=run", "--test_batch_size=130"]
    tested = main.run(dlrm_flags.parse([*DATA, *load]))
    assert tested["log_loss"] == pytest.approx(whole["test_log_loss"], rel=1e-6)
    out = capsys.readouterr().out
    assert "bottom_mlp_sizes (64, 64, 64)" in out
    assert "Finished testing: log_loss" in out


def test_two_processes_give_the_losses_of_one(command, tmp_path):
    flags = ["--test_freq=5", "--synthetic_dataset_table_sizes=1000,70", "--max_steps=6"]
    command(*flags)
    folder = tmp_path / "ranks"
    folder.mkdir()
    ranks = Ranks(folder, "dlrm.scripts.dist_main", *SMALL, *flags)
    assert ranks.wait() == 0, ranks.output()
    assert losses(folder / "log.json") == pytest.approx(losses(), rel=1e-6)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--auc_threshold=0.8"], "--auc_threshold 0.8: the targets of --dataset_type synthetic_"),
        (["--embedding_dim=8"], "--bottom_mlp_sizes 64,64,64.*--embedding_dim 8"),
        (["--synthetic_ids=power_law"], "--synthetic_ids power_law: expected uniform"),
    ],
)
def test_contradictions_are_refused(command, flags, message):
    with pytest.raises(ValueError, match=message):
        command(*flags)
