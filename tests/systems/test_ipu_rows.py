"""IPU rows start at reduced size."""

import numpy as np
import pytest
from full_size import resolved

from dlrm.language import command as bert, flags as bert_flags
from dlrm.published.rows import catalog
from dlrm.published.smoke import smoke_flags
from dlrm.vision import command as cnn, flags as cnn_flags

pytestmark = pytest.mark.long
ROWS = {name: row for name, row in catalog().items() if name.startswith("ipu/")}
_FAST = (
    *("ipu/rn50/train-m2000", "ipu/effb4-g1/train-m2000-as-titled/full"),
    *("ipu/rn50/infer-synthetic/b1", "ipu/bert-base/pretrain-384-pod16"),
)


@pytest.fixture
def run(tmp_path, monkeypatch, one_thread):
    monkeypatch.chdir(tmp_path)

    def run(row):
        command, flags = (cnn, cnn_flags) if row.command == "cnn" else (bert, bert_flags)
        return command.run(flags.parse([*row.arguments(), *smoke_flags(row)]))

    return run


@pytest.mark.parametrize("name", _FAST)  # tests/scripts/systems runs all, by the real command
def test_it_starts_at_reduced_size(name, run, tmp_path, capsys):
    row = ROWS[name]
    summary = run(row)
    out = capsys.readouterr().out
    values, _ = resolved(row)
    assert ("note: --pipeline_splits:" in out) == bool(values["pipeline_splits"])
    if row.rule == "ipu_inference":
        assert summary["mean_inference_throughput"] > 0
        latencies = [summary[f"{name}_inference_latency"] for name in ("min", "mean", "max")]
        assert latencies == sorted(latencies)
        return
    assert ("the global batch stays" in out) == (row.processes > 1)
    # ln 1000 = 6.9 for 1,000 classes; ln 240 = 5.5 for 120 words and two orders.
    chance = 7.6 if row.command == "cnn" else np.log(240)
    assert summary["training_loss"] == pytest.approx(chance, rel=0.15)
    assert summary["average_train_throughput"] > 0
    assert (tmp_path / "checkpoints").exists() == (values["save_checkpoint_path"] is not None)


def test_checkpoints_of_a_small_training_are_validated(run, capsys):
    run(ROWS["ipu/rn50/train-m2000/full"])
    summary = run(ROWS["ipu/cnn/validate-checkpoints"])
    assert summary["best_loss"] > 1
    assert "model: resnet50" in capsys.readouterr().out
