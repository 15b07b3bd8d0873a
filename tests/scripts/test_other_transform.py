"""Every command that brings a model and a dataset together compares their transforms first."""

import json
import re
import shutil

import forked
import numpy as np
import pytest
from small_dataset import write_dataset

import dlrm
from dlrm.serving.network.recalibration import (
    load_recalibration,
    of_sampling_rate,
    write_recalibrated,
)
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.nvidia import write_nvidia

DIFFERS = r"its transform is not that of .*: categorical 0: id 1 is \w{8} for the model and \w{8}"
COMMANDS = {
    "test": ["--mode=test"],
    "train": ["--max_steps=2", "--save_checkpoint_path=next"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_dataset_whose_ids_mean_other_values_is_refused(
    command, trained, other_ids, tmp_path, capsys, name
):
    loaded = [f"--load_checkpoint_path={trained.checkpoint}", *COMMANDS[name]]
    command(*loaded, data=trained.dataset, model=[])
    assert "its transform is not" not in capsys.readouterr().out
    again = [flag.replace("=next", "=other") for flag in loaded]
    with pytest.raises(ValueError, match=DIFFERS):
        command(*again, data=other_ids, model=[])
    assert not (tmp_path / "other").exists()
    command(*again, "--allow_other_transform", data=other_ids, model=[])
    out = capsys.readouterr().out
    assert out.count(f"note: {other_ids}: its transform is not that of") == 1


def test_what_nvidia_saved_is_scored_by_the_transform_of_a_dataset(trained, other_ids, tmp_path):
    saved = Checkpoint.open(trained.checkpoint)
    write_nvidia(saved, tmp_path / "theirs")
    shutil.rmtree(tmp_path / "theirs" / "transform")  # NVIDIA's program saves none
    Checkpoint(tmp_path / "theirs").copy(tmp_path / "ours")
    aucs = []
    for form in ("theirs", "ours"):
        known = [f"--checkpoint={tmp_path / form}", f"--dataset={trained.dataset}"]
        scores = [*known, f"--output={tmp_path / 'scores.npy'}"]
        for name, *words in (
            ("evaluate", *known, "--bootstrap=0", f"--against={trained.checkpoint}"),
            ("predict", *scores, f"--input={trained.dataset}"),
        ):
            done = forked.call(f"dlrm.scripts.{name}", *words, code=0)
            aucs.append(float(re.search(r"\b(?:auc|AUC) +(\d\.\d+)", done.stdout)[1]))
    assert max(aucs) - min(aucs) < 0.01  # evaluate shows as many digits as the interval has
    refused = forked.call("dlrm.scripts.predict", *scores, f"--input={other_ids}")
    assert (refused.returncode, bool(re.search(DIFFERS, refused.stderr))) == (1, True)


def test_a_run_does_not_go_on_with_another_transform(command, trained, other_ids):
    run = ["--max_steps=2", "--save_checkpoint_path=run"]
    command(*run, data=trained.dataset)
    resumed = ["--max_steps=3", "--save_checkpoint_path=run", "--resume"]
    with pytest.raises(ValueError, match=DIFFERS):
        command(*resumed, data=other_ids)
    with pytest.raises(ValueError, match="dataset's first and last batch"):  # its data differs
        command(*resumed, "--allow_other_transform", data=other_ids)
    command(*resumed, data=trained.dataset)


def test_a_dataset_without_transform_goes_on_with_a_note(command, trained, tmp_path, capsys):
    sizes = json.loads((Checkpoint.open(trained.checkpoint).path / "config.json").read_text())
    foreign = write_dataset(tmp_path / "data", table_sizes=sizes["dataset"]["table sizes"])
    command("--mode=test", f"--load_checkpoint_path={trained.checkpoint}", data=foreign, model=[])
    out = capsys.readouterr().out
    assert f"note: {foreign} has no fitted transform, so nothing tells" in out


def test_a_model_without_transform_goes_on_without_a_word(command, trained, tmp_path, capsys):
    sizes = json.loads((Checkpoint.open(trained.checkpoint).path / "config.json").read_text())
    foreign = write_dataset(tmp_path / "data", table_sizes=sizes["dataset"]["table sizes"])
    command("--max_steps=2", "--save_checkpoint_path=run", data=foreign)
    command("--mode=test", "--load_checkpoint_path=run", data=trained.dataset, model=[])
    assert "fitted transform" not in capsys.readouterr().out


def predict(trained, source, output, *flags):
    words = [f"--checkpoint={trained.checkpoint}", f"--input={source}", f"--output={output}"]
    return forked.call("dlrm.scripts.predict", *words, *flags)


def test_predict_refuses_it_as_input_and_as_dataset(trained, other_ids, tmp_path):
    output = tmp_path / "scores.npy"
    path = Checkpoint.open(trained.checkpoint).path
    named = f"error: {other_ids}: its transform is not that of {path}"
    for source, flags in (
        (other_ids, []),
        (trained.log, [f"--dataset={other_ids}"]),
        (other_ids, [f"--dataset={trained.dataset}"]),
    ):
        done = predict(trained, source, output, *flags)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert done.stderr.startswith(named)
        assert not output.exists()
    done = predict(trained, other_ids, output, "--allow_other_transform")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"note: {other_ids}: its transform is not that of")
    assert len(np.load(output)) == len(trained.lines)


def test_load_refuses_it_and_goes_on_where_it_is_told_to(trained, other_ids):
    with pytest.raises(ValueError, match=DIFFERS):
        dlrm.load(trained.checkpoint, other_ids)
    with pytest.warns(UserWarning, match="its transform is not that of"):
        model = dlrm.load(trained.checkpoint, other_ids, allow_other_transform=True)
    rows = trained.rows[:9]
    scores = dlrm.load(trained.checkpoint).predict(rows)
    np.testing.assert_array_equal(model.predict(rows), scores)  # the model's own is taken


def test_a_recalibration_that_is_not_carried_over_is_said(command, trained, tmp_path, capsys):
    recalibrated, plain = tmp_path / "recalibrated", Checkpoint.open(trained.checkpoint).path
    write_recalibrated(plain, of_sampling_rate(0.1), recalibrated)
    loaded = f"--load_checkpoint_path={recalibrated}"
    command(loaded, "--max_steps=2", "--save_checkpoint_path=next", data=trained.dataset, model=[])
    said = f"note: the recalibration (sampling) of {recalibrated} is not carried over"
    assert said in capsys.readouterr().out
    assert load_recalibration(Checkpoint.open(tmp_path / "next").path) is None
    command(loaded, "--mode=test", data=trained.dataset, model=[])
    said = f"note: scores are without the recalibration (sampling) of {recalibrated}"
    assert said in capsys.readouterr().out
    command(f"--load_checkpoint_path={plain}", "--mode=test", data=trained.dataset, model=[])
    assert "recalibration" not in capsys.readouterr().out
