"""Best and newest checkpoint: the newest one decides, whatever a killed run left."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from test_checkpoint import flip, parameters
from toy import Line, Points, trainer

from dlrm.manifest import sealed_json, write_manifest
from dlrm.scripts.checkpoint import describe_run
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.directory import (
    CheckpointDirectory,
    best_checkpoint,
    best_record,
    last_checkpoint,
)


def save(run, step, best):
    progress = {"step": step, "best": {"auc": best / 100, "step": best} if best else {}}
    Checkpoint.save(run / f"step-{step:09d}", parameters(), {"flags": {}}, progress)


def mark(run, step):
    CheckpointDirectory(run, keep=9).mark_best({"auc": step / 100, "step": step})


def test_the_newest_checkpoint_outdoes_a_pointer_that_a_killed_run_left_behind(tmp_path):
    save(tmp_path, 2, 2)
    mark(tmp_path, 2)
    save(tmp_path, 4, 4)  # and killed before it was marked
    assert (
        best_checkpoint(tmp_path) == Checkpoint.open(tmp_path).path == tmp_path / "step-000000004"
    )
    assert best_record(tmp_path) == {"auc": 0.04, "step": 4}
    assert [c["best"] for c in describe_run(tmp_path)["checkpoints"]] == [False, True]
    CheckpointDirectory(tmp_path).claim()
    assert json.loads((tmp_path / "best.json").read_text())["step"] == 4


def test_a_checkpoint_that_was_tested_after_it_was_saved_is_the_best_by_the_pointer(tmp_path):
    save(tmp_path, 2, 2)
    save(tmp_path, 4, 2)
    mark(tmp_path, 4)
    assert best_record(tmp_path)["step"] == 4


def test_without_a_tested_checkpoint_the_pointer_goes(tmp_path):
    save(tmp_path, 2, 2)
    mark(tmp_path, 2)
    save(tmp_path, 4, 0)
    assert best_checkpoint(tmp_path) is None
    CheckpointDirectory(tmp_path).claim()
    assert not (tmp_path / "best.json").exists()


def test_any_flipped_bit_of_the_pointer_is_named(tmp_path):
    save(tmp_path, 4, 4)
    mark(tmp_path, 4)
    pointer = tmp_path / "best.json"
    whole = pointer.read_bytes()
    for place in range(len(whole)):
        for bit in (1, 2, 16):
            damaged = bytearray(whole)
            damaged[place] ^= bit
            pointer.write_bytes(damaged)
            with pytest.raises(ValueError, match=r"best\.json"):
                Checkpoint.open(tmp_path)


def test_a_copy_that_somebody_made_is_neither_read_nor_pruned(tmp_path):
    run = CheckpointDirectory(tmp_path, keep=1)
    run.save(1, parameters(), {"flags": {}}, {})
    for name in ("step-000000001-backup", "step-1", "step-000000009.old"):
        shutil.copytree(tmp_path / "step-000000001", tmp_path / name)
    run.save(2, parameters(), {"flags": {}}, {})
    assert last_checkpoint(tmp_path).name == "step-000000002"
    assert len(list(tmp_path.glob("step-*"))) == 4


def test_a_link_to_a_checkpoint_is_not_pruned(tmp_path):
    run = CheckpointDirectory(tmp_path / "run", keep=1)
    run.save(1, parameters(), {"flags": {}}, {})
    (tmp_path / "run/step-000000001").rename(tmp_path / "elsewhere")
    (tmp_path / "run/step-000000001").symlink_to(tmp_path / "elsewhere")
    run.save(2, parameters(), {"flags": {}}, {})
    assert (tmp_path / "run/step-000000001/manifest.json").exists()


def test_a_run_without_its_best_checkpoint_says_so_before_it_goes_on(tmp_path):
    save(tmp_path, 4, 2)
    with pytest.raises(ValueError, match=r"best checkpoint, step-000000002, .*; name a checkpoint"):
        CheckpointDirectory(tmp_path).claim()


@pytest.mark.parametrize("freq", [5, 10])
def test_the_last_checkpoint_knows_that_it_is_the_best_without_the_pointer(tmp_path, freq):
    checkpoints = CheckpointDirectory(tmp_path, keep=1)
    run = trainer(
        Line([0.2, 0.3]), checkpoints=checkpoints, epochs=2, max_steps=15, checkpoint_freq=freq
    )
    run.fit(Points(), Points())
    (tmp_path / "best.json").unlink()
    assert best_record(tmp_path)["step"] == 15
    assert best_checkpoint(tmp_path).name == "step-000000015"


def test_a_run_that_was_killed_before_it_marked_its_best_goes_on_as_if_not(tmp_path):
    scores = [0.2, 0.1, 0.7, 0.3]

    def run(path, scores, epochs):
        checkpoints = CheckpointDirectory(path, keep=9)
        checkpoints.claim()
        made = trainer(Line(scores), checkpoints=checkpoints, epochs=epochs, checkpoint_freq=5)
        if last := last_checkpoint(path):
            made.resume(Checkpoint(last))
        summary = made.fit(Points(), Points())
        checkpoints.release()
        return made, summary

    whole, expected = run(tmp_path / "whole", scores, 4)
    run(tmp_path / "killed", scores[:2], 2)
    stale = (tmp_path / "killed/best.json").read_bytes()
    run(tmp_path / "killed", scores[2:3], 3)
    (tmp_path / "killed/best.json").write_bytes(stale)
    again, summary = run(tmp_path / "killed", scores[3:], 4)
    assert {n: v for n, v in summary.items() if "throughput" not in n} == {
        n: v for n, v in expected.items() if "throughput" not in n
    }
    assert again.progress.best == whole.progress.best
    assert again.progress.best["step"] == 30
    assert all(map(torch.equal, again.task.weights(), whole.task.weights()))


def test_what_is_read_is_not_pruned_until_it_was_read(tmp_path):
    run = CheckpointDirectory(tmp_path, keep=1)
    run.save(1, parameters(), {"flags": {}}, {})
    with Checkpoint.held(tmp_path) as found:
        run.save(2, parameters(), {"flags": {}}, {})
        found.load(parameters(trained=False))
        assert found.path.is_dir()
    run.save(3, parameters(), {"flags": {}}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000003"]


def test_what_a_killed_process_was_removing_is_passed_over_and_then_removed(tmp_path):
    save(tmp_path, 4, 4)
    going = tmp_path / ".step-000000002.removed-77"
    going.mkdir()
    (going / "manifest.json").write_text("{}")
    (tmp_path / ".best.json.partial-78").write_text("{")
    assert (
        Checkpoint.open(tmp_path).path == last_checkpoint(tmp_path) == tmp_path / "step-000000004"
    )
    assert len(describe_run(tmp_path)["checkpoints"]) == 1
    CheckpointDirectory(tmp_path).claim()
    assert [path.name for path in tmp_path.glob(".*")] == [".lock"]


def test_a_checkpoint_is_under_its_name_only_while_it_is_whole(tmp_path):
    """Another process reads while many are pruned."""
    run = CheckpointDirectory(tmp_path, keep=1)
    run.save(1, parameters(), {"flags": {}}, {})
    code = (
        "import sys; from pathlib import Path\n"
        "from dlrm.train.checkpoints.checkpoint import Checkpoint\n"
        "print('looks', flush=True)\n"
        "while not Path(sys.argv[1], 'over').exists():\n"
        "    with Checkpoint.held(sys.argv[1]) as found:\n"
        "        found.verify()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as other:
        assert other.stdout.readline() == b"looks\n"
        for step in range(2, 40):
            run.save(step, parameters(trained=False), {"flags": {}}, {})
        (tmp_path / "over").touch()
        _, errors = other.communicate()
    assert other.returncode == 0, errors.decode()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_no_number_is_named_and_nothing_is_loaded(tmp_path, value):
    save(tmp_path, 4, 0)
    path = tmp_path / "step-000000004/tables/1.bin"
    rows = np.fromfile(path, np.float32).reshape(20, 4)
    rows[17, 2] = value
    rows.tofile(path)
    write_manifest(path.parent.parent, "checkpoint")
    other = parameters(trained=False, seed=5)
    before = [table.clone() for table in other.model.embeddings.tables()]
    with pytest.raises(ValueError, match=rf"1\.bin: row \[17, 2\]: expected a finite .* {value}"):
        Checkpoint(path.parent.parent).load(other)
    assert all(map(torch.equal, other.model.embeddings.tables(), before))


def test_a_dense_weight_that_is_no_number_is_named(tmp_path):
    broken = parameters()
    with torch.no_grad():
        broken.model.top_mlp[0].weight[3, 1] = np.nan
    Checkpoint.save(tmp_path / "c", broken, {"flags": {}}, {})
    with pytest.raises(ValueError, match=r"dense\.safetensors: top_mlp\.0\.weight \[3, 1\]"):
        Checkpoint(tmp_path / "c").load(parameters(trained=False))


def test_very_large_weights_are_numbers(tmp_path):
    large = parameters()
    with torch.no_grad():
        large.model.top_mlp[0].weight.fill_(3e38)  # the sum is infinite
    Checkpoint.save(tmp_path / "c", large, {"flags": {}}, {})
    Checkpoint(tmp_path / "c").load(parameters(trained=False))


@pytest.mark.parametrize("step", [-1, "4", None])
def test_a_pointer_to_a_step_that_is_none_is_named(tmp_path, step):
    save(tmp_path, 4, 4)
    (tmp_path / "best.json").write_text(sealed_json({"auc": 0.7, "step": step}))
    with pytest.raises(ValueError, match=r"best\.json: expected the best step, got .*: damaged"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "progress.json", "dense.safetensors"])
def test_whatever_reads_a_damaged_file_names_it(tmp_path, name):
    save(tmp_path, 4, 4)
    flip(tmp_path / "step-000000004" / name)
    with pytest.raises(ValueError, match=rf"{name}: expected CRC-32"):
        describe_run(tmp_path)
