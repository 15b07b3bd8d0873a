"""The main command of Habana's medium DLRM, made small."""

import json

import pytest
import torch

from dlrm.published.rows import find
from dlrm.scripts.common import click_command, dlrm_flags

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
        return click_command.run(values)

    return run


def losses(path="log.json"):
    """Returns the losses of steps and tests in the order of a run's log."""
    with open(path) as file:
        entries = [json.loads(line.removeprefix("DLLL ")) for line in file]
    data = [entry["data"] for entry in entries if entry["type"] == "LOG" and entry["step"] != []]
    return [e[key] for e in data for key in ("loss", "test_log_loss") if key in e]


def test_fractions_are_tested_by_their_loss_alone(command, capsys):
    summary = command("--amp", "--test_freq=4")
    found = losses()
    assert len(found) == 10 + 3 - 1  # steps but the first, and tests
    assert max(found) - min(found) > 0.02
    assert summary["best_validation_loss"] == min(found[i] for i in (3, 8, 11))
    assert not any("auc" in name for name in summary)
    out = capsys.readouterr().out
    assert "note: the targets are fractions and no clicks, so tests report the loss, no AUC" in out
