"""Models that are written and saved beside others, or damaged, are whole or named."""

import shutil

import pytest

import dlrm
from dlrm.serving.network.recalibration import of_sampling_rate, write_recalibrated
from dlrm.train.checkpoints.checkpoint import Checkpoint


def write_recalibration(checkpoint, directory):
    write_recalibrated(checkpoint, of_sampling_rate(0.5), directory)


def test_a_recalibration_that_the_manifest_does_not_list_is_named(trained, tmp_path):
    first = Checkpoint.open(trained.checkpoint).path
    write_recalibration(first, tmp_path / "recalibrated")
    shutil.copytree(first, tmp_path / "model")
    shutil.copytree(tmp_path / "recalibrated/recalibration", tmp_path / "model/recalibration")
    with pytest.raises(ValueError, match=r"recalibration\.json: not in .* nothing checks it"):
        dlrm.load(tmp_path / "model")


def test_a_model_is_not_written_into_itself(trained, tmp_path):
    shutil.copytree(Checkpoint.open(trained.checkpoint).path, tmp_path / "model")
    model = dlrm.load(tmp_path / "model")
    with pytest.raises(ValueError, match="inner: expected a directory outside of"):
        model.save(tmp_path / "model/inner")
    with pytest.raises(ValueError, match="inner: expected a directory outside of"):
        write_recalibration(tmp_path / "model", tmp_path / "model/inner")


def test_a_model_is_saved_after_a_change_of_the_working_directory(trained, tmp_path, monkeypatch):
    shutil.copytree(Checkpoint.open(trained.checkpoint).path, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    model = dlrm.load("model")
    monkeypatch.chdir("/")
    model.save(tmp_path / "copy")
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "copy").glob("*.safetensors")}
    assert modes == {(tmp_path / "copy").stat().st_mode & 0o666}  # others may read them
    dlrm.load(tmp_path / "copy")
